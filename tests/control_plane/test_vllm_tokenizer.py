"""The tokenizer as gateways fetch it: an archive that encodes as we do, in pieces with a checksum."""

import asyncio
import hashlib
import io
import json
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from client_service import MODEL, SMALL, TEXT, Play, Service, play_in
from small_tokenizers import END
from smg_grpc_proto.generated import common_pb2 as common
from tokenizers import Tokenizer

from blockplane.control_plane.frontend.vllm_tokenizer import CHUNK_BYTES, archive_chunks, tokenizer_archive


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


def files_of(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert opened.testzip() is None
        return {name: opened.read(name) for name in opened.namelist()}


def test_the_archive_encodes_as_we_do_and_names_the_ends() -> None:
    model = replace(MODEL, eos_token_ids=(SMALL.end, 5), bos_token_id=SMALL.end, chat_template="{{ bos_token }}")
    files = files_of(tokenizer_archive(model, TEXT))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("hello wörld").ids == TEXT.encode("hello wörld")
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["chat_template"]) == (END, END, "{{ bos_token }}")
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": SMALL.end, "eos_token_id": [SMALL.end, 5]}


def test_what_a_model_has_none_of_is_not_in_the_archive() -> None:
    files = files_of(tokenizer_archive(MODEL, TEXT))
    assert not {"bos_token", "eos_token", "chat_template"} & {*json.loads(files["tokenizer_config.json"])}


def test_equal_tokenizers_make_equal_archives() -> None:
    archive = tokenizer_archive(MODEL, TEXT)
    assert archive == tokenizer_archive(replace(MODEL), SMALL.text())
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert {info.date_time for info in opened.infolist()} == {(1980, 1, 1, 0, 0, 0)}, "whenever they are made"


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_pieces_join_to_the_whole_and_the_last_alone_has_its_checksum(size: int) -> None:
    archive = bytes(index % 251 for index in range(size))
    chunks = list(archive_chunks(archive))
    assert b"".join(chunk.data for chunk in chunks) == archive
    assert all(0 < len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(archive).hexdigest()]


def test_it_is_fetched_by_a_call(play: Play) -> None:
    async def scenario(service: Service) -> None:
        async def fetch() -> bytes:
            chunks = [chunk async for chunk in service.vllm.GetTokenizer(common.GetTokenizerRequest())]
            return b"".join(chunk.data for chunk in chunks)

        archives = await asyncio.gather(fetch(), fetch())
        assert archives[0] == archives[1] == tokenizer_archive(MODEL, TEXT)

    play(scenario)
