"""Traced arrays of a model: the recorder that its operators write to.

Owns `ModelArrays`, the graph of whole arrays in which constants have fixed addresses and operations have the names of
the model's nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.fusion.recorder import WholeArrays
from portmm.onnx import operators
from portmm.trace.placeholders import Array as Traced
from portmm.trace.placeholders import Placeholder

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.fusion.graph import Graph
    from portmm.fusion.graph import Node as Operation
    from portmm.onnx.model import Node

Array = np.ndarray[Any, Any]


class ModelArrays(WholeArrays):
    """The recorder of a model's graph.

    Attributes:
        label: the node that is recorded.
        known: nodes of constants, by identity.
    """

    __slots__ = ("kept", "known", "label")

    def __init__(self) -> None:
        super().__init__()
        self.label = ""
        self.known: dict[int, Operation] = {}
        self.kept: list[Any] = []

    def add(self, *fields: Any, **more: Any) -> Operation:
        """Record an operation under the name of the model's node."""
        node = super().add(*fields, **more)
        node.line = (self.label, 0)
        return node

    def constant(self, value: Array) -> Operation:
        """Record a constant, once."""
        node = self.known.get(id(value))
        if node is None:
            dense = np.require(value, requirements=("C", "A"))
            node = self.known[id(value)] = self.fixed_leaf(dense.reshape(value.shape), "constant")
            self.kept.append(value)
        return node

    def weight(self, value: Any, at: Any = None) -> Any:
        """The placeholder of a packed weight, which no call changes."""
        del at
        node = self.known.get(id(value))
        if node is None:
            node = self.known[id(value)] = self.fixed_leaf(value, "weight")
        return Traced(self, node)

    def sample(self, node: Operation) -> Any:
        """The results of a call on arrays of zeros, for their shapes and types."""
        likes = [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in node.inputs]
        with np.errstate(all="ignore"):
            return node.plain(*likes)

    def computed(self, node: Node, function: Callable[..., Any], inputs: list[Any]) -> tuple[Any, ...]:
        """Record a function of arrays that NumPy runs between kernels."""
        places = [isinstance(x, Placeholder) for x in inputs]
        fixed = [None if at else x for x, at in zip(inputs, places, strict=True)]
        wanted = [bool(x) for x in node.outputs]

        def plain(*arrays: Any) -> Any:
            operands = iter(arrays)
            values = [next(operands) if at else x for x, at in zip(fixed, places, strict=True)]
            outcome = operators.results(operators.computed(node, function, values))
            kept = [np.asarray(x) for x, need in zip(outcome, wanted, strict=False) if need]
            return kept[0] if len(kept) == 1 else kept

        nodes = tuple(x.node for x in inputs if isinstance(x, Placeholder))
        value = self.call(node.op, plain, nodes, "NumPy computes it")
        arrays = iter(value if isinstance(value, list) else [value])
        return tuple(Traced(self, next(arrays)) if need else None for need in wanted)


def graph_of(x: Any) -> Graph | None:
    """The recorder of a traced array."""
    return x.recorder if isinstance(x, Placeholder) else None
