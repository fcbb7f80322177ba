"""The port that Prometheus reads, over real sockets: what it tells, whom it serves, and what it leaves alone."""

from __future__ import annotations

import logging
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import Authority
from processes import free_port

from blockplane.protos.config import Config, load_config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.metric_families import MetricFamilies
from blockplane.protos.metrics_port import MetricsPort

LOCAL = Config(metrics_address="127.0.0.1:0")


@pytest.fixture
def open_port() -> Iterator[Callable[[Config], MetricsPort]]:
    opened: list[MetricsPort] = []

    def open_one(config: Config) -> MetricsPort:
        opened.append(MetricsPort(config, "test"))
        return opened[-1]

    yield open_one
    for port in opened:
        port.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    ours = Authority(tmp_path_factory.mktemp("certificates"), "ours")
    ours.issue("server")
    ours.issue("prometheus")
    return ours


def secured(authority: Authority, folder: Path | None = None) -> Config:
    folder = folder or authority.folder
    return replace(LOCAL, tls_certificate=f"{folder}/server.pem", tls_key=f"{folder}/server.key")


def scrape(url: str, context: ssl.SSLContext | None = None) -> str:
    with urllib.request.urlopen(url, timeout=10, context=context) as response:
        assert response.status == 200
        return response.read().decode()


def trusting(authority: Authority, certificate: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    if certificate is not None:
        context.load_cert_chain(f"{authority.folder}/{certificate}.pem", f"{authority.folder}/{certificate}.key")
    return context


def steps(number: int) -> MetricFamilies:
    families = MetricFamilies()
    families.counter("steps", "Steps.", number)
    return families


def broken() -> MetricFamilies:
    raise RuntimeError("nobody knows")


def test_it_tells_what_its_parts_tell_and_which_version_of_what_it_is(open_port) -> None:
    port = open_port(LOCAL)
    port.add(lambda: steps(3))
    told = scrape(port.url)
    assert "\nblockplane:steps_total 3.0\n" in told
    assert 'blockplane:build_info{process="test",protocol="' in told
    assert "\nprocess_cpu_seconds_total " in told


@pytest.mark.parametrize("escaping", ["", ";escaping=underscores", ";escaping=allow-utf-8"])
def test_names_keep_their_colon_whatever_format_prometheus_would_like(open_port, escaping: str) -> None:
    accept = f"application/openmetrics-text;version=1.0.0{escaping},text/plain;version=1.0.0{escaping};q=0.5,*/*;q=0.1"
    with urllib.request.urlopen(urllib.request.Request(open_port(LOCAL).url, headers={"Accept": accept})) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "\nblockplane:build_info{" in response.read().decode()


def test_a_part_that_fails_is_left_out_and_counted_and_is_a_line_in_the_log(open_port, caplog) -> None:
    port = open_port(LOCAL)
    port.add(broken)
    port.add(lambda: steps(3))
    with caplog.at_level(logging.ERROR):
        told = scrape(port.url)
    assert "\nblockplane:steps_total 3.0\n" in told
    assert "\nblockplane:scrape_errors_total 1.0\n" in told
    assert [record.message for record in caplog.records] == ["a part of the metrics is left out of a scrape"]
    assert "nobody knows" in caplog.text


def test_what_cannot_be_written_is_a_500_and_the_next_scrape_is_served(open_port, caplog) -> None:
    port, values = open_port(LOCAL), iter(("no number", 3))
    port.add(lambda: steps(next(values)))
    with caplog.at_level(logging.ERROR), pytest.raises(urllib.error.HTTPError, match="500"):
        scrape(port.url)
    assert "a scrape of the metrics has failed" in caplog.text
    assert "\nblockplane:steps_total 3.0\n" in scrape(port.url)


def test_whoever_connects_and_says_nothing_keeps_nobody_waiting(open_port, authority) -> None:
    for config, context in ((LOCAL, None), (secured(authority), trusting(authority))):
        port = open_port(config)
        address = port.url.split("/")[2].split(":")
        with closing(socket.create_connection((address[0], int(address[1])))):
            assert "blockplane:build_info" in scrape(port.url, context)


def test_an_address_that_is_taken_is_refused_by_name(open_port) -> None:
    config = replace(LOCAL, metrics_address=f"127.0.0.1:{free_port()}")
    open_port(config)
    with pytest.raises(ConfigurationError, match=f"cannot listen on metrics_address {config.metrics_address}: Address"):
        MetricsPort(config, "test")


@pytest.mark.parametrize("address", ["50052", ":50052", "localhost:", "localhost:x", "localhost:65536", "unix:/tmp/x"])
def test_an_address_that_is_none_is_refused_before_anything_starts(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"metrics_address is '.*'; give host:port"):
        load_config({"metrics_address": address}, {})


def test_plaintext_beyond_this_machine_is_for_networks_of_ones_own(open_port, authority) -> None:
    beyond = replace(LOCAL, metrics_address="0.0.0.0:0")
    with pytest.raises(ConfigurationError, match=r"metrics_address 0.0.0.0:0 is open to other machines, in plaintext"):
        MetricsPort(beyond, "test")
    open_port(replace(beyond, plaintext="anywhere"))
    open_port(replace(secured(authority), metrics_address="0.0.0.0:0"))


def test_with_a_certificate_it_speaks_tls_and_asks_for_one_where_callers_need_one(open_port, authority) -> None:
    port = open_port(secured(authority))
    assert port.url.startswith("https://")
    assert "blockplane:build_info" in scrape(port.url, trusting(authority))
    with pytest.raises(OSError, match=r"."):
        scrape(port.url.replace("https", "http"))
    port = open_port(replace(secured(authority), tls_client_ca=str(authority.ca)))
    assert "blockplane:build_info" in scrape(port.url, trusting(authority, "prometheus"))
    with pytest.raises(OSError, match=r"."):
        scrape(port.url, trusting(authority))


def test_a_renewed_certificate_is_shown_without_a_restart_and_a_half_renewed_one_is_not(
    open_port, authority, tmp_path, caplog
) -> None:
    other = Authority(tmp_path, "other")
    other.issue("theirs")
    for ending in ("pem", "key"):
        shutil.copy(authority.folder / f"server.{ending}", tmp_path)
    port = open_port(secured(authority, tmp_path))
    shutil.copy(tmp_path / "theirs.pem", tmp_path / "server.pem")
    with caplog.at_level(logging.ERROR):
        assert "blockplane:build_info" in scrape(port.url, trusting(authority))
    assert "going on with the certificate of before" in caplog.text
    shutil.copy(tmp_path / "theirs.key", tmp_path / "server.key")
    assert "blockplane:build_info" in scrape(port.url, trusting(other))


def test_a_certificate_that_cannot_be_used_is_refused_by_its_settings(authority) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot use /nowhere: No such file.*check tls_certificate"):
        MetricsPort(replace(LOCAL, tls_certificate="/nowhere", tls_key="/nowhere"), "test")
