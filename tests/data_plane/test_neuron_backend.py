"""NeuronCores as a backend, over a stand-in for the package that drives them: what is compiled, when, and what not."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import neuron_stand_in
import pytest
import torch
from neuron_stand_in import Compiler
from planes_in_process import Planes
from tiny_llama import tiny_llama
from torch import Tensor

from blockplane import kernels
from blockplane.data_plane.attention import Attention, AttentionBatches, AttentionSpec
from blockplane.data_plane.backends import neuron, neuron_torch
from blockplane.data_plane.backends.choice import building_backend, chosen_backend
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.loaded_worker import loaded_worker
from blockplane.protos.config import Config, load_config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.sampling import SamplingParams

SETTINGS = {
    "block_size": 16,
    "num_blocks": 40,
    "max_model_len": 64,
    "num_batched_tokens_buckets": (128, 256),
    "num_seqs_buckets": (2,),
    "kv_segment_size_buckets": (512,),
    "decode_context_length_buckets": (32, 64),
}
GRAPHS = [
    (256, (4, 8)),
    (256, (1, 8)),
    (128, (2, 8)),
    (2, (2, 4)),
    (2, (2, 2)),
    (None, None),
]
"""Tokens, and the table's segments, gaps included, or rows by blocks: of prefills, one of 256 by a single request, of
decodes by context, and of logits alone."""
TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"


class TinyModel:
    """One layer of attention over a table of its own: little to trace and to run."""

    vocab_size, dtype, kv_cache_dtype = 64, "bfloat16", "bfloat16"

    def __init__(self, device: str = "cpu") -> None:
        self.attentions = (Attention(AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=32, scale=0.2)),)
        self._table = torch.linspace(-1, 1, 64 * 32).sin().view(64, 32).bfloat16().to(device)

    def forward(self, input_ids: Tensor, positions: Tensor, batches: AttentionBatches) -> Tensor:
        states = (self._table[input_ids] + self._table[positions % 64])[:, None]
        return self.attentions[0](states, states, states, batches).flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self._table.T).float()

    def idle_hidden(self, num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, 32, dtype=torch.bfloat16)


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the driver shows devices: none, until a file is made there."""
    folder = tmp_path / "dev"
    folder.mkdir()
    monkeypatch.setattr(neuron_torch, "DEVICES", folder)
    return folder


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Whatever the backend sets for the package is forgotten behind the test, and so is torch's stance."""
    for name in ("NEURON_LIBTORCH_CPU_COMPILE", "NEURON_LIBTORCH_ASSERT_CACHE_HIT", "NKI_COMPILE_CACHE_URL", TARGET):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    yield monkeypatch
    torch.compiler.set_stance("default")


@pytest.fixture
def compiler(devices: Path, environment: pytest.MonkeyPatch) -> Compiler:
    """The package is installed, and this machine has a NeuronCore."""
    (devices / "neuron0").touch()
    modules: dict[str, ModuleType] = {}
    compiler = neuron_stand_in.install(modules)
    for name, module in modules.items():
        environment.setitem(sys.modules, name, module)
    environment.setenv("NEURON_LIBTORCH_CACHE_ROOT", "")
    environment.setattr(
        neuron_torch, "PACKAGES", tuple(replace(package, device="cpu") for package in neuron_torch.PACKAGES)
    )
    return compiler


def config(tmp_path: Path, **settings: str) -> Config:
    return load_config({"device": "neuron", "compile_cache": str(tmp_path / "cache"), **settings}, {})


# -- which device ------------------------------------------------------------------------------------------------------


def test_auto_is_the_cpu_where_no_neuron_core_is(devices: Path, compiler: Compiler) -> None:
    (devices / "neuron0").unlink()
    assert chosen_backend(Config(device="auto")) is CPU


def test_auto_is_the_cpu_where_torch_cannot_use_them(devices: Path) -> None:
    (devices / "neuron0").touch()
    assert chosen_backend(Config(device="auto")) is CPU


def test_auto_is_neuron_where_both_are_there_and_cpu_is_the_cpu(compiler: Compiler, tmp_path: Path) -> None:
    assert chosen_backend(config(tmp_path, device="auto")).name == "neuron"
    assert chosen_backend(config(tmp_path, device="cpu")) is CPU


def test_what_is_missing_is_named(devices: Path, compiler: Compiler, tmp_path: Path) -> None:
    (devices / "neuron0").unlink()
    with pytest.raises(ConfigurationError, match=r"no NeuronCore: there is no /dev/neuron0; .*device cpu\."):
        chosen_backend(config(tmp_path))
    del sys.modules[neuron_stand_in.PACKAGE]
    with pytest.raises(
        ConfigurationError,
        match=r"neither libtorch_neuronx_lite nor torch_neuronx .*pip\.repos\.neuron\.amazonaws\.com",
    ):
        chosen_backend(config(tmp_path))


def test_what_kernels_cannot_compute_is_refused(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^dtype is float32, .* bfloat16; .*\.$"):
        chosen_backend(config(tmp_path, dtype="float32"))
    with pytest.raises(ConfigurationError, match=r"^quantize is int8, .* CPU .*; .* device to cpu\.$"):
        chosen_backend(config(tmp_path, quantize="int8"))
    for block_size in 24, 256:
        with pytest.raises(ConfigurationError, match=rf"^block_size is {block_size}, .* powers of 2 up to 128; .*\.$"):
            chosen_backend(config(tmp_path)).kv_cache_shape(10, block_size, 1, 64)


def test_a_kernel_is_wrapped_by_the_first_module_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    package = replace(neuron_torch.PACKAGES[1], wrapper_modules=("absent_module", "without_it", "with_it"))
    monkeypatch.setitem(sys.modules, "without_it", ModuleType("without_it"))
    with_it = ModuleType("with_it")
    with_it.wrap_nki = lambda kernel: {2: f"{kernel} on two"}
    with pytest.raises(ConfigurationError, match=r"none of absent_module, without_it, with_it has wrap_nki"):
        package.wrap("a kernel", 2)
    monkeypatch.setitem(sys.modules, "with_it", with_it)
    assert package.wrap("a kernel", 2) == "a kernel on two"


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("used", "free", "left"), [(0, 100, 30), (60, 40, 30), (75, 25, 15), (95, 5, 0), (100, 0, 0)])
def test_kv_gets_what_graphs_leave_and_three_tenths_at_most(
    used: int, free: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = SimpleNamespace(get_vnc_memory_stats=lambda: (used, free))
    monkeypatch.setattr(torch.classes, "neuron", SimpleNamespace(Runtime=lambda: runtime), raising=False)
    assert neuron.available_memory() == left


def test_a_worker_offers_what_its_device_can_spare_if_told_no_number() -> None:
    settings = load_config({"model": "synthetic", "kv_cache_bytes": "0"}, {})
    worker = loaded_worker(settings, replace(CPU, available_memory=lambda: 12345))
    assert worker._place.model is not None
    assert worker._place.model.hello().available_memory == 12345
    with pytest.raises(ConfigurationError, match=r"^kv_cache_bytes is 0, and the device cpu does not tell .*\.$"):
        loaded_worker(settings, CPU)


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_every_bucket_is_compiled_once_the_largest_first_and_steps_compile_nothing(
    compiler: Compiler, tmp_path: Path
) -> None:
    model = TinyModel()
    planes = Planes(model, SETTINGS, backend=neuron.neuron_backend(config(tmp_path, compile_cache_miss="fail")))
    assert [graph_of(shapes) for shapes in compiler.graphs] == GRAPHS
    caches = model.attentions[0].caches
    assert caches is not None
    assert caches[0].shape == (40, 1, 16, 32), "head-major"
    for length, params in ((40, SamplingParams(3)), (20, SamplingParams(2, temperature=1.0, prompt_logprobs=1))):
        planes.submit(list(range(length)), replace(params, ignore_eos=True))
    planes.run()
    assert [len(text) for text in planes.texts.values()] == [3, 2]
    assert len(compiler.graphs) == len(GRAPHS)


def graph_of(shapes: neuron_stand_in.Shapes) -> tuple[int | None, tuple[int, ...] | None]:
    tables = [shape for shape in shapes if len(shape) == 2 and shape[1] > 1]
    return (shapes[0][0], tables[0]) if tables else (None, None)


@pytest.mark.parametrize("hits_only", [True, False])
def test_a_graph_that_is_not_in_the_folder_is_fatal_if_told_so(
    hits_only: bool, compiler: Compiler, tmp_path: Path
) -> None:
    compiler.num_in_cache = 1
    backend = neuron.neuron_backend(config(tmp_path, compile_cache_miss="fail" if hits_only else "compile"))

    def double(states: Tensor) -> Tensor:
        return 2 * states

    backend.build(double, (torch.ones(2),))
    if hits_only:
        with pytest.raises(ConfigurationError, match=r"^a graph is not in .*cache.*; .* blockplane compile .*\.$"):
            backend.build(double, (torch.ones(1),))
    else:
        backend.build(double, (torch.ones(1),))
    assert len(compiler.graphs) == (1 if hits_only else 2)


@pytest.mark.parametrize("hits_only", [True, False])
def test_a_step_of_another_shape_than_was_built_is_fatal_if_told_so(
    hits_only: bool, compiler: Compiler, tmp_path: Path
) -> None:
    backend = neuron.neuron_backend(config(tmp_path, compile_cache_miss="fail" if hits_only else "compile"))
    run = backend.build(lambda states: states + 1, (torch.zeros(4),))
    assert run(torch.ones(4)).tolist() == [2] * 4
    if hits_only:
        with pytest.raises(RuntimeError, match="recompile"):
            run(torch.ones(3))
        # Another attach may build again.
        assert backend.build(lambda states: states * 2, (torch.ones(3),))(torch.ones(3)).tolist() == [2] * 3
    else:
        assert run(torch.ones(3)).tolist() == [2] * 3


def test_what_the_compiler_says_of_a_graph_is_told(compiler: Compiler, tmp_path: Path) -> None:
    compiler.fault = "NCC_EVRF009: it does not fit"
    backend = neuron.neuron_backend(config(tmp_path))
    with pytest.raises(ConfigurationError, match=r"^a graph does not compile: NCC_EVRF009: it does not fit$"):
        backend.build(torch.add, (torch.zeros(2), torch.zeros(2)))


def test_torch_does_not_take_many_buckets_for_a_mistake(compiler: Compiler, tmp_path: Path) -> None:
    """By itself it stops at eight graphs of a function."""
    backend = neuron.neuron_backend(config(tmp_path, compile_cache_miss="fail"))

    def double(states: Tensor) -> Tensor:
        return 2 * states

    runs = [backend.build(double, (torch.ones(length),)) for length in range(1, 13)]
    assert [len(run(torch.ones(length))) for length, run in enumerate(runs, start=1)] == list(range(1, 13))
    assert len(compiler.graphs) == 12


def test_two_inputs_that_are_one_tensor_need_no_other_graph(compiler: Compiler, tmp_path: Path) -> None:
    backend = neuron.neuron_backend(config(tmp_path, compile_cache_miss="fail"))
    run = backend.build(torch.add, (torch.zeros(2), torch.zeros(2)))
    same = torch.ones(2)
    assert run(same, same).tolist() == [2, 2]
    assert len(compiler.graphs) == 1


def test_graphs_are_kept_by_the_version_of_our_kernels(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    neuron.neuron_backend(config(tmp_path))
    folder = Path(os.environ["NEURON_LIBTORCH_CACHE_ROOT"])
    assert folder.parent == tmp_path / "cache"
    assert Path(os.environ["NKI_COMPILE_CACHE_URL"]).is_relative_to(folder)
    (tmp_path / "nki").mkdir()
    monkeypatch.setattr(kernels, "__path__", [str(tmp_path)])
    folders = {folder}
    for source in "one", "another":
        (tmp_path / "nki" / "decode.py").write_text(source)
        folders.add(neuron.cache_folder(config(tmp_path)))
    assert len(folders) == 3
    assert neuron.cache_folder(config(tmp_path, compile_cache="")).is_relative_to(Path("~/.cache").expanduser())


# -- on a host without NeuronCores -------------------------------------------------------------------------------------


def test_a_host_without_neuron_cores_lowers_the_graphs_that_a_device_compiles_and_then_compiles_their_folder(
    devices: Path, compiler: Compiler, tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    """Or the device would not find them: whole numbers among the inputs have the same shapes, in the same order."""
    environment.setenv(TARGET, "trn2")
    small = {**SETTINGS, "num_batched_tokens_buckets": (128,), "decode_context_length_buckets": (64,)}
    Planes(TinyModel(), small, backend=building_backend(config(tmp_path)))
    (devices / "neuron0").unlink()
    backend = building_backend(config(tmp_path))
    assert os.environ["NEURON_LIBTORCH_CPU_COMPILE"] == "1"
    assert backend.available_memory() is None
    Planes(TinyModel("meta"), small, backend=backend)
    assert (len(compiler.captured), compiler.captured) == (3, compiler.graphs)
    assert backend.finish_builds is not None
    backend.finish_builds()
    assert compiler.compiled_folders == [str(neuron.cache_folder(config(tmp_path)))]


def test_a_host_must_be_told_what_to_compile_for_and_the_cpu_needs_nothing(
    devices: Path, compiler: Compiler, tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    (devices / "neuron0").unlink()
    with pytest.raises(ConfigurationError, match=rf"set {TARGET} to trn2 or trn3\.$"):
        building_backend(config(tmp_path))
    with pytest.raises(ConfigurationError, match=r"^device is cpu, for which nothing is compiled; .*\.$"):
        building_backend(config(tmp_path, device="cpu"))
    environment.setattr(neuron_torch, "PACKAGES", (replace(neuron_torch.PACKAGES[0], capturer=None),))
    with pytest.raises(ConfigurationError, match=r"compiles only where NeuronCores are"):
        building_backend(config(tmp_path))


def test_a_model_without_numbers_has_the_shapes_of_one_with() -> None:
    """What a host compiles for."""
    meta = tiny_llama(torch.device("meta"))
    nothing = torch.zeros(3, dtype=torch.int64, device="meta")
    assert meta._embeddings.embed(nothing).is_meta
    assert meta.logits(meta.idle_hidden(3).to("meta")).shape == (3, 96)
    assert all(table.is_meta for table in meta._rotary_tables.values())
    assert meta.fingerprint != tiny_llama().fingerprint


@pytest.mark.skipif(not neuron_torch.has_neuron_core(), reason="this machine has no NeuronCore")
def test_on_a_device_a_step_compiles_and_runs(tmp_path: Path) -> None:  # pragma: no cover - never run so far
    backend = neuron.neuron_backend(config(tmp_path))
    planes = Planes(TinyModel(str(backend.device)), SETTINGS, backend=backend)
    planes.submit(list(range(40)), SamplingParams(3, ignore_eos=True))
    planes.run()
    cpu = Planes(TinyModel(), SETTINGS)
    cpu.submit(list(range(40)), SamplingParams(3, ignore_eos=True))
    cpu.run()
    assert planes.texts == cpu.texts
