"""Types that tensor cores multiply on some architectures, or on request: floats of eight bits, tf32."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_mma import BY_K, MATRIX, check, schedules

from portmm.target import load_isa

ADA = replace(
    MATRIX, isas=(load_isa("mma_sm89"), *MATRIX.isas), device=replace(MATRIX.device, architecture="89"),
    rates=MATRIX.rates | {f"mma_sm89_{x}": 1024.0 for x in ("e4m3", "e5m2", "e4m3e5m2", "e5m2e4m3")},
)  # fmt: skip
SIZES = ((65, 33, 131, 1, ""), (17, 70, 64, 2, "b"), (1, 1, 1, 1, ""))
FP8 = (
    ("e4m3-e4m3-bf16", (16, 16, 8)), ("e5m2-e5m2-f32", (4, 16, 2)), ("e4m3-e5m2-f16", (16, 4, 4)),
    ("e5m2-e4m3-bf16", (2, 1, 1)), ("e4m3", (16, 16, 16)), ("e5m2", (8, 4, 1)),
)  # fmt: skip


@pytest.mark.parametrize("product", FP8, ids=lambda x: x[0])
def test_floats_of_eight_bits(product):
    dtype, vectors = product
    found = schedules(dtype, BY_K, vectors, ADA)
    at = FP8.index(product)
    s = found[(5 * at + 1) % len(found)]
    check(replace(s, split=1 + at % 2), BY_K, dtype, ADA, SIZES)
