"""A model without weights whose text depends exactly on every KV entry it should see; knows no batching.

The integer definition is in `synthetic_arithmetic`; here attention computes its sums, through real block KV:

- A key is the +-1 code of its position, and eight channels that name the layer and the KV head (orthogonal signs).
- Every query leans away from its own name: own keys lose 160, zeros and foreign keys nothing, so that an unwritten
  slot, another layer's or another head's takes the weight.
- The four query heads of a KV head: the lean alone (uniform over all that is visible), twice the lean and one code
  channel (uniform over the positions that agree in it, the others 64 below), the lean and the code of one position
  (120 there, at least 50 less elsewhere).
- Output times the number of positions that it averages, rounded, is the integer sum.

Rounding is exact while a sum is below 128 in size: a bfloat16 output errs by 2^-9 of it, a kernel's bfloat16
probabilities by as much again, together less than 1/2. A token adds +-1 to one channel in sixteen, so sums stay below
128 for certain in contexts under 2048 tokens, and by eight standard deviations at MAX_MODEL_LEN. Keys and values are
exact in FP8 too. What cannot show: a value replaced by an equal one (1 in 256 per head), an exchange of two blocks that
are visible as a whole (attention is a sum, of any model), and, in one of four tokens, a key with another position's.
"""

import time
import zlib
from itertools import count

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from blockplane.data_plane.attention import Attention, AttentionBatches, AttentionSpec
from blockplane.data_plane.models import synthetic_arithmetic as arithmetic
from blockplane.data_plane.models.fingerprint import fingerprint
from blockplane.data_plane.models.shards import heads_of, vocabulary_of
from blockplane.data_plane.models.synthetic_arithmetic import (
    NUM_CHANNELS,
    NUM_CODE_CHANNELS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_SUMS,
    WINDOWS,
)
from blockplane.data_plane.models.vocabulary import whole_logits
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.model import GenerationDefaults, ModelInfo

MAX_MODEL_LEN = 4096
TARGET_MARGIN = 8.0
"""Logits are pseudo-random in [0, 1), and this much more at the target."""

_NAME_CHANNELS = NUM_CHANNELS - NUM_CODE_CHANNELS
_LEAN = -20.0
_SELECT = 32.0


class SyntheticModel:
    """The model that the runner drives; its dtype, float32 or bfloat16, is that of queries and attention outputs.

    Its keys and values are signs and zeros, so that its FP8 scales are 1.
    Hidden states are int64 [num_tokens, 2]: the last state, exact by its type, and the token that it stands on.
    Of a group, each rank takes the sums of its own heads; what they add to a state is added over the ranks, and wraps
    around as it does alone: states are the same whatever the group's size.
    """

    vocab_size = arithmetic.VOCAB_SIZE

    def __init__(
        self,
        dtype: str,
        device: str = "cpu",
        step_seconds: float = 0.0,
        *,
        kv_cache_dtype: str | None = None,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        """
        Args:
            step_seconds: slept in every forward, for a model of that cost.
            kv_cache_dtype: None = `dtype`.
            seed: of its multipliers, which are all that it has for weights.
            ranks: among which its heads and its vocabulary are divided.

        Raises:
            ModelError: they cannot be.
        """
        heads, kv_heads = heads_of(NUM_KV_HEADS * NUM_SUMS, NUM_KV_HEADS, ranks)
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype or dtype
        self.attentions = tuple(
            Attention(
                AttentionSpec(
                    num_heads=len(heads),
                    num_kv_heads=len(kv_heads),
                    head_dim=NUM_CHANNELS,
                    scale=1.0,
                    sliding_window=window,
                )
            )
            for window in WINDOWS
        )
        self._ranks = ranks
        self._layers = tuple(
            _Layer(layer, heads.own, kv_heads.own, ranks, getattr(torch, dtype), device) for layer in range(NUM_LAYERS)
        )
        self.refill(seed)
        tokens, num_tokens = vocabulary_of(self.vocab_size, ranks)
        self._vocabulary = torch.arange(tokens.own.start, tokens.own.start + num_tokens, device=device)
        self._alphabet = torch.tensor(arithmetic.ALPHABET, device=device)
        self._step_seconds = step_seconds

    def refill(self, seed: int) -> None:
        """Take other multipliers, into the tensors that are there."""
        for layer in self._layers:
            layer.refill(seed)
        self.fingerprint = fingerprint(f"synthetic-{seed} {self.dtype} {self.kv_cache_dtype}", ())

    def forward(self, input_ids: Tensor, positions: Tensor, batches: AttentionBatches) -> Tensor:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        state: Tensor = arithmetic.first_state(input_ids, positions)
        for layer, attention in zip(self._layers, self.attentions, strict=True):
            state = layer.next_state(state, positions, attention, batches)
        return torch.stack([state, input_ids], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        state, token_ids = hidden.unbind(1)
        noise: Tensor = arithmetic.noise(state[:, None], self._vocabulary).float() / 2**24
        targets: Tensor = arithmetic.target(state, token_ids, self._alphabet)
        own = noise + TARGET_MARGIN * (targets[:, None] == self._vocabulary)
        return whole_logits(own, self.vocab_size, self._ranks)

    def greedy_tokens(self, _hidden: Tensor) -> Tensor | None:
        return None

    def idle_hidden(self, num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, 2, dtype=torch.int64)


class _Layer:
    """One layer of a rank's heads: its keys by position, and how to ask attention for the sums."""

    def __init__(
        self, layer: int, heads: range, kv_heads: range, ranks: Ranks, dtype: torch.dtype, device: str
    ) -> None:
        self._layer, self._ranks, self._dtype = layer, ranks, dtype
        self._channels = torch.arange(NUM_CHANNELS, device=device)
        self._heads = torch.arange(kv_heads.start, kv_heads.stop, device=device)[:, None]
        self._rows = torch.arange(len(kv_heads), device=device)
        first = heads.start - kv_heads.start * NUM_SUMS
        self._own = slice(first, first + len(heads))
        """The rank's query heads among the NUM_SUMS of each of its KV heads."""
        self._indices = torch.arange(heads.start * NUM_CHANNELS, heads.stop * NUM_CHANNELS, device=device)
        self._factors = torch.empty_like(self._indices)
        self._names = _names(layer, kv_heads, device)
        code = arithmetic.position_code(
            layer,
            self._heads,
            torch.arange(MAX_MODEL_LEN, device=device)[:, None, None],
            self._channels[:NUM_CODE_CHANNELS],
        )
        self._keys = torch.cat([self._names.expand(MAX_MODEL_LEN, -1, -1), code], dim=-1).to(dtype)
        self._num_plus = torch.nn.functional.pad((code > 0).cumsum(0), (0, 0, 0, 0, 1, 0))
        """[MAX_MODEL_LEN + 1, num_kv_heads, NUM_CODE_CHANNELS]: positions before this one with a plus sign."""

    def refill(self, seed: int) -> None:
        self._factors.copy_(arithmetic.multipliers(self._layer, self._indices, seed))

    def next_state(self, state: Tensor, positions: Tensor, attention: Attention, batches: AttentionBatches) -> Tensor:
        """int64 [num_tokens] states and positions -> the states after this layer; writes the KV of these tokens."""
        token_state = state[:, None, None]
        key = self._keys[positions]
        value = arithmetic.value(token_state, self._layer, self._heads, positions[:, None, None], self._channels)
        channels = arithmetic.drawn_channel(token_state, self._layer, self._heads, torch.arange(2, device=state.device))
        query = self._query(state, positions, key, channels).flatten(1, 2)[:, self._own]
        output = attention(query, key, value.to(self._dtype), batches)
        counts = self._counts(positions, key, channels).flatten(1, 2)[:, self._own]
        sums = (output.float() * counts[..., None]).round().long()
        taken_in = self._ranks.all_reduce(arithmetic.taken_in(sums, self._factors))
        after: Tensor = arithmetic.next_state(state, taken_in)
        return after

    def _query(self, state: Tensor, positions: Tensor, key: Tensor, channels: Tensor) -> Tensor:
        """[num_tokens, num_kv_heads, NUM_SUMS, NUM_CHANNELS]; channels: int64 [num_tokens, num_kv_heads, 2]."""
        query = key.new_zeros(len(state), len(self._heads), NUM_SUMS, NUM_CHANNELS)
        query[..., :_NAME_CHANNELS] = _LEAN * self._names[:, None]
        selected = channels + _NAME_CHANNELS
        query[:, :, 1:3].scatter_(-1, selected[..., None], _SELECT * key.gather(-1, selected)[..., None])
        seen = arithmetic.drawn_position(state[:, None], self._layer, self._heads[:, 0], positions[:, None])
        query[:, :, 3, _NAME_CHANNELS:] = self._keys[seen, self._rows, _NAME_CHANNELS:]
        return query

    def _counts(self, positions: Tensor, key: Tensor, channels: Tensor) -> Tensor:
        """[num_tokens, num_kv_heads, NUM_SUMS]: how many positions each of the sums runs over."""
        first = arithmetic.first_visible(self._layer, positions)
        num_plus = (self._num_plus[positions + 1] - self._num_plus[first]).gather(-1, channels)
        num_visible = (positions - first + 1)[:, None, None].expand_as(num_plus)
        num_agreeing = torch.where(key.gather(-1, channels + _NAME_CHANNELS) > 0, num_plus, num_visible - num_plus)
        one = torch.ones_like(num_plus[..., :1])
        return torch.cat([num_visible[..., :1], num_agreeing, one], dim=-1)


def _names(layer: int, kv_heads: range, device: str) -> Tensor:
    """[num_kv_heads, 8] signs, orthogonal between all layers and heads: rows of Sylvester's Hadamard matrix."""
    rows = [layer * NUM_KV_HEADS + kv_head for kv_head in kv_heads]
    signs = [[(-1) ** (row & column).bit_count() for column in range(_NAME_CHANNELS)] for row in rows]
    return torch.tensor(signs, device=device)


def synthetic_model_info(max_model_len: int) -> ModelInfo:
    """What the worker's hello says of this model. Greedy unless the request asks for a temperature.

    Raises:
        ConfigurationError: `max_model_len` is beyond MAX_MODEL_LEN, where rounding is no longer exact.
    """
    if not 0 < max_model_len <= MAX_MODEL_LEN:
        raise ConfigurationError(
            f"The synthetic model is exact up to {MAX_MODEL_LEN} tokens, but max_model_len is {max_model_len}: "
            f"set max_model_len to a number from 1 to {MAX_MODEL_LEN}."
        )
    return ModelInfo(
        name="synthetic",
        vocab_size=arithmetic.VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=(arithmetic.EOS_TOKEN_ID,),
        bos_token_id=arithmetic.BOS_TOKEN_ID,
        tokenizer_json_zlib=zlib.compress(_byte_tokenizer().to_str().encode()),
        defaults=GenerationDefaults(temperature=0.0),
    )


def _byte_tokenizer() -> Tokenizer:
    """Token id = byte, then <bos> and <eos>; no merges.

    The names of the bytes are the byte-level alphabet of `tokenizers`: what Latin-1 can print stands for itself, the
    others take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer
