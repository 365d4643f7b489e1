"""Attention by warpgroups, emulated, against float64; its schedules; and what NVIDIA's compiler makes of it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import opencl_cpu
import pytest
from test_attention import TOLERANCE, exact, operands
from test_grid_attention import SCALED, asked, check, in_shim

import portmm as pm
from portmm.build import nvrtc
from portmm.codegen import cuda
from portmm.codegen.lower import lower_program
from portmm.errors import NoCompilerError
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.schedule import gpu_attention_choice as choice
from portmm.schedule import gpu_wgmma_attention as warpgroups
from portmm.schedule.gpu_wgmma_attention import WarpgroupTiling, schedule_of
from portmm.schedule.text import parse, spell
from portmm.target.target import load_target

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
H100 = load_target("h100")


# Items, heads, heads of keys, queries, keys, and elements of heads of K and V.
SHAPES = [
    ((1, 1, 1, 17, 1, 64, 64), F16, {}),
    ((1, 2, 1, 150, 200, 64, 64), BF16, {"causal": True}),
    ((1, 1, 1, 70, 300, 128, 128), F16, {"window": 40}),
    ((2, 2, 2, 129, 65, 64, 64), F16, {"causal": True}),  # the first queries see nothing
    ((1, 1, 1, 40, 90, 192, 192), BF16, {"scale": -0.3}),
]


@pytest.mark.thin(2)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_it_is_attention(cupy, case):
    shape, dtype, how = case
    x = operands(shape, dtype)
    check(cupy, x, exact(*x, **how), **how)
    assert all("wgmma" in name for name, *_ in cupy.launches)


def test_heads_that_items_share_and_strides_between(cupy):
    """Heads of two items that are one, and rows of all heads side by side."""
    q, k, v = operands((2, 4, 2, 50, 80, 64, 64), F16)
    k, v = (np.broadcast_to(y[:1], y.shape) for y in (k, v))
    want = exact(q, k, v, causal=True)[0]
    there = [cupy.array(np.ascontiguousarray(y.swapaxes(1, 2))).transpose((0, 2, 1, 3)) for y in (q, k, v)]
    got = pm.attention(*there, causal=True).get()
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=TOLERANCE["float16"], atol=TOLERANCE["float16"])
    assert all("wgmma" in name for name, *_ in cupy.launches)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_arrays_that_run_backwards_are_not_for_the_copy_engine(cupy, axis):
    x = operands((2, 2, 2, 40, 70, 64, 64), F16)
    back = tuple(slice(None, None, -1 if i == axis else 1) for i in range(4))
    want = exact(*(y[back] for y in x))[0]
    got = pm.attention(*(cupy.array(y)[back] for y in x)).get()
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=TOLERANCE["float16"], atol=TOLERANCE["float16"])
    assert not any("wgmma" in name for name, *_ in cupy.launches)


def test_what_lies_behind_the_end_is_not_looked_at(cupy):
    q, k, v = operands((2, 1, 1, 64, 200, 64, 64), F16)
    lengths = np.array([200, 77], np.int32)
    clean = q, k.copy(), v.copy()
    k[1, :, 77:], v[1, :, 77::2], v[1, :, 78::2] = np.nan, np.inf, np.nan
    want = exact(*clean, lengths=lengths)
    check(cupy, (q, k, v), want, lengths=cupy.array(lengths))
    k[:, :, 150:], v[:, :, 150:] = np.nan, np.nan
    clean[1][1, :, 77:] = clean[2][1, :, 77:] = 0
    check(cupy, (q[:1], k[:1], v[:1]), exact(*(x[:1] for x in clean), lengths=np.array([100])), lengths=100)
    assert all("wgmma" in name for name, *_ in cupy.launches)


ORDERS = [
    ({}, Bounds(causal=True)),
    ({"blocks": 1, "pingpong": False}, Bounds(window=True)),
    ({"groups": 3}, Bounds()),
    ({"blocks": 3, "groups": 3, "stages": 4}, Bounds(causal=True)),
    ({"blocks": 5, "stages": 3, "pingpong": False}, Bounds()),
    ({"blocks": 99}, Bounds(causal=True)),
]


@pytest.mark.thin(2)
@pytest.mark.parametrize("case", ORDERS, ids=str)
def test_tiles_in_every_order_of_threads(case):
    """Blocks with several tiles of queries, in turns or as a counter has them, and some with none."""
    how, bounds = case
    more = dict(how)
    s = schedule_of("bf16", 64, 32, more.pop("blocks", 2), **more)
    x = operands((1, 3, 1, 290, 110, 64, 64), BF16)
    form = Form(SCALED, "bf16", "bf16", bounds, lse=True)
    got, lse = in_shim(form, s, x, 110, warpgroups.unit("bf16", H100))
    want = exact(*x, causal=bounds.causal, window=9 if bounds.window else None)
    tolerance = TOLERANCE[BF16.name]
    np.testing.assert_allclose(got.astype(np.float64), want[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want[1], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_repeated_calls_find_the_counter_as_it_was(cupy, causal):
    x = operands((1, 9, 3, 260, 260, 64, 64), BF16)
    there, want = [cupy.array(y) for y in x], exact(*x, causal=causal)[0]
    tolerance = TOLERANCE[BF16.name]
    for _ in range(3):
        got = pm.attention(*there, causal=causal).get()
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance)
    assert all("wgmma" in name for name, *_ in cupy.launches)


def test_schedules_are_legal():
    for d in (64, 128, 192, 256):
        found = warpgroups.candidates(asked("bf16", d), H100)
        assert found
        for t in map(WarpgroupTiling, found):
            assert t.shared_bytes <= H100.device.shared_bytes
            assert t.registers <= t.budgets[1]
            assert t.threads == 128 * (t.groups + 1)
            assert parse(spell(t.s)) == t.s
        assert choice.choices(asked("bf16", d), H100)[0].program == "wgmma_attention"


@pytest.mark.parametrize(
    ("chip", "more"),
    [
        ("a100", {}), ("rtx_pro_6000", {}), ("h100", {"dv": 64}), ("h100", {"queries": 16}), ("h100", {"loose": "v"}),
        ("h100", {"vectors": (8, 4, 8, 8)}),
    ],
)  # fmt: skip
def test_others_multiply_what_they_cannot(chip, more):
    assert not warpgroups.candidates(asked("bf16", 128, **more), load_target(chip))


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_products_stay_asynchronous(d):
    """No register is spilled, and the assembler finds nothing that makes it wait for each product."""
    program = of_attention(Form(SCALED, "bf16", "bf16", Bounds(causal=True)))
    for s in (x for x in warpgroups.candidates(asked("bf16", d), H100) if x.parallel.pingpong):
        (kernel,) = lower_program(program, s, *choice.unit_of(s, H100))
        try:
            found = nvrtc.compile_cuda(cuda.source(kernel), kernel.name, "90a")
        except NoCompilerError as error:
            opencl_cpu.missing(str(error))
        assert not found.spills, str(s)
        assert "serialized" not in found.log, str(s)


def test_the_order_of_candidates_is_that_of_measured_times():
    """Two warpgroups for heads of 128, and for short heads of 64 under causal bounds, whose tiles they split better."""

    def first(d, keys, heads, **more):
        wanted = asked("bf16", d, queries=keys, keys=keys, heads=heads, **more)
        t = WarpgroupTiling(warpgroups.candidates(wanted, load_target("h200"))[0])
        return t.groups, t.keys

    assert first(64, 1024, 256) == first(64, 4096, 64) == first(64, 16384, 32) == (3, 128)
    assert first(64, 4096, 64, causal=True) == first(64, 16384, 32, causal=True) == (3, 128)
    assert first(64, 1024, 256, causal=True) == first(128, 1024, 256) == first(128, 4096, 64) == (2, 128)
    assert first(128, 16384, 32) == (2, 176)


@pytest.mark.parametrize("scale", [0.0, -2.5, 40.0])
def test_any_factor_of_scores(cupy, scale):
    """One that turns the order of products around, or that makes all weights equal, or all but one zero."""
    x = operands((1, 1, 1, 64, 96, 64, 64), BF16)
    check(cupy, x, exact(*x, scale=scale), scale=scale)


def test_a_score_that_is_no_number_makes_its_rows_so(cupy):
    q, k, v = operands((1, 1, 1, 64, 96, 64, 64), F16)
    q[0, 0, 5, 3] = np.nan
    got = pm.attention(*map(cupy.array, (q, k, v))).get()
    assert np.isnan(got[0, 0, 5]).all()
    assert np.isfinite(np.delete(got[0, 0], 5, 0)).all()
    k[0, 0, 40, 1] = np.nan
    assert np.isnan(pm.attention(*map(cupy.array, (q, k, v))).get()).all()
