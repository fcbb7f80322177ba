"""A system whose worker guesses tokens with a draft model, over real sockets."""

from concurrent.futures import ThreadPoolExecutor

import grpc
from processes import running_system
from synthetic_oracle import continue_greedily

from blockplane.client.client import Client
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

PROMPTS = [[(length * 31 + index * 7) % 256 for index in range(length)] for length in (3, 16, 47, 70)]


def tokens_of(client: Client, prompt: list[int]) -> list[int]:
    deltas = client.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)
    return [token_id for delta in deltas for token_id in delta.token_ids]


def test_texts_are_those_without_drafts_and_the_engine_tells_how_many_were_accepted() -> None:
    """The draft model is the model itself, so that every guess is right, a cached prefix or none before it."""
    flags = "--num-draft-tokens=3", "--draft-source=model", "--draft-model=synthetic"
    with running_system("--profile=development", "--max-model-len=256", *flags) as system, system.client() as client:
        for _ in range(2):
            with ThreadPoolExecutor(4) as pool:
                texts = list(pool.map(lambda prompt: tokens_of(client, prompt), PROMPTS))
            assert texts == [continue_greedily(prompt, 40, ignore_eos=True) for prompt in PROMPTS]
        with grpc.insecure_channel(system.engine_address) as channel:
            statistics = EngineStub(channel).GetStatistics(pb.GetStatisticsRequest())
    assert statistics.num_cached_tokens > 0
    # Of 39 tokens after the first three in four are guessed.
    assert statistics.num_draft_tokens == statistics.num_accepted_tokens > 2 * 4 * 26
