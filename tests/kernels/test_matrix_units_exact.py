"""Products of matrix units, mma and wgmma, are proved as their text computes them: on integers for which all is exact.

Elements of A and B are drawn from 256 integers that bfloat16 has, and sums stay below 2**24, so that every product and
sum of float32 is that of integers. A text computes each element of C as a form of degree two; by Schwartz and Zippel's
lemma one that is wrong agrees with the product on a draw with a probability of at most 2 / 256.
"""

from __future__ import annotations

import math
from dataclasses import replace

import cuda_shim
import grid_cases
import numpy as np
import pytest
from cuda_shim import ShimError
from grid_cases import call, in_shim, kernels_of
from test_mma import MATRIX, schedules
from test_wgmma import BY_K, HOPPER, posed, schedule

from portmm.dispatch.machine import source
from portmm.ir.interpreter import numpy_type

DTYPE, INTEGERS, DEGREE, DRAWS = "bf16-bf16-f32", 256, 2, 6
SIZE = (70, 72, 136)
"""Two tiles along m and n, and two trips or more along k, of which the last ones are ragged."""


def units():
    narrow = min(schedules(DTYPE, BY_K, (8, 8, 4)), key=lambda s: (s.block.m * s.block.n, s.mr * s.nr))
    return {"mma": (narrow, MATRIX), "wgmma": (schedule(DTYPE, BY_K, 64, 32), HOPPER)}


def refuted(unit, old="", new=""):
    """Whether a draw shows that a text is wrong, with a part of it replaced, or that a GPU would refuse it."""
    s, target = units()[unit]
    (kernel,) = kernels_of(s, target)
    text = source(kernel, "cuda")
    assert old in text
    p = posed(DTYPE, BY_K, SIZE)
    assert p.k * (INTEGERS // 2) ** 2 < 2**24
    codes = [cuda_shim.compile(text.replace(old, new) if old else text, kernel.name)]
    try:
        for seed in range(DRAWS):
            rng = np.random.default_rng([7, seed])
            x, y = (
                rng.integers(-INTEGERS // 2, INTEGERS // 2, (1, *shape)).astype(numpy_type("bf16"))
                for shape in ((p.m, p.k), (p.k, p.n))
            )
            k = grid_cases.case_of(p, (*s.vectors[:2], s.vectors[2]), x, y, seed)
            want = x.astype(np.int64) @ y.astype(np.int64)
            np.testing.assert_array_equal(k.want, want)
            replace(k, bound=np.zeros_like(k.bound)).check(in_shim(call((kernel,), s, k), codes, (seed % 3,))[0], s)
    except (AssertionError, ShimError):
        return True
    return False


@pytest.mark.parametrize("unit", ["mma", "wgmma"])
def test_texts_of_matrix_units_are_products(unit):
    assert DRAWS * math.log2(INTEGERS / DEGREE) >= 40
    assert not refuted(unit)


WRONG = (
    ("mma", "acc[i] = 0;", ";"),
    ("mma", "((b_left + 2) ^ b_turn)", "((b_left + 1) ^ b_turn)"),
    ("mma", "&b_part[4 + i * 4]", "&b_part[i * 4]"),
    ("mma", "const int a_left = (lane >> 3) & 1;", "const int a_left = (lane >> 4) & 1;"),
    ("wgmma", "0 < step + unit", "1"),
    ("wgmma", "b_matrix + stage * 256 + unit * 2", "b_matrix + stage * 256"),
    ("wgmma", "half * 8 + warp * 16", "half * 16 + warp * 8"),
    ("wgmma", "steps = (k + 63) >> 6", "steps = k >> 6"),
)


@pytest.mark.rest("each compiles a wrong text for the shim")
@pytest.mark.parametrize("wrong", WRONG, ids=lambda x: f"{x[0]}: {x[1][:20]}")
def test_wrong_texts_of_matrix_units_are_refuted(wrong):
    assert refuted(*wrong)
