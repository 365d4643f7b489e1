"""Products by panels of int4 values, prefetched, one or several at once."""

from __future__ import annotations

from dataclasses import replace

import machines
import pytest
from machines import HERE
from operands import case
from problems import coded
from runs import check_built, interpret

from portmm.codegen.lower import lower
from portmm.schedule.candidates import candidates

KINDS = [
    ("avx512", "f32-u4-f32", {}),
    ("avx512vnni", "s8-u4-f32", {"symmetric": True, "post": "scale"}),
    ("avx512vnni", "s8-u4-f32", {"symmetric": True, "half": True, "post": "scale"}),
    ("avx2", "f32-u4-f32", {"symmetric": True, "half": True}),
    ("neon", "f32-u4-f32", {"e2m1": True, "half": True}),
    ("avx2", "f32-u4-f32", {"symmetric": True}),
    ("sse2", "f32-u4-f32", {"e2m1": True}),
]


@pytest.mark.parametrize(("name", "dtype", "more"), KINDS, ids=str)
def test_panels_that_are_prefetched(name, dtype, more):
    """Whole panels in pairs or fours, then those that are left: a whole one, or one of few columns."""
    target = machines.small(name)
    nr, found = 2 * target.isas[0].atom(dtype).n, 0
    for i, (rows, n) in enumerate([(1, 5 * nr), (2, 3 * nr - 3), (1, 2 * nr + 1)]):
        p = coded((rows, n, 75), dtype, nr, 32, **more)
        in_place = [s for s in candidates(p, target) if not s.b.packed and s.mr == rows]
        for panels in (1, 2, 4)[: 3 if rows == 1 and dtype.startswith("s8") else 2]:
            every = [replace(s, b=s.b.prefetched(0, 24).covering(panels)) for s in in_place]
            s = every[0]
            kernel, k = lower(s, target.isa(s.isa)), case(p, seed=i, floats=True)
            assert "decode" in str(kernel)
            for workers in (1, 3):
                k.check(interpret(kernel, k, workers, shuffle=workers), s)
            if s.isa in HERE:
                check_built(kernel, k, 2, s)
            found += 1
    assert found == 8 if dtype.startswith("s8") else 6


def test_panels_from_beyond_l2_are_prefetched_in_pairs():
    target = machines.small("avx512")
    far = [x.b for x in candidates(coded((1, 4096, 4096), "f32-u4-f32", 32, 32), target) if not x.b.packed]
    assert {(x.along > 0, x.panels) for x in far} == {(True, 1), (True, 2)}
    exact = coded((1, 4096, 4096), "s8-u4-f32", 32, 32, symmetric=True, post="scale")
    four = [x.b for x in candidates(exact, machines.small("avx512vnni")) if not x.b.packed]
    assert {x.panels for x in four} == {1, 2, 4}
    near = [x.b for x in candidates(coded((1, 256, 256), "f32-u4-f32", 32, 32), target) if not x.b.packed]
    assert {(x.along > 0, x.panels) for x in near} == {(False, 1)}
