"""The operator's client, and the sub-commands that are made of it: what they ask, tell, and end with."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from fake_engine import FakeEngine, running_fake_engine, statistics, worker
from fake_inference import FakeServer

from blockplane.client import cli
from blockplane.client.admin import Admin
from blockplane.protos.access import Access
from blockplane.protos.errors import (
    DeadlineError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    UnavailableError,
)
from blockplane.v1 import admin_pb2 as pb
from blockplane.v1 import engine_pb2

TIMES = ("scheduled", "planned", "received", "began", "prepared", "computed", "sampled", "sent", "answered", "settled")
NUMBERS = ("num_prefill_tokens", "num_decode_tokens", "num_bucket_tokens", "num_plan_bytes")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with running_fake_engine() as engine:
        yield engine


def test_workers_come_in_the_order_of_their_numbers_and_unready_ones_have_no_statistics(engine: FakeEngine):
    unready = worker(3, state="building")
    unready.ClearField("statistics")
    engine.workers = [unready, worker(1)]
    with Admin(engine.address) as admin:
        first, second = admin.list_workers()
    assert (first.group, first.state, first.boot_id, first.weight_epoch) == (1, "ready", 2**64 - 1, 2)
    assert first.statistics is not None
    assert (first.statistics.num_running, first.statistics.kv_cache_usage) == (3, 0.5)
    assert (second.group, second.state, second.statistics) == (3, "building", None)


def test_statistics_are_those_of_all_groups_and_of_each(engine: FakeEngine):
    engine.statistics = engine_pb2.GetStatisticsResponse(
        num_running=5, num_held=2, num_suspects=1, num_lost_workers=3, groups=[statistics(7, num_steps=9)]
    )
    engine.statistics.num_common_prefix_blocks.extend([4, 0])
    with Admin(engine.address) as admin:
        told = admin.statistics()
    assert (told.total.num_running, told.total.num_common_prefix_blocks) == (5, (4, 0))
    assert (told.num_held, told.num_suspects, told.num_lost_workers) == (2, 1, 3)
    assert told.groups[7].num_steps == 9


def test_steps_are_columns_of_nanoseconds_and_counts(engine: FakeEngine):
    ns = np.array([2**60 + 1, 2**60 + 2], "<i8")
    columns = {name: (ns + index).tobytes() for index, name in enumerate(("steps", *TIMES, "delivered"))}
    columns |= {name: np.array([index, -1], "<i4").tobytes() for index, name in enumerate(NUMBERS)}
    engine.steps = [pb.GetStepsResponse(group=5, **columns), pb.GetStepsResponse(group=6)]
    with Admin(engine.address) as admin:
        told, none = admin.get_steps(100)
    assert (told.group, none.group, len(none.steps)) == (5, 6, 0)
    assert told.steps.tolist() == [2**60 + 1, 2**60 + 2]
    assert told.delivered.tolist() == [2**60 + 12, 2**60 + 13]
    assert [getattr(told, name).tolist() for name in NUMBERS] == [[0, -1], [1, -1], [2, -1], [3, -1]]
    assert engine.calls == [("GetSteps", pb.GetStepsRequest(num_steps=100))]


def test_a_column_that_ends_inside_a_number_is_a_protocol_error(engine: FakeEngine):
    engine.steps = [pb.GetStepsResponse(steps=b"1234567")]
    with Admin(engine.address) as admin, pytest.raises(ProtocolError, match="whole int64"):
        admin.get_steps()


def test_failures_are_the_engines_own(engine: FakeEngine):
    engine.failures = {
        "DrainWorker": NotFoundError("no worker 9 is attached."),
        "ListWorkers": PermissionDeniedError("the token is not for that."),
    }
    with Admin(engine.address) as admin:
        with pytest.raises(NotFoundError, match="no worker 9"):
            admin.drain(9)
        with pytest.raises(PermissionDeniedError):
            admin.list_workers()


def test_no_engine_is_an_unavailable_error_that_names_the_address(free_address: str):
    with Admin(free_address) as admin, pytest.raises(UnavailableError, match=f"no server answers on {free_address}"):
        admin.statistics()


def test_a_drain_that_takes_too_long_is_a_deadline_error(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    engine.failures = {"DrainWorker": DeadlineError("it has requests.")}
    with Admin(engine.address) as admin, pytest.raises(DeadlineError):
        admin.drain(0, timeout=5)


def test_every_call_shows_the_token(engine: FakeEngine, tmp_path):
    token = tmp_path / "token"
    token.write_text("root")
    with Admin(engine.address, Access(token=str(token))) as admin:
        admin.list_workers()
        admin.drain(1)
        admin.undrain(1)
        admin.reload_weights("there")
        admin.get_steps()
        admin.statistics()
        admin.reset_prefix_cache()
    assert engine.tokens == ["Bearer root"] * 7


def command(engine: FakeEngine, *arguments: str) -> int:
    return cli.main([*arguments, "--engine-address", engine.address])


@pytest.mark.parametrize(
    ("arguments", "call", "said"),
    [
        (("drain", "3"), ("DrainWorker", pb.DrainWorkerRequest(group=3)), "group 3 has no requests and gets none\n"),
        (("drain", "3", "--undo"), ("UndrainWorker", pb.UndrainWorkerRequest(group=3)), "group 3 takes requests\n"),
        (("reload",), ("ReloadWeights", pb.ReloadWeightsRequest()), "new weights at groups 0, 2\n"),
        (
            ("reload", "--weights", "there"),
            ("ReloadWeights", pb.ReloadWeightsRequest(model="there")),
            "new weights at groups 0, 2\n",
        ),
        (
            ("reset-cache",),
            ("ResetPrefixCache", engine_pb2.ResetPrefixCacheRequest()),
            "nothing that was cached is found any more\n",
        ),
    ],
)
def test_what_operators_ask_is_one_call_and_one_line(engine: FakeEngine, arguments, call, said, capsys):
    engine.workers = [worker(0), worker(2)]
    assert command(engine, *arguments) == 0
    assert engine.calls == [call]
    assert capsys.readouterr() == (said, "")


def test_what_the_engine_refuses_is_one_sentence_and_exit_1(engine: FakeEngine, capsys):
    engine.failures = {"DrainWorker": NotFoundError("no worker 9 is attached.")}
    assert command(engine, "drain", "9") == 1
    assert capsys.readouterr() == ("", "blockplane drain: no worker 9 is attached.\n")


def status(server: FakeServer | str, engine: FakeEngine | str, *arguments: str) -> int:
    addresses = [each if isinstance(each, str) else each.address for each in (server, engine)]
    return cli.main(["status", "--address", addresses[0], "--engine-address", addresses[1], *arguments])


def test_status_tells_of_frontend_engine_model_and_workers(fake_server: FakeServer, engine: FakeEngine, capsys):
    engine.workers = [worker(0), worker(1, state="draining")]
    assert status(fake_server, engine) == 0
    frontend, told_engine, model, _, _, _, first, second = capsys.readouterr().out.splitlines()
    assert frontend.split() == ["frontend", fake_server.address, "serving"]
    assert told_engine.split() == ["engine", engine.address, "serving"]
    assert model == "model     fake, 64 tokens, 300 ids"
    assert first.split() == [
        *("0", "ready", "6", "50%", "101", "x", "16", "00010203", "#2", "4", "61", "s", "synthetic", "ipv4:127.0.0.1:5")
    ]
    assert second.split()[:2] == ["1", "draining"]


def test_status_tells_names_ranks_and_roles_where_there_are_several(
    fake_server: FakeServer, engine: FakeEngine, capsys
):
    ranks = [pb.Rank(rank=0, peer="ipv4:10.0.0.1:5", boot_id=1), pb.Rank(rank=1, peer="ipv4:10.0.0.2:5", boot_id=2)]
    engine.workers = [worker(0, name="blue", ranks=ranks, peer=ranks[0].peer, role="prefill")]
    assert status(fake_server, engine) == 0
    *_, heads, first, second = capsys.readouterr().out.splitlines()
    assert heads.split()[-4:] == ["name", "rank", "role", "peer"]
    assert first.split()[-4:] == ["blue", "0", "prefill", "ipv4:10.0.0.1:5"]
    assert second.split() == ["blue", "1", "ipv4:10.0.0.2:5"]
    assert status(fake_server, engine, "--json") == 0
    (only,) = json.loads(capsys.readouterr().out)["workers"]
    assert only["ranks"][1] == {"rank": 1, "peer": "ipv4:10.0.0.2:5", "boot_id": 2}


def test_status_ends_with_1_where_nothing_serves_and_still_tells_the_rest(
    fake_server: FakeServer, engine: FakeEngine, free_address: str, capsys, monkeypatch
):
    monkeypatch.setattr("blockplane.client.status.WAIT_SECONDS", 0.2)
    fake_server.set_serving(False)
    assert status(fake_server, engine) == 1
    assert f"{fake_server.address} is not serving" in capsys.readouterr().out
    fake_server.set_serving(True)
    assert status(fake_server, free_address) == 1
    shown = capsys.readouterr().out
    assert f"no server answers on {free_address}" in shown
    assert "model     fake" in shown
    assert "no worker" in shown


def test_status_as_json_is_one_object(fake_server: FakeServer, engine: FakeEngine, capsys):
    engine.workers = [worker(4)]
    assert status(fake_server, engine, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["serving"], told["failures"], told["model"]["name"]) == (True, {}, "fake")
    (only,) = told["workers"]
    assert (only["group"], only["model_fingerprint"]) == (4, bytes(range(16)).hex())
    assert only["statistics"]["num_running"] == 3
