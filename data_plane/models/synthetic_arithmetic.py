"""The integer definition of the synthetic model's text; knows neither attention nor which array library calls it.

A token at position p has an int64 state. In layer l, KV head h, the states become values: eight signs per token, in
channels that depend on p alone. A token draws two code channels and one visible position t from its state and takes
four sums of values over what it sees: of everything, of the positions that agree with p in the first and in the second
drawn channel of the position code, and of t alone. Every channel of every sum goes into its next state; the state after
the last layer names the next token.

All functions are elementwise on int64 arrays, numpy's and torch's alike, with wrap-around: `arange` and lookup tables
come from the caller. Arguments broadcast.
"""

from typing import Any

WINDOWS = (None, 48, None)
"""Per layer: how many positions a token sees, its own included; None = all before it."""
NUM_LAYERS = len(WINDOWS)
NUM_KV_HEADS = 2
NUM_SUMS = 4
NUM_CHANNELS = 128
NUM_CODE_CHANNELS = 120
BITS_PER_TOKEN = 8

BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257
VOCAB_SIZE = 258
LEAD_BYTE = 0xC3
"""First byte of the two-byte characters U+00C0 to U+00FF; any continuation byte may follow it."""
ALPHABET = (*b"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", LEAD_BYTE)

_TOKEN, _CODE, _VALUE, _CHANNEL, _POSITION, _MULTIPLIER, _TARGET, _NOISE = range(1, 9)
"""Domains, so that no two draws from one state are alike."""


def mix(word: Any) -> Any:
    """Scramble 64 bits one to one: the output function of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    word = word + (0x9E3779B97F4A7C15 - 2**64)
    word = (word ^ _shift_right(word, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    word = (word ^ _shift_right(word, 27)) * (0x94D049BB133111EB - 2**64)
    return word ^ _shift_right(word, 31)


def _shift_right(word: Any, num_bits: int) -> Any:
    """Shift in zeros: `>>` on int64 would copy the sign."""
    return (word >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _draw(word: Any, *path: Any) -> Any:
    """A hash of the word and of at most four numbers below 2^15, in order."""
    tag = 0
    for step in path:
        tag = (tag << 16) | step
    return mix(mix(word) ^ tag)


def _draw_below(limit: Any, word: Any, *path: Any) -> Any:
    return _shift_right(_draw(word, *path), 1) % limit


def first_state(token_ids: Any, positions: Any) -> Any:
    return _draw(positions, _TOKEN, token_ids)


def position_code(layer: int, kv_head: Any, positions: Any, channels: Any) -> Any:
    """The sign, -1 or 1, of each code channel (0 .. NUM_CODE_CHANNELS - 1) at each position."""
    return (_draw(positions, _CODE, layer, kv_head, channels) & 1) * 2 - 1


def value(state: Any, layer: int, kv_head: Any, positions: Any, channels: Any) -> Any:
    """-1 or 1 in the eight channels of the position, 0 in the others.

    Signs and not bits, so that an unwritten zero is no value and the sums of n tokens stay near sqrt(n / 16).
    """
    signs = (_draw(state, _VALUE, layer, kv_head) >> channels % BITS_PER_TOKEN & 1) * 2 - 1
    return signs * (channels // BITS_PER_TOKEN == positions % (NUM_CHANNELS // BITS_PER_TOKEN))


def drawn_channel(state: Any, layer: int, kv_head: Any, index: Any) -> Any:
    """The code channel of the sum over agreeing positions, index 0 or 1."""
    return _draw_below(NUM_CODE_CHANNELS, state, _CHANNEL, layer, kv_head, index)


def drawn_position(state: Any, layer: int, kv_head: Any, positions: Any) -> Any:
    """A position that the token sees in this layer."""
    first = first_visible(layer, positions)
    return first + _draw_below(positions - first + 1, state, _POSITION, layer, kv_head)


def first_visible(layer: int, positions: Any) -> Any:
    window = WINDOWS[layer]
    return positions * 0 if window is None else (positions - window + 1) * (positions >= window)


def multipliers(layer: int, indices: Any, seed: int = 0) -> Any:
    """One odd factor for each of a token's sums, so that no change of a single sum can vanish.

    They are the model's weights: another seed, below 10^9, gives another model of the same shape.
    """
    return _draw(indices + (seed << 12), _MULTIPLIER, layer) | 1


def taken_in(sums: Any, factors: Any) -> Any:
    """What int64 sums [num_tokens, ..., NUM_CHANNELS], times `multipliers` of the same size, add to the tokens' states.

    Sums may be taken in a few at a time: together they add the same.
    """
    return (sums.reshape(sums.shape[0], factors.shape[0]) * factors).sum(-1)


def next_state(state: Any, taken_in: Any) -> Any:
    """The state after a layer, from the one before and what all sums add."""
    return mix(state + taken_in)


def target(state: Any, token_ids: Any, alphabet: Any) -> Any:
    """The token that follows: a continuation byte after LEAD_BYTE, else end of text once in 256, else of the alphabet.

    `token_ids` are the tokens that the states stand on, `alphabet` is ALPHABET as an array.
    """
    word = _draw(state, _TARGET)
    letter, ends, continues = word & 63, word >> 6 & 255 == 0, token_ids == LEAD_BYTE
    return continues * (0x80 + letter) + ~continues * (ends * EOS_TOKEN_ID + ~ends * alphabet[letter])


def noise(state: Any, token_ids: Any) -> Any:
    """24 bits for each token of the vocabulary."""
    return _draw(state, _NOISE, token_ids) & 0xFFFFFF
