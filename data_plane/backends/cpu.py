"""This machine's CPU as a backend: our C++ kernels where they were built, torch for all else; nothing is compiled."""

import torch

from blockplane.data_plane.backends.backend import Backend, Kernels, PartialKernels
from blockplane.kernels import context_parallel
from blockplane.kernels.native import attention
from blockplane.protos.buckets import BucketRules

CPU = Backend(
    name="cpu",
    device=torch.device("cpu"),
    kernels=Kernels(
        attention.write_kv,
        attention.decode_attention,
        attention.segmented_attention,
        PartialKernels(context_parallel.decode_attention, context_parallel.segmented_attention),
    ),
    bucket_rules=BucketRules(),
)
"""Its kernels lift every constraint: segments of any length, any prior KV; contexts are data, not shapes."""
