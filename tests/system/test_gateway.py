"""The public gateway `smg`, unchanged, before real processes of ours: what the `openai` client gets through it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from gateway import Gateway, gateway_environment, running_gateway
from processes import System, running_system, wait_for
from synthetic_oracle import continue_greedily

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK_SIZE = 16
PROMPT = "Photosynthesis is the process by which"
MODEL = {"model": "synthetic", "temperature": 0}
ENDLESS: dict[str, Any] = {"max_tokens": 1900, "ignore_eos": True}
FLAGS = (f"--block-size={BLOCK_SIZE}", "--max-model-len=2048", "--num-seqs-buckets=1,2,4,8")


@pytest.fixture(scope="module")
def environment() -> Iterator[Path]:
    with gateway_environment() as environment:
        yield environment


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system(*FLAGS, "--num-blocks=266") as system:
        yield system


@pytest.fixture(scope="module")
def gateway(environment: Path, system: System) -> Iterator[Gateway]:
    with running_gateway(environment, [system.address]) as gateway:
        yield gateway


def text_of(token_ids: list[int]) -> str:
    return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")


def expected(prompt: str, num_tokens: int) -> tuple[str, str]:
    """The greedy text of the model behind a prompt, and why it ends. Gateways put no BOS token before a prompt."""
    token_ids = continue_greedily(list(prompt.encode()), num_tokens)
    return text_of(token_ids), "length" if len(token_ids) == num_tokens else "stop"


def chat_prompt(*messages: dict[str, str]) -> str:
    return "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages)


# -- what comes back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 7, 60])
def test_a_completion_is_the_models_text_with_its_usage(gateway: Gateway, num_tokens: int) -> None:
    response = gateway.call("completions", prompt=PROMPT, max_tokens=num_tokens, **MODEL)
    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == expected(PROMPT, num_tokens)
    usage = response["usage"]
    assert usage["prompt_tokens"] == len(PROMPT)
    assert usage["completion_tokens"] == len(continue_greedily(list(PROMPT.encode()), num_tokens))


def test_a_streamed_completion_joins_to_the_same_and_tells_its_usage_last(gateway: Gateway) -> None:
    arguments = {**MODEL, "prompt": PROMPT, "max_tokens": 60, "stream_options": {"include_usage": True}}
    *chunks, last = gateway.call("completions", stream=True, **arguments)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert (text, reasons[-1]) == expected(PROMPT, 60)
    assert {*reasons[:-1]} == {None}
    assert len(chunks) > 10
    assert last["usage"]["prompt_tokens"] == len(PROMPT)
    assert last["usage"]["completion_tokens"] == len(continue_greedily(list(PROMPT.encode()), 60))


def test_what_was_computed_before_is_told_as_cached(gateway: Gateway) -> None:
    prompt = "The same words again and again, " * 4

    def cached() -> int:
        response = gateway.call("completions", prompt=prompt, max_tokens=1, **MODEL)
        return int(response["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [0, (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE]


@pytest.mark.parametrize("stream", [False, True])
def test_two_samples_are_those_that_our_own_client_gets(system: System, gateway: Gateway, stream: bool) -> None:
    arguments = {"model": "synthetic", "prompt": PROMPT, "max_tokens": 20, "temperature": 1.5, "seed": 7, "n": 2}
    response = gateway.call("completions", stream=stream, **arguments)
    texts = {0: "", 1: ""}
    for choice in (choice for chunk in (response if stream else [response]) for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
    samples: dict[int, list[int]] = {0: [], 1: []}
    with system.client() as client:
        for delta in client.generate(list(PROMPT.encode()), max_tokens=20, temperature=1.5, seed=7, num_samples=2):
            samples[delta.sample_index] += delta.token_ids
    # The gateway leaves out what a text ends with inside a character.
    ours = {index: text_of(token_ids).rstrip("\ufffd") for index, token_ids in samples.items()}
    assert {index: text.rstrip("\ufffd") for index, text in texts.items()} == ours
    assert texts[0] != texts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_text_and_the_engines_work(system: System, gateway: Gateway, stream: bool) -> None:
    text, _ = expected(PROMPT, 60)
    stop = text[10:13]
    num_before = system.statistics().num_discarded_tokens
    response = gateway.call("completions", prompt=PROMPT, max_tokens=2000, stop=[stop], stream=stream, **MODEL)
    chunks = response if stream else [response]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"
    if not stream:
        assert response["usage"]["completion_tokens"] == text.index(stop) + len(stop)
    wait_for(lambda: system.statistics().num_running == 0, "the request has ended", 5)
    assert system.statistics().num_discarded_tokens - num_before < 100, "it did not go on to its limit"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_continued_behind_its_template_with_logprobs(system: System, gateway: Gateway, stream: bool) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
    arguments = {**MODEL, "messages": messages, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    response = gateway.call("chat.completions", stream=stream, **arguments)
    prompt = list(chat_prompt(*messages).encode())
    choices = [choice for chunk in (response if stream else [response]) for choice in chunk["choices"]]
    text = "".join((choice["delta"] if stream else choice["message"])["content"] or "" for choice in choices)
    assert (text, choices[-1]["finish_reason"]) == expected(chat_prompt(*messages), 12)
    told = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    with system.client() as client:
        deltas = client.generate(prompt, max_tokens=12, temperature=0, logprobs=2)
        ours = [token for delta in deltas for token in delta.logprobs or ()]
    assert [token["logprob"] for token in told] == pytest.approx([token.logprob for token in ours], abs=1e-6)
    assert [[top["logprob"] for top in token["top_logprobs"]] for token in told] == [
        pytest.approx(token.top_logprobs, abs=1e-6) for token in ours
    ]


def test_a_refusal_reaches_the_client_as_its_status_with_our_sentence(gateway: Gateway) -> None:
    refused = gateway.call("completions", prompt=PROMPT, max_tokens=4, stop=["x" * 300], **MODEL)
    assert refused["error"] == 400
    assert "stop holds a text of 300 characters; send 256 at most." in refused["message"]
    with pytest.raises(HTTPError) as caught:
        gateway.post("/v1/completions", prompt="x" * 5000, max_tokens=4, **MODEL)
    assert caught.value.code == 400
    assert gateway.call("completions", prompt="a", max_tokens=1, **MODEL)["choices"], "and it serves on"


# -- clients that leave ------------------------------------------------------------------------------------------------


def test_streaming_clients_that_leave_free_their_blocks_for_whoever_comes_next(
    system: System, gateway: Gateway
) -> None:
    """Each would take all there is; the gateway tells their leaving by `Abort` alone."""
    num_admitted = system.statistics().num_admitted
    for index in range(4):
        chunks = gateway.call(
            "completions", prompt=f"{index} {PROMPT}", leave_after=2, stream=True, extra_body=ENDLESS, **MODEL
        )
        assert len(chunks) == 2
    wait_until_empty(system)
    long = "x" * 2000
    assert gateway.call("completions", prompt=long, max_tokens=3, **MODEL)["choices"][0]["text"] == expected(long, 3)[0]
    assert system.statistics().num_admitted - num_admitted == 5
    assert system.statistics().num_preemptions == 0
    wait_until_empty(system)


def test_a_client_that_gives_up_a_call_without_a_stream_frees_its_blocks(system: System, gateway: Gateway) -> None:
    """The gateway cancels the call."""
    with pytest.raises(TimeoutError):
        gateway.post("/v1/completions", timeout=0.5, prompt=PROMPT, **ENDLESS, **MODEL)
    wait_until_empty(system)


def wait_until_empty(system: System) -> None:
    def is_empty() -> bool:
        statistics = system.statistics()
        return (statistics.num_running, statistics.num_waiting, statistics.kv_cache_usage) == (0, 0, 0.0)

    wait_for(is_empty, "nothing runs and no block is held", 2)


# -- two instances -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[list[System]]:
    systems = [System(*FLAGS) for _ in range(2)]
    try:
        for system in systems:
            for kind in ("engine", "frontend", "worker"):
                system.start(kind)
        for system in systems:
            system.wait_until_serving()
        yield systems
    finally:
        for system in systems:
            system.close()


@pytest.fixture
def router(environment: Path, pair: list[System]) -> Iterator[Gateway]:
    with running_gateway(environment, [system.address for system in pair], "--policy=cache_aware") as gateway:
        yield gateway


def warm(system: System, prefix: str) -> None:
    """Have a prefix computed past the gateway, which can know of it by KV events alone."""
    with system.client() as client:
        list(client.generate(list(prefix.encode()), max_tokens=1))


def num_cached(router: Gateway, prompt: str) -> int:
    """How much of a prompt was cached where the gateway sent it; the answer is right wherever that is."""
    response = router.call("completions", prompt=prompt, max_tokens=4, **MODEL)
    assert response["choices"][0]["text"] == expected(prompt, 4)[0]
    return int(response["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_prompts_go_to_the_instance_whose_cache_has_their_beginnings(router: Gateway, pair: list[System]) -> None:
    prefixes = [f"{name} " * 40 for name in ("tomato", "potato")]
    for system, prefix in zip(pair, prefixes, strict=True):
        warm(system, prefix)
    wait_for(lambda: "Learned block_size" in router.log, "the gateway has heard of blocks")
    before = [system.statistics().num_admitted for system in pair]
    for turn in range(4):
        for prefix in prefixes:
            assert num_cached(router, f"{prefix}{turn}") == len(prefix) // BLOCK_SIZE * BLOCK_SIZE
    admitted = [system.statistics().num_admitted for system in pair]
    assert [after - earlier for after, earlier in zip(admitted, before, strict=True)] == [4, 4]
    assert 'branch="event_hit"' in router.log


def test_a_gateway_is_told_what_was_cached_before_it_came_and_before_it_lost_us(
    pair: list[System], environment: Path
) -> None:
    second, prefix = pair[1], "aubergine " * 30
    warm(second, prefix)
    with running_gateway(environment, [system.address for system in pair], "--policy=cache_aware") as router:
        wait_for(lambda: "Learned block_size" in router.log, "the gateway has heard of blocks")
        for turn in range(3):
            assert num_cached(router, f"{prefix}{turn}") == len(prefix) // BLOCK_SIZE * BLOCK_SIZE
        (frontend,) = second.processes("frontend")
        frontend.kill()
        frontend.wait()
        second.start("frontend")
        second.wait_until_serving()
        wait_for(lambda: router.log.count("KV event stream connected") >= 3, "it has subscribed anew", 60)
        num_before = second.statistics().num_admitted
        assert num_cached(router, f"{prefix}again") == len(prefix) // BLOCK_SIZE * BLOCK_SIZE
        assert second.statistics().num_admitted == num_before + 1
