"""What the planes tell each other of a model; knows neither its weights nor its layers' arithmetic."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

FINGERPRINT_BYTES = 16


def joined_fingerprint(fingerprints: Sequence[bytes]) -> bytes:
    """That of models, or of one model's shards, that work together, in this order; empty if one does not say.

    FINGERPRINT_BYTES of BLAKE2b over all of them.
    """
    if not all(fingerprints):
        return b""
    return hashlib.blake2b(b"".join(fingerprints), digest_size=FINGERPRINT_BYTES).digest()


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's makers recommend; a request that sets nothing gets these."""

    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """All that a control-plane host knows of the model; it needs no model files.

    Attributes:
        name: what clients call it.
        vocab_size: token ids run from 0 to vocab_size - 1.
        max_model_len: tokens, the most that a request may hold; prompt and output together.
        eos_token_ids: ids that end a text.
        bos_token_id: put before a text prompt; None where the model wants none.
        tokenizer_json_zlib: a `tokenizers` JSON document, UTF-8, compressed: frontends open it, and workers for
            structured output. The tokenizer adds no special tokens by itself.
        defaults: sampling defaults.
        chat_template: a Jinja template that makes a prompt of a chat, as Hugging Face defines them; None where the
            model has none. It is not part of what makes two models the same.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tokenizer_json_zlib: bytes
    defaults: GenerationDefaults
    chat_template: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """One layer's KV in one rank, as the model needs it.

    Attributes:
        dtype: a name such as "bfloat16".
        sliding_window: tokens that a query sees, its own included; None = no window.
        attention_chunk_size: tokens; a query sees its own chunk, up to itself; None = no chunks.
        shares_kv_with: the layer whose KV this one reads; None = it has its own.
    """

    name: str
    num_kv_heads: int
    head_dim: int
    dtype: str
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    shares_kv_with: str | None = None
