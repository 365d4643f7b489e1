"""The recorder of epilogues, prologues, scores and functions of rows: their operands, numbers and expressions.

Owns `Source`, the array of an operand and the view that is read, and `Elements`, the record of one trace.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from portmm.arrays.numpy_arrays import numpy_of
from portmm.errors import TraceError, refusals
from portmm.spec.epilogue import PRODUCT, Operand, load, number
from portmm.spec.expr import Expr, apply, array_function, array_ufunc
from portmm.spec.problem import AXES
from portmm.trace.closures import COMPUTED
from portmm.trace.placeholders import Array, ByValueError, Number, Placeholder
from portmm.util.records import dataclass

NdArray = np.ndarray[Any, Any]
_KNOWN = {
    "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
    "int8": "s8", "uint8": "u8", "int32": "s32",
}  # fmt: skip
_AS_OTHERS = {"float64": np.float32, "int16": np.int32, "uint16": np.int32, "int64": np.int32}


@dataclass(frozen=True, slots=True)
class Source:
    """The array of an operand, and the view of it that is read.

    Attributes:
        key: the steps from the function to the array.
        array: as it was when it was traced.
        view: the axis of the result for each of the array's, an integer for one index along it, or "" for
            one that is broadcast.
        exact: its axes are as long as the result's; else they are no shorter.
        device: the array's device, if it is not the host: `array` is a stand-in, and must not be read.
    """

    key: tuple[Any, ...]
    array: NdArray
    view: tuple[str | int, ...]
    exact: bool = False
    device: tuple[Any, ...] = ()


class Leaf(NamedTuple):
    """A captured array or number.

    Attributes:
        key: the steps from the function to it, or, of a number, how it is computed from others.
        like: the array as it was when it was traced, or the class of the number.
    """

    key: tuple[Any, ...]
    like: Any


_LAID = frozenset(("shape", "ndim", "dtype", "size", "strides", "itemsize", "nbytes"))
"""Attributes of an array that do not depend on values."""
_EXTENTS = frozenset(("shape", "size", "strides", "nbytes"))
"""Attributes that depend on extents."""
_VIEWS = frozenset(("T", "mT", "transpose", "swapaxes", "squeeze"))
"""Attributes and methods that return views."""
_OF_REALS = frozenset(("add", "sub", "mul", "truediv", "pow", "neg", "pos", "abs"))
"""Operators of numbers alone, which Python computes in each call."""


class Elements:
    """The recorder of a function of one element of a tile: operations are expressions.

    It keeps the operands and numbers that the function reads. An array is indexed by axes of the result, or broadcast
    as in NumPy; what looks at its elements makes the trace hold for this call only.

    Attributes:
        rank: dimensions of the result, a batch and heads included.
        captured: arrays and numbers that the function captures, and views of them that only this call computes.
        lasting: the next function of this kind is traced to the same expressions.
        by_extents: the function asked for extents of arrays that it captures.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sources: list[Source] = []
        self.operands: list[Operand] = []
        self.numbers: list[tuple[Any, ...]] = []
        self.captured: dict[tuple[Any, ...], Any] = {}
        self.standins: dict[int, NdArray] = {}
        self.there: dict[int, tuple[NdArray, Any, tuple[Any, ...]]] = {}  # by the identity of the stand-in
        self.kept: list[Any] = []  # devices' arrays that a dict names by identity
        self.lasting = True
        self.by_extents = False

    # Captures of the function.

    def array(self, x: Any, at: Any) -> Any:
        """The placeholder of an array in the host's memory or on a device."""
        self.captured[at.text,] = x
        if not isinstance(x, np.ndarray):
            return Array(self, Leaf((at.text,), self.standin(x)))
        self.lasting &= x.ndim > 0
        return Array(self, Leaf((at.text,), x)) if x.ndim else x

    def number(self, x: Any, at: Any) -> Any:
        """The placeholder of a number."""
        self.captured[at.text,] = x
        return Number(self, Leaf((at.text,), type(x)))

    def weight(self, x: Any, at: Any) -> Any:  # noqa: ARG002 - of the protocol
        """A packed weight, of which nothing is read but what it says of itself."""
        return x

    def kind(self, x: Placeholder) -> type:
        """The class of what a placeholder stands for."""
        return x.node.like if type(x) is Number else type(x.node.like)

    def refusal(self, text: str) -> TraceError:
        """The error for what cannot be traced."""
        return TraceError(text)

    # Operations.

    def broadcast_(self, x: Any) -> Any:
        """The value of a placeholder in expressions: last axes of an array are the result's, as NumPy broadcasts."""
        if type(x) is Number:
            if x.node.key not in self.numbers:
                self.numbers.append(x.node.key)
            return number(self.numbers.index(x.node.key))
        if type(x) is not Array:
            return x
        shape = x.node.like.shape
        if len(shape) > self.rank:
            raise TraceError(f"an array of shape {shape} has more dimensions than the result")
        axes = ("bhmn" if self.rank == 4 else PRODUCT)[-len(shape) :]
        return self.operand(x.node, tuple("" if n == 1 else a for n, a in zip(shape, axes, strict=True)), exact=True)

    def operation(self, name: str, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """The result of an operator: a number again if all operands are, else an expression."""
        kinds = [x.node.like if type(x) is Number else type(x) for x in operands]
        if not all(issubclass(kind, (int, float, np.number)) for kind in kinds):
            return function(*map(self.broadcast_, operands))
        if name not in _OF_REALS:
            raise ByValueError("a comparison of captured numbers depends on their values")
        # As text, too: 0.0 and -0.0 are equal.
        of = tuple((True, x.node.key) if type(x) is Number else (False, x, repr(x)) for x in operands)
        return Number(self, Leaf((COMPUTED, function, of), type(function(*(kind(1) for kind in kinds)))))

    def ufunc(self, ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of a ufunc."""
        return array_ufunc(ufunc, method, tuple(map(self.broadcast_, inputs)), options)

    def function(self, function: Any, kinds: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of another function of NumPy's: an expression, or what it makes of arrays alone."""
        if Number in kinds or Expr in kinds:
            return array_function(function, args, options)
        return function._implementation(*args, **options)  # noqa: SLF001 - as NEP 18 has it

    # Parts and attributes of arrays.

    def operand(self, leaf: Leaf, view: tuple[str | int, ...], *, exact: bool = False) -> Expr:
        """The element of an array."""
        key, array = leaf
        for i, x in enumerate(self.sources):
            if x.key == key and x.view == view and x.array is array:
                return self.seen(i, array)
        if not element(array.dtype)[0]:
            raise TraceError(f"an array has dtype {array.dtype}; expressions read {', '.join((*_KNOWN, *_AS_OTHERS))}")
        there, device = self.there[id(array)][1:] if id(array) in self.there else (array, ())
        self.captured.setdefault(key, there)
        self.sources.append(Source(key, array, view, exact, device))
        self.operands.append(described(array, view))
        return self.seen(len(self.sources) - 1, array)

    def seen(self, i: int, array: NdArray) -> Expr:
        """The element of the i-th operand."""
        value = load(i, self.operands[i].dtype)
        return apply("ne", value, 0) if array.dtype.kind == "b" else value

    def item(self, x: Array, key: Any) -> Any:
        """An operand indexed by axes of the result, or a part of the array."""
        indices = key if isinstance(key, tuple) else (key,)
        array = x.node.like
        if any(isinstance(i, Expr) for i in indices):
            if len(indices) != array.ndim:
                raise TraceError(f"an array of {array.ndim} dimensions is indexed by {len(indices)}; give one for each")
            return self.operand(x.node, tuple(map(_word, indices)))
        integers = [i for i in indices if isinstance(i, (int, np.integer)) and not isinstance(i, bool)]
        basic = all(i is None or i is ... or isinstance(i, (slice, int, np.integer)) for i in indices)
        self._look(x, f"[{key!r}]", known=basic and len(integers) < array.ndim)
        self.lasting = False
        return self._part(x, array[key], lambda y: y[key], ("item", repr(key)))

    def attribute(self, x: Array, name: str) -> Any:
        """An attribute or a method; arrays become operands."""
        self._look(x, name, known=name in _LAID or name in _VIEWS)
        self.by_extents |= name in _EXTENTS
        attribute = getattr(x.node.like, name)
        if isinstance(attribute, np.ndarray):
            return self._part(x, attribute, lambda y: getattr(y, name), ("attribute", name))
        self.lasting &= name in _LAID  # else the result depends on its values
        if not isinstance(attribute, types.BuiltinMethodType):
            return attribute

        def called(*values: Any, **options: Any) -> Any:
            step = "called", name, repr((values, options))
            return self._part(x, attribute(*values, **options), lambda y: getattr(y, name)(*values, **options), step)

        return called

    def _part(self, x: Array, part: Any, function: Callable[[Any], Any], step: tuple[str, ...]) -> Any:
        """The placeholder of an array that was made of another; the view of a stand-in is one of the device's array."""
        if not isinstance(part, np.ndarray) or not part.ndim:
            return part
        if id(x.node.like) in self.there:
            _, value, device = self.there[id(x.node.like)]
            self.there[id(part)] = (part, function(value), device)
        return Array(self, Leaf((*x.node.key, step), part))

    def value(self, x: Array, question: str, *args: Any) -> Any:
        """The answer of an array's values."""
        self._look(x, question)
        self.lasting = False  # the result depends on its values
        array = x.node.like
        return np.asarray(array, *args) if question == "array" else getattr(array, f"__{question}__")(*args)

    def _look(self, x: Array, what: str, *, known: bool = False) -> None:
        """Refuse operations on the elements of an array on a device."""
        if not known and id(x.node.like) in self.there:
            raise TraceError(f"{what} of an array on a device; compute it before, and let the function capture it")

    def standin(self, value: Any) -> NdArray:
        """The stand-in for an array on a device, the same each time."""
        stand_in = self.standins.get(id(value))
        if stand_in is None:
            from portmm.arrays.interop import adopt  # by the first such array
            from portmm.arrays.operand import standin

            there = adopt(value)
            assert there is not None  # noqa: S101 - it is on a device
            self.kept.append(value)
            stand_in = self.standins[id(value)] = standin(there)
            self.there[id(stand_in)] = (stand_in, value, there.device)
        return stand_in


def _word(x: Any) -> str | int:
    """The axis of an index, or an integer."""
    if isinstance(x, Expr) and x.op == "index":
        return str(x.args[0])
    if isinstance(x, (int, np.integer)):
        return int(x)
    raise TraceError(f"an array is indexed by {x!r}; use an index as it is (i.m, i.n), or an integer")


def run(function: Callable[[], Any]) -> Any:
    """The result of a function that is traced.

    Raises:
        TraceError: an operation could not be traced, though the function may have caught the error.
    """
    raised: list[TraceError] = []
    token = refusals.set(raised)
    try:
        result = function()
    finally:
        refusals.reset(token)
    if raised:
        raise raised[0]
    return result


@lru_cache(maxsize=256)
def element(dtype: np.dtype[Any]) -> tuple[str, bool]:
    """The type that kernels read elements of a dtype as, "" for none, and whether that needs no conversion."""
    if dtype.kind == "b":
        return "u8", True
    known = _KNOWN.get(dtype.name, "")
    if known:
        return known, dtype.isnative
    other = _AS_OTHERS.get(dtype.name)
    return ("" if other is None else "f32" if other is np.float32 else "s32"), False


def described(array: NdArray, view: tuple[str | int, ...]) -> Operand:
    """The operand that a view of an array is."""
    kind = element(array.dtype)[0]
    axes = "".join([x for x in AXES if x in view])
    if "n" not in axes:
        return Operand(kind, axes)
    last = view[-1] == "n" and view.count("n") == 1
    if not readable_in_place(array):  # a copy is read
        return Operand(kind, axes, last)
    step = sum([s for x, s in zip(view, array.strides, strict=True) if x == "n"])
    return Operand(kind, axes, step == array.itemsize or (last and array.shape[-1] == 1))


def readable_in_place(array: NdArray) -> bool:
    """Whether kernels can read an array in place."""
    same_type = element(array.dtype)[1]
    return same_type and array.flags.aligned and not any([s % array.itemsize for s in array.strides])  # noqa: C419 - faster


def native(x: NdArray) -> NdArray:
    """An operand that kernels can read, converted if need be."""
    if readable_in_place(x):
        return x
    if x.dtype.kind in "iu" and x.size and x.dtype.itemsize > 4 and (x.min() < -(2**31) or x.max() >= 2**31):
        raise ValueError("an operand of int64 has values beyond int32, which expressions compute with")
    return x.astype(numpy_of(element(x.dtype)[0]), order="C")
