"""Columns of register tiles: many slices of rows by one panel of a few steps of k, in one call."""

from __future__ import annotations

import pytest
from machines import HERE
from operands import case
from problems import pose
from runs import execute, interpret
from test_meaning import _with_l2

from portmm.codegen.lower import lower
from portmm.dispatch.schedule_choice import choose
from portmm.schedule.candidates import candidates
from portmm.schedule.schedule import by_columns
from portmm.spec.problem import Problem
from portmm.target.target import load_target


def columns(p, target):
    atom = target.isas[0].atom("f32")
    return [s for s in candidates(p, target) if by_columns(s, atom)]


@pytest.mark.parametrize("b", ["row", "packed"])
@pytest.mark.parametrize("name", ["avx2", "avx512", "neon"])
def test_columns_mean_the_product(name, b):
    """Every number of rows of the last slices; full panels and a partial one, whose rows of C have gaps; any few k."""
    target = _with_l2(name)
    lanes, isa, seen = target.isas[0].atom("f32").n, target.isas[0], set()
    for i, k in enumerate((1, 5, 8, 16, 31, 32, 63, 64)):
        for m in (9 + i, 33 + 5 * i):
            n = (2 * lanes, 2 * lanes - 3, 4 * lanes + 1, lanes)[i % 4]
            for p in pose((m, n, k), ("row", b, "row"), target, dtype="f32"):
                for s in columns(p, target)[i % 2 :: 2]:
                    seen.add(s.c.prefetch > 0)
                    kernel, operands = lower(s, isa), case(p, seed=i)
                    operands.check(interpret(kernel, operands, 1 + i % 2), s)
                    if name in HERE:
                        operands.check(execute(kernel, operands, 1 + i % 3, end=bool(i % 2)), s)
    assert seen


def test_a_deeper_product_is_right_by_the_same_kernel():
    """A kernel is chosen for a K of one block; of a deeper one it adds blocks to C, by other statements."""
    target = _with_l2("avx512")
    (s, *_) = next(
        x for p in pose((60, 32, 32), ("row", "row", "row"), target, dtype="f32") if (x := columns(p, target))
    )
    kernel = lower(s, target.isas[0])
    for p in pose((47, 70, 333), ("row", "row", "row"), target, dtype="f32"):
        operands = case(p, seed=3)
        operands.check(interpret(kernel, operands, 2), s)


def test_they_are_chosen_for_tall_products_of_few_columns():
    target = load_target("granite_rapids")
    atom = target.isa("avx512").atom("f32")
    for size, by in (
        ((65536, 32, 32), True),
        ((32768, 16, 64), True),
        ((16384, 48, 24), True),
        ((1024, 1024, 1024), False),
    ):
        found = choose(Problem(*size, "f32", 1, "row", "row", "row"), target, tuned=False)
        assert by_columns(found.schedule, atom) == by, size
