"""Numerical stability of a graph, apart from its equivalence: its error in float32 on hard ranges of inputs.

Owns `judge`. What is equal over the reals may overflow, or cancel; a candidate may do so only where its reference does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.errors import PortmmError
from portmm.ir.block_meaning import Reals
from portmm.verification.equivalence import evaluate, reduced

if TYPE_CHECKING:
    from portmm.ir.mugraph import MuGraph

RANGES = ((1.0, 0.0), (1e-3, 0.0), (30.0, 0.0), (300.0, 0.0), (1.0, 100.0), (1e6, 0.0))
"""Scale and offset of normally distributed inputs."""
WORSE = 16.0
"""Error of a candidate over that of its reference from which it is refused."""
EPS = 2.0**-23


class Floats(Reals):
    """Floats in which an element that is not written is NaN."""

    def empty(self, shape: tuple[int, ...], _: str) -> Any:
        """An operand that is to be written."""
        return np.full(shape, np.nan, self.types["f32"])


class Stability(NamedTuple):
    """Errors on each range.

    Attributes:
        stable: the candidate is nowhere much worse than its reference.
        reason: of a refusal, or "".
        errors: the largest errors of reference and candidate over the largest result, by range.
    """

    stable: bool
    reason: str
    errors: tuple[tuple[float, float], ...]


def judge(reference: MuGraph, candidate: MuGraph, seed: int = 0) -> Stability:
    """Compare the errors of a candidate in float32 with those of its reference, against float64."""
    extents = reduced(reference, candidate)
    errors: list[tuple[float, float]] = []
    source = np.random.default_rng(seed)
    for scale, offset in RANGES:
        wide = [
            source.normal(offset, scale, [extents.get(x, 1) for x in reference.tensors[i].axes]).astype(np.float32)
            for i in reference.inputs
        ]
        try:
            exact = evaluate(reference, [x.astype(np.float64) for x in wide], Floats(np.float64), extents, tiled=False)
            one, other = (evaluate(x, list(wide), Floats(), extents) for x in (reference, candidate))
        except (PortmmError, ValueError) as error:
            return Stability(stable=False, reason=str(error), errors=tuple(errors))
        bad = [(_error(x, z), _error(y, z)) for x, y, z in zip(one, other, exact, strict=True)]
        before, after = max(x for x, _ in bad), max(x for _, x in bad)
        errors.append((before, after))
        if not np.isfinite(after) and np.isfinite(before):
            return Stability(False, f"it overflows for inputs of {offset} +- {scale}", tuple(errors))
        if np.isfinite(before) and after > WORSE * max(before, 4 * EPS):
            worse = f"its error is {after:.1e}, where the reference's is {before:.1e}, at {offset} +- {scale}"
            return Stability(False, worse, tuple(errors))
    return Stability(True, "", tuple(errors))


def _error(x: Any, exact: Any) -> float:
    """The largest error over the largest result; infinite where only the exact result is finite."""
    finite = np.isfinite(exact)
    if not finite.any():
        return 0.0
    apart = np.abs(x.astype(np.float64) - exact)[finite]
    return (
        float(np.max(apart) / max(np.max(np.abs(exact[finite])), np.finfo(np.float32).tiny))
        if np.isfinite(apart).all()
        else float("inf")
    )
