"""Arithmetic of random tests: the meaning of a program over Z_p and Z_q.

Owns `Value`, `Residues`, an `Arithmetic` of `ir.block_meaning`, and `UnsupportedError`. A value has a residue modulo p,
and one modulo q, which it is where it is an exponent. The laws that hold are those of a field, exp(x + y) = exp(x)
exp(y), and that a maximum is of a set; -inf is the maximum of no values, and its exponential 0. All other functions,
comparisons of data among them, are random functions of a key: what is equal under these laws is equal for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import PortmmError
from portmm.spec.expr_ops import OPS
from portmm.spec.function_patterns import function_of
from portmm.verification.field import Array, Field, Q, q_inverse, q_literal

if TYPE_CHECKING:
    from portmm.spec.expr import Expr

IDENTITY = np.uint64(1)
"""State of a finite number that stands for the maximum of no values."""
LOWEST = -1e30
"""Literals below it do so."""


class UnsupportedError(PortmmError):
    """Error for a program whose numbers have no meaning in a field."""


class LateError(PortmmError):
    """Error for a text whose compiler, or whose run, had not ended when the time for it had."""


class UncompiledError(UnsupportedError):
    """Error for a text that is not compiled with symbols for floats; its loops may be interpreted."""


@dataclass(eq=False, slots=True)
class Value:
    """Residues; all arrays have the tests as their last dimension.

    Attributes:
        p, q: residues.
        low: where it is -inf.
        peak: of a maximum, a hash of the values that it is the maximum of; `IDENTITY`; or 0.
        positive: it is a sum of products and quotients of exponentials and positive literals, or zero.
    """

    p: Array
    q: Array
    low: Array
    peak: Array
    positive: bool = False

    @classmethod
    def of(cls, parts: Iterable[Array], *, positive: bool = False) -> Value:
        """The value of its arrays."""
        p, q, low, peak = parts
        return cls(p, q, low, peak, positive)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents without the tests."""
        return self.p.shape[:-1]

    def parts(self) -> tuple[Array, Array, Array, Array]:
        """All arrays."""
        return self.p, self.q, self.low, self.peak


class Residues:
    """The arithmetic of some tests: see `block_meaning.Arithmetic`.

    Attributes:
        literals: that were met, by their rank.
        seen: residues of the arguments of exponentials, if these are to be kept.
    """

    def __init__(self, field: Field, *, keeps: bool = False) -> None:
        self.field = field
        self.literals: dict[tuple[float, int], Value] = {}
        self.seen: list[Array] | None = [] if keeps else None

    # Values.

    def empty(self, shape: tuple[int, ...], name: str) -> Value:
        """An operand that is to be written: what is not written is a random number, the same everywhere."""
        return self._copies(self._fresh(name, np.zeros((1,) * (len(shape) + 1), np.uint64), positive=True), shape)

    def drawn(self, shape: tuple[int, ...], name: str) -> Value:
        """A random operand."""
        at = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.uint64).reshape(*shape, 1)
        return self._copies(self._fresh(name, at), shape)

    def _copies(self, x: Value, shape: tuple[int, ...]) -> Value:
        """A value as an operand of a shape."""
        whole = (*shape, self.field.tests)
        return Value.of((np.array(np.broadcast_to(y, whole)) for y in x.parts()), positive=x.positive)

    def _fresh(self, name: str, *of: Array, positive: bool = False) -> Value:
        """A value of a random function."""
        return self._plain(*self.field.draw(name, *of), positive=positive)

    @staticmethod
    def _plain(p: Array, q: Array, *, positive: bool = False) -> Value:
        return Value(p, q, np.zeros(p.shape, bool), np.zeros(p.shape, np.uint64), positive)

    def literal(self, x: float, rank: int) -> Value:
        """A literal."""
        if np.isnan(x) or x == np.inf:
            raise UnsupportedError(f"{x} has no residue")
        if (x, rank) not in self.literals:
            self.literals[x, rank] = self._literal(x, rank)
        return self.literals[x, rank]

    def _literal(self, x: float, rank: int) -> Value:
        if x == -np.inf:
            return self.start("max", [1] * rank, "f32")
        shape = (1,) * rank + (self.field.tests,)
        value = self._plain(self.field.literal(x).reshape(shape), np.full(shape, q_literal(x)), positive=x >= 0)
        return replace(value, peak=np.full(shape, IDENTITY)) if x < LOWEST else value

    # The arithmetic of tiles.

    def element(self, array: Any, at: tuple[Array, ...], rank: int) -> Any:
        """Elements of an operand."""
        if isinstance(array, Value):
            parts = (x[at] for x in array.parts())
            shaped = (x if x.ndim > 1 else x.reshape([1] * rank + [-1]) for x in parts)
            return Value.of(shaped, positive=array.positive)
        x = np.asarray(array[at])
        return x.reshape(x.shape or [1] * rank)[..., None]

    def number(self, x: Any, dtype: str) -> Any:
        """A literal, an index or an argument."""
        if dtype != "f32":
            return np.asarray(x, np.int32 if dtype == "s32" else bool)[..., None]
        return self.literal(float(np.ravel(x)[0]), np.ndim(x))

    @staticmethod
    def function(x: Expr) -> tuple[str, Expr] | None:
        """A function that an expression spells out."""
        return function_of(x)

    def start(self, kind: str, shape: Sequence[int], dtype: str) -> Any:
        """An accumulator before any tile."""
        whole = (*shape, self.field.tests)
        if dtype != "f32":
            return np.zeros((*shape, 1), np.int64)
        zero = self._plain(np.zeros(whole, np.uint64), np.zeros(whole, np.int64), positive=True)
        return replace(zero, low=np.ones(whole, bool)) if kind == "max" else zero

    def total(self, kind: str, dtype: str, terms: Sequence[Any], axis: int, extent: int) -> Any:
        """The sum or maximum along an axis."""
        every = terms[0] if len(terms) == 1 else self.apply("mul", dtype, terms)
        parts = every.parts() if isinstance(every, Value) else (every,)

        if not extent:
            shape = list(parts[0].shape[:-1])
            shape[axis] = 1
            return self.start(kind, shape, dtype)
        if kind == "max":
            return self._most(every, axis, extent)
        if isinstance(every, Value):
            return self._sum(every, axis, extent)
        copies = 1 if every.shape[axis] > 1 else extent
        return np.asarray(every.astype(np.int64).sum(axis, keepdims=True) * copies)

    def _sum(self, every: Value, axis: int, extent: int) -> Value:
        """The sum along an axis, of all values at once; one value is itself."""
        if extent == 1:
            return every
        if every.shape[axis] < extent:
            every = Value.of((np.repeat(x, extent, axis) for x in every.parts()), positive=every.positive)
        p = self.field.total(every.p, axis)
        q, low = every.q.sum(axis, keepdims=True) % Q, every.low.any(axis, keepdims=True)
        return Value(p, q, np.asarray(low), np.zeros(p.shape, np.uint64), every.positive)

    def _most(self, every: Value, axis: int, extent: int) -> Any:
        """The maximum along an axis, of all values at once."""
        copies = np.uint64(1 if every.shape[axis] > 1 else extent)
        state = self._state(every, "max").sum(axis, keepdims=True, dtype=np.uint64) * copies
        one = [np.where(every.low, x.dtype.type(0), x).max(axis, keepdims=True) for x in every.parts()[:2]]
        low = np.asarray(every.low.all(axis, keepdims=True))
        return self._maximum(state, low, *one)

    def together(self, kind: str, kept: Any, more: Any) -> Any:
        """An accumulator with a further tile."""
        return self.apply("max" if kind == "max" else "add", "f32", (kept, more))

    def rescaled(self, kept: Any, before: Any, now: Any) -> Any:
        """An accumulator times exp(before - now)."""
        return self._mul(kept, self._exp(self._add(before, now, minus=True)))

    @staticmethod
    def read(state: Any, _: str) -> Any:
        """The value of an accumulator."""
        return state

    def store(self, array: Any, at: tuple[Array, ...], value: Any, shape: Sequence[int]) -> None:
        """Store of a value."""
        if isinstance(array, Value) and isinstance(value, Value):
            for to, x in zip(array.parts(), value.parts(), strict=True):
                to[at] = x
            if not value.positive:
                array.positive = False
        elif isinstance(array, Value) or isinstance(value, Value):
            raise UnsupportedError("a value is converted to another type when it is stored")
        else:
            array[at] = np.broadcast_to(value[..., 0], shape)

    # Operations.

    def apply(self, op: str, dtype: str, values: Sequence[Any]) -> Any:
        """The result of an operation of expressions or of a named function."""
        if not any(isinstance(x, Value) for x in values) and op not in ("float", "from_bits"):
            return self._integers(op, values)
        if method := getattr(self, f"_{op}", None):
            return method(*values)
        if op in ("lt", "le", "eq", "ne"):
            return self._compared(op, *values)
        if not all(isinstance(x, Value) for x in values):
            raise UnsupportedError(f"{op} of a float and of an integer")
        if any(x.low.any() for x in values):
            raise UnsupportedError(f"{op} of -inf")
        of = [x.p for x in values]
        if dtype == "f32":
            return self._fresh(op, *of)
        if dtype == "s32":
            return (self.field.random(op, *of) >> np.uint64(32)).astype(np.uint32).view(np.int32)
        return (self.field.random(op, *of) & np.uint64(1)).astype(bool)

    @staticmethod
    def _integers(op: str, values: Sequence[Any]) -> Any:
        """An operation on integers and masks, as it is."""
        if op in ("add", "sub", "mul") and any(x.dtype == np.int64 for x in values):
            values = [x.astype(np.int64) for x in values]
        return np.asarray(OPS[op].plain(*values))

    def _add(self, a: Value, b: Value, *, minus: bool = False) -> Any:
        low = a.low | b.low
        if minus and b.low.any():
            raise UnsupportedError("-inf is subtracted")
        p, q = (self.field.sub(a.p, b.p), a.q - b.q) if minus else (self.field.add(a.p, b.p), a.q + b.q)
        return Value(p, q % Q, low, np.zeros(p.shape, np.uint64), a.positive and b.positive and not minus)

    def _sub(self, a: Value, b: Value) -> Any:
        return self._add(a, b, minus=True)

    def _neg(self, a: Value) -> Any:
        return self._add(self.literal(0.0, len(a.shape)), a, minus=True)

    def _mul(self, a: Value, b: Value) -> Any:
        low = a.low | b.low
        if low.any() and not ((a.positive or not b.low.any()) and (b.positive or not a.low.any())):
            raise UnsupportedError("-inf is multiplied by a number whose sign is unknown")
        p = self.field.mul(a.p, b.p)
        return Value(p, a.q * b.q % Q, low, np.zeros(p.shape, np.uint64), a.positive and b.positive)

    def _fma(self, a: Value, b: Value, c: Value) -> Any:
        return self._add(self._mul(a, b), c)

    def _chain(self, total: Value, *factors: Value) -> Any:
        """A sum of products: see `node_table`."""
        for a, b in zip(factors[::2], factors[1::2], strict=True):
            total = self._fma(a, b, total)
        return total

    def _div(self, a: Value, b: Value) -> Any:
        if b.low.any():
            raise UnsupportedError("a divisor is -inf")
        inverse = self._plain(self.field.inverse(b.p), q_inverse(b.q), positive=b.positive)
        return self._mul(a, inverse)

    def exponents(self) -> set[bytes]:
        """The arguments of exponentials since the last call, by their residues."""
        rows = {y.tobytes() for x in self.seen or () for y in np.ascontiguousarray(x)}
        self.seen = None if self.seen is None else []
        return rows

    def _exp(self, a: Value) -> Any:
        if self.seen is not None:
            self.seen.append(np.broadcast_to(a.q % Q, a.p.shape)[~np.broadcast_to(a.low, a.p.shape).all(-1)])
        p = np.where(a.low, np.uint64(0), self.field.power(np.broadcast_to(a.q, a.p.shape)))
        q = self.field.exponent(self.field.random("exp", p))
        return self._plain(p, np.where(a.low, 0, q), positive=True)

    def _float(self, a: Array) -> Any:
        whole = a.astype(np.int64)
        p = np.where(whole < 0, self.field.sub(np.zeros_like(self.field.p), np.abs(whole).astype(np.uint64)),
                     whole.astype(np.uint64))  # fmt: skip
        p = np.array(np.broadcast_to(p, (*whole.shape[:-1], self.field.tests)))
        return self._plain(p, np.array(np.broadcast_to(whole % Q, p.shape)), positive=bool((whole >= 0).all()))

    def _from_bits(self, a: Array) -> Any:
        return self._fresh("from_bits", np.broadcast_to(a, (*a.shape[:-1], self.field.tests)).astype(np.uint64))

    def _select(self, mask: Array, a: Any, b: Any) -> Any:
        if not isinstance(a, Value):
            return np.where(mask, a, b)
        parts = (np.where(mask, x, y) for x, y in zip(a.parts(), b.parts(), strict=True))
        return Value.of(parts, positive=a.positive and b.positive)

    def _state(self, a: Value, name: str) -> Array:
        """The hash of the set of values whose maximum or minimum a value is."""
        state = np.where(a.peak == 0, self.field.random(f"{name} set", a.p), a.peak)
        return np.where(a.low | (a.peak == IDENTITY), np.uint64(0), state)

    def _max(self, a: Value, b: Value) -> Any:
        with np.errstate(over="ignore"):
            state = self._state(a, "max") + self._state(b, "max")
        finite = [np.where(a.low, y, x) for x, y in zip(a.parts()[:2], b.parts()[:2], strict=True)]
        return self._maximum(state, a.low & b.low, *finite)

    _greater = _max

    def _greatest(self, *values: Value) -> Any:
        """The maximum of a set of values, in which equal ones are one."""
        states: list[Array] = []
        for x in values:
            state = self._state(x, "max")
            for y in states:
                state = np.where(state == y, np.uint64(0), state)
            states.append(state)
        low = reduce(np.logical_and, [x.low for x in values])
        finite = [reduce(np.maximum, [np.where(x.low, y.dtype.type(0), y) for x, y in zip(values, z, strict=True)])
                  for z in ([x.p for x in values], [x.q for x in values])]  # fmt: skip
        with np.errstate(over="ignore"):
            return self._maximum(reduce(np.add, states), low, *finite)

    def _maximum(self, state: Array, low: Array, p: Array, q: Array) -> Value:
        """The maximum of a set by its hash; of no values -inf where it is low, or the residues of a finite number."""
        most, none = self._fresh("max", state), state == 0
        peak = np.where(none, np.where(low, np.uint64(0), IDENTITY), state)
        return Value(np.where(none, p, most.p), np.where(none, q, most.q), low, peak)

    def _compared(self, op: str, a: Value, b: Value) -> Any:
        """A comparison: a coin for each pair of values, which falls for one of a < b and b < a."""
        if op in ("eq", "ne"):
            same = np.where(a.low | b.low, a.low == b.low, a.p == b.p)
            return same if op == "eq" else ~same
        if op == "le":
            return ~self._compared("lt", b, a)
        if b.positive and not a.p.any() and not a.low.any():
            return b.p != 0
        first = a.p < b.p
        coin = self.field.random("lt", np.where(first, a.p, b.p), np.where(first, b.p, a.p)) & np.uint64(1) == 1
        less = (a.p != b.p) & (coin == first)
        return np.where(b.low, False, np.where(a.low, True, less))
