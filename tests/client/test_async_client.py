"""The client for event loops over a real socket: what it sends and makes of the answers, and that leaving cancels."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import grpc
import pytest
from fake_inference import WAIT_SECONDS, FakeServer

from blockplane.client.async_client import AsyncClient
from blockplane.client.client import Client
from blockplane.client.values import Delta, ServedModel, Usage
from blockplane.protos.access import Access
from blockplane.protos.errors import (
    AbortedError,
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from blockplane.v1 import inference_pb2 as pb

LAST = pb.GenerateResponse(
    token_ids=[8],
    text="é",
    finish_reason=pb.FINISH_REASON_LENGTH,
    usage=pb.Usage(num_prompt_tokens=3, num_output_tokens=2),
)
GONE = (grpc.StatusCode.UNAVAILABLE, "the engine went away; send the request again.")


def with_client(server: FakeServer | str, use: Callable[[AsyncClient], Awaitable[object]], **arguments) -> object:
    async def run() -> object:
        address = server if isinstance(server, str) else server.address
        async with AsyncClient(address, **arguments) as client:
            return await use(client)

    return asyncio.run(run())


async def read(client: AsyncClient, prompt: str = "hi", **arguments) -> list[Delta]:
    return [delta async for delta in client.generate(prompt, **arguments)]


def test_both_clients_take_the_same_and_document_it():
    assert inspect.signature(AsyncClient.generate).parameters == inspect.signature(Client.generate).parameters
    assert list(inspect.signature(Client.generate).parameters)[:3] == ["self", "prompt", "num_samples"]
    for client in (Client, AsyncClient):
        assert "temperature: 0 = greedy." in (client.generate.__doc__ or "")
    named = {name for name in vars(Client) if not name.startswith("_")}
    assert named == {name for name in vars(AsyncClient) if not name.startswith("_")}


def test_deltas_arrive_in_order_and_only_the_last_has_an_end(fake_server: FakeServer):
    fake_server.inference.responses = (pb.GenerateResponse(token_ids=[5, 6], text="a"), LAST)
    assert with_client(fake_server, read) == [
        Delta((5, 6), "a", None, None),
        Delta((8,), "é", "length", Usage(num_prompt_tokens=3, num_output_tokens=2)),
    ]


def test_many_requests_share_a_connection(fake_server: FakeServer):
    fake_server.inference.responses = (LAST,)

    async def use(client: AsyncClient) -> list[list[Delta]]:
        return await asyncio.gather(*(read(client, str(number)) for number in range(20)))

    assert [len(deltas) for deltas in with_client(fake_server, use)] == [1] * 20
    assert {request.text for request in fake_server.inference.requests} == {str(number) for number in range(20)}


def test_arguments_caller_and_token_reach_the_server(fake_server: FakeServer, tmp_path):
    token = tmp_path / "token"
    token.write_text("abc")

    async def use(client: AsyncClient) -> None:
        await read(client, temperature=0.0, max_tokens=9, stop="END")
        [_ async for _ in client.resume("r", [4])]
        await client.abort(["a", "b"])
        assert await client.model_info() == ServedModel("fake", 300, 64, (1, 2), bos_token_id=None)

    with_client(fake_server, use, caller="alice", access=Access(token=str(token)))
    fake = fake_server.inference
    params = pb.SamplingParams(temperature=0.0, max_tokens=9, stop=["END"])
    assert fake.requests == [pb.GenerateRequest(text="hi", sampling_params=params, num_samples=1)]
    assert fake.resumptions == [pb.ResumeRequest(request_id="r", from_tokens=[4])]
    assert fake.aborted == ["a", "b"]
    assert (fake.callers, fake.tokens) == (["alice"] * 4, ["Bearer abc"] * 4)


def test_what_the_protocol_cannot_carry_is_an_invalid_request_at_once(free_address: str):
    async def use(client: AsyncClient) -> None:
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            client.generate("hi", max_tokens=-1)
        with pytest.raises(TypeError, match="temprature"):
            client.generate("hi", temprature=1)  # type: ignore[call-arg]

    with_client(free_address, use)


def test_a_refusal_is_the_servers_error_and_says_when_to_call_again(fake_server: FakeServer):
    fake_server.inference.failure = (grpc.StatusCode.RESOURCE_EXHAUSTED, "it is full; retry.")
    fake_server.inference.trailing_metadata = (("grpc-retry-pushback-ms", "1500"),)
    with pytest.raises(CapacityError, match=r"^it is full; retry\.$") as caught:
        with_client(fake_server, read)
    assert caught.value.retry_after_seconds == 1.5
    assert len(fake_server.inference.requests) == 1


def test_no_server_is_an_unavailable_error_that_names_the_address(free_address: str):
    with pytest.raises(UnavailableError, match=f"no server answers on {free_address}"):
        with_client(free_address, read)
    with pytest.raises(UnavailableError, match=f"no server answers on {free_address}"):
        with_client(free_address, lambda client: client.model_info())


def test_a_timeout_ends_the_request_at_the_server_too(fake_server: FakeServer):
    fake_server.inference.endless = True

    async def use(client: AsyncClient) -> None:
        with pytest.raises(DeadlineError, match="in time"):
            await read(client, timeout=0.3)
        assert await asyncio.to_thread(fake_server.inference.cancelled.wait, WAIT_SECONDS)

    with_client(fake_server, use)


@pytest.mark.parametrize("way", ["break", "aclose", "cancel"])
def test_leaving_the_iterator_cancels_the_request(fake_server: FakeServer, way: str):
    fake_server.inference.endless = True

    async def use(client: AsyncClient) -> None:
        if way == "break":
            async for _ in client.generate("hi"):
                break
        elif way == "aclose":
            async with aclosing(client.generate("hi")) as deltas:
                assert (await anext(deltas)).token_ids == (7,)
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await read(client)
        assert await asyncio.to_thread(fake_server.inference.cancelled.wait, WAIT_SECONDS)

    with_client(fake_server, use)


def test_closing_the_client_ends_its_requests_with_a_sentence(fake_server: FakeServer):
    fake_server.inference.endless = True

    async def run() -> None:
        client = AsyncClient(fake_server.address)
        deltas = client.generate("hi")
        await anext(deltas)
        await client.close()
        with pytest.raises(AbortedError, match="client was closed"):
            async for _ in deltas:
                pass

    asyncio.run(run())
    assert fake_server.inference.cancelled.wait(WAIT_SECONDS)


def test_a_broken_stream_goes_on_behind_the_tokens_that_came(fake_server: FakeServer):
    fake = fake_server.inference
    fake.parts = [((pb.GenerateResponse(token_ids=[1, 2]),), GONE), ((), GONE), ((LAST,), None)]
    deltas = with_client(fake_server, lambda client: read(client, reattach_seconds=30))
    assert [token_id for delta in deltas for token_id in delta.token_ids] == [1, 2, 8]
    assert [list(resumption.from_tokens) for resumption in fake.resumptions] == [[2], [2]]


def test_what_was_seen_is_never_begun_again(fake_server: FakeServer):
    fake = fake_server.inference
    unknown = (grpc.StatusCode.NOT_FOUND, "there is no such request.")
    fake.parts = [((pb.GenerateResponse(token_ids=[1]),), GONE), ((), unknown)]
    with pytest.raises(NotFoundError):
        with_client(fake_server, lambda client: read(client, reattach_seconds=30))
    assert len(fake.requests) == 1


def test_waiting_ends_when_the_server_begins_to_serve(fake_server: FakeServer):
    fake_server.set_serving(False)
    threading.Timer(0.3, fake_server.set_serving, [True]).start()
    with_client(fake_server, lambda client: client.wait_until_serving(timeout=WAIT_SECONDS))


def test_waiting_gives_up_on_a_server_that_does_not_serve(fake_server: FakeServer):
    fake_server.set_serving(False)
    with pytest.raises(UnavailableError, match=r"not serving after 0\.3 s"):
        with_client(fake_server, lambda client: client.wait_until_serving(timeout=0.3))
