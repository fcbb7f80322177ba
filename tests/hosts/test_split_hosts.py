"""Prompts computed on one host, outputs on two others, 1 ms apart: KV blocks move, and every stream is exact."""

import time
from collections.abc import Iterator

import pytest
from hosts import Hosts, running_hosts
from processes import wait_for
from readers import Readers

from blockplane.protos.statistics import EngineStatistics

NUM_READERS = 16
PREFILL, DECODES = 1, (2, 3)
SETTINGS = (
    "--max-model-len=512",
    "--kv-cache-bytes=32000000",
    "--num-batched-tokens-buckets=128",
    "--num-seqs-buckets=8,32",
    "--worker-timeout-seconds=4",
    "--transfer-seconds=10",
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with running_hosts(4, *SETTINGS) as hosts:
        transfer_address = f"--transfer-address={hosts.network.addresses[PREFILL]}:50053"
        hosts.start_worker(PREFILL, "--role=prefill", transfer_address)
        for host in DECODES:
            hosts.start_worker(host, "--role=decode")
        hosts.wait_until_serving(PREFILL, *DECODES)
        yield hosts


@pytest.fixture
def readers(hosts: Hosts) -> Iterator[Readers]:
    with Readers(hosts.address, NUM_READERS) as readers:
        readers.go_on()
        yield readers
        readers.end()
    assert readers.num_streams >= NUM_READERS
    print(f"all {readers.num_streams} streams had every token right")


def counted(hosts: Hosts) -> EngineStatistics:
    with hosts.admin() as admin:
        return admin.statistics()


def move_more(hosts: Hosts, readers: Readers) -> EngineStatistics:
    """Have what is cached be forgotten, and with it what is on its way, until blocks of other prompts have moved."""
    before = counted(hosts)
    with hosts.admin() as admin:
        admin.reset_prefix_cache()
    wait_for(lambda: counted(hosts).num_transferred_blocks > before.num_transferred_blocks, "more blocks move", 60)
    readers.go_on()
    told = counted(hosts)
    moved, failed = told.num_transfers, told.num_failed_transfers
    print(f"{told.num_transferred_blocks} blocks of {moved} requests moved, those of {failed} did not")
    return told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prompts_are_computed_on_one_host_and_their_blocks_move_to_the_others(hosts: Hosts, readers: Readers) -> None:
    told = counted(hosts)
    assert told.num_transferred_blocks > 0
    assert told.num_failed_transfers == 0
    for _ in range(3):
        told = move_more(hosts, readers)
    groups = hosts.groups()
    running = {host: group.statistics.num_running for host, group in groups.items() if group.statistics is not None}
    print(f"requests that run at each host: {running}")
    assert told.num_transfers >= NUM_READERS
    assert all(running[host] > running[PREFILL] for host in DECODES)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("host", [PREFILL, DECODES[0]])
def test_streams_outlive_a_killed_host_of_either_role_and_blocks_move_again(
    hosts: Hosts, readers: Readers, host: int
) -> None:
    move_more(hosts, readers)
    hosts.workers[host].kill()
    wait_for(lambda: host not in hosts.groups(), "it counts as lost")
    readers.go_on()
    print(f"host {host} serves again after {hosts.wait_until_serving(PREFILL, *DECODES):.1f} s")
    move_more(hosts, readers)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_streams_outlive_the_cutting_of_the_link_by_which_blocks_move(hosts: Hosts, readers: Readers) -> None:
    move_more(hosts, readers)
    hosts.network.cut(PREFILL)
    readers.go_on()
    time.sleep(10)
    hosts.network.mend(PREFILL)
    print(f"it serves again {hosts.wait_until_serving(PREFILL, *DECODES):.1f} s after its link was mended")
    move_more(hosts, readers)
