"""Epilogues after sweeps of panels: sums lie in C until they are complete, unless an operand may be C itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fused_cases import check_built, gemm_case, interpreted
from machines import HERE
from problems import pose
from test_meaning import _with_l2

from portmm.codegen.lower import lower
from portmm.schedule.candidates import candidates
from portmm.schedule.legality import illegal
from portmm.schedule.schedule import sweeps_panels
from portmm.spec.epilogue import C, Fused, Operand, acc, load
from portmm.spec.expr import apply
from portmm.spec.short_math import SHORT
from portmm.spec.vector_math import silu

BIAS = Fused(
    (Operand("f32", "n"), Operand("f32", "bm"), Operand("f32", "mn")),
    ((C, silu(acc() + load(0, "f32")) * load(1, "f32")), (2, apply("max", acc(), 0.0))),
)
RESIDUAL = Fused((Operand("f32", "mn"),), ((C, acc() + load(0, "f32")),))
ONLY = Fused((Operand("f32", "n"),), ((C, acc() + load(0, "f32")),))


def swept(p, target):
    return [s for s in candidates(p, target) if sweeps_panels(s)]


@pytest.mark.parametrize("b", ["row", "packed"])
@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_sums_are_finished_where_they_are(name, b):
    """K is a part of a run, or several runs; rows are odd, and the last columns fewer than a vector."""
    fused, target = Fused(BIAS.operands[:2], BIAS.results[:1]), _with_l2(name)
    lanes = target.isas[0].atom("f32").n
    for i, k in enumerate((70, 700) if b == "row" else (5, 700)):
        posed = pose((21 + i, 10 * lanes + 3, k), ("row", b, "row"), target, dtype="f32", fused=str(fused))
        p, found = next((p, x) for p in posed if (x := swept(p, target)))
        for s in found:
            kernel, f = lower(s, target.isas[0]), gemm_case(p, fused, i)
            f.check(interpreted(kernel, f, 2), s)
            if name in HERE:
                check_built(kernel, f, 1 + i % 2, s)


def test_what_may_be_c_is_read_before_sums_are_there():
    target = _with_l2("avx512")
    isa = target.isas[0]
    (p, s) = next(
        (p, x[0])
        for p in pose((21, 163, 700), ("row", "row", "row"), target, dtype="f32", fused=str(ONLY))
        if (x := swept(p, target))
    )
    for fused in (RESIDUAL, BIAS):
        other = replace(p, fused=str(fused))
        assert not swept(other, target)
        assert "apart from C" in illegal(replace(s, epilogue=str(fused)), other, isa, isa.atom("f32"), target)
    short = Fused(ONLY.operands, ((C, SHORT["silu"](acc() + load(0, "f32"), "bf16")),))
    assert not swept(replace(p, dtype="f32-f32-bf16", fused=str(short)), target)
