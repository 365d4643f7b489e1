"""What attention is of: shapes that fit, and its meaning in NumPy.

Owns the rules for shapes and types of `attend`, and what it gives where there is no compiler.
Imports `arrays.numpy_arrays`, `spec.dtype`, `spec.elementwise`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.spec.dtype import BY_NAME
from portmm.spec.elementwise import where
from portmm.trace.closures import traced_through
from portmm.util.array_subclasses import refuse_class

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
Sizes = tuple[int, ...]
HELD = ("f32", "bf16", "f16")
"""Types of operands."""
NAMES = {"b": "b", "h": "h", "q": "m", "kv": "n"}
"""What score and mask call the axes: kernels have queries by rows and keys by columns, or the other way round."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes, and the operands as (items, heads, rows, columns)."""

    lead: tuple[int, ...]
    items: int
    heads: int
    group: int
    m: int
    n: int
    d: int
    dv: int
    dtype: np.dtype[Any]
    operands: tuple[Array, ...]

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.lead, self.heads, self.m, self.dv)


def array(x: Any, name: str) -> Array:
    """An operand of a type that kernels read.

    Raises:
        TypeError: it is of another.
        ValueError: it has no heads.
    """
    refuse_class(x, name, matrix=False)
    found = np.asarray(x)
    if numpy_arrays.name_of(found.dtype) not in HELD:
        said = ", ".join(BY_NAME[y].numpy for y in HELD)
        raise TypeError(f"{name} has dtype {found.dtype}; attention takes {said}: convert it with astype")
    if found.ndim < 3:
        raise ValueError(f"{name} has shape {found.shape}; give (..., heads, rows, columns)")
    return found


def shape_of(q: Array, k: Array, v: Array) -> Shape:
    """Sizes that fit.

    Raises:
        TypeError: types differ.
        ValueError: shapes do not fit.
    """
    dtype = q.dtype.newbyteorder("=")
    if not dtype == k.dtype.newbyteorder("=") == v.dtype.newbyteorder("="):
        raise TypeError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; these must be equal")
    sizes = sizes_of(q.shape, k.shape, v.shape)
    lead = q.shape[:-3]
    operands = tuple(x if len(lead) == 1 else x.reshape(sizes[0], *x.shape[-3:]) for x in (q, k, v))
    return Shape(lead, *sizes, dtype, tuple(_readable(x, dtype) for x in operands))


def sizes_of(q: Sizes, k: Sizes, v: Sizes) -> tuple[int, int, int, int, int, int, int]:
    """Items, heads, heads that share keys, queries, keys, and elements of heads of K and of V, from three shapes.

    Raises:
        ValueError: they do not fit.
    """
    if not q[:-3] == k[:-3] == v[:-3] or k[-3:-1] != v[-3:-1]:
        raise ValueError(
            f"q {q}, k {k} and v {v} do not fit: all have the same items, and k and v the same heads and keys"
        )
    if q[-1] != k[-1] or not q[-1]:
        raise ValueError(f"q has {q[-1]} columns and k {k[-1]}; these must be equal, and not 0")
    heads, few = q[-3], k[-3]
    if not few or heads % few:
        raise ValueError(f"q has {heads} heads and k {few}; the first must be a multiple of the second")
    return math.prod(q[:-3]), heads, heads // few, q[-2], k[-2], q[-1], v[-1]


def _readable(x: Array, dtype: np.dtype[Any]) -> Array:
    """An operand whose rows are dense."""
    if numpy_arrays.addressable(x, dtype) and (x.strides[-1] == dtype.itemsize or x.shape[-1] == 1):
        return x
    return np.require(x, dtype, ("C", "A"))


def count(x: Any, name: str, least: int) -> int:
    """An integer that is not too small.

    Raises:
        TypeError: it is none.
        ValueError: it is less.
    """
    try:
        found = x.__index__()
    except AttributeError:
        raise TypeError(f"{name} is {x!r}; give an integer") from None
    if found < least:
        raise ValueError(f"{name} is {found}; give at least {least}")
    return int(found)


def lengths_of(x: Any, shape: Shape) -> Array:
    """How many keys each item has.

    Raises:
        TypeError: these are no integers.
        ValueError: they do not fit.
    """
    return _by_item(x, "lengths", shape, 0)


def starts_of(x: Any, shape: Shape) -> Array:
    """At which position each item's first query is.

    Raises:
        TypeError: these are no integers.
        ValueError: they do not fit.
    """
    return _by_item(x, "offsets", shape, -shape.m)


def _by_item(x: Any, name: str, shape: Shape, least: int) -> Array:
    """An integer for each item."""
    refuse_class(x, name, matrix=False)
    found = np.asarray(x)
    if found.dtype.kind not in "iu":
        raise TypeError(f"{name} have dtype {found.dtype}; give integers")
    if found.shape not in ((), shape.lead):
        raise ValueError(f"{name} have shape {found.shape}; the items have {shape.lead}")
    if found.size and not (found.min() >= least and found.max() <= shape.n):
        raise ValueError(f"{name} go from {found.min()} to {found.max()}; there are {shape.n} keys")
    return np.broadcast_to(found, shape.lead).astype(np.int32).reshape(shape.items)


def by_numpy(  # noqa: PLR0917 - what attention is told
    shape: Shape,
    function: Callable[[Any, Any], Any],
    causal: bool,
    window: int | None,
    lengths: Array | None,
    starts: Array | None,
) -> tuple[Array, Array]:
    """The result in float32 and the logarithms, (items, heads, queries, columns): of all scores at once."""
    q, k, v = (x.astype(np.float32) for x in shape.operands)
    k, v = np.repeat(k, shape.group, 1), np.repeat(v, shape.group, 1)
    item, head = np.arange(shape.items)[:, None, None, None], np.arange(shape.heads)[:, None, None]
    row, key = np.arange(shape.m)[:, None], np.arange(shape.n)
    with np.errstate(all="ignore"):
        s = function(q @ k.swapaxes(-1, -2), SimpleNamespace(b=item, h=head, q=row, kv=key))
        offset = shape.n - shape.m if starts is None else starts[:, None, None, None]
        at, seen = row + offset, np.ones((shape.m, shape.n), bool)
        if causal:
            seen = seen & (key <= at)
        if window is not None:
            seen = seen & (key > at - window) & (causal | (key < at + window))
        if lengths is not None:
            seen = seen & (key < lengths[:, None, None, None])
        s = np.where(seen, s, np.float32(-np.inf)).astype(np.float32)
        most = np.maximum(s.max(-1, keepdims=True), np.float32(-3e38))
        w = np.exp(s - most)
        total = w.sum(-1, keepdims=True)
        return np.where(total == 0, np.float32(0), w @ v / total), (most + np.log(total))[..., 0]


def refuse_others(**given: Any) -> None:
    """Refuse what is no function.

    Raises:
        TypeError: it is none.
    """
    for name, function in given.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} is no function: let one read the array, as in {name}=lambda i: seen[i.q, i.kv]")


def score_of(score: Any, mask: Any, factor: float | None) -> Callable[..., Any]:
    """What becomes of a product before the softmax."""
    scored = _scored(score, factor)
    if mask is None:
        return scored

    def function(s: Any, i: Any) -> Any:
        return where(mask(i), scored(s, i), -math.inf)

    return traced_through(function)


def _scored(score: Any, factor: float | None) -> Callable[..., Any]:
    if score is None:

        def function(s: Any, i: Any) -> Any:  # noqa: ARG001 - as the others
            return s * factor
    elif factor is None:

        def function(s: Any, i: Any) -> Any:
            return score(s, i)
    else:

        def function(s: Any, i: Any) -> Any:
            return score(s * factor, i)

    return traced_through(function)
