"""Expressions over rows, and down columns, by the threads of devices."""

from __future__ import annotations

import functools

import cuda_shim
import fused_cases
import numpy as np
import pytest
from fused_cases import by_rows, columns, every_operation, every_type, rows_case
from opencl_cpu import missing, opencl_device
from rows_lowered import lower_grid_columns, lower_grid_rows

import portmm as pm
from portmm.build.nvrtc import compile_cuda, find_nvrtc
from portmm.codegen import cuda, opencl
from portmm.dispatch.machine import Machine
from portmm.errors import NoCompilerError
from portmm.ir.block_program import program_of
from portmm.ir.interpreter import evaluate
from portmm.schedule.rows import RowTiles, candidates, rows_schedule
from portmm.schedule.text import parse, spell
from portmm.spec.epilogue import PRODUCT, Fused, Operand, extent, load, reduction
from portmm.spec.expr import real
from portmm.spec.expr_functions import sqrt
from portmm.target.target import load_isa, load_target

ROWS = {"every operation": every_operation, "every type": every_type, "by rows": by_rows}
ISA = load_isa("simt")


def values(kernel, f, extra):
    """The arguments of a kernel: arrays, and pairs of kinds and numbers."""
    k, given = f.case, []
    names = k.fields | extra
    for i, x in enumerate(k.operands):
        names |= {f"x{i}_{axis}": s for axis, s in zip(PRODUCT, x.steps, strict=True)}
    for a in kernel.arguments:
        if a.kind == "float":
            given.append(("float", float(k.numbers[int(a.name.removeprefix("number_"))])))
        elif a.kind != "pointer":
            given.append((a.kind, names[a.name]))
        else:
            given.append(a.name)
    grid = tuple(evaluate(x, names) for x in kernel.grid)
    return given, grid


@functools.cache
def built(source, name):
    from portmm.runtime import opencl as run

    context, _ = opencl_device()
    return run.load(run.compile_opencl(source, name, context), name)


def by_opencl(kernels, f, extra=None, work=1):
    """The operands, as kernels leave them on Intel's OpenCL for processors."""
    _, queue = opencl_device()
    import pyopencl as cl

    from portmm.runtime import opencl as run

    flats = [x.flat.copy() for x in f.case.operands]
    buffers = {"work": (cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 4 * work), 0)}
    for i, (x, y) in enumerate(zip(flats, f.case.operands, strict=True)):
        held = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=x)
        buffers[f"x{i}_all"] = (held, y.offset)
    for kernel in kernels:
        given, grid = values(kernel, f, extra or {})
        words = [("pointer", buffers[x]) if isinstance(x, str) else x for x in given]
        run.launch(built(opencl.source(kernel), kernel.name), grid, (kernel.threads, 1), words, queue)
    for i, x in enumerate(flats):
        cl.enqueue_copy(queue, x, buffers[f"x{i}_all"][0])
    return [f.case.c.flat, *flats]


def by_shim(kernels, f, extra=None, work=1):
    """The operands, as kernels leave them on the CPU's emulation of CUDA: the same in several orders of threads."""
    first = None
    for seed in cuda_shim.ORDERS:
        laid = [cuda_shim.Laid.beside(x.flat, end=seed % 2 == 0) for x in f.case.operands]
        arrays = {f"x{i}_all": x.array[y.offset :] for i, (x, y) in enumerate(zip(laid, f.case.operands, strict=True))}
        arrays["work"] = np.full(work, np.nan, np.float32)
        for kernel in kernels:
            given, grid = values(kernel, f, extra or {})
            words = [arrays[x] if isinstance(x, str) else x for x in given]
            if 0 not in grid:
                cuda_shim.compile(cuda.source(kernel), kernel.name).launch((*grid, 1), kernel.threads, words, seed)
        for i, x in enumerate(laid):
            x.check(f"operand {i}")
        found = [x.array.tobytes() for x in laid]
        assert first in (None, found), "results depend on the order of threads"
        first = found
    return [f.case.c.flat, *(x.array for x in laid)]


SIZES = [((1, 1), 1), ((3, 35), 2), ((5, 7), 2), ((0, 5), 1), ((4, 0), 2), ((2, 64), 3)]
WAYS = [rows_schedule(*x) for x in ((16, 1), (16, 16), (64, 16, 4), (128, 64, 2), (64, 64), (32, 32, 2))]
"""Threads of a block and of a row, and columns of a thread."""


def wide_enough(s, fused, n):
    form = RowTiles(s)
    return not form.cells or not fused.reductions or n <= form.width


@pytest.mark.thin(3)
@pytest.mark.parametrize("s", WAYS, ids=lambda x: f"{x.threads}-{RowTiles(x).subgroup}-{RowTiles(x).cells}")
@pytest.mark.parametrize("make", ROWS)
def test_rows_by_opencl(make, s):
    fused = ROWS[make]()
    kernel = lower_grid_rows(ISA, str(fused), s)
    for i, (size, batch) in enumerate(SIZES):
        if wide_enough(s, fused, size[1]):
            f = rows_case(fused, size, batch, i, special=i % 2 > 0)
            f.check(by_opencl([kernel], f), (size, batch))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("make", "s"),
    [
        ("every operation", rows_schedule(64, 32, 2)), ("every type", rows_schedule(64, 16, exchange=True)),
        ("every type", rows_schedule(64, 64, 1)), ("by rows", rows_schedule(32, 8)),
        ("by rows", rows_schedule(128, 64, 1, exchange=True)), ("by rows", rows_schedule(64, 32, 3, exchange=True)),
        ("by rows", rows_schedule(64, 64, exchange=True)),
    ],
    ids=str,
)  # fmt: skip
def test_rows_by_cuda(make, s):
    fused = ROWS[make]()
    kernel = lower_grid_rows(ISA, str(fused), s)
    for i, (size, batch) in enumerate(SIZES):
        if wide_enough(s, fused, size[1]):
            f = rows_case(fused, size, batch, i, special=i % 2 > 0)
            f.check(by_shim([kernel], f), (size, batch))


def down(fused, f):
    """Exact results over columns, in float64, in order."""
    k, extents = f.case, dict(zip(PRODUCT, (f.case.fields[x] for x in ("batch", "m", "n")), strict=True))
    read = []
    for x, at in zip(fused.operands[:4], k.operands, strict=False):
        places = np.ogrid[tuple(slice(extents[a]) for a in PRODUCT)]
        read.append(at.flat[at.offset + sum(p * s for p, s in zip(places, at.steps, strict=True))].astype(np.float64))
        assert x.dtype
    x, w, y, z = read
    m = extents["m"]
    ones = np.broadcast_to(w, x.shape).sum(1, keepdims=True) if m else 0 * w
    return [
        (x * y).sum(1, keepdims=True) * w[:, :1], (x + z).max(1, keepdims=True, initial=-np.inf),
        ones + x.sum(1, keepdims=True) + np.arange(extents["n"]),
    ]  # fmt: skip


@pytest.mark.parametrize("slices", [0, 3])
@pytest.mark.parametrize("by", [by_opencl, by_shim])
def test_columns(by, slices, monkeypatch):
    fused = columns()
    kernels = lower_grid_columns(ISA, str(fused), 16, sliced=slices > 0)
    assert len(kernels) == 1 + (slices > 0)
    monkeypatch.setattr(fused_cases, "meaning", lambda *_: (np.float64(0), np.float64(np.inf)))
    for i, (size, batch) in enumerate([((5, 37), 2), ((1, 3), 1), ((65, 16), 1), ((2, 1), 3)]):
        f = rows_case(fused, size, batch, i)
        work = max(1, slices * batch * len(fused.column_reductions) * size[1])
        found = by(kernels, f, {"slices": slices}, work)
        f.check(found, (size, batch))  # nothing beside the results was written
        for (to, dtype, *_), want in zip(f.results, down(fused, f), strict=True):
            got = found[1 + to][f.written[to].places()]
            eps = 2e-3 if dtype == "f16" else 1e-4
            np.testing.assert_allclose(got.astype(np.float64), want, rtol=eps, atol=eps)


def softmax_and_norm(dtype):
    x, width = load(0, dtype), real(extent("n"))
    e = pm.exp(x - reduction("max", x))
    centred = x - reduction("add", x) / width
    normal = centred / sqrt(reduction("add", centred * centred) / width + 1e-5) * load(1, "f32")
    operands = (Operand(dtype, "bmn"), Operand("f32", "n"), Operand(dtype, "bmn"), Operand(dtype, "bmn"))
    return Fused(operands, ((2, e / reduction("add", e)), (3, normal)))


@pytest.mark.parametrize("chip", ["t4", "h200"])
@pytest.mark.parametrize("n", [100, 4096, 16384, 100_000])
def test_rows_compile_without_spills(chip, n):
    try:
        find_nvrtc()
    except NoCompilerError as error:
        missing(str(error))
    fused, on = softmax_and_norm("bf16"), Machine((chip,), "cuda", 0, load_target(chip))
    s = candidates(program_of(fused), (64, n, 1), on.target, 4, exchange=on.language == "cuda")[0]
    form = RowTiles(s)
    assert parse(spell(s)) == s
    assert form.exchange
    assert form.threads <= on.target.device.block_threads
    assert not form.cells or form.width >= n
    kernel = lower_grid_rows(ISA, str(fused), s)
    made = compile_cuda(cuda.source(kernel), kernel.name, on.target.device.architecture)
    assert made.spills == 0, (form, made.registers)
