"""The arrow rule, and what else may be imported where, over the whole tree; knows nothing of what modules do."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "protos": {"protos"},
    "control_plane": {"protos", "control_plane"},
    "client": {"protos", "client"},
    "data_plane": {"protos", "data_plane", "kernels"},
    "kernels": {"kernels"},
}
OTHER_PEOPLES = {
    "protos": {"numpy", "grpc", "google", "llguidance", "prometheus_client"},
    "control_plane": {
        "numpy",
        "grpc",
        "grpc_channelz",
        "grpc_health",
        "grpc_reflection",
        "llguidance",
        "prometheus_client",
        "smg_grpc_proto",
        "tokenizers",
    },
}
"""Packages that a layer may import beside the standard library; a layer that is missing here may import any."""
WITHOUT_TORCH = {"protos", "control_plane", "client"}
NEURON = {"nki", "neuronxcc", "torch_neuronx", "libtorch_neuronx_lite", "vllm_neuron"}
UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
DYNAMIC_IMPORTS = {"import_module", "__import__", "run_module"}


def layer_of(module: str) -> str | None:
    """The folder that a name under `blockplane` belongs to; None for the root package and for other people's names."""
    root, _, rest = module.partition(".")
    layer = "protos" if rest.split(".")[0] == "v1" else rest.split(".")[0]
    return layer if root == "blockplane" and layer in MAY_IMPORT else None


def violations(module: str, source: str) -> list[str]:
    """What a module's source does against the rules, one sentence each."""
    tree = ast.parse(source)
    found = [sentence for node, name in _imports(tree) for sentence in _check_import(tree, module, node, name)]
    docstring = ast.get_docstring(tree)
    if not module.startswith("blockplane.v1.") and not (docstring and docstring.splitlines()[0].endswith((".", "?"))):
        found.append(f"{module} has no docstring whose first line is a sentence")
    return found


def _imports(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every import with the full name of what it imports, also those inside functions and by name at run time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from ((node, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in DYNAMIC_IMPORTS:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node, first.value


def _called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _check_import(tree: ast.Module, module: str, node: ast.AST, name: str) -> Iterator[str]:
    own, target, package = layer_of(module), layer_of(name), name.split(".")[0]
    if own and target and target not in MAY_IMPORT[own]:
        yield f"{module} imports {name}: {own} must not know {target}"
    if not package:
        yield f"{module} imports {name}; write the full name"
        return
    if package in MAY_IMPORT:
        yield f"{module} imports {name}, a second copy of blockplane.{name}"
    if package in UNSAFE:
        yield f"{module} imports {name}, which can run code that a peer sent"
    if own in WITHOUT_TORCH and package == "torch":
        yield f"{module} imports {name}: {own} never computes"
    if own in OTHER_PEOPLES and package not in {"blockplane", *sys.stdlib_module_names, *OTHER_PEOPLES[own]}:
        yield f"{module} imports {name}, which is no dependency of {own}"
    if package in NEURON and not _is_neuron_backend(module) and not _is_deferred(tree, node):
        yield f"{module} imports {name} at its top, which only a neuron backend may"


def _is_neuron_backend(module: str) -> bool:
    return any(part.split("_")[0] == "nki" or "neuron" in part for part in module.split("."))


def _is_deferred(tree: ast.Module, node: ast.AST) -> bool:
    """Whether `node` runs only once somebody calls a function."""
    functions = [outer for outer in ast.walk(tree) if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(node is inner for function in functions for inner in ast.walk(function))


def tree_modules() -> dict[str, Path]:
    """Every Python file of ours by the name it is imported under; tests and benchmarks by their path."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and _is_ours(path)]
    files = {path.relative_to(ROOT) for folder in folders for path in folder.rglob("*.py")}
    return {_module_name(path): ROOT / path for path in files}


def _is_ours(folder: Path) -> bool:
    is_built = folder.name in {"build", "dist"} or (folder / "pyvenv.cfg").exists()
    return not folder.name.startswith(".") and not is_built


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    if parts[:2] == ("protos", "v1"):
        return ".".join(("blockplane", *parts[1:]))
    return ".".join(("blockplane", *parts) if parts[0] in MAY_IMPORT else parts)


MODULES = tree_modules()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_keeps_the_rules(module: str) -> None:
    assert violations(module, MODULES[module].read_text()) == []


def test_the_check_reaches_every_layer() -> None:
    assert {layer_of(module) for module in MODULES} == {*MAY_IMPORT, None}
    assert {"blockplane", "blockplane.v1.engine_pb2", "blockplane.kernels.slots", "tests.test_layering"} <= {*MODULES}


def test_importing_the_whole_control_plane_and_client_loads_no_torch() -> None:
    modules = [name for name in sorted(MODULES) if layer_of(name) in WITHOUT_TORCH and not name.endswith(".__main__")]
    script = "\n".join(
        [*(f"import {module}" for module in modules), "import sys", "print('torch' in sys.modules, len(sys.modules))"]
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.stdout.startswith("False"), ran.stderr


DOC = '"""Owns something; knows nothing else."""\n'

FORBIDDEN = {
    "control_plane.engine.x": [
        "from blockplane.data_plane.rows import Rows",
        "from blockplane import data_plane",
        "import blockplane.data_plane.rows as rows",
        "def later():\n    from blockplane.kernels import slots",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import blockplane.client.cli",
        "from ...data_plane import rows",
        "from . import scheduler",
        "from importlib import import_module\nimport_module('blockplane.data_plane.rows')",
        "import importlib\nimportlib.import_module('blockplane.data_plane')",
        "__import__('torch')",
        "from data_plane import rows",
        "import torch",
        "from torch.nn import functional",
        "def later():\n    import torch",
        "import requests",
        "import google.protobuf",
    ],
    "data_plane.x": [
        "from blockplane.control_plane.engine.engine import Engine",
        "from blockplane.client import cli",
        "import pickle",
        "from pickle import loads",
        "def later():\n    import shelve",
        "import marshal as m",
        "import neuronxcc.nki",
        "try:\n    import torch_neuronx\nexcept ImportError:\n    pass",
        "import nki.language as nl",
        "import libtorch_neuronx_lite",
    ],
    "kernels.x": [
        "from blockplane.protos.errors import BlockplaneError",
        "from blockplane.v1 import engine_pb2",
        "from blockplane.data_plane import attention",
        "from kernels import slots",
    ],
    "client.x": [
        "from blockplane.control_plane.serving import serve_until_stopped",
        "import blockplane.data_plane",
        "import torch",
    ],
    "protos.x": [
        "from blockplane.control_plane.engine import engine",
        "from blockplane.kernels import slots",
        "import torch",
        "import tokenizers",
    ],
    "v1.x": ["import blockplane.data_plane.rows"],
}


@pytest.mark.parametrize(
    ("module", "source"), [(module, source) for module in FORBIDDEN for source in FORBIDDEN[module]]
)
def test_check_catches(module: str, source: str) -> None:
    assert len(violations(f"blockplane.{module}", DOC + source)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("blockplane.control_plane.x", "import asyncio, numpy as np, grpc\nfrom grpc_health.v1 import health_pb2"),
        ("blockplane.control_plane.x", "from blockplane.v1 import engine_pb2\nfrom blockplane.protos import wire"),
        ("blockplane.data_plane.x", "import torch\nfrom blockplane.kernels.slots import slot_mapping"),
        ("blockplane.data_plane.x", "from blockplane.protos.errors import ModelError"),
        ("blockplane.data_plane.x", "def compile():\n    import torch_neuronx"),
        ("blockplane.data_plane.neuron", "import torch_neuronx"),
        ("blockplane.kernels.nki.attention", "import neuronxcc.nki as nki\nfrom blockplane.kernels import slots"),
        ("blockplane.client.cli", "from blockplane import __version__\nfrom blockplane.v1 import inference_pb2"),
        ("tests.x", "import torch\nfrom blockplane.control_plane.engine import engine"),
    ],
)
def test_check_lets_pass(module: str, source: str) -> None:
    assert violations(module, DOC + source) == []


@pytest.mark.parametrize("source", ["", "x = 1", '"""no sentence"""', '"""\n"""', "# a comment.\nx = 1"])
def test_check_wants_a_docstring_whose_first_line_is_a_sentence(source: str) -> None:
    assert len(violations("blockplane.protos.x", source)) == 1
    assert violations("blockplane.v1.x_pb2", source) == []
