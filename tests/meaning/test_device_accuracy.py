"""Accuracy of long sums on devices: within twice the errors of NumPy's products, and the same for every schedule."""

from __future__ import annotations

import grid_cases
import numpy as np
import pytest
from grid_cases import MACHINE, OLDER, kernels_of, run

from portmm.schedule.candidates import candidates
from portmm.schedule.gpu_gemv import k_threads
from portmm.schedule.gpu_simt import sums_in_shared
from portmm.spec.problem import Problem

LEAST = 0.5
"""Errors, in units of 2**-24, that are no more than those of rounding once; ratios of less say nothing."""
VECTORS = (4, 4, 4)
SIZES = {"cuda": (1024, 16_384), "opencl": (1024, 16_384, 262_144, 1_000_000)}
"""K by language: threads of the shim take turns, which takes long."""
LONG = 100_000
"""K from which one kind of values and one layout are enough."""
PROGRAMS = ("simt", "direct", "stream")
WAYS = ("uniform", "row"), ("uniform", "col"), ("normal", "row"), ("normal", "col")
CASES = [
    (language, k, *way) for language, sizes in SIZES.items() for k in sizes for way in (WAYS if k < LONG else WAYS[:1])
]


def errors(got, want, scale):
    """The largest and the rms error, in units of 2**-24 of the sum of magnitudes."""
    off = np.abs(got.astype(np.float64) - want) / scale * 2**24
    return np.array([off.max(), np.sqrt(np.mean(off**2))])


def multiplied(s, language, p, x, y):
    """C as a schedule's kernels leave it."""
    kernels, k = kernels_of(s), grid_cases.case_of(p, s.vectors, x[None], y[None])
    found = run(s, kernels, language, k, seeds=(1,))[0]
    return found[k.c.places()][0]


def schedules(p, program):
    """Those of a program that leave k whole, narrow ones first, of two machines."""
    found = [
        s
        for machine in (OLDER, MACHINE)
        for s in candidates(p, machine, VECTORS)
        if s.program == program and s.parallel.split == 1
    ]
    return sorted(dict.fromkeys(found), key=lambda s: (s.block.m * s.block.n, s.threads))


@pytest.mark.thin(2)
@pytest.mark.parametrize("language", SIZES)
@pytest.mark.parametrize("k", [385, 1000, 2048])
def test_schedules_give_the_same_bits(language, k):
    """Tiles of k of 8 and 16, through registers and copied, and those that are read where they lie."""
    rng = np.random.default_rng(k)
    k = -(-k // 4) * 4
    x, y = rng.standard_normal((8, k), dtype=np.float32), rng.standard_normal((k, 36), dtype=np.float32)
    p = Problem(8, 36, k)
    found = [s for name in ("simt", "direct") for s in schedules(p, name)]
    kinds = {(s.program, s.block.k, s.a.asynchronous, sums_in_shared(s), s.parallel.cell): s for s in found}
    if language == "opencl":
        kinds = {kind: s for kind, s in kinds.items() if not s.a.asynchronous}
    assert {("simt", True), ("simt", False)} <= {(kind[0], kind[3]) for kind in kinds}
    first, *others = (multiplied(s, language, p, x, y) for s in kinds.values())
    for s, other in zip(list(kinds.values())[1:], others, strict=True):
        np.testing.assert_array_equal(other, first, err_msg=str(s))


@pytest.mark.thin(3)
@pytest.mark.parametrize(("language", "k", "kind", "b"), CASES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_products(program, language, k, kind, b):
    m, n = 4, 16
    rng = np.random.default_rng(k)
    draw = rng.random if kind == "uniform" else rng.standard_normal
    x, y = draw((m, k), dtype=np.float32), draw((k, n), dtype=np.float32)
    want, scale = x.astype(np.float64) @ y, np.abs(x).astype(np.float64) @ np.abs(y)
    p = Problem(m, n, k, b=b)
    found = schedules(p, program)
    s = min(found, key=k_threads) if program == "stream" else found[0]
    got, bar = multiplied(s, language, p, x, y), errors(x @ y, want, scale)
    found = errors(got, want, scale)
    assert np.all(found <= 2 * np.maximum(bar, [LEAST, LEAST / 4])), f"{s}: {found} beside NumPy's {bar}"
