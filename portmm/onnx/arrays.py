"""Traced arrays of a model: the recorder that its operators write to.

Owns `ModelArrays`, the graph of whole arrays in which constants have fixed addresses and operations have the names of
the model's nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.fusion.graph import Graph
from portmm.fusion.graph import Node as Operation
from portmm.fusion.recorder import WholeArrays
from portmm.onnx import operators
from portmm.trace.placeholders import Array as Traced
from portmm.trace.placeholders import Placeholder

if TYPE_CHECKING:
    from portmm.onnx.model import Node

Array = np.ndarray[Any, Any]


CHANNELS_FIRST = "channels first"
"""Name of views of images that lie with channels last, as convolutions write them: (n, c, ...) of (n, ..., c)."""


GROUPED = "groups of channels"
"""Name of views of images that were computed with an axis of groups before that of their channels: (n, c, ...)."""


def grouped_channels(x: Any, shape: tuple[int, ...]) -> Any:
    """Images (n, c, ...) of (n, groups, channels of a group, pixels): what follows is computed in that shape, too."""
    return x.recorder.viewed(GROUPED, lambda y: y.reshape(shape), x)


def channels_first(x: Any) -> Any:
    """A view of images whose channels are last in memory with channels first."""
    order = (0, x.ndim - 1, *range(1, x.ndim - 1))
    return x.recorder.viewed(CHANNELS_FIRST, lambda y: y.transpose(order), x)


def channels_last(x: Any) -> Any:
    """Images with channels last: as they lie in memory, where a convolution wrote them."""
    if x.node.kind == "view" and x.node.name == CHANNELS_FIRST:
        return Traced(x.recorder, x.node.inputs[0])
    return x.transpose((0, *range(2, x.ndim), 1))


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

    def map(self, name: str, traced: Any, plain: Any, values: tuple[Any, ...], *more: Any, **options: Any) -> Operation:
        """Record an element-wise function; of images whose channels are last in memory in that order."""
        record = partial(super().map, name, traced, plain)
        nodes = [x for x in values if isinstance(x, Operation)]
        if any(x.name == GROUPED for x in nodes):
            groups = self._in_groups(nodes)
            if groups is not None:
                inner = record(tuple(groups[x] if isinstance(x, Operation) else x for x in values), *more, **options)
                shape = next(x.shape for x in nodes if x.name == GROUPED)
                return grouped_channels(Traced(self, inner), shape).node
        shapes = {x.shape for x in nodes if x.name == CHANNELS_FIRST}
        whole = [x for x in nodes if x.shape in shapes]
        if len(shapes) != 1 or not all(x.name == CHANNELS_FIRST for x in whole):
            return record(values, *more, **options)
        rank = len(whole[0].shape)
        if any(len(x.shape) > rank for x in nodes) or np.broadcast_shapes(*(x.shape for x in nodes)) not in shapes:
            return record(values, *more, **options)
        last = tuple(self._last(x, rank) if isinstance(x, Operation) else x for x in values)
        return channels_first(Traced(self, record(last, *more, **options))).node

    def _in_groups(self, nodes: list[Operation]) -> dict[Operation, Operation] | None:
        """Operands of element-wise functions in the shape of those with groups of channels, or None."""
        first = next(x for x in nodes if x.name == GROUPED)
        base, channels = first.inputs[0], (first.shape[1], *(1,) * (len(first.shape) - 2))
        groups: dict[Operation, Operation] = {}
        for x in nodes:
            if x.name == GROUPED and (x.shape, x.inputs[0].shape) == (first.shape, base.shape):
                groups[x] = x.inputs[0]
            elif x.shape in (channels, (1, *channels)):
                groups[x] = Traced(self, x).reshape((*base.shape[1:3], 1)).node
            elif x.shape == first.shape and x.kind != "view":
                groups[x] = Traced(self, x).reshape(base.shape).node
            elif not x.shape:
                groups[x] = x
            else:
                return None
        return groups

    def _last(self, x: Operation, rank: int) -> Operation:
        """An operand of element-wise functions with channels last."""
        if not x.shape:
            return x
        array = Traced(self, x)
        if len(x.shape) < rank:
            array = array.reshape((1,) * (rank - len(x.shape)) + x.shape)
        return channels_last(array).node

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

    def joined(self, xs: Sequence[Any]) -> Any:
        """Record arrays of the same type, one after the other along the last axis."""
        operands = tuple(map(self.node_of, xs))
        shape = (*operands[0].shape[:-1], sum(x.shape[-1] for x in operands))
        return Traced(self, self.add("join", shape, operands[0].dtype, operands, _joined, "concatenate"))

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


def _joined(*xs: Any) -> Any:
    return np.concatenate(xs, axis=-1)


def graph_of(x: Any) -> Graph | None:
    """The recorder of a traced array."""
    return x.recorder if isinstance(x, Placeholder) else None
