"""Attention in the interpreter: on a tiny machine, in vectors and in tiles, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import test_amx
from machines import TINY, small
from runs import guarded
from test_attention import BF16, TOLERANCE, check, exact, operands

import portmm as pm
from portmm.codegen.lower import lower_program
from portmm.dispatch import cpu_kernels
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.ir.interpreter import run
from portmm.ops import attention_kernel
from portmm.schedule.cpu_attention import Geometry, attention_schedule
from portmm.spec.epilogue import C, Fused, acc, number, parse
from portmm.target.target import load_isa, load_target

pytestmark = pytest.mark.calls

QUICKLY = "fast"


def interpreted(target, dtype, shape, how, step, *, few=False):
    """The interpreter's result of a kernel."""
    x = operands(shape, dtype)
    b, h, kv, m, n, d, dv = shape
    scored = acc() * number(0)
    text = str(Fused((), ((C, scored),)))
    held = {"float32": "f32", "bfloat16": "bf16"}[np.dtype(dtype).name]
    isa, atom, real = cpu_kernels.attention_unit(held, parse(text), target, m)
    wide = Geometry(attention_schedule(isa, atom)).pv_n
    bounds = Bounds(how.get("causal", False), "window" in how)
    packs = not few and (atom.k_pack > 1 or atom.m > 1 or not (isa.spelling(atom, "load_mask", held) or dv % wide == 0))
    form = Form(parse(text), held, held, bounds, lse=True)
    unit = real if few else atom
    s = attention_schedule(isa, unit, packs=packs)
    (kernel,) = lower_program(of_attention(form, "n" if few else "m"), s, isa, unit)
    fields = dict.fromkeys("a_m a_k a_batch b_k b_n b_batch c_m c_n c_batch".split(), 0)  # noqa: SIM905 - reads as the struct
    fields |= {"m": m, "n": n, "k": d, "batch": b * h, "workers": 2, "a_m": h, "a_k": h // kv}
    fields |= {"b_k": how.get("window", n), "b_n": step, "c_m": n - m, "c_n": dv, "c_batch": 2 * step}
    out, lse = np.full((b, h, m, dv), 7, x[0].dtype), np.full((b, h, m), 7, np.float32)
    arrays = {"numbers": (np.float32([d**-0.5]), 0)}
    for i, y in enumerate((*x, out, lse[..., None])):
        arrays[f"x{i}"] = (y.reshape(-1), 0)
        for axis, stride in zip("bhmn", y.strides, strict=True):
            fields[f"x{i}_{axis}"] = stride // y.itemsize
    run(kernel, fields, arrays, shuffle=1)
    want = exact(*x, **how)
    tolerance = TOLERANCE[out.dtype.name]
    np.testing.assert_allclose(out.astype(np.float64), want[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want[1], rtol=1e-5, atol=2e-5)
    return atom.name, real.acc


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"causal": True, "window": 5}], ids=str)
def test_its_meaning_on_a_tiny_machine(how, few):
    interpreted(TINY, np.float32, (1, 2, 1, 5, 11, 3, 3), how, 4, few=few)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ["neon", "sse2", "avx512", "avx512bf16"])
def test_its_meaning_in_vectors(isa, dtype, few):
    dtype = BF16 if dtype == "bfloat16" else dtype
    machine = small(isa.removesuffix("bf16"))
    machine = replace(machine, isas=(load_isa(isa), *machine.isas)) if isa.endswith("bf16") else machine
    interpreted(machine, dtype, (1, 2, 1, 3, 15, 6, 5), {"causal": True}, 8, few=few)


TILED = [(1, 2, 1, 20, 70, 32, 40), (1, 1, 1, 70, 33, 64, 16), (2, 1, 1, 33, 130, 32, 33), (1, 2, 2, 65, 66, 32, 1)]
"""Shapes whose heads are whole steps of a tile."""


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"causal": True, "window": 5}, {"window": 40}], ids=str)
def test_its_meaning_in_tiles(how):
    for i, shape in enumerate(x for x in TILED if not how or x[3] <= x[4]):
        assert interpreted(small("amx_bf16"), BF16, shape, how, 32 * (1 + i % 2)) == ("amx_bf16", "f32")


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"causal": True, "window": 9}, {"lengths": [33, 0]}], ids=str)
def test_tiles_that_are_arrays(how, monkeypatch):
    """Kernels for tiles, built with tiles in C: heads of any size, operands beside pages that cannot be touched."""
    amx = [load_isa(x) for x in ("amx_bf16", "avx512")]
    if not test_amx.LINES_RUN:
        pytest.skip("lines are moved by AVX-512")
    machine = replace(load_target("sapphire_rapids"), isas=(amx[0], *(x for x in amx[0].below)))
    monkeypatch.setattr(cpu_kernels, "loaded", test_amx.shimmed)
    monkeypatch.setattr(attention_kernel.config, "target", lambda: machine)
    cpu_kernels.forget()
    for shape in [(2, 4, 2, 33, 70, 64, 64), (2, 2, 1, 70, 130, 40, 72), (2, 1, 1, 17, 37, 7, 5)]:
        x = [guarded(y.reshape(-1)).reshape(y.shape) for y in operands(shape, BF16)]
        want = exact(*x, **how)
        for item, most in enumerate(how.get("lengths", ())):
            x[1][item, :, most:] = x[2][item, :, most:] = np.nan
        check(*x, want, **how)
    cpu_kernels.forget()


@pytest.mark.parametrize("d", [1, 2, 3])
def test_operands_by_columns_with_short_heads(d):
    rng = np.random.default_rng(0)
    shapes = (2, 3, 20, d), (2, 3, 5, d), (2, 3, 5, 4)
    q, k, v = (rng.standard_normal(s).astype(BF16) for s in shapes)
    want = pm.attention(q, k, v).astype(np.float32)
    for x in (q, np.asfortranarray(q)):
        for y in (k, np.asfortranarray(k)):
            np.testing.assert_allclose(pm.attention(x, y, v).astype(np.float32), want, rtol=0.02, atol=0.02)
