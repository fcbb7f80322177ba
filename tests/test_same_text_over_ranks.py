"""A text is one and the same whether one rank computes it or several, and whatever the system does on the way to it."""

from typing import Any

import pytest
from planes_in_process import LoadedModels, PlanesOfRanks
from synthetic_oracle import continue_greedily
from test_same_text import PROMPTS, SETTINGS, STEM

from blockplane.data_plane.kv_cache import KV_CACHE_DTYPES
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.models.synthetic_arithmetic import EOS_TOKEN_ID
from blockplane.data_plane.ranks.collectives import Ranks
from blockplane.protos.sampling import SamplingParams

NUM_TOKENS = 12
SOME = [STEM[:7], STEM[3:50], STEM, PROMPTS[-1]]
TWO, FOUR = ({"tensor_parallel_size": size} for size in (2, 4))
SHARED = {"tensor_parallel_size": 4, "context_parallel_size": 2}
WAYS: dict[str, dict[str, Any]] = {
    "plainly": {"prefix_caching": "off", "num_batched_tokens_buckets": (128,)},
    "with the prefix cache": {},
    "in chunks": {"num_batched_tokens_buckets": (16,)},
    "in small blocks of the kernel": {"kernel_block_size": 2},
    "with too few blocks": {"block_size": 4, "num_blocks": 120},
    "with drafts from the text": {"num_draft_tokens": 3},
    "with drafts from a model": {"num_draft_tokens": 5, "draft_source": "model", "draft_model": "synthetic"},
    "in an FP8 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "where contexts are shapes": {"decode_context_length_buckets": (16, 64, 192)},
    "unsegmented": {"segmented_prefill": "off", "num_batched_tokens_buckets": (192,)},
    "with all of these": {
        "block_size": 4,
        "num_blocks": 120,
        "num_batched_tokens_buckets": (16, 32),
        "kernel_block_size": 2,
        "num_draft_tokens": 4,
        "draft_source": "model",
        "draft_model": "synthetic",
        "kv_cache_dtype": "fp8_e4m3",
        "decode_context_length_buckets": (64, 96, 192),
    },
}
QUICK = [
    (TWO, "with all of these"),
    (FOUR, "with drafts from a model"),
    (SHARED, "with the prefix cache"),
    (SHARED, "in chunks"),
    (SHARED, "with too few blocks"),
    (SHARED, "with drafts from a model"),
    (SHARED, "with all of these"),
]
CASES = [
    pytest.param(group, way, id=f"{name}, {way}", marks=() if (group, way) in QUICK else pytest.mark.slow)
    for name, group in (("two ranks", TWO), ("four ranks", FOUR), ("four ranks that share positions by two", SHARED))
    for way in WAYS
]


def planes(kernel_block_size: int | None = None, num_blocks: int = 400, **settings: Any) -> PlanesOfRanks:
    """`num_blocks`: as many as a rank would have whose blocks nobody shares; theirs hold as many times more."""
    kv_cache_dtype = KV_CACHE_DTYPES[settings.get("kv_cache_dtype", "auto")]

    def synthetic(ranks: Ranks) -> SyntheticModel:
        return SyntheticModel("float32", kv_cache_dtype=kv_cache_dtype, ranks=ranks)

    def load(ranks: Ranks) -> LoadedModels:
        return synthetic(ranks), synthetic(ranks) if settings.get("draft_model") else None

    settings["num_blocks"] = num_blocks // settings.get("context_parallel_size", 1)
    return PlanesOfRanks(load, SETTINGS | settings, eos_token_ids=(EOS_TOKEN_ID,), kernel_block_size=kernel_block_size)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [continue_greedily(prompt, NUM_TOKENS) for prompt in SOME]


@pytest.mark.parametrize(("group", "way"), CASES)
def test_every_way_over_ranks_leads_to_the_same_texts(
    group: dict[str, int], way: str, expected: list[list[int]]
) -> None:
    system = planes(**WAYS[way], **group)
    # All of them twice: the second time they find what the first left behind.
    for _ in range(2):
        for prompt in SOME:
            system.submit(prompt, SamplingParams(NUM_TOKENS))
    system.run()
    assert list(system.texts.values()) == expected * 2
    statistics = system.scheduler.statistics()
    assert (statistics.num_preemptions > 0) == ("num_blocks" in WAYS[way])
    assert (statistics.num_cached_tokens > 0) == (way not in ("plainly", "unsegmented"))
    assert (statistics.num_accepted_tokens > 0) == ("draft_model" in WAYS[way])
    assert statistics.kv_cache_usage == 0
    # A rank's caches have the places of its own positions alone, in blocks that span those of all who share them.
    block_size = WAYS[way].get("block_size", SETTINGS["block_size"])
    assert system.scheduler.configure.block_size == block_size * group.get("context_parallel_size", 1)
    caches = [cache for model, _ in system.models for attention in model.attentions for cache in attention.caches or ()]
    assert {cache.shape[1] for cache in caches} == {WAYS[way].get("kernel_block_size", block_size)}


def test_ranks_draw_the_same_samples_as_one() -> None:
    """Texts of three ids repeat themselves, so that what is guessed from them is often right."""
    params = SamplingParams(NUM_TOKENS, temperature=8.0, ignore_eos=True, allowed_token_ids=(65, 66, 67))
    texts = []
    for group in ({}, TWO, SHARED):
        system = planes(**WAYS["with drafts from the text"], **group)
        for seed, prompt in enumerate(SOME):
            system.submit(prompt, params, seed)
        system.run()
        texts.append(system.texts)
        assert system.scheduler.statistics().num_accepted_tokens > 0
    assert texts[0] == texts[1] == texts[2]
    assert len({tuple(text) for text in texts[0].values()}) == len(SOME)
