"""NeuronCores as a backend: a graph for each bucket, compiled once and kept in a folder. Knows no package's names.

Never compiled for nor run on one: see the README's Trainium section. The CPU's tests run it over an emulator of the
kernels and a stand-in for torch's compiler.
"""

import hashlib
import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from blockplane import kernels
from blockplane.data_plane.backends import neuron_torch
from blockplane.data_plane.backends.backend import Backend, Compute, Kernels, unmeasured
from blockplane.data_plane.backends.neuron_torch import NeuronTorch
from blockplane.protos.buckets import BucketRules
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError

BUCKET_RULES = BucketRules(
    kv_segment_sizes=(512, 1024, 2048, 4096),
    kv_segment_holds_whole_blocks=True,
    prefill_multiple_of=128,
    context_is_a_shape=True,
)
"""Of the kernels: seed 001's, but that a prefill may have any multiple of 128 queries."""
SPARED = 0.1
"""Of the memory, what graphs may need beside weights and KV; nobody knows before they are compiled."""
MOST_KV = 0.3
"""Of the memory, what KV takes at most: more, and a compiler may find that a graph's tensors do not fit (the default of
AWS's own worker; vllm-neuron/docs/design/vllm/determine_available_memory_design)."""
MAX_GRAPHS = 1 << 16
MAX_BLOCK_SIZE = 128
DEFAULT_CACHE = Path("~/.cache/blockplane")


def neuron_backend(config: Config) -> Backend:
    """This process's logical NeuronCore.

    Raises:
        ConfigurationError: there is none, or no package for it.
    """
    package = neuron_torch.require_package()
    if not neuron_torch.has_neuron_core():
        raise ConfigurationError(
            "device is neuron, and this machine has no NeuronCore: there is no /dev/neuron0; start the worker on a Trn2"
            " or Trn3 instance, or choose device cpu. To compile here for one, see blockplane compile."
        )
    hits_only = config.compile_cache_miss == "fail"
    _begin(package, config, hits_only=hits_only)
    if hits_only:
        # What follows the builds, each of which lifts it.
        torch.compiler.set_stance("fail_on_recompile")

    device = torch.device(package.device)

    def build(compute: Compute, inputs: tuple[Any, ...]) -> Compute:
        compiled = torch.compile(compute, backend=package.compiler, fullgraph=True, dynamic=False)

        def run(*inputs: Any) -> Any:
            return compiled(*copied(inputs, device))

        try:
            with torch.compiler.set_stance("default"):
                run(*inputs)
        except BackendCompilerFailed as error:
            raise _no_graph(error.inner_exception, hits_only, cache_folder(config)) from error
        return run

    return _backend(package, device, build)


def host_backend(config: Config) -> Backend:
    """A host without NeuronCores, which only compiles for them: tensors have shapes and no numbers.

    Raises:
        ConfigurationError: the package compiles on NeuronCores alone, or nobody said for which ones.
    """
    package = neuron_torch.require_package()
    capturer = package.capturer
    if capturer is None:
        raise ConfigurationError(
            f"{package.package} compiles only where NeuronCores are; run blockplane compile on a Trn2 or Trn3 instance,"
            " or install libtorch_neuronx_lite."
        )
    if neuron_torch.TARGET_VARIABLE not in os.environ:
        raise ConfigurationError(
            f"this machine has no NeuronCore, so say what to compile for: set {neuron_torch.TARGET_VARIABLE} to trn2 or"
            " trn3."
        )
    os.environ[neuron_torch.HOST_VARIABLE] = "1"
    _begin(package, config, hits_only=False)
    complete = package.capture_complete()
    device = torch.device("meta")

    def build(compute: Compute, inputs: tuple[Any, ...]) -> Compute:
        capture = torch.compile(compute, backend=capturer, fullgraph=True, dynamic=False)
        with suppress(complete):
            capture(*copied(inputs, device))
        return compute

    finish = partial(package.compile_captured, cache_folder(config))
    return replace(_backend(package, device, build), available_memory=unmeasured, finish_builds=finish)


def cache_folder(config: Config) -> Path:
    """Where compiled graphs are kept, apart for each version of our kernels.

    Compilers know a kernel's graph by the kernel's name and arguments, not by its source: a folder that outlived a
    change to it would go on giving the old one.
    """
    return Path(config.compile_cache or DEFAULT_CACHE).expanduser() / f"neuron-{_kernels_digest()}"


def copied(inputs: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Tensors and attention batches on the device, each a copy: that two inputs are one tensor binds a graph too."""
    return tuple(
        tuple(batch.copied_to(device) for batch in each) if isinstance(each, tuple) else each.to(device, copy=True)
        for each in inputs
    )


def head_major(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Of a KV head a block lies in one piece, as one transfer wants it; `kernels.nki.layout` converts.

    Raises:
        ConfigurationError: kernels cannot count such blocks.
    """
    if block_size > MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise ConfigurationError(
            f"block_size is {block_size}, and kernels for NeuronCores take powers of 2 up to {MAX_BLOCK_SIZE}; choose"
            " 32."
        )
    return num_blocks, num_kv_heads, block_size, head_dim


def available_memory() -> int:
    """Bytes for KV, with the weights in place."""
    used, free = neuron_torch.memory()
    return max(0, min(int(free - SPARED * (used + free)), int(MOST_KV * (used + free))))


def _no_graph(reason: Exception, hits_only: bool, folder: Path) -> ConfigurationError:
    if not hits_only:
        return ConfigurationError(f"a graph does not compile: {reason}")
    return ConfigurationError(
        f"a graph is not in {folder}: {reason}; let blockplane compile with these very settings put it there, or set"
        " compile_cache_miss to compile."
    )


def _begin(package: NeuronTorch, config: Config, *, hits_only: bool) -> None:
    """Set what the package reads as it is imported, and import it."""
    if config.dtype != "bfloat16":
        raise ConfigurationError(
            f"dtype is {config.dtype}, and kernels for NeuronCores compute in bfloat16; leave it at that."
        )
    if config.quantize != "none":
        raise ConfigurationError(
            f"quantize is {config.quantize}, and only a CPU multiplies with quantized weights; leave it at none, or set"
            " device to cpu."
        )
    folder = cache_folder(config)
    os.environ[package.cache_variable] = str(folder)
    # Compiled graphs name files of this one by their paths.
    os.environ[neuron_torch.KERNEL_CACHE_VARIABLE] = str(folder / "nki")
    if hits_only and package.hits_only_variable is not None:
        os.environ[package.hits_only_variable] = "1"
    importlib.import_module(package.package)
    # A graph for each bucket of one function; torch's own limits take that for a mistake.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MAX_GRAPHS


def _backend(
    package: NeuronTorch, device: torch.device, build: Callable[[Compute, tuple[Any, ...]], Compute]
) -> Backend:
    return Backend(
        name="neuron",
        device=device,
        kernels=_kernels(package),
        bucket_rules=BUCKET_RULES,
        is_compiled=True,
        fuses_sampling=True,
        kv_cache_shape=head_major,
        available_memory=available_memory,
        build=build,
    )


def _kernels(package: NeuronTorch) -> Kernels:
    # Kernels import nki, which is installed only where this is called.
    from blockplane.kernels.nki.graph_attention import KERNELS, GraphAttention

    num_cores = neuron_torch.num_cores_of_logical()
    wrapped = {kernel: package.wrap(kernel, num_cores) for kernel in KERNELS}

    def run(kernel: Any, *arguments: Any) -> Any:
        return wrapped[kernel](*arguments)

    attention = GraphAttention(run)
    return Kernels(attention.write_kv, attention.decode_attention, attention.segmented_attention)


def _kernels_digest() -> str:
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted((Path(kernels.__path__[0]) / "nki").glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
