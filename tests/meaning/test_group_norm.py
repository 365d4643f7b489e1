"""Kernels of group norms: the interpreter on every instruction set, and built ones beside guard pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fused_cases import check_built, interpreted, rows_case
from machines import HERE, ISAS

from portmm.codegen.lower import lower_group_norm
from portmm.spec.epilogue import parse
from portmm.target.target import load_isa

pytestmark = pytest.mark.calls
EPS = 0.25
TEXT = (
    "f32.bmn f32.n f32.n bf16.n f32.bm f32.bmn bf16.bmn~ | load 0; load 1; sub 0 1; load 2; mul 2 3; load 3; mul 4 5; "
    "load 4; add 6 7; const f32 2.0; mul 8 9 | 5 8; 6 10"
)
"""Groups of channels, times a vector of channels, plus one number for each pixel; and twice of it."""


def values(extra, shape):
    """The elements of an operand as (b, m, n)."""
    places = np.ogrid[tuple(slice(n) for n in shape)]
    return extra.flat[extra.offset + sum(i * s for i, s in zip(places, extra.steps, strict=True))].astype(np.float64)


def norm_case(size, group, batch, seed):
    """Operands of a group norm, and what it should leave."""
    fused, (m, n) = parse(TEXT), size
    f = rows_case(fused, size, batch, seed)
    x, scale, shift = (values(f.case.operands[i], (batch, m, n)) for i in (0, 3, 4))
    g = x.reshape(batch, m, n // group, group)
    g = (g - g.mean((1, 3), keepdims=True)) / np.sqrt(g.var((1, 3), keepdims=True) + EPS)
    want = g.reshape(x.shape) * scale + shift
    due = ((5, "f32", want, 1e-5 * (1 + np.abs(want))), (6, "bf16", 2 * want, 2e-2 * (1 + np.abs(want))))
    return replace(f, results=due)


CASES = [((1, 2), 2, 1, 2), ((3, 48), 3, 2, 24), ((2, 165), 33, 2, 165)]
"""Pixels and channels, channels of a group, images, channels of a task."""


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ISAS)
def test_groups_are_normalized(name):
    isa = load_isa(name)
    for i, (size, group, batch, width) in enumerate(CASES):
        kernel = lower_group_norm(isa, isa.atom("f32"), TEXT, group, repr(EPS), width)
        f = norm_case(size, group, batch, i)
        f.check(interpreted(kernel, f, 1 + i % 3, shuffle=i), (name, size, group))


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", HERE)
def test_built_groups_are_normalized(name):
    isa = load_isa(name)
    kernel = lower_group_norm(isa, isa.atom("f32"), TEXT, 10, repr(EPS), 130)
    for end in (False, True):
        f = norm_case((5, 300), 10, 2, int(end))
        check_built(kernel, f, 2, name, end=end)
