"""One worker's steps on the synthetic model: decodes beside prefills, padding, poison, and plans that are refused."""

import numpy as np
import pytest
import torch
from synthetic_oracle import continue_greedily

from blockplane.data_plane.graphs import Shape
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.runner import Runner
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import Admission, Configure, Int32Array, StepPlan
from blockplane.protos.sampling import SamplingParams

BLOCK_SIZE = 4
CONFIGURE = Configure(BLOCK_SIZE, 64, 128, num_batched_tokens_buckets=(16, 64), num_seqs_buckets=(1, 4))


def column(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def admit(row: int, prompt: list[int]) -> Admission:
    return Admission(row, np.array(prompt, np.int32), len(prompt), 0, SamplingParams(1), 0)


def blocks(row: int, num_blocks: int, first: int) -> tuple[Int32Array, Int32Array]:
    return np.full(num_blocks, row, np.int32), np.arange(first, first + num_blocks, dtype=np.int32)


def poison(model: SyntheticModel, value: float) -> None:
    for attention in model.attentions:
        assert attention.caches is not None
        for cache in attention.caches:
            cache.fill_(value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [0.0, float("nan"), 1e30])
def test_decodes_and_prefills_of_one_step_get_their_own_tokens_whatever_lies_in_other_slots(
    dtype: str, value: float
) -> None:
    model = SyntheticModel(dtype)
    runner = Runner(model, CONFIGURE)
    poison(model, value)
    old, new = list(range(10)), list(range(50, 61))
    rows, ids = blocks(2, 5, first=3)
    first = runner.step(StepPlan(1, column(), (admit(2, old),), rows, ids, column(2), column(10)))
    rows, ids = blocks(0, 4, first=20)
    mixed = runner.step(StepPlan(2, column(), (admit(0, new),), rows, ids, column(0), column(8), column(2)))
    last = runner.step(StepPlan(3, prefill_rows=column(0), prefill_num_tokens=column(3)))
    expected = continue_greedily(old, 3, ignore_eos=True)
    assert first.token_ids.tolist() == expected[:1]
    assert mixed.token_ids.tolist() == expected[1:2], "a segment inside a prompt samples nothing"
    assert last.token_ids.tolist() == [expected[2], *continue_greedily(new, 1, ignore_eos=True)]


def test_a_step_writes_the_slots_of_its_own_tokens_and_no_other() -> None:
    model = SyntheticModel("float32")
    runner = Runner(model, CONFIGURE)
    poison(model, float("nan"))
    rows, ids = blocks(1, 3, first=7)
    runner.step(StepPlan(1, column(), (admit(1, list(range(5))),), rows, ids, column(1), column(5)))
    runner.step(StepPlan(2, decode_rows=column(1)))
    written = {7 * BLOCK_SIZE + offset for offset in range(6)}
    for attention in model.attentions:
        assert attention.caches is not None
        for cache in attention.caches:
            finite = torch.isfinite(cache.flatten(0, 1)).all(dim=(1, 2))
            assert set(torch.nonzero(finite).flatten().tolist()) == written


def test_a_plan_without_work_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no work"):
        Runner(SyntheticModel("float32"), CONFIGURE).step(StepPlan(1))


def test_what_was_built_is_what_was_told() -> None:
    runner = Runner(SyntheticModel("float32"), CONFIGURE)
    assert runner.configure == CONFIGURE
    assert runner.graphs.num_builds == 4
    assert set(runner.graphs.num_runs) == {Shape(16), Shape(64), Shape(1, 1), Shape(4, 4)}
