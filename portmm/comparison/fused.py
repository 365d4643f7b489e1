"""Epilogues of fused cases: their words, their values and the bounds of their errors.

Owns the words of `Case.fused`, their values in a wide type, the bound of their errors,
and their computation by NumPy in place for libraries that only multiply.

A word is a step, and steps are joined by "+" in the order in which they are applied:
"bias" adds a vector to each row, "residual" adds a matrix of C's shape, and the
last may be an activation function. An error of e before a function is at most its steepest
slope times e after it; each step may add an error of some roundings of its operands
in the type of the sums, since functions are approximated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

ADDED = ("bias", "residual")
"""Steps that add an array of the case."""

STEEPEST = {"relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
"""Functions -> upper bound of the absolute value of their slope."""

ROUNDINGS = 16
"""Error allowed in a function, in roundings of its argument in the type of the sums."""

CUBIC, ROOT = 0.044715, math.sqrt(2 / math.pi)
"""Coefficients of gelu_tanh."""

# Elements of a slab: two slabs fit a private cache.
SLAB = 1 << 15

_erf = np.frompyfunc(math.erf, 1, 1)


def steps(words: str) -> tuple[str, ...]:
    """Steps of `Case.fused`.

    Raises:
        ValueError: a word is unknown, or they are not a bias, a residual and a function
            in this order, of which some may be missing.
    """
    names = tuple(words.split("+")) if words else ()
    for word in names:
        if word not in ADDED and word not in STEEPEST:
            raise ValueError(f"unknown step {word!r} of an epilogue; known are {', '.join((*ADDED, *STEEPEST))}")
    ranks = [ADDED.index(word) if word in ADDED else len(ADDED) for word in names]
    if any(a >= b for a, b in pairwise(ranks)):
        raise ValueError(f"{words!r} is not a bias, a residual and one function in this order")
    return names


@dataclass(frozen=True, slots=True)
class Rounding:
    """Unit round-offs.

    Attributes:
        inner: of the type of the sums.
        outer: of the result, 0.0 if that is no narrower.
        between: of the type to which each step may round before the next, 0.0 if that is no narrower.
    """

    inner: float
    outer: float
    between: float = 0.0


def finished(words: str, sums: Any, added: Mapping[str, Any], error: Any, rounding: Rounding) -> tuple[Any, Any]:
    """Epilogue of sums, with bounds of the errors.

    Args:
        words: `Case.fused`.
        sums: the product in a wide type.
        added: "bias" and "residual", as far as they are among the words, to be broadcast.
        error: error allowed in each sum before it is rounded to the result's type.
        rounding: unit round-offs.

    Returns:
        The values, and the error allowed in each.
    """
    values, bound = sums, error + np.zeros_like(sums)
    if words:
        bound = bound + rounding.between * np.abs(values)
    for word in steps(words):
        if word in ADDED:
            values = values + added[word].astype(values.dtype)
            bound = bound + rounding.inner * np.abs(values)
        else:
            bound = STEEPEST[word] * bound + (word != "relu") * ROUNDINGS * rounding.inner * np.abs(values)
            values = value(word, values)
        bound = bound + rounding.between * np.abs(values)
    return values, bound + rounding.outer * np.abs(values)


def value(word: str, x: Any) -> Any:
    """Values of a function in a wide type."""
    if word == "relu":
        return np.maximum(x, 0)
    if word == "gelu":
        return x * (1 + _erf(x / math.sqrt(2)).astype(x.dtype)) / 2
    if word == "gelu_tanh":
        return x * (1 + np.tanh(ROOT * (x + CUBIC * x**3))) / 2
    return x / (1 + np.exp(-x))


def in_place(words: str, c: Any, added: Mapping[str, Any], normal: Callable[..., Any] | None) -> Callable[[], None]:
    """Function that applies the epilogue to `c` in place, by ufuncs on a slab of rows at a time.

    Args:
        words: `Case.fused`.
        c: the product, (m, n).
        added: "bias" and "residual", as far as they are among the words.
        normal: the cumulative normal distribution, normal(x, out=...), which gelu needs.

    Returns:
        A function without arguments.
    """
    count = max(SLAB // max(c.shape[-1], 1), 1)
    slabs = []
    for start in range(0, c.shape[-2], count):
        rows = slice(start, start + count)
        operands = {word: x if x.ndim == 1 else x[rows] for word, x in added.items()}
        slabs.append((c[rows], operands, np.empty_like(c[rows])))
    names = steps(words)

    def call() -> None:
        for slab, operands, scratch in slabs:
            for word in names:
                if word in ADDED:
                    np.add(slab, operands[word], out=slab)
                else:
                    _function(word, slab, scratch, normal)

    return call


def _function(word: str, x: Any, scratch: Any, normal: Callable[..., Any] | None) -> None:
    """Overwrite `x` with a function of it; `scratch` is a buffer of its shape."""
    if word == "relu":
        np.maximum(x, 0, out=x)
    elif word == "gelu" and normal is not None:
        normal(x, out=scratch)
        np.multiply(x, scratch, out=x)
    elif word == "gelu_tanh":
        np.multiply(x, x, out=scratch)
        scratch *= CUBIC * ROOT
        scratch += ROOT
        scratch *= x
        np.tanh(scratch, out=scratch)
        scratch += 1
        scratch *= 0.5
        np.multiply(x, scratch, out=x)
    else:
        np.negative(x, out=scratch)
        np.exp(scratch, out=scratch)
        scratch += 1
        np.divide(x, scratch, out=x)
