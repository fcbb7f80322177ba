"""The whole system over real sockets: what clients get from a scarce cache that many of them share."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from processes import System, running_system
from synthetic_oracle import continue_greedily

from blockplane.client.client import Client
from blockplane.protos.errors import AbortedError, CapacityError, DeadlineError, DuplicateError, InvalidRequestError

BLOCK_SIZE = 16
SEGMENT = 64
WINDOW = 48
USABLE_BLOCKS = 265
"""Too few for the 64 requests below, so that rows give way and resume."""


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system(
        f"--block-size={BLOCK_SIZE}",
        f"--num-blocks={USABLE_BLOCKS + 1}",
        f"--num-batched-tokens-buckets=16,{SEGMENT}",
        "--num-seqs-buckets=1,2,4,8,16,32",
        "--max-model-len=2048",
        "--max-waiting-requests=100",
    ) as system:
        yield system


@pytest.fixture
def client(system: System) -> Iterator[Client]:
    with system.client() as client:
        yield client


def prompt_of(length: int) -> list[int]:
    return [(length * 31 + index * 7) % 256 for index in range(length)]


def tokens_of(client: Client, prompt: list[int], num_tokens: int) -> list[int]:
    deltas = client.generate(prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return [token_id for delta in deltas for token_id in delta.token_ids]


@pytest.mark.timeout(300)
def test_64_requests_at_once_get_the_tokens_of_their_solo_runs(system: System, client: Client) -> None:
    """Lengths around every boundary: blocks, the window, segments, and several of each."""
    edges = (BLOCK_SIZE, 2 * BLOCK_SIZE, WINDOW, SEGMENT, SEGMENT + BLOCK_SIZE, 2 * SEGMENT, 3 * SEGMENT)
    lengths = [*sorted({edge + offset for edge in edges for offset in range(-5, 6)})[:58], 1, 2, 3, 5, 7, 300]
    assert len(lengths) == 64
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda length: tokens_of(client, prompt_of(length), 48), lengths))
    assert "gives up its" in system.log("engine"), "the cache was too small for all of them"
    for length, tokens in zip(lengths, together, strict=True):
        assert tokens == continue_greedily(prompt_of(length), 48, ignore_eos=True), f"prompt of {length}"
    for length, tokens in list(zip(lengths, together, strict=True))[::8]:
        assert tokens_of(client, prompt_of(length), 48) == tokens, f"prompt of {length}, alone"


@pytest.mark.parametrize("prefix", [BLOCK_SIZE * 5, BLOCK_SIZE * 5 + 3])
@pytest.mark.parametrize("suffix", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, SEGMENT - 1, SEGMENT, SEGMENT + 1])
def test_a_prefix_that_is_cached_changes_no_token(client: Client, prefix: int, suffix: int) -> None:
    def run(salt: str) -> tuple[list[int], int]:
        prompt = [*prompt_of(prefix), *([suffix % 250] * suffix)]
        deltas = list(client.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True, cache_salt=salt))
        assert deltas[-1].usage is not None
        return [token_id for delta in deltas for token_id in delta.token_ids], deltas[-1].usage.num_cached_tokens

    cold, num_cached = run(f"{prefix} {suffix}")
    assert num_cached == 0
    warm, num_cached = run(f"{prefix} {suffix}")
    assert num_cached == (prefix + suffix - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert warm == cold == continue_greedily([*prompt_of(prefix), *([suffix % 250] * suffix)], 8, ignore_eos=True)


def test_many_prompts_of_one_prefix_share_it_and_each_gets_its_own_text(client: Client) -> None:
    shared = prompt_of(6 * SEGMENT)

    def run(index: int) -> tuple[list[int], int]:
        deltas = list(client.generate([*shared, index], max_tokens=12, temperature=0, ignore_eos=True, cache_salt="32"))
        assert deltas[-1].usage is not None
        return [token_id for delta in deltas for token_id in delta.token_ids], deltas[-1].usage.num_cached_tokens

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(run, range(32)))
    for index, (tokens, _) in enumerate(results):
        assert tokens == continue_greedily([*shared, index], 12, ignore_eos=True)
    assert sum(num_cached for _, num_cached in results) == 31 * len(shared), "computed once"


def test_a_request_fills_the_context_to_its_last_token(client: Client) -> None:
    prompt = prompt_of(2040)
    *_, last = client.generate(prompt, temperature=0, ignore_eos=True)
    assert last.finish_reason == "length"
    assert last.usage is not None
    assert (last.usage.num_prompt_tokens, last.usage.num_output_tokens) == (2040, 8)


def test_the_same_seed_gives_the_same_text_alone_and_in_company(client: Client) -> None:
    def run(seed: int) -> list[int]:
        deltas = client.generate(prompt_of(40), max_tokens=30, temperature=1.5, seed=seed, ignore_eos=True)
        return [token_id for delta in deltas for token_id in delta.token_ids]

    alone = run(42)
    with ThreadPoolExecutor(12) as pool:
        mates = list(pool.map(run, [*range(10), 42, 42]))
    assert mates[10] == mates[11] == alone
    assert len({tuple(tokens) for tokens in mates}) == 11, "other seeds give other texts"


def samples_of(client: Client, num_samples: int, **arguments: Any) -> list[list[int]]:
    """Each sample's tokens."""
    samples: list[list[int]] = [[] for _ in range(num_samples)]
    ends = set()
    for delta in client.generate(prompt_of(40), num_samples=num_samples, ignore_eos=True, **arguments):
        samples[delta.sample_index] += delta.token_ids
        if delta.finish_reason is not None:
            ends.add(delta.sample_index)
    assert ends == {*range(num_samples)}
    return samples


def test_samples_of_one_seed_differ_and_come_again_whatever_their_number_and_company(client: Client) -> None:
    def run(num_samples: int) -> list[list[int]]:
        return samples_of(client, num_samples, max_tokens=30, temperature=1.5, seed=42)

    alone = run(4)
    assert len({tuple(tokens) for tokens in alone}) == 4
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(run, [4, 2, 1]))
    assert together == [alone, alone[:2], alone[:1]]


def test_greedy_samples_all_are_the_greedy_text(client: Client) -> None:
    expected = continue_greedily(prompt_of(40), 20, ignore_eos=True)
    assert samples_of(client, 5, max_tokens=20, temperature=0) == [expected] * 5


def test_samples_that_are_aborted_end_and_hold_nothing(client: Client) -> None:
    """Case 4."""
    num_received = [0] * 4
    deltas = client.generate(
        prompt_of(40), num_samples=4, max_tokens=2000, temperature=1.5, ignore_eos=True, request_id="four"
    )
    while min(num_received) < 3:
        delta = next(deltas)
        num_received[delta.sample_index] += len(delta.token_ids)
    client.abort(["four"])
    with pytest.raises(AbortedError, match="four"):
        list(deltas)
    assert len(tokens_of(client, prompt_of(2000), 3)) == 3, "nearly the whole cache is free"
    assert len(list(client.generate([1], max_tokens=1, request_id="four"))) == 1, "and so is the id"


def test_one_sample_meets_a_stop_text_and_the_others_go_on(client: Client) -> None:
    free = samples_of(client, 4, max_tokens=40, temperature=1.5, seed=7)
    texts = ["".join(map(chr, tokens)) for tokens in free]
    stop = next(char for char in texts[2][3:] if char < "\x80" and sum(char in text for text in texts) < 4)
    stopped = samples_of(client, 4, max_tokens=40, temperature=1.5, seed=7, stop=stop)
    for text, tokens in zip(texts, stopped, strict=True):
        assert "".join(map(chr, tokens)) == text[: text.index(stop) + 1 if stop in text else None]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"allowed_token_ids": [65]}, [65] * 6),
        ({"allowed_token_ids": [65, 66], "logit_bias": {66: 100}}, [66] * 6),
        ({"allowed_token_ids": [65, 66], "logit_bias": {66: 100}, "bad_word_token_ids": [[66]]}, [65] * 6),
        ({"allowed_token_ids": [65, 66], "logit_bias": {66: 100}, "bad_words": "BB"}, [66, 65] * 3),
        (
            {"allowed_token_ids": [65, 66], "stop_token_ids": [66], "logit_bias": {66: 100}, "min_tokens": 2},
            [65, 65, 66],
        ),
    ],
)
def test_what_may_come_is_what_a_request_says(client: Client, arguments: dict[str, Any], expected: list[int]) -> None:
    deltas = client.generate(prompt_of(40), max_tokens=6, temperature=0, **arguments)
    assert [token_id for delta in deltas for token_id in delta.token_ids] == expected


def test_drawing_from_the_likeliest_alone_is_greedy_at_any_temperature(client: Client) -> None:
    expected = continue_greedily(prompt_of(40), 20, ignore_eos=True)
    for arguments in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert samples_of(client, 2, max_tokens=20, temperature=1.5, **arguments) == [expected] * 2


def test_logprobs_tell_of_every_token_of_prompt_and_output(client: Client) -> None:
    prompt = prompt_of(200)
    told, prompt_told, tokens = [], [], []
    arguments: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for delta in client.generate(prompt, logprobs=2, prompt_logprobs=1, **arguments):
        assert not (delta.prompt_logprobs and tokens), "the prompt's come first"
        prompt_told += delta.prompt_logprobs or ()
        told += delta.logprobs or ()
        tokens += delta.token_ids
    assert tokens == continue_greedily(prompt, 12, ignore_eos=True)
    assert [token.token_id for token in told] == tokens
    for token in told:
        assert (token.top_token_ids[0], token.top_logprobs[0]) == (token.token_id, token.logprob), "the likeliest"
        assert len(token.top_token_ids) == 2
        assert token.top_logprobs[1] < token.logprob < 0
    assert [token.token_id for token in prompt_told] == prompt[1:]
    assert all(len(token.top_token_ids) == 1 and token.logprob <= token.top_logprobs[0] <= 0 for token in prompt_told)


def test_deltas_join_to_the_text_and_no_character_is_split(client: Client) -> None:
    deltas = list(client.generate("Grüße, 世界!", max_tokens=200, temperature=0, ignore_eos=True))
    text = "".join(delta.text for delta in deltas)
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert text == bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")
    assert not any(delta.text.endswith("\ufffd") for delta in deltas[:-1])
    assert any(ord(character) > 127 for character in text), "the synthetic text has characters of two bytes"
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert deltas[-1].finish_reason == "length"


def test_end_of_text_stops_a_request_that_does_not_ignore_it(client: Client) -> None:
    for length in range(1, 60):
        expected = continue_greedily(prompt_of(length), 80)
        if len(expected) < 80:
            break
    deltas = list(client.generate(prompt_of(length), max_tokens=80, temperature=0))
    assert [token_id for delta in deltas for token_id in delta.token_ids] == expected
    assert deltas[-1].finish_reason == "stop"


def test_a_stop_id_ends_the_request(client: Client) -> None:
    tokens = continue_greedily(prompt_of(20), 24, ignore_eos=True)
    stop = tokens[7]
    deltas = list(client.generate(prompt_of(20), max_tokens=24, temperature=0, ignore_eos=True, stop_token_ids=[stop]))
    assert [token_id for delta in deltas for token_id in delta.token_ids] == tokens[: tokens.index(stop) + 1]
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt holds -1"),
        ({"prompt": [258]}, "prompt holds 258"),
        ({"prompt": [2**63 - 1]}, "prompt holds 9223372036854775807"),
        ({"prompt": [1], "stop_token_ids": [258]}, "stop_token_ids"),
        ({"prompt": [1], "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1], "temperature": -1.0}, "temperature"),
        ({"prompt": [1], "temperature": float("nan")}, "temperature"),
        ({"prompt": [1], "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": [1], "logit_bias": {258: 1.0}}, "logit_bias holds 258"),
        ({"prompt": [1], "bad_words": ""}, "bad_words"),
        ({"prompt": [1], "num_samples": 65}, "num_samples"),
        ({"prompt": [1] * 2048}, "max_model_len 2048"),
    ],
)
def test_a_senseless_request_is_refused_by_its_field_and_the_server_lives(
    client: Client, arguments: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        list(client.generate(**arguments))  # type: ignore[arg-type]
    assert tokens_of(client, [1, 2], 2) == continue_greedily([1, 2], 2, ignore_eos=True)


def test_a_live_id_is_refused_and_free_again_after_its_end(client: Client) -> None:
    first = client.generate([1, 2], max_tokens=2000, ignore_eos=True, request_id="mine")
    next(first)
    with pytest.raises(DuplicateError, match="mine"):
        list(client.generate([1], max_tokens=1, request_id="mine"))
    client.abort(["mine"])
    with pytest.raises(AbortedError):
        list(first)
    assert len(list(client.generate([1], max_tokens=1, request_id="mine"))) == 1


def test_abort_from_another_connection_ends_the_stream_and_unknown_ids_are_fine(system: System, client: Client) -> None:
    """Case 35, an abort after the end included."""
    stream = client.generate([1, 2, 3], max_tokens=2000, ignore_eos=True, request_id="doomed")
    next(stream)
    with system.client() as other:
        other.abort(["doomed", "never heard of"])
        other.abort(["doomed"])
    with pytest.raises(AbortedError, match="doomed"):
        list(stream)
    client.abort(["doomed"])


def test_a_client_that_leaves_frees_its_row_and_blocks_for_others(client: Client) -> None:
    """Streams of endless appetite leave, and a prompt that needs nearly the whole cache is served."""
    streams = [client.generate(prompt_of(40), max_tokens=2000, ignore_eos=True) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(next, streams))
    for stream in streams:
        stream.close()
    assert len(tokens_of(client, prompt_of(2000), 3)) == 3


def test_a_full_queue_refuses_with_a_retry_and_accepted_streams_all_end_right(client: Client) -> None:
    refused = threading.Event()

    def run(index: int) -> list[int] | None:
        try:
            return tokens_of(client, [index % 250 + 1], 20)
        except CapacityError:
            refused.set()
            return None

    with ThreadPoolExecutor(180) as pool:
        results = list(pool.map(run, range(180)))
    assert refused.is_set()
    for index, tokens in enumerate(results):
        if tokens is not None:
            assert tokens == continue_greedily([index % 250 + 1], 20, ignore_eos=True)


def test_health_and_reflection_name_the_services(system: System) -> None:
    with grpc.insecure_channel(system.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "blockplane.v1.Inference", "vllm.grpc.engine.VllmEngine"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
    names = {service.name for service in listed.list_services_response.service}
    assert {"blockplane.v1.Inference", "vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"} <= names


def test_the_model_is_described_as_the_engine_serves_it(client: Client) -> None:
    model = client.model_info()
    assert (model.name, model.vocab_size, model.max_model_len) == ("synthetic", 258, 2048)
    assert (model.bos_token_id, model.eos_token_ids) == (256, (257,))


def test_a_deadline_ends_a_request_and_frees_its_row(client: Client) -> None:
    with pytest.raises(DeadlineError):
        list(client.generate([1], max_tokens=2000, ignore_eos=True, timeout=0.5))
    assert len(tokens_of(client, prompt_of(2000), 2)) == 2
