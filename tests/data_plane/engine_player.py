"""Plays the engine to a worker's runner over several KV cache groups; knows nothing of how the worker computes.

Its blocks come from one pool for all rows and groups. What left a window goes back to it at once, without a word to the
worker, full of NaN.
"""

import random
from dataclasses import replace

import numpy as np

from blockplane.data_plane.grammars import Grammars
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.models.synthetic_arithmetic import EOS_TOKEN_ID
from blockplane.data_plane.runner import Runner
from blockplane.protos.kv_cache import first_visible
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams

MAX_SEGMENT = 32
GREEDY = SamplingParams(1)


class EnginePlayer:
    """Requests by row: their tokens so far, how many are computed, and their block ids [group][logical block]."""

    def __init__(
        self,
        model: SyntheticModel,
        configure: Configure,
        max_segment: int = MAX_SEGMENT,
        grammars: Grammars | None = None,
    ) -> None:
        self.configure = configure
        self.texts: dict[int, list[int]] = {}
        self.num_computed_tokens: dict[int, int] = {}
        self.block_ids: dict[int, list[list[int]]] = {}
        self.num_reused = 0
        self._max_segment = max_segment
        self._runner = Runner(model, configure, (EOS_TOKEN_ID,), grammars=grammars)
        self._caches = [cache for attention in model.attentions for cache in attention.caches or ()]
        self._free = random.Random(1).sample(range(1, configure.num_blocks), configure.num_blocks - 1)
        self._last_row: dict[int, int] = {}
        self._plan = StepPlan(0)
        for block_id in range(configure.num_blocks):
            self._poison(block_id)

    def admit(
        self,
        row: int,
        prompt: list[int],
        num_cached_tokens: int = 0,
        cached: list[list[int]] | None = None,
        *,
        output: tuple[int, ...] = (),
        params: SamplingParams = GREEDY,
        seed: int = 0,
    ) -> None:
        """Take a request into the next plan; `cached` are ids [group][logical block] of tokens that are computed."""
        self.texts[row], self.num_computed_tokens[row] = [*prompt, *output], num_cached_tokens
        self.block_ids[row] = [[] for _ in self.configure.kv_cache_groups]
        token_ids = np.array(self.texts[row], np.int32)
        admission = Admission(row, token_ids, len(prompt), num_cached_tokens, params, seed)
        self._plan = replace(self._plan, admissions=(*self._plan.admissions, admission))
        for new_block in zip(*cached or (), strict=True):
            self._append_block(row, new_block)

    def release(self, row: int) -> None:
        """Take a request's row away in the next plan; its blocks are never used again."""
        del self.texts[row], self.num_computed_tokens[row], self.block_ids[row]
        self._plan = replace(self._plan, released_rows=np.append(self._plan.released_rows, np.int32(row)))

    def step(self) -> None:
        """Decode every row that can be, and prefill up to `max_segment` tokens of every other."""
        remaining = {row: len(text) - self.num_computed_tokens[row] for row, text in self.texts.items()}
        decodes = [row for row, count in remaining.items() if count == 1]
        prefills = {row: min(count, self._max_segment) for row, count in remaining.items() if count > 1}
        for row in (*decodes, *prefills):
            self._grow(row, self.num_computed_tokens[row] + prefills.get(row, 1))
        plan = replace(
            self._plan,
            step=self._plan.step + 1,
            decode_rows=np.array(decodes, np.int32),
            prefill_rows=np.array(list(prefills), np.int32),
            prefill_num_tokens=np.array(list(prefills.values()), np.int32),
        )
        sampled = iter(self._runner.step(plan).token_ids.tolist())
        for row in (*decodes, *prefills):
            self.num_computed_tokens[row] += prefills.get(row, 1)
            if self.num_computed_tokens[row] == len(self.texts[row]):
                self.texts[row].append(next(sampled))
            self._free_what_left_the_windows(row)
        self._plan = StepPlan(plan.step)

    def _grow(self, row: int, num_tokens: int) -> None:
        while len(self.block_ids[row][0]) * self.configure.block_size < num_tokens:
            new_block = tuple(self._free.pop(0) for _ in self.configure.kv_cache_groups)
            self.num_reused += sum(self._last_row.get(block_id, row) != row for block_id in new_block)
            self._append_block(row, new_block)

    def _append_block(self, row: int, new_block: tuple[int, ...]) -> None:
        for block_ids, block_id in zip(self.block_ids[row], new_block, strict=True):
            block_ids.append(block_id)
        self._plan = replace(
            self._plan,
            block_rows=np.append(self._plan.block_rows, np.int32(row)),
            block_ids=np.append(self._plan.block_ids, np.array(new_block, np.int32)),
        )

    def _free_what_left_the_windows(self, row: int) -> None:
        for group, block_ids in zip(self.configure.kv_cache_groups, self.block_ids[row], strict=True):
            first = first_visible(self.num_computed_tokens[row], group.sliding_window, group.attention_chunk_size)
            for logical_block in range(first // self.configure.block_size):
                if block_id := block_ids[logical_block]:
                    self._poison(block_id)
                    self._last_row[block_id] = row
                    self._free.append(block_id)
                    block_ids[logical_block] = 0

    def _poison(self, block_id: int) -> None:
        for cache in self._caches:
            cache[block_id] = float("nan")
