"""Functions that expressions spell out: an exponential is found in a tree of shifts and polynomials.

Owns `function_of`. Kernels have no call of exp: `vector_math` expands it, and equal expressions are one object, so that
a tree is the expansion of a function if it unifies with that of an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from portmm.spec import device_math, short_math, vector_math
from portmm.spec.epilogue import argument
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.spec.expr import Expr

_ARGUMENT = argument(0, "f32")
NAMES = ("exp", "log", "tanh", "erf", "sigmoid", "silu", "expm1", "softplus", "gelu_tanh", "gelu")
_patterns: dict[tuple[str, ...], list[tuple[str, Expr]]] = {}
"""Last operation, its type and the operations of its operands -> names, with expansions that end so."""
_last: set[tuple[str, str]] = set()
_decays: dict[tuple[str, ...], list[Expr]] = {}
"""The same -> expansions that are for arguments alone that are not positive."""
_matches = Memory(1 << 16, "kernels")
_decaying = Memory(1 << 16, "kernels")
DECAY = "decay"
"""The operation of an exponential without an expansion, of an argument that is not positive."""


def _kind(x: Expr) -> tuple[str, ...]:
    """The last operation of an expression, its type and those of its operands, by which most expressions differ."""
    return x.op, x.dtype, *[y.op for y in x.args]


def add(name: str, function: Callable[[Expr], Expr], *, decays: bool = False) -> None:
    """Add a further spelling of a function, or one of arguments alone that are not positive."""
    pattern = function(_ARGUMENT)
    if any(x is _ARGUMENT for x in pattern.args):
        raise ValueError(f"{name} ends with an operation on its argument, which may be any expression")
    if decays:
        _decays.setdefault(_kind(pattern), []).append(pattern)
    _last.add((pattern.op, pattern.dtype))
    _patterns.setdefault(_kind(pattern), []).append((name, pattern))
    _matches.clear()
    _decaying.clear()


for _name in NAMES:
    add(_name, getattr(vector_math, _name))
for _name in short_math.SHORT:
    for _dtype in short_math.TYPES:
        add(_name, short_math.of_type(_name, _dtype))
        add(_name, device_math.of_type(_name, _dtype))


def function_of(x: Expr) -> tuple[str, Expr] | None:
    """The name and the argument of the function whose expansion an expression is, or None."""
    if x.op == DECAY:
        return "exp", x.args[0]
    if (x.op, x.dtype) not in _last or (some := _patterns.get(_kind(x))) is None:
        return None
    if x not in _matches:
        tried = (_match(x, *one) for one in some)
        return _matches.keep(x, next((y for y in tried if y), None))
    return _matches[x]


def decaying(x: Expr) -> Expr | None:
    """The argument of a function that an expression spells for arguments alone that are not positive, or None."""
    if x.op == DECAY:
        return x.args[0]
    if x not in _decaying:
        some = _decays.get(_kind(x), ())
        named = function_of(x) if any(_unified(x, y) is not None for y in some) else None
        _decaying.keep(x, None if named is None else named[1])
    return _decaying[x]


def _match(x: Expr, name: str, pattern: Expr) -> tuple[str, Expr] | None:
    """The argument with which a pattern is an expression, which is then one object with it."""
    value = _unified(x, pattern)
    return None if value is None else (name, value)


def _unified(x: Expr, pattern: Expr) -> Expr | None:
    """The argument of a pattern, or None if an expression is not of its form."""
    value: Expr | None = _ARGUMENT if x is pattern else None
    seen: set[tuple[int, int]] = set()
    stack = [(x, pattern)]
    while stack:
        a, b = stack.pop()
        if b is _ARGUMENT:
            if value is not None and value is not a:
                return None
            value = a
        elif a is not b and (id(a), id(b)) not in seen:
            seen.add((id(a), id(b)))
            inner = list(zip(a.args, b.args, strict=False))
            if (a.op, a.dtype, len(a.args)) != (b.op, b.dtype, len(b.args)) or not a.inner or not b.inner:
                return None
            for y, z in inner:
                if hasattr(y, "op") != hasattr(z, "op") or (not hasattr(y, "op") and y != z):
                    return None
                if hasattr(y, "op"):
                    stack.append((y, z))
    return value
