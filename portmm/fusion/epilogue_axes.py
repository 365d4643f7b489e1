"""Epilogues and prologues of products inside a function that is traced.

Owns `Axis`, the indices that these are given (i.m, i.n), which name the axes of
arrays in [], and count elsewhere. Imports `fusion.graph`, `fusion.traced_array`.
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
    """Where the elements of a product are along an axis: integers, and in [] that axis itself."""

    __slots__ = ("place",)
    place: tuple[int, int]

    def along_(self, x: Value, words: tuple[Any, ...]) -> Any:
        """An array whose axes are named."""
        return x.view_("[i]", _along(words, x.ndim))


class Places:
    """The indices of an epilogue or a prologue: i.m, i.n and their like."""

    def __init__(self, x: Value, names: str) -> None:
        last = {name: 1 - i for i, name in enumerate(names)} | ({"b": 2} if x.ndim > 2 else {})
        for name, back in last.items():
            length = x.shape[-1 - back]

            def plain(y: Any, back: int = back, length: int = length) -> Any:
                return np.broadcast_to(np.arange(length, dtype=np.int32).reshape(-1, *(1,) * back), y.shape)

            axis = index("nmb"[back])
            made = x.graph.map(f"i.{name}", lambda _, axis=axis: axis, plain, (x.node,), np.dtype(np.int32))
            found = Axis(x.graph, made)
            found.place = back, length
            setattr(self, name, found)


def _along(words: tuple[Any, ...], ndim: int) -> Callable[[Any], Any]:
    """The view of an array whose axes are named: as in b[i.n], of the length of the product."""
    if len(words) != ndim or not all(isinstance(x, (Axis, int, np.integer)) for x in words):
        raise refuse(f"an array of {ndim} dimensions is indexed by {len(words)}; give an index or an integer for each")
    axes = sorted((x.place[0] for x in words if isinstance(x, Axis)), reverse=True)
    order = [i for back in axes for i, x in enumerate(y for y in words if isinstance(y, Axis)) if x.place[0] == back]
    key = tuple(slice(0, x.place[1]) if isinstance(x, Axis) else x for x in words)
    spread = tuple(slice(None) if back in axes else None for back in range(max(axes, default=0), -1, -1))
    return lambda x: x[key].transpose(order)[spread]


def applied(function: Callable[..., Any], x: Value, names: str) -> Any:
    """What an epilogue or a prologue makes of an array."""
    code = getattr(function, "__code__", None)
    alone = code is not None and code.co_argcount == 1 and not code.co_flags & 0x04
    return function(x) if alone else function(x, Places(x, names))
