"""Products with few rows on devices: each kernel in both languages, what is chosen, and what calls come to."""

from __future__ import annotations

import grid_cases
import numpy as np
import opencl_cpu
import pytest
from fused_cases import epilogues
from grid_cases import MACHINE, check_run, fused_case, kernels_of, rounded

import portmm as pm
from portmm.build import nvrtc
from portmm.codegen.lower import lower_grid
from portmm.dispatch.machine import source
from portmm.dispatch.schedule_choice import choose
from portmm.errors import NoCompilerError
from portmm.schedule import gpu_gemv
from portmm.schedule.candidates import candidates
from portmm.schedule.legality import occupancy
from portmm.schedule.text import varied
from portmm.spec.problem import Problem
from portmm.target.target import load_target

ALONG_N, ALONG_K = ("row", "row", "row"), ("row", "col", "row")
PRODUCTS = (
    ("f32", ALONG_N, (4, 4, 4), 1), ("f32", ALONG_K, (2, 4, 1), 3), ("f32", ("any", "any", "col"), (1, 1, 1), 2),
    ("f64", ALONG_N, (1, 2, 2), 2), ("f64", ALONG_K, (2, 2, 1), 1),
    ("f16", ALONG_N, (1, 8, 4), 3), ("bf16", ALONG_K, (8, 8, 4), 1), ("bf16", ("col", "col", "row"), (1, 8, 1), 5),
    ("bf16-bf16-f32", ALONG_N, (8, 8, 4), 8), ("f32-bf16-f32", ALONG_K, (1, 2, 1), 2),
    ("f32-s8-f32", ALONG_N, (4, 16, 4), 1), ("f32-s8-f32", ALONG_K, (2, 16, 1), 2),
    ("s8-s8-s32", ALONG_N, (1, 16, 4), 2), ("s8-s8-s32", ALONG_K, (16, 16, 4), 3), ("s8-s8-s32", ALONG_K, (1, 2, 1), 1),
    ("u8-s8-s32", ALONG_K, (4, 8, 1), 2), ("u8-s8-s32", ALONG_N, (1, 1, 1), 1),
)  # fmt: skip
"""Types, layouts, the elements of A, B and C that lie aligned, and rows of a kernel."""
SIZES = ((33, 131, 1, ""), (70, 17, 2, "b"), (1, 1, 1, ""), (17, 400, 3, "a"), (9, 0, 1, ""))
"""n, k, the items of a batch, and what is the same for all of them."""
LARGEST = 32
"""Multiply-adds in a row: compilers take long over more."""


def posed(dtype, layouts, vectors, size, batch=1, **more):
    return Problem(*rounded(size, layouts, vectors), dtype, batch, *layouts, **more)


def streams(dtype, layouts, vectors, m, **more):
    p = posed(dtype, layouts, vectors, (m, 65, 700), **more)
    return [s for s in candidates(p, MACHINE, vectors) if s.program == "stream"]


@pytest.mark.parametrize("language", ["cuda", "opencl"])
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda x: "{}-{}-{}".format(x[0], "x".join(map(str, x[2])), x[3]))
def test_products(product, language):
    dtype, layouts, vectors, m = product
    found = streams(dtype, layouts, vectors, m)
    least = min(s.mr * s.nr * s.tiles[0].k for s in found)
    found = [s for s in found if s.mr * s.nr * s.tiles[0].k <= max(least, LARGEST)]
    for s in found[PRODUCTS.index(product) % 7 :: -(-len(found) // 2)]:
        kernels = kernels_of(s)
        # More rows than a kernel has, and fewer.
        for i, (n, k, batch, shared) in enumerate(SIZES):
            size = ((m, 2 * m + 1, 1)[i % 3], n, k)
            case = grid_cases.case(posed(dtype, layouts, s.vectors, size, batch), s.vectors, i, shared)
            check_run(s, kernels, language, case, (case.problem, s))


@pytest.mark.parametrize("language", ["cuda", "opencl"])
@pytest.mark.parametrize("layouts", [ALONG_N, ALONG_K])
def test_slices_of_k_some_of_them_empty(layouts, language):
    s = varied(streams("f16-f16-f32", layouts, (4, 4, 1), 2)[5], split=3)
    kernels = kernels_of(s)
    for i, k in enumerate((4, 64, 1000)):
        case = grid_cases.case(posed("f16-f16-f32", layouts, s.vectors, (2, 37, k), 2), s.vectors, i)
        check_run(s, kernels, language, case, (case.problem, s))


EPILOGUES = epilogues()
ENDINGS = (
    ("f32", ALONG_N, (4, 4, 4), "many", 1), ("bf16", ALONG_K, (8, 8, 4), "plain", 3),
    ("f16", ALONG_K, (8, 8, 1), "places", 1),
)  # fmt: skip


@pytest.mark.parametrize("language", ["cuda", "opencl"])
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda x: f"{x[0]}-{x[3]}")
def test_products_end_in_expressions(ending, language):
    dtype, layouts, vectors, name, split = ending
    fused = EPILOGUES[name]
    s = varied(streams(dtype, layouts, vectors, 2, fused=str(fused))[3], split=split)
    kernels = kernels_of(s)
    for i, (m, n, k, batch) in enumerate([(2, 19, 37, 2), (1, 1, 1, 1), (3, 8, 200, 3)]):
        p = posed(dtype, layouts, s.vectors, (m, n, k), batch, fused=str(fused))
        f = fused_case(p, fused, s.vectors, i)
        check_run(s, kernels, language, f, (p, s))


# -- what is chosen -----------------------------------------------------------------

H200 = load_target("h200")
DECODE = (
    ("bf16", (8, 8, 8)), ("f16", (8, 8, 8)), ("f32", (4, 4, 4)), ("s8-s8-s32", (16, 16, 4)), ("f32-s8-f32", (4, 16, 4)),
)  # fmt: skip


@pytest.mark.parametrize("b", ["row", "col"])
@pytest.mark.parametrize(("dtype", "vectors"), DECODE[2:])
def test_a_row_is_bound_by_memory(dtype, vectors, b):
    choice = choose(Problem(1, 4096, 4096, dtype, b=b), H200, vectors=vectors)
    s, device = choice.schedule, H200.device
    assert s.program == "stream"
    assert s.parallel.split == 1, "a second kernel takes longer than it saves"
    assert choice.cost.bound == "memory"
    # What is on its way hides 700 ns, Little's law; and all processors work.
    blocks = 4096 // s.block.n
    together = min(occupancy(s, H200), -(-blocks // device.processors))
    assert together * s.threads * gpu_gemv.bytes_in_flight(s) >= device.memory_gbs * 700 / device.processors
    assert blocks >= 0.9 * device.processors


@pytest.mark.parametrize("b", ["row", "col"])
@pytest.mark.parametrize(("dtype", "vectors"), DECODE[:2])
def test_a_row_of_16_bits_is_copied_by_the_copy_engine(dtype, vectors, b):
    """On an H200 tiles of eight rows took 0.75 to 0.85 of the time of loads by threads, which wait for those of A."""
    choice = choose(Problem(1, 4096, 4096, dtype, b=b), H200, vectors=vectors)
    s, device = choice.schedule, H200.device
    assert s.program == "wgmma"
    assert s.atom.swap, "columns of B fill the 64 rows of the atom"
    assert s.parallel.split == 1, "a second kernel takes longer than it saves"
    assert choice.cost.bound == "memory"
    # Stages that are on their way hide 700 ns, and copies of nearly all processors are under way.
    bytes_of_b = 2 * s.block.n * s.block.k * s.stages
    assert bytes_of_b >= device.memory_gbs * 700 / device.processors
    assert min(s.parallel.persistent, -(-4096 // s.block.n)) * occupancy(s, H200) >= 0.45 * device.processors


@pytest.mark.parametrize("b", ["row", "col"])
@pytest.mark.parametrize(
    ("m", "dtype", "vectors"), [(1, *DECODE[0]), (4, *DECODE[0]), (8, *DECODE[0]), (1, *DECODE[3])]
)
def test_what_is_chosen_spills_nothing_in_its_loop(m, dtype, vectors, b):
    try:
        nvrtc.find_nvrtc()
    except NoCompilerError as error:
        opencl_cpu.missing(str(error))
    s = choose(Problem(m, 4096, 4096, dtype, b=b), H200, vectors=vectors).schedule
    kernel = lower_grid(s, H200.isa(s.isa))[0]
    made = nvrtc.compile_cuda(source(kernel, "cuda"), kernel.name, "90a")
    assert made.registers <= 1.2 * gpu_gemv.registers(s)
    # A register or two of what is only needed after the loop may be put away before it.
    assert made.spills <= 16


def test_few_columns_split_k():
    s = choose(Problem(1, 64, 65536, "bf16"), H200, vectors=(8, 8, 8)).schedule
    assert (s.program, s.parallel.split > 1) == ("stream", True)


def test_many_rows_and_single_chains_do_not_stream():
    assert not streams("f32", ALONG_N, (4, 4, 4), gpu_gemv.ROWS + 1)
    assert not streams("f32", ALONG_N, (4, 4, 4), 1, deterministic=True)


# -- calls --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_calls_with_few_rows_or_columns(dtype):
    _, queue = opencl_cpu.opencl_device()
    from pyopencl import array

    rng = np.random.default_rng(0)
    for left, right in [((1, 300), (300, 70)), ((300,), (300, 9)), ((200, 300), (300,)), ((3, 65, 64), (64, 2)),
                        ((2, 30, 40), (2, 40, 1)), ((2, 1, 30, 40), (3, 40, 3)), ((30, 0), (0, 2))]:  # fmt: skip
        a, b = (rng.integers(-9, 10, shape).astype(dtype) for shape in (left, right))
        got = pm.matmul(array.to_device(queue, a), array.to_device(queue, b)).get()
        want = np.matmul(a.astype(np.int64), b.astype(np.int64))
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want.astype(got.dtype))
        if right[-1:] != right:
            turned = array.to_device(queue, np.ascontiguousarray(np.swapaxes(b, -1, -2)))
            turned = turned.transpose((*range(b.ndim - 2), b.ndim - 1, b.ndim - 2))
            np.testing.assert_array_equal(pm.matmul(array.to_device(queue, a), turned).get(), want.astype(got.dtype))
