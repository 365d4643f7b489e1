"""Weights of four bits on tensor cores: kernels in the shim, calls end to end, and what is chosen."""

from __future__ import annotations

from dataclasses import replace

import emulated_cuda
import grid_cases
import ml_dtypes
import numpy as np
import pytest
from grid_cases import compiled, in_shim, kernels_of
from test_device_codes import check, posed
from test_grid_compiles import most_registers, nvrtc

import portmm as pm
from portmm.arrays import grid_call
from portmm.build.nvrtc import compile_cuda
from portmm.codegen.lower import lower_grid
from portmm.dispatch.machine import source
from portmm.dispatch.schedule_choice import choose
from portmm.ops import int4_words
from portmm.schedule.candidates import candidates
from portmm.schedule.gpu_w4a16 import PROGRAMS
from portmm.schedule.legality import shared_bytes
from portmm.schedule.text import varied
from portmm.spec.epilogue import C, Fused, Operand, acc, load
from portmm.spec.expr import apply
from portmm.spec.problem import Problem
from portmm.target.target import load_target
from portmm.util import memo

GPU = load_target("a100")
CASES = (
    ("bf16-u4-bf16", 5, 128, 8, 2, (8, 16, 512), 1, 3), ("f16-u4-f32", 20, 0, 8, 1, (32, 64, 256), 1, 2),
    ("bf16-u4-f32", 33, 32, 2, 2, (64, 64, 128), 1, 4), ("f16-u4-f16", 16, 64, 4, 2, (16, 64, 256), 2, 3),
    ("bf16-u4-bf16", 70, 96, 8, 1, (128, 128, 128), 1, 2), ("bf16-u4-bf16", 140, 32, 8, 8, (128, 128, 32), 1, 3),
    ("f16-u4-f16", 65, 0, 2, 1, (64, 256, 64), 2, 4), ("f16-u4-f16", 70, 96, 8, 4, (64, 256, 64), 1, 3),
)  # fmt: skip
"""Types, rows, the group, elements of A and of C that lie aligned, the block, slices of k, stages."""


def coded(p, target=GPU, vector=8, stored=2):
    """Schedules for tensor cores."""
    return [s for s in candidates(p, target, (vector, 32, stored)) if s.program in PROGRAMS]


def posed_call(kernels, s, p, seed, group):
    """A call of a schedule's kernels, and the weight."""
    rng = np.random.default_rng(seed)
    w = pm.quantize(rng.standard_normal((p.k, p.n)).astype(np.float32), group=group or None, symmetric=seed % 2 == 0)
    # The operands of an ordinary product, of which the weight is replaced.
    plain = Problem(p.m, p.n, p.k, p.dtype.replace("u4", "f32"), p.batch, b="col")
    case = grid_cases.case(plain, s.vectors, seed)
    words = int4_words._words(w.codes)
    fields = case.fields | {"words": words.shape[1], "groups": w.groups}
    case = replace(case, b=words.ravel(), b_offset=0, fields=fields)
    c = grid_cases.call(kernels, s, case)
    for name, x in (("scales", w.scales), ("offsets", w.offsets)):
        c.memory[name] = (np.ascontiguousarray(x.T).ravel(), 0)
    named = case.fields | {name: name for name in c.memory}
    numbers = (
        named | ({"c_m": p.n, "c_batch": p.m * p.n} if s.slices else {}),
        named | {"work_batch": p.m * p.n},
    )
    launches = (grid_cases.bind(x, None, v) for x, v in zip(kernels, numbers, strict=False))
    return replace(c, launches=tuple(launches)), case, w


@pytest.mark.parametrize("what", CASES, ids=lambda x: f"{x[0]}-{x[2]}-{x[5][0]}x{x[5][2]}")
def test_kernels(what):
    dtype, m, group, vector, stored, block, split, stages = what
    deep = 4 * block[2] * split
    found = coded(posed(dtype, m, 33, deep, group), vector=vector, stored=stored)
    s = next(s for s in found if (s.block.m, s.block.n, s.block.k) == block)
    s = varied(s, split=split, stages=stages, resident=0)
    kernels = kernels_of(s, GPU)
    for i, (rows, n, k, batch) in enumerate([(m, 33, deep // 2 + 8 * 13, 1), (m + 3, 5, 32 * 5, 2), (1, 2, 8, 1)]):
        p = posed(dtype, rows, -(-n // s.vectors[2]) * s.vectors[2], k, group, batch=batch)
        c, case, w = posed_call(kernels, s, p, i, group)
        if not grid_cases.same_as_before(c, "cuda"):
            check(case, w, in_shim(c, compiled(kernels, "cuda"), grid_cases.ORDERS[:2])[0])


@pytest.fixture
def device(monkeypatch):
    memo.forget_all()
    yield emulated_cuda.install(monkeypatch)
    memo.forget_all()


def near(got, want, eps):
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=eps, atol=eps * np.abs(want).max())


@pytest.mark.parametrize(("dtype", "group", "eps"), [(np.float16, 32, 2e-3), (ml_dtypes.bfloat16, None, 1e-2)])
def test_calls(device, dtype, group, eps):
    rng = np.random.default_rng(1)
    w = pm.quantize(rng.standard_normal((200, 48)).astype(np.float32), group=group)
    dense = pm.dequantize(w, np.float64)
    there = pm.pack(w, like=device.array(np.zeros(1, dtype)))
    bias = rng.standard_normal(48).astype(np.float32)
    given = device.array(bias)
    for shape in ((9, 200), (3, 5, 200), (130, 200)):
        a = rng.standard_normal(shape).astype(dtype)
        want, left = a.astype(np.float64) @ dense, device.array(a)
        near(pm.matmul(left, there).get(), want, eps)
        got = pm.matmul(left, there, epilogue=lambda acc, i: pm.relu(acc + given[i.n]))
        assert (got.dtype, got.shape) == (a.dtype, want.shape)
        near(got.get(), np.maximum(want + bias, 0), eps)
    names = {name for name, *_ in device.launches}
    assert all(any(x in name for x in ("_coded_", "_dequant_", "_slices_")) for name in names), names
    a = rng.standard_normal((12, 200)).astype(dtype)
    want, left = a.astype(np.float64) @ dense, device.array(a)
    both = pm.matmul(left, there, dtype=np.float32, epilogue=lambda acc: (acc * 2, acc))
    near(both[0].get(), 2 * want, eps / 8)
    near(both[1].get(), want, eps / 8)
    normal = pm.matmul(left, there, dtype=np.float32, epilogue=lambda acc: acc - pm.max(acc))
    near(normal.get(), want - want.max(-1, keepdims=True), eps)
    near(pm.matmul(left, there, prologue_a=lambda a: a * 2).get(), 2 * want, eps)
    plan = pm.plan(left, there)
    near(plan(left).get(), want, eps)
    out = device.empty((12, 48), np.float32)
    assert pm.plan(left, there, out)(left, out) is out
    near(out.get(), want, eps / 8)
    assert pm.explain(left, there, epilogue=lambda acc: acc + 1).schedule.program == "coded"
    with pytest.raises(ValueError, match="the plan takes"):
        plan(device.array(a[:3]))
    with pytest.raises(TypeError, match="prologue_b"):
        pm.matmul(left, there, prologue_b=lambda b: b)


ENDING = str(
    Fused(
        (Operand("bf16", "n"), Operand("bf16", "bmn")),
        ((C, apply("max", acc() + load(0, "bf16"), 0.0) + load(1, "bf16")),),
    )
)
PROBLEMS = (
    ("a100", posed("bf16-u4-bf16", 8, 4096, 4096, 128)), ("a100", posed("f16-u4-f16", 600, 4096, 4096, 128)),
    ("a10g", posed("bf16-u4-bf16", 40, 4096, 4096, 64)), ("l4", posed("f16-u4-f32", 300, 4096, 4096, 32)),
    ("h200", posed("bf16-u4-bf16", 16, 14336, 4096, 0)), ("h200", posed("bf16-u4-bf16", 2048, 14336, 4096, 32)),
    ("h200", posed("bf16-u4-bf16", 128, 4096, 14336, 64, fused=ENDING)),
    ("rtx_pro_6000", posed("bf16-u4-bf16", 20, 4096, 4096, 32)),
    ("rtx_pro_6000", posed("f16-u4-f16", 1000, 4096, 4096, 128)),
)  # fmt: skip


@pytest.mark.rest("NVRTC")
@pytest.mark.parametrize("what", PROBLEMS, ids=lambda x: f"{x[0]}-{x[1].m}")
def test_what_is_chosen_compiles(what):
    nvrtc()
    target, p = load_target(what[0]), what[1]
    s = choose(p, target, vectors=(8, 32, 8)).schedule
    assert s.program in PROGRAMS
    kernel = lower_grid(s, target.isa(s.isa))[0]
    assert kernel.shared_bytes == shared_bytes(s)
    made = compile_cuda(source(kernel, "cuda"), kernel.name, target.device.architecture)
    print(f"{kernel.name}: {made.registers} registers, {made.seconds:.2f} s; {s}")
    assert (made.spills, made.registers <= most_registers(s, target)) == (0, True), (made.registers, s)


@pytest.mark.thin(4)
@pytest.mark.parametrize(("chip", "most"), [("h200", 16), ("a100", 32)])
@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192)], ids=str)
def test_codes_are_predicted_to_be_faster(chip, most, shape):
    """Than floats of 16 bits, of few rows: on an H200 1.6, 1.0 to 1.2 and 1.1 were measured of 1, 4 and 16 rows."""
    target = load_target(chip)
    for m, least in [x for x in ((1, 1.6), (4, 1.3), (16, 1.05), (32, 1.0)) if x[0] <= most]:
        coded_ = choose(posed("bf16-u4-bf16", m, *shape, 128), target, vectors=(8, 32, 8)).cost
        floats = choose(Problem(m, *shape, "bf16", b="col"), target, vectors=(8, 8, 8)).cost
        assert floats.seconds > least * coded_.seconds, (m, floats.seconds / coded_.seconds)
        assert {"dequantising", "instructions"} & set(coded_.overlapped) or m <= 4


@pytest.mark.parametrize(("dtype", "group", "eps"), [(np.float16, 32, 2e-3), (ml_dtypes.bfloat16, None, 1e-2)])
def test_floats_that_are_made_first(device, monkeypatch, dtype, group, eps):
    """Of the whole weight, with rows of k that are no multiple of a word's, before a product of floats."""
    monkeypatch.setattr(grid_call, "_as_floats", lambda *_: ("b", 0.0))
    rng = np.random.default_rng(2)
    for k, n, m in ((224, 72, 40), (200, 48, 130)):
        w = pm.quantize(
            rng.standard_normal((k, n)).astype(np.float32), group=group if group and k % group == 0 else None
        )
        a, bias = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal(n).astype(np.float32)
        there, given = pm.pack(w, like=device.array(np.zeros(1, dtype))), device.array(bias)
        want = a.astype(np.float64) @ pm.dequantize(w, np.float64)
        near(pm.matmul(device.array(a), there).get(), want, eps)
        assert any("int4_floats" in name for name, *_ in device.launches)
        near(pm.matmul(device.array(a), there, epilogue=lambda acc, i, x=given: acc + x[i.n]).get(), want + bias, eps)


def test_floats_are_made_first_where_rows_are_many():
    """And warpgroups multiply them, if the result has as few bits."""
    of = lambda m, dtype="bf16-u4-bf16", chip="h200": grid_call.faster(  # noqa: E731
        posed(dtype, m, 4096, 4096, 128), load_target(chip), (8, 32, 8)
    )[0]
    assert [of(m) for m in (1, 16, 64, 512, 8192)] == ["", "", "", "", "b"]
    assert [of(8192, "bf16-u4-f32"), of(8192, chip="a100"), of(8192, "f16-u4-f16")] == ["", "", "b"]
