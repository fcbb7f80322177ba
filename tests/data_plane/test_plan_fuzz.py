"""Plans of any content: they are carried out or refused with a typed error, and never write where they must not."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted_attaches import CONFIGURE, PROMPT, column, decode, prefill
from synthetic_oracle import continue_greedily

from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.runner import Runner
from blockplane.protos import wire
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import Admission, StepPlan
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb

CANARY = -77
KV_CANARY = 3.25
"""No key or value of the synthetic model."""

LIKELY = st.integers(-1, 4)
"""Rows and counts about those that there are: 0, 1 and beyond."""
NUMBERS = st.one_of(LIKELY, LIKELY, st.integers(-(2**31), 2**31 - 1))
BLOCK_IDS = st.one_of(st.integers(1, CONFIGURE.num_blocks - 1), st.integers(-1, CONFIGURE.num_blocks), NUMBERS)


def columns(numbers: st.SearchStrategy[int], max_size: int = 5) -> st.SearchStrategy[np.ndarray]:
    return st.lists(numbers, max_size=max_size).map(lambda values: np.array(values, np.int32))


ADMISSIONS = st.builds(
    Admission,
    row=st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1)),
    token_ids=columns(st.integers(0, 255), max_size=20) | columns(NUMBERS),
    num_prompt_tokens=st.integers(0, 20) | st.integers(0, 2**32 - 1),
    num_computed_tokens=st.integers(0, 3) | st.integers(0, 2**32 - 1),
    params=st.builds(
        SamplingParams, max_tokens=st.integers(0, 9), temperature=st.floats(0, 2), top_k=st.integers(0, 9)
    ),
    seed=st.integers(0, 2**64 - 1),
)
SOUND = StepPlan(
    3,
    admissions=(Admission(0, column(*range(20, 27)), 7, 0, SamplingParams(9), 0),),
    block_rows=column(0, 1, 0),
    block_ids=column(5, 6, 7),
    prefill_rows=column(0),
    prefill_num_tokens=column(7),
    decode_rows=column(1),
)
"""Row 0 is admitted, with two blocks, while row 1 decodes and gets another."""


def plans(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[StepPlan]:
    """The sound plan, of which half of the fields are something else."""
    return st.builds(StepPlan, **{name: st.just(getattr(SOUND, name)) | other for name, other in fields.items()})


PLANS = plans(
    step=st.just(3) | st.integers(0, 2**64 - 1),
    released_rows=columns(NUMBERS, 2),
    admissions=st.lists(ADMISSIONS, max_size=2).map(tuple),
    block_rows=columns(NUMBERS),
    block_ids=columns(BLOCK_IDS, 3),
    prefill_rows=columns(NUMBERS, 2),
    prefill_num_tokens=columns(NUMBERS, 2),
    decode_rows=st.none() | columns(NUMBERS, 3),
    decode_num_tokens=st.none() | columns(NUMBERS, 3),
)


@dataclass
class Guarded:
    """A runner after two sound steps of row 1 in blocks 1 to 4, with canaries wherever it has written nothing."""

    runner: Runner
    caches: list[torch.Tensor]

    def begin(self) -> None:
        rows = self.runner._rows
        self.runner.reset(CONFIGURE)
        rows.token_ids[:] = CANARY
        for cache_ in self.caches:
            cache_.fill_(KV_CANARY)
        self.runner.step(prefill(1))
        self.runner.step(decode(2))

    def snapshot(self) -> list[torch.Tensor]:
        return [cache_.clone() for cache_ in self.caches]


@cache
def guarded() -> Guarded:
    model = SyntheticModel("float32")
    runner = Runner(model, CONFIGURE)
    return Guarded(runner, [cache_ for layer in model.attentions for cache_ in layer.caches or ()])


def check(plan: StepPlan) -> bool:
    """Whether the plan was carried out."""
    worker = guarded()
    worker.begin()
    caches = worker.snapshot()
    try:
        # As it comes: no test value that the wire would not carry.
        worker.runner.step(wire.plan_from_proto(pb.StepPlan.FromString(wire.plan_to_proto(plan).SerializeToString())))
    except ProtocolError:
        assert all(torch.equal(now, then) for now, then in zip(worker.caches, caches, strict=True))
        is_carried_out = False
    else:
        is_carried_out = True
    may_write = np.isin(np.arange(CONFIGURE.num_blocks), [*range(1, 5), *plan.block_ids.tolist()])
    may_write[0] = False
    for now, then in zip(worker.caches, caches, strict=True):
        assert torch.equal(now[~may_write], then[~may_write]), "a block that the row does not have was written"
    admitted = [admission.row for admission in plan.admissions]
    others = ~np.isin(np.arange(CONFIGURE.max_num_seqs), [1, *admitted])
    assert (worker.runner._rows.token_ids[others] == CANARY).all()
    return is_carried_out


@settings(max_examples=120, deadline=None)
@given(PLANS)
@example(SOUND)
@example(replace(SOUND, block_ids=column(-3, 6, 7)))
@example(replace(SOUND, block_ids=column(5, 6, CONFIGURE.num_blocks)))
@example(replace(SOUND, block_ids=column(0, 6, 7)))
@example(replace(SOUND, block_rows=column(1, 1, 1)))
@example(replace(SOUND, prefill_num_tokens=column(8)))
@example(StepPlan(3))
@example(StepPlan(3, block_rows=column(1), block_ids=column(0), decode_rows=column(1)))
@example(StepPlan(3, prefill_rows=column(1), prefill_num_tokens=column(2**31 - 1), decode_rows=column()))
@example(StepPlan(3, decode_rows=column(-1)))
@example(StepPlan(3, released_rows=column(-1)))
@example(StepPlan(3, block_rows=column(-1), block_ids=column(5)))
def test_whatever_a_plan_says_only_what_its_rows_own_is_written(plan: StepPlan) -> None:
    check(plan)


@settings(max_examples=20, deadline=None)
@given(PLANS)
def test_after_any_plan_a_reset_worker_computes_as_a_new_one(plan: StepPlan) -> None:
    check(plan)
    runner = guarded().runner
    num_builds = runner.graphs.num_builds
    runner.reset(CONFIGURE)
    token_ids = [int(runner.step(sent).token_ids[0]) for sent in (prefill(1), decode(2), StepPlan(3))]
    assert token_ids == continue_greedily(PROMPT, 3, ignore_eos=True)
    assert runner.graphs.num_builds == num_builds


def test_the_canaries_see_a_sound_plan_and_let_it_pass() -> None:
    assert check(decode(3))
    assert check(SOUND)
    assert not check(StepPlan(3, decode_rows=column(0)))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_no_plan_or_a_refused_one(data: bytes) -> None:
    try:
        proto = pb.StepPlan.FromString(data)
    except DecodeError:
        return
    worker = guarded()
    worker.begin()
    with suppress(ProtocolError):
        worker.runner.step(wire.plan_from_proto(proto))
