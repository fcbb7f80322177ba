"""The tests' end of `switch.py`: hosts by their addresses, and their links to cut and mend. Knows no Blockplane."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

SWITCH = Path(__file__).with_name("switch.py")


class Network:
    """Hosts that are there while it is entered; whatever is started on them ends with it, or with this process.

    Attributes:
        addresses: of each host. own_address: by which the hosts reach this process and it reaches them.
    """

    def __init__(self, num_hosts: int, delay_seconds: float = 0.001) -> None:
        """Skips the test where this machine lets us have no hosts."""
        if shutil.which("nsenter") is None:
            pytest.skip("there is no nsenter, by which processes enter network namespaces")
        command = [sys.executable, str(SWITCH), str(num_hosts), f"--delay={delay_seconds}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        told = self._answer()
        self.addresses: list[str] = told["addresses"]
        self.own_address: str = told["own_address"]
        self._namespaces: list[str] = told["namespaces"]
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_ending: object) -> None:
        # It kills them all.
        self._process.communicate(timeout=30)
        for process in self._started:
            process.communicate()

    @property
    def switch_process_id(self) -> int:
        return self._process.pid

    def start(self, host: int, command: Sequence[str], **arguments: Any) -> subprocess.Popen[Any]:
        """A process on a host; `arguments` are those of Popen. Its process id stays that of the command."""
        process = subprocess.Popen(["nsenter", f"--net={self._namespaces[host]}", *command], **arguments)
        self._started.append(process)
        return process

    def cut(self, host: int) -> None:
        """Lose whatever comes from this host and goes to it, also what is on its way."""
        self._tell(f"cut {host}")

    def mend(self, host: int) -> None:
        self._tell(f"mend {host}")

    def counts(self) -> list[dict[str, int]]:
        """Of each host: `num_packets` and `num_bytes` that were brought to it, `num_lost_packets`."""
        counts: list[dict[str, int]] = self._tell("counts")
        return counts

    def _tell(self, command: str) -> Any:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, sentence = self._process.communicate(timeout=30)
            if sentence.startswith("network namespaces"):
                pytest.skip(sentence.strip())
            raise AssertionError(f"the switch has ended: {sentence}")
        return json.loads(line)
