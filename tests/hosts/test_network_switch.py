"""The hosts that other tests run on: they are separate, and between them is what delay, or cut, was asked for."""

import os
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from network import Network
from processes import wait_for

ECHO = """
import socket, sys
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.bind((sys.argv[1], 7))
print("listening", flush=True)
while True:
    data, sender = echo.recvfrom(2048)
    echo.sendto(data, sender)
"""
PING = """
import socket, sys, time
ping = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ping.settimeout(float(sys.argv[3]))
for _ in range(int(sys.argv[2])):
    sent = time.perf_counter()
    ping.sendto(b"?", (sys.argv[1], 7))
    try:
        ping.recv(2048)
    except TimeoutError:
        continue
    print(time.perf_counter() - sent)
"""
SINK = """
import socket, sys
server = socket.create_server((sys.argv[1], 9))
print("listening", flush=True)
connection, _ = server.accept()
num_bytes = 0
while data := connection.recv(1 << 20):
    num_bytes += len(data)
connection.sendall(str(num_bytes).encode())
"""
DIAL = """
import socket, sys
socket.create_connection((sys.argv[1], 9), timeout=30)
"""
SOURCE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9))
began = time.perf_counter()
for _ in range(32):
    connection.sendall(bytes(1 << 20))
connection.shutdown(socket.SHUT_WR)
print(connection.recv(64).decode(), time.perf_counter() - began)
"""
KEEP_HOSTS = """
import time
from network import Network
network = Network(1)
sleeping = network.start(0, ["sleep", "600"])
print(network.switch_process_id, sleeping.pid, network.own_address, flush=True)
time.sleep(600)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(2) as network:
        yield network


def serve(network: Network, host: int, program: str) -> None:
    """Start a program that listens on a host."""
    command = [sys.executable, "-c", program, network.addresses[host]]
    process = network.start(host, command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"


def output(network: Network, host: int, program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = network.start(host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    text, _ = process.communicate(timeout=60)
    return str(text)


def round_trips(network: Network, num_packets: int, timeout: float = 30) -> list[float]:
    """Seconds of each packet that came back, from host 0 to host 1."""
    return [*map(float, output(network, 0, PING, network.addresses[1], num_packets, timeout).split())]


def test_a_packet_and_its_answer_are_as_late_as_the_switch_delays_both(network: Network) -> None:
    serve(network, 1, ECHO)
    seconds = round_trips(network, 50)
    assert len(seconds) == 50
    print(f"there and back in {statistics.median(seconds) * 1e3:.2f} ms, {min(seconds) * 1e3:.2f} at least")
    assert min(seconds) >= 0.002


def test_nothing_crosses_a_link_that_is_cut_and_all_does_once_it_is_mended(network: Network) -> None:
    serve(network, 1, ECHO)
    for host in (0, 1):
        network.cut(host)
        assert round_trips(network, 5, timeout=0.05) == []
        network.mend(host)
        assert len(round_trips(network, 5)) == 5
    assert sum(counts["num_lost_packets"] for counts in network.counts()) == 10
    assert [counts["num_packets"] for counts in network.counts()] == [10, 10]


def test_hosts_share_no_port_and_no_loopback_and_reach_this_process(network: Network) -> None:
    for host in (0, 1):
        serve(network, host, ECHO)
    assert len(round_trips(network, 1)) == 1
    serve(network, 1, SINK)
    for host, address in ((1, "127.0.0.1"), (0, network.addresses[0])):
        assert "Connection refused" in output(network, host, DIAL, address)
    with socket.create_connection((network.addresses[1], 9), timeout=30) as connection:
        assert connection.getsockname()[0] == network.own_address


def test_a_stream_of_bytes_arrives_whole(network: Network) -> None:
    serve(network, 1, SINK)
    num_bytes, seconds = output(network, 0, SOURCE, network.addresses[1]).split()
    print(f"32 MiB in {float(seconds):.2f} s, {32 / float(seconds):.0f} MiB/s")
    assert int(num_bytes) == 32 << 20


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nothing_is_left_of_hosts_whose_process_was_killed() -> None:
    Network(1).__exit__()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen([sys.executable, "-c", KEEP_HOSTS], stdout=subprocess.PIPE, text=True, env=environ)
    assert owner.stdout is not None
    switch, sleeping, address = owner.stdout.readline().split()
    assert is_running(int(switch))
    assert is_running(int(sleeping))
    assert address in Path("/proc/net/fib_trie").read_text()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_for(lambda: not is_running(int(switch)) and not is_running(int(sleeping)), "both have ended")
    wait_for(lambda: address not in Path("/proc/net/fib_trie").read_text(), "its device is gone")
