"""What no server should take, asked of a real system by either protocol while a batch-mate's logits are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc
import pytest
from chaos import is_empty
from processes import System, running_system, wait_for
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from blockplane.protos.channel import MAX_REQUEST_BYTES
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceStub

VOCAB_SIZE, LAST_ID, LONG_LEN = 258, 2**63 - 1, 128 << 10
MATE, MATE_TOKENS = [3, 1, 4, 1, 5], 200
LONG_ID = 2**31
"""Takes five bytes, and the model has none of them: it is refused before it is read."""
NO_LIMIT = [("grpc.max_send_message_length", -1)]

Ask: TypeAlias = Callable[[grpc.Channel], Any]


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system("--max-model-len=2048", "--num-seqs-buckets=8") as system:
        yield system


@pytest.fixture
def channel(system: System) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(system.address, options=NO_LIMIT) as channel:
        yield channel
    wait_for(lambda: is_empty(system), "nothing is left of any request")


def ours(prompt: list[int], request_id: str = "", **sampling: Any) -> Ask:
    """A call of our own protocol."""
    params = pb.SamplingParams(**{"max_tokens": 4, **sampling})
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=params, request_id=request_id)
    return lambda channel: InferenceStub(channel).Generate(request)


def theirs(prompt: list[int], request_id: str = "", **sampling: Any) -> Ask:
    """The same of the public vLLM engine protocol."""
    params, tokenized = vllm.SamplingParams(**{"max_tokens": 4, **sampling}), vllm.TokenizedInput(input_ids=prompt)
    request = vllm.GenerateRequest(tokenized=tokenized, sampling_params=params, request_id=request_id, stream=True)
    return lambda channel: vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request)


def varint(number: int) -> bytes:
    """As protobuf writes what its own classes refuse to hold: a number too large for its field, or a negative one."""
    number %= 1 << 64
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def on_the_wire(where: str, token_id: int) -> Ask:
    """The public protocol's call with an id that no 32 bits hold."""
    prompt, params = varint(1), b""
    if where == "prompt":
        prompt = varint(token_id)
    elif where == "stop_token_ids":
        number = vllm.SamplingParams.DESCRIPTOR.fields_by_name["stop_token_ids"].number
        params = field(number, varint(token_id))
    ids = vllm.TokenizedInput.DESCRIPTOR.fields_by_name["input_ids"].number
    names = vllm.GenerateRequest.DESCRIPTOR.fields_by_name
    request = field(names["tokenized"].number, field(ids, prompt)) + field(names["sampling_params"].number, params)
    return lambda channel: channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(request)


HOSTILE: dict[str, Ask] = {
    "ours: an empty prompt": ours([]),
    **{f"ours: {token_id} in the prompt": ours([1, token_id]) for token_id in (-1, VOCAB_SIZE, LAST_ID)},
    **{f"ours: {each} as stop id": ours([1], stop_token_ids=[each]) for each in (-1, VOCAB_SIZE, LAST_ID)},
    **{f"ours: {each} as bias key": ours([1], logit_bias={each: 1.0}) for each in (-1, VOCAB_SIZE, LAST_ID)},
    "theirs: an empty prompt": theirs([]),
    "theirs: the first id that is none": theirs([1, VOCAB_SIZE]),
    "theirs: the first as stop id": theirs([1], stop_token_ids=[VOCAB_SIZE]),
    **{f"theirs: {each} as bias key": theirs([1], logit_bias={each: 1.0}) for each in (-1, VOCAB_SIZE, 2**31 - 1)},
    **{
        f"theirs: {token_id} in the {where}, on the wire": on_the_wire(where, token_id)
        for where in ("prompt", "stop_token_ids")
        for token_id in (-1, LAST_ID)
    },
}


def told(response: Any) -> tuple[list[int], list[tuple[float, ...]]]:
    """The tokens of a message and the log-probabilities told of each, which show their logits bit by bit."""
    return list(response.token_ids), [(each.logprob, *each.top_logprobs) for each in response.logprobs]


def test_what_is_senseless_is_refused_by_either_protocol_and_no_bit_of_a_mate_s_logits_changes(
    channel: grpc.Channel,
) -> None:
    """Case 36."""
    mate = ours(MATE, max_tokens=MATE_TOKENS, temperature=0, ignore_eos=True, logprobs=20)
    undisturbed = [told(response) for response in mate(channel)]
    disturbed, stream = [], mate(channel)
    disturbed.append(told(next(stream)))
    for name, ask in HOSTILE.items():
        with pytest.raises(grpc.RpcError) as caught:
            list(ask(channel))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{name}: {caught.value.details()}"  # type: ignore[attr-defined]
        disturbed.append(told(next(stream)))
    assert len(flat(disturbed)) < MATE_TOKENS, "it was there all the time"
    disturbed += [told(response) for response in stream]
    assert len(flat(disturbed)) == MATE_TOKENS
    assert flat(disturbed) == flat(undisturbed)


def flat(messages: list[tuple[list[int], list[tuple[float, ...]]]]) -> list[tuple[int, tuple[float, ...]]]:
    """However tokens were put into messages."""
    return [pair for token_ids, logprobs in messages for pair in zip(token_ids, logprobs, strict=True)]


@pytest.mark.parametrize("aborter", ["ours", "theirs"])
def test_an_abort_by_another_connection_and_either_protocol_ends_the_streams_of_both(
    system: System, channel: grpc.Channel, aborter: str
) -> None:
    """Case 35: CANCELLED by our own protocol; by theirs its word for it, and a good end."""
    endless = {"max_tokens": 2000, "ignore_eos": True}
    mine, gateways = ours([1], "mine", **endless)(channel), theirs([2], "gateway's", **endless)(channel)
    next(mine)
    next(gateways)
    ids = ["mine", "gateway's", "gateway's", "never heard of"]
    with grpc.insecure_channel(system.address) as other:
        for _ in range(2):
            if aborter == "ours":
                InferenceStub(other).Abort(pb.AbortRequest(request_ids=ids))
            else:
                vllm_engine_pb2_grpc.VllmEngineStub(other).Abort(vllm.AbortRequest(request_ids=ids))
    with pytest.raises(grpc.RpcError) as caught:
        list(mine)
    assert caught.value.code() is grpc.StatusCode.CANCELLED  # type: ignore[attr-defined]
    *_, last = gateways
    assert last.complete.finish_reason == "abort"
    assert gateways.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("ask", [ours, theirs])
def test_a_prompt_of_128k_ids_passes_and_what_is_beyond_the_limit_leaves_nothing(
    system: System, channel: grpc.Channel, ask: Callable[..., Ask]
) -> None:
    """Case 38. The model takes the last tokens of the prompt."""
    responses = list(ask([1] * LONG_LEN, truncate_prompt_tokens=40)(channel))
    last = responses[-1]
    num_prompt_tokens = last.usage.num_prompt_tokens if ask is ours else last.complete.prompt_tokens
    assert num_prompt_tokens == 40
    with pytest.raises(grpc.RpcError) as caught:
        list(ask([LONG_ID] * (MAX_REQUEST_BYTES // 5 + 1), truncate_prompt_tokens=40)(channel))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    info = vllm_engine_pb2_grpc.VllmEngineStub(channel).GetServerInfo(vllm.GetServerInfoRequest())
    assert info.active_requests == 0
