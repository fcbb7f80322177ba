"""Log-probabilities to protobuf and back, for whichever message carries them; knows no message that does."""

import numpy as np

from blockplane.protos.columns import (
    column_from_bytes,
    column_to_bytes,
    float_column_from_bytes,
    float_column_to_bytes,
)
from blockplane.protos.errors import ProtocolError
from blockplane.protos.logprobs import Logprobs
from blockplane.v1 import engine_pb2 as pb


def logprobs_to_proto(logprobs: Logprobs) -> pb.Logprobs:
    return pb.Logprobs(
        num_entries=column_to_bytes(logprobs.num_entries),
        token_ids=column_to_bytes(logprobs.token_ids),
        logprobs=float_column_to_bytes(logprobs.logprobs),
    )


def logprobs_from_proto(proto: pb.Logprobs, num_tokens: int | None = None) -> Logprobs:
    """Raises ProtocolError unless the columns belong together and, where it is given, tell of so many tokens."""
    logprobs = Logprobs(
        num_entries=column_from_bytes(proto.num_entries),
        token_ids=column_from_bytes(proto.token_ids),
        logprobs=float_column_from_bytes(proto.logprobs),
    )
    num_entries, num_told = logprobs.num_entries, len(logprobs.token_ids)
    is_sound = not (num_entries < 0).any() and num_entries.sum(dtype=np.int64) == num_told == len(logprobs.logprobs)
    if not is_sound or (num_tokens is not None and len(num_entries) != num_tokens):
        raise ProtocolError("columns of log-probabilities do not belong together; run the same version everywhere.")
    return logprobs
