"""A text is one and the same whatever the system does on the way to it: the synthetic model, to the token."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from planes_in_process import Planes
from synthetic_oracle import continue_greedily

from blockplane.data_plane.kv_cache import KV_CACHE_DTYPES
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.models.synthetic_arithmetic import EOS_TOKEN_ID
from blockplane.protos.sampling import SamplingParams

SETTINGS = {
    "dtype": "float32",
    "max_model_len": 192,
    "block_size": 8,
    "num_blocks": 2000,
    "num_batched_tokens_buckets": (32, 64),
    "num_seqs_buckets": (1, 2, 4, 8),
}
NUM_TOKENS = 40
STEM = random.Random(7).choices(range(256), k=70)
PROMPTS = [[*STEM[:length], number] for number, length in enumerate((1, 7, 8, 9, 31, 32, 47, 63, 64, 70))]
# A text that repeats itself, for drafts out of it.
PROMPTS.append((STEM[:12] * 8)[:90])

WAYS: dict[str, dict[str, Any]] = {
    "plainly": {"prefix_caching": "off", "num_batched_tokens_buckets": (128,), "num_seqs_buckets": (16,)},
    "with the prefix cache": {},
    "in chunks of a block": {"num_batched_tokens_buckets": (8,)},
    "in larger buckets": {"num_batched_tokens_buckets": (256,), "num_seqs_buckets": (64,)},
    "in small blocks of the kernel": {"kernel_block_size": 2},
    "in one block a token": {"block_size": 1},
    "with too few blocks": {"num_blocks": 90},
    "with drafts from the text": {"num_draft_tokens": 3},
    "with drafts from a model": {"num_draft_tokens": 5, "draft_source": "model", "draft_model": "synthetic"},
    "in an FP8 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "where contexts are shapes": {"decode_context_length_buckets": (16, 64, 192)},
    "unsegmented": {"segmented_prefill": "off", "num_batched_tokens_buckets": (192,)},
    "with all of these": {
        "num_blocks": 110,
        "num_batched_tokens_buckets": (16, 24),
        "kernel_block_size": 4,
        "num_draft_tokens": 4,
        "kv_cache_dtype": "fp8_e4m3",
        "decode_context_length_buckets": (64, 96, 192),
    },
}


def planes(kernel_block_size: int | None = None, **settings: Any) -> Planes:
    kv_cache_dtype = KV_CACHE_DTYPES[settings.get("kv_cache_dtype", "auto")]
    model = SyntheticModel("float32", kv_cache_dtype=kv_cache_dtype)
    draft_model = SyntheticModel("float32", kv_cache_dtype=kv_cache_dtype) if settings.get("draft_model") else None
    system = Planes(
        model,
        SETTINGS | settings,
        eos_token_ids=(EOS_TOKEN_ID,),
        draft_model=draft_model,
        kernel_block_size=kernel_block_size,
    )
    stored = {cache.dtype for attention in model.attentions for cache in attention.caches or ()}
    assert stored == {torch.float8_e4m3fn if kv_cache_dtype else torch.float32}
    return system


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [continue_greedily(prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_leads_to_the_same_texts(way: str, expected: list[list[int]]) -> None:
    system = planes(**WAYS[way])
    # All of them twice: the second time they find what the first left behind.
    for _ in range(2):
        for prompt in PROMPTS:
            system.submit(prompt, SamplingParams(NUM_TOKENS))
    system.run()
    assert list(system.texts.values()) == expected * 2
    statistics = system.scheduler.statistics()
    assert (statistics.num_preemptions > 0) == (WAYS[way].get("num_blocks", 2000) < 200)
    assert statistics.kv_cache_usage == 0
    if way == "with the prefix cache":
        assert statistics.num_cached_tokens > 0


@pytest.mark.parametrize(
    "way", [way if "drafts" in way or "all" in way else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_every_way_leads_to_the_same_samples(way: str) -> None:
    params = SamplingParams(NUM_TOKENS, temperature=8.0, top_p=0.9, top_k=40, frequency_penalty=0.5, ignore_eos=True)
    # Texts of three ids repeat themselves, so that what is guessed from them is often right.
    few = replace(params, allowed_token_ids=(65, 66, 67))
    texts = []
    for system in (planes(**WAYS["plainly"]), planes(**WAYS[way])):
        for seed, prompt in enumerate(PROMPTS):
            system.submit(prompt, few if seed % 2 else params, seed)
        system.run()
        texts.append(list(system.texts.values()))
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == len(PROMPTS)
    statistics = system.scheduler.statistics()
    assert (statistics.num_accepted_tokens > 0) == ("num_draft_tokens" in WAYS[way])
