"""Element-wise expressions of prologues and epilogues.

Owns `Expr`, a graph of typed operations on values that are lanes of vectors in
a kernel. Python's operators build expressions, so
that an ordinary function of arrays, called with expressions, is traced. Equal
expressions are one object, so that common subexpressions are computed once.

Three types: "f32", "s32" (wraps around) and "mask", the result of a comparison.
A literal takes the type of the other operand. `fma` rounds once where the machine
can, and any product that is an operand of a sum may be contracted to one: see
`-ffp-contract=fast`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import _remove_dead_weakref, ref  # type: ignore[attr-defined]

import numpy as np

from portmm.errors import TraceError
from portmm.spec.expr_ops import NUMPY, OPS
from portmm.util import locks

Array = np.ndarray[Any, Any]
Literal = int | float | bool
MOST_POWER = 16
"""Exponents up to which x ** n is products: six of them."""


def _operator(op: str) -> tuple[Callable[[Any, Any], Expr], Callable[[Any, Any], Expr]]:
    """The methods of an operator of two operands, and of the operator with its operands reversed."""

    def method(self: Any, other: Any) -> Expr:
        return apply(op, self, other)

    def reflected(self: Any, other: Any) -> Expr:
        return apply(op, other, self)

    return method, reflected


class Expr:
    """A value in every element of a tile.

    Attributes:
        op: an operation of `OPS`, or a leaf: "const" (value), "acc" (the product's sum), "index" (an axis:
            the element's index along it), "extent" (columns of a row), "load" (number of an operand),
            "given" (number of a function's argument), "number" (a scalar argument of each call), "reduce" or "fold"
            ("add" or "max", an expression), "contract" (a label, two expressions), "column_sum" or "row_scale" (see
            `epilogue.INNER`).
        args: its operands, or the parameters of a leaf.
        dtype: "f32", "s32" or "mask".
    """

    __slots__ = ("__weakref__", "args", "dtype", "op")
    placeholder_ = True
    __hash__ = object.__hash__
    op: str
    args: tuple[Any, ...]
    dtype: str

    @property
    def __class__(self) -> Any:
        """The class of the value where a function is not traced: an array's, or an index's."""
        return int if self.op == "index" else np.ndarray

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TraceError("the class of a value in a tile cannot be set")

    @property
    def inner(self) -> tuple[Expr, ...]:
        """The operands that are expressions."""
        return tuple([x for x in self.args if isinstance(x, Expr)])

    def __repr__(self) -> str:
        return f"<{self.op} {self.dtype}>"

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub")
    __mul__, __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("div")
    __lt__, __gt__ = _operator("lt")
    __le__, __ge__ = _operator("le")
    __and__, __rand__ = _operator("and")
    __or__, __ror__ = _operator("or")
    __xor__, __rxor__ = _operator("xor")
    __eq__, _ = _operator("eq")  # type: ignore[assignment]
    __ne__, _ = _operator("ne")  # type: ignore[assignment]

    def __neg__(self) -> Expr:
        return apply("neg", self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return apply("abs", self)

    def __invert__(self) -> Expr:
        return apply("not", self)

    def __lshift__(self, count: int) -> Expr:
        return apply("shl", self, count)

    def __rshift__(self, count: int) -> Expr:
        return apply("shr", self, count)

    def __pow__(self, power: Any) -> Expr:
        if isinstance(power, Expr):
            raise TraceError("** by a value in a tile cannot be traced; write pm.exp(power * pm.log(x))")
        exponent = _literal(power) if isinstance(power, (float, np.generic, np.ndarray)) else power
        x = real(self) if isinstance(exponent, float) else self
        if isinstance(exponent, float) and exponent.is_integer():
            exponent = int(exponent)
        if isinstance(exponent, int) and 0 <= exponent <= MOST_POWER:
            return _power(x, exponent)
        if isinstance(exponent, int) and -MOST_POWER <= exponent < 0 and x.dtype == "f32":
            return 1.0 / _power(x, -exponent)
        if exponent in (0.5, -0.5):
            return apply("sqrt", x) if exponent > 0 else 1.0 / apply("sqrt", x)
        raise TraceError(
            f"** {power!r} cannot be traced; use an integer from 0 to {MOST_POWER}, of floats also a negative one, "
            "or 0.5; otherwise pm.exp(power * pm.log(x))"
        )

    def __rpow__(self, base: Any) -> Expr:
        raise TraceError(f"{base!r} ** a value in a tile cannot be traced; write pm.exp(x * math.log({base!r}))")

    def __floordiv__(self, other: Any) -> Expr:
        return apply("shr", self, self._bits(other, "//"))

    def __mod__(self, other: Any) -> Expr:
        return apply("and", self, (1 << self._bits(other, "%")) - 1)

    def _bits(self, other: Any, operator: str) -> int:
        """The exponent of a divisor that is a power of two: shifts and masks round down, as Python does."""
        whole = isinstance(other, (int, np.integer)) and not isinstance(other, bool)
        if self.dtype != "s32" or not whole or other < 1 or other & (other - 1):
            raise TraceError(f"{operator} {other!r} cannot be traced; integers take a power of two")
        return int(other).bit_length() - 1

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            raise MissingError(
                f".{name} of a value in a tile: it is one element; pm has functions of elements and rows"
            )
        raise AttributeError(f"a value in a tile has no attribute {name!r}")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return array_ufunc(ufunc, method, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return array_function(function, args, options)

    def __bool__(self) -> bool:
        raise TraceError(
            "an if, while, and, or, not, min or max depends on values that are known in the kernel only; "
            "use pm.where, & and |, pm.minimum or pm.maximum"
        )

    def __iter__(self) -> Any:
        raise TraceError("a value in a tile cannot be iterated over; write the computation of one element")

    def __float__(self) -> float:
        raise TraceError("a value in a tile is not known while tracing; use portmm's functions in place of math's")

    __int__ = __index__ = __complex__ = __float__

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        raise TraceError(
            "a value in a tile is not known while tracing, so it cannot be converted to an array, or index an array "
            "that the function creates; create the array before, and let the function capture it: table[i.n]"
        )


def array_ufunc(ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The expression of a ufunc of NumPy's."""
    known = UFUNCS.get(ufunc.__name__)
    if method != "__call__" or options or known is None:
        name = f"np.{ufunc.__name__}" if method == "__call__" else f"np.{ufunc.__name__}.{method}"
        raise TraceError(f"{name} cannot be traced{' with options' if options else ''}; use the functions of pm")
    return known(*inputs)


def array_function(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The expression of another function of NumPy's."""
    known = FUNCTIONS.get(function.__name__)
    if known is None:
        raise TraceError(f"np.{function.__name__} cannot be traced; use the functions of pm")
    return known(*args, **options)


class MissingError(TraceError, AttributeError):
    """Error of a method of arrays that an element does not have."""


_METHODS = frozenset(x for x in dir(np.ndarray) if not x.startswith("_"))


def _refusing(name: str) -> Callable[..., Any]:
    def method(*_: Any) -> Any:
        raise TraceError(f"{name} of a value in a tile cannot be traced: it is one element, of the type of its sum")

    return method


for _name in "getitem setitem delitem len contains".split():  # noqa: SIM905
    setattr(Expr, f"__{_name}__", _refusing({"len": "len()", "contains": "in"}.get(_name, "[]")))
for _name in "rmod rfloordiv divmod rdivmod matmul rmatmul round trunc floor ceil rlshift rrshift".split():  # noqa: SIM905
    setattr(
        Expr,
        f"__{_name}__",
        _refusing({"matmul": "@", "rmatmul": "@"}.get(_name, _name.removeprefix("r") if _name != "round" else _name)),
    )


_PLAIN = frozenset((Expr, float, int, bool))
"""Classes of values that are no placeholders."""
_REAL_ONLY = frozenset(("greater", "div", "fma", "sqrt", "bits", "int"))
_WHOLE_ONLY = frozenset(("shl", "shr", "from_bits", "float"))
_BITS = frozenset(("and", "or", "xor", "not"))

UFUNCS: dict[str, Callable[..., Any]] = {}
"""NumPy's name of an element-wise function -> the function of expressions; `elementwise` adds those of its own."""
FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The same for functions that are no ufuncs."""

_making = locks.lock()
_known: dict[tuple[Any, ...], ref[Expr]] = {}
"""Expressions by their operations and arguments: a `WeakValueDictionary` without the half of its time."""


def node(op: str, args: tuple[Any, ...], dtype: str) -> Expr:
    """The expression of an operation and its arguments; the same object for the same arguments."""
    key = (op, dtype, *[id(x) if type(x) is Expr else (type(x), repr(x)) for x in args])
    known = _known.get(key)
    expr = None if known is None else known()
    if expr is None:
        with _making:
            known = _known.get(key)
            expr = None if known is None else known()
            if expr is None:
                expr = Expr()
                expr.op, expr.args, expr.dtype = op, args, dtype
                _known[key] = ref(expr, partial(_gone, key))
    return expr


def _gone(key: tuple[Any, ...], _: Any) -> None:
    """Drop what is known under a key, unless it is another expression by now."""
    _remove_dead_weakref(_known, key)


def const(value: Literal, dtype: str = "f32") -> Expr:
    """A literal of a type."""
    try:
        return node("const", (NUMPY[dtype](value).item(),), dtype)
    except OverflowError:
        raise TraceError(f"{value} does not fit {dtype}, the type of integers in expressions") from None


def real(x: Any) -> Expr:
    """A value as f32: an s32 is converted, a mask is 1 where it holds."""
    if type(x) is float:
        return const(x)
    if not isinstance(x, Expr):
        return real(x.broadcast_()) if hasattr(x, "broadcast_") else const(_literal(x))
    if x.dtype == "mask":
        return apply("select", x, const(1.0), const(0.0))
    return apply("float", x) if x.dtype == "s32" else x


def _literal(x: Any) -> Literal:
    if isinstance(x, (bool, np.bool_)):
        return bool(x)
    if isinstance(x, (int, np.integer)):
        return int(x)
    if isinstance(x, (float, np.floating)) or (isinstance(x, np.generic) and x.dtype.name == "bfloat16"):
        return float(x)
    if isinstance(x, np.ndarray) and x.ndim == 0:
        return _literal(x[()])
    if isinstance(x, np.ndarray):
        raise TraceError(
            f"an array of shape {x.shape}, made while the function is traced, cannot be combined with a value in a "
            "tile; create it before, and let the function capture it"
        )
    raise TraceError(
        f"a {type(x).__name__} cannot be combined with a value in a tile; use values, arrays, numbers, or a tuple"
    )


def _alike(values: tuple[Any, ...]) -> tuple[Expr, ...]:
    """Operands converted to one type: f32 if any is; literals take the type of the others."""
    types = {x.dtype for x in values if isinstance(x, Expr)}
    if types == {"f32"}:
        return tuple([real(x) for x in values])
    floats = any(isinstance(x, (float, np.floating)) for x in values)
    if types == {"mask"} and all(isinstance(x, (Expr, bool, np.bool_)) for x in values):
        return tuple(x if isinstance(x, Expr) else const(bool(x), "mask") for x in values)
    if types == {"s32"} and not floats:
        return tuple(x if isinstance(x, Expr) else const(_literal(x), "s32") for x in values)
    return tuple([real(x) for x in values])


def apply(op: str, *values: Any) -> Expr:
    """An operation on expressions and literals.

    Raises:
        TraceError: the types do not allow it.
    """
    if not _PLAIN.issuperset(map(type, values)):
        values = tuple([x.broadcast_() if hasattr(x, "broadcast_") else x for x in values])
    if op == "select":
        mask, *rest = values
        if not isinstance(mask, Expr):
            mask = _literal(mask)
            return real(rest[0] if mask else rest[1])
        first, second = _alike(tuple(rest))
        args: tuple[Expr, ...] = (mask if mask.dtype == "mask" else apply("ne", mask, 0), first, second)
    elif op in ("shl", "shr"):
        count = values[1]
        if not isinstance(count, (int, np.integer)) or not 0 <= count < 32:
            raise TraceError(f"a shift by {count!r}; use a literal from 0 to 31")
        args = (values[0], const(int(count), "s32"))
    elif op in _REAL_ONLY:
        args = tuple([real(x) for x in values])
    else:
        args = _alike(values)
    kind = args[0 if op in ("shl", "shr") else -1].dtype
    if (op in _WHOLE_ONLY and kind != "s32") or (op in _BITS and kind == "f32"):
        raise TraceError(f"{op} is for integers{' and masks' if op in _BITS else ''}, not for {kind}")
    if kind == "mask" and op not in _BITS | {"select"}:
        return apply(op, *(real(x) for x in args))
    result = OPS[op].result
    dtype = {"same": args[0].dtype, "second": args[1].dtype}.get(result, result) if len(args) > 1 else result
    dtype = args[0].dtype if dtype == "same" else dtype
    return _simplified(op, args, dtype)


UFUNCS.update({name: partial(apply, op) for op, x in OPS.items() for name in x.ufuncs})


def _simplified(op: str, args: tuple[Expr, ...], dtype: str) -> Expr:
    """The operation, simplified: constants are folded, and operations without effect are removed."""
    if all([x.op == "const" for x in args]):  # noqa: C419 - faster
        with np.errstate(all="ignore"):
            return const(OPS[op].plain(*(NUMPY[x.dtype](x.args[0]) for x in args)).item(), dtype)
    first, last = args[0], args[-1]
    if op in ("mul", "div") and last.op == "const" and last.args[0] == 1:
        return first
    if op == "mul" and first.op == "const" and first.args[0] == 1:
        return last
    if op in ("neg", "not") and first.op == op:
        return first.args[0]
    if op == "select" and args[1] is last:
        return last
    if op in ("add", "mul", "and", "or", "xor") and first.op == "const":
        args = (last, first)  # one order of operands, so that equal expressions are one object
    return node(op, args, dtype)


def _power(x: Expr, power: int) -> Expr:
    """X times itself, by squaring."""
    if power == 0:
        return const(1, x.dtype if x.dtype == "s32" else "f32")
    half = _power(x, power // 2) if power > 1 else None
    square = half * half if half is not None else None
    return x if square is None else square * x if power % 2 else square


def ordered(roots: tuple[Expr, ...]) -> list[Expr]:
    """All expressions under `roots` in topological order, operands first."""
    visited: dict[int, Expr] = {}
    begun: set[int] = set()
    stack = [*reversed(roots)]
    while stack:
        x = stack[-1]
        key = id(x)
        if key in begun:  # what it is made of is before it by now
            visited[key] = stack.pop()
        else:
            begun.add(key)
            stack += [y for y in reversed(x.args) if isinstance(y, Expr) and id(y) not in begun]
    return list(visited.values())
