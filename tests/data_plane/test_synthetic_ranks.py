"""The synthetic model divided among ranks has the states, logits and tokens that it has alone, bit for bit."""

import random

import pytest
import torch
from ranks_in_threads import RanksAtOnce, RanksInThreads, run_ranks
from synthetic_driver import SyntheticDriver
from synthetic_oracle import SyntheticOracle, continue_greedily
from torch import Tensor

from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.protos.errors import ModelError

PROMPT = random.Random(1).choices(range(256), k=70)
NUM_DECODED = 4


def run(ranks: Ranks, dtype: str = "float32", seed: int = 0) -> tuple[list[int], Tensor]:
    """States and logits after a prompt of two padded segments, and a greedy text, past the window."""
    model = SyntheticModel(dtype, ranks=ranks, seed=seed)
    driver = SyntheticDriver([list(PROMPT)], model=model, kv_dtype=getattr(torch, dtype), seed=ranks.rank)
    driver.prefill((0, 40), padding=3)
    hidden, logits = driver.prefill((0, len(PROMPT) - 40)), []
    for _ in range(NUM_DECODED):
        logits.append(model.logits(hidden[-1:]))
        driver.texts[0].append(int(logits[-1].argmax()))
        hidden = driver.decode(0)
    return driver.states[0], torch.cat(logits)


@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float32"), (4, "bfloat16"), (8, "float32")])
def test_every_rank_has_the_states_and_logits_of_the_model_alone(world_size: int, dtype: str) -> None:
    states, logits = run(ALONE, dtype)
    assert states == SyntheticOracle(PROMPT + continue_greedily(PROMPT, NUM_DECODED, ignore_eos=True)).states.tolist()
    assert logits.shape == (NUM_DECODED, SyntheticModel.vocab_size)
    for of_rank, logits_of_rank in run_ranks(world_size, lambda ranks: run(ranks, dtype)):
        assert of_rank == states
        assert torch.equal(logits_of_rank, logits)


def test_another_seed_is_another_model_in_every_rank_and_a_refilled_one_is_it() -> None:
    def refilled(ranks: RanksInThreads) -> tuple[bytes, list[Tensor]]:
        model = SyntheticModel("float32", ranks=ranks)
        model.refill(7)
        return model.fingerprint, [layer._factors for layer in model._layers]

    alone = run(ALONE, seed=7)[0]
    assert alone != run(ALONE)[0]
    assert [states for states, _ in run_ranks(2, lambda ranks: run(ranks, seed=7))] == [alone] * 2
    whole = SyntheticModel("float32", seed=7)
    parts = run_ranks(2, refilled)
    assert {fingerprint for fingerprint, _ in parts} == {whole.fingerprint}
    for layer, *factors in zip(whole._layers, *(factors for _, factors in parts), strict=True):
        assert torch.equal(torch.cat(factors), layer._factors)


def test_a_ranks_caches_hold_what_the_model_alone_keeps_of_its_kv_heads() -> None:
    def caches(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
        driver = SyntheticDriver([list(PROMPT)], model=SyntheticModel("float32", ranks=ranks), fill=0.0)
        driver.prefill((0, len(PROMPT)))
        return driver.caches

    alone, (first, second) = caches(ALONE), run_ranks(2, caches)
    for layer, *of_ranks in zip(alone, first, second, strict=True):
        for whole, *parts in zip(layer, *of_ranks, strict=True):
            # [num_blocks, block_size, num_kv_heads, head_dim].
            assert torch.equal(torch.cat(parts, dim=2), whole)


@pytest.mark.parametrize(("world_size", "expected"), [(1, (8, 2)), (2, (4, 1)), (4, (2, 1)), (8, (1, 1))])
def test_layers_keep_a_ranks_own_heads(world_size: int, expected: tuple[int, int]) -> None:
    model = SyntheticModel("float32", ranks=RanksAtOnce(world_size).ranks[-1])
    assert {(layer.spec.num_heads, layer.spec.num_kv_heads) for layer in model.attentions} == {expected}


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="8 attention heads cannot be divided among 16 ranks"):
        SyntheticModel("float32", ranks=RanksAtOnce(16).ranks[0])
