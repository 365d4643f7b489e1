"""Operands that are laid out anew, so that units which multiply fragments can load them."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from cuda_shim import compile as compiled

import portmm as pm
from portmm.arrays import grid_call
from portmm.codegen.lower import lower_lines
from portmm.dispatch import schedule_choice
from portmm.dispatch.machine import source
from portmm.spec.problem import Problem
from portmm.target.target import load_isa, load_target

QUICKLY = "fast"


@pytest.fixture
def tensor_cores(monkeypatch):
    """Small products, too, by units that multiply fragments, in tiles that the shim compiles fast."""
    every = schedule_choice.candidates

    def some(*given):
        return [s for s in every(*given) if s.program == "mma" and s.mr * s.nr <= 16 and s.parallel.split == 1]

    monkeypatch.setattr(schedule_choice, "candidates", some)


KINDS = {"u8": np.uint8, "f16": np.uint16, "s32": np.int32}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("along", ["row", "k"])
def test_copies(kind, along):
    """Whatever lies beside elements, and rows that are no whole tiles."""
    kernel = lower_lines(load_isa("simt"), kind, along)
    code = compiled(source(kernel, "cuda"), kernel.name)
    size = np.dtype(KINDS[kind]).itemsize
    for items, m, k in ((1, 33, 131), (2, 5, 7), (3, 32, 128), (1, 1, 1), (2, 70, 40)):
        x = np.random.default_rng(m).integers(1, 250, (items, m, k)).astype(KINDS[kind])
        held = np.ascontiguousarray(x if along == "k" else x.transpose(0, 2, 1))
        line = -(-k * size // 16) * 16 // size
        to = np.full((items, m, line), 251, KINDS[kind])
        steps = (k, 1) if along == "k" else (1, m)
        each = 4 // size
        blocks = -(-m // 32) * -(-line // (32 * each)) * items
        ints = [("int", v) for v in (m, k, line, items)]
        longs = [("long", v) for v in (*steps, m * k)]
        more = [("long", line), ("long", m * line)]
        code.launch_in_orders((blocks, 1, 1), kernel.threads, [*ints, held, *longs, to, *more])
        np.testing.assert_array_equal(to[..., :k], x)
        assert not to[..., k:].any()


def test_copies_may_be_large():
    """Rows times elements of a line may be more than 2**31."""
    text = source(lower_lines(load_isa("simt"), "u8", "k"), "cuda")
    wide = set(re.findall(r"const long (\w+)", text))
    steps = re.findall(r"\b(?:row|item) \* (\w+)", text)
    assert set(steps) == {"x_m", "x_batch", "to_m", "to_batch"} <= wide


def codes(*shape):
    return np.random.default_rng(list(shape)).integers(-128, 128, shape).astype(np.int8)


SHAPES = (((40, 70), (70, 24)), ((2, 17, 64), (64, 33)), ((3, 9, 50), (3, 50, 40)))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.usefixtures("tensor_cores")
def test_bytes_by_rows(cupy, monkeypatch, shapes):
    """B by rows, whose bytes are not loaded transposed, and lines that are not aligned."""
    monkeypatch.setattr(grid_call, "faster", lambda *_: ("ab", 0.0))
    a, b = (codes(*x) for x in shapes)
    c = pm.matmul(cupy.array(a), cupy.array(b))
    np.testing.assert_array_equal(c.get(), a.astype(np.int32) @ b.astype(np.int32))
    names = [x[0] for x in cupy.launches]
    assert names[:2] in (["portmm_lines_u8_k", "portmm_lines_u8_row"], ["portmm_lines_u8_row", "portmm_lines_u8_k"])
    assert "portmm_mma_s32_s8_s8" in names[2]


@pytest.mark.usefixtures("tensor_cores")
def test_any_strides_end_in_expressions(cupy, monkeypatch):
    monkeypatch.setattr(grid_call, "faster", lambda *_: ("ab", 0.0))
    a = np.random.default_rng(0).standard_normal((20, 60)).astype(ml_dtypes.bfloat16)
    b = np.random.default_rng(1).standard_normal((30, 45)).astype(ml_dtypes.bfloat16)
    bias = cupy.array(np.arange(45, dtype=np.float32))
    c = pm.matmul(cupy.array(a)[:, ::2], cupy.array(b), epilogue=lambda acc, i: acc + bias[i.n])
    want = a[:, ::2].astype(np.float32) @ b.astype(np.float32) + np.arange(45)
    np.testing.assert_allclose(c.get().astype(np.float32), want, rtol=2**-7, atol=2**-6)
    assert cupy.launches[0][0].startswith("portmm_lines_f16_")
    assert "portmm_mma_" in cupy.launches[-1][0]


def test_large_products_are_worth_a_copy():
    target = load_target("a100")
    large = Problem(4096, 4096, 4096, "s8-s8-s32")
    sides, seconds = grid_call.faster(large, target, (16, 16, 4))
    assert (sides, 0 < seconds < 1e-3) == ("b", True)
    assert grid_call.faster(Problem(16, 64, 64, "s8-s8-s32"), target, (16, 16, 4)) == ("", 0.0)
    odd = Problem(4095, 4097, 4099, "bf16")
    assert grid_call.faster(odd, target, (1, 1, 1))[0] == "ab"
    assert grid_call.faster(large, load_target("v100"), (16, 16, 4))[0] == ""
    assert grid_call.faster(Problem(4096, 4096, 4096, "s8-s8-s32", b="col"), target, (16, 16, 4))[0] == ""
    strided = Problem(4096, 4096, 4096, "f16", a="any", b="col")
    assert grid_call.faster(strided, target, (1, 8, 8))[0] == "a"


def test_explanations_say_so(cupy):
    a, b = (cupy.empty((2048, 2048), np.int8) for _ in range(2))
    found = pm.explain(a, b)
    assert "first copied, contiguous along k" in found.notes[0]
    assert found.schedule.program in ("mma", "wgmma")
