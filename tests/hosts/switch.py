"""Hosts on one machine: network namespaces, and a switch between them that delays and cuts. Knows no Blockplane.

    python tests/hosts/switch.py NUM_HOSTS [--delay SECONDS]

prints a line of JSON, `{"addresses": [...], "own_address": ..., "namespaces": [...]}`: the hosts' addresses, that by
which the machine's own processes take part, and files to enter the hosts' namespaces by. Then it takes commands, a line
each, `cut HOST`, `mend HOST` and `counts`, and answers each with a line of JSON, the counts of the hosts. At the end of
its input it kills what still runs on its hosts, and nothing of them is left: the kernel keeps namespaces and TUN
devices only for whoever has them open.
"""

import argparse
import ctypes
import fcntl
import ipaddress
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

NETWORKS = ipaddress.ip_network("198.18.0.0/15")
"""Set aside for tests of network devices (RFC 2544)."""
MTU = 9000
"""Jumbo frames, as between the hosts of one data centre."""
OWN_HOST_NUMBER = 254
_READS_IN_A_ROW = 64
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _IFF_UP = 0x400454CA, 0x0001, 0x1000, 0x0001
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Counts:
    """Of one host, what was brought to it, and what was lost on the way to or from it while its link was cut."""

    num_packets: int = 0
    num_bytes: int = 0
    num_lost_packets: int = 0


class Host:
    """One end of the switch: a TUN device in a namespace. All that is sent there comes out of `device`."""

    def __init__(self, address: ipaddress.IPv4Address) -> None:
        """Make the device in the namespace that this thread is in. Raises OSError where that may not be."""
        self.address = address
        self.counts = Counts()
        self.is_cut = False
        self.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = fcntl.ioctl(self.device, _TUNSETIFF, struct.pack("16sH22x", b"host%d", _IFF_TUN | _IFF_NO_PI))
        name = request[:16]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            _set_up(control, b"lo")
            fcntl.ioctl(control, _SIOCSIFADDR, struct.pack("16s16s8x", name, _socket_address(address)))
            mask = _socket_address(ipaddress.IPv4Address("255.255.255.0"))
            fcntl.ioctl(control, _SIOCSIFNETMASK, struct.pack("16s16s8x", name, mask))
            fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", name, MTU))
            _set_up(control, name)


def _socket_address(address: ipaddress.IPv4Address) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, address.packed)


def _set_up(control: socket.socket, device: bytes) -> None:
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", device, _IFF_UP))


class Switch:
    """Brings each packet to the host of its destination address, `delay_seconds` after it was sent."""

    def __init__(self, num_hosts: int, delay_seconds: float) -> None:
        """Raises OSError where there may be no namespaces or no TUN devices."""
        self._delay_seconds = delay_seconds
        network = _free_network()
        self.own = Host(network[OWN_HOST_NUMBER])
        self.hosts, self.namespaces = list[Host](), list[int]()
        with open("/proc/self/ns/net") as home:
            for number in range(1, num_hosts + 1):
                _call(_libc.unshare(_CLONE_NEWNET))
                self.hosts.append(Host(network[number]))
                self.namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
                _call(_libc.setns(home.fileno(), _CLONE_NEWNET))
        self._by_address = {host.address.packed: host for host in (self.own, *self.hosts)}
        self._by_device = {host.device: host for host in (self.own, *self.hosts)}
        # All are as long on their way, so the first to come is the first to arrive.
        self._on_their_way: deque[tuple[float, Host, Host, bytes]] = deque()

    def run(self) -> None:
        """Until the input ends."""
        os.set_blocking(0, False)
        while True:
            seconds = max(0.0, self._on_their_way[0][0] - time.monotonic()) if self._on_their_way else None
            readable, _, _ = select.select([0, *self._by_device], [], [], seconds)
            for device in readable:
                if device:
                    self._take(self._by_device[device])
                elif not self._obey():
                    return
            self._deliver()

    def _take(self, sender: Host) -> None:
        with suppress(BlockingIOError):
            for _ in range(_READS_IN_A_ROW):
                packet = os.read(sender.device, 1 << 16)
                # What is no IPv4, and what is for nobody here, such as an IPv6 host that looks for routers.
                target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if target is None:
                    continue
                if sender.is_cut:
                    sender.counts.num_lost_packets += 1
                else:
                    self._on_their_way.append((time.monotonic() + self._delay_seconds, sender, target, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._on_their_way and self._on_their_way[0][0] <= now:
            _, sender, target, packet = self._on_their_way.popleft()
            if sender.is_cut or target.is_cut:
                target.counts.num_lost_packets += 1
                continue
            target.counts.num_packets += 1
            target.counts.num_bytes += len(packet)
            # Its queue is full: it is lost, as at any switch.
            with suppress(BlockingIOError):
                os.write(target.device, packet)

    def _obey(self) -> bool:
        """Carry out what stands in the input; False = it has ended."""
        data = os.read(0, 1 << 16)
        for line in data.decode().splitlines():
            command, *numbers = line.split()
            for number in numbers:
                self.hosts[int(number)].is_cut = command == "cut"
            print(json.dumps([asdict(host.counts) for host in self.hosts]), flush=True)
        return bool(data)

    def kill_all(self) -> None:
        """Kill whatever runs on the hosts, and nothing that runs where this process does."""
        ours = {os.fstat(namespace).st_ino for namespace in self.namespaces} - {os.stat("/proc/self/ns/net").st_ino}
        for process in Path("/proc").glob("[0-9]*"):
            # It may have ended meanwhile.
            with suppress(OSError):
                if os.stat(process / "ns" / "net").st_ino in ours:
                    os.kill(int(process.name), signal.SIGKILL)


def _call(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _free_network() -> ipaddress.IPv4Network:
    """One of 256 addresses to which no route of this machine leads, other than whoever tests beside us finds."""
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    taken = {socket.ntohl(int(route.split()[1], 16)) for route in routes}
    networks = [each for each in NETWORKS.subnets(new_prefix=24) if int(each.network_address) not in taken]
    return networks[os.getpid() % len(networks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_hosts", type=int)
    parser.add_argument("--delay", metavar="SECONDS", type=float, default=0.001, help="each way (default 0.001)")
    flags = parser.parse_args()
    # A shell's or a terminal's interrupt is for the test, which then ends our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        switch = Switch(flags.num_hosts, flags.delay)
    except OSError as error:
        sys.exit(f"network namespaces and TUN devices are not to be had here: {error}")
    told = {
        "addresses": [str(host.address) for host in switch.hosts],
        "own_address": str(switch.own.address),
        "namespaces": [f"/proc/{os.getpid()}/fd/{namespace}" for namespace in switch.namespaces],
    }
    print(json.dumps(told), flush=True)
    try:
        switch.run()
    finally:
        switch.kill_all()


if __name__ == "__main__":
    main()
