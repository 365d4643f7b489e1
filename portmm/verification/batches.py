"""Evaluation of many expressions of single elements at once: a row of residues for each.

Owns `evaluate_all`. Expressions are taken in levels, and those of a level with the same operation are one call of the
arithmetic, whose arrays have a row for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from portmm.spec.expr import Expr, apply
from portmm.spec.function_patterns import NAMES, decaying, function_of
from portmm.util.memo import Memory
from portmm.verification.values import LOWEST, Residues, Value

MAXIMA = ("max", "greater")
_sets = Memory(1 << 16, "kernels")
_values = Memory(1 << 12, "kernels")
_levels = Memory(4, "kernels")
_Key = tuple[int, str, str, tuple[str, ...]]
"""Level, operation, type and types of operands, those of positive ones with a `+`."""
_Group = tuple[_Key, list["Expr"], list[tuple["Expr", ...]]]


def evaluate_all(roots: Sequence[Expr], leaves: Mapping[Expr, tuple[Value, int]], numbers: Residues) -> Value:
    """The values of f32 expressions, a row for each.

    Args:
        roots: the expressions.
        leaves: for each element of an operand, a value with a row for each of several, and its row.
        numbers: the arithmetic.

    Raises:
        UnsupportedError: an operation has no meaning in the arithmetic.
    """
    rows = _Rows(numbers.field.tests)
    rows.place(leaves)
    for (_, op, dtype, _), group, inner in levels(roots):
        if op == "element":
            continue
        if op == "const":
            for x in group:
                rows.keep([x], numbers.number(np.full(1, x.args[0]), dtype))
            continue
        columns = zip(*inner, strict=True)
        rows.keep(group, numbers.apply(op, dtype, [rows.gathered(column) for column in columns]))
    return rows.gathered(roots)


class _Rows:
    """Values of expressions: floats in one table, a row for each, others by themselves.

    Attributes:
        at: row of a float, or a value without floats with its row there.
        signs: whether a row is positive.
    """

    def __init__(self, tests: int) -> None:
        self.count = 0
        self.at: dict[Expr, Any] = {}
        kinds = (np.uint64, np.int64, np.bool_, np.uint64)
        self.parts: list[Any] = [np.empty((1 << 10, tests), x) for x in kinds]
        self.signs = np.empty(1 << 10, bool)

    def place(self, leaves: Mapping[Expr, tuple[Value, int]]) -> None:
        """Keep rows of values, those of one value at once."""
        parts: dict[int, tuple[Value, list[Expr], list[int]]] = {}
        for x, (value, row) in leaves.items():
            _, group, at = parts.setdefault(id(value), (value, [], []))
            group.append(x)
            at.append(row)
        for value, group, at in parts.values():
            self.keep(group, Value.of((y[at] for y in value.parts()), positive=value.positive))

    def keep(self, group: Sequence[Expr], value: Any) -> None:
        """Keep a value with a row for each expression."""
        if not isinstance(value, Value):
            self.at |= {x: (value, i) for i, x in enumerate(group)}
            return
        first, self.count = self.count, self.count + len(group)
        while self.count > len(self.parts[0]):
            self.parts = [np.concatenate([x, np.empty_like(x)]) for x in self.parts]
            self.signs = np.concatenate([self.signs, np.empty_like(self.signs)])
        for table, part in zip(self.parts, value.parts(), strict=True):
            table[first : self.count] = part
        self.at.update(zip(group, range(first, self.count), strict=True))
        self.signs[first : self.count] = value.positive

    def gathered(self, of: Sequence[Expr]) -> Any:
        """A value with a row for each of some expressions."""
        at = [self.at[x] for x in of]
        if isinstance(at[0], int):
            return Value.of((x[at] for x in self.parts), positive=bool(self.signs[at].all()))
        tests = max(x.shape[-1] for x, _ in at)
        return np.stack([np.broadcast_to(x[i], (tests,)) for x, i in at])


def inner_of(x: Expr) -> tuple[str, tuple[Expr, ...]]:
    """The operation of an expression, which may be a function that it spells out, and its operands."""
    named = function_of(x)
    if named is not None:
        return named[0], (named[1],)
    return ("greatest", _maximum_of(x)) if x.op in MAXIMA else (x.op, x.inner)


def unguarded_exponential(roots: Sequence[Expr]) -> str:
    """An exponential whose spelling is for differences from a maximum, and that is of another argument; or "".

    The same function over the fields, it overflows in floats.
    """
    if not all(map(_at_most_zero, _decaying_in(roots))):
        return "an exponential of what may be positive is spelled as one of what is not: it would overflow"
    return ""


def decays(roots: Sequence[Expr]) -> bool:
    """Whether exponentials are spelled for differences from a maximum."""
    return any(True for _ in _decaying_in(roots))


def _decaying_in(roots: Sequence[Expr]) -> Iterator[Expr]:
    """The arguments of such exponentials."""
    every = (decaying(x) for (_, op, *_), group, _ in levels(roots) if op in NAMES for x in group)
    return (x for x in every if x is not None)


def _at_most_zero(x: Expr) -> bool:
    """Whether an expression is a value less a maximum of it and of others, or a maximum less one of more values."""
    if x.op != "sub":
        return False
    some, most = map(_values_of, x.inner)
    return all(y in most or (y.op == "const" and y.args[0] < LOWEST) for y in some)


def _values_of(x: Expr) -> frozenset[Expr]:
    """The values that an expression is the maximum of, or itself, without roundings."""
    if x not in _values:
        every = _maximum_of(x) if x.op in MAXIMA and function_of(x) is None else (x,)
        return _values.keep(x, frozenset(map(_rounded, every)))
    return _values[x]


def _rounded(x: Expr) -> Expr:
    """A product that is rounded by an addition of zero is the product."""
    zero = x.op == "fma" and x.args[2].op == "const" and not x.args[2].args[0]
    return apply("mul", *x.args[:2]) if zero else x


def _maximum_of(x: Expr) -> tuple[Expr, ...]:
    """The values that an expression is the maximum of, each of them once."""
    known = _sets.get(x)
    if known is None:
        every = dict.fromkeys(z for y in x.inner for z in (_maximum_of(y) if y.op in MAXIMA else (y,)))
        known = _sets.keep(x, tuple(every))
    return known


def levels(roots: Sequence[Expr]) -> list[_Group]:
    """Expressions by level, operation and types of operands, these first, with the operands of each; remembered."""
    key = tuple(roots)
    known = _levels.get(key)
    return _levels.keep(key, _leveled(roots)) if known is None else known


def _leveled(roots: Sequence[Expr]) -> list[_Group]:
    level: dict[Expr, int] = {}
    kinds: dict[Expr, str] = {}
    groups: dict[_Key, tuple[list[Expr], list[tuple[Expr, ...]]]] = {}
    stack = list(roots)
    while stack:
        x = stack[-1]
        if x in level:
            stack.pop()
            continue
        op, inner = inner_of(x)
        missing = [y for y in inner if y not in level]
        if missing:
            stack += missing
            continue
        stack.pop()
        level[x] = own = 1 + max([level[y] for y in inner], default=0)
        of = tuple([kinds[y] for y in inner])
        kinds[x] = f"{x.dtype}+" if _is_positive(x, op, of) else x.dtype
        key = own, op, x.dtype, of
        if key not in groups:
            groups[key] = [], []
        group, operands = groups[key]
        group.append(x)
        operands.append(inner)
    return [(key, *groups[key]) for key in sorted(groups, key=lambda x: x[0])]


def _is_positive(x: Expr, op: str, of: tuple[str, ...]) -> bool:
    """Whether a value is positive, as `Value.positive` has it: by its operation and the types of its operands."""
    if op in ("exp", "const"):
        return op == "exp" or (x.dtype == "f32" and x.args[0] >= 0)
    if op not in ("add", "mul", "div", "fma", "chain", "select"):
        return False
    return all([y[-1] == "+" for y in (of[1:] if op == "select" else of)])  # noqa: C419 - faster
