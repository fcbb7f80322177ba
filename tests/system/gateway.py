"""The public gateway `smg` and the `openai` client before our processes, in an environment of their own; no test.

The environment is made where BLOCKPLANE_GATEWAY_VENV says, and kept there; or in a temporary directory.
"""

import json
import os
import re
import subprocess
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

from processes import free_port, wait_for

REQUIREMENTS = ("smg==1.13.0", "openai==3.57.0")
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"

_open = build_opener(ProxyHandler({})).open


@contextmanager
def gateway_environment() -> Iterator[Path]:
    """A virtual environment with the gateway and the client."""
    kept = os.environ.get("BLOCKPLANE_GATEWAY_VENV")
    with tempfile.TemporaryDirectory(prefix="blockplane-gateway-") as folder:
        environment = Path(kept or folder)
        made = environment / "made-of.txt"
        if not made.is_file() or made.read_text() != " ".join(REQUIREMENTS):
            venv.create(environment, with_pip=True, clear=True)
            pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", *REQUIREMENTS]
            subprocess.run(pip, check=True)
            made.write_text(" ".join(REQUIREMENTS))
        yield environment


class Gateway:
    """One gateway process before so many frontends. It is gone once the gateway is closed."""

    def __init__(self, environment: Path, addresses: Sequence[str], *flags: str) -> None:
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="blockplane-test-")
        template = Path(self._folder.name) / "chat.jinja"
        template.write_text(CHAT_TEMPLATE)
        port, metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = Path(self._folder.name) / "gateway.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [
                    str(environment / "bin" / "smg"),
                    "launch",
                    f"--port={port}",
                    "--host=127.0.0.1",
                    f"--prometheus-port={metrics_port}",
                    "--prometheus-host=127.0.0.1",
                    f"--chat-template={template}",
                    "--log-level=debug",
                    *flags,
                    "--worker-urls",
                    *(f"grpc://{address}" for address in addresses),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._client = subprocess.Popen(
            [str(environment / "bin" / "python"), str(Path(__file__).with_name("openai_calls.py")), f"{self.url}/v1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def log(self) -> str:
        """Without the colours of terminals."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text(errors="replace"))

    def call(self, api: str, leave_after: int | None = None, **arguments: Any) -> Any:
        """What the `openai` client got, as `openai_calls` tells it."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        call = {"api": api, "arguments": arguments, "leave_after": leave_after}
        self._client.stdin.write(json.dumps(call) + "\n")
        self._client.stdin.flush()
        return json.loads(self._client.stdout.readline())

    def post(self, path: str, timeout: float = 60, **body: Any) -> Any:
        """What plain HTTP gets."""
        headers = {"content-type": "application/json"}
        request = Request(self.url + path, json.dumps(body).encode(), headers)
        with _open(request, timeout=timeout) as response:
            return json.load(response)

    def wait_until_serving(self, model: str) -> None:
        def serves() -> bool:
            assert self._process.poll() is None, self.log[-5000:]
            try:
                self.post("/v1/completions", model=model, prompt="a", max_tokens=1)
            except (URLError, ConnectionError):
                return False
            return True

        wait_for(serves, "the gateway serves", 60)

    def close(self) -> None:
        for process in (self._client, self._process):
            process.kill()
            process.communicate()
        self._folder.cleanup()


@contextmanager
def running_gateway(environment: Path, addresses: Sequence[str], *flags: str) -> Iterator[Gateway]:
    """A gateway that serves the synthetic model, which the frontends at these addresses do."""
    gateway = Gateway(environment, addresses, *flags)
    try:
        gateway.wait_until_serving("synthetic")
        yield gateway
    finally:
        gateway.close()
