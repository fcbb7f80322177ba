"""The frontend's messages to protobuf and back; knows neither plans nor what clients see."""

from typing import get_args

import grpc
import numpy as np

from blockplane.protos.columns import column_from_bytes, column_to_bytes
from blockplane.protos.delivery import (
    Delivery,
    Ending,
    FrontendBatch,
    PromptLogprobs,
    Resumed,
    Resumption,
    ServingState,
    Submission,
)
from blockplane.protos.errors import (
    BlockplaneError,
    InvalidRequestError,
    ProtocolError,
    RetryableError,
    error_of_status,
)
from blockplane.protos.finish import FinishReason
from blockplane.protos.logprobs_wire import logprobs_from_proto, logprobs_to_proto
from blockplane.protos.sampling import MAX_SAMPLES
from blockplane.protos.sampling_wire import sampling_from_proto, sampling_to_proto
from blockplane.protos.wire import PROTOCOL_VERSION, model_info_from_proto, model_info_to_proto
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1 import inference_pb2

_FINISH_REASONS: dict[str, FinishReason] = {reason: reason for reason in get_args(FinishReason)}

FINISH_REASON_TO_PROTO: dict[FinishReason, inference_pb2.FinishReason.ValueType] = {
    reason: inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason.upper()}") for reason in get_args(FinishReason)
}
FINISH_REASON_FROM_PROTO = {number: reason for reason, number in FINISH_REASON_TO_PROTO.items()}


def frontend_batch_to_proto(batch: FrontendBatch) -> pb.AttachFrontendRequest:
    return pb.AttachFrontendRequest(
        protocol_version=PROTOCOL_VERSION,
        submissions=[submission_to_proto(submission) for submission in batch.submissions],
        aborted_stream_ids=column_to_bytes(np.array(batch.aborted_stream_ids, np.int32)),
        aborted_request_ids=batch.aborted_request_ids,
        parked_stream_ids=column_to_bytes(np.array(batch.parked_stream_ids, np.int32)),
        unparked_stream_ids=column_to_bytes(np.array(batch.unparked_stream_ids, np.int32)),
        resumptions=[
            pb.Resumption(stream_id=asked.stream_id, request_id=asked.request_id, caller=asked.caller)
            for asked in batch.resumptions
        ],
        aborting_callers=batch.aborting_callers,
    )


def frontend_batch_from_proto(proto: pb.AttachFrontendRequest) -> FrontendBatch:
    return FrontendBatch(
        submissions=tuple(submission_from_proto(submission) for submission in proto.submissions),
        aborted_stream_ids=tuple(column_from_bytes(proto.aborted_stream_ids).tolist()),
        aborted_request_ids=tuple(proto.aborted_request_ids),
        parked_stream_ids=tuple(column_from_bytes(proto.parked_stream_ids).tolist()),
        unparked_stream_ids=tuple(column_from_bytes(proto.unparked_stream_ids).tolist()),
        resumptions=tuple(Resumption(asked.stream_id, asked.request_id, asked.caller) for asked in proto.resumptions),
        aborting_callers=tuple(proto.aborting_callers),
    )


def submission_to_proto(submission: Submission) -> pb.Submission:
    return pb.Submission(
        stream_id=submission.stream_id,
        request_id=submission.request_id,
        token_ids=column_to_bytes(submission.prompt_token_ids),
        sampling=sampling_to_proto(submission.params),
        cache_salt=submission.cache_salt,
        num_samples=submission.num_samples,
        priority=submission.priority,
        timeout_seconds=submission.timeout_seconds,
        skip_prefix_cache=submission.skip_prefix_cache,
        caller=submission.caller,
        frontend_state=submission.frontend_state,
        traceparent=submission.traceparent,
    )


def submission_from_proto(proto: pb.Submission) -> Submission:
    # Each is a stream that must be ended even if all are refused.
    if proto.num_samples > MAX_SAMPLES:
        raise ProtocolError(f"a submission asks for {proto.num_samples} samples; a frontend sends up to {MAX_SAMPLES}.")
    return Submission(
        stream_id=proto.stream_id,
        request_id=proto.request_id,
        prompt_token_ids=column_from_bytes(proto.token_ids),
        params=sampling_from_proto(proto.sampling),
        num_samples=proto.num_samples or 1,
        priority=proto.priority,
        timeout_seconds=proto.timeout_seconds if proto.HasField("timeout_seconds") else None,
        cache_salt=proto.cache_salt,
        skip_prefix_cache=proto.skip_prefix_cache,
        caller=proto.caller,
        frontend_state=proto.frontend_state,
        traceparent=proto.traceparent,
    )


def delivery_to_proto(delivery: Delivery) -> pb.AttachFrontendResponse:
    proto = pb.AttachFrontendResponse(
        stream_ids=column_to_bytes(delivery.stream_ids), token_ids=column_to_bytes(delivery.token_ids)
    )
    # Most deliveries have nothing else.
    if delivery.num_tokens is not None:
        proto.num_tokens = column_to_bytes(delivery.num_tokens)
    if delivery.endings:
        proto.endings.extend(map(ending_to_proto, delivery.endings))
    if delivery.logprobs is not None:
        proto.logprobs.CopyFrom(logprobs_to_proto(delivery.logprobs))
    if delivery.prompt_logprobs:
        proto.prompt_logprobs.extend(map(_prompt_logprobs_to_proto, delivery.prompt_logprobs))
    if delivery.resumed:
        proto.resumed.extend(map(_resumed_to_proto, delivery.resumed))
    if delivery.serving is not None:
        proto.serving.CopyFrom(serving_to_proto(delivery.serving))
    return proto


def delivery_from_proto(proto: pb.AttachFrontendResponse) -> Delivery:
    """Raises ProtocolError if the columns do not belong together."""
    token_ids = column_from_bytes(proto.token_ids)
    delivery = Delivery(
        stream_ids=column_from_bytes(proto.stream_ids),
        num_tokens=column_from_bytes(proto.num_tokens) if proto.HasField("num_tokens") else None,
        token_ids=token_ids,
        endings=tuple(ending_from_proto(ending) for ending in proto.endings),
        serving=serving_from_proto(proto.serving) if proto.HasField("serving") else None,
        logprobs=logprobs_from_proto(proto.logprobs, len(token_ids)) if proto.HasField("logprobs") else None,
        prompt_logprobs=tuple(map(_prompt_logprobs_from_proto, proto.prompt_logprobs)),
        resumed=tuple(map(_resumed_from_proto, proto.resumed)),
    )
    num_streams, num_tokens = len(delivery.stream_ids), delivery.num_tokens
    if len(delivery.token_ids) != (num_streams if num_tokens is None else num_tokens.sum()) or (
        num_tokens is not None and len(num_tokens) != num_streams
    ):
        raise ProtocolError("a delivery's columns do not belong together; run the same version everywhere.")
    return delivery


def serving_to_proto(serving: ServingState) -> pb.ServingState:
    return pb.ServingState(model=None if serving.model is None else model_info_to_proto(serving.model))


def serving_from_proto(proto: pb.ServingState) -> ServingState:
    return ServingState(model_info_from_proto(proto.model) if proto.HasField("model") else None)


def _prompt_logprobs_to_proto(told: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(stream_id=told.stream_id, logprobs=logprobs_to_proto(told.logprobs))


def _prompt_logprobs_from_proto(proto: pb.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(proto.stream_id, logprobs_from_proto(proto.logprobs))


def _resumed_to_proto(resumed: Resumed) -> pb.Resumed:
    return pb.Resumed(
        stream_id=resumed.stream_id,
        token_ids=column_to_bytes(resumed.token_ids),
        num_prompt_tokens=resumed.num_prompt_tokens,
        num_samples=resumed.num_samples,
        frontend_state=resumed.frontend_state,
    )


def _resumed_from_proto(proto: pb.Resumed) -> Resumed:
    return Resumed(
        stream_id=proto.stream_id,
        token_ids=column_from_bytes(proto.token_ids),
        num_prompt_tokens=proto.num_prompt_tokens,
        num_samples=proto.num_samples,
        frontend_state=proto.frontend_state,
    )


def ending_to_proto(ending: Ending) -> pb.Ending:
    proto, outcome = pb.Ending(stream_id=ending.stream_id, num_cached_tokens=ending.num_cached_tokens), ending.outcome
    if isinstance(outcome, BlockplaneError):
        proto.status, proto.message = outcome.status.name, str(outcome)
        proto.reason = outcome.reason
        if isinstance(outcome, RetryableError) and outcome.retry_after_seconds is not None:
            proto.retry_after_seconds = outcome.retry_after_seconds
        if isinstance(outcome, InvalidRequestError) and outcome.field is not None:
            proto.field = outcome.field
    else:
        proto.finish_reason = outcome
    return proto


def ending_from_proto(proto: pb.Ending) -> Ending:
    return Ending(proto.stream_id, _outcome_from_proto(proto), proto.num_cached_tokens)


def _outcome_from_proto(proto: pb.Ending) -> FinishReason | BlockplaneError:
    if not proto.finish_reason:
        if proto.status not in grpc.StatusCode.__members__:
            raise ProtocolError(f"unknown status {proto.status!r}; run the same version everywhere.")
        error = error_of_status(grpc.StatusCode[proto.status], proto.message, proto.reason)
        if isinstance(error, RetryableError) and proto.HasField("retry_after_seconds"):
            error.retry_after_seconds = proto.retry_after_seconds
        if isinstance(error, InvalidRequestError):
            error.field = proto.field or None
        return error
    if proto.finish_reason not in _FINISH_REASONS:
        raise ProtocolError(f"unknown finish reason {proto.finish_reason!r}; run the same version everywhere.")
    return _FINISH_REASONS[proto.finish_reason]
