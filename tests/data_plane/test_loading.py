"""Checkpoints on disk: GGUF equals Hugging Face, special tokens are told apart from text, and faults are named."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import MODELS, write_gguf
from tokenizers import Tokenizer

from blockplane.data_plane.loading.build import load_model
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.protos.errors import ConfigurationError, ModelError


@pytest.fixture(params=MODELS)
def twins(request, tmp_path, randomized, save_checkpoint):
    """The same model as a Hugging Face directory and as a GGUF file."""
    model = randomized(MODELS[request.param]())
    return save_checkpoint(model, tmp_path / "hf"), write_gguf(tmp_path / "tiny.gguf", model, request.param)


@pytest.fixture
def tiny_llama(tmp_path, randomized, save_checkpoint) -> Path:
    return save_checkpoint(randomized(MODELS["llama"]()), tmp_path)


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_gguf_gives_the_logits_of_its_hugging_face_twin(twins, block_kv_driver):
    token_ids = torch.randint(0, 96, (24,)).tolist()
    from_hf, from_gguf = (
        block_kv_driver(load_model(open_checkpoint(str(path)), "float32"), 4, 24).prefill(token_ids) for path in twins
    )
    torch.testing.assert_close(from_gguf, from_hf, rtol=1e-4, atol=1e-4 * from_hf.abs().max().item())


def test_quantized_tensors_are_read_in_pieces_as_gguf_reads_them_whole(tmp_path):
    from blockplane.data_plane.loading.gguf_file import GgufFile

    values = torch.randn(1100, 256).numpy()
    kinds = [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F16]
    writer = gguf.GGUFWriter(tmp_path / "quantized.gguf", "llama")
    stored = {kind.name: gguf.quantize(values, kind) for kind in kinds}
    for kind in kinds:
        writer.add_tensor(kind.name, stored[kind.name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "quantized.gguf")
    for kind in kinds:
        assert (file.tensor(kind.name) == gguf.dequantize(stored[kind.name], kind)).all(), kind.name


def test_loading_logs_each_tenth_and_a_final_line_with_bytes_and_seconds(tiny_llama, caplog):
    caplog.set_level(logging.INFO)
    load_model(open_checkpoint(str(tiny_llama)), "bfloat16")
    assert "100 %" in caplog.messages[-2]
    assert 2 < len(caplog.messages) <= 11
    num_bytes = sum(
        # Norms stay float32.
        tensor.numel() * (4 if "norm" in name else 2)
        for name, tensor in load_file(tiny_llama / "model.safetensors").items()
    )
    assert f"{num_bytes} bytes" in caplog.messages[-1]


def test_bos_is_told_apart_and_never_added_by_the_tokenizer_itself(tiny_llama):
    checkpoint = open_checkpoint(str(tiny_llama))
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json.decode())
    assert checkpoint.bos_token_id == 1
    assert tokenizer.encode("a t7").ids == [3, 7]


@pytest.mark.parametrize(("adds", "expected"), [(False, None), (True, 1)])
def test_tokenizer_config_decides_whether_bos_is_added(tiny_llama, adds, expected):
    settings = {"add_bos_token": adds, "bos_token": {"content": "<s>"}}
    (tiny_llama / "tokenizer_config.json").write_text(json.dumps(settings))
    assert open_checkpoint(str(tiny_llama)).bos_token_id == expected


def test_a_tokenizer_that_adds_nothing_has_no_bos(tiny_llama):
    document = json.loads((tiny_llama / "tokenizer.json").read_bytes())
    (tiny_llama / "tokenizer.json").write_text(json.dumps(document | {"post_processor": None}))
    assert open_checkpoint(str(tiny_llama)).bos_token_id is None


def test_generation_config_outranks_config(tiny_llama):
    (tiny_llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9], "temperature": 0.6}))
    checkpoint = open_checkpoint(str(tiny_llama))
    assert checkpoint.eos_token_ids == (2, 9)
    assert checkpoint.defaults.temperature == 0.6


CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("in_config", "in_file", "expected"),
    [
        (None, None, None),
        (CHAT, None, CHAT),
        ([{"name": "tools", "template": "t"}, {"name": "default", "template": CHAT}], None, CHAT),
        ("older", CHAT, CHAT),
    ],
)
def test_a_chat_template_is_found_wherever_hugging_face_puts_it(tiny_llama, in_config, in_file, expected):
    if in_config is not None:
        (tiny_llama / "tokenizer_config.json").write_text(json.dumps({"chat_template": in_config}))
    if in_file is not None:
        (tiny_llama / "chat_template.jinja").write_text(in_file)
    assert open_checkpoint(str(tiny_llama)).chat_template == expected


def test_a_gguf_files_chat_template_is_found(tmp_path, randomized, monkeypatch):
    model = randomized(MODELS["llama"]())
    assert open_checkpoint(str(write_gguf(tmp_path / "without.gguf", model, "llama"))).chat_template is None
    write_rest = gguf.GGUFWriter.write_header_to_file
    monkeypatch.setattr(
        gguf.GGUFWriter, "write_header_to_file", lambda writer: (writer.add_chat_template(CHAT), write_rest(writer))
    )
    assert open_checkpoint(str(write_gguf(tmp_path / "with.gguf", model, "llama"))).chat_template == CHAT


def test_a_missing_tensor_is_named(tiny_llama):
    edit_tensors(tiny_llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(open_checkpoint(str(tiny_llama)), "float32")


def test_an_unexpected_tensor_is_named(tiny_llama):
    edit_tensors(tiny_llama, lambda tensors: tensors.update({"model.layers.0.router.weight": torch.ones(2)}))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.router\.weight"):
        load_model(open_checkpoint(str(tiny_llama)), "float32")


def test_a_misshapen_tensor_is_named(tiny_llama):
    edit_tensors(tiny_llama, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has the shape \[7\].*\[48\]"):
        load_model(open_checkpoint(str(tiny_llama)), "float32")


def test_rotary_frequencies_in_a_checkpoint_are_harmless(tiny_llama):
    edit_tensors(
        tiny_llama, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    load_model(open_checkpoint(str(tiny_llama)), "float32")


def test_an_unknown_dtype_is_refused(tiny_llama):
    with pytest.raises(ConfigurationError, match="float8"):
        load_model(open_checkpoint(str(tiny_llama)), "float8")


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(tiny_llama, missing):
    (tiny_llama / missing).unlink()
    with pytest.raises(ModelError, match=missing.replace(".", r"\.")):
        open_checkpoint(str(tiny_llama))


def test_a_path_that_is_no_model_is_told_what_is_accepted(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json.*\.gguf.*gemma3-270m"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"), [(b"PK\x03\x04 and more", "not a GGUF file"), (b"GGUF\x03\0", "cut short")]
)
def test_a_file_that_is_not_whole_gguf_is_refused(tmp_path, content, reason):
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        open_checkpoint(str(tmp_path / "broken.gguf"))


def test_an_unknown_gguf_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="mamba"):
        open_checkpoint(str(tmp_path / "mamba.gguf"))
