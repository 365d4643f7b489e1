"""Functions over rows of arrays that exceed L2: their first pass prefetches, and results are NumPy's."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import portmm as pm
from portmm.codegen.lower import lower_program
from portmm.dispatch import config
from portmm.ir.block_program import program_of
from portmm.ops.epilogues import NAMES
from portmm.ops.rowwise import over_rows
from portmm.schedule.rows import core_schedule
from portmm.spec import elementwise as ew
from portmm.spec.epilogue import parse
from portmm.target.model import CPU
from portmm.target.target import load_isa

QUICKLY = True
BF16 = np.dtype(ml_dtypes.bfloat16)
SOFTMAX = "f32.bmn f32.n f32.bmn | load 0; reduce max 0; sub 0 1; abs 2; reduce add 3; load 1; div 3 4; mul 6 5 | 2 7"


def rows_of_two_levels():
    l2 = config.target().level("L2")
    return 32 + (0 if l2 is None else l2.bytes // 4 // 1003)


def test_results_are_those_of_numpy():
    rng, m = np.random.default_rng(0), rows_of_two_levels()
    x, y = (rng.standard_normal((m, 1003)).astype(np.float32) for _ in range(2))
    narrow = y.astype(BF16)
    (got,), _ = over_rows(lambda a, b: a * 2.0 + b, (x, narrow), NAMES, dtype=BF16)
    np.testing.assert_array_equal(got, (x * np.float32(2) + narrow.astype(np.float32)).astype(BF16))
    (got,), _ = over_rows(lambda a: pm.exp(a - ew.max(a)) / ew.sum(pm.exp(a - ew.max(a))), (x,), NAMES)
    e = np.exp(x - x.max(1, keepdims=True).astype(np.float64))
    np.testing.assert_allclose(got, e / e.sum(1, keepdims=True), rtol=1e-5)


def test_the_first_pass_alone_prefetches():
    """Not a vector that all rows share."""
    program, isa = program_of(parse(SOFTMAX), "L1"), load_isa("avx512")
    real = isa.atom("f32")
    near, far = (
        str(lower_program(program, core_schedule(program, isa, real, far=x), isa, real)[0]).count("Prefetch(")
        for x in (False, True)
    )
    assert near == 0
    assert far == CPU.chains
