"""What makes torch compute on NeuronCores: which package that is here, and the names in it. Knows no model.

The names are those of the Neuron SDK 2.32: of its documentation (frameworks/torch/pytorch-native-overview,
vllm-neuron/docs/design/compilation) and, where that is silent, of public code that uses them. Nothing here was ever run
with either package.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockplane.protos.errors import ConfigurationError

DEVICES = Path("/dev")
INDEX = "https://pip.repos.neuron.amazonaws.com"
TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
HOST_VARIABLE = "NEURON_LIBTORCH_CPU_COMPILE"
KERNEL_CACHE_VARIABLE = "NKI_COMPILE_CACHE_URL"
"""Of the environment: what is compiled for, "1" on a host without NeuronCores, and where compiled kernels are kept."""


@dataclass(frozen=True, slots=True)
class NeuronTorch:
    """A package that gives torch the device "neuron", once it is imported.

    Attributes:
        compiler: its name for `torch.compile`.
        capturer: the same of what lowers a graph and leaves it for a compiler, on hosts without NeuronCores; None = it
            compiles on these alone.
        cache_variable: of the environment, the folder of compiled graphs.
        hits_only_variable: "1" there has a graph that is not in the folder fail; None = there is no such variable.
        wrapper_modules: where `wrap_nki` may be.
        device: where tensors lie.
    """

    package: str
    compiler: str
    capturer: str | None
    cache_variable: str
    hits_only_variable: str | None
    wrapper_modules: tuple[str, ...]
    device: str = "neuron:0"

    def wrap(self, kernel: Any, num_cores: int) -> Callable[..., Any]:
        """A kernel as a function of tensors on the device, eagerly and in a compiled graph.

        Where it returns a tensor that it was given and wrote to, the graph's output is that very memory.
        """
        for name in self.wrapper_modules:
            try:
                wrap_nki = importlib.import_module(name).wrap_nki
            except (ImportError, AttributeError):
                continue
            wrapped: Callable[..., Any] = wrap_nki(kernel)[num_cores]
            return wrapped
        raise ConfigurationError(
            f"none of {', '.join(self.wrapper_modules)} has wrap_nki, which calls our kernels; install the"
            f" {self.package} of the Neuron SDK 2.32."
        )

    def capture_complete(self) -> type[Exception]:
        """What ends a call of a graph that the capturer has lowered."""
        complete: type[Exception] = importlib.import_module(f"{self.package}.compile.capture_backend").CaptureComplete
        return complete

    def compile_captured(self, folder: Path) -> None:
        """Compile the graphs that were lowered into the folder.

        The documentation names this step and not its function; that it takes the folder is our guess.
        """
        importlib.import_module(f"{self.package}.compile.parallel_compile").parallel_compile(str(folder))


PACKAGES = (
    NeuronTorch(
        package="libtorch_neuronx_lite",
        compiler="neuron_libtorch",
        capturer="neuron_libtorch_graph_capture",
        cache_variable="NEURON_LIBTORCH_CACHE_ROOT",
        hits_only_variable="NEURON_LIBTORCH_ASSERT_CACHE_HIT",
        wrapper_modules=("libtorch_neuronx_lite.nki.nki_hop", "vllm_neuron.nki.nki_hop"),
    ),
    NeuronTorch(
        package="torch_neuronx",
        compiler="neuron",
        capturer=None,
        cache_variable="TORCH_NEURONX_NEFF_CACHE_DIR",
        hits_only_variable=None,
        wrapper_modules=("torch_neuronx", "torch_neuronx.nki_hop"),
    ),
)
"""The likeliest first: one is on AWS's index, the other in a closed beta."""


def find_package() -> NeuronTorch | None:
    """The first that is installed; nothing is imported."""
    return next((package for package in PACKAGES if importlib.util.find_spec(package.package) is not None), None)


def require_package() -> NeuronTorch:
    """Raises ConfigurationError where none is installed."""
    package = find_package()
    if package is None:
        names = " nor ".join(package.package for package in PACKAGES)
        raise ConfigurationError(
            f"device is neuron, and neither {names} is installed; choose device cpu, or run"
            f" pip install '.[neuron]' --extra-index-url {INDEX}."
        )
    return package


def has_neuron_core() -> bool:
    """Whether the driver shows a device, as /dev/neuron0."""
    return any(DEVICES.glob("neuron[0-9]*"))


def is_there() -> bool:
    """Whether this machine has NeuronCores, and torch can use them."""
    return has_neuron_core() and find_package() is not None


def num_cores_of_logical() -> int:
    """Physical cores that kernels run on: as many as make a logical NeuronCore, of Trn2 and Trn3 two unless set."""
    return int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2"))


def memory() -> tuple[int, int]:
    """Bytes of this process's NeuronCore that are used, and that are free (Runtime().get_vnc_memory_stats)."""
    used, free = torch.classes.neuron.Runtime().get_vnc_memory_stats()
    return int(used), int(free)
