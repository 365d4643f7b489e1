"""Attention on devices: OpenCL's on a CPU, and CUDA's, emulated, against float64."""

from __future__ import annotations

from types import SimpleNamespace

import cuda_shim
import grid_cases
import ml_dtypes
import numpy as np
import pytest
from opencl_cpu import OpenCl, missing
from test_attention import TOLERANCE, exact, operands

import portmm as pm
from portmm.build import nvrtc
from portmm.codegen import cuda
from portmm.codegen.lower import lower_program
from portmm.dispatch.machine import _mapping
from portmm.errors import NoCompilerError, ScheduleError, TraceError
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.ir.interpreter import evaluate
from portmm.ops import grid_attention
from portmm.schedule import gpu_attention
from portmm.schedule.gpu_attention import AttentionSizes, Tiling, candidates, schedule_of, splits
from portmm.schedule.text import parse, spell
from portmm.spec.epilogue import C, Fused, acc, number
from portmm.target.target import load_isa, load_target
from portmm.util import memo

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32 = np.float16, np.float32


@pytest.fixture
def cl():
    memo.forget_all()
    yield OpenCl()
    memo.forget_all()


def check(on, x, want, **how):
    """The result, and the logarithms."""
    got, lse = pm.attention(*map(on.array, x), return_lse=True, **how)
    close(got, want[0], x[0].dtype)
    np.testing.assert_allclose(lse.get(), want[1], rtol=1e-5, atol=2e-5)


def close(got, want, dtype):
    got, tolerance = got.get(), TOLERANCE[np.dtype(dtype).name]
    assert got.dtype == dtype
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance)


# Items, heads, heads of keys, queries, keys, and elements of heads of K and V.
SHAPES = [
    ((1, 1, 1, 1, 1, 1, 1), F32, {}),
    ((2, 3, 3, 5, 7, 16, 16), F16, {"causal": True}),
    ((2, 4, 2, 33, 70, 64, 64), F16, {"causal": True, "window": 20}),
    ((1, 2, 1, 70, 133, 40, 80), BF16, {"window": 20}),
    ((1, 3, 1, 65, 90, 128, 64), F32, {"causal": True}),
    ((1, 2, 2, 90, 65, 80, 40), F32, {"causal": True, "window": 2**40}),  # the first queries see nothing
    ((2, 2, 1, 40, 61, 7, 5), BF16, {"causal": True, "scale": 0.3}),
    ((1, 1, 1, 20, 70, 256, 256), F16, {"window": 33}),
    # few queries: in one tile with other heads, keys in runs
    ((2, 6, 3, 2, 1100, 32, 40), F16, {"causal": True}),
    ((1, 8, 1, 1, 700, 80, 16), F32, {"window": 33}),
    ((1, 20, 1, 2, 600, 24, 16), F32, {"causal": True}),
    ((2, 2, 2, 3, 513, 128, 128), BF16, {}),
]


@pytest.mark.thin(7)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_it_is_attention(cl, case):
    shape, dtype, how = case
    x = operands(shape, dtype)
    check(cl, x, exact(*x, **how), **how)


@pytest.mark.thin(3)
@pytest.mark.parametrize("case", [SHAPES[i] for i in (2, 6, 8)], ids=str)
def test_it_is_attention_in_cuda(cupy, case):
    shape, dtype, how = case
    x = operands(shape, dtype)
    check(cupy, x, exact(*x, **how), **how)
    assert len(cupy.launches) == 1 + (shape[3] == 2)
    got = pm.attention(*map(cupy.array, x), **how)
    np.testing.assert_array_equal(got.get(), pm.attention(*map(cupy.array, x), **how).get())


@pytest.mark.thin(2)
@pytest.mark.parametrize("m", [3, 40])
def test_lengths_and_positions_of_items(cl, m):
    """A cache filled up to other lengths for each item; what lies behind is not looked at."""
    q, k, v = operands((3, 4, 2, m, 530, 32, 32))
    lengths = np.array([530, 247, m], np.int32)
    for i, n in enumerate(lengths):
        k[i, :, n:], v[i, :, n:] = np.nan, np.nan
    clean = q, np.nan_to_num(k), np.nan_to_num(v)
    for how in ({"causal": True}, {"causal": True, "window": 8}):
        want = exact(*clean, **how, lengths=lengths, offset=lengths - m)
        check(cl, (q, k, v), want, **how, lengths=cl.array(lengths), offset=cl.array(lengths - np.int32(m)))
    for more in ({"lengths": 100}, {"offset": 3, "causal": True}, {"lengths": 0}, {"offset": -1, "causal": True}):
        check(cl, clean, exact(*clean, **more), **more)


def test_queries_without_keys(cl):
    """They are zeros, and the logarithms -inf, as on CPUs."""
    x = operands((2, 2, 1, 20, 30, 16, 16))
    for more in ({"offset": np.array([-20, -3], np.int32), "causal": True}, {"lengths": np.array([0, 7], np.int32)}):
        got, lse = pm.attention(*map(cl.array, x), return_lse=True, **{k: _moved(cl, y) for k, y in more.items()})
        wanted, logarithms = pm.attention(*x, return_lse=True, **more)
        np.testing.assert_allclose(got.get(), wanted, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(lse.get(), logarithms, rtol=2e-5, atol=2e-5)
        assert (lse.get() == -np.inf).any()
    none = operands((2, 2, 1, 3, 0, 16, 16))
    got, lse = pm.attention(*map(cl.array, none), return_lse=True)
    assert not got.get().any()
    assert (lse.get() == -np.inf).all()
    for shape in ((0, 2, 1, 3, 4, 8, 8), (2, 2, 1, 0, 4, 8, 8), (2, 2, 1, 3, 4, 8, 0)):
        assert pm.attention(*map(cl.array, operands(shape))).shape == (*shape[:2], shape[3], shape[6])


def _moved(cl, x):
    return cl.array(x) if isinstance(x, np.ndarray) else x


# -- functions -------------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize("m", [2, 40])
def test_scores_and_masks(cl, m):
    x = operands((2, 4, 2, m, 520, 32, 32))
    rng = np.random.default_rng(1)
    slopes, bias = rng.random(4).astype(F32), rng.standard_normal((m, 520)).astype(F16)
    documents = np.sort(rng.integers(0, 3, (2, 520))).astype(np.int32)
    there = cl.array(slopes), cl.array(bias), cl.array(documents)
    at, to = np.arange(m)[:, None] + 520 - m, np.arange(520)
    seen = documents[:, None, -m:, None] == documents[:, None, None]

    def alibi(s, i):
        return s * 0.2 - there[0][i.h] * (i.q + (520 - m) - i.kv)

    alibi_of = lambda s: s * 0.2 - slopes[:, None, None] * (at - to)  # noqa: E731
    check(cl, x, exact(*x, score=alibi_of, causal=True), score=alibi, causal=True)
    for cap in (20.0, 5.0):
        capped = exact(*x, score=lambda s, cap=cap: cap * np.tanh(s / cap), window=70)
        check(cl, x, capped, score=lambda s, _, cap=cap: cap * np.tanh(s / cap), window=70)
    check(cl, x, exact(*x, score=lambda s: s + bias), score=lambda s, i: s + there[1][i.q, i.kv])
    check(cl, x, exact(*x, mask=seen), mask=lambda i: there[2][:, 520 - m :][i.b, i.q] == there[2][i.b, i.kv])


def test_what_is_no_score(cl):
    x = [cl.array(y) for y in operands((1, 1, 1, 3, 4, 8, 8))]
    held = np.zeros((3, 4), F32)
    with pytest.raises(TypeError, match="captures an array in the host's memory"):
        pm.attention(*x, score=lambda s, i: s + held[i.q, i.kv])
    with pytest.raises(TraceError, match="not a tuple"):
        pm.attention(*x, score=lambda s, _: (s, s))
    with pytest.raises(TypeError, match="is no function"):
        pm.attention(*x, mask=held)
    doubles = cl.array(held.astype(np.float64))
    with pytest.raises(TypeError, match="float64, which kernels cannot read"):
        pm.attention(*x, score=lambda s, i: s + doubles[i.q, i.kv])


# -- how arrays lie --------------------------------------------------------------------------


def strided(cl, x, order):
    """An array on the device whose axes lie in another order, the first outermost."""
    laid = cl.module.Array(cl.queue, tuple(x.shape[i] for i in order), x.dtype)
    laid.set(np.ascontiguousarray(x.transpose(order)))
    return laid.transpose([order.index(i) for i in range(x.ndim)])


@pytest.mark.thin(2)
@pytest.mark.parametrize("m", [2, 40])
def test_any_strides(cl, m):
    x = operands((2, 4, 2, m, 530, 24, 20), F16)
    want = exact(*x, causal=True)[0]
    for order in ((0, 2, 1, 3), (3, 2, 1, 0)):
        close(pm.attention(*(strided(cl, y, order) for y in x), causal=True), want, F16)
    wide = [cl.array(np.pad(y, ((0, 0), (0, 0), (0, 1), (1, 3)), constant_values=np.nan)) for y in x]
    inner = [y[:, :, :-1, 1:-3] for y in wide]
    close(pm.attention(*inner, causal=True), want, F16)


def test_items_of_other_ranks(cl):
    q, k, v = operands((6, 2, 1, 9, 12, 16, 8))
    want = exact(q, k, v)[0]
    got, lse = pm.attention(*(cl.array(x.reshape(2, 3, *x.shape[1:])) for x in (q, k, v)), return_lse=True)
    close(got, want.reshape(2, 3, 2, 9, 8), F32)
    assert lse.shape == (2, 3, 2, 9)
    close(pm.attention(*(cl.array(x[0]) for x in (q, k, v))), want[0], F32)
    uneven = [strided(cl, x.reshape(2, 3, *x.shape[1:]), (1, 0, 2, 3, 4)) for x in (q, k, v)]
    with pytest.raises(ValueError, match="the items of q are not evenly strided"):
        pm.attention(*uneven)
    close(pm.attention(*(cl.array(x.reshape(6, 1, *x.shape[1:])) for x in (q, k, v))), want[:, None], F32)


def test_items_that_are_broadcast_do_not_lie_evenly():
    laid = SimpleNamespace(shape=(2, 3, 2, 9, 8), strides=(0, 576, 288, 32, 4), dtype="f32", at=0)
    with pytest.raises(ValueError, match="the items of k are not evenly strided"):
        grid_attention._layout(laid, "k")


@pytest.mark.parametrize("m", [2, 20])
def test_out(cl, m):
    x = operands((2, 4, 2, m, 520, 16, 16))
    want = exact(*x)[0]
    there = [cl.array(y) for y in x]
    whole = cl.array(np.zeros(want.swapaxes(1, 2).shape, F32))
    out = whole.transpose((0, 2, 1, 3))
    assert pm.attention(*there, out=out) is out
    close(whole, want.swapaxes(1, 2), F32)
    half = cl.array(np.zeros(want.shape, F16))
    pm.attention(*there, out=half)
    close(half, want, F16)
    got, lse = pm.attention(there[0], *there[1:], out=there[0], return_lse=True)
    assert got is there[0]
    close(got, want, F32)
    assert lse.shape == want.shape[:-1]
    with pytest.raises(ValueError, match="out has shape"):
        pm.attention(*there, out=there[1])
    with pytest.raises(TypeError, match="attention writes"):
        pm.attention(*there, out=cl.array(np.zeros(want.shape, np.int32)))


def test_operands_that_do_not_fit(cl):
    q, k, v = operands((2, 2, 1, 3, 4, 8, 8))
    there = [cl.array(x) for x in (q, k, v)]
    lengths = np.array([1, 2], np.int32)
    for given, how, error, words in [
        ((there[0], k, there[2]), {}, TypeError, "k is a ndarray in the host's memory"),
        (there, {"out": q.copy()}, TypeError, "out is a ndarray in the host's memory"),
        (there, {"lengths": lengths}, TypeError, "lengths is a ndarray in the host's memory"),
        (there, {"lengths": cl.array(lengths.astype(np.uint8))}, TypeError, "pass int32"),
        (there, {"lengths": cl.array(lengths[:1])}, ValueError, r"lengths has shape \(1,\)"),
        (there, {"lengths": 5}, ValueError, "pass 0 to 4"),
        (there, {"offset": -4}, ValueError, "pass -3 to 4"),
        ((*there[:2], cl.array(v.astype(F16))), {}, TypeError, "float32, float32 and float16"),
        ([cl.array(x.astype(np.float64)) for x in (q, k, v)], {}, TypeError, "q has elements of float64"),
        ((there[0], there[1], cl.array(v[:, :, :2])), {}, ValueError, "do not fit"),
        ([cl.array(x[0, 0]) for x in (q, k, v)], {}, ValueError, r"q has shape \(3, 8\)"),
        ([cl.array(x) for x in operands((1, 1, 1, 1, 1, 4000, 8))], {}, ScheduleError, "shared memory"),
    ]:
        with pytest.raises(error, match=words):
            pm.attention(*given, **how)


# -- tiles -----------------------------------------------------------------------------------

ISA = load_isa("simt")
SCALED = Fused((), ((C, acc() * number(0)),))


def in_shim(form, t, x, run, unit=None):
    """The result and the logarithms by the emulation of CUDA, the same in several orders of threads."""
    isa, atom = unit or (ISA, ISA.atom("f32"))
    q, k, v = x
    (b, h, m, d), (_, few, n, _), dv = q.shape, k.shape, v.shape[-1]
    runs, rows = -(-n // run), b * h * m
    names = {"m": m, "n": n, "heads": h, "group": h // few, "few": few, "items": b, "window": 9, "offset": n - m}
    names |= {"keys": n, "run": run, "runs": runs, "all_rows": rows, "mosts_at": runs * rows * dv}
    names |= {"sums_at": runs * rows * (dv + 1), "number_0": d**-0.5}
    for name, rows_axis, shape in (
        ("q", "m", q.shape),
        ("k", "n", k.shape),
        ("v", "n", v.shape),
        ("o", "m", (b, h, m, dv)),
    ):
        names |= {
            f"{name}_b": shape[1] * shape[2] * shape[3],
            f"{name}_h": shape[2] * shape[3],
            f"{name}_{rows_axis}": shape[3],
        }
    kernels = lower_program(of_attention(form), t, isa, atom)
    codes = [cuda_shim.compile(cuda.source(kernel), kernel.name) for kernel in kernels]
    found = []
    for seed in cuda_shim.ORDERS:
        empty = [
            np.full(s, np.nan, y)
            for s, y in (((b, h, m, dv), q.dtype), ((b, h, m), F32), ((runs * rows * (dv + 2),), F32))
        ]
        laid = [cuda_shim.Laid.beside(y, end=seed % 2 == 0) for y in (*x, *empty)]
        given = names | {name: y.array for name, y in zip(("q", "k", "v", "o", "lse", "work"), laid, strict=True)}
        given |= {"counters": np.zeros(1, np.int32)}
        for kernel, code in zip(kernels, codes, strict=True):
            words = [_word(y, given, names) for y in kernel.arguments]
            grid = tuple(evaluate(y, names) for y in kernel.grid)
            code.launch((*grid, 1), kernel.threads, words, seed, kernel.shared_bytes * kernel.dynamic)
        for y in laid:
            y.check("an operand")
        assert not given["counters"].any()
        found.append([y.array for y in laid[3:5]])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert one.tobytes() == other.tobytes(), "results depend on the order of threads"
    return found[0]


def _word(x, given, numbers):
    """An argument as the shim has it."""
    if x.kind == "map":
        of, array = _mapping(x.map, numbers), given[x.map.pointer]
        made = cuda_shim.shim_map(array.itemsize, array.ctypes.data, of.sizes, of.strides, of.box, of.swizzle)
        return ("map", made, array)
    return given[x.name] if x.kind == "pointer" else (x.kind, given[x.name])


SMALL = [
    (schedule_of("f32", (12, 8), (8, 8), (2, 4), (4, 4, 4, 1)), F32, Bounds(causal=True), (2, 2, 1, 13, 21)),
    (schedule_of("f32", (40, 20), (4, 16), (2, 8), (8, 4, 2, 1)), F16, Bounds(), (1, 2, 2, 5, 40)),
    (schedule_of("f32", (5, 3), (4, 8), (4, 4), (1, 1, 1, 1)), BF16, Bounds(window=True), (1, 2, 1, 9, 30)),
    (
        schedule_of("f32", (16, 16), (8, 8), (4, 4), (4, 4, 4, 4), runs=True),
        F32,
        Bounds(causal=True, window=True),
        (2, 4, 2, 3, 37),
    ),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda x: f"{x[0].block.k}-{x[1]}")
def test_small_tiles_in_every_order_of_threads(case):
    s, dtype, bounds, (b, h, few, m, n) = case
    t, held = Tiling(s), {F32: "f32", F16: "f16", BF16: "bf16"}[dtype]
    x = operands((b, h, few, m, n, t.d, t.dv), dtype)
    got, lse = in_shim(Form(SCALED, held, held, bounds, lse=True), s, x, 16)
    want = exact(*x, causal=bounds.causal, window=9 if bounds.window else None)
    tolerance = TOLERANCE[np.dtype(dtype).name]
    np.testing.assert_allclose(got.astype(np.float64), want[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want[1], rtol=1e-5, atol=2e-5)


def asked(held="f32", d=64, **more):
    size = 4 if held == "f32" else 8
    usual = {"dv": d, "queries": 512, "heads": 64, "group": 1, "keys": 512, "vectors": (size,) * 4, "loose": ""}
    return AttentionSizes(held, d, **(usual | more))


def best(shape, target):
    return Tiling(candidates(shape, target)[0])


CHIPS = ("t4", "a100", "h100", "rtx_pro_6000", "mi300x", "mali_g710", "opencl_cpu", "opencl_gpu")


@pytest.mark.parametrize("chip", CHIPS)
def test_tiles_are_legal(chip):
    target = load_target(chip)
    for d in (16, 40, 64, 80, 128, 256):
        for held in ("f32", "f16"):
            for more in ({}, {"queries": 1, "group": 4, "keys": 5000}, {"vectors": (1, 1, 1, 1), "loose": "qkvo"}):
                wanted = asked(held, d, **more)
                found = [Tiling(s) for s in candidates(wanted, target)]
                for t in found:
                    assert t.threads <= target.device.block_threads
                    assert t.shared_bytes <= min(target.device.shared_bytes, gpu_attention.STATIC)
                    assert t.v_pitch >= d
                    assert t.depth * t.chunks >= d
                    assert not t.keys % t.values
                    assert not t.v_pitch % t.vectors[2]
                    assert not t.depth % t.vectors[1]
                    assert t.runs == (more.get("keys") == 5000)
                    assert parse(spell(t.s)) == t.s
                runs, run = splits(found[0].s, wanted, target)
                assert (runs - 1) * run < wanted.keys <= runs * run


def test_tiles_are_large_where_there_is_work():
    h100 = load_target("h100")
    assert [best(asked(d=d), h100).queries for d in (64, 128, 256)] == [64, 32, 32]
    assert best(asked(queries=64, heads=2), h100).queries < 64
    decoded = [asked(queries=1, group=group, heads=8 * group, keys=8192) for group in (1, 8, 32, 64)]
    assert [best(x, h100).queries for x in decoded] == [4, 16, 32, 64]
    for x in decoded:
        t = best(x, h100)
        assert t.runs
        assert splits(t.s, x, h100) == (32, 256)
    few = grid_cases.MACHINE
    assert best(asked(d=16), few).shared_bytes <= few.device.shared_bytes


@pytest.mark.rest("NVRTC")
@pytest.mark.parametrize("architecture", ["80", "90a"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("held", ["f32", "f16"])
def test_nothing_is_spilled(held, d, architecture):
    try:
        nvrtc.find_nvrtc()
    except NoCompilerError as error:
        missing(str(error))
    target = load_target({"80": "a100", "90a": "h100"}[architecture])
    for wanted in (asked(held, d), asked(held, d, queries=1, group=4, keys=8192)):
        t = best(wanted, target)
        for bounds in (Bounds(causal=True), Bounds())[: 1 + (not t.runs)]:
            program = of_attention(Form(SCALED, held, held, bounds, lse=True))
            for kernel in lower_program(program, t.s, ISA, ISA.atom("f32")):
                made = nvrtc.compile_cuda(cuda.source(kernel), kernel.name, architecture)
                assert made.spills == 0, (t, made.registers)
                assert made.registers * kernel.threads * max(1, kernel.occupancy) <= target.device.registers
                assert made.shared == (t.shared_bytes if "runs" not in kernel.name else 0)
