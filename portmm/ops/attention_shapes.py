"""Shapes, types and options of attention.

Owns the checks of `attention`'s operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from portmm.arrays.numpy_arrays import numpy_name
from portmm.spec.dtype import BY_NAME
from portmm.util.array_subclasses import refuse_class
from portmm.util.records import dataclass

Array = np.ndarray[Any, Any]
Sizes = tuple[int, ...]
SUPPORTED = tuple(BY_NAME[x].numpy for x in ("f32", "bf16", "f16"))
"""Types of operands, by NumPy's names."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of attention, the type, and the operands: as (items, heads, rows, columns), or on a device as they are.

    `element` is portmm's name of the type, and `dtype` that, or on the host NumPy's type.
    """

    lead: tuple[int, ...]
    items: int
    heads: int
    group: int
    m: int
    n: int
    d: int
    dv: int
    dtype: Any
    element: str
    operands: tuple[Any, ...]

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.lead, self.heads, self.m, self.dv)

    def far(self, window: int | None) -> int:
        """The distance from which keys are not seen."""
        return self.n if window is None else min(window, self.m + self.n)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an attention call: arguments of `attention.attention`.

    With `factors` the score may be two values, see `attention_program.Form`.
    """

    score: Callable[..., Any] | None
    mask: Callable[..., Any] | None
    scale: float | None
    causal: bool
    window: int | None
    lengths: Any
    offset: Any
    lse: bool
    factors: bool = False

    @property
    def plain(self) -> bool:
        """Whether there are no options but a scale, and a causal mask."""
        functions = self.score is None and self.mask is None
        return functions and self.window is None and self.lengths is None and self.offset is None and not self.lse

    @property
    def plain_rows(self) -> bool:
        """Whether scores are alike for all queries, apart from a causal mask."""
        return self.score is None and self.mask is None and self.window is None

    def factor(self, d: int) -> float | None:
        """The factor of products of heads of `d` elements, before the score."""
        return 1 / math.sqrt(d) if self.scale is None and self.score is None else self.scale


def shape_of(*operands: tuple[Array, str]) -> Shape:
    """The shape of attention of q, k and v, as of `numpy_arrays.rows_of`, checked.

    Raises:
        TypeError: types differ, or are not supported.
        ValueError: shapes do not match.
    """
    sizes, ((q, element), *_) = sizes_of(*[(numpy_name(x.dtype), x.shape) for x, _ in operands]), operands
    arrays = [x if x.ndim == 4 else x.reshape(sizes[0], *x.shape[-3:]) for x, _ in operands]
    return Shape(q.shape[:-3], *sizes, q.dtype, element, tuple(arrays))


def sizes_of(*operands: tuple[str, Sizes]) -> tuple[int, int, int, int, int, int, int]:
    """Items, heads, heads per KV head, queries, keys, and elements of heads of K and of V.

    Args:
        operands: NumPy's name of the type, and the shape, of q, k and v.

    Raises:
        TypeError: types differ, or are not supported.
        ValueError: shapes do not match.
    """
    for name, (dtype, shape) in zip("qkv", operands, strict=True):
        if dtype not in SUPPORTED:
            raise TypeError(f"{name} has elements of {dtype}; attention takes {', '.join(SUPPORTED)}: convert them")
        if len(shape) < 3:
            raise ValueError(f"{name} has shape {shape}; pass (..., heads, rows, columns)")
    (q_type, q), (k_type, k), (v_type, v) = operands
    if not q_type == k_type == v_type:
        raise TypeError(f"q, k and v have dtypes {q_type}, {k_type} and {v_type}; these must be equal")
    if not q[:-3] == k[:-3] == v[:-3] or k[-3:-1] != v[-3:-1]:
        raise ValueError(
            f"q {q}, k {k} and v {v} do not fit: all have the same items, and k and v the same heads and keys"
        )
    if q[-1] != k[-1] or not q[-1]:
        raise ValueError(f"q has {q[-1]} columns and k {k[-1]}; these must be equal, and not 0")
    heads, kv_heads = q[-3], k[-3]
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; the first must be a multiple of the second")
    return math.prod(q[:-3]), heads, heads // kv_heads, q[-2], k[-2], q[-1], v[-1]


def count(x: Any, name: str, least: int) -> int:
    """An integer that is not less than `least`.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is less.
    """
    try:
        integer = x.__index__()
    except AttributeError:
        raise TypeError(f"{name} is {x!r}; pass an integer") from None
    if integer < least:
        raise ValueError(f"{name} is {integer}; pass at least {least}")
    return int(integer)


def by_item(x: Any, name: str, shape: Shape, least: int) -> Array:
    """An integer for each item: its number of keys, or the position of its first query, at least `least`.

    Raises:
        TypeError: these are not integers.
        ValueError: their shape or range is wrong.
    """
    refuse_class(x, name, matrix=False)
    values = np.asarray(x)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name} have dtype {values.dtype}; pass integers")
    if values.shape not in ((), shape.lead):
        raise ValueError(f"{name} have shape {values.shape}; the items have {shape.lead}")
    if values.size and not (values.min() >= least and values.max() <= shape.n):
        raise ValueError(
            f"{name} go from {values.min()} to {values.max()}; with {shape.n} keys pass {least} to {shape.n}"
        )
    return np.broadcast_to(values, shape.lead).astype(np.int32).reshape(shape.items)


def refuse_others(**functions: Any) -> None:
    """Refuse a score or mask that is not callable.

    Raises:
        TypeError: it is not.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(
                f"{name} is no function: pass one that reads the array, as in {name}=lambda i: seen[i.q, i.kv]"
            )
