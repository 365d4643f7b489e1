"""Kernels that are lowered from a record compute what the record means: loops of a host, and threads of a device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from machines import TINY

from portmm.codegen.lower import lower_program
from portmm.ir import block_meaning
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.ir.interpreter import run
from portmm.ir.product_program import of_product
from portmm.ir.thread_interpreter import run_grid
from portmm.schedule import gpu_attention_choice
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_attention import attention_schedule
from portmm.schedule.gpu_attention import AttentionSizes
from portmm.spec.epilogue import C, Fused, Operand, acc, load
from portmm.spec.problem import Problem
from portmm.target.target import load_isa, load_target

M, N, K = 7, 12, 9
FUSED = Fused((Operand("f32", "n"), Operand("f32", "mn")), ((C, acc() * load(0, "f32")), (1, acc() - 1.0)))


@pytest.fixture
def product():
    """A record, its arrays, and the arguments of its kernels."""
    rng = np.random.default_rng(0)
    p = Problem(M, N, K, fused=str(FUSED))
    a, b, scale = rng.random((M, K), "f4"), rng.random((K, N), "f4"), rng.random(N, "f4")
    c, more = np.full((M, N), np.nan, "f4"), np.full((M, N), np.nan, "f4")
    want = [c.copy(), more.copy()]
    block_meaning.run(of_product(p), (a, b, want[0], scale, want[1]), {"m": 2, "n": 5, "k": 4})
    numbers = {
        "m": M,
        "n": N,
        "k": K,
        "batch": 1,
        "workers": 2,
        "a_m": K,
        "a_k": 1,
        "b_k": N,
        "b_n": 1,
        "c_m": N,
        "c_n": 1,
    }
    numbers |= dict.fromkeys(("a_batch", "b_batch", "c_batch", "x0_b", "x0_m", "x1_b"), 0) | {
        "x0_n": 1,
        "x1_m": N,
        "x1_n": 1,
    }
    numbers["rows"] = M
    return p, {"a": a, "b": b, "c": c, "x0": scale, "x1": more}, numbers, want


def test_products_of_a_host(product):
    p, arrays, numbers, want = product
    isa = TINY.isas[0]
    schedules = [s for s in candidates(p, TINY) if not s.on_device]
    for s in schedules[:: max(1, len(schedules) // 12)]:
        (kernel,) = lower_program(of_product(p), replace(s, epilogue=""), isa)
        for x in ("c", "x1"):
            arrays[x][...] = np.nan
        run(kernel, numbers, {name: (x.ravel(), 0) for name, x in arrays.items()}, shuffle=1)
        np.testing.assert_allclose(arrays["c"], want[0], rtol=1e-5)
        np.testing.assert_allclose(arrays["x1"], want[1], rtol=1e-5)


def test_products_of_threads(product):
    p, arrays, numbers, want = product
    listed = candidates(p, load_target("h100"), (1, 1, 1))
    names = {"x0": "x0_all", "x1": "x1_all"}
    for program in ("direct", "stream", "simt"):
        s = next(x for x in listed if x.program == program and x.parallel.split == 1)
        for x in ("c", "x1"):
            arrays[x][...] = np.nan
        (kernel,) = lower_program(of_product(p), replace(s, epilogue=""), load_isa(s.isa))
        run_grid(kernel, numbers, {names.get(name, name): (x.ravel(), 0) for name, x in arrays.items()})
        np.testing.assert_allclose(arrays["c"], want[0], rtol=1e-5)
        np.testing.assert_allclose(arrays["x1"], want[1], rtol=1e-5)


@pytest.mark.parametrize("loop", ["n", "m"])
def test_attention_of_a_host(loop):
    """With lanes of keys, and of queries."""
    b, h, kv, m, n, d, e, step = 2, 4, 2, 5, 11, 3, 2, 4
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=s).astype("f4") for s in ((b, h, m, d), (b, kv, n, d), (b, kv, n, e)))
    out, lse = np.full((b, h, m, e), np.nan, "f4"), np.full((b, h, m), np.nan, "f4")
    want = [out.copy(), lse.copy()]
    program = of_attention(Form(Fused((), ((C, acc() * 0.5),)), "f32", "f32", Bounds(causal=True), lse=True), loop)
    block_meaning.run(program, (q, k, v, *want), {"n": 4, "m": 3})
    isa = TINY.isas[0]
    atom = isa.atom("f32")
    (kernel,) = lower_program(program, attention_schedule(isa, atom, packs=loop == "m"), isa, atom)
    fields = dict.fromkeys("a_batch b_batch b_k".split(), 0)  # noqa: SIM905
    fields |= {"m": m, "n": n, "k": d, "batch": b * h, "workers": 2, "a_m": h, "a_k": h // kv}
    fields |= {"b_n": step, "c_m": n - m, "c_n": e, "c_batch": 2 * step}
    arrays = {}
    for i, x in enumerate((q, k, v, out, lse[..., None])):
        arrays[f"x{i}"] = (x.reshape(-1), 0)
        fields |= {f"x{i}_{axis}": s // x.itemsize for axis, s in zip("bhmn", x.strides, strict=True)}
    run(kernel, fields, arrays, shuffle=1)
    np.testing.assert_allclose(out, want[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(lse, want[1], rtol=1e-4, atol=1e-6)


def test_attention_of_threads():
    b, h, kv, m, n, d, e = 1, 2, 1, 5, 11, 4, 4
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=s).astype("f4") for s in ((b, h, m, d), (b, kv, n, d), (b, kv, n, e)))
    out, lse = np.full((b, h, m, e), np.nan, "f4"), np.full((b, h, m), np.nan, "f4")
    want = [out.copy(), lse.copy()]
    program = of_attention(Form(Fused((), ((C, acc() * 0.5),)), "f32", "f32", Bounds(causal=True), lse=True))
    block_meaning.run(program, (q, k, v, *want), {"n": 4, "m": 3})
    target = load_target("h100")
    asked = AttentionSizes("f32", d, e, m, b * h, h // kv, n, (1,) * 4, "")
    s = next(x for x in gpu_attention_choice.choices(asked, target) if x.parallel.over != "keys")
    (kernel,) = lower_program(program, s, *gpu_attention_choice.unit_of(s, target))
    numbers = {"m": m, "n": n, "heads": h, "group": h // kv, "few": kv, "items": b, "offset": n - m, "window": 0}
    for name, x, axes in (("q", q, "bhmd"), ("k", k, "bhnd"), ("v", v, "bhnd"), ("o", out, "bhmd")):
        numbers |= {f"{name}_{axis}": step // 4 for axis, step in zip(axes, x.strides, strict=True)}
    arrays = {name: (x.reshape(-1), 0) for name, x in (("q", q), ("k", k), ("v", v), ("o", out), ("lse", lse))}
    run_grid(kernel, numbers, arrays)
    np.testing.assert_allclose(out, want[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(lse, want[1], rtol=1e-4, atol=1e-6)
