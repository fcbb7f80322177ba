"""Gemma 3 270M in float32 says what transformers finds likeliest, whatever the system does on the way."""

from typing import Any

import pytest
from planes_in_process import Planes
from test_transformer import PROMPTS, expected_logits, gemma_270m_of_transformers
from tokenizers import Tokenizer

from blockplane.data_plane.loading.build import load_model
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.protos.sampling import SamplingParams

NUM_TOKENS = 56
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "num_blocks": 2000,
    "num_batched_tokens_buckets": (128, 256),
    "num_seqs_buckets": (4, 16),
}
WAYS: dict[str, dict[str, Any]] = {
    "plainly": {"prefix_caching": "off", "num_batched_tokens_buckets": (1024,)},
    "in chunks": {"num_batched_tokens_buckets": (32,)},
    "with too few blocks": {"num_blocks": 225},
    "in small blocks of the kernel": {"kernel_block_size": 4},
    "with drafts": {"num_draft_tokens": 4},
}
TOLERANCE = 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_token_is_within_a_thousandth_of_the_likeliest_whatever_the_way() -> None:
    checkpoint = open_checkpoint("gemma3-270m")
    theirs = gemma_270m_of_transformers()
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json.decode())
    model = load_model(checkpoint, "float32", max_model_len=1024)
    # One that is longer than a window, and that repeats itself.
    texts = [*PROMPTS, "The quick brown fox jumps over the lazy dog. " * 60]
    prompts = [[checkpoint.bos_token_id, *tokenizer.encode(text).ids] for text in texts]
    scored: dict[tuple[int, ...], float] = {}
    for way, changes in WAYS.items():
        kernel_block_size = changes.get("kernel_block_size")
        settings = {name: value for name, value in changes.items() if name != "kernel_block_size"}
        planes = Planes(model, SETTINGS | settings, kernel_block_size=kernel_block_size)
        for again in (prompts, prompts[-1:]):
            for prompt in again:
                planes.submit(prompt, SamplingParams(NUM_TOKENS))
            planes.run()
        for prompt, output in zip((*prompts, prompts[-1]), planes.texts.values(), strict=True):
            assert len(output) == NUM_TOKENS
            whole = (*prompt, *output)
            if whole not in scored:
                logits = expected_logits(theirs, list(whole[:-1]))[len(prompt) - 1 :]
                scored[whole] = max(float(row.max() - row[token]) for row, token in zip(logits, output, strict=True))
            assert scored[whole] <= TOLERANCE, way
        statistics = planes.scheduler.statistics()
        assert (statistics.num_preemptions > 0) == ("num_blocks" in changes)
        assert statistics.num_cached_tokens > 500 or way in ("plainly", "with too few blocks")
        assert (statistics.num_accepted_tokens > 0) == ("num_draft_tokens" in changes)
