"""Numbers that vary from call to call, in a traced function of arrays.

Owns `TracedNumber`. It has the class of the number; where Python must know its value, ByValueError makes the function
be traced again with the value as a constant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.fusion.graph import ByValueError
from portmm.fusion.traced_array import Recorded
from portmm.trace.number import refuse_values

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph


class TracedNumber(Recorded):
    """A number that varies per call."""

    __slots__ = ()

    @property
    def __class__(self) -> Any:
        """The class of the number."""
        return type(self.graph.leaves[self.node.leaf])

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TypeError("the class of a number cannot be set")

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
