"""By which host others reach this machine."""

import pytest

from blockplane.data_plane.own_address import host_towards, reachable_address


@pytest.mark.parametrize(
    ("engine_address", "host"),
    [
        ("127.0.0.1:50051", "127.0.0.1"),
        ("unix:/tmp/engine.sock", "127.0.0.1"),
        ("no.such.host.invalid:50051", "127.0.0.1"),
    ],
)
def test_it_is_the_one_that_leads_to_the_engine(engine_address: str, host: str) -> None:
    assert host_towards(engine_address) == host


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "127.0.0.1:9"),
        ("[::]", "127.0.0.1:9"),
        ("10.1.2.3", "10.1.2.3:9"),
        ("[fd00::1]", "[fd00::1]:9"),
        ("node-3", "node-3:9"),
    ],
)
def test_only_a_host_that_stands_for_every_address_is_replaced(host: str, address: str) -> None:
    assert reachable_address(host, 9, "127.0.0.1:50051") == address
