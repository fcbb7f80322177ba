"""This machine's CPU as a backend: eager torch, ready without a compiler."""

import torch

from blockplane.data_plane.backends.backend import Backend, Kernels, PartialKernels
from blockplane.kernels import context_parallel, cpu
from blockplane.protos.buckets import BucketRules

CPU = Backend(
    name="cpu",
    device=torch.device("cpu"),
    kernels=Kernels(
        cpu.write_kv,
        cpu.decode_attention,
        cpu.segmented_attention,
        PartialKernels(context_parallel.decode_attention, context_parallel.segmented_attention),
    ),
    bucket_rules=BucketRules(),
)
"""Its kernels lift every constraint: segments of any length, any prior KV; contexts are data, not shapes."""
