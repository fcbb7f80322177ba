"""What the synthetic model must say, by integer sums over the whole history; knows no attention, blocks or batches."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from blockplane.data_plane.models import synthetic_arithmetic as arithmetic
from blockplane.data_plane.models.synthetic_arithmetic import NUM_CHANNELS, NUM_KV_HEADS, NUM_LAYERS, NUM_SUMS, WINDOWS

_MAX_TOKENS = 4096
_CHUNK = 512
_CHANNELS = np.arange(NUM_CHANNELS)
_ALPHABET = np.array(arithmetic.ALPHABET)


def next_token(token_ids: list[int]) -> int:
    """The greedy token after these; O(n^2)."""
    return SyntheticOracle(token_ids).next_token()


def continue_greedily(token_ids: list[int], num_tokens: int, *, ignore_eos: bool = False, seed: int = 0) -> list[int]:
    """The next `num_tokens` greedy tokens, fewer where the text ends: the end-of-text token is then the last.

    `seed`: of the model's weights.
    """
    oracle, continuation = SyntheticOracle(token_ids, seed), list[int]()
    while len(continuation) < num_tokens:
        continuation.append(oracle.next_token())
        if continuation[-1] == arithmetic.EOS_TOKEN_ID and not ignore_eos:
            break
        oracle.extend(continuation[-1:])
    return continuation


class SyntheticOracle:
    """The history of one text: the values of all its tokens, and their last states."""

    def __init__(self, token_ids: list[int], seed: int = 0) -> None:
        self._seed = seed
        self.token_ids: list[int] = []
        self.states = np.zeros(0, np.int64)
        # float32 for the speed of its matrix products; sums of less than 2^24 signs are exact in it.
        self._values = np.zeros((NUM_LAYERS, NUM_KV_HEADS, _MAX_TOKENS, NUM_CHANNELS), np.float32)
        for start in range(0, len(token_ids), _CHUNK):
            self.extend(token_ids[start : start + _CHUNK])

    def next_token(self) -> int:
        state, token_id = self.states[-1:], np.array(self.token_ids[-1:])
        return int(arithmetic.target(state, token_id, _ALPHABET)[0])

    def extend(self, token_ids: list[int]) -> None:
        positions = np.arange(len(self.token_ids), len(self.token_ids) + len(token_ids))
        self.token_ids += token_ids
        state = arithmetic.first_state(np.array(token_ids), positions)
        for layer in range(NUM_LAYERS):
            sums = [self._head_sums(layer, kv_head, positions, state) for kv_head in range(NUM_KV_HEADS)]
            taken_in = arithmetic.taken_in(np.stack(sums, axis=1), _factors(layer, self._seed))
            state = arithmetic.next_state(state, taken_in)
        self.states = np.concatenate([self.states, state])

    def _head_sums(
        self, layer: int, kv_head: int, positions: NDArray[np.int64], state: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Keep the tokens' values, then sum: [num_tokens, NUM_SUMS, NUM_CHANNELS]."""
        self._values[layer, kv_head, positions] = arithmetic.value(
            state[:, None], layer, kv_head, positions[:, None], _CHANNELS
        )
        values = self._values[layer, kv_head, : len(self.token_ids)]
        others, window = np.arange(len(values)), WINDOWS[layer] or _MAX_TOKENS
        visible = (others <= positions[:, None]) & (others > positions[:, None] - window)
        signs = _signs(layer, kv_head)
        sums = np.empty((len(positions), NUM_SUMS, NUM_CHANNELS), np.int64)
        sums[:, 0] = visible.astype(np.float32) @ values
        for index in (0, 1):
            channel = arithmetic.drawn_channel(state, layer, kv_head, index)
            agreeing = signs[channel, : len(values)] == signs[channel, positions][:, None]
            sums[:, 1 + index] = (visible & agreeing).astype(np.float32) @ values
        sums[:, 3] = values[arithmetic.drawn_position(state, layer, kv_head, positions)]
        return sums


@cache
def _signs(layer: int, kv_head: int) -> NDArray[np.int8]:
    """[NUM_CODE_CHANNELS, _MAX_TOKENS]"""
    channels = np.arange(arithmetic.NUM_CODE_CHANNELS)[:, None]
    signs: NDArray[np.int8] = arithmetic.position_code(layer, kv_head, np.arange(_MAX_TOKENS), channels).astype(np.int8)
    return signs


@cache
def _factors(layer: int, seed: int) -> NDArray[np.int64]:
    indices = np.arange(NUM_KV_HEADS * NUM_SUMS * NUM_CHANNELS)
    factors: NDArray[np.int64] = arithmetic.multipliers(layer, indices, seed)
    return factors
