"""What the image's health check says of a worker, by the port of its metrics."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import Authority

from blockplane.client.health import check_worker, main, on_this_machine
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError, UnavailableError
from blockplane.protos.metrics_port import MetricsPort


class Port:
    """A worker's port, and the settings by which it is found."""

    def __init__(self, **settings: str) -> None:
        self._port = MetricsPort(Config(metrics_address="127.0.0.1:0", **settings), "worker")
        self.close, self.tell_ready = self._port.close, self._port.tell_ready
        address = self._port.url.removesuffix("/metrics").rpartition("/")[2]
        self.config = Config(metrics_address=address, **settings)


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    port.close()


def test_a_worker_is_well_as_long_as_it_is_attached(port: Port) -> None:
    is_attached = False
    port.tell_ready(lambda: is_attached)
    with pytest.raises(UnavailableError, match="503"):
        check_worker(port.config)
    is_attached = True
    check_worker(port.config)


def test_a_worker_that_still_loads_is_not_well(port: Port) -> None:
    with pytest.raises(UnavailableError, match="404"):
        check_worker(port.config)


def test_a_port_with_certificates_is_asked_with_the_workers_own(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.issue("worker")
    ca = str(authority.ca)
    port = Port(tls_certificate=certificate, tls_key=key, tls_ca=ca, tls_client_ca=ca)
    port.tell_ready(lambda: True)
    try:
        check_worker(port.config)
        stranger = str(Authority(tmp_path, "stranger").ca)
        with pytest.raises(UnavailableError, match="certificate"):
            check_worker(replace(port.config, tls_ca=stranger))
        with pytest.raises(ConfigurationError, match="cannot be read"):
            check_worker(replace(port.config, tls_ca=str(tmp_path / "absent")))
    finally:
        port.close()


@pytest.mark.parametrize(
    ("address", "dialled"),
    [
        ("0.0.0.0:50050", "127.0.0.1:50050"),
        ("[::]:50050", "127.0.0.1:50050"),
        ("127.0.0.2:50050", "127.0.0.2:50050"),
        ("unix:/run/engine.sock", "unix:/run/engine.sock"),
    ],
)
def test_a_process_that_listens_everywhere_is_dialled_on_loopback(address: str, dialled: str) -> None:
    assert on_this_machine(address) == dialled


def test_what_is_wrong_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--metrics-address="]) == 1
    assert capsys.readouterr().err == "metrics_address is empty, and a worker listens nowhere else; set it.\n"
