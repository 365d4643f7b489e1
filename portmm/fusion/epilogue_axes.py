"""Epilogues and prologues of products inside a function that is traced.

Owns `Axis`, the indices passed to them (i.m, i.n): in [] they name the axes of
arrays, elsewhere they are integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.fusion.graph import refuse
from portmm.fusion.traced_array import Index, Value
from portmm.spec.epilogue import index

if TYPE_CHECKING:
    from collections.abc import Callable


class Axis(Index):
    """An index along an axis of a product: an integer in expressions, the axis itself in []."""

    __slots__ = ("extent",)
    extent: tuple[int, int]

    def along_(self, x: Value, indices: tuple[Any, ...]) -> Any:
        """A view of an array, indexed by axes."""
        return x.view_("[i]", _along(indices, x.ndim))


class Indices:
    """The indices of an epilogue or a prologue: i.m, i.n, i.k, i.b."""

    def __init__(self, x: Value, names: str) -> None:
        last = {name: 1 - i for i, name in enumerate(names)} | ({"b": 2} if x.ndim > 2 else {})
        for name, back in last.items():
            length = x.shape[-1 - back]

            def plain(y: Any, back: int = back, length: int = length) -> Any:
                return np.broadcast_to(np.arange(length, dtype=np.int32).reshape(-1, *(1,) * back), y.shape)

            axis = index("nmb"[back])
            node = x.graph.map(f"i.{name}", lambda _, axis=axis: axis, plain, (x.node,), np.dtype(np.int32))
            value = Axis(x.graph, node)
            value.extent = back, length
            setattr(self, name, value)


def _along(indices: tuple[Any, ...], ndim: int) -> Callable[[Any], Any]:
    """The view function of an array indexed by axes, as in b[i.n]; axes have the lengths of the product."""
    if len(indices) != ndim or not all(isinstance(x, (Axis, int, np.integer)) for x in indices):
        raise refuse(
            f"an array of {ndim} dimensions is indexed by {len(indices)}; give an index or an integer for each"
        )
    axes = sorted((x.extent[0] for x in indices if isinstance(x, Axis)), reverse=True)
    order = [i for back in axes for i, x in enumerate(y for y in indices if isinstance(y, Axis)) if x.extent[0] == back]
    key = tuple(slice(0, x.extent[1]) if isinstance(x, Axis) else x for x in indices)
    spread = tuple(slice(None) if back in axes else None for back in range(max(axes, default=0), -1, -1))
    return lambda x: x[key].transpose(order)[spread]


def applied(function: Callable[..., Any], x: Value, names: str) -> Any:
    """The result of an epilogue or a prologue on an array."""
    code = getattr(function, "__code__", None)
    alone = code is not None and code.co_argcount == 1 and not code.co_flags & 0x04
    return function(x) if alone else function(x, Indices(x, names))
