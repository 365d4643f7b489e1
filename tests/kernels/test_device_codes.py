"""Weights of four bits on devices: few rows and many, every group, in both languages."""

from __future__ import annotations

from dataclasses import replace

import grid_cases
import numpy as np
import opencl_cpu
import pytest
from grid_cases import MACHINE, compiled, kernels_of

import portmm as pm
from portmm.dispatch.schedule_choice import choose
from portmm.errors import PackError
from portmm.ops import int4_words
from portmm.schedule.candidates import candidates
from portmm.schedule.text import varied
from portmm.spec.problem import Family, Problem
from portmm.target.target import load_target

CASES = (
    ("f32-u4-f32", 1, 32, 4, "stream", 1), ("bf16-u4-bf16", 3, 16, 2, "stream", 2),
    ("f16-u4-f32", 2, 0, 1, "stream", 1),
    ("f32-u4-f32", 20, 8, 4, "simt", 1), ("bf16-u4-bf16", 33, 64, 8, "simt", 2), ("f16-u4-f16", 9, 0, 1, "simt", 1),
)  # fmt: skip
"""Types, rows, the group, elements of A that lie aligned, the program, slices of k."""


def posed(dtype, m, n, k, group, **more):
    return Problem(m, n, k, dtype, b="codes", family=str(Family("u4", 1, 8, group=group)), **more)


@pytest.mark.parametrize("language", ["cuda", "opencl"])
@pytest.mark.parametrize("what", CASES, ids=lambda x: f"{x[4]}-{x[0]}-{x[2]}")
def test_kernels(what, language):
    dtype, m, group, vector, program, split = what
    wide = next(x for x in (32, 16, 8) if group % x == 0)
    found = [s for s in candidates(posed(dtype, m, 33, 500, group), MACHINE, (vector, wide, 1)) if s.program == program]
    s = min(found, key=lambda s: (s.parallel.split, s.mr * s.nr * s.tiles[0].k))
    s = varied(s, split=split)
    kernels = kernels_of(s)
    rng = np.random.default_rng(0)
    for i, (n, k, batch) in enumerate([(33, 8 * 13, 1), (5, 32 * 20, 2), (1, 8, 1)]):
        p = posed(dtype, (m, m + 3, 1)[i], n, k, group, batch=batch)
        w = pm.quantize(rng.standard_normal((k, n)).astype(np.float32), group=group or None, symmetric=i % 2 == 0)
        # The operands of an ordinary product, of which the weight is replaced.
        plain = Problem(p.m, n, k, dtype.replace("u4", "f32"), batch, b="col")
        case = grid_cases.case(plain, s.vectors, i)
        words = int4_words._words(w.codes)
        case = replace(
            case, b=words.ravel(), b_offset=0, fields=case.fields | {"words": words.shape[1], "groups": w.groups}
        )
        c = grid_cases.call(kernels, s, case)
        for name, x in (("scales", w.scales), ("offsets", w.offsets)):
            c.memory[name] = (np.ascontiguousarray(x.T).ravel(), 0)
        named = {name: name for name in c.memory}
        numbers = case.fields | named | ({"c_m": n, "c_batch": p.m * n} if split > 1 else {})
        last = case.fields | named | {"work_batch": p.m * n}
        c = replace(
            c, launches=tuple(grid_cases.bind(x, None, v) for x, v in zip(kernels, (numbers, last), strict=False))
        )
        if not grid_cases.same_as_before(c, language):
            on = grid_cases.in_shim if language == "cuda" else grid_cases.on_opencl
            check(case, w, on(c, compiled(kernels, language))[0])


def check(case, w, got):
    """Against the product with the weight as floats."""
    p, f = case.problem, case.fields
    items = np.arange(p.batch)[:, None, None]
    rows = np.arange(p.m)[None, :, None]
    a = case.a[case.a_offset + items * f["a_batch"] + rows * f["a_m"] + np.arange(p.k) * f["a_k"]].astype(np.float64)
    c = got[case.c.offset + items * f["c_batch"] + rows * f["c_m"] + np.arange(p.n) * f["c_n"]].astype(np.float64)
    weight = pm.dequantize(w, np.float64)
    eps = {"f32": 1e-6, "f16": 2e-3, "bf16": 1e-2}[p.types[2]]
    bound = (np.abs(a) @ (np.abs(weight) + np.abs(w.offsets).max())) * (eps / 4 + 2e-6) + np.abs(a @ weight) * eps
    assert (np.abs(c - a @ weight) <= bound + 1e-6).all(), p


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("group", [32, 8, None])
def test_calls(dtype, group):
    _, queue = opencl_cpu.opencl_device()
    from pyopencl import array

    rng = np.random.default_rng(1)
    weight = pm.quantize(rng.standard_normal((200, 50)).astype(np.float32), group=group)
    dense = pm.dequantize(weight, np.float64)
    like = array.zeros(queue, 1, np.float32)
    there = int4_words.to_device(weight, like)
    assert there.nbytes < 4 * 200 * 50 / 2
    for shape in ((1, 200), (200,), (5, 200), (40, 200), (2, 3, 200), (0, 200)):
        a = rng.standard_normal(shape).astype(dtype)
        got = pm.matmul(array.to_device(queue, a), there)
        assert (got.dtype, got.shape) == (a.dtype, (*shape[:-1], 50))
        if got.size:
            np.testing.assert_allclose(
                got.get(), a.astype(np.float64) @ dense, atol=0.3 if dtype == np.float16 else 1e-3
            )
    out = array.zeros(queue, (3, 50), np.float32)
    a = rng.standard_normal((3, 200)).astype(dtype)
    assert pm.matmul(array.to_device(queue, a), there, dtype=np.float32).dtype == np.float32
    assert pm.matmul(array.to_device(queue, a), there, out=out) is out
    np.testing.assert_allclose(out.get(), a.astype(np.float64) @ dense, atol=1e-3)


def test_what_cannot_be():
    _, queue = opencl_cpu.opencl_device()
    from pyopencl import array

    like = array.zeros(queue, (2, 64), np.float32)
    w = np.ones((64, 8), np.float32)
    with pytest.raises(PackError, match="8 bits"):
        int4_words.to_device(pm.quantize(w, bits=8), like)
    with pytest.raises(PackError, match="groups of 12"):
        int4_words.to_device(pm.quantize(w, group=12), like)
    with pytest.raises(TypeError, match="host's memory"):
        int4_words.to_device(pm.quantize(w), w)
    there = int4_words.to_device(pm.quantize(w), like)
    with pytest.raises(TypeError, match="host's memory"):
        pm.matmul(w.T, there)
    with pytest.raises(TypeError, match="s32"):
        pm.matmul(array.zeros(queue, (2, 64), np.int32), there)
    with pytest.raises(ValueError, match="cannot multiply"):
        pm.matmul(array.zeros(queue, (2, 63), np.float32), there)


def test_decode_on_a_gpu_streams_and_prefill_tiles():
    h200 = load_target("h200")
    for m, program in ((1, "stream"), (512, "wgmma_int4")):
        assert choose(posed("bf16-u4-bf16", m, 4096, 4096, 128), h200, vectors=(8, 32, 8)).schedule.program == program
