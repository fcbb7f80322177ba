"""What a caller's token must be for, method by method; knows neither tokens nor calls.

`client` is for whoever has text generated, `admin` for whoever runs the system, `peer` for the processes that it is
made of. None includes another: what may be done with any of several has them all.
"""

CLIENT, ADMIN, PEER = "client", "admin", "peer"

OPEN: frozenset[str] = frozenset()
"""No scope is needed, nor a token: probes have none."""

_OF_SERVICE: dict[str, frozenset[str]] = {
    "grpc.health.v1.Health": OPEN,
    "grpc.reflection.v1alpha.ServerReflection": frozenset({CLIENT, ADMIN, PEER}),
    "blockplane.v1.Inference": frozenset({CLIENT}),
    "vllm.grpc.engine.VllmEngine": frozenset({CLIENT}),
    # Frontends ask the engine in the name of callers whom they have let in.
    "blockplane.v1.Engine": frozenset({ADMIN, PEER}),
    "blockplane.v1.Admin": frozenset({ADMIN}),
    "blockplane.v1.BlockTransfer": frozenset({PEER}),
}
_OF_METHOD: dict[str, frozenset[str]] = {
    "/blockplane.v1.Engine/AttachWorker": frozenset({PEER}),
    "/blockplane.v1.Engine/AttachFrontend": frozenset({PEER}),
    # These tell of, or touch, what others have: their prompts' tokens, the load, the cache.
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents": frozenset({ADMIN}),
    "/vllm.grpc.engine.VllmEngine/GetLoads": frozenset({ADMIN}),
    "/vllm.grpc.engine.VllmEngine/FlushCache": frozenset({ADMIN}),
    "/vllm.grpc.engine.VllmEngine/StartProfile": frozenset({ADMIN}),
    "/vllm.grpc.engine.VllmEngine/StopProfile": frozenset({ADMIN}),
}


def scopes_of(method: str) -> frozenset[str]:
    """Any one of these is enough for the method, named as on the wire; what is not listed is for admins."""
    service = method.rpartition("/")[0].removeprefix("/")
    return _OF_METHOD.get(method, _OF_SERVICE.get(service, frozenset({ADMIN})))
