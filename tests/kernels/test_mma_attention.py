"""Attention by tensor cores, emulated, against float64; and what NVIDIA's compiler makes of its kernels."""

from __future__ import annotations

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import passed
import pytest
from opencl_cpu import missing
from test_attention import TOLERANCE, exact, operands
from test_grid_attention import SCALED, asked, check, close, in_shim

import portmm as pm
from portmm.build import nvrtc
from portmm.codegen import cuda
from portmm.codegen.lower import lower_program
from portmm.errors import NoCompilerError
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.schedule import gpu_mma_attention as matrix
from portmm.schedule.gpu_attention_choice import choices, splits
from portmm.schedule.gpu_mma_attention import MatrixTiling
from portmm.schedule.text import parse, spell
from portmm.target.target import load_target

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
HELD = {F16: "f16", BF16: "bf16"}


def ran(cupy):
    """Whether the kernels that ran multiply fragments, all but what joins runs."""
    names = [name for name, *_ in cupy.launches if "runs" not in name]
    assert names
    return all("mma" in name for name in names)


# Items, heads, heads of keys, queries, keys, and elements of heads of K and V.
SHAPES = [
    ((1, 1, 1, 1, 1, 16, 16), F16, {}),
    ((2, 2, 1, 33, 70, 64, 64), F16, {"causal": True}),
    ((1, 2, 1, 70, 133, 80, 48), BF16, {"window": 20}),
    ((1, 1, 1, 40, 90, 128, 128), BF16, {"causal": True, "window": 25}),
    ((1, 1, 1, 20, 70, 256, 256), F16, {"window": 33}),
    ((1, 1, 1, 130, 65, 32, 64), F16, {"causal": True}),  # the first queries see nothing
    ((1, 1, 1, 33, 70, 48, 32), F16, {"scale": -0.3}),
    ((1, 1, 1, 17, 40, 32, 16), BF16, {"scale": 0.0, "causal": True}),
    # few queries: in one tile with other heads, keys in runs
    ((1, 6, 3, 2, 1100, 64, 64), F16, {"causal": True}),
    ((1, 20, 1, 1, 600, 128, 64), BF16, {"window": 33}),
    ((1, 40, 1, 3, 530, 16, 32), F16, {"causal": True}),  # more than a tile holds
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_it_is_attention(cupy, case):
    shape, dtype, how = case
    x = operands(shape, dtype)
    check(cupy, x, exact(*x, **how), **how)
    assert ran(cupy)
    assert len(cupy.launches) == 1 + (shape[4] >= 512)


@pytest.mark.thin(2)
@pytest.mark.parametrize(("m", "n"), [(3, 530), (40, 190)])
def test_what_lies_behind_the_end_is_not_looked_at(cupy, m, n):
    q, k, v = operands((3, 2, 1, m, n, 32, 32), F16)
    lengths = np.array([n, n // 2 - 8, m], np.int32)
    for i, end in enumerate(lengths):
        k[i, :, end:], v[i, :, end::2], v[i, :, end + 1 :: 2] = np.nan, np.inf, np.nan
    clean = q, np.nan_to_num(k, posinf=0), np.nan_to_num(v, posinf=0)
    for how in ({"causal": True}, {"window": 8}):
        want = exact(*clean, **how, lengths=lengths, offset=lengths - m)
        more = {"lengths": cupy.array(lengths), "offset": cupy.array(lengths - np.int32(m))}
        check(cupy, (q, k, v), want, **how, **more)
    for more in ({"lengths": 100}, {"offset": 3, "causal": True}, {"lengths": 0}, {"offset": -1, "causal": True}):
        check(cupy, clean, exact(*clean, **more), **more)
    assert ran(cupy)


def test_queries_without_keys(cupy):
    """They are zeros, and the logarithms -inf."""
    x = operands((2, 2, 1, 20, 30, 16, 16), F16)
    for lengths in ([0, 7], [30, 0]):
        got, lse = pm.attention(*map(cupy.array, x), return_lse=True, lengths=cupy.array(np.array(lengths, np.int32)))
        assert (lse.get() == -np.inf).sum() == 40
        assert not got.get()[lengths.index(0)].any()
    none = operands((2, 2, 1, 3, 0, 16, 16), F16)
    got, lse = pm.attention(*map(cupy.array, none), return_lse=True)
    assert not got.get().any()
    assert (lse.get() == -np.inf).all()


@pytest.mark.thin(2)
@pytest.mark.parametrize("m", [2, 40])
def test_scores_and_masks(cupy, m):
    x = operands((2, 4, 2, m, 520, 32, 32), BF16)
    rng = np.random.default_rng(1)
    slopes, bias = rng.random(4).astype(F32), rng.standard_normal((m, 520)).astype(F16)
    documents = np.sort(rng.integers(0, 3, (2, 520))).astype(np.int32)
    there = cupy.array(slopes), cupy.array(bias), cupy.array(documents)
    at, to = np.arange(m)[:, None] + 520 - m, np.arange(520)
    seen = documents[:, None, -m:, None] == documents[:, None, None]

    def alibi(s, i):
        return s * 0.2 - there[0][i.h] * (i.q + (520 - m) - i.kv)

    alibi_of = lambda s: s * 0.2 - slopes[:, None, None] * (at - to)  # noqa: E731
    check(cupy, x, exact(*x, score=alibi_of, causal=True), score=alibi, causal=True)
    capped = exact(*x, score=lambda s: 5 * np.tanh(s / 5), window=70)
    check(cupy, x, capped, score=lambda s, _: 5 * np.tanh(s / 5), window=70)
    check(cupy, x, exact(*x, score=lambda s: s + bias), score=lambda s, i: s + there[1][i.q, i.kv])
    check(cupy, x, exact(*x, mask=seen), mask=lambda i: there[2][:, 520 - m :][i.b, i.q] == there[2][i.b, i.kv])
    assert ran(cupy)


def test_large_scores_weigh_as_they_do(cupy):
    """The largest of a row weighs 1, however large it is."""
    q, k, v = (x * np.asarray(30, F16) for x in operands((1, 1, 1, 33, 70, 64, 64), F16))
    check(cupy, (q, k, v / np.asarray(30, F16)), exact(q, k, v / np.asarray(30, F16), scale=3.0), scale=3.0)


# -- how arrays lie --------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize(("m", "n"), [(2, 530), (40, 130)])
def test_strides(cupy, m, n):
    x = operands((2, 4, 2, m, n, 32, 16), F16)
    want = exact(*x, causal=True)[0]
    between = [cupy.array(np.ascontiguousarray(y.swapaxes(1, 2))).transpose((0, 2, 1, 3)) for y in x]
    close(pm.attention(*between, causal=True), want, F16)
    for less in (2, 4):  # of what is moved at once, two elements remain, or four
        wide = [cupy.array(np.pad(y, ((0, 0), (0, 0), (0, 1), (less, 8)), constant_values=np.nan)) for y in x]
        close(pm.attention(*(y[:, :, :-1, less:-8] for y in wide), causal=True), want, F16)
    out = cupy.array(np.zeros((16, *want.shape[:3]), F16)).transpose((1, 2, 3, 0))
    close(pm.attention(*map(cupy.array, x), causal=True, out=out), want, F16)
    whole = cupy.array(np.zeros(want.shape, F32))
    pm.attention(*map(cupy.array, x), causal=True, out=whole)
    np.testing.assert_allclose(whole.get(), want, rtol=3e-3, atol=3e-3)
    assert ran(cupy)


@pytest.mark.parametrize("why", ["f32", "odd head", "odd address", "long head", "loose"])
def test_threads_multiply_what_fragments_cannot(cupy, why):
    d = {"odd head": 24, "long head": 272}.get(why, 32)
    x = operands((1, 2, 1, 5, 40, d, 16), F32 if why == "f32" else F16)
    there = [cupy.array(y) for y in x]
    if why == "odd address":
        there[1] = cupy.array(np.pad(x[1], ((0, 0), (0, 0), (0, 0), (1, 1))))[..., 1:-1]
    if why == "loose":
        there[2] = cupy.array(np.ascontiguousarray(x[2].swapaxes(2, 3))).transpose((0, 1, 3, 2))
    close(pm.attention(*there), exact(*x)[0], x[0].dtype)
    assert not ran(cupy)


# -- tiles -----------------------------------------------------------------------------------

AMPERE, TURING = "a100", "t4"
SMALL = [
    (matrix.schedule_of("f16", (32, 16), (32, 1, 32), 2), F16, Bounds(causal=True), (1, 2, 1, 45, 61)),
    (matrix.schedule_of("f16", (64, 64), (32, 2, 16), 4), BF16, Bounds(), (1, 1, 1, 33, 90)),
    (
        matrix.schedule_of("f16", (80, 48), (64, 2, 32), 4, in_registers=False),
        F16,
        Bounds(window=True),
        (1, 1, 1, 50, 70),
    ),
    (
        matrix.schedule_of("f16", (16, 32), (16, 1, 16), 4, runs=True),
        F16,
        Bounds(causal=True, window=True),
        (2, 4, 2, 3, 67),
    ),
    (matrix.schedule_of("f16", (64, 32), (32, 2, 32), copies=False), F16, Bounds(causal=True), (1, 2, 1, 45, 81)),
    (
        matrix.schedule_of("f16", (48, 80), (32, 1, 16), copies=False, in_registers=False),
        F16,
        Bounds(window=True),
        (1, 1, 1, 33, 50),
    ),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("case", SMALL, ids=lambda x: f"{x[0].block.k}-{x[1]}-{x[0].b.stagings[0].method}")
def test_tiles_in_every_order_of_threads(case):
    s, dtype, bounds, (b, h, few, m, n) = case
    held, t = HELD[dtype], MatrixTiling(s)
    x = operands((b, h, few, m, n, t.d, t.dv), dtype)
    form = Form(SCALED, held, held, bounds, lse=True)
    got, lse = in_shim(form, s, x, 16, matrix.unit(held, load_target(AMPERE if t.copies else TURING)))
    want = exact(*x, causal=bounds.causal, window=9 if bounds.window else None)
    tolerance = TOLERANCE[dtype.name]
    np.testing.assert_allclose(got.astype(np.float64), want[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want[1], rtol=1e-5, atol=2e-5)


CHIPS = {"75": TURING, "80": AMPERE, "86": "a10g", "89": "l4", "90a": "h100", "120": "rtx_pro_6000"}
FEW = {"queries": 1, "group": 8, "heads": 64, "keys": 8192}


@pytest.mark.parametrize("chip", CHIPS.values())
def test_tiles_are_legal(chip):
    target = load_target(chip)
    device, turing = target.device, chip == TURING
    for d, dv in [*((d, d) for d in range(16, 272, 16)), (192, 128), (16, 256)]:
        for more in ({}, FEW, {"queries": 20}, {"queries": 16, "group": 16, "keys": 5000}):
            wanted = asked("f16", d, **({"dv": dv} | more))
            found = matrix.candidates(wanted, target)
            assert (not found) == bool(matrix.lacks(wanted, target))
            assert found or turing
            if not found:
                continue
            named = [x for x in choices(wanted, target) if x.program == "mma_attention"]
            assert [replace(s, isa="") for s in named] == found
            assert {s.isa for s in named} == {matrix.unit("f16", target)[0].name}
            for t in map(MatrixTiling, found):
                assert t.shared_bytes <= device.shared_bytes
                assert t.registers <= device.thread_registers
                assert t.queries == 16 * t.warps * t.high
                assert t.copies != turing
                assert parse(spell(t.s)) == t.s
            assert t.runs == (wanted.queries <= 16 and wanted.keys >= 512)
            runs, run = splits(t.s, wanted, target)
            assert (runs - 1) * run < wanted.keys <= runs * run


def best(shape, target):
    return MatrixTiling(matrix.candidates(shape, target)[0])


def test_tiles_are_large_where_there_is_work():
    h100 = load_target("h100")
    assert [best(asked("f16", d), h100).queries for d in (64, 128, 256)] == [128] * 3
    assert best(asked("f16", queries=100, heads=8), h100).queries < 100
    assert [best(asked("f16", **FEW | {"group": g}), h100).queries for g in (1, 8, 32, 64)] == [16, 16, 32, 64]
    assert splits(best(asked("f16", **FEW), h100).s, asked("f16", **FEW), h100)[0] > 16


def test_what_is_lacking_is_said():
    h100 = load_target("h100")
    for chip, wanted, words in (
        ("h100", asked("f32"), "multiplies no fragments of f32"),
        ("t4", asked("bf16"), "multiplies no fragments of bf16"),
        ("mi300x", asked("f16"), "multiplies no fragments"),
        ("h100", asked("f16", 72), "no multiples of 16"),
        ("h100", asked("f16", vectors=(8, 1, 8, 8)), "not aligned to 4 bytes"),
        ("h100", asked("f16", loose="k"), "not dense"),
    ):
        assert words in matrix.lacks(wanted, load_target(chip))
        assert not matrix.candidates(wanted, load_target(chip))
    assert not matrix.lacks(asked("f16", loose="o"), h100)


CASES = [*itertools.product([x for x in CHIPS if x != "75"], (64, 128, 256)), ("75", 64), ("75", 128), ("80", 80)]


@pytest.mark.rest("NVRTC")
@pytest.mark.parametrize(("architecture", "d"), CASES)
def test_nothing_is_spilled(architecture, d):
    try:
        nvrtc.find_nvrtc()
    except NoCompilerError as error:
        missing(str(error))
    target = load_target(CHIPS[architecture])
    held = "f16" if architecture == "75" else "bf16"
    isa, atom = matrix.unit(held, target)
    for more in ({"queries": 4096, "keys": 4096}, FEW)[: 1 if (architecture, d) == ("75", 128) else 2]:
        t = best(asked(held, d, **more), target)
        for bounds in (Bounds(causal=True), Bounds())[: 1 + (not t.runs)]:
            program = of_attention(Form(SCALED, held, held, bounds, lse=True))
            kernel = lower_program(program, t.s, isa, atom)[0]
            text = cuda.source(kernel)
            if passed.unchanged(text, kernel.name, architecture, t.s, passed.nvrtc()):
                continue
            made = nvrtc.compile_cuda(text, kernel.name, architecture)
            assert made.spills == 0, (t, made.registers)
            assert made.registers * kernel.threads <= target.device.registers
            assert kernel.shared_bytes == t.shared_bytes
