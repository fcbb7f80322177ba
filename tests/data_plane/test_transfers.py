"""Blocks move between two workers' parts in it, over real sockets: whole, or not at all, and never elsewhere."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import Authority
from hypothesis import example, given, settings
from hypothesis import strategies as st
from moving_blocks import EPOCH, NUM_BLOCKS, Reader, Source, all_contents, listening_source, took

from blockplane.data_plane.transfers import fetches, server
from blockplane.data_plane.transfers.blocks import MovableBlocks
from blockplane.data_plane.transfers.reading import BlockSource, GrpcBlockReader
from blockplane.data_plane.transfers.transfers import Transfers
from blockplane.protos.access import Access
from blockplane.protos.columns import column_to_bytes
from blockplane.protos.config import Config
from blockplane.protos.errors import BlockplaneError, BlocksGoneError, ConfigurationError
from blockplane.protos.metric_families import MetricFamilies

LOOPBACK = Config(transfer_address="127.0.0.1:0")
FROM, TO = [9, 2, 17, 3, 4], [1, 23, 5, 6, 2]


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


@pytest.mark.parametrize("piece_bytes", [100, 700, 1024, 3000, 2 << 20])
def test_contents_arrive_in_the_blocks_that_were_named_and_in_no_others(
    source: Source, reader: Reader, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(server, "PIECE_BYTES", piece_bytes)
    assert reader.fetch(source.address, FROM, TO) == ""
    contents = all_contents(source.blocks)
    assert [all_contents(reader.blocks)[block_id] for block_id in TO] == [contents[block_id] for block_id in FROM]
    assert reader.changed() == sorted(TO)
    num_bytes = len(TO) * source.blocks.block_bytes
    for moved in (reader.transfers.counts.fetched, source.transfers.counts.served):
        assert (moved.blocks, moved.bytes, moved.failures) == (len(TO), num_bytes, 0)
        assert moved.seconds > 0


def test_a_fetch_of_no_blocks_asks_all_the_same(source: Source, reader: Reader) -> None:
    assert reader.fetch(source.address, [], []) == ""
    assert "something else by now" in reader.fetch(source.address, [], [], source_epoch=EPOCH + 1)


def ids(*values: int) -> bytes:
    return column_to_bytes(np.array(values, np.int32))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"source_epoch": EPOCH + 1}, "this worker's blocks hold something else by now"),
        ({"source_block_ids": ids(9, 0)}, "block 0 is none of this worker's"),
        ({"source_block_ids": ids(NUM_BLOCKS, 1)}, f"block {NUM_BLOCKS} is none of this worker's"),
        ({"block_ids": ids(0, 7)}, "block 0 is none of this worker's"),
        ({"block_ids": ids(7, NUM_BLOCKS)}, f"block {NUM_BLOCKS} is none of this worker's"),
        ({"block_ids": ids(7, -3)}, "block -3 is none of this worker's"),
        ({"block_ids": ids(7, 7)}, "2 blocks were to go to 1"),
        ({"block_ids": ids(7, 8, 9)}, "2 blocks were to go to 3"),
        ({"block_ids": b"12345"}, "a column of 5 bytes does not hold whole int32 numbers"),
        ({"transport": "pigeon"}, "this worker does not read by 'pigeon'"),
        ({"address": "nowhere"}, "blocks of nowhere cannot be had"),
    ],
)
def test_what_cannot_be_is_answered_with_a_sentence_and_nothing_is_written(
    source: Source, reader: Reader, changes: dict[str, Any], sentence: str
) -> None:
    address = changes.pop("address", source.address)
    assert sentence in reader.fetch(address, FROM[:2], TO[:2], **changes)
    assert reader.changed() == []
    assert reader.transfers.counts.fetched.failures == 1


def test_blocks_of_another_size_do_not_move(source: Source) -> None:
    reader = Reader(head_dim=32)
    failure = reader.fetch(source.address, FROM, TO)
    assert "a block has 1024 bytes here and 512 where it is to go" in failure
    reader.close()


def test_nothing_is_served_before_there_are_blocks_and_after_their_attach(reader: Reader) -> None:
    transfers = Transfers(LOOPBACK)
    assert "something else by now" in reader.fetch(transfers.address, FROM, TO)
    transfers.close()
    source = Source()
    source.transfers.end(source.fetches)
    assert "something else by now" in reader.fetch(source.address, FROM, TO)
    source.close()


def test_a_fetch_before_the_blocks_are_there_is_answered_and_one_after_the_attach_is_not(source: Source) -> None:
    reader = Reader()
    early = reader.transfers.attach()
    reader.fetches, attached = early, reader.fetches
    assert "this worker has no blocks yet" in reader.fetch(source.address, FROM, TO)
    reader.fetches = attached
    reader.transfers.end(attached)
    reader.take(source.address, FROM, TO)
    time.sleep(0.2)
    assert reader.answers.empty()
    assert reader.changed() == []
    reader.close()


def test_an_address_where_nobody_listens_fails_at_once_and_one_that_came_back_serves(reader: Reader) -> None:
    source = Source()
    assert reader.fetch(source.address, FROM, TO) == ""
    source.close()
    began = time.monotonic()
    assert f"blocks of {source.address} cannot be had" in reader.fetch(source.address, FROM, TO)
    assert took(began) < 10
    back = Source(Config(transfer_address=source.address))
    assert reader.fetch(back.address, FROM, TO) == ""
    back.close()


def test_whoever_says_nothing_is_given_up_after_the_time_that_the_engine_set(reader: Reader) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        reader.take(f"127.0.0.1:{silent.getsockname()[1]}", FROM, TO, timeout_seconds=0.5)
        assert "cannot be had" in reader.failure()
        assert 0.4 < took(began) < 5


def test_fetches_that_wait_for_others_have_no_more_time_than_these(reader: Reader) -> None:
    over = threading.Event()

    def slowly() -> Iterator[bytes]:
        yield b"1"
        over.wait(20)

    with listening_source(slowly()) as address:
        began = time.monotonic()
        for _ in range(fetches.NUM_AT_ONCE + 2):
            reader.take(address, FROM, TO, timeout_seconds=0.6)
        failures = [reader.failure() for _ in range(fetches.NUM_AT_ONCE + 2)]
        assert took(began) < 5
        over.set()
    assert all("cannot be had" in failure for failure in failures)
    assert reader.changed() == []


def test_a_source_that_attaches_anew_ends_its_readings_before_its_blocks_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More is asked for than the connection holds by itself, so that the reading is in its midst."""
    monkeypatch.setattr(server, "PIECE_BYTES", 1 << 16)
    source = Source(num_blocks=400, head_dim=8192)
    block_ids, began = np.arange(1, 400, dtype=np.int32), all_contents(source.blocks)
    grpc_reader = GrpcBlockReader(Access())
    reading = grpc_reader.read(BlockSource(source.address, EPOCH, block_ids, source.blocks.block_bytes), 30.0)
    pieces = iter(reading)
    came = next(pieces)
    source.transfers.end(source.fetches)
    for cache in source.blocks.caches:
        cache.zero_()
    source.transfers.begin(source.transfers.attach(), replace(source.blocks, epoch=EPOCH + 1))
    rest = []
    with pytest.raises(BlocksGoneError, match="something else by now"):
        rest.extend(pieces)
    came += b"".join(rest)
    assert 0 < len(came) < len(block_ids) * source.blocks.block_bytes
    assert b"".join(began[1:]).startswith(came)
    assert source.transfers.counts.served.failures == 1
    grpc_reader.close()
    source.close()


def test_a_source_that_dies_in_the_midst_of_a_reading_fails_it(reader: Reader) -> None:
    first, source_is_gone = threading.Event(), threading.Event()

    def dies() -> Iterator[bytes]:
        yield all_contents(reader.blocks)[0]
        first.set()
        source_is_gone.wait(20)

    with listening_source(dies()) as address:
        reader.take(address, FROM, TO)
        assert first.wait(20)
    source_is_gone.set()
    assert f"blocks of {address} cannot be had" in reader.failure()
    assert set(reader.changed()) <= {TO[0]}


def test_once_the_attach_has_ended_nothing_is_written_any_more() -> None:
    reader, is_over, first = Reader(), threading.Event(), threading.Event()
    block = bytes(reader.blocks.block_bytes)

    def endless() -> Iterator[bytes]:
        while not is_over.is_set():
            yield block
            first.set()
            time.sleep(0.005)

    with listening_source(endless()) as address:
        reader.take(address, list(range(1, 21)), list(range(1, 21)))
        assert first.wait(20)
        reader.transfers.end(reader.fetches)
        after = all_contents(reader.blocks)
        time.sleep(0.2)
        is_over.set()
    assert all_contents(reader.blocks) == after
    assert reader.answers.empty()
    assert not any(thread.name == "fetch" for thread in threading.enumerate())
    reader.close()


def test_the_end_of_an_attach_waits_for_a_write_that_has_begun(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, has_begun, is_done = Reader(), threading.Event(), threading.Event()
    write = MovableBlocks.write

    def slowly(*arguments: Any) -> None:
        has_begun.set()
        time.sleep(0.3)
        write(*arguments)
        is_done.set()

    monkeypatch.setattr(MovableBlocks, "write", slowly)
    reader.take(source.address, FROM, TO)
    assert has_begun.wait(20)
    reader.transfers.end(reader.fetches)
    assert is_done.is_set()
    reader.close()


def test_a_worker_that_builds_anew_holds_no_cache_of_before(source: Source, reader: Reader) -> None:
    reader.fetch(source.address, FROM, TO)
    for part in (source, reader):
        part.transfers.end(part.fetches)
    assert source.transfers._server is not None
    assert source.transfers._server._offered is None
    assert reader.fetches._blocks is None


@pytest.fixture(scope="module")
def kept_reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


@settings(max_examples=30)
@example(lengths=[1024], num_ids=0)
@example(lengths=[1024, 1024, 1024], num_ids=2)
@given(
    lengths=st.lists(st.integers(0, 3000) | st.sampled_from([512, 1024, 2048]), max_size=8), num_ids=st.integers(0, 4)
)
def test_whatever_comes_is_written_nowhere_else_and_success_means_all_of_it(
    kept_reader: Reader, lengths: list[int], num_ids: int
) -> None:
    reader = kept_reader
    reader.before = all_contents(reader.blocks)
    pieces = [bytes([index + 1]) * length for index, length in enumerate(lengths)]
    with listening_source(pieces) as address:
        failure = reader.fetch(address, FROM[:num_ids], TO[:num_ids])
    assert (failure == "") == (sum(lengths) == num_ids * reader.blocks.block_bytes)
    assert failure == "" or "bytes came" in failure or "ended within" in failure
    assert set(reader.changed()) <= set(TO[:num_ids])
    if failure == "":
        assert b"".join(all_contents(reader.blocks)[each] for each in TO[:num_ids]) == b"".join(pieces)


class Secured:
    """Settings of workers with an authority of their own, and a file of tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, Authority(folder, "ours")
        certificate, key = self.authority.issue("worker")
        self.tokens = {"peer": "p" * 20, "client": "c" * 20, "stranger": "s" * 20}
        for name, token in self.tokens.items():
            (folder / f"{name}.token").write_text(token)
        lines = [f"{name} {name} {self.tokens[name]}" for name in ("peer", "client")]
        (folder / "tokens").write_text("\n".join(lines))
        self.serving = Config(
            transfer_address="127.0.0.1:0", tls_certificate=certificate, tls_key=key, tokens=str(folder / "tokens")
        )

    def reading(self, token: str) -> Config:
        return Config(tls_ca=str(self.authority.ca), token=str(self.folder / f"{token}.token"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Secured:
    return Secured(tmp_path_factory.mktemp("secured"))


@pytest.mark.parametrize(
    ("token", "sentence"),
    [("peer", ""), ("client", "is for tokens of the scope peer"), ("stranger", "not one of this server's")],
)
def test_over_tls_blocks_go_to_peers_alone(secured: Secured, token: str, sentence: str) -> None:
    source, reader = Source(secured.serving), Reader(secured.reading(token))
    failure = reader.fetch(source.address, FROM, TO)
    assert sentence in failure
    assert (failure == "") == (token == "peer")
    assert reader.changed() == (sorted(TO) if token == "peer" else [])
    for part in (source, reader):
        part.close()


def test_who_trusts_another_authority_reads_nothing(secured: Secured, tmp_path: Path) -> None:
    source = Source(secured.serving)
    reader = Reader(replace(secured.reading("peer"), tls_ca=str(Authority(tmp_path, "theirs").ca)))
    assert "cannot be had" in reader.fetch(source.address, FROM, TO)
    for part in (source, reader):
        part.close()


def test_a_token_never_goes_to_another_machine_in_plaintext(secured: Secured) -> None:
    reader = Reader(replace(secured.reading("peer"), tls_ca=""))
    assert "the token would go to 192.0.2.1:9 in plaintext" in reader.fetch("192.0.2.1:9", FROM, TO)
    reader.close()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"transfer_address": "0.0.0.0:0"}, "is open to other machines, in plaintext"),
        ({"transport": "nixl"}, "transport is nixl, which this version does not speak; choose grpc"),
        ({"role": "prefill"}, "role is prefill and transfer_address is empty"),
        ({"transfer_address": "127.0.0.1:0", "tokens": "/nowhere"}, "tokens names /nowhere"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Transfers(Config(**changes))  # type: ignore[arg-type]


def test_an_address_that_is_taken_is_refused(source: Source) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot listen on {source.address}"):
        Transfers(Config(transfer_address=source.address))


def test_where_every_address_is_listened_at_the_hello_names_the_way_to_the_engine() -> None:
    source = Source(Config(transfer_address="0.0.0.0:0", plaintext="anywhere", engine_address="127.0.0.1:50051"))
    reader = Reader()
    assert source.address.startswith("127.0.0.1:")
    assert reader.fetch(source.address, FROM, TO) == ""
    for part in (source, reader):
        part.close()


def test_a_worker_s_metrics_tell_what_moved_in_each_direction(source: Source, reader: Reader) -> None:
    reader.fetch(source.address, FROM, TO)
    families = MetricFamilies()
    reader.transfers.counts.tell(families, {"model_name": "m"})
    values = {(s.name, s.labels["direction"]): s.value for family in families for s in family.samples}
    assert values["blockplane:worker_transfer_blocks_total", "fetched"] == len(TO)
    assert values["blockplane:worker_transfer_bytes_total", "fetched"] == len(TO) * reader.blocks.block_bytes
    assert values["blockplane:worker_transfer_blocks_total", "served"] == 0
    assert values["blockplane:worker_transfer_seconds_total", "fetched"] > 0


def test_a_reading_that_is_cancelled_raises_and_does_not_end_as_if_it_were_whole() -> None:
    go_on = threading.Event()

    def slowly() -> Iterator[bytes]:
        yield b"1"
        go_on.wait(20)

    with listening_source(slowly()) as address:
        grpc_reader = GrpcBlockReader(Access())
        reading = grpc_reader.read(BlockSource(address, EPOCH, np.array([1], np.int32), 1), 20.0)
        pieces = iter(reading)
        next(pieces)
        reading.cancel()
        with pytest.raises(BlockplaneError):
            next(pieces)
        go_on.set()
        grpc_reader.close()
