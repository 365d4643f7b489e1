"""What may follow a product: its words, its meaning and how far a result may be from it.

Owns the words of `Case.fused`, their values in a wide type, the bound of their errors,
and the same done by NumPy in place for libraries that only multiply. Imports nothing of portmm.

A word is a step, and steps are joined by "+" in the order in which they happen:
"bias" adds a vector to each row, "residual" adds a matrix of C's shape, and what comes
last may be a function of one number. An error of e before a function is at most its steepest
slope times e after it; each step may itself err by some roundings of its operands
in the type of the sums, since functions are approximated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ADDED = ("bias", "residual")
"""Steps that add an array of the case."""

STEEPEST = {"relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
"""Functions, and no less than the absolute value of their slope anywhere."""

ROUNDINGS = 16
"""Roundings of its argument, in the type of the sums, that a function may be off by."""

CUBIC, ROOT = 0.044715, math.sqrt(2 / math.pi)
"""Of gelu_tanh."""

# Elements that are finished together: two slabs fit a private cache.
SLAB = 1 << 15

_erf = np.frompyfunc(math.erf, 1, 1)


def steps(words: str) -> tuple[str, ...]:
    """The steps of `Case.fused`.

    Raises:
        ValueError: a word is unknown, or they are not a bias, a residual and a function
            in this order, of which some may be missing.
    """
    found = tuple(words.split("+")) if words else ()
    for word in found:
        if word not in ADDED and word not in STEEPEST:
            raise ValueError(f"nothing fused is called {word!r}; known are {', '.join((*ADDED, *STEEPEST))}")
    ranks = [ADDED.index(word) if word in ADDED else len(ADDED) for word in found]
    if any(a >= b for a, b in pairwise(ranks)):
        raise ValueError(f"{words!r} is not a bias, a residual and one function in this order")
    return found


@dataclass(frozen=True, slots=True)
class Rounding:
    """Unit round-offs.

    Attributes:
        inner: of the type of the sums.
        outer: of the result, 0.0 if that is no narrower.
        between: of what each step may be rounded to before the next, 0.0 for nothing narrower.
    """

    inner: float
    outer: float
    between: float = 0.0


def finished(words: str, sums: Any, added: Mapping[str, Any], error: Any, rounding: Rounding) -> tuple[Any, Any]:
    """What the steps make of sums, and of the errors that these may have.

    Args:
        words: `Case.fused`.
        sums: the product in a wide type.
        added: "bias" and "residual", as far as they are among the words, to be broadcast.
        error: how far each sum may be off before it is rounded to the result's type.
        rounding: how results are rounded.

    Returns:
        The values, and how far each may be off.
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
    """A function of numbers in a wide type."""
    if word == "relu":
        return np.maximum(x, 0)
    if word == "gelu":
        return x * (1 + _erf(x / math.sqrt(2)).astype(x.dtype)) / 2
    if word == "gelu_tanh":
        return x * (1 + np.tanh(ROOT * (x + CUBIC * x**3))) / 2
    return x / (1 + np.exp(-x))


def in_place(words: str, c: Any, added: Mapping[str, Any], normal: Callable[..., Any] | None) -> Callable[[], None]:
    """The steps after a product, by ufuncs that overwrite `c` a slab of rows at a time.

    Args:
        words: `Case.fused`.
        c: the product, (m, n).
        added: "bias" and "residual", as far as they are among the words.
        normal: the cumulative normal distribution, normal(x, out=...), which gelu needs.

    Returns:
        What does it, each time it is called.
    """
    height = max(SLAB // max(c.shape[-1], 1), 1)
    slabs = []
    for start in range(0, c.shape[-2], height):
        rows = slice(start, start + height)
        held = {word: x if x.ndim == 1 else x[rows] for word, x in added.items()}
        slabs.append((c[rows], held, np.empty_like(c[rows])))
    names = steps(words)

    def call() -> None:
        for some, held, room in slabs:
            for word in names:
                if word in ADDED:
                    np.add(some, held[word], out=some)
                else:
                    _function(word, some, room, normal)

    return call


def _function(word: str, x: Any, room: Any, normal: Callable[..., Any] | None) -> None:
    """Overwrite `x` with a function of it; `room` is of its shape."""
    if word == "relu":
        np.maximum(x, 0, out=x)
    elif word == "gelu" and normal is not None:
        normal(x, out=room)
        np.multiply(x, room, out=x)
    elif word == "gelu_tanh":
        np.multiply(x, x, out=room)
        room *= CUBIC * ROOT
        room += ROOT
        room *= x
        np.tanh(room, out=room)
        room += 1
        room *= 0.5
        np.multiply(x, room, out=x)
    else:
        np.negative(x, out=room)
        np.exp(room, out=room)
        room += 1
        np.divide(x, room, out=x)
