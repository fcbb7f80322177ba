"""TLS on a server's port, and where plaintext may be, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from processes import free_port

from blockplane.protos.access import Access
from blockplane.protos.authentication import caller_of
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.listening import listening_server

NOBODY = Access()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    ours = Authority(tmp_path_factory.mktemp("certificates"), "ours")
    ours.issue("server")
    ours.issue("alice")
    return ours


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    theirs = Authority(tmp_path_factory.mktemp("strangers"), "theirs")
    theirs.issue("server")
    theirs.issue("alice")
    return theirs


@pytest.fixture
def config(authority: Authority) -> Config:
    """A server's, on a port of its own, with a certificate and no wish for any of its callers."""
    folder = authority.folder
    return Config(
        address=f"127.0.0.1:{free_port()}", tls_certificate=f"{folder}/server.pem", tls_key=f"{folder}/server.key"
    )


def access(trusts: Authority, issuer: Authority | None = None) -> Access:
    """Of whoever trusts an authority, and shows the certificate that one made for alice."""
    if issuer is None:
        return Access(tls_ca=str(trusts.ca))
    return Access(str(trusts.ca), f"{issuer.folder}/alice.pem", f"{issuer.folder}/alice.key")


def play(config: Config, scenario: Callable[[Callable[[Access], Awaitable[str]]], Awaitable[None]]) -> None:
    """Have a scenario call a server by the access that it says; a call answers whom the server takes it to be from."""

    async def whoami(request: bytes, context: Any) -> bytes:
        return caller_of(context).encode()

    async def call(access: Access) -> str:
        async with access.aio_channel(config.address, [("grpc.enable_http_proxy", 0)]) as channel:
            metadata = (*access.metadata(config.address), ("blockplane-caller", "who I say"))
            answer: bytes = await channel.unary_unary("/a.Service/WhoAmI")(b"", metadata=metadata, timeout=10)
            return answer.decode()

    async def main() -> None:
        server = listening_server(config.address, config=config)
        handlers = {"WhoAmI": grpc.unary_unary_rpc_method_handler(whoami)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", handlers),))
        await server.start()
        try:
            await scenario(call)
        finally:
            await server.stop(None)

    asyncio.run(main())


async def is_refused(call: Awaitable[str]) -> bool:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_port_with_a_certificate_serves_those_who_trust_its_authority_and_nobody_in_plaintext(
    config: Config, authority: Authority, stranger: Authority
) -> None:
    async def scenario(call: Any) -> None:
        assert await call(access(authority)) == "who I say"
        assert await is_refused(call(access(stranger)))
        assert await is_refused(call(NOBODY))

    play(config, scenario)


def test_a_port_that_asks_for_certificates_refuses_those_without_one_and_those_of_others(
    config: Config, authority: Authority, stranger: Authority
) -> None:
    async def scenario(call: Any) -> None:
        assert await call(access(authority, authority)) == "alice", "whatever the call says of itself"
        assert await is_refused(call(access(authority)))
        assert await is_refused(call(access(authority, stranger)))

    play(replace(config, tls_client_ca=str(authority.ca)), scenario)


def test_a_callers_expired_certificate_is_refused(config: Config, authority: Authority, tmp_path: Path) -> None:
    authority.issue("late", expired=True)
    late = Access(str(authority.ca), f"{authority.folder}/late.pem", f"{authority.folder}/late.key")

    async def scenario(call: Any) -> None:
        assert await is_refused(call(late))

    play(replace(config, tls_client_ca=str(authority.ca)), scenario)


def test_a_servers_expired_certificate_is_refused_by_its_callers(config: Config, authority: Authority) -> None:
    certificate, key = authority.issue("stale", expired=True)

    async def scenario(call: Any) -> None:
        assert await is_refused(call(access(authority)))

    play(replace(config, tls_certificate=certificate, tls_key=key), scenario)


def test_a_renewed_certificate_is_shown_without_a_restart_and_a_half_renewed_one_is_not(
    config: Config, authority: Authority, stranger: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, tls_certificate=f"{tmp_path}/server.pem", tls_key=f"{tmp_path}/server.key")

    def renew(issuer: Authority, *endings: str) -> None:
        for ending in endings:
            shutil.copy(issuer.folder / f"server.{ending}", tmp_path)

    async def scenario(call: Any) -> None:
        await call(access(authority))
        renew(stranger, "pem")
        await call(access(authority))
        assert "going on with the certificate of before" in caplog.text
        renew(stranger, "key")
        await call(access(stranger))
        assert await is_refused(call(access(authority)))

    renew(authority, "pem", "key")
    with caplog.at_level(logging.ERROR):
        play(config, scenario)


def test_a_socket_file_stays_in_plaintext_beside_a_certificate(
    config: Config, authority: Authority, tmp_path: Path
) -> None:
    async def scenario(call: Any) -> None:
        assert await call(access(authority)) == "who I say"
        assert await call(NOBODY) == "who I say"

    play(replace(config, address=f"unix:{tmp_path}/server.sock"), scenario)


def bind(config: Config) -> None:
    """Bind a port, and have it free again."""

    async def main() -> None:
        await listening_server(config.address, config=config).stop(None)

    asyncio.run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "blockplane.invalid"])
def test_plaintext_beyond_this_machine_is_refused_in_a_sentence(host: str) -> None:
    sentence = r"is open to other machines, in plaintext; set tls_certificate and tls_key, or plaintext to anywhere"
    with pytest.raises(ConfigurationError, match=sentence):
        bind(Config(address=f"{host}:{free_port()}"))


def test_plaintext_may_be_anywhere_where_the_settings_say_so_and_tls_may_in_any_case(config: Config) -> None:
    bind(Config(address=f"0.0.0.0:{free_port()}", plaintext="anywhere"))
    bind(replace(config, address=f"0.0.0.0:{free_port()}"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tls_certificate": "/nowhere"}, "tls_certificate names /nowhere, which cannot be read: No such file"),
        ({"tls_client_ca": "/nowhere"}, "tls_client_ca names /nowhere, which cannot be read: No such file"),
        ({"tls_key": "alice.key"}, "no certificate and its key: KEY_VALUES_MISMATCH; check"),
        ({"tokens": "/nowhere"}, "tokens names /nowhere, which cannot be read: No such file"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anybody_calls(
    config: Config, authority: Authority, settings: dict[str, str], sentence: str
) -> None:
    settings = {name: value.replace("alice", f"{authority.folder}/alice") for name, value in settings.items()}
    with pytest.raises(ConfigurationError, match=sentence):
        bind(replace(config, **settings))


def test_an_address_that_is_taken_is_refused_by_name(config: Config) -> None:
    async def scenario(call: Any) -> None:
        with pytest.raises(ConfigurationError, match=f"cannot listen on {config.address}: it is taken"):
            listening_server(config.address, config=config)

    play(config, scenario)
