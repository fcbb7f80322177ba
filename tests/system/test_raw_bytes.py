"""Bytes that are neither gRPC nor HTTP, on every port of a real system: their connection ends, and nobody else's."""

import random
import re
import socket
from contextlib import suppress
from urllib.request import urlopen

from fuzzing import CALL_SECONDS, assert_all_live, assert_serves
from processes import System


def send_raw(address: str, data: bytes) -> None:
    """Send bytes to a port, whatever it speaks, and read until it has had enough of them or is silent."""
    with socket_to(address) as connection, suppress(OSError):
        connection.settimeout(CALL_SECONDS)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def socket_to(address: str) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix("unix:"))
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def metrics_address(system: System, kind: str) -> str:
    """Where a process says that it tells its metrics."""
    (address,) = re.findall(r"metrics on http://(\S+)/metrics", system.log(kind))
    return str(address)


def test_bytes_that_no_port_speaks_end_their_connection_alone() -> None:
    """Also behind a sound beginning of HTTP/2 or HTTP."""
    kinds, draw = ("engine", "frontend", "worker"), random.Random(0)
    system = System("--max-model-len=2048", "--num-seqs-buckets=8", "--metrics-address=127.0.0.1:0")
    try:
        for kind in kinds:
            system.start(kind)
        system.wait_until_serving()
        metrics = [metrics_address(system, kind) for kind in kinds]
        for address in (system.engine_address, system.address, *metrics):
            for beginning in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /metrics HTTP/1.1\r\n", b"POST "):
                send_raw(address, beginning + draw.randbytes(draw.randrange(1, 5000)))
        assert_all_live(system)
        assert_serves(system)
        for address in metrics:
            with urlopen(f"http://{address}/metrics", timeout=10) as answer:
                assert answer.status == 200
    finally:
        system.close()
