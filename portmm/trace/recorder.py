"""The reads of a traced function: operands of its kernel, which are views of captured arrays, and numbers.

Owns `Source`, the array of an operand and the view that is read, and `Recorder`, the record of one trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.interop import adopt
from portmm.arrays.operand import standin
from portmm.errors import TraceError, refusals
from portmm.spec.epilogue import AXES, Operand, load, number
from portmm.spec.expr import Expr, apply

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
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
    array: Array
    view: tuple[str | int, ...]
    exact: bool = False
    device: tuple[Any, ...] = ()


class Recorder:
    """The record of one trace: operands and numbers that the function reads.

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
        self.standins: dict[int, Array] = {}
        self.there: dict[int, tuple[Array, Any, tuple[Any, ...]]] = {}  # by the identity of the stand-in
        self.kept: list[Any] = []  # devices' arrays that a dict names by identity
        self.lasting = True
        self.by_extents = False

    def operand(self, key: tuple[Any, ...], array: Array, view: tuple[str | int, ...], *, exact: bool = False) -> Expr:
        """The element of an array."""
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

    def seen(self, i: int, array: Array) -> Expr:
        """The element of the i-th operand."""
        value = load(i, self.operands[i].dtype)
        return apply("ne", value, 0) if array.dtype.kind == "b" else value

    def standin(self, value: Any) -> Array:
        """The stand-in for an array on a device, the same each time."""
        stand_in = self.standins.get(id(value))
        if stand_in is None:
            there = adopt(value)
            assert there is not None  # noqa: S101 - it is on a device
            self.kept.append(value)
            stand_in = self.standins[id(value)] = standin(there)
            self.there[id(stand_in)] = (stand_in, value, there.device)
        return stand_in

    def look(self, array: Array, view: Array, function: Callable[[Any], Any]) -> Array:
        """A view of an array; the view of a stand-in is a stand-in for the same view of the device's array."""
        if id(array) in self.there:
            _, value, device = self.there[id(array)]
            self.there[id(view)] = (view, function(value), device)
        return view

    def number(self, key: tuple[Any, ...]) -> Expr:
        """The number that each call reads by this key."""
        if key not in self.numbers:
            self.numbers.append(key)
        return number(self.numbers.index(key))


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


def described(array: Array, view: tuple[str | int, ...]) -> Operand:
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


def readable_in_place(array: Array) -> bool:
    """Whether kernels can read an array in place."""
    same_type = element(array.dtype)[1]
    return same_type and array.flags.aligned and not any([s % array.itemsize for s in array.strides])  # noqa: C419 - faster
