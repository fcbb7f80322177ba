"""A client that never reads its stream, at a real system: it is parked, then ended, and nobody else notices."""

import time
from pathlib import Path

import grpc
import pytest
from processes import System, running_system, wait_for
from synthetic_oracle import continue_greedily

from blockplane.v1 import engine_pb2, inference_pb2
from blockplane.v1.engine_pb2_grpc import EngineStub
from blockplane.v1.inference_pb2_grpc import InferenceStub

PROMPT = list(range(50))
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]


def statistics(system: System) -> engine_pb2.GetStatisticsResponse:
    with grpc.insecure_channel(system.engine_address) as channel:
        return EngineStub(channel).GetStatistics(engine_pb2.GetStatisticsRequest())


def resident_bytes(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * 4096


def test_a_client_that_never_reads_is_parked_then_ended_while_others_go_on() -> None:
    """What it asks for, 4000 tokens told with twenty others each, would be 15 MB as the frontend holds it."""
    flags = ("--max-model-len=4096", "--stream-buffer-tokens=1000", "--parked-seconds=2")
    with (
        running_system(*flags) as system,
        system.client() as client,
        grpc.insecure_channel(system.address, options=SMALL_WINDOW) as channel,
    ):
        before = resident_bytes(system.processes("frontend")[0].pid)
        params = inference_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=4000, logprobs=20)
        absent = InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT), sampling_params=params)
        )
        wait_for(lambda: statistics(system).num_parked == 1, "the request is parked")
        parked_at = time.monotonic()
        deltas = client.generate(PROMPT, max_tokens=100, temperature=0, ignore_eos=True)
        tokens = [token_id for delta in deltas for token_id in delta.token_ids]
        assert tokens == continue_greedily(PROMPT, 100, ignore_eos=True)
        wait_for(lambda: statistics(system).num_parked == 0, "the request is ended")
        assert time.monotonic() - parked_at > 1
        assert statistics(system).num_running == 0
        assert statistics(system).kv_cache_usage == 0
        assert resident_bytes(system.processes("frontend")[0].pid) - before < 8 << 20
        with pytest.raises(grpc.RpcError) as ended:
            list(absent)
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
