"""The cost model on traces made by hand, each against microseconds computed by hand from the published figures."""

from typing import Any

import pytest
from benchmark_modules import load_benchmark

trace = pytest.importorskip("nki_machine.trace", reason="traces are the emulator's, and here is AWS's nki")
Instruction, Operand, Trace, Transfer = trace.Instruction, trace.Operand, trace.Trace, trace.Transfer


@pytest.fixture(scope="module")
def model() -> Any:
    return load_benchmark("nki_cost_model")


def tile(
    *shape: int, dtype: str = "bfloat16", buffer: str = "sbuf", storage: int = 1, first: int = 0, stride: int = 1
) -> Any:
    num_partitions = 0 if buffer == "hbm" else shape[0]
    return Operand(storage, buffer, shape, dtype, first, num_partitions, 0, stride)


def load(num_bytes: int, run: int, num_partitions: int = 128, first: int = 0, **others: Any) -> Any:
    """A DMA from HBM."""
    transfer = Transfer(num_bytes, num_bytes, run, num_bytes // run, num_partitions, 0, others.pop("dge", "none"))
    writes = (tile(num_partitions, 8, first=first, storage=others.pop("into", 1)),)
    return Instruction(0, "dma_copy", "dma", writes, others.pop("reads", ()), transfer=transfer, **others)


def busy(model: Any, resource: str, *instructions: Any, generation: str = "TRN2") -> float:
    return model.predict(Trace(list(instructions)), 0, getattr(model, generation)).busy[resource]


def compute(opcode: str, engine: str, writes: tuple[Any, ...], *reads: Any, **details: Any) -> Any:
    return Instruction(0, opcode, engine, writes, reads, details=details)


def test_a_load_of_4_mib_takes_what_hbm_needs(model: Any) -> None:
    # 4,194,304 bytes at 362.5 GB/s.
    assert busy(model, "HBM", load(4 << 20, 32_768)) == pytest.approx(11.5705, abs=1e-3)
    # At 4.7 TB/s by eight cores.
    assert busy(model, "HBM", load(4 << 20, 32_768), generation="TRN3") == pytest.approx(7.1393, abs=1e-3)


def test_dma_engines_share_a_load_by_its_partitions(model: Any) -> None:
    # 32 KiB on 4 partitions are one engine's, 1,416 ns in the guide's profile: 32,768 x (1 + 22 / 8,192) / 23 B/ns.
    assert busy(model, "DMA", load(32_768, 8192, 4)) == pytest.approx(1.4285, abs=1e-3)
    # On 128 partitions every engine moves 2 KiB in runs of 256 bytes, 97 ns in the guide's profile.
    assert busy(model, "DMA", load(32_768, 256, 128)) == pytest.approx(0.0967, abs=1e-3)


def test_loads_to_different_partitions_overlap_and_to_the_same_add_up(model: Any) -> None:
    low, high = load(1 << 20, 32_768, 64), load(1 << 20, 32_768, 64, first=64)
    one = busy(model, "DMA", low)
    assert busy(model, "DMA", low, high) == pytest.approx(one)
    assert busy(model, "DMA", low, low) == pytest.approx(2 * one)


def test_short_runs_waste_dma(model: Any) -> None:
    long, short = (busy(model, "DMA", load(1 << 20, run)) for run in (16_384, 32))
    assert short / long == pytest.approx((1 + 22 / 32) / (1 + 22 / 16_384))


def test_a_transposing_load_reaches_nine_tenths_and_within_sbuf_half(model: Any) -> None:
    from_hbm = Transfer(1 << 20, 1 << 20, 2, 1 << 19, 64, 0, "hwdge", is_transpose=True)
    within = Transfer(1 << 20, 0, 2, 1 << 19, 64, 0, "hwdge", is_transpose=True)
    times = [
        busy(model, "DMA", Instruction(0, "dma_transpose", "dma", (tile(64, 8),), transfer=transfer))
        for transfer in (from_hbm, within)
    ]
    # All 16 engines work on any number of partitions: 65,536 bytes each at 23 B/ns take 2.8494 us.
    assert times == pytest.approx([2.8494 / 0.9, 2.8494 / 0.5], abs=1e-3)


def test_hardware_described_dmas_hold_the_descriptor_engines(model: Any) -> None:
    described = load(4096, 4096, dge="hwdge")
    assert busy(model, "DGE", described, described, load(4096, 4096), load(4096, 4096, dge="swdge")) == pytest.approx(
        0.6
    )


@pytest.mark.parametrize(
    ("stationary", "moving", "result", "details", "cycles"),
    [
        # A cycle a column, 64 at least; the load of what is stationary is four times as fast.
        (tile(128, 128), tile(128, 512), (128, 512), {}, 512),
        (tile(128, 128), tile(128, 8), (128, 8), {}, 64),
        (tile(128, 8), tile(128, 128), (8, 128), {}, 128),
        # Four passes of float32.
        (tile(128, 128, dtype="float32"), tile(128, 512, dtype="float32"), (128, 512), {}, 2048),
        # Two where it only transposes.
        (tile(128, 128, dtype="float32"), tile(128, 128, dtype="float32"), (128, 128), {"is_transpose": True}, 256),
        # FP8 pairs 256 rows in the time of 128.
        (tile(128, 2, 128, dtype="float8_e4m3"), tile(128, 2, 512, dtype="float8_e4m3"), (128, 512), {}, 512),
        # Neighbours 32 bytes apart come at half the pace.
        (tile(128, 128), tile(128, 512, stride=16), (128, 512), {}, 1024),
    ],
)
def test_a_matmul_holds_tensore(
    model: Any, stationary: Any, moving: Any, result: tuple[int, int], details: dict[str, Any], cycles: int
) -> None:
    written = (tile(*result, dtype="float32", buffer="psum"),)
    matmul = compute("nc_matmul", "tensor", written, stationary, moving, **details)
    assert busy(model, "TensorE", matmul) == pytest.approx(cycles / 2400)


def test_a_transpose_on_tensore_streams_its_partitions(model: Any) -> None:
    transpose = compute("nc_transpose", "tensor", (tile(64, 128, buffer="psum"),), tile(128, 64))
    assert busy(model, "TensorE", transpose) == pytest.approx(128 / 2400)


FP32, PSUM32 = tile(128, 512, dtype="float32"), tile(128, 512, dtype="float32", buffer="psum")
HALF, PSUM16, EVERY_OTHER = tile(128, 512), tile(128, 512, buffer="psum"), tile(128, 512, stride=2)
EVERY_16TH, COLUMN, FP8 = tile(128, 512, stride=16), tile(128, 1, dtype="float32"), tile(128, 512, dtype="float8_e4m3")
MASK = tile(128, 512, dtype="uint8")


@pytest.mark.parametrize(
    ("opcode", "writes", "reads", "cycles"),
    [
        ("tensor_copy", (FP32,), (FP32,), 512),
        ("tensor_copy", (HALF,), (HALF,), 128),
        ("tensor_scalar", (HALF,), (HALF, COLUMN), 128),
        ("tensor_copy", (HALF,), (EVERY_OTHER,), 256),
        ("tensor_copy", (HALF,), (PSUM16,), 256),
        ("tensor_copy", (EVERY_OTHER,), (PSUM16,), 512),
        ("tensor_copy", (PSUM16,), (PSUM16,), 512),
        ("tensor_copy", (HALF,), (EVERY_16TH,), 512),
        ("tensor_copy", (HALF,), (PSUM32,), 512),
        ("tensor_tensor", (FP32,), (FP32, FP32), 1024),
        ("tensor_tensor", (FP32,), (PSUM32, FP32), 512),
        ("tensor_tensor", (HALF,), (HALF, HALF), 512),
        ("tensor_tensor", (HALF,), (HALF, EVERY_OTHER), 1024),
        ("tensor_tensor", (FP32,), (HALF, HALF), 1024),
        ("tensor_copy_predicated", (FP32,), (PSUM32, MASK), 512),
        ("tensor_copy_predicated", (FP32,), (FP32, MASK), 1024),
        ("scalar_tensor_tensor", (FP32,), (PSUM32, COLUMN, FP32), 1024),
        ("select_reduce", (FP32, COLUMN), (PSUM32, MASK), 1024),
        ("range_select", (FP32, COLUMN), (PSUM32, COLUMN, COLUMN), 512),
        ("tensor_reduce", (COLUMN,), (FP32,), 512),
        ("tensor_scalar_reduce", (FP32, COLUMN), (FP32, COLUMN), 512 + 64),
        ("reciprocal", (FP32,), (FP32,), 4096),
        ("reciprocal", (COLUMN,), (COLUMN,), 64),
        ("memset", (COLUMN,), (), 64),
    ],
)
def test_vectore_takes_a_cycle_an_element_of_each_tile_in_its_mode(
    model: Any, opcode: str, writes: tuple[Any, ...], reads: tuple[Any, ...], cycles: int
) -> None:
    assert busy(model, "VectorE", compute(opcode, "vector", writes, *reads)) == pytest.approx(cycles / 960)


def test_some_operators_alone_are_fast_in_bfloat16(model: Any) -> None:
    pair = compute("tensor_tensor", "vector", (HALF,), HALF, HALF, ops=("multiply",))
    slow_pair = compute("tensor_tensor", "vector", (HALF,), HALF, HALF, ops=("maximum",))
    reduction = compute("tensor_reduce", "vector", (tile(128, 1),), HALF, ops=("maximum",))
    slow_reduction = compute("tensor_reduce", "vector", (tile(128, 1),), HALF, ops=("minimum",))
    times = [busy(model, "VectorE", each) * 960 for each in (pair, slow_pair, reduction, slow_reduction)]
    assert times == pytest.approx([512, 1024, 256, 512])


def test_trn3_is_faster_where_its_guide_says_so(model: Any) -> None:
    copy = compute("tensor_copy", "vector", (HALF,), HALF)
    narrow = compute("tensor_copy", "vector", (FP8,), FP8)
    assert busy(model, "VectorE", copy, generation="TRN3") == pytest.approx(128 / 1200)
    assert busy(model, "VectorE", narrow, generation="TRN3") == pytest.approx(128 / 1200)
    assert busy(model, "VectorE", narrow) == pytest.approx(512 / 960)
    on_scalar = compute("tensor_copy", "scalar", (HALF,), HALF)
    assert busy(model, "ScalarE", on_scalar) == pytest.approx(512 / 1200)
    assert busy(model, "ScalarE", on_scalar, generation="TRN3") == pytest.approx(256 / 1200)
    exponential = compute("exponential", "vector", (HALF, COLUMN), FP32, COLUMN)
    assert busy(model, "VectorE", exponential, generation="TRN3") == pytest.approx((128 + 64) / 1200)


def test_an_activation_reads_its_sum_out_only_where_one_is_wanted(model: Any) -> None:
    with_sum = compute("activation", "scalar", (HALF, COLUMN), PSUM32, COLUMN)
    without = compute("activation", "scalar", (HALF,), PSUM32, COLUMN)
    assert busy(model, "ScalarE", with_sum) == pytest.approx((512 + 64) / 1200)
    assert busy(model, "ScalarE", without) == pytest.approx(512 / 1200)


def test_gpsimd_starts_slowly(model: Any) -> None:
    assert busy(model, "GpSimd", compute("iota", "gpsimd", (FP32,))) == pytest.approx((150 + 512) / 1200)
    assert busy(model, "GpSimd", compute("tensor_tensor", "gpsimd", (FP32,), FP32, FP32)) == pytest.approx(1174 / 1200)


def test_a_register_takes_no_engine(model: Any) -> None:
    loads = Instruction(0, "register_load", "sync", (), (COLUMN,))
    assert set(model.predict(Trace([loads]), 0, model.TRN2).busy.values()) == {0}


def test_the_bound_is_the_busiest_resource(model: Any) -> None:
    loads, copies = load(8 << 20, 32_768), compute("tensor_copy", "vector", (FP32,), FP32)
    prediction = model.predict(Trace([loads, copies]), 0, model.TRN2)
    assert (prediction.bound_by, prediction.bound) == ("HBM", prediction.busy["HBM"])
    prediction = model.predict(Trace([loads, *[copies] * 100]), 0, model.TRN2)
    assert (prediction.bound_by, prediction.bound) == ("VectorE", pytest.approx(100 * 512 / 960))


def test_a_runtime_loop_fences_its_iterations_and_costs_a_barrier_each(model: Any) -> None:
    """Every iteration is as long as its own busiest resource, also where over the whole run another is busier."""
    begin = [Instruction(0, "fori_loop", "sync", loops=((0, i),)) for i in range(2)]
    loads = load(4 << 20, 32_768, loops=((0, 0),))
    copies = [Instruction(0, "tensor_copy", "vector", (FP32,), (FP32,), loops=((0, 1),))] * 30
    prediction = model.predict(Trace([begin[0], loads, begin[1], *copies]), 0, model.TRN2)
    assert prediction.barriers == 18
    assert prediction.bound == pytest.approx(11.5705 + 30 * 512 / 960 + 18, abs=1e-3)
    assert prediction.bound_by == "barriers"


def test_nothing_is_shorter_than_its_chain_of_dmas(model: Any) -> None:
    """Indices, then the rows they name, then the result: three DMAs in a row; a second gather rides along."""
    table = load(512, 4, into=1)
    gathers = [load(4096, 4096, into=into, reads=(tile(128, 1, storage=1),)) for into in (2, 3)]
    multiply = compute("nc_matmul", "tensor", (tile(8, 8, storage=4),), tile(8, 8, storage=2), tile(8, 8, storage=3))
    store = load(4096, 4096, into=5, reads=(tile(8, 8, storage=4),))
    prediction = model.predict(Trace([table, *gathers, multiply, store]), 0, model.TRN2)
    assert prediction.latency == pytest.approx(3 * 1.3)
    assert (prediction.bound, prediction.bound_by) == (prediction.latency, "latency")


def test_each_core_is_predicted_from_its_own_instructions(model: Any) -> None:
    other = Instruction(1, "tensor_copy", "vector", (FP32,), (FP32,))
    both = Trace([load(4096, 4096), other])
    first, second = (model.predict(both, core, model.TRN2) for core in (0, 1))
    assert (first.dma_bytes, second.dma_bytes) == (4096, 0)
    assert second.busy["VectorE"] == pytest.approx(512 / 960)
    with pytest.raises(ValueError, match="no instruction of core 2"):
        model.predict(both, 2, model.TRN2)


def test_skipped_rows_are_counted_and_move_nothing(model: Any) -> None:
    skipped = Instruction(0, "dma_copy", "dma", (tile(128, 8),), transfer=Transfer(0, 0, 16, 0, 128, 128, "swdge"))
    prediction = model.predict(Trace([skipped]), 0, model.TRN2)
    assert (prediction.num_skipped, prediction.dma_bytes, prediction.busy["DMA"]) == (128, 0, 0)


def test_runs_that_are_described_in_software_are_told(model: Any) -> None:
    gather, copy = load(65_536, 512, dge="swdge"), load(65_536, 512, dge="hwdge")
    assert model.predict(Trace([gather, copy]), 0, model.TRN2).software_runs == 128
