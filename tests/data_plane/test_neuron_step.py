"""The whole worker step over the kernels for NeuronCores.

They run by `nki.simulate`, AWS's where it is installed, else our emulator. Graphs are bound to their shapes without a
compiler; `test_neuron_backend` has one.
"""

from dataclasses import replace
from typing import Any

import nki
import pytest
import torch
from bound_shapes import bound
from planes_in_process import Planes
from synthetic_oracle import continue_greedily
from tiny_llama import tiny_llama

from blockplane.data_plane.backends import neuron
from blockplane.data_plane.backends.backend import Backend, Kernels
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.graphs import Shape
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.kernels import reference
from blockplane.kernels.nki.graph_attention import GraphAttention
from blockplane.kernels.nki.layout import to_head_major, to_token_major
from blockplane.protos.sampling import SamplingParams

SETTINGS = {
    "block_size": 16,
    "num_blocks": 64,
    "max_model_len": 256,
    "num_batched_tokens_buckets": (128, 256),
    "num_seqs_buckets": (4,),
    "kv_segment_size_buckets": (512,),
    "decode_context_length_buckets": (128, 256),
}
GREEDY = SamplingParams(3, ignore_eos=True)


@pytest.fixture(autouse=True)
def _target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


def run(kernel: Any, *arguments: Any) -> Any:
    return nki.simulate(kernel[1])(*arguments)


ATTENTION = GraphAttention(run)
BACKEND = Backend(
    name="neuron",
    device=torch.device("cpu"),
    kernels=Kernels(ATTENTION.write_kv, ATTENTION.decode_attention, ATTENTION.segmented_attention),
    bucket_rules=neuron.BUCKET_RULES,
    is_compiled=True,
    fuses_sampling=True,
    kv_cache_shape=neuron.head_major,
    build=bound,
)


def test_texts_are_the_oracle_s() -> None:
    """Three prompts in two steps, two packed in several groups, the last alone behind cached blocks of the first."""
    planes = Planes(SyntheticModel("bfloat16"), SETTINGS, backend=BACKEND)
    first = [(7 * index) % 250 for index in range(140)]
    prompts = [first, [30, 31, 32], [*first[:64], *range(100, 230)]]
    for prompt in prompts[:2]:
        planes.submit(prompt, GREEDY)
    planes.step(num_ahead=1)
    planes.submit(prompts[2], GREEDY)
    planes.run()
    assert list(planes.texts.values()) == [continue_greedily(prompt, 3, ignore_eos=True) for prompt in prompts]
    assert planes.scheduler.statistics().num_cached_tokens == 64
    runs = planes.runner.graphs.num_runs
    assert len(runs) == 5
    assert runs[Shape(256)] == runs[Shape(256, is_lone=True)] == 1


def test_a_text_is_the_oracle_s_with_drafts_and_kv_in_fp8() -> None:
    model = SyntheticModel("bfloat16", kv_cache_dtype="float8_e4m3fn")
    planes = Planes(model, {**SETTINGS, "num_draft_tokens": 2}, backend=BACKEND)
    prompt = [9, 8, 7] * 6
    planes.submit(prompt, replace(GREEDY, max_tokens=4))
    planes.run()
    assert planes.texts[0] == continue_greedily(prompt, 4, ignore_eos=True)


def test_a_llama_says_what_it_says_on_the_cpu_within_bfloat16() -> None:
    """Every token that it chooses is within 0.1 of the CPU's likeliest, whose logits run over more than 5."""
    prompts = [[index % 90 for index in range(3, 24)], [5], [(7 * index) % 96 for index in range(130)]]
    planes = Planes(tiny_llama(), SETTINGS, backend=BACKEND)
    for prompt in prompts:
        planes.submit(prompt, GREEDY)
    planes.run()
    for prompt, text in zip(prompts, planes.texts.values(), strict=True):
        judge = Planes(tiny_llama(), SETTINGS, backend=CPU)
        told = replace(GREEDY, max_tokens=1, prompt_logprobs=1)
        judge.submit([*prompt, *text], told)
        judge.run()
        (columns,) = [result.prompt_logprobs for result in judge.results if result.prompt_logprobs is not None]
        # Of each token of the text: its own, and that of the likeliest.
        own, likeliest = columns.logprobs.reshape(-1, 2)[-len(text) :].T
        assert (own > likeliest - 0.1).all()


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_packed_groups_are_the_reference_s(sliding_window: int | None) -> None:
    """A request over prior KV in two groups, a gap, one that fills a part of a group, and a bucket that ends empty."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(512, 2, 64, generator=generator).bfloat16()
    caches = [torch.randn(80, 16, 1, 64, generator=generator).bfloat16() for _ in range(2)]
    table = torch.full((6, 32), -1, dtype=torch.int32)
    table[0, :11] = 1 + torch.randperm(40, generator=generator)[:11]
    table[2, :3] = 41 + torch.randperm(30, generator=generator)[:3]
    bounds = torch.tensor([0, 140, 256, 290, 290, 290, 290], dtype=torch.int32)
    prior = torch.tensor([32, 0, 0, 0, 0, 0], dtype=torch.int32)
    settings = {"kv_segment_size": 512, "scale": 0.3, "sliding_window": sliding_window}
    right = reference.segmented_attention(query, *caches, table, bounds, prior, **settings)
    output = ATTENTION.segmented_attention(query, *map(to_head_major, caches), table, bounds, prior, **settings)
    assert (output.float() - right.float()).abs().max() < 1e-2
    is_padding = torch.ones(512, dtype=torch.bool)
    is_padding[:140] = is_padding[256:290] = False
    assert not output[is_padding].any()


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize(("kv_segment_size", "prior_tokens"), [(0, 0), (512, 368)])
def test_the_last_group_of_a_request_may_reach_beyond_its_table(
    kv_segment_size: int, prior_tokens: int, num_rows: int
) -> None:
    """140 tokens in two groups of 128, and alone in one of 256: unsegmented, and where the table ends with a segment
    of KV."""
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(256, 2, 64, generator=generator).bfloat16()
    caches = [torch.randn(40, 16, 1, 64, generator=generator).bfloat16() for _ in range(2)]
    table = torch.arange(1, 33, dtype=torch.int32).repeat(num_rows, 1)
    bounds, prior = torch.tensor([0, 140, 140][: num_rows + 1]), torch.tensor([prior_tokens, 0][:num_rows])
    bounds, prior = bounds.to(torch.int32), prior.to(torch.int32)
    settings = {"kv_segment_size": kv_segment_size, "scale": 0.3}
    right = reference.segmented_attention(query, *caches, table, bounds, prior, **settings)
    groups = []

    def grouped(kernel: Any, *arguments: Any) -> Any:
        groups.append(arguments[0].shape[:2])
        return run(kernel, *arguments)

    attention = GraphAttention(grouped)
    output = attention.segmented_attention(query, *map(to_head_major, caches), table, bounds, prior, **settings)
    assert (output.float() - right.float()).abs().max() < 1e-2
    assert groups == [(1, 256) if num_rows == 1 else (2, 128)]


@pytest.mark.parametrize(("max_tiles", "num_groups"), [(100, 1), (3, 2), (1, 4)])
def test_one_request_s_queries_are_as_few_equal_groups_as_fit(
    max_tiles: int, num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockplane.kernels.nki.graph_attention.max_units", lambda _: 2 * max_tiles)
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(512, 2, 32, generator=generator).bfloat16()
    caches = [torch.randn(40, 16, 1, 32, generator=generator).bfloat16() for _ in range(2)]
    table = torch.arange(1, 33, dtype=torch.int32)[None]
    bounds, prior = torch.tensor([0, 470], dtype=torch.int32), torch.tensor([32], dtype=torch.int32)
    settings = {"kv_segment_size": 512, "scale": 0.3}
    sizes = []

    def run_noted(kernel: Any, query: torch.Tensor, *arguments: Any) -> Any:
        sizes.append(len(query))
        return run(kernel, query, *arguments)

    right = reference.segmented_attention(query, *caches, table, bounds, prior, **settings)
    attention = GraphAttention(run_noted)
    output = attention.segmented_attention(query, *map(to_head_major, caches), table, bounds, prior, **settings)
    assert (output.float() - right.float()).abs().max() < 1e-2
    assert sizes == [num_groups]


def test_new_kv_lies_where_a_block_that_moves_finds_it() -> None:
    """Head-major here, token-major between workers."""
    generator = torch.Generator().manual_seed(2)
    key, value = (torch.randn(5, 2, 32, generator=generator).bfloat16() for _ in range(2))
    slots = torch.tensor([17, -1, 40, 63, 16])
    right = [torch.zeros(4, 16, 2, 32).bfloat16() for _ in range(2)]
    reference.write_kv(key, value, *right, slots)
    caches = [torch.zeros(neuron.head_major(4, 16, 2, 32)).bfloat16() for _ in range(2)]
    written = ATTENTION.write_kv(key, value, *caches, slots)
    for cache, returned, expected in zip(caches, written, right, strict=True):
        assert torch.equal(to_token_major(cache), expected)
        assert returned.data_ptr() == cache.data_ptr()
