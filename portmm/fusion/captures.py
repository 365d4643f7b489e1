"""Arguments and captured values of a fused function.

Owns `arguments`, the kind of a call by its arguments, and `Scope`, which replaces them and what the function captures
by traced arrays and numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.interop import lay
from portmm.arrays.libraries import on_device
from portmm.fusion.traced_array import Value
from portmm.fusion.traced_number import traced_number
from portmm.trace.captures import Captures, Place, is_weight
from portmm.trace.closures import is_float, is_plain
from portmm.util.array_subclasses import refuse_class

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph

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
