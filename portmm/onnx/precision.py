"""Precision of products: a float32 graph whose products and convolutions multiply in a narrower type.

Owns `with_precision`. Operands of products are rounded once, where they are computed, and all that reads them reads the
narrow array; weights are narrow; sums, and the operators between products, are in float32 in registers. Residuals that
another product computes go through memory, rounded as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from portmm.arrays.numpy_arrays import numpy_of
from portmm.onnx.model import Node, OnnxError
from portmm.onnx.operators import operator
from portmm.onnx.rewrites import DOMAIN

PRECISIONS = ("f32", "bf16", "f16")
"""Types in which products of float32 operands may multiply."""
PRODUCTS = ("MatMul", "Gemm", "Conv")
"""Operators whose first two operands are rounded."""
SELECTING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "MaxPool")
"""Operators whose results are elements of their first operand: rounding before them is the same as after them."""

EXACT = ("Add", "Sub", "Mul", "Neg")
"""Operators by which an error below that of a rounding stays below it: their results are sums and products."""


def checked(precision: str) -> str:
    """The name of a precision.

    Raises:
        OnnxError: there is none of this name.
    """
    if precision not in PRECISIONS:
        raise OnnxError(f"precision {precision!r} is unknown; products multiply in {', '.join(PRECISIONS)}")
    return precision


def with_precision(
    nodes: list[Node], outputs: Collection[str], constants: dict[str, Any], precision: str
) -> list[Node]:
    """The nodes, with float32 products that multiply in a narrower type; their constants are replaced by narrow ones.

    Args:
        nodes: in an order in which they can run.
        outputs: names of the results.
        constants: arrays by name.
        precision: of `PRECISIONS`.
    """
    if precision == "f32" or any(x.dtype.kind != "O" and x.dtype.name in NARROW for x in constants.values()):
        return nodes
    return _Rounding(nodes, outputs, constants, precision).nodes


NARROW = ("bfloat16", "float16")


class _Rounding:
    """A rewrite of nodes.

    Attributes:
        nodes: the result.
    """

    def __init__(self, nodes: list[Node], outputs: Collection[str], constants: dict[str, Any], precision: str) -> None:
        self.constants, self.precision, self.nodes = constants, precision, list[Node]()
        self.kept = {*outputs, *(x for n in nodes for x in n.captured)}
        self.narrow: dict[str, str] = {}
        maker = {x: n for n in nodes for x in n.outputs}
        roots = {self._root(x, maker) for n in nodes if _multiplies(n) for x in n.inputs[:2] if x not in constants}
        roots |= {x for n in nodes if _multiplies(n) for x in n.inputs[3:4] if x in maker and _multiplies(maker[x])}
        self.rounded = _rounded_alone(nodes, roots, self.kept)
        for x in sorted(roots - set(maker)):
            self._round(x)
        for node in nodes:
            self._add(node)
            for x in node.outputs:
                if x in roots and x not in self.narrow:
                    self._round(x)
        read = {x for n in self.nodes for x in (*n.inputs, *n.captured)} | self.kept
        for name in [x for x in constants if x not in read]:
            del constants[name]

    def _root(self, x: str, maker: dict[str, Node]) -> str:
        """The value of whose elements an operand of a product consists."""
        node = maker.get(x)
        while node is not None and _selects(node) and node.inputs[0] not in self.constants:
            x, node = node.inputs[0], maker.get(node.inputs[0])
        return x

    def _round(self, x: str) -> None:
        """Add the rounding of a value."""
        self.narrow[x] = f"{x}, {self.precision}"
        self.nodes.append(_converting("Rounded", x, self.narrow[x], self.precision))

    def _add(self, node: Node) -> None:
        """Add a node, which reads narrow arrays."""
        inputs, attributes = list(node.inputs), node.attributes
        if _selects(node) and inputs[0] in self.narrow:
            inputs[0] = self.narrow[inputs[0]]
            (name,) = node.outputs
            self.narrow[name] = f"{name}, {self.precision}"
            self.nodes.append(replace(node, inputs=tuple(inputs), outputs=(self.narrow[name],)))
            if name in self.kept:
                self.nodes.append(_converting("Widened", self.narrow[name], name, self.precision))
            return
        for i, x in enumerate(inputs):
            if i < 2 and _multiplies(node):
                inputs[i] = self.narrow[x] if x in self.narrow else self._constant(x)
                attributes = node.attributes | {"sums": "f32"}
            elif x in self.narrow:
                inputs[i] = f"{x}, read by {node.name}"
                if inputs[i] not in inputs[:i]:
                    self.nodes.append(_converting("Widened", self.narrow[x], inputs[i], self.precision))
        if node.op in ("Erf", "Gelu") and self.rounded.issuperset(node.outputs):
            attributes = attributes | {"rounded": True}
        self.nodes.append(replace(node, inputs=tuple(inputs), attributes=attributes))

    def _constant(self, x: str) -> str:
        """The name of a constant in the narrow type."""
        name, value = f"{x}, {self.precision}", self.constants[x]
        if value.dtype != np.float32:
            return x
        if name not in self.constants:
            self.constants[name] = value.astype(numpy_of(self.precision))
        return name


def _rounded_alone(nodes: list[Node], roots: set[str], kept: set[str]) -> set[str]:
    """Values that are read rounded, and no others: roots, and what goes only into sums and products that are."""
    readers: dict[str, list[Node]] = {}
    for n in nodes:
        for x in n.inputs:
            readers.setdefault(x, []).append(n)
    alone = set[str]()
    for x in (x for n in reversed(nodes) for x in n.outputs if x not in kept):
        passed = all((_selects(n) or (n.op in EXACT and not n.domain)) and alone.issuperset(n.outputs)
                     for n in readers.get(x, ()))  # fmt: skip
        if x in roots or (passed and x in readers):
            alone.add(x)
    return alone


def _multiplies(node: Node) -> bool:
    return node.op in PRODUCTS and node.domain in ("", DOMAIN) and "blocks" not in node.attributes


def _selects(node: Node) -> bool:
    return node.op in SELECTING and not node.domain and len(node.outputs) == 1


def _converting(op: str, x: str, to: str, precision: str) -> Node:
    return Node(op, DOMAIN, 1, to, (x,), (to,), {"precision": precision})


@operator("Rounded", domains=(DOMAIN,))
def _rounded(node: Node, x: Any) -> Any:
    """A float32 array in the narrow type; others as they are."""
    wanted = numpy_of(node.attribute("precision"))
    if x.dtype != np.float32:
        return x
    source = getattr(x, "node", None)
    if source is not None and source.kind == "map" and source.name == "astype" and source.inputs[0].dtype == wanted:
        return x.recorder.wrap(source.inputs[0])
    return x.astype(wanted)


@operator("Widened", domains=(DOMAIN,))
def _widened(node: Node, x: Any) -> Any:
    """An array of the narrow type in float32; others as they are."""
    return x.astype(np.float32) if x.dtype == numpy_of(node.attribute("precision")) else x


def summed(node: Node, value: Any) -> Any:
    """A result of a product in the type of its sums, where its operands were rounded."""
    return value.astype(np.float32) if node.attribute("sums") and value.dtype.name in NARROW else value
