"""Stands in for `libtorch_neuronx_lite`, by its documented names: a compiler that records, kernels on the emulator.

Tensors stay on the CPU. Knows neither our backend nor what is compiled.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import nki
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensor

PACKAGE = "libtorch_neuronx_lite"
Shapes = tuple[tuple[int, ...], ...]


class CaptureComplete(Exception):  # noqa: N818 - its name there
    pass


@dataclass
class Compiler:
    """What torch's compiler was asked for.

    Attributes:
        graphs: the shapes of each graph's whole numbers, its inputs from step to step, in the order of compilation.
        captured: the same of graphs that were lowered alone.
        num_in_cache: how many graphs there are already, with more an error; None = whatever is missing is compiled.
        fault: what it says of every graph; None = it compiles them.
        compiled_folders: whose lowered graphs were compiled.
    """

    graphs: list[Shapes] = field(default_factory=list)
    captured: list[Shapes] = field(default_factory=list)
    num_in_cache: int | None = None
    fault: str | None = None
    compiled_folders: list[str] = field(default_factory=list)

    def compile(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        if os.environ.get("NEURON_LIBTORCH_ASSERT_CACHE_HIT") and len(self.graphs) == self.num_in_cache:
            raise RuntimeError("cache miss")
        if self.fault is not None:
            raise RuntimeError(self.fault)
        self.graphs.append(_shapes(inputs))
        return graph.forward

    def capture(self, _graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.captured.append(_shapes(inputs))

        def complete(*_inputs: Any) -> None:
            raise CaptureComplete

        return complete


COMPILERS: list[Compiler] = []
"""The last is that of the package that was installed last."""


@torch._dynamo.register_backend
def neuron_libtorch(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    return COMPILERS[-1].compile(graph, inputs)


@torch._dynamo.register_backend
def neuron_libtorch_graph_capture(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    return COMPILERS[-1].capture(graph, inputs)


def _shapes(inputs: list[torch.Tensor]) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in inputs if not tensor.dtype.is_floating_point)


class Wrapped:
    """A kernel as `wrap_nki` gives it: `wrap_nki(kernel)[num_cores](*arguments)`."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, num_cores: int) -> Callable[..., Any]:
        run, name = nki.simulate(self._kernel[num_cores]), self._kernel.func.__name__

        def call(*arguments: Any) -> Any:
            if isinstance(arguments[0], FakeTensor) or arguments[0].is_meta:
                # What it writes to, or a new tensor like its queries.
                return arguments[2:4] if name == "write_kv" else torch.empty_like(arguments[0])
            return run(*arguments)

        return torch._dynamo.allow_in_graph(call)


def install(modules: dict[str, Any]) -> Compiler:
    """Put the package into `modules`, such as sys.modules."""
    compiler = Compiler()
    COMPILERS.append(compiler)
    contents: dict[str, dict[str, Any]] = {
        "": {},
        ".nki": {},
        ".nki.nki_hop": {"wrap_nki": Wrapped},
        ".compile": {},
        ".compile.capture_backend": {"CaptureComplete": CaptureComplete},
        ".compile.parallel_compile": {"parallel_compile": compiler.compiled_folders.append},
    }
    for name, names in contents.items():
        module = ModuleType(PACKAGE + name)
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
        vars(module).update(names)
        modules[module.__name__] = module
    torch._dynamo.reset()
    return compiler
