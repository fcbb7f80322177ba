"""Columns of log-probabilities that do not belong together, or not to the tokens that came with them, are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from told import columns_of
from wire_values import CUT, sent

from blockplane.protos import delivery_wire, wire
from blockplane.protos.columns import column_to_bytes
from blockplane.protos.delivery import Delivery, PromptLogprobs
from blockplane.protos.errors import ProtocolError
from blockplane.protos.logprobs_wire import logprobs_from_proto, logprobs_to_proto
from blockplane.protos.plan import StepResult
from blockplane.v1 import engine_pb2 as pb

TWO_TOKENS = logprobs_to_proto(columns_of([[(5, -0.5), (7, -0.25)], []]))
FIVE = column_to_bytes(np.ones(5, np.int32))

CARRIERS: dict[str, tuple[Callable[[Any], Any], Message]] = {
    "result": (wire.result_from_proto, pb.StepResult(token_ids=FIVE, logprobs=TWO_TOKENS)),
    "delivery": (
        delivery_wire.delivery_from_proto,
        pb.AttachFrontendResponse(stream_ids=FIVE, token_ids=FIVE, logprobs=TWO_TOKENS),
    ),
}


@pytest.mark.parametrize(
    "columns",
    [
        {"num_entries": [2, 1]},
        {"num_entries": [1, 0]},
        {"num_entries": [3, -1]},
        {"num_entries": [2**31 - 1, 2**31 - 1, 4]},
        {"token_ids": [5]},
        {"logprobs": [0]},
    ],
)
def test_columns_that_do_not_belong_together_are_refused(columns: dict[str, list[int]]) -> None:
    proto = pb.Logprobs()
    proto.CopyFrom(TWO_TOKENS)
    for name, numbers in columns.items():
        setattr(proto, name, column_to_bytes(np.array(numbers, np.int32)))
    assert len(logprobs_from_proto(TWO_TOKENS, 2).token_ids) == 2
    with pytest.raises(ProtocolError, match="do not belong together"):
        logprobs_from_proto(sent(proto))


@pytest.mark.parametrize("column", ["num_entries", "token_ids", "logprobs"])
def test_a_truncated_column_of_them_is_refused(column: str) -> None:
    with pytest.raises(ProtocolError, match="7 bytes"):
        logprobs_from_proto(pb.Logprobs(**{column: CUT}))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_as_many_tokens_are_told_of_as_there_are(carrier: str) -> None:
    read, message = CARRIERS[carrier]
    with pytest.raises(ProtocolError, match="do not belong together"):
        read(message)


def test_a_logarithm_crosses_as_it_is_minus_infinity_too() -> None:
    told = columns_of([[(1, -0.1), (0, float("-inf"))]])
    result = StepResult(1, np.array([1], np.int32), logprobs=told, prompt_logprobs=told)
    read = wire.result_from_proto(sent(wire.result_to_proto(result)))
    delivery = Delivery(prompt_logprobs=(PromptLogprobs(3, told),))
    (prompt,) = delivery_wire.delivery_from_proto(sent(delivery_wire.delivery_to_proto(delivery))).prompt_logprobs
    for crossed in (read.logprobs, read.prompt_logprobs, prompt.logprobs):
        assert crossed is not None
        assert crossed.logprobs.tolist() == told.logprobs.tolist()
    assert prompt.stream_id == 3
