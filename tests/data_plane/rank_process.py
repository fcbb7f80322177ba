"""A rank in a process of its own, over gloo, which computes a checkpoint's logits; knows no test.

    python rank_process.py RANK NUM_RANKS NUM_THAT_SHARE_POSITIONS CHECKPOINT OUTPUT_FILE

It prints its address, empty but for rank 0, and reads from its standard input rank 0's address, which all are told once
all are there, and then the token ids. The logits, [num_tokens, vocab_size], go to the file.
"""

import sys

import numpy as np
import torch
from block_kv import logits_of

from blockplane.data_plane.ranks.process_ranks import ProcessRanks
from blockplane.v1 import engine_pb2 as pb


def run(rank: int, num_ranks: int, num_sharing: int, checkpoint: str, output_file: str) -> None:
    ranks = ProcessRanks("default", rank, "127.0.0.1", torch.device("cpu"))
    print(ranks.address, flush=True)
    address, token_ids = input(), [int(word) for word in input().split()]
    sizes = {"tensor_parallel_size": num_ranks, "context_parallel_size": num_sharing}
    ranks.meet(pb.Rendezvous(**sizes, address=address, meeting=7))
    np.save(output_file, logits_of(checkpoint, token_ids, ranks).numpy())
    # Nobody leaves before all are through.
    ranks.broadcast(torch.zeros(1))


if __name__ == "__main__":
    run(*map(int, sys.argv[1:4]), *sys.argv[4:6])
