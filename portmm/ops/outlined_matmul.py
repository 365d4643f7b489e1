"""First calls of products with common epilogues, by the base set: a function is outlined, and not traced.

Owns `outline`, the steps of a function of a sum and its indices, as spelled by stand-ins that know nothing but
additions and functions of portmm's; and `product`, which finds the traced expressions of an outline in the base set.
The tracer and what it needs are twenty modules, twice what all the rest of a first call takes. Whatever a stand-in does
not know, and every later call, is traced as ever.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.build import kernel_store
from portmm.dispatch import base_kernels
from portmm.errors import BuildError
from portmm.ops import host_matmul
from portmm.ops.prepack import current, is_packed
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import spell
from portmm.spec.problem import AXES, Problem
from portmm.util.memo import Memory

Array = np.ndarray[Any, Any]
OUTLINE = "outline "
"""The beginning of questions to the base set for the expressions of an outline."""
ELEMENTWISE = "portmm.spec.elementwise"
"""The module of functions of elements."""

_met = Memory(1024, "calls")
"""Code of functions that were outlined: their next call is traced."""


def product(a: Any, b: Any, epilogue: Callable[..., Any]) -> Array | None:
    """The product of two matrices with an epilogue; None if it is to be traced.

    Args:
        a: A.
        b: B, an array or packed.
        epilogue: a function of an element's sum and its indices.

    Raises:
        BundleError: the base set is damaged.
    """
    if type(epilogue) is not types.FunctionType or type(a) is not np.ndarray or epilogue.__code__ in _met:
        return None
    if not (type(b) is np.ndarray or is_packed(b)) or a.ndim != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        return None
    try:
        return _product(a, b, epilogue) if base_kernels.active() else None
    except BuildError:  # it is raised again
        return None


def _product(a: Array, b: Any, epilogue: types.FunctionType) -> Array | None:
    """The same, of operands of the right classes and shapes."""
    host_matmul.begin()
    base, array = kernel_store.base() if base_kernels.run_time() else None, type(b) is np.ndarray
    right, word = b if array else current(b).owner, numpy_arrays.name_of(a.dtype)
    (m, k), n, dtype = a.shape, b.shape[1], a.dtype
    outlined = outline(epilogue, n) if base and m * n * k and right.dtype == dtype else None
    if base is None or outlined is None or (text := base.answer(question(word, outlined[0]))) is None:
        return None
    _met.keep(epilogue.__code__, True)
    if not numpy_arrays.addressable(a, dtype) or not numpy_arrays.addressable(right, dtype):
        return None
    left = numpy_arrays.canonical(a, dtype)
    layout, b_k, b_n = numpy_arrays.canonical(b, dtype)[1:] if array else ("packed", b.b_k, b.b_n)
    family = "" if array else b.family
    p = Problem(m, n, k, spell(word, word, word), 1, left.layout, layout, family=family, fused=text[0])
    basic = base_kernels.route(p)
    if basic is None:
        return None
    result, operands = np.empty((m, n), dtype), outlined[1]
    table = np.array([[0, *[int(x == "n") for x in AXES]]] * len(operands), np.int64)
    runtime().execute(
        basic[0], m, n, k, 1, a, left.row, left.col, 0, right, b_k, b_n, 0, result, n, 1, m * n, None,
        table, np.zeros(1, np.float32), *operands,
    )  # fmt: skip
    return result


def question(dtype: str, text: str) -> str:
    """The question for the expressions of an outline."""
    return f"{OUTLINE}{dtype} {text}"


def outline(function: types.FunctionType, n: int) -> tuple[str, list[Array]] | None:
    """The steps of a function, and its operands: vectors along n columns. None if it does anything else.

    Only for this call: what the function captures may be another array, or value, in the next.

    Args:
        function: of an element's sum, and of its indices if it takes a second argument.
        n: columns of the result.
    """
    steps = Steps(n)
    result = steps.result(function, (steps.add("acc"), Indices()))
    return None if result is None else ("; ".join(steps.texts), steps.operands)


NOT_PLAIN = 0x04 | 0x08 | 0x20 | 0x80 | 0x200
"""Flags of code: *args, **options, generators and coroutines."""


class Steps:
    """The steps of a function that is outlined.

    Args:
        n: columns of the result.
    """

    __slots__ = ("n", "operands", "texts")

    def __init__(self, n: int) -> None:
        self.n = n
        self.texts: list[str] = []
        self.operands: list[Array] = []

    def result(self, function: types.FunctionType, values: tuple[Any, ...]) -> Value | None:
        """The value that a function returns, if it is that of the last step; None if it does what is not known.

        Args:
            function: the function.
            values: its arguments; it may take fewer.
        """
        code = function.__code__
        if function.__defaults__ or function.__kwdefaults__ or vars(function):
            return None
        # A handler of exceptions could hide from us that a stand-in has refused.
        if code.co_flags & NOT_PLAIN or code.co_kwonlyargcount or code.co_exceptiontable:
            return None
        if code.co_argcount > len(values):
            return None
        try:
            outer = function.__globals__
            names = {x: outer[x] for x in code.co_names if x in outer}  # some may be names of attributes
            namespace = {x: y for x, y in zip(names, map(self.standin, names.values()), strict=True) if y is not None}
            cells = [self.standin(x.cell_contents) for x in function.__closure__ or ()]
            if None in cells:
                return None
            closure = tuple([types.CellType(x) for x in cells])
            copy = types.FunctionType(code, namespace | {"__builtins__": {}}, closure=closure or None)
            result = copy(*values[: code.co_argcount])
        except Exception:  # noqa: BLE001 - a user's function; the tracer says what is wrong with it
            return None
        return result if type(result) is Value and result.number == len(self.texts) - 1 else None

    def add(self, text: str) -> Value:
        """The value of a step."""
        self.texts.append(text)
        return Value(self, len(self.texts) - 1)

    def load(self, x: Array) -> Value:
        """The element of a vector along columns.

        Raises:
            TypeError: it is not one that kernels read in place.
        """
        if x.shape != (self.n,) or self.n == 1 or not (x.flags.c_contiguous and x.flags.aligned and x.dtype.isnative):
            raise TypeError
        at = next((i for i, y in enumerate(self.operands) if y is x), len(self.operands))
        self.operands += [x] if at == len(self.operands) else []
        return self.add(f"load {at} {numpy_arrays.name_of(x.dtype)}")

    def standin(self, x: Any) -> Any:
        """The stand-in of a captured value; None if there is none."""
        if type(x) is np.ndarray:
            return Vector(self, x)
        if x is sys.modules["portmm"]:
            return Functions(self)
        loaded = sys.modules.get(ELEMENTWISE)
        name = getattr(x, "__name__", "") if type(x) is types.FunctionType else ""
        if loaded is None or not name or getattr(loaded, name, None) is not x:
            return None
        return lambda *values: self.apply(name, values)

    def apply(self, name: str, values: tuple[Any, ...]) -> Value:
        """The value of a function or an operator.

        Raises:
            TypeError: an operand is no value of this function.
        """
        at = [(self.load(x.array) if type(x) is Vector else x) for x in values]
        if any([type(x) is not Value or x.steps is not self for x in at]):  # noqa: C419 - faster
            raise TypeError
        return self.add(" ".join([name, *(str(x.number) for x in at)]))


class Value:
    """A value in an element of the result."""

    __slots__ = ("number", "steps")
    __hash__ = None  # type: ignore[assignment]
    __bool__ = None

    def __init__(self, steps: Steps, number: int) -> None:
        self.steps, self.number = steps, number

    def __add__(self, other: Any) -> Value:
        return self.steps.apply("add", (self, other))

    def __radd__(self, other: Any) -> Value:
        return self.steps.apply("add", (other, self))

    def __eq__(self, _: object) -> bool:
        raise TypeError


class Vector:
    """A captured array."""

    __slots__ = ("array", "steps")

    def __init__(self, steps: Steps, array: Array) -> None:
        self.steps, self.array = steps, array

    def __getitem__(self, key: Any) -> Value:
        if key is not Indices.n:
            raise TypeError
        return self.steps.load(self.array)


class Indices:
    """The indices of an element; nothing is known but that one along a row is not another."""

    __slots__ = ()
    n = object()


class Functions:
    """The module portmm, whose functions of elements are spelled by their names."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __getattr__(self, name: str) -> Callable[..., Value]:
        changed = vars(sys.modules["portmm"]).get(name)
        if changed is not None and self._steps.standin(changed) is None:
            raise AttributeError(name)
        return lambda *values: self._steps.apply(name, values)
