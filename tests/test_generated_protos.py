"""The committed stubs are what the .proto files generate; knows no message by name."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PROTO_FILES = sorted(f"blockplane/v1/{path.name}" for path in (ROOT / "protos" / "v1").glob("*.proto"))


def stub(file: str, suffix: str) -> ModuleType:
    return importlib.import_module(file.removesuffix(".proto").replace("/", ".") + suffix)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileDescriptorProto]:
    """What protoc makes of today's .proto files, by file."""
    out = tmp_path_factory.mktemp("protoc") / "set"
    arguments = ["protoc", f"-I{ROOT}", f"--descriptor_set_out={out}", *(str(ROOT / file) for file in PROTO_FILES)]
    assert protoc.main(arguments) == 0
    files = FileDescriptorSet.FromString(out.read_bytes()).file
    return {file.name: normalized(file) for file in files}


def normalized(file: FileDescriptorProto) -> FileDescriptorProto:
    """`file` without what only some of protoc's outputs hold: comments, and JSON names, which follow from the names."""
    bare = FileDescriptorProto.FromString(file.SerializeToString())
    bare.ClearField("source_code_info")
    messages = list(bare.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return bare


@pytest.mark.parametrize("file", PROTO_FILES)
def test_message_stubs_describe_the_proto_file(file: str, compiled: dict[str, FileDescriptorProto]) -> None:
    descriptor: FileDescriptor = stub(file, "_pb2").DESCRIPTOR
    assert normalized(FileDescriptorProto.FromString(descriptor.serialized_pb)) == compiled[file]
    assert len(descriptor.message_types_by_name) > 0


def test_comparison_sees_a_changed_field(compiled: dict[str, FileDescriptorProto]) -> None:
    file = compiled[PROTO_FILES[0]]
    changed = FileDescriptorProto.FromString(file.SerializeToString())
    next(message for message in changed.message_type if message.field).field[0].number = 99
    assert normalized(changed) != file


class RecordingServer:
    """Takes the handlers that a generated `add_..._to_server` registers."""

    def __init__(self) -> None:
        self.handlers: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(
        self, service: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        self.handlers[service] = handlers


def streaming(method: MethodDescriptor) -> tuple[bool, bool]:
    """Whether the request and the response stream, by the file's own description."""
    service = method.containing_service
    file = FileDescriptorProto.FromString(service.file.serialized_pb)
    described = file.service[service.index].method[method.index]
    return described.client_streaming, described.server_streaming


SERVICES = [
    pytest.param(file, service, id=service.full_name)
    for file in PROTO_FILES
    for service in stub(file, "_pb2").DESCRIPTOR.services_by_name.values()
]


@pytest.mark.parametrize(("file", "service"), SERVICES)
def test_service_stubs_serve_each_method_with_its_types(file: str, service: ServiceDescriptor) -> None:
    module, server = stub(file, "_pb2_grpc"), RecordingServer()
    servicer = getattr(module, f"{service.name}Servicer")()
    getattr(module, f"add_{service.name}Servicer_to_server")(servicer, server)
    handlers = server.handlers[service.full_name]
    assert set(handlers) == set(service.methods_by_name)
    assert len(handlers) > 0
    for name, method in service.methods_by_name.items():
        handler = handlers[name]
        assert handler.request_deserializer(b"").DESCRIPTOR is method.input_type
        assert (handler.request_streaming, handler.response_streaming) == streaming(method)


class RecordingChannel:
    """Takes the calls that a generated stub prepares: path -> how they stream and what they read."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[tuple[bool, bool], Any]] = {}
        self.unary_unary = partial(self._prepare, (False, False))
        self.unary_stream = partial(self._prepare, (False, True))
        self.stream_unary = partial(self._prepare, (True, False))
        self.stream_stream = partial(self._prepare, (True, True))

    def _prepare(self, streams: tuple[bool, bool], path: str, *, response_deserializer: Any, **_: Any) -> str:
        self.calls[path] = (streams, response_deserializer(b"").DESCRIPTOR)
        return path


@pytest.mark.parametrize(("file", "service"), SERVICES)
def test_service_stubs_call_each_method_with_its_types(file: str, service: ServiceDescriptor) -> None:
    channel = RecordingChannel()
    client = getattr(stub(file, "_pb2_grpc"), f"{service.name}Stub")(channel)
    for name, method in service.methods_by_name.items():
        path = f"/{service.full_name}/{name}"
        assert getattr(client, name) == path
        assert channel.calls.pop(path) == (streaming(method), method.output_type)
    assert channel.calls == {}
