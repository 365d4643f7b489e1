"""Types that tensor cores multiply on some architectures, or on request: floats of eight bits, tf32."""

from __future__ import annotations

from dataclasses import replace

import grid_cases
import numpy as np
import pytest
from grid_cases import check_run, kernels_of
from test_grid_compiles import most_registers, nvrtc
from test_mma import BY_K, BY_ROW, FEW, MATRIX, ROWS, TURNED, check, posed, schedules
from test_wgmma import HOPPER, schedule
from test_wgmma import posed as hopper_problem

from portmm.arrays import grid_call
from portmm.build.nvrtc import compile_cuda
from portmm.codegen.lower import lower_lines
from portmm.dispatch.machine import source
from portmm.dispatch.schedule_choice import choose
from portmm.schedule.candidates import candidates
from portmm.schedule.text import varied
from portmm.spec.problem import Problem
from portmm.target.target import load_isa, load_target

ADA = replace(
    MATRIX, isas=(load_isa("mma_sm89"), *MATRIX.isas), device=replace(MATRIX.device, architecture="89"),
    rates=MATRIX.rates | {f"mma_sm89_{x}": 1024.0 for x in ("e4m3", "e5m2", "e4m3e5m2", "e5m2e4m3")},
)  # fmt: skip
SIZES = ((65, 33, 131, 1, ""), (17, 70, 64, 2, "b"), (1, 1, 1, 1, ""))
FP8 = (
    ("e4m3-e4m3-bf16", (16, 16, 8)), ("e5m2-e5m2-f32", (4, 16, 2)), ("e4m3-e5m2-f16", (16, 4, 4)),
    ("e5m2-e4m3-bf16", (2, 1, 1)), ("e4m3", (16, 16, 16)), ("e5m2", (8, 4, 1)),
)  # fmt: skip


@pytest.mark.parametrize("product", FP8, ids=lambda x: x[0])
def test_floats_of_eight_bits(product):
    dtype, vectors = product
    found = schedules(dtype, BY_K, vectors, ADA)
    at = FP8.index(product)
    s = found[(5 * at + 1) % len(found)]
    check(varied(s, split=1 + at % 2), BY_K, dtype, ADA, SIZES)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2-e4m3-e5m2"])
def test_results_of_a_byte_in_narrow_tiles(dtype):
    """A row of a tile is shorter than the most that a thread moves at once."""
    found = [s for s in schedules(dtype, BY_K, (16, 16, 16), ADA) if s.block.n == 8]
    assert {s.vectors[2] for s in found} == {8}
    check(found[0], BY_K, dtype, ADA, SIZES)


TF32 = ((BY_K, (4, 4, 4)), (ROWS, (4, 2, 2)), (TURNED, (4, 1, 4)), (BY_ROW, (4, 4, 1)), (ROWS, (1, 4, 2)))


@pytest.mark.parametrize("way", TF32, ids=lambda x: "-".join(x[0][:2]))
def test_tf32(way):
    """Each operand is rounded by at most 2**-11 of itself, half away from zero."""
    layouts, vectors = way
    found = candidates(posed("f32", layouts, vectors, tf32=True), MATRIX, vectors)
    found = [s for s in found if s.program == "mma" and s.parallel.split == 1 and s.mr * s.nr <= FEW]
    at = TF32.index(way)
    for s in (found[(7 * at) % len(found)], found[(11 * at + 4) % len(found)]):
        kernels = kernels_of(s, MATRIX)
        for i, (*size, batch, shared) in enumerate(SIZES):
            k = grid_cases.case(posed("f32", layouts, s.vectors, size, batch, tf32=True), s.vectors, i, shared)
            halved = _rounded(k)
            check_run(s, kernels, "cuda", halved, (k.problem, s), (i,))


WARPGROUPS = {
    "two warpgroups": (schedule("f32", BY_K, 128, 32, 2), (130, 70, 100, 1, "")),
    "clusters in turns": (schedule("f32", BY_K, 64, 32, 2, pingpong=True, cluster=2), (200, 70, 68, 2, "b")),
    "swapped": (schedule("f32", BY_K, 8, 64, swap=True), (5, 70, 132, 2, "a")),
    "slices": (schedule("f32", BY_K, 64, 32, split=2, joined=True), (70, 40, 260, 1, "")),
}


@pytest.mark.parametrize("name", WARPGROUPS)
def test_tf32_of_warpgroups(name):
    """Copies round, as tensor cores ignore the bits that tf32 lacks."""
    s, (*size, batch, shared) = WARPGROUPS[name]
    k = grid_cases.case(hopper_problem("f32", BY_K, size, batch, tf32=True), s.vectors, 1, shared)
    check_run(s, kernels_of(s, HOPPER), "cuda", _rounded(k), (k.problem, s), (1,))


def test_words_along_rows_are_copied_first_for_warpgroups():
    """Only those of tf32, and where there are warpgroups."""
    p, found = Problem(4096, 4096, 4096, "f32", tf32=True), []
    for chip, q in (("h100", p), ("h100", replace(p, a="col", b="col")), ("h100", replace(p, tf32=False)), ("a100", p)):
        found.append(grid_call.faster(q, load_target(chip), (4, 4, 4))[0])
    assert found == ["b", "a", "", ""]


def _rounded(k):
    """The case whose product is that of rounded operands."""
    p = k.problem
    a, b = (_tf32(x.astype(np.float32)) for x in (k.a, k.b))
    x = _seen(a, k.a_offset, (p.batch, p.m, p.k), [k.fields[f"a_{y}"] for y in ("batch", "m", "k")])
    y = _seen(b, k.b_offset, (p.batch, p.k, p.n), [k.fields[f"b_{y}"] for y in ("batch", "k", "n")])
    return replace(k, want=x @ y)


def _seen(flat, offset, shape, steps):
    """An operand in an array, in float64."""
    wide = flat.astype(np.float64)[offset:]
    return np.lib.stride_tricks.as_strided(wide, shape, [8 * s for s in steps])


def _tf32(x):
    return ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def test_tf32_is_never_used_unasked():
    assert not schedules("f32", BY_K, (4, 4, 4))


CHIPS = ("a100", "l4", "h200", "b200", "rtx_pro_6000")
LARGE = (
    (Problem(4096, 4096, 4096, "f32", b="col", tf32=True), (4, 4, 4)),
    (Problem(1000, 4096, 1024, "f32", a="col", tf32=True), (4, 4, 4)),
    (Problem(4096, 4096, 4096, "e4m3-e4m3-f32", b="col"), (16, 16, 4)),
    (Problem(512, 4096, 4096, "e5m2-e4m3-e4m3", b="col"), (16, 16, 16)),
)
ASSEMBLED = [(x, i) for j, x in enumerate(CHIPS) for i in range(len(LARGE)) if (i + j) % 2 == 0 and (i < 2 or j)]


@pytest.mark.parametrize(("chip", "at"), ASSEMBLED)
def test_what_is_chosen_compiles(chip, at):
    nvrtc()
    target, (p, vectors) = load_target(chip), LARGE[at]
    s = choose(p, target, vectors=vectors).schedule
    assert s.program in ("mma", "wgmma")
    kernel = kernels_of(s, target)[0]
    made = compile_cuda(source(kernel, "cuda"), kernel.name, target.device.architecture)
    assert made.spills == 0, (s, made.registers)
    assert made.registers <= most_registers(s, target), (s, made.registers)


@pytest.mark.parametrize("along", ["row", "k"])
@pytest.mark.parametrize("kind", ["u8", "f16", "s32"])
def test_copies_compile(kind, along):
    nvrtc()
    kernel = lower_lines(load_isa("simt"), kind, along)
    made = compile_cuda(source(kernel, "cuda"), kernel.name, "80")
    assert (made.spills, made.registers <= 64) == (0, True)
