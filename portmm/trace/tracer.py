"""Tracing of a function: it runs on values of a tile, and its operations become expressions.

Owns `Traced`, the expressions of a function with the operands and numbers that it captured, and `trace`, whose
results are remembered for each kind of closure, so that a function is traced once for each.

A traced function sees the arrays that it captures (closures, globals,
defaults, attributes of captured objects) as placeholders, which can be indexed by
axes. Captured floats become numbers that each call passes, so that a new value
compiles nothing; where Python must know them (an if, math.sqrt), they are
constants, and each value has a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import TraceError
from portmm.spec.elementwise import Typed
from portmm.spec.epilogue import Operand, index
from portmm.spec.expr import Expr, real
from portmm.trace.captures import Captures
from portmm.trace.placeholders import Indices, Placeholder
from portmm.trace.recorder import Elements, Source, run
from portmm.util.records import dataclass
from portmm.util.user_warnings import caller, is_users

if TYPE_CHECKING:
    import types


@dataclass(frozen=True, slots=True)
class Traced:
    """The expressions of a function, with the operands and numbers that it reads.

    Attributes:
        results: an expression for each value that it returned, and the NumPy type of a `cast`, or None.
        several: it returned a tuple.
        operands: the arrays that it reads.
        sources: the views of captured arrays that these are.
        numbers: keys of the numbers of a call.
        by_extents: the function asked for extents of arrays that it captures: they may be constants in the results.
    """

    results: tuple[tuple[Expr, Any], ...]
    several: bool
    operands: tuple[Operand, ...]
    sources: tuple[Source, ...]
    numbers: tuple[tuple[Any, ...], ...]
    by_extents: bool = False


def indices(names: dict[str, str]) -> Indices:
    """The indices of an element: names -> axes."""
    return Indices(names, index)


def trace(
    function: Callable[..., Any], values: tuple[Any, ...], *, by_value: bool, rank: int
) -> tuple[Traced, Elements, Captures]:
    """The expressions of a function that is run on values of a tile, their record, and the captured values' guards.

    Raises:
        TraceError: the function cannot be traced; the message names the line.
    """
    elements = Elements(rank)
    captures = Captures(elements, by_value=by_value, fresh=True)
    try:
        if not callable(function):
            raise TypeError(f"{function!r} is no function")
        traced = captures.outermost(function)
        result = run(lambda: traced(*values[: arity(function, len(values))]))
        results = tuple(map(_result, _values_of(result)))
    except TraceError as error:
        raise _located(error, function) from error.__cause__
    reads = (tuple(elements.operands), tuple(elements.sources), tuple(elements.numbers))
    return Traced(results, isinstance(result, tuple), *reads, elements.by_extents), elements, captures


def _values_of(result: Any) -> tuple[Any, ...]:
    """The results of a function as a tuple."""
    if isinstance(result, tuple) and not result:
        raise TraceError("the function returns an empty tuple; return a value")
    return result if isinstance(result, tuple) else (result,)


def arity(function: Any, most: int) -> int:
    """The number of values that a function takes, at most `most`: its parameters without defaults, or all of them."""
    ufunc, bound = (function.func, len(function.args)) if isinstance(function, partial) else (function, 0)
    if isinstance(ufunc, np.ufunc):
        return min(most, ufunc.nin - bound)
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):  # of C
        return most
    # A partial function's parameters from the first on that has its value by name are for keywords only.
    usual = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    if any(x.kind is x.VAR_POSITIONAL for x in parameters):
        return most
    return min(most, sum(x.default is x.empty for x in usual) or len(usual))


def _result(x: Any) -> tuple[Expr, Any]:
    if isinstance(x, Typed):
        return _result(x.value)[0], x.dtype
    if isinstance(x, Placeholder):
        x = x.broadcast_()
    return x if isinstance(x, Expr) else real(x), None


def _located(error: TraceError, function: Any) -> TraceError:
    """The error, with the line of the user's function that raised it."""
    if getattr(error, "located", False):
        return error
    line, name = 0, ""
    step = error.__traceback__
    while step is not None:
        if is_users(step.tb_frame.f_globals):
            line, name = step.tb_lineno, step.tb_frame.f_code.co_filename
        step = step.tb_next
    own: types.CodeType | None = getattr(function, "__code__", None)
    if not line and own is not None and is_users(function.__globals__):
        line, name = own.co_firstlineno, own.co_filename
    if not line and (frame := caller()) is not None:
        line, name = frame.f_lineno, frame.f_code.co_filename
    located = TraceError(f"{name}, line {line}: {error}" if name else str(error))
    located.located = True  # type: ignore[attr-defined]
    return located
