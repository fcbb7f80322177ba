"""Random rows for the sampler's tests: parameters, texts, logits, and the batch that the worker makes of them."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockplane.data_plane.rows import Rows
from blockplane.data_plane.sampler import SamplingBatch
from blockplane.data_plane.sampling_rows import SamplingRows
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams

VOCAB_SIZE = 40
EOS = (0, 7)
CONFIGURE = Configure(4, num_blocks=200, max_model_len=32, num_batched_tokens_buckets=(64,), num_seqs_buckets=(8,))


@dataclass(frozen=True)
class Case:
    """One row: its logits come in eighths, so that many are alike and their sums are exact."""

    params: SamplingParams
    seed: int
    prompt: list[int]
    output: list[int]
    logits: NDArray[np.float32]


token_ids = st.integers(0, VOCAB_SIZE - 1)
few_ids = st.lists(token_ids, max_size=4).map(tuple)
# Few ids in texts and words, so that they meet.
text_ids = st.integers(0, 5)
words = st.lists(text_ids, min_size=1, max_size=3).map(tuple)
penalties = st.sampled_from([0.0, 0.0, 0.5, -0.25, 2.0, -2.0])
temperatures = st.sampled_from([0.5, 1.0, 3.0])

truncations = {
    "top_k": st.integers(0, VOCAB_SIZE + 3),
    "top_p": st.just(1.0) | st.floats(0.01, 1.0),
    "min_p": st.just(0.0) | st.floats(0.0, 1.0),
}
changes = {
    "ignore_eos": st.booleans(),
    "stop_token_ids": few_ids,
    "min_tokens": st.integers(0, 6),
    "presence_penalty": penalties,
    "frequency_penalty": penalties,
    "repetition_penalty": st.sampled_from([1.0, 1.0, 1.25, 0.5, 2.0]),
    "logit_bias": st.dictionaries(token_ids, st.integers(-16, 16).map(lambda n: n / 4), max_size=5).map(
        lambda biases: tuple(biases.items())
    ),
    "allowed_token_ids": st.none() | st.lists(token_ids, min_size=1, max_size=30).map(tuple),
    "bad_words": st.lists(words, max_size=4).map(tuple),
}
logits = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).integers(-40, 41, VOCAB_SIZE).astype(np.float32) / 8
)


def cases(temperature: st.SearchStrategy[float], **fields: st.SearchStrategy[object]) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        params=st.builds(SamplingParams, max_tokens=st.just(10), temperature=temperature, **fields),
        seed=st.integers(0, 2**64 - 1),
        prompt=st.lists(text_ids, min_size=1, max_size=6),
        output=st.lists(text_ids, max_size=6),
        logits=logits,
    )


def batch_of(chosen: list[Case], places: list[int] | None = None) -> tuple[torch.Tensor, SamplingBatch]:
    """The cases' logits and what the worker's rows make of them, each in its place among the rows."""
    places = list(range(len(chosen))) if places is None else places
    rows, sampling = Rows(CONFIGURE), SamplingRows(CONFIGURE.max_num_seqs, VOCAB_SIZE, EOS)
    plan = StepPlan(
        1,
        admissions=tuple(
            Admission(place, np.array(case.prompt + case.output, np.int32), len(case.prompt), 0, case.params, case.seed)
            for place, case in zip(places, chosen, strict=True)
        ),
    )
    rows.apply(plan)
    sampling.apply(plan)
    return torch.from_numpy(np.stack([case.logits for case in chosen])), sampling.batch(rows, np.array(places))
