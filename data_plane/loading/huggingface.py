"""A Hugging Face model directory as a Checkpoint: its config, safetensors shards, tokenizer and generation defaults."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from blockplane.data_plane.loading.checkpoint import Checkpoint, StoredTensor
from blockplane.data_plane.models.config_json import parse_config
from blockplane.protos.errors import ModelError
from blockplane.protos.model import GenerationDefaults


def read_directory(directory: Path) -> Checkpoint:
    """Open a directory with config.json, tokenizer.json and safetensors, in one file or in shards with an index.

    Raises:
        ModelError: a file is missing or broken, or the config holds what the decoder does not have.
    """
    config = parse_config(_json(directory / "config.json"))
    generation = _json_if_present(directory / "generation_config.json")
    tokenizer, bos_token_id = _tokenizer(directory)
    eos = generation.get("eos_token_id", config.eos_token_ids)
    temperature = generation.get("temperature")
    return Checkpoint(
        name=directory.resolve().name,
        config=config,
        tensors=_tensors(_shards(directory)),
        tokenizer_json=tokenizer.to_str().encode(),
        bos_token_id=bos_token_id,
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or config.eos_token_ids),
        defaults=GenerationDefaults() if temperature is None else GenerationDefaults(temperature=float(temperature)),
        chat_template=_chat_template(directory),
    )


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    names = sorted(set(_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    shards = [directory / name for name in names]
    for shard in shards:
        if not shard.is_file():
            raise ModelError(f"{shard} is missing; Blockplane reads weights from safetensors: fetch that file.")
    return shards


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of an open safetensors file."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self, index: tuple[slice, ...] | None = None) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name) if index is None else self.file.get_slice(self.name)[index]
        return tensor


def _tensors(shards: list[Path]) -> Iterator[tuple[str, StoredTensor]]:
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, _Stored(file, name)


def _tokenizer(directory: Path) -> tuple[Tokenizer, int | None]:
    """The tokenizer without what it adds to a text by itself, and the BOS id among that."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing; Blockplane reads no other tokenizer file: convert it with transformers.")
    tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    settings = _json_if_present(directory / "tokenizer_config.json")
    bos_token_id = _added_first(tokenizer)
    # What the config states outranks the post-processor, as in transformers 5.
    if settings.get("add_bos_token") is False:
        bos_token_id = None
    elif settings.get("add_bos_token") is True and bos_token_id is None:
        bos_token_id = _token_id(tokenizer, settings.get("bos_token"))
    tokenizer.post_processor = None
    return tokenizer, bos_token_id


def _chat_template(directory: Path) -> str | None:
    """The template of its own file, or else the tokenizer config's, which may have several by name."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _json_if_present(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = {named["name"]: named["template"] for named in template}.get("default")
    return template


def _added_first(tokenizer: Tokenizer) -> int | None:
    """What the post-processor puts before a text, seen by its effect: it may be of any kind, or several."""
    text = "a"
    plain, processed = (tokenizer.encode(text, add_special_tokens=adds).ids for adds in (False, True))
    return processed[0] if processed[:1] != plain[:1] else None


def _token_id(tokenizer: Tokenizer, token: str | dict[str, Any] | None) -> int | None:
    content = token["content"] if isinstance(token, dict) else token
    token_id: int | None = None if content is None else tokenizer.token_to_id(content)
    return token_id


def _json_if_present(path: Path) -> dict[str, Any]:
    return _json(path) if path.is_file() else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); fetch it again.") from error
    return document
