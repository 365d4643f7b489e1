"""The meaning of block programs, tile by tile, against sums and softmax in float64; and records of problems."""

from __future__ import annotations

import json
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from portmm.errors import ScheduleError
from portmm.ir.attention_program import Bounds, Form, attention_of, of_attention
from portmm.ir.block_meaning import run
from portmm.ir.block_program import BlockProgram, TileGemm, TileReduce, TileTransfer, of_rows
from portmm.ir.graph_reader import program_from_json
from portmm.ir.mugraph import program_to_json
from portmm.ir.product_program import of_product, product_of
from portmm.spec.dequantization import IDENTITY, Dequantization
from portmm.spec.elementwise import exp
from portmm.spec.epilogue import C, Fused, Operand, acc, contraction, index, load, number, reduction
from portmm.spec.epilogue import parse as parsed
from portmm.spec.expr_functions import select
from portmm.spec.problem import Problem

X = load(0, "f32")
TILES = [{}, {"m": 4, "n": 3, "k": 2}, {"m": 1, "n": 16, "k": 5}]


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16-bf16-f32", "s8-s8-s32", "u8-s8-f32"])
def test_products(rng, dtype, tiles):
    fused = Fused((Operand("f32", "n"), Operand("f32", "mn")), ((C, acc() * load(0, "f32") + load(1, "f32")),))
    plain = dtype in ("f64", "s8-s8-s32")
    p = Problem(7, 11, 9, dtype, 2, fused="" if plain else str(fused))
    types = [
        {"f32": "f4", "f64": "f8", "s8": "i1", "u8": "u1", "s32": "i4"}.get(x, ml_dtypes.bfloat16) for x in p.types
    ]
    a, b = rng.integers(0, 9, (2, 7, 9)).astype(types[0]), rng.integers(-9, 9, (2, 9, 11)).astype(types[1])
    scale, more, c = rng.random(11, "f4"), rng.random((7, 11), "f4"), np.zeros((2, 7, 11), types[2])
    want = a.astype("f8") @ b.astype("f8")
    run(of_product(p), (a, b, c) if plain else (a, b, c, scale, more), tiles)
    np.testing.assert_allclose(c, want if plain else want * scale + more, rtol=1e-5)


def test_texts_of_scales_are_those_of_their_expressions():
    for steps in product((False, True), repeat=4):
        how = Dequantization(*steps)
        assert how.text == str(Fused(how.operands, ((C, how.value()),)))
    assert str(Fused((), ((C, acc()),))) == IDENTITY


def test_zero_points_need_sums_of_columns(rng):
    words = Dequantization(a_zero=True, b_zero=True, bias=True)
    p = Problem(5, 6, 8, "u8-s8-f32", b="packed", family="s8x32k4s", fused=words.text)
    a, b = rng.integers(0, 255, (5, 8)).astype("u1"), rng.integers(-127, 127, (8, 6)).astype("i1")
    za, zb, bias = rng.integers(0, 9, 5), rng.integers(-9, 9, 6), rng.random(6, "f4")
    scale = rng.random(5, "f4"), rng.random(6, "f4")
    c = np.zeros((5, 6), "f4")
    shifted = a.astype(int) - za[:, None]
    given = {
        "a_scale": scale[0],
        "b_scale": scale[1],
        "bias": bias,
        "a_zero": -za,
        "a_sum": -shifted.sum(1),
        "b_zero": zb,
    }
    vectors = [given[x].astype("i4" if x in ("a_zero", "a_sum", "b_zero") else "f4") for x in words.names]
    run(of_product(p), (a, b, c, *vectors), {"m": 2, "k": 3})
    np.testing.assert_allclose(c, scale[0][:, None] * (shifted @ (b - zb)) * scale[1] + bias, rtol=1e-5)


@pytest.mark.parametrize("text", [
    "", "f32.n f32.mn s8.mn | acc; load 0; add 0 1; load 1; add 2 3 | C 4; 2 4", Dequantization(bias=True).text,
    Dequantization(a_zero=True, b_zero=True).text,
])  # fmt: skip
def test_records_of_problems_have_their_epilogues(text):
    whole = "column_sum" in text or "a_scale" in text or text.count("f32.m ") == 1
    p = Problem(4, 4, 4, "s8-s8-f32" if whole else "f32", b="packed", family="s8x32k4s", fused=text)
    x, fused = product_of(of_product(p)), parsed(text) if text else None
    if fused is None:
        assert x.plain
        return
    read = Fused(x.operands, tuple((C if i == 2 else i - 3, y) for i, y in x.results))
    assert str(read).split(" | ")[1:] == text.split(" | ")[1:]


def test_dynamic_scales_are_an_operand():
    p = Problem(4, 4, 4, "s8-s8-f32", source="f32", fused=Dequantization(dynamic=True).text)
    assert of_product(p).operands[-1] == Operand("f32", "m")


@pytest.mark.parametrize("tiles", TILES)
def test_rows(rng, tiles):
    weights = exp(X - reduction("max", X))
    program = of_rows(Fused((Operand("f32", "bmn"),) * 2, ((1, weights / reduction("add", weights)),)), "L1")
    x, y = rng.normal(size=(2, 6, 10)).astype("f4"), np.zeros((2, 6, 10), "f4")
    run(program, (x, y), tiles)
    want = np.exp(x.astype("f8"))
    np.testing.assert_allclose(y, want / want.sum(-1, keepdims=True), rtol=1e-5)


HOW = list(product((False, True), (False, True), (False, True)))


@pytest.mark.parametrize(("causal", "window", "more"), HOW)
@pytest.mark.parametrize("loop", ["n", "m"])
def test_attention(rng, causal, window, more, loop):
    """Grouped heads, masks, numbers of keys and positions of items; keys in tiles, a ragged last one included."""
    b, h, kv, m, n, d, e = 2, 4, 2, 5, 13, 3, 2
    form = Form(Fused((), ((C, acc() * number(0)),)), "f32", "f32", Bounds(causal, window), more, more, lse=True)
    q, k, v = (rng.normal(size=s).astype("f4") for s in ((b, h, m, d), (b, kv, n, d), (b, kv, n, e)))
    out, lse = np.full((b, h, m, e), np.nan, "f4"), np.full((b, h, m), np.nan, "f4")
    lengths, starts = np.array([13, 6], "i4"), np.array([8, 2], "i4")
    s = np.einsum("bhmd,bhnd->bhmn", q.astype("f8"), np.repeat(k, 2, 1)) * 0.5
    at = np.arange(m)[:, None] + (starts[:, None, None, None] if more else n - m)
    seen = np.ones((b, h, m, n), bool)
    seen &= (np.arange(n) <= at) if causal else True
    if window:
        seen &= (np.arange(n) > at - 4) & (causal | (np.arange(n) < at + 4))
    seen &= (np.arange(n) < lengths[:, None, None, None]) if more else True
    weights = np.where(seen, np.exp(s), 0)
    total = weights.sum(-1, keepdims=True)
    for tile in (1, 4, 13):
        program = of_attention(form, loop)
        run(
            program,
            (q, k, v, out, lse, *((lengths, starts) if more else ())),
            {"n": tile, "m": tile, "h": 3},
            [0.5],
            w=4,
        )
        with np.errstate(all="ignore"):
            want = np.where(total > 0, weights @ np.repeat(v, 2, 1) / total, 0)
            np.testing.assert_allclose(lse, np.log(total)[..., 0], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=1e-6)
    found = attention_of(program)
    assert (found.form, found.at, found.window) == (form, program_places(more), None)


def program_places(more):
    return (0, 1, 2, 3, 4, *((5, 6) if more else (None, None)))


def test_accumulators_are_rescaled_by_what_they_decay_with():
    operands = (Operand("f32", "mn"), Operand("f32", "m"))
    top = reduction("max", X)
    for value, fits in (
        (exp(X - top), True),
        (X * exp(X - top), True),
        (exp(X) - top, False),
        (exp(X - top * top), False),
    ):
        total = reduction("add", value)
        passes = (TileReduce(top), TileReduce(total, top)), (TileTransfer(1, total),)
        if fits:
            program = BlockProgram("m", "n", operands, passes)
            x, y = np.arange(12, dtype="f4").reshape(3, 4), np.zeros(3, "f4")
            run(program, (x, y), {"n": 3})
            weights = np.exp(x - x.max(1, keepdims=True))
            np.testing.assert_allclose(y, (weights * (x if value is X * exp(X - top) else 1)).sum(1), rtol=1e-5)
        else:
            with pytest.raises(ScheduleError, match="factor"):
                BlockProgram("m", "n", operands, passes)


def test_what_kernels_do_not_compute_is_refused():
    operands = (Operand("f32", "mk"), Operand("f32", "kn"), Operand("f32", "mn"))
    sums = contraction(load(0, "f32") * 2.0, load(1, "f32"), "k")
    program = BlockProgram("mn", "k", operands, ((TileGemm(sums),), (TileTransfer(2, sums),)))
    with pytest.raises(ScheduleError, match="one contraction"):
        product_of(program)
    with pytest.raises(ScheduleError, match="attention"):
        attention_of(program)
    with pytest.raises(ScheduleError, match="no contraction"):
        BlockProgram("mn", "k", operands, ((TileGemm(X),), (TileTransfer(2, X),)))


@pytest.mark.parametrize("loop", ["n", "m"])
def test_factors_of_scores_and_of_values_are_read_from_a_record(loop):
    """As a certificate is repeated, which has the record alone."""
    operands = (Operand("f32", "bhm"), Operand("f32", "bhn"))
    form = Form(Fused(operands, ((C, acc() * load(0, "f32")), (C, load(1, "f32")))), "f32", "f32")
    read = program_from_json(json.loads(json.dumps(program_to_json(of_attention(form, loop)))))
    assert attention_of(read).form == form


def test_masks_of_ones_own_are_part_of_the_score():
    causal = select(index("n") <= index("m"), acc(), float("-inf"))
    form = Form(Fused((), ((C, causal),)), "f32", "f32")
    assert attention_of(of_attention(form)).form == form
