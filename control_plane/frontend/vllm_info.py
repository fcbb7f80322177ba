"""What the public vLLM engine protocol tells of model, server and load; knows neither requests nor connections."""

import json
from datetime import UTC, datetime

from smg_grpc_proto import vllm_engine_pb2 as vllm

from blockplane import __version__
from blockplane.protos.config import Config
from blockplane.protos.model import ModelInfo
from blockplane.v1 import engine_pb2 as pb

NO_TOKENIZER = "/dev/null"
"""What has no tokenizer, wherever it is looked for: a gateway then fetches ours, and no hub's of the model's name."""


def model_info(model: ModelInfo) -> vllm.GetModelInfoResponse:
    return vllm.GetModelInfoResponse(
        model_path=model.name,
        served_model_name=model.name,
        tokenizer_path=NO_TOKENIZER,
        is_generation=True,
        max_context_length=model.max_model_len,
        max_req_input_len=model.max_model_len - 1,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id or 0,
        default_sampling_params_json=json.dumps({"temperature": model.defaults.temperature}),
    )


def server_info(config: Config, num_requests: int, uptime_seconds: float) -> vllm.GetServerInfoResponse:
    """`num_requests`: streams that are open here."""
    return vllm.GetServerInfoResponse(
        server_type="blockplane",
        active_requests=num_requests,
        uptime_seconds=uptime_seconds,
        data_parallel_size=1,
        block_size=config.group_block_size,
        max_num_seqs=config.num_seqs_buckets[-1],
        model_dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        constrained_decoding_start="first_token",
    )


def loads(statistics: pb.GetStatisticsResponse, max_num_seqs: int) -> vllm.GetLoadsResponse:
    """All worker groups as one, which is how requests come to them. `max_num_seqs`: rows of each."""
    num_rows = max_num_seqs * statistics.num_groups
    num_waiting = statistics.num_waiting + statistics.num_held
    load = vllm.SchedulerLoad(
        num_running_reqs=statistics.num_running,
        num_waiting_reqs=num_waiting,
        num_total_reqs=statistics.num_running + num_waiting,
        token_usage=statistics.kv_cache_usage,
        cache_hit_rate=statistics.num_cached_tokens / max(1, statistics.num_prompt_tokens),
        utilization=statistics.num_running / max(1, num_rows),
        max_running_requests=num_rows,
        num_waiting_uncached_tokens=statistics.num_waiting_tokens,
    )
    return vllm.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(), version=__version__, dp_rank_count=1, loads=[load]
    )
