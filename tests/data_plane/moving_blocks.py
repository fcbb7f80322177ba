"""Two workers' parts in moving blocks, over real sockets, without workers around them. Knows no engine."""

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import torch

from blockplane.data_plane.transfers.blocks import MovableBlocks
from blockplane.data_plane.transfers.transfers import Transfers
from blockplane.protos.columns import column_to_bytes
from blockplane.protos.config import Config
from blockplane.v1 import engine_pb2
from blockplane.v1 import transfer_pb2 as pb
from blockplane.v1.transfer_pb2_grpc import BlockTransferServicer, add_BlockTransferServicer_to_server

EPOCH = 77
NUM_BLOCKS = 24
HEAD_DIM = 64


def random_blocks(seed: int, *, num_blocks: int = NUM_BLOCKS, head_dim: int = HEAD_DIM) -> MovableBlocks:
    """Two tensors' caches, of 16 * head_dim bytes a block together."""
    generator = np.random.default_rng(seed)
    shape = num_blocks, 4, 1, head_dim
    made = (torch.from_numpy(generator.integers(0, 256, shape, np.uint8)) for _ in range(4))
    return MovableBlocks(EPOCH, tuple(made))


def all_contents(blocks: MovableBlocks) -> list[bytes]:
    """Of every block, the null block too."""
    return [contents.tobytes() for contents in blocks.contents(np.arange(blocks.num_blocks))]


class Reader:
    """A worker that fetches; `answers` is what its engine hears."""

    def __init__(self, config: Config | None = None, seed: int = 1, **of_blocks: int) -> None:
        self.transfers = Transfers(config or Config())
        self.fetches = self.transfers.attach()
        self.blocks = random_blocks(seed, **of_blocks)
        self.before = all_contents(self.blocks)
        self.transfers.begin(self.fetches, self.blocks)
        self.answers: queue.SimpleQueue[engine_pb2.AttachWorkerRequest] = queue.SimpleQueue()

    def take(self, address: str, from_ids: list[int], to_ids: list[int], **changes: Any) -> None:
        fetch: dict[str, Any] = {
            "transfer_id": 5,
            "transport": "grpc",
            "address": address,
            "source_epoch": EPOCH,
            "source_block_ids": column_to_bytes(np.array(from_ids, np.int32)),
            "block_ids": column_to_bytes(np.array(to_ids, np.int32)),
            "timeout_seconds": 20.0,
        }
        self.fetches.take(engine_pb2.FetchBlocks(**(fetch | changes)), self.answers.put)

    def failure(self) -> str:
        """What the next answer says; empty = the blocks are there."""
        answer = self.answers.get(timeout=40)
        assert answer.fetched.transfer_id == 5
        return answer.fetched.failure

    def fetch(self, address: str, from_ids: list[int], to_ids: list[int], **changes: Any) -> str:
        self.take(address, from_ids, to_ids, **changes)
        return self.failure()

    def changed(self) -> list[int]:
        """Ids of blocks that hold something else than at the beginning."""
        now = all_contents(self.blocks)
        return [block_id for block_id, was in enumerate(self.before) if was != now[block_id]]

    def close(self) -> None:
        self.transfers.end(self.fetches)
        self.transfers.close()


class Source:
    """A worker that lets others read its blocks."""

    def __init__(self, config: Config | None = None, **of_blocks: int) -> None:
        self.transfers = Transfers(config or Config(transfer_address="127.0.0.1:0"))
        self.fetches = self.transfers.attach()
        self.blocks = random_blocks(0, **of_blocks)
        self.transfers.begin(self.fetches, self.blocks)
        self.address = self.transfers.address

    def close(self) -> None:
        self.transfers.end(self.fetches)
        self.transfers.close()


class ScriptedSource(BlockTransferServicer):
    """Answers every reading with the pieces that it is given, whatever was asked for."""

    def __init__(self, pieces: Any) -> None:
        self.pieces = pieces
        self.requests: list[pb.ReadBlocksRequest] = []

    def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Any) -> Iterator[pb.ReadBlocksResponse]:  # noqa: N802
        self.requests.append(request)
        for piece in self.pieces:
            yield pb.ReadBlocksResponse(data=piece)


@contextmanager
def listening_source(pieces: Any) -> Iterator[str]:
    """A scripted source; gives its address."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_BlockTransferServicer_to_server(ScriptedSource(pieces), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def took(began: float) -> float:
    return time.monotonic() - began
