"""The worker's messages to protobuf and back; knows neither streams nor who sends them."""

from dataclasses import asdict

from blockplane.protos.buckets import BucketRules
from blockplane.protos.columns import column_from_bytes, column_to_bytes
from blockplane.protos.kv_cache import KVCacheGroup, KVCacheTensor
from blockplane.protos.logprobs_wire import logprobs_from_proto, logprobs_to_proto
from blockplane.protos.model import GenerationDefaults, LayerKVSpec, ModelInfo
from blockplane.protos.plan import Admission, Configure, Int32Array, StepPlan, StepResult
from blockplane.protos.sampling_wire import sampling_from_proto, sampling_to_proto
from blockplane.protos.statistics import EngineStatistics, Statistics
from blockplane.protos.transfer import Fetch
from blockplane.v1 import engine_pb2 as pb

PROTOCOL_VERSION = 4
OLDEST_PROTOCOL_VERSION = PROTOCOL_VERSION - 1
"""What the engine still serves: it is upgraded first, workers and frontends after it."""


def plan_to_proto(plan: StepPlan) -> pb.StepPlan:
    proto = pb.StepPlan(
        step=plan.step,
        decode_rows=_optional_to_bytes(plan.decode_rows),
        decode_num_tokens=_optional_to_bytes(plan.decode_num_tokens),
    )
    # Most plans change nothing: these cost a look each.
    if plan.released_rows.size:
        proto.released_rows = column_to_bytes(plan.released_rows)
    if plan.admissions:
        proto.admissions.extend(map(_admission_to_proto, plan.admissions))
    if plan.block_rows.size:
        proto.block_rows = column_to_bytes(plan.block_rows)
    if plan.block_ids.size:
        proto.block_ids = column_to_bytes(plan.block_ids)
    if plan.prefill_rows.size:
        proto.prefill_rows = column_to_bytes(plan.prefill_rows)
    if plan.prefill_num_tokens.size:
        proto.prefill_num_tokens = column_to_bytes(plan.prefill_num_tokens)
    return proto


def _admission_to_proto(admission: Admission) -> pb.Admission:
    return pb.Admission(
        row=admission.row,
        token_ids=column_to_bytes(admission.token_ids),
        num_prompt_tokens=admission.num_prompt_tokens,
        num_computed_tokens=admission.num_computed_tokens,
        sampling=sampling_to_proto(admission.params),
        seed=admission.seed,
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
                params=sampling_from_proto(admission.sampling),
                seed=admission.seed,
            )
            for admission in proto.admissions
        ),
        block_rows=column_from_bytes(proto.block_rows),
        block_ids=column_from_bytes(proto.block_ids),
        prefill_rows=column_from_bytes(proto.prefill_rows),
        prefill_num_tokens=column_from_bytes(proto.prefill_num_tokens),
        decode_rows=column_from_bytes(proto.decode_rows) if proto.HasField("decode_rows") else None,
        decode_num_tokens=column_from_bytes(proto.decode_num_tokens) if proto.HasField("decode_num_tokens") else None,
    )


def _optional_to_bytes(column: Int32Array | None) -> bytes | None:
    return None if column is None else column_to_bytes(column)


def result_to_proto(result: StepResult) -> pb.StepResult:
    return pb.StepResult(
        step=result.step,
        token_ids=column_to_bytes(result.token_ids),
        num_tokens=_optional_to_bytes(result.num_tokens),
        num_draft_tokens=result.num_draft_tokens,
        epoch=result.epoch,
        logprobs=None if result.logprobs is None else logprobs_to_proto(result.logprobs),
        prompt_logprobs=None if result.prompt_logprobs is None else logprobs_to_proto(result.prompt_logprobs),
        times=result.times,
    )


def result_from_proto(proto: pb.StepResult) -> StepResult:
    """Raises ProtocolError if columns of log-probabilities do not belong to the tokens."""
    token_ids = column_from_bytes(proto.token_ids)
    return StepResult(
        step=proto.step,
        token_ids=token_ids,
        num_tokens=column_from_bytes(proto.num_tokens) if proto.HasField("num_tokens") else None,
        num_draft_tokens=proto.num_draft_tokens,
        epoch=proto.epoch,
        logprobs=logprobs_from_proto(proto.logprobs, len(token_ids)) if proto.HasField("logprobs") else None,
        prompt_logprobs=logprobs_from_proto(proto.prompt_logprobs) if proto.HasField("prompt_logprobs") else None,
        times=proto.times,
    )


def configure_to_proto(configure: Configure) -> pb.Configure:
    return pb.Configure(
        block_size=configure.block_size,
        num_blocks=configure.num_blocks,
        max_model_len=configure.max_model_len,
        num_batched_tokens_buckets=configure.num_batched_tokens_buckets,
        num_seqs_buckets=configure.num_seqs_buckets,
        kv_cache_groups=[_group_to_proto(group) for group in configure.kv_cache_groups],
        kv_cache_tensors=[
            pb.KVCacheTensor(size=tensor.size, shared_by=tensor.shared_by) for tensor in configure.kv_cache_tensors
        ],
        kv_segment_size=configure.kv_segment_size,
        decode_context_length_buckets=configure.decode_context_length_buckets,
        prefill_multiple_of=configure.prefill_multiple_of,
        num_draft_tokens=configure.num_draft_tokens,
        epoch=configure.epoch,
        keeps_kv=configure.keeps_kv,
        last_step=configure.last_step,
        heartbeat_milliseconds=configure.heartbeat_milliseconds,
        context_parallel_size=configure.context_parallel_size,
    )


def configure_from_proto(proto: pb.Configure) -> Configure:
    return Configure(
        block_size=proto.block_size,
        num_blocks=proto.num_blocks,
        max_model_len=proto.max_model_len,
        num_batched_tokens_buckets=tuple(proto.num_batched_tokens_buckets),
        num_seqs_buckets=tuple(proto.num_seqs_buckets),
        kv_cache_groups=tuple(_group_from_proto(group) for group in proto.kv_cache_groups),
        kv_cache_tensors=tuple(
            KVCacheTensor(tensor.size, tuple(tensor.shared_by)) for tensor in proto.kv_cache_tensors
        ),
        kv_segment_size=proto.kv_segment_size,
        decode_context_length_buckets=tuple(proto.decode_context_length_buckets),
        prefill_multiple_of=proto.prefill_multiple_of,
        num_draft_tokens=proto.num_draft_tokens,
        epoch=proto.epoch,
        keeps_kv=proto.keeps_kv,
        last_step=proto.last_step,
        heartbeat_milliseconds=proto.heartbeat_milliseconds,
        context_parallel_size=proto.context_parallel_size or 1,
    )


def _group_to_proto(group: KVCacheGroup) -> pb.KVCacheGroup:
    return pb.KVCacheGroup(
        layer_names=group.layer_names,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        dtype=group.dtype,
        sliding_window=group.sliding_window,
        attention_chunk_size=group.attention_chunk_size,
    )


def _group_from_proto(proto: pb.KVCacheGroup) -> KVCacheGroup:
    return KVCacheGroup(
        layer_names=tuple(proto.layer_names),
        num_kv_heads=proto.num_kv_heads,
        head_dim=proto.head_dim,
        dtype=proto.dtype,
        sliding_window=proto.sliding_window if proto.HasField("sliding_window") else None,
        attention_chunk_size=proto.attention_chunk_size if proto.HasField("attention_chunk_size") else None,
    )


def bucket_rules_to_proto(rules: BucketRules) -> pb.BucketRules:
    return pb.BucketRules(
        kv_segment_sizes=rules.kv_segment_sizes,
        kv_segment_holds_whole_blocks=rules.kv_segment_holds_whole_blocks,
        prefill_equals_kv_segment=rules.prefill_equals_kv_segment,
        prefill_multiple_of=rules.prefill_multiple_of,
        context_is_a_shape=rules.context_is_a_shape,
    )


def bucket_rules_from_proto(proto: pb.BucketRules) -> BucketRules:
    return BucketRules(
        kv_segment_sizes=tuple(proto.kv_segment_sizes),
        kv_segment_holds_whole_blocks=proto.kv_segment_holds_whole_blocks,
        prefill_equals_kv_segment=proto.prefill_equals_kv_segment,
        prefill_multiple_of=proto.prefill_multiple_of or 1,
        context_is_a_shape=proto.context_is_a_shape,
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
        chat_template=info.chat_template,
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
        chat_template=proto.chat_template if proto.HasField("chat_template") else None,
    )


def layer_to_proto(spec: LayerKVSpec) -> pb.LayerKVSpec:
    return pb.LayerKVSpec(
        name=spec.name,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        sliding_window=spec.sliding_window,
        attention_chunk_size=spec.attention_chunk_size,
        shares_kv_with=spec.shares_kv_with,
    )


def layer_from_proto(proto: pb.LayerKVSpec) -> LayerKVSpec:
    return LayerKVSpec(
        name=proto.name,
        num_kv_heads=proto.num_kv_heads,
        head_dim=proto.head_dim,
        dtype=proto.dtype,
        sliding_window=proto.sliding_window if proto.HasField("sliding_window") else None,
        attention_chunk_size=proto.attention_chunk_size if proto.HasField("attention_chunk_size") else None,
        shares_kv_with=proto.shares_kv_with if proto.HasField("shares_kv_with") else None,
    )


def fetch_to_proto(fetch: Fetch, rank: int) -> pb.FetchBlocks:
    """As that rank is told of it."""
    return pb.FetchBlocks(
        transfer_id=fetch.transfer_id,
        transport=fetch.transport,
        address=fetch.addresses[rank],
        source_epoch=fetch.source_epoch,
        source_block_ids=column_to_bytes(fetch.source_block_ids),
        block_ids=column_to_bytes(fetch.block_ids),
        timeout_seconds=fetch.timeout_seconds,
    )


def statistics_to_proto(statistics: EngineStatistics) -> pb.GetStatisticsResponse:
    return pb.GetStatisticsResponse(
        **asdict(statistics.total),
        num_dropped_results=statistics.num_dropped_results,
        num_groups=len(statistics.groups),
        num_lost_workers=statistics.num_lost_workers,
        num_held=statistics.num_held,
        num_suspects=statistics.num_suspects,
        num_transfers=statistics.num_transfers,
        num_failed_transfers=statistics.num_failed_transfers,
        num_transferred_blocks=statistics.num_transferred_blocks,
        groups=[group_statistics_to_proto(number, group) for number, group in sorted(statistics.groups.items())],
    )


def group_statistics_to_proto(number: int, statistics: Statistics) -> pb.GroupStatistics:
    return pb.GroupStatistics(group=number, **asdict(statistics))
