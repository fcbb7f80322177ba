"""The proxy that tests and benchmarks put between processes does what it is told, on plain sockets."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from forwarding_proxy import ForwardingProxy


@contextmanager
def echoing() -> Iterator[str]:
    """The address of a server that sends back whatever it gets."""

    def serve(connection: socket.socket) -> None:
        try:
            with connection:
                while data := connection.recv(1024):
                    connection.sendall(data)
        except OSError:
            return

    def accept() -> None:
        try:
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
        except OSError:
            return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def dialled(proxy: ForwardingProxy) -> Iterator[socket.socket]:
    host, _, port = proxy.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        yield connection


def ask(connection: socket.socket, words: bytes = b"ping") -> bytes:
    connection.sendall(words)
    return connection.recv(1024)


def is_dropped(connection: socket.socket) -> bool:
    """Whether the other side has ended it, in order or not."""
    try:
        return connection.recv(1024) == b""
    except ConnectionResetError:
        return True


def test_it_forwards_both_ways_and_counts() -> None:
    with echoing() as target, ForwardingProxy(target) as proxy, dialled(proxy) as connection:
        assert ask(connection) == b"ping"
        assert proxy.num_bytes == [4, 4]
        assert proxy.num_connections == 1


def test_a_delay_holds_each_way_and_no_more() -> None:
    with echoing() as target, ForwardingProxy(target, 0.3) as proxy, dialled(proxy) as connection:
        started = time.monotonic()
        ask(connection)
        assert 0.6 <= time.monotonic() - started < 1.1
        proxy.delay_seconds = 0.0
        started = time.monotonic()
        ask(connection)
        assert time.monotonic() - started < 0.5


def test_a_delay_is_one_of_latency_and_not_of_rate() -> None:
    with echoing() as target, ForwardingProxy(target, 0.2) as proxy, dialled(proxy) as connection:
        started = time.monotonic()
        for _ in range(10):
            connection.sendall(b"x")
            time.sleep(0.001)
        received = b""
        while len(received) < 10:
            received += connection.recv(1024)
        assert time.monotonic() - started < 1.5


def test_a_stall_keeps_everything_for_later() -> None:
    with echoing() as target, ForwardingProxy(target) as proxy, dialled(proxy) as connection:
        proxy.stall()
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            ask(connection)
        proxy.flow()
        connection.settimeout(5)
        assert connection.recv(1024) == b"ping"


def test_a_reset_drops_what_is_open_and_takes_new_connections() -> None:
    with echoing() as target, ForwardingProxy(target) as proxy:
        with dialled(proxy) as connection:
            ask(connection)
            proxy.reset()
            assert is_dropped(connection)
        with dialled(proxy) as connection:
            assert ask(connection) == b"ping"
        assert proxy.num_connections == 2


def test_a_reset_drops_what_a_stall_keeps() -> None:
    with echoing() as target, ForwardingProxy(target) as proxy, dialled(proxy) as connection:
        ask(connection)
        proxy.stall()
        connection.sendall(b"ping")
        proxy.reset()
        assert is_dropped(connection)


def test_a_target_that_does_not_answer_is_a_dropped_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with ForwardingProxy(f"127.0.0.1:{port}") as proxy, dialled(proxy) as connection:
        assert is_dropped(connection)
