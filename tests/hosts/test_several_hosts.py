"""Two worker groups, each of two ranks on two hosts, 1 ms apart, under load: whatever happens, streams are exact."""

import time
from collections.abc import Iterator

import pytest
from hosts import Hosts, running_hosts
from processes import wait_for
from readers import Readers

NUM_READERS = 16
NUM_RANKS = 2
CUT_SECONDS = 10.0
GROUPS = [tuple(range(1 + first, 1 + first + NUM_RANKS)) for first in range(0, 3 * NUM_RANKS, NUM_RANKS)]
"""The hosts of each; the third is idle."""
FIRST, SECOND, THIRD = (group[0] for group in GROUPS)
SETTINGS = (
    f"--tensor-parallel-size={NUM_RANKS}",
    "--max-model-len=512",
    "--kv-cache-bytes=32000000",
    "--num-batched-tokens-buckets=128",
    "--num-seqs-buckets=8,32",
    "--worker-timeout-seconds=4",
)


def start_group(hosts: Hosts, first: int) -> None:
    (group,) = (group for group in GROUPS if group[0] == first)
    hosts.start_group(f"group-{first}", group)


@pytest.fixture
def two_groups() -> Iterator[Hosts]:
    with running_hosts(1 + 3 * NUM_RANKS, *SETTINGS) as hosts:
        for first in (FIRST, SECOND):
            start_group(hosts, first)
        print(f"\nboth groups serve after {hosts.wait_until_serving(FIRST, SECOND):.1f} s")
        yield hosts


@pytest.fixture
def readers(two_groups: Hosts) -> Iterator[Readers]:
    """Streams that go on at both groups, and are compared to their last token when the test has ended."""
    with Readers(two_groups.address, NUM_READERS) as readers:
        readers.go_on()
        print(f"nothing has happened yet: no stream waits for longer than {readers.longest_silence():.2f} s")
        yield readers
        readers.end()
    assert readers.num_streams >= NUM_READERS
    print(f"all {readers.num_streams} streams had every token right")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_streams_outlive_a_rank_that_is_killed_and_its_group_comes_back(
    two_groups: Hosts, readers: Readers, rank: int
) -> None:
    killed = time.monotonic()
    two_groups.workers[FIRST + rank].kill()
    wait_for(lambda: {*two_groups.groups()} == {SECOND}, "its group counts as lost")
    print(f"the group counts as lost {time.monotonic() - killed:.2f} s after its rank {rank} was killed")
    two_groups.wait_until_serving(FIRST, SECOND)
    print(f"it serves again {time.monotonic() - killed:.2f} s after it")
    readers.go_on()
    print(f"no stream had to wait for longer than {readers.longest_silence():.2f} s")
    assert two_groups.workers[FIRST + rank].statuses == [-9]
    assert all(two_groups.workers[host].num_starts == 1 for host in GROUPS[1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_streams_outlive_a_link_that_is_cut_and_the_group_behind_it_comes_back(
    two_groups: Hosts, readers: Readers
) -> None:
    cut_off, cut = GROUPS[0][-1], time.monotonic()
    two_groups.network.cut(cut_off)
    wait_for(lambda: {*two_groups.groups()} == {SECOND}, "its group counts as lost")
    print(f"the group counts as lost {time.monotonic() - cut:.2f} s after the link of one rank was cut")
    readers.go_on()
    print(f"no stream had to wait for longer than {readers.longest_silence():.2f} s")
    time.sleep(max(0.0, cut + CUT_SECONDS - time.monotonic()))
    two_groups.network.mend(cut_off)
    print(f"the group serves again {two_groups.wait_until_serving(FIRST, SECOND):.2f} s after the link was mended")
    readers.go_on()
    assert two_groups.network.counts()[cut_off]["num_lost_packets"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_is_drained_and_another_takes_its_place_under_load(two_groups: Hosts, readers: Readers) -> None:
    start_group(two_groups, THIRD)
    print(f"a third group serves {two_groups.wait_until_serving(FIRST, SECOND, THIRD):.1f} s after its start")
    began = time.monotonic()
    with two_groups.admin() as admin:
        admin.drain(two_groups.groups()[FIRST].group, timeout=60)
    print(f"the first has no requests {time.monotonic() - began:.2f} s after it was told to have none")
    readers.go_on()
    print(f"no stream had to wait for longer than {readers.longest_silence():.2f} s")
    assert [two_groups.stop_worker(host) for host in GROUPS[0]] == [0] * NUM_RANKS
    two_groups.wait_until_serving(SECOND, THIRD)
    readers.go_on()
    statistics = two_groups.groups()[THIRD].statistics
    assert statistics is not None
    assert statistics.num_running > 0, "the new group has its share"
