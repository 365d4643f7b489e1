"""Launch of records of products and of attention: layouts, further results, types, masks, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from emulated_cuda import install

import portmm as pm
from portmm.codegen.lower import lower_program
from portmm.dispatch import config, cpu_kernels, schedule_choice
from portmm.errors import ScheduleError
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.ir.block_meaning import run
from portmm.ir.block_program import BlockProgram, TileGemm, TileTransfer
from portmm.ir.product_program import of_product
from portmm.spec.dequantization import IDENTITY
from portmm.spec.epilogue import C, Fused, Operand, acc, contraction, load, number
from portmm.spec.problem import Problem
from portmm.util import memo

SUMS = contraction(load(0, "f32"), load(1, "f32"), "k")
TWO = BlockProgram(
    "bmn", "k", tuple(Operand("f32", x) for x in ("km", "bkn", "m", "bmn", "bmn")),
    ((TileGemm(SUMS),), (TileTransfer(3, SUMS + load(2, "f32")), TileTransfer(4, SUMS * 2.0))),
)  # fmt: skip
PLACES = ["host", "device"]


@pytest.fixture
def put(request, monkeypatch):
    """Functions that copy an array to where a test runs, and back."""
    if request.param == "host":
        yield (lambda x: x), (lambda x: x)
        return
    memo.forget_all()
    cupy = install(monkeypatch)
    yield cupy.array, (lambda x: x.get())
    memo.forget_all()


@pytest.mark.parametrize("put", PLACES, indirect=True)
def test_two_results_and_operands_in_any_order(put):
    there, back = put
    rng = np.random.default_rng(1)
    a, b, more = rng.random((9, 20), "f4"), rng.random((3, 9, 17), "f4"), rng.random(20, "f4")
    one, two = (there(np.full((3, 20, 17), np.nan, "f4")) for _ in range(2))
    assert pm.launch(TWO, there(a), there(b), there(more), one, two) is two
    np.testing.assert_allclose(back(one), a.T @ b + more[:, None], rtol=1e-5)
    np.testing.assert_allclose(back(two), 2 * (a.T @ b), rtol=1e-5)


@pytest.mark.parametrize("put", PLACES, indirect=True)
@pytest.mark.parametrize("dtype", ["f32", "bf16-bf16-f32", "s8-s8-s32", "s8-s8-f32"])
def test_records_of_problems(put, dtype):
    there, back = put
    rng = np.random.default_rng(2)
    fused = str(Fused((Operand("f32", "n"),), ((C, acc() * load(0, "f32")),))) if dtype == "s8-s8-f32" else ""
    p = Problem(19, 24, 33, dtype, 2, fused=fused)
    types = [{"f32": np.float32, "s8": np.int8, "s32": np.int32}.get(x, ml_dtypes.bfloat16) for x in p.types]
    a, b = rng.integers(-9, 9, (2, 19, 33)).astype(types[0]), rng.integers(-9, 9, (2, 33, 24)).astype(types[1])
    more = [rng.random(24, "f4")] if fused else []
    c, meant = there(np.zeros((2, 19, 24), types[2])), np.zeros((2, 19, 24), types[2])
    pm.launch(of_product(p), there(a), there(b), c, *map(there, more))
    run(of_product(p), (a, b, meant, *more), {"k": 8})
    np.testing.assert_allclose(back(c), meant, rtol=1e-5)


@pytest.mark.parametrize("put", PLACES, indirect=True)
def test_attention_with_all_that_it_has(put):
    there, back = put
    rng = np.random.default_rng(3)
    score = Fused((Operand("f32", "hmn"),), ((C, acc() * 0.5 + load(0, "f32")),))
    program = of_attention(Form(score, "f32", "f32", Bounds(causal=True, window=True), *(True,) * 3), window=6)
    q, k, v = (rng.normal(size=s).astype("f4") for s in ((2, 4, 20, 8), (2, 2, 33, 8), (2, 2, 33, 8)))
    bias, lengths, starts = rng.random((4, 20, 33), "f4"), np.array([33, 21], "i4"), np.array([13, 4], "i4")
    out, lse = np.full((2, 4, 20, 8), np.nan, "f4"), np.full((2, 4, 20), np.nan, "f4")
    meant = [out.copy(), lse.copy()]
    run(program, (bias, q, k, v, *meant, lengths, starts), {"n": 7, "m": 6})
    out, lse = there(out), there(lse)
    pm.launch(program, *map(there, (bias, q, k, v)), out, lse, *map(there, (lengths, starts)))
    np.testing.assert_allclose(back(out), meant[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(back(lse), meant[1], rtol=1e-4, atol=1e-5)


def test_attention_without_keys_is_zero():
    program = of_attention(Form(Fused((), ((C, acc()),)), "f32", "f32", lse=True))
    out, lse = np.ones((1, 2, 3, 4), "f4"), np.ones((1, 2, 3), "f4")
    pm.launch(program, np.ones((1, 2, 3, 4), "f4"), *(np.ones((1, 1, 0, 4), "f4") for _ in "kv"), out, lse)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_a_schedule_is_lowered_for_a_record():
    p = Problem(64, 64, 64, fused=str(Fused((Operand("f32", "n"),), ((C, acc() + load(0, "f32")),))))
    target = config.target()
    s = schedule_choice.choose(p, target, 1).schedule
    (kernel,) = lower_program(of_product(p), replace(s, epilogue=""), target.isa(s.isa))
    assert kernel.operands == (("f32", False),)
    with pytest.raises(ScheduleError, match="multiplies"):
        lower_program(of_product(Problem(4, 4, 4, "f64")), s, target.isa(s.isa))


def test_what_a_launch_refuses():
    a, b, more, c = (np.ones(s, "f4") for s in ((4, 5), (2, 4, 6), 5, (2, 5, 6)))
    with pytest.raises(ValueError, match="4 arrays for 5"):
        pm.launch(TWO, a, b, more, c)
    with pytest.raises(ValueError, match="along m"):
        pm.launch(TWO, a, b, np.ones(6, "f4"), c, c.copy())
    with pytest.raises(ValueError, match="along bkn"):
        pm.launch(TWO, a, b[0], more, c, c.copy())
    with pytest.raises(ValueError, match="shares memory"):
        pm.launch(TWO, a, b, more, c, c)
    with pytest.raises(TypeError, match="float64"):
        pm.launch(TWO, a.astype(np.float64), b, more, c, c.copy())
    with pytest.raises(TypeError, match="list"):
        pm.launch(TWO, a, b, [1.0] * 5, c, c.copy())
    fixed = c.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        pm.launch(TWO, a, b, more, c, fixed)
    form = Form(Fused((), ((C, acc() * number(0)),)), "f32", "f32")
    x = [np.ones((1, 1, 4, 4), "f4") for _ in range(4)]
    with pytest.raises(ScheduleError, match="numbers"):
        pm.launch(of_attention(form), *x)
    windowed = Form(Fused((), ((C, acc()),)), "f32", "f32", Bounds(window=True))
    with pytest.raises(ScheduleError, match="window"):
        pm.launch(of_attention(windowed), *x)
    with pytest.raises(ScheduleError, match="along n"):
        pm.launch(of_attention(windowed._replace(bounds=Bounds()), "m"), *x)
    alone = BlockProgram("bmn", "k", tuple(Operand("f32", x) for x in ("mk", "kn", "bmn")), (
        (TileGemm(SUMS),), (TileTransfer(2, SUMS),)))  # fmt: skip
    with pytest.raises(ScheduleError, match="batch"):
        pm.launch(alone, a.T.copy(), b[0], c)


def test_results_need_not_be_dense():
    rng = np.random.default_rng(4)
    a, b, more = rng.random((9, 20), "f4"), rng.random((1, 9, 17), "f4"), rng.random(20, "f4")
    one, two = np.empty((1, 17, 20), "f4").transpose(0, 2, 1), np.empty((1, 20, 34), "f4")[..., ::2]
    pm.launch(TWO, a, b, more, one, two)
    np.testing.assert_allclose(one, a.T @ b + more[:, None], rtol=1e-5)
    np.testing.assert_allclose(two, 2 * (a.T @ b), rtol=1e-5)


def test_empty_sums_and_sums_of_integers_as_reals():
    one, two = np.empty((1, 5, 6), "f4"), np.empty((1, 5, 6), "f4")
    pm.launch(TWO, np.empty((0, 5), "f4"), np.empty((1, 0, 6), "f4"), np.arange(5, dtype="f4"), one, two)
    np.testing.assert_array_equal(one, np.broadcast_to(np.arange(5)[:, None], (1, 5, 6)))
    assert not two.any()
    program = of_product(Problem(7, 8, 9, "s8-s8-f32", fused=IDENTITY))
    rng = np.random.default_rng(5)
    a, b = rng.integers(-9, 9, (7, 9)).astype("i1"), rng.integers(-9, 9, (9, 8)).astype("i1")
    got = pm.launch(program, a, b, np.empty((7, 8), "f4"))
    np.testing.assert_array_equal(got, a.astype("i4") @ b.astype("i4"))


def test_kernels_of_records_are_lowered_once():
    program = of_attention(Form(Fused((), ((C, acc() * 0.25),)), "f32", "f32"))
    for queries in (40, 40, 35):  # of one class
        x = np.ones((1, 2, queries, 8), "f4")
        pm.launch(program, x, x, x, np.empty_like(x))
        if queries == 40:
            lowered = cpu_kernels.loaded_program.cache_info().misses
    assert cpu_kernels.loaded_program.cache_info().misses == lowered
