"""A second model that guesses: its KV, its shapes, and what it must have in common with the first."""

from dataclasses import replace

import pytest
import torch
from drafting import GREEDY, imperfect_twin, num_drafted, perfect_twin, planes_with, target, text_of
from planes_in_process import Planes
from synthetic_oracle import continue_greedily
from test_graphs import TinyModel
from torch import Tensor

from blockplane.control_plane.engine.kv_planning import RankKV, plan_kv_cache
from blockplane.data_plane.attention import Attention, AttentionBatches, AttentionSpec
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.draft_model import DraftModel
from blockplane.data_plane.graphs import Shape, shapes_of
from blockplane.data_plane.kv_cache import attentions_of, layer_kv_specs
from blockplane.data_plane.loading.named import load_draft_model, load_named
from blockplane.protos.config import load_config
from blockplane.protos.errors import ConfigurationError, ProtocolError

PROMPT = [(7 * index) % 250 for index in range(41)]


def draft_model_of(planes: Planes) -> DraftModel:
    drafts = planes.runner._drafts
    assert isinstance(drafts, DraftModel)
    return drafts


# -- its KV ------------------------------------------------------------------------------------------------------------


def test_a_draft_model_s_layers_stand_behind_the_model_s_under_names_of_their_own() -> None:
    names = [spec.name for spec in layer_kv_specs(target(), perfect_twin())]
    assert names[:3] == [spec.name for spec in layer_kv_specs(target())]
    assert names[3:] == [f"draft.{name}" for name in names[:3]]


def test_layers_of_both_models_never_share_a_group_and_a_tensor() -> None:
    """They would overwrite each other's KV; all caches here are of one size, and so they could."""
    planes = planes_with(2, perfect_twin())
    places = [
        (attention.group, (attention.caches or ())[0].data_ptr())
        for attention in attentions_of(target(), perfect_twin())
    ]
    assert len(set(places)) == 6
    assert len(planes.runner.configure.kv_cache_groups) > 1


def test_all_drafts_of_a_twin_are_accepted_and_each_step_brings_as_many_tokens_as_it_may() -> None:
    planes = planes_with(4, perfect_twin())
    assert text_of(planes, PROMPT, replace(GREEDY, max_tokens=31)) == continue_greedily(PROMPT, 31, ignore_eos=True)
    assert [len(result.token_ids) for result in planes.results] == [1, 5, 5, 5, 5, 5, 5]
    assert num_drafted(planes) == (24, 24)


def test_a_cached_prefix_holds_the_draft_model_s_kv_too() -> None:
    """A prompt, then the same with its answer and a question behind it, which both models find in the cache."""
    planes = planes_with(3, perfect_twin(), num_batched_tokens_buckets=(16,))
    answer = text_of(planes, PROMPT)
    for prompt in (PROMPT, [*PROMPT, *answer], [*PROMPT, *answer, 1, 2, 3]):
        cached_before = planes.scheduler.statistics().num_cached_tokens
        assert text_of(planes, prompt) == continue_greedily(prompt, 24, ignore_eos=True)
        num_cached = planes.scheduler.statistics().num_cached_tokens - cached_before
        assert num_cached == (len(prompt) - 1) // 4 * 4
    num_drafts, num_accepted = num_drafted(planes)
    assert num_drafts == num_accepted > 50


def test_a_twin_is_right_wherever_windows_left_their_blocks_to_others() -> None:
    planes = planes_with(3, perfect_twin(), num_blocks=150)
    prompts = [[*range(number, number + 50)] for number in range(4)]
    for prompt in prompts:
        planes.submit(prompt, replace(GREEDY, max_tokens=50))
    planes.run()
    assert list(planes.texts.values()) == [continue_greedily(prompt, 50, ignore_eos=True) for prompt in prompts]
    num_drafts, num_accepted = num_drafted(planes)
    assert num_drafts == num_accepted > 100


def test_kernel_blocks_of_their_own_size_hold_the_draft_model_s_kv_too() -> None:
    planes = planes_with(3, perfect_twin(), kernel_block_size=2)
    assert all((attention.caches or ())[0].shape[1] == 2 for attention in perfect_twin().attentions)
    assert text_of(planes, PROMPT) == continue_greedily(PROMPT, 24, ignore_eos=True)
    num_drafts, num_accepted = num_drafted(planes)
    assert num_drafts == num_accepted > 0


# -- its shapes --------------------------------------------------------------------------------------------------------


def test_its_shapes_are_built_before_the_first_step_and_none_after() -> None:
    planes = planes_with(3, imperfect_twin())
    graphs = draft_model_of(planes).graphs
    assert set(graphs.num_runs) == set(shapes_of(replace(planes.runner.configure, num_draft_tokens=0)))
    num_builds = graphs.num_builds
    for number in range(3):
        planes.submit(PROMPT[: 10 * number + 1], replace(GREEDY, max_tokens=10))
    planes.run()
    assert graphs.num_builds == num_builds == len(graphs.num_runs)


def test_a_step_costs_a_forward_for_each_draft_and_one_more_and_rows_without_room_drop_out() -> None:
    """Of two rows one has room for a token more: it computes its newest and no draft."""
    planes = planes_with(3, perfect_twin())
    planes.submit(PROMPT, GREEDY)
    planes.submit(PROMPT[1:8], replace(GREEDY, max_tokens=2))
    planes.step(num_ahead=1)
    runs = draft_model_of(planes).graphs.num_runs
    before = dict(runs)
    planes.step(num_ahead=1)
    news = {shape: runs[shape] - before[shape] for shape in runs if runs[shape] > before[shape]}
    assert news == {Shape(2, 2): 1, Shape(1, 1): 3}
    assert planes.results[-1].num_draft_tokens == 3


# -- what must fit -----------------------------------------------------------------------------------------------------


class WideModel(TinyModel):
    """Keys and values of more channels than the tiny model's, and so more bytes."""

    def __init__(self) -> None:
        self.attentions = (Attention(AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=6, scale=1.0)),)

    def forward(self, input_ids: Tensor, positions: Tensor, batches: AttentionBatches) -> Tensor:
        states = torch.stack((input_ids, positions), dim=1).float().repeat(1, 3)[:, None]
        return self.attentions[0](states, states, states, batches).flatten(1)


def test_layers_of_one_kind_may_differ_in_bytes_and_have_one_group() -> None:
    expected = text_of(planes_with(model=WideModel()), PROMPT)
    planes = planes_with(3, TinyModel(), model=WideModel())
    assert text_of(planes, PROMPT) == expected
    (group,) = planes.runner.configure.kv_cache_groups
    assert group.layer_names == ("layers.0.self_attn", "draft.layers.0.self_attn")
    assert len({tensor.size for tensor in planes.runner.configure.kv_cache_tensors}) == 2


def test_layers_of_several_kinds_must_take_equal_bytes_and_what_does_not_is_named() -> None:
    config = load_config({"num_draft_tokens": "3"}, {})
    ranks = [RankKV(layer_kv_specs(target(), TinyModel()), 1 << 30)]
    with pytest.raises(ConfigurationError, match=r"draft\.layers\.0\.self_attn"):
        plan_kv_cache(config, ranks, CPU.bucket_rules, 128)


def test_an_engine_that_counts_on_more_drafts_than_the_worker_proposes_is_refused_with_both_numbers() -> None:
    with pytest.raises(ProtocolError, match=r"counts on 5 draft tokens, and this worker proposes 3;.*num_draft_tokens"):
        planes_with(5, perfect_twin(), num_proposed=3)


def test_an_engine_that_counts_on_fewer_gets_fewer_and_one_that_counts_on_none_gets_none() -> None:
    for counted_on, most in (1, 2), (0, 1):
        planes = planes_with(counted_on, perfect_twin(), num_proposed=3)
        assert text_of(planes, PROMPT) == continue_greedily(PROMPT, 24, ignore_eos=True)
        assert max(len(result.token_ids) for result in planes.results) == most


# -- the worker process ------------------------------------------------------------------------------------------------


def loaded_draft_model(**settings: str) -> object:
    config = load_config({"model": "synthetic", "num_draft_tokens": "2", **settings}, {})
    return load_draft_model(config, load_named(config.model, config)[1])


def test_the_draft_model_that_the_settings_name_is_loaded_if_there_are_drafts() -> None:
    settings = {"draft_source": "model", "draft_model": "synthetic"}
    assert loaded_draft_model(**settings) is not None
    assert loaded_draft_model(**settings, num_draft_tokens="0") is None
    assert loaded_draft_model() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 9}, r"vocabulary of 258 tokens and synthetic one of 9;"),
        ({"max_model_len": 9000}, r"made for 4096 tokens and max_model_len is 9000;"),
    ],
)
def test_a_draft_model_that_cannot_guess_all_that_the_target_may_say_is_refused(
    changes: dict[str, int], message: str
) -> None:
    config = load_config(
        {"model": "synthetic", "num_draft_tokens": "2", "draft_source": "model", "draft_model": "synthetic"}, {}
    )
    info = replace(load_named("synthetic", config)[1], **changes)
    with pytest.raises(ConfigurationError, match=message):
        load_draft_model(config, info)
