"""Texts of products and of attention on units of tiles, which are configured, compiled with symbols for floats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portmm.codegen.c_kernel import source
from portmm.fusion.emitted import _attention
from portmm.ir.attention_program import Form
from portmm.ir.product_program import of_product
from portmm.schedule.candidates import candidates
from portmm.spec.epilogue import C, Fused, Operand, acc, load
from portmm.spec.problem import Problem
from portmm.target.target import load_target
from portmm.verification.lowered import lowered

SEED = 5
TARGET = load_target("sapphire_rapids")
SCORES = {
    "attention": Form(Fused((), ((C, acc() * 0.5),)), "bf16", "bf16"),
    "factors": Form(
        Fused((Operand("f32", "bhm"), Operand("f32", "bhn")), ((C, acc() * load(0, "f32")), (C, load(1, "f32")))),
        "bf16",
        "f32",
    ),
}


def of(what):
    """A record and its kernel."""
    if what in SCORES:
        x = _attention(what, SCORES[what], TARGET, 32)
        return x.program, lowered(x.program, TARGET, x.schedule, 0, x.unit)
    p = Problem(64, 250, 256, "bf16-bf16-f32", b=what)
    s = next(s for s in candidates(p, TARGET, 1) if s.program == "tiles")
    program = of_product(p)
    if what == "col":
        a, b, c = program.operands
        program = replace(program, operands=(a, replace(b, axes="nk"), c))
    return program, lowered(program, TARGET, s)


WRONG = {
    "row": [
        ("", ""),
        ("if (k / 16 * 16 < k) {", "if (0) {"),
        ("for (long u = count; u < 16", "for (long u = count; u < 0"),
    ],
    "col": [("", ""), ("p * 2 + e < elements", "p * 2 + e <= elements")],
    "attention": [
        ("", ""),
        ("e < (keys + 31) / 32 * 32 * 16; ++e", "e < keys * 16; ++e"),
        ("c < count; c += 2", "c < 0; c += 2"),
    ],
    "factors": [
        ("", ""),
        ("x2 = x1 - part_x;", "x2 = x1;"),
        ("upper = ((v16f_w){0} + (-65536));", "upper = ((v16f_w){0} + (-32768));"),
        ("pair = lower | upper_y;", "pair = lower;"),
        ("if (first < key) {", "if (0) {"),
    ],
}


@pytest.mark.parametrize("what", WRONG)
def test_texts_on_tiles(what):
    program, x = of(what)
    assert x.kernel.atom.tiled
    text = source(x.kernel)
    for old, new in WRONG[what]:
        assert old in text, old
        verdict = x.check(program, seed=SEED, text=text.replace(old, new) if old else text)
        assert bool(verdict) == (not old), (old, verdict)
        assert verdict.bits >= 40 or old


def test_weights_that_are_cut_short_are_told():
    """Two parts of a weight have 16 of its 24 bits: the third one is not left out."""
    program, x = of("factors")
    text = source(x.kernel)
    third = text.index("* 64 * 2 + c *")
    begin, end = text.rindex("values(", 0, third), text.index(";", third)
    assert not x.check(program, seed=SEED, text=text[:begin] + text[end:])
