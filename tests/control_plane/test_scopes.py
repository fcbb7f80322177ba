"""Which scope each method needs: every method of every service that is served is looked at here."""

from google.protobuf.descriptor import ServiceDescriptor
from smg_grpc_proto import vllm_engine_pb2

from blockplane.protos.scopes import _OF_SERVICE, scopes_of
from blockplane.v1 import admin_pb2, engine_pb2, inference_pb2


def scopes(service: ServiceDescriptor) -> dict[str, str]:
    """By method, joined by commas."""
    names = [method.name for method in service.methods]
    return {name: ",".join(sorted(scopes_of(f"/{service.full_name}/{name}"))) for name in names}


def test_what_clients_need_is_for_clients() -> None:
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    assert scopes(service) == dict.fromkeys(("Generate", "Resume", "Abort", "GetModelInfo"), "client")


def test_what_tells_of_others_or_touches_them_is_for_admins() -> None:
    service = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    admins = ("SubscribeKvEvents", "GetLoads", "FlushCache", "StartProfile", "StopProfile")
    clients = ("Generate", "Abort", "Embed", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetTokenizer")
    assert scopes(service) == dict.fromkeys(admins, "admin") | dict.fromkeys(clients, "client")


def test_only_peers_attach_and_both_they_and_admins_may_ask_the_engine() -> None:
    service = engine_pb2.DESCRIPTOR.services_by_name["Engine"]
    asked = ("WatchKVEvents", "ResetPrefixCache", "GetStatistics")
    attached = ("AttachWorker", "AttachFrontend")
    assert scopes(service) == dict.fromkeys(asked, "admin,peer") | dict.fromkeys(attached, "peer")


def test_what_operators_ask_is_for_admins() -> None:
    service = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
    assert "blockplane.v1.Admin" in _OF_SERVICE, "and says so"
    assert set(scopes(service).values()) == {"admin"}


def test_probes_need_nothing_and_what_is_not_listed_is_for_admins() -> None:
    assert scopes_of("/grpc.health.v1.Health/Check") == set()
    assert scopes_of("/grpc.health.v1.Health/Watch") == set()
    for method in ("/grpc.channelz.v1.Channelz/GetServers", "/blockplane.v1.Admin/Drain", "Generate", "", "/a", "//"):
        assert scopes_of(method) == {"admin"}
