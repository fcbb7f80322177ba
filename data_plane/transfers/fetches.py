"""Fetches KV blocks from other workers into this one's, beside its steps, during one attach. Knows no steps.

The engine names blocks that no plan touches until the fetch is answered, and the end of the attach waits for every
fetch: so nothing is written late into a block that is somebody else's by then.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from threading import Lock, Semaphore, Thread, current_thread
from typing import TypeAlias

import numpy as np

from blockplane.data_plane.transfers.blocks import MovableBlocks
from blockplane.data_plane.transfers.counts import Moved
from blockplane.data_plane.transfers.reading import BlockReader, BlockSource, Reading
from blockplane.protos.columns import column_from_bytes
from blockplane.protos.errors import BlockplaneError, BlocksGoneError, DeadlineError, ProtocolError, UnavailableError
from blockplane.protos.plan import Int32Array
from blockplane.v1 import engine_pb2 as pb

logger = logging.getLogger(__name__)

Send: TypeAlias = Callable[[pb.AttachWorkerRequest], None]

NUM_AT_ONCE = 4
"""Fetches that write beside each other; the others wait, so that the first are done before all are."""


class Fetches:
    """Those of one attach, each in a thread of its own: `take` them, from `begin` to `end`."""

    def __init__(self, readers: Mapping[str, BlockReader], counts: Moved) -> None:
        """`readers`: by their names."""
        self._readers, self._counts = readers, counts
        self._blocks: MovableBlocks | None = None
        self._places = Semaphore(NUM_AT_ONCE)
        self._lock = Lock()
        self._threads: set[Thread] = set()
        self._readings: set[Reading] = set()
        self._is_over = False

    def begin(self, blocks: MovableBlocks) -> None:
        """Write into these from now on."""
        with self._lock:
            self._blocks = blocks

    def take(self, fetch: pb.FetchBlocks, send: Send) -> None:
        """Do as the engine says, and tell it by `send` within the fetch's time; any thread may hand it in."""
        deadline = time.monotonic() + fetch.timeout_seconds
        thread = Thread(target=self._run, args=(fetch, send, deadline), name="fetch", daemon=True)
        with self._lock:
            if self._is_over:
                return
            self._threads.add(thread)
            thread.start()

    def end(self) -> None:
        """Once this returns nothing is written any more, and the caches are not held here."""
        with self._lock:
            self._is_over, self._blocks = True, None
            readings, threads = tuple(self._readings), tuple(self._threads)
        for reading in readings:
            reading.cancel()
        for thread in threads:
            thread.join()

    def _run(self, fetch: pb.FetchBlocks, send: Send, deadline: float) -> None:
        began = time.perf_counter()
        try:
            failure = self._failure_of(fetch, deadline)
            if not self._is_over:
                self._counts.add(seconds=time.perf_counter() - began, failures=bool(failure))
                fetched = pb.BlocksFetched(transfer_id=fetch.transfer_id, failure=failure)
                send(pb.AttachWorkerRequest(fetched=fetched))
        finally:
            with self._lock:
                self._threads.discard(current_thread())

    def _failure_of(self, fetch: pb.FetchBlocks, deadline: float) -> str:
        """Fetch; a sentence where that failed, else nothing."""
        try:
            if not self._places.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise DeadlineError("other fetches took all of its time; give transfers more transfer_seconds.")
            try:
                self._fetch(fetch, deadline)
            finally:
                self._places.release()
        except BlockplaneError as error:
            sentence = f"blocks of {fetch.address} cannot be had: {error}"
        except Exception as fault:
            logger.exception("a fetch of blocks has failed")
            sentence = f"fetching blocks of {fetch.address} failed: {fault!r}."
        else:
            return ""
        if not self._is_over:
            logger.warning("%s", sentence)
        return sentence

    def _fetch(self, fetch: pb.FetchBlocks, deadline: float) -> None:
        blocks, block_ids = self._blocks, column_from_bytes(fetch.block_ids)
        source_block_ids = column_from_bytes(fetch.source_block_ids)
        if blocks is None:
            raise BlocksGoneError("this worker has no blocks yet, or no more; fetch once it is ready.")
        blocks.check_ids(block_ids)
        if len(np.unique(block_ids)) < len(block_ids) or len(block_ids) != len(source_block_ids):
            raise ProtocolError(
                f"{len(source_block_ids)} blocks were to go to {len(np.unique(block_ids))}; run the same version of"
                " Blockplane on both."
            )
        if (reader := self._readers.get(fetch.transport)) is None:
            raise ProtocolError(f"this worker does not read by {fetch.transport!r}; see its setting transport.")
        source = BlockSource(fetch.address, fetch.source_epoch, source_block_ids, blocks.block_bytes)
        reading = reader.read(source, max(0.0, deadline - time.monotonic()))
        try:
            self._begun(reading)
            self._write(blocks, block_ids, reading)
        finally:
            reading.cancel()
            with self._lock:
                self._readings.discard(reading)

    def _begun(self, reading: Reading) -> None:
        """Have `end` know of it, unless that came before."""
        with self._lock:
            if self._is_over:
                raise UnavailableError("the attach has ended.")
            self._readings.add(reading)

    def _write(self, blocks: MovableBlocks, block_ids: Int32Array, pieces: Iterable[bytes]) -> None:
        """Write whole blocks as they come: what came of another is kept until the rest of it is there."""
        num_written, came = 0, bytearray()
        for piece in pieces:
            came += piece
            num_whole = len(came) // blocks.block_bytes
            if num_written + num_whole > len(block_ids):
                raise ProtocolError("more bytes came than were asked for; run the same version of Blockplane on both.")
            if num_whole:
                num_bytes = num_whole * blocks.block_bytes
                contents = np.frombuffer(came, np.uint8, num_bytes).reshape(num_whole, -1)
                blocks.write(block_ids[num_written : num_written + num_whole], contents)
                self._counts.add(blocks=num_whole, num_bytes=num_bytes)
                num_written, came = num_written + num_whole, came[num_bytes:]
        if num_written < len(block_ids) or came:
            raise ProtocolError(
                f"the contents of {len(block_ids)} blocks ended within the {num_written + 1}th; run the same version of"
                " Blockplane on both."
            )
