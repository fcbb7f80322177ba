"""What the step log does not tell of a decode step, by CPU clocks, and the least that each of its parts could take.

All are CPU microseconds of one thread, medians of steps; floors beside them are measured on this machine, too.
"""

import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from scheduler_load import ControlPlane
from single_stream import read_bandwidth
from wire import decode_load
from worker_step import PARTS, DecodingRows

from blockplane.control_plane.frontend.text import Text
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.data_plane.models.config import ModelConfig
from blockplane.protos import delivery_wire, wire
from blockplane.protos.model import GenerationDefaults, ModelInfo
from blockplane.protos.plan import StepPlan
from blockplane.v1 import engine_pb2 as pb

NUM_STEPS, BLOCK_SIZE = 256, 16
TOKENS_OF_TEXTS = 1000, 200_000
BYTES_OF_A_NUMBER = 2
"""Weights and KV are bfloat16."""
NUM_INPUTS = 6
"""What a decode of this model is fed: ids, positions, slots and a block table for either KV group, lengths."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """CPU microseconds of a step: the engine writes a plan, the worker applies it; the engine writes a delivery, the
    frontend reads it, and makes text of its tokens."""

    encode: float
    apply: float
    write_delivery: float
    read_delivery: float
    detokenize: float


@dataclass(frozen=True, slots=True)
class Least:
    """CPU microseconds: a sum over so many numbers; an empty message, written; so many numbers, copied; as many arrays
    as a step is fed, gathered; and so many texts, looked up by their tokens."""

    one_sum: float
    empty_message: float
    one_copy: float
    gathered_inputs: float
    looked_up_texts: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes a second that all cores read, and operations a second of their bfloat16 matrix products."""

    read_bandwidth: float
    operations: float


@dataclass(frozen=True, slots=True)
class Weights:
    """How many numbers a model has, and how many of KV one token has in a layer."""

    num_weights: int
    kv_per_token: int
    windows: tuple[int | None, ...]
    vocab_size: int

    def forward_microseconds(self, num_rows: int, context: int, machine: Machine) -> float:
        """The larger of reading weights and KV once, and of two operations for each weight and row."""
        num_read = sum(min(context, window or context) for window in self.windows) * self.kv_per_token * num_rows
        num_bytes = BYTES_OF_A_NUMBER * (self.num_weights + num_read)
        operations = 2.0 * self.num_weights * num_rows
        return 1e6 * max(num_bytes / machine.read_bandwidth, operations / machine.operations)

    def sampling_microseconds(self, num_rows: int, machine: Machine) -> float:
        """Reading all logits once, which are float32."""
        return 1e6 * 4 * num_rows * self.vocab_size / machine.read_bandwidth


class ClockedControlPlane(ControlPlane):
    """Keeps what it took to write plans."""

    def __init__(self, num_rows: int) -> None:
        self.plans: list[StepPlan] = []
        super().__init__(decode_load("hybrid", BLOCK_SIZE, num_rows, 2 * NUM_STEPS))
        self.plans.clear()

    def plan(self) -> bytes:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.plans.append(plan)
        self.feed.planned(plan.step)
        self.steps.scheduled(plan, time.monotonic(), has_idled=False)
        data = written(plan)
        self.steps.sent(len(data))
        return data


def written(plan: StepPlan) -> bytes:
    message = pb.AttachWorkerResponse(plan=wire.plan_to_proto(plan))
    message.ByteSize()
    return message.SerializeToString()


def measure_clocks(num_rows: int, text: Text) -> Clocks:
    control_plane = ClockedControlPlane(num_rows)
    control_plane.decode(NUM_STEPS)
    delivery = one_delivery(control_plane)
    rows = DecodingRows(num_rows, 2)
    rows.turn(64)
    apply = rows.turn(64)[PARTS.index("apply")]
    return Clocks(
        encode=statistics.median(microseconds(lambda plan=plan: written(plan)) for plan in control_plane.plans),
        apply=statistics.median(apply),
        write_delivery=median_of(lambda: delivery_wire.delivery_to_proto(delivery).SerializeToString()),
        read_delivery=median_of(reading(delivery_wire.delivery_to_proto(delivery).SerializeToString())),
        detokenize=detokenizing(num_rows, text),
    )


def one_delivery(control_plane: ControlPlane) -> delivery_wire.Delivery:
    control_plane.answer(control_plane.result())
    control_plane.steps.delivered()
    return control_plane.outbox.empty()


def reading(data: bytes) -> Callable[[], object]:
    """What a frontend does until each stream has its tokens."""

    def read() -> None:
        delivery = delivery_wire.delivery_from_proto(pb.AttachFrontendResponse.FromString(data))
        delivery.stream_ids.tolist()
        delivery.token_ids.tolist()

    return read


def detokenizing(num_rows: int, text: Text) -> float:
    """A token for each of so many texts."""
    random = np.random.default_rng(0)
    outputs = [text.continuation([int(random.integers(*TOKENS_OF_TEXTS))]) for _ in range(num_rows)]

    def push() -> None:
        for output, token_id in zip(outputs, random.integers(*TOKENS_OF_TEXTS, num_rows).tolist(), strict=True):
            output.push([token_id])

    return median_of(push)


def measure_least(num_rows: int) -> Least:
    numbers, order = np.zeros(1 << 16, np.int64), np.random.default_rng(0).integers(0, 1 << 16, num_rows)
    own, pieces = numbers[:num_rows], dict.fromkeys(range(num_rows), "piece")
    return Least(
        one_sum=median_of(own.sum),
        empty_message=median_of(pb.StepResult().SerializeToString),
        one_copy=median_of(own.copy),
        gathered_inputs=median_of(lambda: [numbers[order] for _ in range(NUM_INPUTS)]),
        looked_up_texts=median_of(lambda: [pieces[token_id] for token_id in range(num_rows)]),
    )


def measure_machine() -> Machine:
    """The best of some turns each; a product of this model's kind, of as many rows as make it fast."""
    one, other = torch.ones(1024, 640, dtype=torch.bfloat16), torch.ones(640, 16_384, dtype=torch.bfloat16)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        torch.mm(one, other)
        seconds.append(time.perf_counter() - started)
    return Machine(read_bandwidth(), 2.0 * 1024 * 640 * 16_384 / min(seconds))


def opened(model: str) -> tuple[Weights, Text]:
    checkpoint = open_checkpoint(model)
    config: ModelConfig = checkpoint.config
    weights = Weights(
        num_weights=sum(prod(tensor.shape) for _, tensor in checkpoint.tensors),
        kv_per_token=2 * config.num_kv_heads * config.head_dim,
        windows=tuple(layer.sliding_window for layer in config.layers),
        vocab_size=config.vocab_size,
    )
    tokenizer = zlib.compress(checkpoint.tokenizer_json, 1)
    info = ModelInfo(model, config.vocab_size, 1, (), checkpoint.bos_token_id, tokenizer, GenerationDefaults())
    return weights, Text(info)


def median_of(function: Callable[[], object]) -> float:
    return statistics.median(microseconds(function) for _ in range(NUM_STEPS))


def microseconds(function: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - started) / 1000
