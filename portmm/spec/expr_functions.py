"""Functions of expressions that no operator of Python stands for.

Owns `fma`, `select`, `sqrt`, the bits of floats, rounding to integers, and the replacement of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from portmm.spec.expr import Expr, apply, const, node


def fma(a: Any, b: Any, c: Any) -> Expr:
    """A * b + c, rounded once where the machine can."""
    return apply("fma", a, b, c)


def select(mask: Any, a: Any, b: Any) -> Expr:
    """A where the mask holds, else b."""
    return apply("select", mask, a, b)


def bits(x: Any) -> Expr:
    """The 32 bits of an f32 as an s32."""
    return apply("bits", x)


def from_bits(x: Any) -> Expr:
    """The 32 bits of an s32 as an f32."""
    return apply("from_bits", x)


def rounded(x: Any) -> Expr:
    """An f32 rounded to the nearest s32, halves to even; saturated, a NaN to the least."""
    whole = 1.5 * 2**23  # added to a number with a fraction it leaves the nearest integer in the last bits
    less = abs(x)
    most = select(less < 2.0**22, whole, select(x < 0.0, -(2.0**23), 2.0**23))  # up to 2**23 half an integer is an f32
    near = select(less < 2.0**23, (x + most) - most, x)
    beyond = select(near == near, const(2**31 - 1, "s32"), const(-(2**31), "s32"))  # noqa: PLR0124 - or a NaN
    return select(near < 2.0**31, apply("int", near), beyond)


def sqrt(x: Any) -> Expr:
    """The square root, correctly rounded."""
    return apply("sqrt", x)


def substituted(root: Expr, change: Callable[[Expr], Expr | None], done: dict[Expr, Expr]) -> Expr:
    """An expression with some of its parts replaced."""
    if root not in done:
        new = change(root)
        if new is None:
            args = [substituted(y, change, done) if isinstance(y, Expr) else y for y in root.args]
            same = all([x is y for x, y in zip(args, root.args, strict=True)])  # noqa: C419 - half the time
            new = root if same else node(root.op, tuple(args), root.dtype)
        done[root] = new
    return done[root]
