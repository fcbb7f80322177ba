"""Conversion between the frozen messages and protobuf, both ways; the only code that builds or reads hot protobuf.

Columns cross as little-endian int32 bytes: `tobytes` on one side, `frombuffer` on the other, no Python loop.
"""

from typing import get_args

import grpc
import numpy as np

from blockplane.protos.delivery import Delivery, Ending, FrontendBatch, ServingState, Submission
from blockplane.protos.errors import BlockplaneError, ProtocolError, error_of_status
from blockplane.protos.finish import FinishReason
from blockplane.protos.model import GenerationDefaults, LayerKVSpec, ModelInfo
from blockplane.protos.plan import Admission, Configure, Int32Array, StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1 import inference_pb2

PROTOCOL_VERSION = 1

_INT32 = np.dtype("<i4")
_FINISH_REASONS: dict[str, FinishReason] = {reason: reason for reason in get_args(FinishReason)}

FINISH_REASON_TO_PROTO: dict[FinishReason, inference_pb2.FinishReason.ValueType] = {
    reason: inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason.upper()}") for reason in get_args(FinishReason)
}
FINISH_REASON_FROM_PROTO = {number: reason for reason, number in FINISH_REASON_TO_PROTO.items()}


def column_to_bytes(column: Int32Array) -> bytes:
    return column.astype(_INT32, copy=False).tobytes()


def column_from_bytes(data: bytes) -> Int32Array:
    """Read an int32 column; a read-only view of `data`. Raises ProtocolError if it ends inside a number."""
    if len(data) % _INT32.itemsize:
        raise ProtocolError(
            f"a column of {len(data)} bytes does not hold whole int32 numbers; check the peer's version."
        )
    return np.frombuffer(data, _INT32).astype(np.int32, copy=False)


def plan_to_proto(plan: StepPlan) -> pb.StepPlan:
    return pb.StepPlan(
        step=plan.step,
        released_rows=column_to_bytes(plan.released_rows),
        admissions=[
            pb.Admission(
                row=admission.row,
                token_ids=column_to_bytes(admission.token_ids),
                num_prompt_tokens=admission.num_prompt_tokens,
                num_computed_tokens=admission.num_computed_tokens,
                temperature=admission.temperature,
                seed=admission.seed,
            )
            for admission in plan.admissions
        ],
        block_rows=column_to_bytes(plan.block_rows),
        block_ids=column_to_bytes(plan.block_ids),
        prefill_rows=column_to_bytes(plan.prefill_rows),
        prefill_num_tokens=column_to_bytes(plan.prefill_num_tokens),
        decode_rows=None if plan.decode_rows is None else column_to_bytes(plan.decode_rows),
    )


def plan_from_proto(proto: pb.StepPlan) -> StepPlan:
    return StepPlan(
        step=proto.step,
        released_rows=column_from_bytes(proto.released_rows),
        admissions=tuple(
            Admission(
                row=admission.row,
                token_ids=column_from_bytes(admission.token_ids),
                num_prompt_tokens=admission.num_prompt_tokens,
                num_computed_tokens=admission.num_computed_tokens,
                temperature=admission.temperature,
                seed=admission.seed,
            )
            for admission in proto.admissions
        ),
        block_rows=column_from_bytes(proto.block_rows),
        block_ids=column_from_bytes(proto.block_ids),
        prefill_rows=column_from_bytes(proto.prefill_rows),
        prefill_num_tokens=column_from_bytes(proto.prefill_num_tokens),
        decode_rows=column_from_bytes(proto.decode_rows) if proto.HasField("decode_rows") else None,
    )


def result_to_proto(result: StepResult) -> pb.StepResult:
    return pb.StepResult(step=result.step, token_ids=column_to_bytes(result.token_ids))


def result_from_proto(proto: pb.StepResult) -> StepResult:
    return StepResult(step=proto.step, token_ids=column_from_bytes(proto.token_ids))


def configure_to_proto(configure: Configure) -> pb.Configure:
    return pb.Configure(
        block_size=configure.block_size,
        num_blocks=configure.num_blocks,
        max_model_len=configure.max_model_len,
        num_batched_tokens_buckets=configure.num_batched_tokens_buckets,
        num_seqs_buckets=configure.num_seqs_buckets,
    )


def configure_from_proto(proto: pb.Configure) -> Configure:
    return Configure(
        block_size=proto.block_size,
        num_blocks=proto.num_blocks,
        max_model_len=proto.max_model_len,
        num_batched_tokens_buckets=tuple(proto.num_batched_tokens_buckets),
        num_seqs_buckets=tuple(proto.num_seqs_buckets),
    )


def model_info_to_proto(info: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(
        name=info.name,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id,
        tokenizer_json_zlib=info.tokenizer_json_zlib,
        default_temperature=info.defaults.temperature,
    )


def model_info_from_proto(proto: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=proto.name,
        vocab_size=proto.vocab_size,
        max_model_len=proto.max_model_len,
        eos_token_ids=tuple(proto.eos_token_ids),
        bos_token_id=proto.bos_token_id if proto.HasField("bos_token_id") else None,
        tokenizer_json_zlib=proto.tokenizer_json_zlib,
        defaults=GenerationDefaults(temperature=proto.default_temperature),
    )


def layer_to_proto(spec: LayerKVSpec) -> pb.LayerKVSpec:
    return pb.LayerKVSpec(
        name=spec.name,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        sliding_window=spec.sliding_window,
    )


def layer_from_proto(proto: pb.LayerKVSpec) -> LayerKVSpec:
    return LayerKVSpec(
        name=proto.name,
        num_kv_heads=proto.num_kv_heads,
        head_dim=proto.head_dim,
        dtype=proto.dtype,
        sliding_window=proto.sliding_window if proto.HasField("sliding_window") else None,
    )


def frontend_batch_to_proto(batch: FrontendBatch) -> pb.AttachFrontendRequest:
    return pb.AttachFrontendRequest(
        protocol_version=PROTOCOL_VERSION,
        submissions=[_submission_to_proto(submission) for submission in batch.submissions],
        aborted_stream_ids=column_to_bytes(np.array(batch.aborted_stream_ids, np.int32)),
        aborted_request_ids=batch.aborted_request_ids,
    )


def frontend_batch_from_proto(proto: pb.AttachFrontendRequest) -> FrontendBatch:
    return FrontendBatch(
        submissions=tuple(_submission_from_proto(submission) for submission in proto.submissions),
        aborted_stream_ids=tuple(column_from_bytes(proto.aborted_stream_ids).tolist()),
        aborted_request_ids=tuple(proto.aborted_request_ids),
    )


def _submission_to_proto(submission: Submission) -> pb.Submission:
    params = submission.params
    return pb.Submission(
        stream_id=submission.stream_id,
        request_id=submission.request_id,
        token_ids=column_to_bytes(submission.prompt_token_ids),
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=params.seed,
        stop_token_ids=column_to_bytes(np.array(params.stop_token_ids, np.int32)),
        ignore_eos=params.ignore_eos,
        cache_salt=submission.cache_salt,
    )


def _submission_from_proto(proto: pb.Submission) -> Submission:
    return Submission(
        stream_id=proto.stream_id,
        request_id=proto.request_id,
        prompt_token_ids=column_from_bytes(proto.token_ids),
        params=SamplingParams(
            max_tokens=proto.max_tokens,
            temperature=proto.temperature,
            seed=proto.seed if proto.HasField("seed") else None,
            stop_token_ids=tuple(column_from_bytes(proto.stop_token_ids).tolist()),
            ignore_eos=proto.ignore_eos,
        ),
        cache_salt=proto.cache_salt,
    )


def delivery_to_proto(delivery: Delivery) -> pb.AttachFrontendResponse:
    serving = delivery.serving
    return pb.AttachFrontendResponse(
        serving=None if serving is None else serving_to_proto(serving),
        stream_ids=column_to_bytes(delivery.stream_ids),
        num_tokens=column_to_bytes(delivery.num_tokens),
        token_ids=column_to_bytes(delivery.token_ids),
        endings=[_ending_to_proto(ending) for ending in delivery.endings],
    )


def delivery_from_proto(proto: pb.AttachFrontendResponse) -> Delivery:
    """Raises ProtocolError if the columns do not belong together."""
    delivery = Delivery(
        stream_ids=column_from_bytes(proto.stream_ids),
        num_tokens=column_from_bytes(proto.num_tokens),
        token_ids=column_from_bytes(proto.token_ids),
        endings=tuple(_ending_from_proto(ending) for ending in proto.endings),
        serving=serving_from_proto(proto.serving) if proto.HasField("serving") else None,
    )
    if len(delivery.stream_ids) != len(delivery.num_tokens) or delivery.num_tokens.sum() != len(delivery.token_ids):
        raise ProtocolError("a delivery's columns do not belong together; run the same version everywhere.")
    return delivery


def serving_to_proto(serving: ServingState) -> pb.ServingState:
    return pb.ServingState(model=None if serving.model is None else model_info_to_proto(serving.model))


def serving_from_proto(proto: pb.ServingState) -> ServingState:
    return ServingState(model_info_from_proto(proto.model) if proto.HasField("model") else None)


def _ending_to_proto(ending: Ending) -> pb.Ending:
    proto, outcome = pb.Ending(stream_id=ending.stream_id, num_cached_tokens=ending.num_cached_tokens), ending.outcome
    if isinstance(outcome, BlockplaneError):
        proto.status, proto.message = outcome.status.name, str(outcome)
    else:
        proto.finish_reason = outcome
    return proto


def _ending_from_proto(proto: pb.Ending) -> Ending:
    return Ending(proto.stream_id, _outcome_from_proto(proto), proto.num_cached_tokens)


def _outcome_from_proto(proto: pb.Ending) -> FinishReason | BlockplaneError:
    if not proto.finish_reason:
        if proto.status not in grpc.StatusCode.__members__:
            raise ProtocolError(f"unknown status {proto.status!r}; run the same version everywhere.")
        return error_of_status(grpc.StatusCode[proto.status], proto.message)
    if proto.finish_reason not in _FINISH_REASONS:
        raise ProtocolError(f"unknown finish reason {proto.finish_reason!r}; run the same version everywhere.")
    return _FINISH_REASONS[proto.finish_reason]
