"""One wrong slot, block, mask or position changes the synthetic model's state: what makes its text a proof."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from synthetic_driver import SyntheticDriver
from torch import Tensor

from blockplane.data_plane.attention import AttentionBatch, AttentionSpec, DecodeBatch
from blockplane.data_plane.backends.backend import Kernels
from blockplane.data_plane.models import synthetic_arithmetic as arithmetic
from blockplane.data_plane.models.synthetic import SyntheticModel

CONTEXT = 70
"""Tokens in the cache before the step under test: four full blocks and a part, beyond the window of 48."""
MODEL = SyntheticModel("bfloat16")
SLOTS = [
    (layer, position)
    for layer, window in enumerate(arithmetic.WINDOWS)
    for position in range(0 if window is None else CONTEXT - window + 1, CONTEXT)
]
"""Every cached entry that the token at CONTEXT sees."""


class Step:
    """One token over a cache that a fault can be put into; `fill` lies in every unwritten slot."""

    def __init__(self, fill: float = float("nan")) -> None:
        self.text = random.Random(5).choices(range(256), k=CONTEXT + 16)
        self.driver = SyntheticDriver([self.text], model=MODEL, kv_dtype=torch.bfloat16, fill=fill)
        self.driver.prefill((0, CONTEXT))
        self.batch = DecodeBatch(
            slot_mapping=self.driver.slots([0], [CONTEXT]),
            block_table=self.driver.table([0], [CONTEXT + 1]),
            seq_lens=torch.tensor([CONTEXT + 1], dtype=torch.int32),
        )

    def run(self, batch: AttentionBatch | None = None, position: int = CONTEXT) -> tuple[int, int]:
        """(state, next token)."""
        self.driver.bind()
        batches = (batch or self.batch,)
        hidden = MODEL.forward(torch.tensor([self.text[CONTEXT]]), torch.tensor([position]), batches)
        return int(hidden[0, 0]), int(MODEL.logits(hidden).argmax())

    def key(self, layer: int, position: int) -> Tensor:
        """A view of the cache, [num_kv_heads, head_dim]."""
        return self.driver.caches[layer][0][self.driver.slot(0, position)]

    def value(self, layer: int, position: int) -> Tensor:
        return self.driver.caches[layer][1][self.driver.slot(0, position)]


@pytest.fixture(scope="module")
def step() -> Step:
    return Step()


@contextmanager
def fault(view: Tensor, content: Tensor) -> Iterator[None]:
    kept = view.clone()
    view.copy_(content.clone())
    yield
    view.copy_(kept)


def assert_all_show(step: Step, faults: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Each (view, content) that is not by chance the right one changes the state; most change the letter too."""
    right, wrong, num_faults = step.run(), [], 0
    for view, content in faults:
        num_faults += 1
        if not torch.equal(view, content.to(view)):
            with fault(view, content):
                wrong.append(step.run())
    assert step.run() == right
    assert len(wrong) > 0.95 * num_faults > 0
    assert all(state != right[0] for state, _ in wrong)
    assert sum(token != right[1] for _, token in wrong) > 0.9 * len(wrong)


@pytest.mark.parametrize("kv_head", [0, 1])
def test_any_visible_value_of_another_token_shows(step: Step, kv_head: int) -> None:
    channels = torch.arange(arithmetic.NUM_CHANNELS)
    states = arithmetic.mix(torch.arange(CONTEXT))[:, None]
    other = arithmetic.value(states, 0, 0, torch.arange(CONTEXT)[:, None], channels)
    assert_all_show(step, ((step.value(layer, p)[kv_head], other[p]) for layer, p in SLOTS))


@pytest.mark.parametrize("kv_head", [0, 1])
def test_any_visible_value_with_one_sign_flipped_shows(step: Step, kv_head: int) -> None:
    def flipped(value: Tensor, index: int) -> Tensor:
        return value * torch.ones_like(value).index_fill(0, value.nonzero()[index], -1)

    views = [(step.value(layer, p)[kv_head], p % arithmetic.BITS_PER_TOKEN) for layer, p in SLOTS]
    assert_all_show(step, ((view, flipped(view, index)) for view, index in views))


@pytest.mark.parametrize("kv_head", [0, 1])
def test_any_visible_slot_left_unwritten_shows(step: Step, kv_head: int) -> None:
    assert_all_show(step, ((step.value(*slot)[kv_head], torch.zeros(128)) for slot in SLOTS))
    assert_all_show(step, ((step.key(*slot)[kv_head], torch.zeros(128)) for slot in SLOTS))


def test_any_visible_slot_with_its_heads_exchanged_shows(step: Step) -> None:
    assert_all_show(step, ((step.value(*slot), step.value(*slot).flip(0)) for slot in SLOTS))
    assert_all_show(step, ((step.key(*slot), step.key(*slot).flip(0)) for slot in SLOTS))


def test_any_visible_entry_of_another_layer_shows(step: Step) -> None:
    assert_all_show(step, ((step.value(layer, p), step.value((layer + 1) % 3, p)) for layer, p in SLOTS))
    assert_all_show(step, ((step.key(layer, p), step.key((layer + 1) % 3, p)) for layer, p in SLOTS))


def test_any_visible_value_of_a_neighbour_shows(step: Step) -> None:
    assert_all_show(step, ((step.value(layer, p), step.value(layer, (p + 1) % CONTEXT)) for layer, p in SLOTS))


@pytest.mark.parametrize("kv_head", [0, 1])
def test_any_visible_key_of_another_position_shows_within_sixteen_tokens(step: Step, kv_head: int) -> None:
    """A token tells it unless both code channels that it draws agree: three of four do, and the next draw anew."""

    def run() -> list[int]:
        del step.driver.states[0][CONTEXT:]
        return step.driver.prefill((0, 16))[:, 0].tolist()

    right, wrong = run(), []
    last_window = CONTEXT + 16 - 48
    for layer, position in ((layer, p) for layer, p in SLOTS if arithmetic.WINDOWS[layer] is None or p >= last_window):
        with fault(step.key(layer, position)[kv_head], step.key(layer, (position + 31) % CONTEXT)[kv_head]):
            wrong.append(run())
    assert all(states != right for states in wrong)
    assert sum(states[0] != right[0] for states in wrong) > 0.65 * len(wrong)


def with_entries(
    entries: list[int], block_ids: Callable[[Tensor], Tensor | int]
) -> Callable[[DecodeBatch], DecodeBatch]:
    """The batch with some entries of its table replaced by a function of what they were."""

    def changed(batch: DecodeBatch) -> DecodeBatch:
        table = batch.block_table.clone()
        table[0, entries] = block_ids(table[0, entries])
        return replace(batch, block_table=table)

    return changed


@pytest.mark.parametrize(
    "change",
    [
        *(
            with_entries([a, b], lambda block_ids: block_ids.flip(0))
            for a in range(5)
            for b in range(a)
            if (a, b) != (3, 2)
        ),
        *(with_entries([entry], lambda block_ids: -1) for entry in range(4)),
        *(with_entries([entry], lambda block_ids: 0) for entry in range(4)),
        lambda batch: replace(batch, slot_mapping=batch.slot_mapping - 1),
        lambda batch: replace(batch, slot_mapping=torch.tensor([-1])),
        lambda batch: replace(batch, seq_lens=batch.seq_lens - 1),
        lambda batch: replace(batch, seq_lens=batch.seq_lens + 1),
    ],
)
def test_a_wrong_batch_shows(step: Step, change: Callable[[DecodeBatch], DecodeBatch]) -> None:
    """Of five blocks the window sees the second in part, the third and the fourth as a whole."""
    disturbed = Step(fill=0)
    assert disturbed.run(change(disturbed.batch))[0] != step.run()[0]


@dataclass(frozen=True)
class OneEntryTooMany:
    """Full layers read one position more; the window layer is right."""

    right: DecodeBatch

    @property
    def slot_mapping(self) -> Tensor:
        return self.right.slot_mapping

    def attend(self, kernels: Kernels, spec: AttentionSpec, query: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        seq_lens = self.right.seq_lens + (spec.sliding_window is None)
        return replace(self.right, seq_lens=seq_lens).attend(kernels, spec, query, k_cache, v_cache)


@pytest.mark.parametrize("content", ["zeros", "ones", "own", "of another token"])
def test_one_entry_too_many_shows(step: Step, content: str) -> None:
    right, disturbed = step.run(), Step(fill=float(content == "ones"))
    if content == "of another token":
        for layer in range(arithmetic.NUM_LAYERS):
            disturbed.key(layer, CONTEXT + 1).copy_(step.key(layer, 3))
            disturbed.value(layer, CONTEXT + 1).copy_(step.value(layer, 3))
    if content == "own":
        disturbed.driver.prefill((0, 2))
    assert disturbed.run() == right
    assert disturbed.run(OneEntryTooMany(disturbed.batch))[0] != right[0]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_position_off_by_one_shows(step: Step, shift: int) -> None:
    right = step.run()
    assert step.run(position=CONTEXT + shift)[0] != right[0]


@pytest.mark.parametrize("window", [47, 49, None])
def test_a_wrong_window_shows(step: Step, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = step.run()
    layer = MODEL.attentions[1]
    monkeypatch.setattr(layer, "spec", replace(layer.spec, sliding_window=window))
    assert step.run()[0] != right[0]


def test_what_lies_outside_the_visible_slots_changes_nothing() -> None:
    """NaN in every slot that the token should not see: foreign blocks, the null block, what left the window."""
    step = Step(fill=1)
    right = step.run()
    for layer, caches in enumerate(step.driver.caches):
        visible = [step.driver.slot(0, p) for seen, p in [*SLOTS, (layer, CONTEXT)] if seen == layer]
        for cache in caches:
            outside = torch.ones(cache.shape[:2], dtype=torch.bool)
            outside[tuple(torch.tensor(visible).T)] = False
            cache[outside] = float("nan")
    assert step.run() == right
