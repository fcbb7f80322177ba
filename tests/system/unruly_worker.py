"""A worker process that misbehaves as its environment says: a real one, wrapped from outside.

UNRULY is JSON: `seed`; `duplicates` and `delays`, how likely each result is sent twice, or late by up to
`delay_seconds`; `poison`, a token id that kills the process when the model gets to see it.
"""

import json
import os
import random
import signal
import sys
import time

from torch import Tensor

from blockplane.data_plane import __main__ as entry
from blockplane.data_plane.attention import AttentionBatches
from blockplane.data_plane.engine_stream import EngineStream
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.protos.process import run_process
from blockplane.v1 import engine_pb2 as pb

UNRULY = {
    "seed": 0,
    "duplicates": 0.0,
    "delays": 0.0,
    "delay_seconds": 0.0,
    "poison": -1,
    **json.loads(os.environ["UNRULY"]),
}
RANDOM = random.Random(UNRULY["seed"])


def send_unruly(stream: EngineStream, message: pb.AttachWorkerRequest) -> None:
    if message.WhichOneof("message") == "result":
        if RANDOM.random() < UNRULY["delays"]:
            time.sleep(RANDOM.uniform(0, UNRULY["delay_seconds"]))
        if RANDOM.random() < UNRULY["duplicates"]:
            send(stream, message)
    send(stream, message)


def forward_poisoned(model: SyntheticModel, input_ids: Tensor, positions: Tensor, batches: AttentionBatches) -> Tensor:
    if (input_ids == UNRULY["poison"]).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(model, input_ids, positions, batches)


send, EngineStream.send = EngineStream.send, send_unruly  # type: ignore[method-assign]
forward, SyntheticModel.forward = SyntheticModel.forward, forward_poisoned  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(run_process("worker", "Loads the model and misbehaves.", entry.serve))
