"""Suites of random shapes: sizes, layouts, batches and types drawn by a seed.

Owns `drawn`, the distribution of sizes, layouts, batches and types. A kernel or a cost model that was made with the
suites of layers in mind meets sizes here that it was not made for; another seed is another suite of the same kind, and
the same seed is the same suite everywhere.
"""

from __future__ import annotations

import math
import random
from typing import Any

from portmm.comparison.case import BLOCK, Case

SUITES = ("random", "random-narrow")
"""Names of suites: of f32, and of narrow types."""
COUNT = 32
"""Cases of a suite: as many as "quick" has."""
MOST = 4096
"""Largest extent; its logarithm is uniform, so that there are as many cases from 1 to 64 as from 64 to 4096."""
MOST_FLOPS, LEAST_FLOPS = 4e9, 1e3
"""Of a case: so few that a turn has several calls, and more than a call takes without a product."""
MOST_BYTES = 1 << 28
"""Bytes of all operands of a case, of at most 8 bytes an element."""
MOST_BATCH = 512
ROUND = (8, 16, 32, 64)
"""Half of the sizes are multiples of one of these, as programs have them; the others have any remainder."""
NARROW: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {"dtype": "bf16"}), ("bf16", {"dtype": "bf16-bf16-f32"}),
    ("bf16-packed", {"dtype": "bf16", "packed": True}), ("f16", {"dtype": "f16"}),
    ("int8", {"dtype": "s8-s8-s32"}), ("int8", {"dtype": "u8-s8-s32"}),
    ("int8-packed", {"dtype": "s8-s8-s32", "packed": True}), ("int8-packed", {"dtype": "u8-s8-s32", "packed": True}),
    ("int8-linear", {"dtype": "u8-s8-f32", "packed": True}), ("int8-weight", {"dtype": "f32-s8-f32", "packed": True}),
    ("int4", {"dtype": "f32-u4-f32", "packed": True, "block": BLOCK}),
    ("int4-bf16", {"dtype": "bf16-u4-bf16", "packed": True, "block": BLOCK}),
)  # fmt: skip
"""Groups of narrow types, and what a case of each has; the types and weights of the suite "narrow"."""


def drawn(suite: str, seed: int = 0, count: int = COUNT) -> tuple[Case, ...]:
    """The cases of a random suite.

    Args:
        suite: one of `SUITES`.
        seed: of the shapes.
        count: number of cases.

    Raises:
        ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"the seed is {seed}; give a whole number from 0")
    rng = random.Random(f"{suite} {seed}")  # noqa: S311 - no secret
    return tuple(_case(rng, suite, f"{suite}-{seed}-{i:02}", i) for i in range(count))


def seeded(suite: str, seed: int) -> str:
    """Names of suites as a report has them: with the seed where one of them is random."""
    return f"{suite} (seed {seed})" if set(SUITES).intersection(suite.split(",")) else suite


def _case(rng: random.Random, suite: str, name: str, i: int) -> Case:
    """A case; narrow types take turns, so that a suite has all of them."""
    kind, more = NARROW[i % len(NARROW)] if suite != "random" else ("", {"packed": rng.random() < 0.25})
    m, n, k, batch = _sizes(rng, packed=more.get("packed", False), step=more.get("block", 1))
    group = f"random-{kind}" if kind else "random-packed" if more["packed"] else "random"
    # A result by columns is rare, and an A by columns less frequent than a B, which x @ w.T has.
    a, b, c = ("col" if rng.random() < share else "row" for share in (0.2, 0.4, 0.1))
    layouts = {} if more.get("packed") else {"a": a, "b": b, "c": c if not kind else "row"}
    return Case(f"{name}-{m}x{n}x{k}", group, m, n, k, **{"batch": batch, **layouts, **more})


def _sizes(rng: random.Random, *, packed: bool, step: int) -> tuple[int, int, int, int]:
    """Sizes within the bounds on operations and bytes, K a multiple of `step`: drawn again until they are."""
    while True:
        m, n, k = (_size(rng) for _ in range(3))
        k = max(step, k // step * step)
        batch = 1 if packed or rng.random() < 0.75 else max(2, int(MOST_BATCH ** rng.random()))
        flops, elements = 2 * m * n * k * batch, batch * (m * k + k * n + m * n)
        if LEAST_FLOPS <= flops <= MOST_FLOPS and 8 * elements <= MOST_BYTES:
            return m, n, k, batch


def _size(rng: random.Random) -> int:
    """An extent of 1 to `MOST`."""
    size = min(MOST, int(math.exp(rng.uniform(0.0, math.log(MOST + 1)))))
    even = rng.choice(ROUND)
    return size // even * even if rng.random() < 0.5 and size >= even else size
