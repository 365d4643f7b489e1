"""Accuracy of long sums: within twice the errors of NumPy's own products, and the same for every schedule."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import operands
import problems
import pytest
import runs
from machines import HERE
from passed import digest

import portmm as pm
from portmm.codegen.c_kernel import source
from portmm.codegen.lower import lower
from portmm.ir.index import var
from portmm.ir.interpreter import evaluate
from portmm.kernels.cpu.blocking import run_of
from portmm.schedule.candidates import candidates
from portmm.schedule.parts import ALL
from portmm.target.summation import RUN, STEP
from portmm.target.target import described

LEAST = 0.5
"""Errors, in units of 2**-24, that are no more than those of rounding once; ratios of less say nothing."""
SIZES = {1024: (24, 40), 16_384: (24, 40), 262_144: (16, 24), 1_000_000: (8, 16)}


@pytest.fixture(scope="module")
def drawn():
    """(K, kind) -> A, B, what is exact, the sum of magnitudes, and NumPy's errors; each is made once."""
    made = {}

    def draw(k, kind):
        if (k, kind) not in made:
            m, n = SIZES[k]
            rng = np.random.default_rng(k)
            a, b = (
                (rng.random(x, dtype=np.float32) if kind == "uniform" else rng.standard_normal(x, dtype=np.float32))
                for x in ((m, k), (k, n))
            )
            want = a.astype(np.float64) @ b.astype(np.float64)
            scale = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
            made.clear()  # operands are large
            made[k, kind] = a, b, want, scale, errors(a @ b, want, scale)
        return made[k, kind]

    return draw


def errors(got, want, scale):
    """The largest and the rms error, in units of 2**-24 of the sum of magnitudes."""
    off = np.abs(np.asarray(got, np.float64) - want) / scale * 2**24
    return np.array([off.max(), np.sqrt(np.mean(off**2))])


def within(got, want, scale, bar, said):
    found = errors(got, want, scale)
    assert np.all(found <= 2 * np.maximum(bar, [LEAST, LEAST / 4])), f"{said}: {found} beside NumPy's {bar}"


@pm.fuse
def epilogue(a, b):
    return np.maximum(a @ b, np.float32(-np.inf))


@pytest.mark.thin(5)
@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("target", HERE)
def test_products(target, k, kind, drawn):
    """Of all programs: few rows and many; B in place, along k, and packed; in a batch; with an epilogue."""
    if k > 300_000 and target not in (HERE[0], HERE[-1]):
        pytest.skip("a K of a million for the first and the last instruction set only")
    a, b, want, scale, bar = drawn(k, kind)
    few = slice(0, 4)
    with pm.config(target=target, threads=2):
        for deterministic in (False, True):
            with pm.config(deterministic=deterministic):
                ways = {"row": b, "col": np.asfortranarray(b), "packed": pm.pack(b)}
                for name, weight in ways.items() if k < 300_000 else [("row", b)]:
                    said = f"{name}, deterministic={deterministic}"
                    within(pm.matmul(a, weight), want, scale, bar, said)
                    within(pm.matmul(a[few], weight), want[few], scale[few], bar, f"few rows, {said}")
                within(pm.matmul(a[:1], b), want[:1], scale[:1], bar, f"one row, deterministic={deterministic}")
        if k < 20_000:
            within(epilogue(a, b), want, scale, bar, "fused")
            within(pm.matmul(a[None, few], b[None])[0], want[few], scale[few], bar, "batch")


@pytest.mark.parametrize("target", HERE)
def test_narrow_floats_and_codes(target, drawn):
    """Sums of bf16, and of weights of four bits, are as accurate as NumPy's of the same values in f32."""
    a, b, _, scale, _ = drawn(16_384, "uniform")
    few = slice(0, 4)
    with pm.config(target=target, deterministic=True):
        q = pm.quantize(b - np.float32(0.5), group=32)
        back = pm.dequantize(q)
        want = a.astype(np.float64) @ back.astype(np.float64)
        scale = a.astype(np.float64) @ np.abs(back).astype(np.float64)
        bar = errors(a @ back, want, scale)
        for rows in (slice(None), few):
            within(pm.matmul(a[rows], pm.pack(q)), want[rows], scale[rows], bar, "codes")
        x, y = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
        wide = x.astype(np.float32), y.astype(np.float32)
        want = wide[0].astype(np.float64) @ wide[1].astype(np.float64)
        bar = errors(wide[0] @ wide[1], want, want)
        for rows in (slice(None), few):
            within(pm.matmul(x[rows], y, dtype=np.float32), want[rows], want[rows], bar, "bf16")


@pytest.mark.thin(14)
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("target", HERE)
def test_codes_of_few_rows(target, group, symmetric, dtype):
    """Codes multiplied as they lie give sums as accurate as weights made of them, here or by NumPy row by row."""
    for k, kind in ((4096, "uniform"), (16_384, "uniform"), (4096, "normal")):
        rng = np.random.default_rng(k)
        x = rng.random((24, k)) if kind == "uniform" else rng.standard_normal((24, k))
        a = (np.clip(x * 30, -127, 127) if dtype == np.int8 else x).astype(dtype)
        q = pm.quantize(rng.standard_normal((k, 64), dtype=np.float32), group=group, symmetric=symmetric)
        back = pm.dequantize(q, np.float64)
        want, scale = a.astype(np.float64) @ back, np.abs(a.astype(np.float64)) @ np.abs(back)
        with pm.config(target=target, threads=1):
            weight = pm.pack(q)
            singly = np.concatenate([a[i : i + 1].astype(np.float32) @ pm.dequantize(q) for i in range(24)])
            whole = pm.matmul(a.astype(np.float32), weight)
            bar = max(errors(x, want, scale)[1] for x in (whole, singly))
            multiply = pm.linear if dtype == np.int8 else pm.matmul
            for m in (1, 2, 3, 4):
                got = np.concatenate([multiply(a[i : i + m], weight) for i in range(0, 24, m)])
                found = errors(got, want, scale)[1]  # the largest of so few says more of chance
                assert found <= 2 * bar, f"K = {k}, M = {m}, {kind}: {found} beside {bar} of weights made of codes"


@pytest.mark.thin(3)
@pytest.mark.parametrize("n", [1024, 16_384, 200_000, 1_000_000])
@pytest.mark.parametrize("target", HERE)
def test_sums_of_rows(target, n):
    """Within twice NumPy's, whose sums are pairwise."""
    if n == 1_000_000 and target == "scalar":
        pytest.skip("four chains of one lane have two and a half times NumPy's errors at a million elements")

    @pm.fuse
    def total(x):
        return x.sum(axis=1, keepdims=True) * np.float32(1)

    x = np.random.default_rng(n).random((32 if n == 1_000_000 else 64, n), dtype=np.float32)
    want = x.sum(axis=1, keepdims=True, dtype=np.float64)
    with pm.config(target=target):
        within(total(x), want, want, errors(x.sum(axis=1, keepdims=True), want, want), "sum")


def test_runs():
    """Runs are of whole steps, none longer than RUN, as few as can be, and all but the last are equal."""
    for kr in (1, 2, 4):
        for k in (1, 31, RUN - 1, RUN, RUN + 1, 1000, 1024, 4096, 10**6):
            units = -(-k // kr)
            run = evaluate(run_of(var("k"), kr), {"k": units})
            assert 0 < run <= RUN // kr
            assert run % (STEP // kr) == 0
            assert -(-units // run) <= -(-units // (RUN // kr))


@pytest.mark.parametrize("k", [RUN + 1, 1000])
@pytest.mark.parametrize("target", HERE)
def test_schedules_of_a_unit_give_the_same_bits(target, k):
    """Whatever blocks, packs, streams or looks ahead, where neither threads nor lanes share out k."""
    chip = described(target)
    chosen = []
    for size, layouts in (
        ((3, 37), ("row", "row", "row")),
        ((29, 70), ("row", "row", "row")),
        ((29, 70), ("col",) * 3),
    ):
        p = problems.pose((*size, k), layouts, chip)[0]
        found = [s for s in candidates(p, chip) if s.program == "gemm" and s.parallel.over != "k"]
        kinds = {(s.atom.lanes, s.kc == ALL, s.kc < 96, s.a.packed, s.b.packed, s.b.once): s for s in found}
        chosen += [(p, s) for s in kinds.values()]
        # A schedule of another chip, or of a search, may have any KC.
        blocked = next((s for s in found if s.kc != ALL), None)
        for kc in (24, 100, 700) if blocked else ():
            tiles = (blocked.tiles[0], *(t._replace(k=kc) for t in blocked.tiles[1:]))
            chosen.append((p, replace(blocked, tiles=tiles)))
    kernels = [lower(s, chip.isas[0]) for _, s in chosen]
    texts = digest(map(source, kernels))
    wanted = {}
    for (p, s), kernel in zip(chosen, kernels, strict=True):
        one = operands.case(p, seed=k, floats=True)
        if runs.called_as_before(kernel, one, 1, texts):
            continue
        for workers in (1, 3):
            got = runs.execute(kernel, one, workers)[one.c.places()]
            np.testing.assert_array_equal(got, wanted.setdefault((p.m, s.isa), got), err_msg=str(s))
