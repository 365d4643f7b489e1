"""Kernels of weights of floats of four bits: in the interpreter, and built where this machine runs them."""

from __future__ import annotations

import machines
import pytest
from kernels_of import fp4_products
from machines import HERE, small
from operands import case
from runs import check_built, interpret

from portmm.codegen.lower import lower
from portmm.target.target import load_isa

WORDS = ("f32-u4-f32", "bf16-u4-bf16", "s8-u4-f32")
NAMES = [x for x in machines.EVERY_ISA if x != "amx_int8" and any(load_isa(x).atom(word) for word in WORDS)]
"""Integers by tiles, in groups of whole steps alone, are in test_int4_tiles.py."""


@pytest.mark.parametrize("name", NAMES)
def test_products(name):
    target = small(name)
    found = [(p, s) for p, s in fp4_products(target) if target.isa(s.isa).atom(p.dtype).e2m1 or name.startswith("amx")]
    assert found or name.startswith("rvv")
    for i, (p, s) in enumerate(found):
        kernel, k = lower(s, target.isa(s.isa)), case(p, seed=i, floats=True)
        k.check(interpret(kernel, k, 1 + i % 2, shuffle=i), s)
        if s.isa in HERE:
            check_built(kernel, k, 2, s)
