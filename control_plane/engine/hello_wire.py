"""A worker's first messages off the wire; refuses those of other versions. Knows neither streams nor who answers."""

from blockplane.control_plane.engine.hello import Hello
from blockplane.control_plane.engine.rank_meeting import Join
from blockplane.protos import wire
from blockplane.protos.errors import ProtocolError
from blockplane.v1 import engine_pb2 as pb


def hello_from_proto(hello: pb.WorkerHello) -> Hello:
    """Raises ProtocolError if the worker speaks a version that the engine does not."""
    check_version("worker", hello.protocol_version)
    return Hello(
        protocol_version=hello.protocol_version,
        model=wire.model_info_from_proto(hello.model),
        layers=tuple(wire.layer_from_proto(layer) for layer in hello.layers),
        available_memory=hello.available_memory,
        rules=wire.bucket_rules_from_proto(hello.bucket_rules),
        model_fingerprint=hello.model_fingerprint,
        boot_id=hello.boot_id,
        last_epoch=hello.last_epoch,
        enforces_structure=hello.enforces_structure,
        reloads_weights=hello.reloads_weights,
        weight_epoch=hello.weight_epoch,
        role=hello.role or "both",
        transfer_addresses=(hello.transfer_address,) if hello.transfer_address else (),
        transports=tuple(hello.transports),
    )


def join_from_proto(join: pb.JoinRanks, peer: str) -> Join:
    """`peer`: whence it comes. Raises as `hello_from_proto` does."""
    check_version("worker", join.protocol_version)
    return Join(join.protocol_version, join.group_name, join.rank, join.address, join.boot_id, peer)


def check_version(peer: str, version: int) -> None:
    """Raise ProtocolError, naming both sides' versions, unless the engine speaks this one."""
    if not wire.OLDEST_PROTOCOL_VERSION <= version <= wire.PROTOCOL_VERSION:
        raise ProtocolError(
            f"the {peer} speaks protocol {version} and the engine {wire.OLDEST_PROTOCOL_VERSION} to"
            f" {wire.PROTOCOL_VERSION}; run the same version of Blockplane on both."
        )
