"""The client over a real socket: what it sends, what it makes of the answers, and that leaving cancels."""

import threading
import time
from typing import Any

import grpc
import pytest
from fake_inference import WAIT_SECONDS, FakeServer

from blockplane.client.client import Client
from blockplane.client.values import Delta, ServedModel, TokenLogprobs, Usage
from blockplane.protos.errors import (
    AbortedError,
    BlockplaneError,
    CapacityError,
    DeadlineError,
    DuplicateError,
    InvalidRequestError,
    ProtocolError,
    UnavailableError,
)
from blockplane.protos.structured import StructuredOutput
from blockplane.v1 import inference_pb2 as pb


def last_response(**fields) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(num_prompt_tokens=3, num_output_tokens=2), **fields
    )


def test_deltas_arrive_in_order_and_only_the_last_has_an_end(fake_server: FakeServer):
    fake_server.inference.responses = (
        pb.GenerateResponse(token_ids=[5], text="a"),
        pb.GenerateResponse(token_ids=[6, 0], text=""),
        last_response(token_ids=[8], text="é"),
    )
    with Client(fake_server.address) as client:
        assert list(client.generate("hi")) == [
            Delta((5,), "a", None, None),
            Delta((6, 0), "", None, None),
            Delta((8,), "é", "length", Usage(num_prompt_tokens=3, num_output_tokens=2)),
        ]


def test_a_delta_is_had_before_the_request_ends(fake_server: FakeServer):
    fake_server.inference.endless = True
    with Client(fake_server.address) as client:
        assert next(client.generate("hi")).token_ids == (7,)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (pb.FINISH_REASON_STOP, "stop"),
        (pb.FINISH_REASON_LENGTH, "length"),
        (pb.FINISH_REASON_CACHE_FULL, "cache_full"),
    ],
)
def test_finish_reasons_have_the_names_of_the_contract(fake_server: FakeServer, number, reason):
    fake_server.inference.responses = (pb.GenerateResponse(finish_reason=number),)
    with Client(fake_server.address) as client:
        assert [delta.finish_reason for delta in client.generate("hi")] == [reason]


def test_a_finish_reason_of_a_newer_server_is_a_protocol_error(fake_server: FakeServer):
    fake_server.inference.responses = (pb.GenerateResponse(finish_reason=77),)
    with Client(fake_server.address) as client, pytest.raises(ProtocolError, match="77"):
        list(client.generate("hi"))


def test_what_is_not_given_is_absent_on_the_wire(fake_server: FakeServer):
    with Client(fake_server.address) as client:
        list(client.generate("hi"))
    assert fake_server.inference.requests == [
        pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(), num_samples=1)
    ]


SCALARS = {
    "max_tokens": 9,
    "min_tokens": 0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 0.95,
    "min_p": 0.0,
    "seed": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": -0.1,
    "repetition_penalty": 1.3,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 5,
    "logprobs": 0,
    "prompt_logprobs": 0,
}


def test_every_argument_reaches_the_server(fake_server: FakeServer):
    with Client(fake_server.address) as client:
        list(
            client.generate(
                [3, 1, 4],
                **SCALARS,
                num_samples=4,
                logit_bias={0: 0.1, 7: -100},
                allowed_token_ids=(0, 8),
                bad_words=("x", "y"),
                bad_word_token_ids=((1, 2), (3,)),
                stop=("END", "\n\n"),
                stop_token_ids=(5, 6),
                request_id="mine",
                priority=-7,
                cache_salt="s",
                skip_prefix_cache=True,
                whole_output=True,
            )
        )
    params = pb.SamplingParams(
        **SCALARS,
        logit_bias={0: 0.1, 7: -100},
        allowed_token_ids=pb.TokenIds(ids=[0, 8]),
        bad_words=["x", "y"],
        bad_word_token_ids=[pb.TokenIds(ids=[1, 2]), pb.TokenIds(ids=[3])],
        stop=["END", "\n\n"],
        stop_token_ids=[5, 6],
    )
    structured = pb.SamplingParams.DESCRIPTOR.oneofs_by_name["structured"].fields
    all_names = {*pb.SamplingParams.DESCRIPTOR.fields_by_name} - {field.name for field in structured}
    assert {field.name for field, _ in params.ListFields()} == all_names
    assert fake_server.inference.requests == [
        pb.GenerateRequest(
            request_id="mine",
            token_ids=pb.TokenIds(ids=[3, 1, 4]),
            sampling_params=params,
            num_samples=4,
            priority=-7,
            cache_salt="s",
            skip_prefix_cache=True,
            whole_output=True,
        )
    ]


@pytest.mark.parametrize(
    ("structured", "fields"),
    [
        (StructuredOutput("json_schema", '{"type": "object"}'), {"json_schema": '{"type": "object"}'}),
        (StructuredOutput("json_object"), {"json_object": True}),
        (StructuredOutput("regex", "a+"), {"regex": "a+"}),
        (StructuredOutput("grammar", 'start: "a"'), {"grammar": 'start: "a"'}),
        (StructuredOutput.choice(["é", "b"]), {"choice": pb.Choice(texts=["é", "b"])}),
        (None, {}),
    ],
)
def test_what_the_output_must_be_is_one_field(
    fake_server: FakeServer, structured: StructuredOutput | None, fields: dict[str, Any]
):
    with Client(fake_server.address) as client:
        list(client.generate("hi", structured=structured))
    assert fake_server.inference.requests[0].sampling_params == pb.SamplingParams(**fields)


@pytest.mark.parametrize("text", ["[1]", "a, b", "[]"])
def test_choices_that_are_none_are_refused_at_once(fake_server: FakeServer, text: str):
    with Client(fake_server.address) as client, pytest.raises(InvalidRequestError, match=r"^choice "):
        client.generate("hi", structured=StructuredOutput("choice", text))


def test_no_allowed_id_is_not_all_of_them(fake_server: FakeServer):
    with Client(fake_server.address) as client:
        list(client.generate("hi", allowed_token_ids=[]))
    assert fake_server.inference.requests[0].sampling_params.HasField("allowed_token_ids")


def test_one_bad_word_is_one_text_not_its_letters(fake_server: FakeServer):
    with Client(fake_server.address) as client:
        list(client.generate("hi", bad_words="bad"))
    assert fake_server.inference.requests[0].sampling_params.bad_words == ["bad"]


def test_deltas_of_several_samples_say_whose_they_are(fake_server: FakeServer):
    fake_server.inference.responses = (
        pb.GenerateResponse(token_ids=[5], text="a", sample_index=1),
        last_response(token_ids=[6], text="b"),
        last_response(token_ids=[7], text="c", sample_index=1),
    )
    with Client(fake_server.address) as client:
        deltas = [(delta.sample_index, delta.text, delta.finish_reason) for delta in client.generate("hi")]
    assert deltas == [(1, "a", None), (0, "b", "length"), (1, "c", "length")]


def test_logprobs_are_told_for_each_token_and_for_the_prompts(fake_server: FakeServer):
    fake_server.inference.responses = (
        pb.GenerateResponse(prompt_logprobs=[pb.TokenLogprobs(token_id=4, logprob=-2)]),
        last_response(
            token_ids=[5],
            logprobs=[pb.TokenLogprobs(token_id=5, logprob=-1.5, top_token_ids=[7, 5], top_logprobs=[-0.5, -1.5])],
        ),
    )
    with Client(fake_server.address) as client:
        first, last = client.generate("hi")
    assert (first.prompt_logprobs, first.logprobs) == ((TokenLogprobs(4, -2.0, (), ()),), None)
    assert (last.prompt_logprobs, last.logprobs) == (None, (TokenLogprobs(5, -1.5, (7, 5), (-0.5, -1.5)),))


def test_one_stop_text_is_one_text_not_its_letters(fake_server: FakeServer):
    with Client(fake_server.address) as client:
        list(client.generate("hi", stop="END"))
    assert fake_server.inference.requests[0].sampling_params.stop == ["END"]


def test_an_empty_prompt_of_ids_is_still_a_prompt_of_ids(fake_server: FakeServer):
    with Client(fake_server.address) as client:
        list(client.generate([]))
    assert fake_server.inference.requests[0].WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, CapacityError),
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineError),
        (grpc.StatusCode.ALREADY_EXISTS, DuplicateError),
        (grpc.StatusCode.CANCELLED, AbortedError),
        (grpc.StatusCode.INTERNAL, BlockplaneError),
    ],
)
def test_a_status_becomes_its_error_with_the_servers_sentence(fake_server: FakeServer, status, error):
    fake_server.inference.responses = (pb.GenerateResponse(token_ids=[5]),)
    fake_server.inference.failure = (status, "the lamp is out; light it.")
    received = []
    with Client(fake_server.address) as client, pytest.raises(BlockplaneError) as caught:
        received.extend(client.generate("hi"))
    assert type(caught.value) is error
    assert str(caught.value) == "the lamp is out; light it."


@pytest.mark.parametrize(
    ("metadata", "seconds"),
    [
        ((("other", "5"), ("grpc-retry-pushback-ms", "1500")), 1.5),
        ((("grpc-retry-pushback-ms", "0"),), 0.0),
        ((), None),
        ((("grpc-retry-pushback-ms", "-1"),), None),
        ((("grpc-retry-pushback-ms", "soon"),), None),
    ],
    ids=["said", "at once", "not said", "never", "garbled"],
)
def test_a_server_without_room_says_when_to_call_again(fake_server: FakeServer, metadata, seconds):
    fake_server.inference.failure = (grpc.StatusCode.RESOURCE_EXHAUSTED, "it is full; retry.")
    fake_server.inference.trailing_metadata = metadata
    with Client(fake_server.address) as client, pytest.raises(CapacityError, match=r"^it is full; retry\.$") as caught:
        list(client.generate("hi"))
    assert caught.value.retry_after_seconds == seconds


def test_no_server_is_an_unavailable_error_that_names_the_address(free_address: str):
    with Client(free_address) as client, pytest.raises(UnavailableError, match=f"no server answers on {free_address}"):
        list(client.generate("hi"))


def test_a_web_proxy_in_the_environment_is_not_on_the_way(fake_server: FakeServer, free_address: str, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://{free_address}")
    monkeypatch.delenv("no_proxy", raising=False)
    with Client(fake_server.address) as client:
        assert client.model_info().name == "fake"


def test_a_timeout_ends_the_request_at_the_server_too(fake_server: FakeServer):
    fake_server.inference.endless = True
    with Client(fake_server.address) as client:
        with pytest.raises(DeadlineError, match="in time"):
            list(client.generate("hi", timeout=0.3))
        assert fake_server.inference.cancelled.wait(WAIT_SECONDS)


def test_leaving_the_iterator_cancels_the_request(fake_server: FakeServer):
    fake_server.inference.endless = True
    with Client(fake_server.address) as client:
        for _ in client.generate("hi"):
            break
        assert fake_server.inference.cancelled.wait(WAIT_SECONDS)


def test_closing_the_client_cancels_its_requests(fake_server: FakeServer):
    fake_server.inference.endless = True
    with Client(fake_server.address) as client:
        deltas = client.generate("hi")
        next(deltas)
    assert fake_server.inference.cancelled.wait(WAIT_SECONDS)


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": "hi", "max_tokens": -1},
        {"prompt": "hi", "max_tokens": 2**32},
        {"prompt": "hi", "seed": -1},
        {"prompt": "hi", "num_samples": -1},
        {"prompt": "hi", "top_k": -1},
        {"prompt": "hi", "logit_bias": {2**63: 1.0}},
        {"prompt": [2**63]},
        {"prompt": "lone \udc80 surrogate"},
    ],
)
def test_what_the_protocol_cannot_carry_is_an_invalid_request_at_once(free_address: str, arguments):
    with Client(free_address) as client, pytest.raises(InvalidRequestError, match="cannot be sent"):
        client.generate(**arguments)


def test_abort_names_its_requests(fake_server: FakeServer):
    with Client(fake_server.address) as client:
        client.abort(["a", "b"])
    assert fake_server.inference.aborted == ["a", "b"]


def test_model_info_tells_an_absent_bos_token_from_token_zero(fake_server: FakeServer):
    with Client(fake_server.address) as client:
        assert client.model_info() == ServedModel("fake", 300, 64, (1, 2), bos_token_id=None)


def test_waiting_ends_when_the_server_begins_to_serve(fake_server: FakeServer):
    fake_server.set_serving(False)
    serving = threading.Timer(0.3, fake_server.set_serving, [True])
    started = time.monotonic()
    with Client(fake_server.address) as client:
        serving.start()
        client.wait_until_serving(timeout=WAIT_SECONDS)
    assert 0.3 <= time.monotonic() - started < WAIT_SECONDS / 2


def test_waiting_gives_up_on_a_server_that_does_not_serve(fake_server: FakeServer):
    fake_server.set_serving(False)
    with Client(fake_server.address) as client, pytest.raises(UnavailableError, match=r"not serving after 0\.3 s"):
        client.wait_until_serving(timeout=0.3)


def test_waiting_gives_up_where_no_server_is(free_address: str):
    with Client(free_address) as client, pytest.raises(UnavailableError, match=free_address):
        client.wait_until_serving(timeout=0.3)
