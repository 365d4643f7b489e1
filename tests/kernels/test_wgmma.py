"""Tensor cores of Hopper: pipelines of warpgroups on the shim, and as NVRTC compiles them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import grid_cases
import ml_dtypes
import numpy as np
import opencl_cpu
import pytest
from emulated_cuda import install
from fused_cases import epilogues
from grid_cases import check_run, fused_case, kernels_of
from places import MACHINES

import portmm as pm
from portmm.arrays import operand
from portmm.build.nvrtc import compile_cuda, find_nvrtc
from portmm.codegen.lower import lower_grid
from portmm.dispatch import schedule_choice
from portmm.dispatch.machine import source
from portmm.dispatch.schedule_choice import choose
from portmm.errors import DeviceError, NoCompilerError
from portmm.runtime import tensor_map
from portmm.schedule.candidates import candidates
from portmm.schedule.gpu_wgmma import LINE, STRIP, budgets, panel, registers, staged
from portmm.schedule.legality import illegal
from portmm.schedule.legality import shared_bytes as shared_of
from portmm.schedule.parts import ALL, Tile
from portmm.schedule.text import of_flat, parse, spell, varied
from portmm.spec.dtype import BY_NAME
from portmm.spec.problem import Problem
from portmm.target.target import load_target
from portmm.util import memo

BF16 = np.dtype(ml_dtypes.bfloat16)
HOPPER = load_target(str(MACHINES / "tiny_hopper.toml"))
H200 = load_target("h200")
ROWS, BY_K, BY_ROW, TURNED = ("row", "row", "row"), ("row", "col", "row"), ("col", "row", "row"), ("col", "col", "row")
C_BY_COLUMNS = ("row", "col", "col")


def schedule(dtype, layouts, m, n, groups=1, **more):
    """A schedule for tiles of m x n of a block."""
    a, b, c = layouts
    x, y, z = (BY_NAME[t].bytes for t in Problem(1, 1, 1, dtype).types)
    turns, swap = more.get("pingpong", False), more.get("swap", False)
    part = (m, n) if turns else (m, n // groups) if swap else (m // groups, n)
    wide, high = part if swap else part[::-1]
    sums = (wide // 4, 2 * high // STRIP) if swap else (2 * high // STRIP, wide // 4)
    k = 32 // x
    tiles = (
        Tile("registers", *sums, k),
        Tile("warp", *part, k),
        Tile("shared", m, n, LINE // x),
        Tile("L2", 8 * m, ALL, ALL),
    )
    sent = 8 if z == 2 and c == "row" and more.get("split", 1) == 1 else 2 if c == "row" else 1
    given = {"stages": 3, "persistent": 4, "vectors": (16 // x, 16 // y, sent)} | more
    if given.get("split", 1) > 1:
        given["persistent"] = 0
    given |= {"c": "row" if c == "row" else "any", "groups": groups, "resident": 1}
    s = of_flat("wgmma", "wgmma", dtype, tiles, a=a, b=b, **given)
    return s if sent != 8 or panel(s) else varied(s, vectors=(*s.vectors[:2], 2))


def posed(dtype, layouts, size, batch=1, **more):
    a, b, c = layouts
    return Problem(*size, dtype, batch, a, b, c, **more)


def check(s, layouts, sizes, seeds=(0, 1, 2)):
    """A schedule's kernels on m, n, k, the items of a batch, and what all of them share."""
    assert parse(spell(s)) == s
    kernels = kernels_of(s, HOPPER)
    for i, (*size, batch, shared) in enumerate(sizes):
        p = posed(s.dtype, layouts, size, batch)
        assert not illegal(s, p, HOPPER.isa(s.isa), None, HOPPER) or s.parallel.split > 1
        k = grid_cases.case(p, (*s.vectors[:2], 8 if staged(s) else 2), i, shared)
        check_run(s, kernels, "cuda", k, (p, s), seeds if i == 0 else seeds[i % 3 :][:1])


EDGES = (130, 70, 200, 1, "")
"""m, n, k, the items of a batch, and what is the same for all of them: rows, columns and a step of k are left over."""
BATCHES = ((64, 33, 131, 3, "b"), (7, 129, 64, 2, "a"))
COOPERATIVE = schedule("bf16", BY_K, 128, 32, 2)
SWAPPED = schedule("bf16", BY_K, 8, 64, swap=True)
VARIANTS = {
    "one warpgroup": (schedule("bf16", BY_K, 64, 32), [EDGES, *BATCHES]),
    "two warpgroups": (COOPERATIVE, [EDGES, *BATCHES]),
    "two strips": (schedule("f16", BY_K, 256, 16, 2), [(300, 40, 100, 1, "")]),
    "in turns": (schedule("bf16", BY_K, 64, 32, 2, pingpong=True), [EDGES, (64, 33, 131, 3, "b")]),
    "in turns, two strips": (schedule("bf16", BY_K, 128, 16, 2, pingpong=True), [EDGES]),
    "a tile each": (varied(COOPERATIVE, persistent=0), [(130, 40, 70, 1, "")]),
    "many stages": (schedule("bf16", BY_K, 64, 16, stages=7), [(100, 16, 1000, 1, ""), (1, 1, 16, 1, "")]),
    "a panel of 64": (schedule("bf16", BY_K, 64, 64), [(70, 70, 70, 2, "")]),
    "a panel of 16": (schedule("bf16", BY_K, 64, 48), [(70, 100, 70, 1, "")]),
    "no panel": (schedule("bf16", BY_K, 64, 24), [(70, 50, 70, 1, "")]),
    "clusters": (varied(COOPERATIVE, cluster=2), [(300, 70, 200, 1, ""), (64, 33, 131, 3, "b")]),
    "clusters in turns": (schedule("bf16", BY_K, 64, 32, 2, pingpong=True, cluster=2), [(200, 70, 131, 1, "")]),
    "swapped": (SWAPPED, [(5, 130, 200, 2, "a"), (1, 64, 131, 1, "")]),
    "swapped, two strips": (schedule("bf16", BY_K, 16, 256, 2, swap=True), [(13, 300, 70, 1, "")]),
    "slices": (varied(COOPERATIVE, persistent=0, split=3, vectors=(8, 8, 2)), [(130, 70, 461, 2, "b")]),
    "swapped slices": (varied(SWAPPED, persistent=0, split=2, vectors=(8, 8, 1)), [(5, 70, 300, 1, "")]),
    "joined": (varied(COOPERATIVE, persistent=0, split=3, joined=True), [(130, 70, 461, 2, "b")]),
    "joined, swapped": (varied(SWAPPED, persistent=0, split=2, joined=True), [(5, 130, 300, 1, "")]),
    "f32 of bf16": (schedule("bf16-bf16-f32", BY_K, 64, 32), [EDGES]),
    "bytes": (schedule("s8-s8-s32", BY_K, 128, 32, 2), [EDGES, (64, 33, 300, 2, "b")]),
    "bytes without a sign": (schedule("u8-s8-s32", BY_K, 64, 16), [(60, 20, 150, 1, "")]),
    "floats of eight bits": (schedule("e4m3-e4m3-bf16", BY_K, 128, 32, 2), [EDGES, (64, 33, 600, 2, "b")]),
    "floats of eight bits, mixed": (schedule("e5m2-e4m3-f32", BY_K, 64, 16, 2, pingpong=True), [(130, 20, 300, 1, "")]),
    "floats of eight bits, swapped": (schedule("e5m2", BY_K, 8, 64, swap=True), [(5, 70, 300, 1, "")]),
    "swapped bytes": (schedule("s8-s8-s32", BY_K, 16, 64, swap=True), [(9, 70, 150, 1, "")]),
}
LAID = {
    "B by rows": schedule("bf16", ROWS, 64, 32), "A by columns": schedule("f16", ("col", "col", "row"), 128, 32, 2),
    "both": schedule("bf16", BY_ROW, 64, 128, 2, pingpong=True),
    "swapped": schedule("bf16", ROWS, 16, 128, 2, swap=True),
    "A by columns, swapped": schedule("bf16", BY_ROW, 8, 64, swap=True),
    "clusters": schedule("bf16", ROWS, 64, 128, cluster=2), "C by columns": schedule("bf16", C_BY_COLUMNS, 64, 32),
    "C by columns, swapped": schedule("bf16", C_BY_COLUMNS, 8, 64, swap=True),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    s, sizes = VARIANTS[name]
    check(s, BY_K, sizes)


@pytest.mark.parametrize("name", LAID)
def test_layouts(name):
    s = LAID[name]
    a, b = s.a.layout, s.b.layout
    check(s, (a, b, "col" if s.c.layout == "any" else "row"), [(9 if s.atom.swap else 130, 140, 100, 2, "b")])


EPILOGUES = epilogues()


@pytest.mark.parametrize(
    ("name", "way"),
    [("plain", "sent"), ("many", "sent"), ("places", "sent swapped"), ("many", "not"), ("plain", "slices")],
)
def test_products_end_in_expressions(name, way):
    fused = EPILOGUES[name]
    more = {"split": 2} if way == "slices" else {"swap": True} if "swapped" in way else {}
    s = schedule("bf16", BY_K, *((8, 64) if "swap" in more else (64, 32)), fused=str(fused), **more)
    s = s if "sent" in way else varied(s, vectors=(8, 8, 2))
    assert staged(s) == ("sent" in way)
    kernels = kernels_of(s, HOPPER)
    vectors = (8, 8, 8)
    for i, (*size, batch) in enumerate([(8, 80, 72, 2), (72, 40, 136, 1)][: 1 if "swap" in more else 2]):
        f = fused_case(posed("bf16", BY_K, size, batch, fused=str(fused)), fused, vectors, i)
        check_run(s, kernels, "cuda", f, (f.case.problem, s), (i,))


# -- calls --------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "k", "dtype"), [(200, 192, BF16), (3, 256, BF16), (160, 256, np.float16)])
def test_calls_reach_them(m, k, dtype, monkeypatch):
    """From arrays of CuPy's to maps, the grid and shared memory that is asked for."""
    memo.forget_all()
    on = install(monkeypatch)
    rng = np.random.default_rng(m)
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((192, k)).astype(dtype)
    monkeypatch.setattr(schedule_choice, "candidates", lambda *x: [s for s in candidates(*x) if s.program == "wgmma"])
    found = pm.matmul(on.array(a), on.array(b).T).get()
    wanted = a.astype(np.float64) @ b.T.astype(np.float64)
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2.0**-7, atol=1e-4 * k)
    assert any("_wgmma_" in name for name, *_ in on.launches)
    memo.forget_all()


def test_what_the_copy_engine_cannot_address_is_not_offered():
    """Other units take over; so they do on chips that have none."""

    def programs(p, vectors, target=H200):
        return {s.program for s in candidates(p, target, vectors)}

    square = posed("bf16", BY_K, (512, 512, 512))
    assert "wgmma" in programs(square, (8, 8, 8))
    assert "wgmma" in programs(square, (8, 8, 1))
    for vectors in ((4, 8, 8), (8, 4, 8)):
        assert "wgmma" not in programs(square, vectors)
        assert "mma" in programs(square, vectors)
    by_rows = posed("s8-s8-s32", ROWS, (512, 512, 512))
    assert "wgmma" not in programs(by_rows, (16, 16, 4))
    assert "wgmma" not in programs(square, (8, 8, 8), load_target("b200"))
    assert "wgmma" not in programs(square, (8, 8, 8), load_target("a100"))


def test_lines_that_overlap_are_not_whole_vectors():
    """The copy engine's steps are no less than its lines, and go forwards."""
    x = np.zeros((64, 64), BF16)
    for y in (np.broadcast_to(x[:1], (64, 64)), x[::-1]):
        given = SimpleNamespace(dtype="bf16", at=0)
        steps = tuple(s // 2 for s in y.strides)
        assert operand.matrix(given, 64, 64, steps).vector < 8
    assert operand.matrix(SimpleNamespace(dtype="bf16", at=0), 64, 64, (64, 1)).vector == 8


class FakeDriver:
    """Remembers what it is asked for."""

    def __init__(self, status=0):
        self.status, self.asked = status, []

    def cuTensorMapEncodeTiled(self, *given):  # noqa: N802 - CUDA's name
        self.asked.append(given)
        return self.status

    def cuGetErrorName(self, _status, to):  # noqa: N802 - CUDA's name
        to._obj.value = b"CUDA_ERROR_INVALID_VALUE"


def test_tensor_maps_are_the_drivers(monkeypatch):
    tensor_map.tensor_map.cache_clear()
    driver = FakeDriver()
    monkeypatch.setattr(tensor_map, "_driver", lambda: driver)
    given = ("bf16", 4096, (100, 30, 2), (256, 8192), (64, 128, 1), 128)
    made = tensor_map.tensor_map(*given)
    assert made.size == 1
    assert made.itemsize == 128
    assert made.ctypes.data % 64 == 0
    ((_, kind, rank, at, sizes, strides, box, steps, *rest),) = driver.asked
    assert (kind, rank.value, at.value) == (1, 3, 4096)
    assert [list(x) for x in (sizes, strides, box, steps)] == [[100, 30, 2], [256, 8192], [64, 128, 1], [1, 1, 1]]
    assert rest == [0, 3, 3, 0]
    assert tensor_map.tensor_map(*given) is made
    tensor_map.tensor_map("f32", *given[1:4], (32, 128, 1), 128, True)
    assert driver.asked[-1][1] == 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
    driver.status = 1
    with pytest.raises(DeviceError, match=r"INVALID_VALUE.*copy the operand"):
        tensor_map.tensor_map("bf16", 4098, (100, 30, 2), (256, 8192), (64, 128, 1), 128)
    monkeypatch.setattr(tensor_map, "_driver", SimpleNamespace)
    with pytest.raises(DeviceError, match="no tensor maps"):
        tensor_map.tensor_map("bf16", 8192, (100, 30, 2), (256, 8192), (64, 128, 1), 128)
    tensor_map.tensor_map.cache_clear()


# -- machine code ---------------------------------------------------------------------

LARGE = schedule("bf16", BY_K, 128, 256, 2, stages=4, persistent=132)
GATES = {
    "cooperative": LARGE, "clusters": varied(LARGE, cluster=2),
    "tall": schedule("f16", TURNED, 256, 128, 2, stages=4, persistent=132),
    "in turns": schedule("bf16", ROWS, 64, 256, 2, pingpong=True, stages=4, persistent=132),
    "fused": varied(LARGE, fused=str(EPILOGUES["plain"])),
    "swapped": schedule("bf16", BY_K, 16, 128, swap=True, stages=8, persistent=132),
    "slices": schedule("bf16", BY_K, 128, 128, 2, stages=4, split=4),
    "joined": schedule("bf16", BY_K, 128, 256, 2, stages=4, split=4, joined=True, vectors=(8, 8, 8)),
    "bytes": schedule("s8-s8-s32", BY_K, 128, 256, 2, stages=4, persistent=132),
    "floats of eight bits": schedule("e4m3-e4m3-bf16", BY_K, 128, 160, 2, stages=5, persistent=132),
    "tf32": schedule("f32", BY_K, 128, 256, 2, stages=4, persistent=132, cluster=2),
    "groups": schedule("bf16", BY_K, 128, 256, 2, stages=4, persistent=0, grouped=True, vectors=(8, 8, 2)),
    "groups, swapped": schedule("bf16", ROWS, 16, 256, 2, swap=True, persistent=0, grouped=True, vectors=(8, 8, 2)),
}  # fmt: skip


def disassembled(code, folder):
    """The instructions of a cubin, or nothing where there is no disassembler."""
    places = (Path(find_nvrtc()).parents[1] / "bin" / "nvdisasm", shutil.which("nvdisasm"))
    tool = next((x for x in places if x and Path(x).exists()), None)
    if tool is None:
        return ""
    path = folder / "kernel.cubin"
    path.write_bytes(code)
    return subprocess.run([tool, path], capture_output=True, text=True, check=True).stdout


@pytest.mark.rest("NVRTC")
@pytest.mark.parametrize("name", GATES)
def test_machine_code(name, tmp_path):
    """Nothing spilled, nothing serialised, registers shared out, and the units that were meant."""
    try:
        find_nvrtc()
    except NoCompilerError as error:
        opencl_cpu.missing(str(error))
    s = GATES[name]
    kernel = lower_grid(s, H200.isa("wgmma"))[0]
    text = source(kernel, "cuda")
    made = compile_cuda(text, kernel.name, H200.device.architecture)
    assert made.spills == 0
    assert made.registers <= registers(s)
    assert not re.search(r"C75\d\d", made.log), made.log
    assert kernel.shared_bytes == shared_of(s) <= H200.device.shared_bytes
    assert ("registers_up_232();" in text) == bool(budgets(s)[1])
    said = disassembled(made.code, tmp_path)
    if said:
        unit = {"s8": "IGMMA", "e4m3": "QGMMA"}.get(s.types[0], "HGMMA")
        words = {unit, "UTMALDG"} | ({"UTMASTG"} if staged(s) else set())
        words |= {"USETMAXREG"} if budgets(s)[1] else set()
        assert {x for x in words if x not in said} == set()


@pytest.mark.parametrize(
    ("size", "vectors", "wanted"),
    [
        ((8192, 8192, 8192), (8, 8, 8), lambda s: s.program == "wgmma" and s.parallel.warpgroups == 2),
        ((16, 4096, 4096), (8, 8, 8), lambda s: s.atom.swap),
        ((4096, 4096, 4096), (4, 8, 8), lambda s: s.program == "mma"),
    ],
)
def test_choices(size, vectors, wanted):
    s = choose(posed("bf16", BY_K, size), H200, vectors=vectors).schedule
    assert wanted(s), s
    assert parse(spell(s)) == s
    if s.parallel.persistent:
        assert s.parallel.persistent <= H200.device.processors * s.parallel.occupancy
        assert s.parallel.persistent % s.parallel.cluster == 0
