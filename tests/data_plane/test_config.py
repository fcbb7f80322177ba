"""Reading `config.json`: two spellings mean the same, and what the decoder lacks is refused by name."""

import pytest

from blockplane.data_plane.models.config import RopeConfig
from blockplane.data_plane.models.config_json import parse_config
from blockplane.protos.errors import ModelError

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], **SIZES}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], **SIZES, "num_hidden_layers": 7, "head_dim": 8}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_llama_rope_reads_alike_in_both_spellings():
    older = parse_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    newer = parse_config(LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}})
    assert older == newer
    assert older.layers[0].rope.theta == 5e5
    divisors = older.layers[0].rope.divisors
    assert divisors[0] == 1.0, "the shortest wave is kept"
    assert divisors[-1] == 8.0, "the longest wave is divided by the factor"


def test_gemma_rope_reads_alike_in_both_spellings():
    older = parse_config(
        GEMMA
        | {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        | {"sliding_window": 16, "sliding_window_pattern": 3}
    )
    newer = parse_config(
        GEMMA
        | {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            },
        }
    )
    assert older == newer
    assert [layer.sliding_window for layer in older.layers] == [16, 16, None, 16, 16, None, 16]
    assert older.layers[2].rope == RopeConfig(2e6, (8.0,) * 4)
    assert older.layers[0].rope == RopeConfig(3e4)


def test_gemma_implies_its_pattern_and_tied_embeddings():
    config = parse_config(GEMMA)
    assert [layer.sliding_window is None for layer in config.layers] == [False] * 5 + [True, False]
    assert config.tied_embeddings
    assert config.layers[0].rope.theta == 10_000.0
    assert config.layers[5].rope.theta == 1_000_000.0


def test_a_setting_of_null_is_a_setting_left_out():
    config = parse_config(LLAMA | {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None})
    assert (config.head_dim, config.num_kv_heads) == (8, 4)


@pytest.mark.parametrize(("eos", "expected"), [(5, (5,)), ([5, 7], (5, 7)), (None, ())])
def test_end_of_text_may_be_one_id_or_several_or_none(eos, expected):
    assert parse_config(LLAMA | {"eos_token_id": eos}).eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        (LLAMA | {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA}, "vision"),
        ({"text_config": GEMMA}, "(none)"),
        (GEMMA | {"layer_types": ["full_attention"] * 6 + ["indexed_attention"]}, "Layer 6 is of kind indexed"),
        (GEMMA | {"layer_types": ["full_attention"] * 6}, "layer_types"),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"hidden_act": "relu"}, "relu"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts"),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "hidden_size"),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(config, named):
    with pytest.raises(ModelError) as refused:
        parse_config(config)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "Layer 1 is of kind linear_attention"),
        ({"layer_types": ["mamba", "attention"]}, "Layer 0 is of kind mamba"),
        ({"layers_block_type": ["attention", "hybrid"]}, "Layer 1 is of kind hybrid"),
        ({"block_types": ["attention", "recurrent"], "num_hidden_layers": 5}, "Layer 1 is of kind recurrent"),
        ({"architectures": ["MambaForCausalLM"]}, "Layer 0 is of kind MambaForCausalLM"),
        ({"architectures": ["FalconMambaForCausalLM"]}, "Layer 0 is of kind FalconMamba"),
        ({"architectures": ["RwkvForCausalLM"]}, "Layer 0 is of kind Rwkv"),
        ({"architectures": ["T5EncoderModel"]}, "Layer 0 is a layer of the encoder T5EncoderModel"),
        ({"architectures": ["BertModel"]}, "Layer 0 is a layer of the encoder BertModel"),
        ({"architectures": ["XLMRobertaForSequenceClassification"]}, "the encoder XLMRoberta"),
    ],
)
@pytest.mark.parametrize("known", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_layers_without_kv_are_refused_by_name_whatever_the_architecture(known, config, named):
    with pytest.raises(ModelError, match=named):
        parse_config(known | config)
