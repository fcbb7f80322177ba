"""A model's tokenizer as the archive that gateways fetch: files of a Hugging Face directory. Knows no connection."""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common

from blockplane.control_plane.frontend.text import Text
from blockplane.protos.model import ModelInfo

CHUNK_BYTES = 64 << 10

_MADE_AT = (1980, 1, 1, 0, 0, 0)
"""One date for all: equal tokenizers make equal archives, whichever frontend packs them."""


def tokenizer_archive(model: ModelInfo, text: Text) -> bytes:
    """A ZIP archive; takes a second where the vocabulary is large."""
    ends = {"bos_token_id": model.bos_token_id, "eos_token_id": model.eos_token_ids}
    files = {
        "tokenizer.json": zlib.decompress(model.tokenizer_json_zlib),
        "tokenizer_config.json": _json(_tokenizer_config(model, text)),
        "generation_config.json": _json(ends),
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _MADE_AT), data, zipfile.ZIP_DEFLATED, 1)
    return packed.getvalue()


def archive_chunks(archive: bytes) -> Iterator[common.GetTokenizerChunk]:
    """The archive in pieces, of which the last names the SHA-256 of the whole, in hexadecimal."""
    starts = range(0, len(archive), CHUNK_BYTES)
    for start in starts:
        is_last = start == starts[-1]
        yield common.GetTokenizerChunk(
            data=archive[start : start + CHUNK_BYTES], sha256=hashlib.sha256(archive).hexdigest() if is_last else ""
        )


def _tokenizer_config(model: ModelInfo, text: Text) -> dict[str, Any]:
    # The names stand for templates of chats, which write them out.
    eos_token_id = model.eos_token_ids[0] if model.eos_token_ids else None
    names = {"bos_token": model.bos_token_id, "eos_token": eos_token_id}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_model_len,
        "clean_up_tokenization_spaces": False,
        **{name: text.name_of(token_id) for name, token_id in names.items() if token_id is not None},
        **({} if model.chat_template is None else {"chat_template": model.chat_template}),
    }


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()
