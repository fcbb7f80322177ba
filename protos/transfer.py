"""What the engine tells a worker group to read from another one; knows neither requests nor how it is read."""

from dataclasses import dataclass

from blockplane.protos.plan import Int32Array


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks of one group whose contents are to stand in blocks of another.

    Attributes:
        transport: grpc, or another that both groups' workers know.
        addresses: by rank, where the source's lets others read.
        source_epoch: of the source's attach.
        source_block_ids, block_ids: int32, as many: what is read, and where it goes.
        timeout_seconds: within which every rank answers.
    """

    transfer_id: int
    transport: str
    addresses: tuple[str, ...]
    source_epoch: int
    source_block_ids: Int32Array
    block_ids: Int32Array
    timeout_seconds: float
