"""Values of the hot messages' fields for property tests, and what a message is on the other side; knows no message."""

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message
from hypothesis import strategies as st
from told import columns_of

from blockplane.protos.logprobs import Logprobs
from blockplane.protos.model import GenerationDefaults, ModelInfo
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.structured import STRUCTURED_KINDS, StructuredOutput

uint32 = st.sampled_from([0, 2**32 - 1]) | st.integers(0, 2**32 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
seeds = st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
temperatures = st.floats(0, 100, width=32)
columns = st.lists(int32, max_size=20).map(lambda numbers: np.array(numbers, np.int32))
id_tuples = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
logprob_entries = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32)), max_size=3)
sampling_params = st.builds(
    SamplingParams,
    max_tokens=uint32,
    temperature=st.floats(allow_nan=False),
    seed=st.none() | seeds,
    stop_token_ids=id_tuples,
    ignore_eos=st.booleans(),
    min_tokens=uint32,
    top_k=uint32,
    top_p=st.floats(allow_nan=False),
    min_p=st.floats(allow_nan=False),
    presence_penalty=st.floats(allow_nan=False),
    frequency_penalty=st.floats(allow_nan=False),
    repetition_penalty=st.floats(allow_nan=False),
    logit_bias=st.lists(st.tuples(int32, st.floats(allow_nan=False)), max_size=5).map(tuple),
    allowed_token_ids=st.none() | id_tuples,
    bad_words=st.lists(id_tuples, max_size=3).map(tuple),
    logprobs=st.none() | uint32,
    prompt_logprobs=st.none() | uint32,
    structured=st.none() | st.builds(StructuredOutput, st.sampled_from(STRUCTURED_KINDS), st.text()),
)
logprobs = st.lists(logprob_entries, max_size=4).map(columns_of)
models = st.builds(
    ModelInfo,
    name=st.text(),
    vocab_size=uint32,
    max_model_len=uint32,
    eos_token_ids=st.lists(uint32, max_size=4).map(tuple),
    bos_token_id=st.none() | uint32,
    tokenizer_json_zlib=st.binary(),
    defaults=st.builds(GenerationDefaults, temperature=temperatures),
    chat_template=st.none() | st.text(),
)

CUT = b"\1\0\0\0\2\0\0"
"""A column whose second number lacks a byte."""


def comparable(value: Any) -> Any:
    """`value` with columns and dataclasses as plain tuples, their types included, so that == tells every difference."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if is_dataclass(value):
        return type(value), {field.name: comparable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return tuple(map(comparable, value))
    return type(value), value


def logprobs_for(num_tokens: int) -> st.SearchStrategy[Logprobs | None]:
    """What may be told of so many tokens."""
    return st.none() | st.lists(logprob_entries, min_size=num_tokens, max_size=num_tokens).map(columns_of)


M = TypeVar("M", bound=Message)


def sent(message: M) -> M:
    """`message` as the other side reads it."""
    return type(message).FromString(message.SerializeToString())
