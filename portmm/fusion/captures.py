"""Arguments and captured values of a fused function, its numbers and its indices.

Owns `arguments`, the kind of a call by its arguments, and `Scope`, which replaces them and what the function captures
by traced arrays and numbers. Owns `TracedNumber`, which has the class of the number; where Python must know its value,
ByValueError makes the function be traced again with the value as a constant. Owns `Axis`, the indices passed to
epilogues and prologues of products inside a traced function (i.m, i.n): in [] they name the axes of arrays, elsewhere
they are integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.interop import lay
from portmm.arrays.libraries import on_device
from portmm.fusion.graph import ByValueError, refuse
from portmm.fusion.traced_array import Index, Recorded, Value
from portmm.spec.epilogue import index
from portmm.trace.captures import Captures, Place, is_weight
from portmm.trace.closures import is_float, is_plain
from portmm.trace.proxies import posing
from portmm.trace.tensor import refuse_values
from portmm.util.array_subclasses import refuse_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.fusion.graph import Graph


class TracedNumber(Recorded):
    """A number that varies per call."""

    __slots__ = ()

    __class__ = posing(lambda self: type(self.graph.leaves[self.node.leaf]), "a number", TypeError)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in _SOUGHT:
            raise AttributeError(name)
        raise ByValueError(f".{name} of a number depends on its value")


_SOUGHT = frozenset(("broadcast_", "along_", "family"))
"""Attributes that portmm's functions look for on other values."""


refuse_values(TracedNumber, ByValueError)


def traced_number(graph: Graph, x: float, name: str) -> TracedNumber:
    """A number as a leaf of the graph."""
    return TracedNumber(graph, graph.leaf(x, name))


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


Array = np.ndarray[Any, Any]


def array_key(x: Array) -> tuple[Any, ...]:
    """The properties of an array that select its kernels."""
    return (x.shape, x.strides, x.dtype, x.flags.aligned)


def arguments(values: Any, key: list[Any], leaves: list[Any], kept: list[Any]) -> None:
    """Append the cache key of some arguments, the values that vary per call (leaves), and objects named by identity."""
    for x in values:
        if type(x) is np.ndarray:
            key.append((x.shape, x.strides, x.dtype, x.flags.aligned))
            leaves.append(x)
        elif isinstance(x, (tuple, list)):
            key.append((type(x), len(x)))
            arguments(x, key, leaves, kept)
        elif isinstance(x, dict):
            key.append(tuple(x))
            arguments(x.values(), key, leaves, kept)
        elif isinstance(x, float) and is_float(x):
            key.append(type(x))
            leaves.append(float(x))
        elif isinstance(x, np.ndarray):
            refuse_class(x, "an argument", matrix=False)
            key.append(array_key(x))
            leaves.append(np.asarray(x))
        elif is_weight(x):
            key.append((id(x), x.shape))
            leaves.append(x)
            kept.append(x)
        elif isinstance(x, type) or is_plain(x):
            key.append((type(x), x))
        elif on_device(x):
            key.append(lay(x))
            leaves.append(x)
        else:
            key.append(id(x))
            kept.append(x)


class Scope(Captures):
    """The arguments and the captured values of a function while it is traced.

    Args:
        graph: the graph to record in.
        by_value: numbers are constants.
    """

    def __init__(self, graph: Graph, *, by_value: bool) -> None:
        super().__init__(by_value=by_value, fresh=False)
        self.graph = graph

    def argument(self, x: Any, name: str) -> Any:
        """The traced replacement of an argument, whose kind is in the key of the call: see `arguments`."""
        if isinstance(x, np.ndarray):
            return Value(self.graph, self.graph.leaf(np.asarray(x), name))
        if is_weight(x) or on_device(x):
            return Value(self.graph, self.graph.leaf(x, name))
        if isinstance(x, (tuple, list)):
            items = [self.argument(y, f"{name}[{i}]") for i, y in enumerate(x)]
            return type(x)(items) if type(x) in (tuple, list) else type(x)(*items)
        if isinstance(x, dict):
            return {k: self.argument(y, f"{name}[{k!r}]") for k, y in x.items()}
        if isinstance(x, float) and is_float(x):
            number = traced_number(self.graph, x, name)
            return x if self.by_value else number
        return x if isinstance(x, type) or is_plain(x) else self.wrapped(x, Place(self.guards.constant(x), name))

    def captured_array(self, x: Any, at: Place) -> Any:
        """The placeholder of an array in the host's memory or on a device."""
        return Value(self.graph, self.graph.leaf(np.asarray(x) if isinstance(x, np.ndarray) else x, at.name))

    def captured_number(self, x: Any, at: Place) -> Any:
        """The placeholder of a number; None for NumPy's of other types than float64, which are constants."""
        return traced_number(self.graph, x, at.name) if isinstance(x, float) else None

    def captured_weight(self, x: Any, at: Place) -> Any:
        """The placeholder of a packed weight, which kernels read."""
        return Value(self.graph, self.graph.leaf(x, at.name))

    def unseen(self) -> None:
        """Note that the trace depends on values that no later call compares."""
        self.graph.cacheable = False
