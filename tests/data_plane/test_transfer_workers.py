"""Two real workers, each with an engine that follows a script: one reads the other's blocks while it computes."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import grpc
import numpy as np
import pytest
from moving_blocks import listening_source
from scripted_attaches import Attach, Script, ScriptedEngine, Told, column, decode, listening, plan
from synthetic_oracle import continue_greedily

from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
from blockplane.data_plane.place import Single
from blockplane.data_plane.served_model import ServedModel
from blockplane.data_plane.transfers.transfers import Transfers
from blockplane.data_plane.worker import Worker
from blockplane.protos import wire
from blockplane.protos.columns import column_to_bytes
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb

Responses = Iterator[pb.AttachWorkerResponse]
CONFIGURE = Configure(4, 64, 256, num_batched_tokens_buckets=(32,), num_seqs_buckets=(2,))
PROMPT = list(range(40, 70))
NUM_MOVED = len(PROMPT) // 4
OTHER = [7, 8, 9, 10, 11]
NUM_STEPS = 90
SOURCE_EPOCH, TARGET_EPOCH = 11, 21


def admit(step: int, row: int, prompt: list[int], block_ids: list[int], num_computed: int = 0) -> StepPlan:
    params = SamplingParams(NUM_STEPS + 1, ignore_eos=True)
    return StepPlan(
        step,
        admissions=(Admission(row, column(*prompt), len(prompt), num_computed, params, 5),),
        block_rows=np.full(len(block_ids), row, np.int32),
        block_ids=column(*block_ids),
        prefill_rows=column(row),
        prefill_num_tokens=column(len(prompt) - num_computed),
    )


def fetch(address: str, from_ids: list[int], to_ids: list[int]) -> pb.AttachWorkerResponse:
    told = pb.FetchBlocks(
        transfer_id=3,
        transport="grpc",
        address=address,
        source_epoch=SOURCE_EPOCH,
        source_block_ids=column_to_bytes(column(*from_ids)),
        block_ids=column_to_bytes(column(*to_ids)),
        timeout_seconds=20.0,
    )
    return pb.AttachWorkerResponse(fetch=told)


def serve(engine: ScriptedEngine, config: Config) -> None:
    transfers = Transfers(config)
    model = ServedModel(SyntheticModel("float32"), synthetic_model_info(256), 1 << 24)
    worker = Worker(Single(model), transfers)
    with listening(engine) as address, pytest.raises(ConfigurationError, match="that was all"):
        worker.serve(address)
    transfers.close()


class Pair:
    """A worker whose row 1 has computed PROMPT in the blocks from 1 on, and what another one's engine does."""

    def __init__(self) -> None:
        self.address: Future[str] = Future()
        self.is_over = Told()

    def run(self, target: Script, source: Script | None = None) -> None:
        engines = ScriptedEngine(source or self.computes_and_waits), ScriptedEngine(target)
        configs = Config(transfer_address="127.0.0.1:0"), Config()
        with ThreadPoolExecutor(2) as pool:
            serving = [pool.submit(serve, engine, config) for engine, config in zip(engines, configs, strict=True)]
            serving[1].add_done_callback(lambda _: self.is_over.set())
            for each in serving:
                each.result(60)
        assert [engine.errors for engine in engines] == [[], []]
        assert engines[0].hellos[0].transports == engines[1].hellos[0].transports == ["grpc"]
        assert engines[1].hellos[0].transfer_address == ""

    def computes(self, attach: Attach) -> Responses:
        yield from attach.configure(replace(CONFIGURE, epoch=SOURCE_EPOCH))
        yield plan(admit(1, 1, PROMPT, list(range(1, NUM_MOVED + 2))))
        assert attach.result().token_ids.tolist() == continue_greedily(PROMPT, 1, ignore_eos=True)

    def computes_and_waits(self, attach: Attach) -> Responses:
        yield from self.computes(attach)
        self.address.set_result(attach.hello.transfer_address)
        self.is_over.wait(60)
        attach.lose()


def test_texts_are_exact_while_blocks_come_and_a_prompt_goes_on_with_those_that_came() -> None:
    """Row 1 decodes all the while in blocks of its own; row 0 is admitted over the other worker's."""
    pair, moved = Pair(), list(range(41, 41 + NUM_MOVED))
    texts: dict[int, list[int]] = {0: [], 1: []}

    def target(attach: Attach) -> Responses:
        yield from attach.configure(replace(CONFIGURE, epoch=TARGET_EPOCH))
        address = pair.address.result(30)
        yield plan(admit(1, 1, OTHER, list(range(1, 31))))
        texts[1] += attach.result().token_ids.tolist()
        num_fetched, rows = 0, [1]
        yield fetch(address, list(range(1, NUM_MOVED + 1)), moved)
        yield plan(decode(2))
        for step in range(3, NUM_STEPS):
            message = attach.next("result", "fetched")
            while message.HasField("fetched"):
                assert message.fetched == pb.BlocksFetched(transfer_id=3)
                num_fetched += 1
                message = attach.next("result", "fetched")
            result = wire.result_from_proto(message.result)
            for row, token_id in zip(rows, result.token_ids.tolist(), strict=True):
                texts[row].append(token_id)
            rows = sorted(texts) if texts[0] else [1]
            if num_fetched == 3 and not texts[0]:
                rows = [1, 0]
                yield plan(admit(step, 0, PROMPT, [*moved, *range(48, 64), *range(31, 41)], num_computed=4 * NUM_MOVED))
            else:
                if num_fetched < 3 and message.result.step % 7 == 0:
                    yield fetch(address, list(range(1, NUM_MOVED + 1)), moved)
                yield plan(StepPlan(step, decode_rows=column(*rows)))
        assert num_fetched >= 3
        attach.lose()

    pair.run(target)
    assert texts[1] == continue_greedily(OTHER, len(texts[1]), ignore_eos=True)
    assert len(texts[0]) > 5
    assert texts[0] == continue_greedily(PROMPT, len(texts[0]), ignore_eos=True)


def test_blocks_of_a_worker_that_attached_anew_cannot_be_had_though_they_are_still_there() -> None:
    pair, attached_anew = Pair(), threading.Event()

    def again(attach: Attach) -> Responses:
        yield from attach.configure(replace(CONFIGURE, epoch=SOURCE_EPOCH + 1, keeps_kv=True, last_step=1))
        pair.address.set_result(attach.hello.transfer_address)
        attached_anew.set()
        pair.is_over.wait(60)
        attach.lose()

    def target(attach: Attach) -> Responses:
        yield from attach.configure(replace(CONFIGURE, epoch=TARGET_EPOCH))
        yield fetch(pair.address.result(30), [1, 2], [41, 42])
        assert "something else by now" in attach.next("fetched").fetched.failure
        attach.lose()

    def lost(attach: Attach) -> Responses:
        yield from pair.computes(attach)
        attach.lose()

    source = ScriptedEngine(lost, again)
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, source, Config(transfer_address="127.0.0.1:0"))
        engine = ScriptedEngine(target)
        serve(engine, Config())
        pair.is_over.set()
        serving.result(60)
    assert source.errors == engine.errors == []
    assert attached_anew.is_set()


def test_an_attach_that_ends_ends_its_fetches_and_the_next_begins_with_none() -> None:
    """The source says nothing; the worker attaches anew at once, not when the fetch's time is over."""
    silent = threading.Event()

    class Silent:
        def __iter__(self) -> Iterator[bytes]:
            silent.wait(30)
            return iter(())

    def fetches(attach: Attach) -> Responses:
        yield from attach.configure(replace(CONFIGURE, epoch=TARGET_EPOCH))
        yield fetch(address, [1], [41])
        yield plan(admit(1, 1, OTHER, [1, 2, 3]))
        attach.result()
        attach.lose()

    def anew(attach: Attach) -> Responses:
        yield from attach.configure(replace(CONFIGURE, epoch=TARGET_EPOCH + 1))
        yield plan(admit(1, 1, OTHER, [1, 2, 3]))
        assert attach.result().token_ids.tolist() == continue_greedily(OTHER, 1, ignore_eos=True)
        attach.context.abort(grpc.StatusCode.FAILED_PRECONDITION, "that was all.")

    with listening_source(Silent()) as address:
        engine = ScriptedEngine(fetches, anew)
        serve(engine, Config())
        silent.set()
    assert engine.errors == []
    assert not any(thread.name == "fetch" for thread in threading.enumerate())
