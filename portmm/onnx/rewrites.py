"""Rewrites of a graph before it is divided: what follows a convolution or a product of integers becomes a part of it.

Owns `with_epilogues` and `with_scales`. A product of dynamically quantized values and a constant matrix takes the
conversion of its sums, their scales and the bias. A convolution takes the addition of another array of its shape, a
residual, and a ReLU that alone read its result.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from portmm.onnx.model import Node

DOMAIN = "portmm"
"""Domain of operators that only rewrites write."""


def with_scales(nodes: list[Node], outputs: Collection[str], constants: Mapping[str, Any]) -> list[Node]:
    """The nodes, with products of integers that take the scales and the bias of their sums."""
    uses = Counter(x for n in nodes for x in (*n.inputs, *n.captured))
    uses.update(outputs)
    user = {x: n for n in nodes for x in n.inputs if uses[x] == 1}
    maker = {x: n for n in nodes for x in n.outputs}
    gone: set[str] = set()
    scaled: dict[str, Node] = {}
    for node in nodes:
        if (
            node.op != "MatMulInteger"
            or len(node.inputs) < FULL
            or not {node.inputs[1], node.inputs[3]} <= set(constants)
        ):
            continue
        cast = user.get(node.outputs[0])
        mul = user.get(cast.outputs[0]) if cast is not None and cast.op == "Cast" else None
        if cast is None or mul is None or mul.op != "Mul" or cast.attribute("to") != 1:
            continue
        factor = maker.get(next(x for x in mul.inputs if x != cast.outputs[0]))
        own = [x for x in factor.inputs if x not in constants] if factor is not None and factor.op == "Mul" else []
        if factor is None or len(own) != 1 or uses[factor.outputs[0]] != 1:
            continue
        (weights,) = (x for x in factor.inputs if x in constants)
        add, last, bias = user.get(mul.outputs[0]), mul, ""
        if add is not None and add.op == "Add":
            other = next(x for x in add.inputs if x != mul.outputs[0])
            if other in constants and constants[other].shape == constants[node.inputs[1]].shape[-1:]:
                last, bias = add, other
        steps = [node, cast, factor, mul, *([add] if bias and add is not None else [])]
        gone |= {x.name for x in steps}
        scaled[last.name] = replace(
            node, op="ScaledMatMulInteger", domain=DOMAIN, name=", ".join(x.name for x in steps if x is not factor),
            inputs=(*node.inputs, own[0], weights, bias), outputs=last.outputs,
        )  # fmt: skip
    rest = (scaled.get(n.name, n if n.name not in gone else None) for n in nodes)
    return [x for x in rest if x is not None]


FULL = 4
"""Inputs of a product of integers with both zero points."""


def with_epilogues(nodes: list[Node], outputs: Collection[str], constants: Collection[str]) -> list[Node]:
    """The nodes, with convolutions that take the residual and the ReLU that follow them."""
    uses = Counter(x for n in nodes for x in (*n.inputs, *n.captured))
    uses.update(outputs)
    convolutions: dict[str, int] = {}
    rest: list[Node | None] = []
    for node in nodes:
        source = _convolution(node, rest, convolutions, constants)
        if source is None:
            added = node
        else:
            old = rest[source]
            assert old is not None  # noqa: S101 - `convolutions` names no others
            rest[source] = None
            residual = [x for x in node.inputs if x not in old.outputs]
            added = replace(
                old, domain=DOMAIN, name=f"{old.name}, {node.name}", outputs=node.outputs,
                inputs=(*old.inputs, *("",) * (3 - len(old.inputs)), *residual),
                attributes=old.attributes | {"relu": node.op == "Relu"},
            )  # fmt: skip
        if added.op == "Conv" and len(added.outputs) == 1 and uses[added.outputs[0]] == 1:
            convolutions[added.outputs[0]] = len(rest)
        rest.append(added)
    return [x for x in rest if x is not None]


def _convolution(
    node: Node, rest: list[Node | None], convolutions: dict[str, int], constants: Collection[str]
) -> int | None:
    """The index of the convolution that takes a node, the last one if there are two; or None."""
    if node.domain or node.op not in ("Add", "Relu"):
        return None
    candidates = sorted((convolutions[x] for x in node.inputs if x in convolutions), reverse=True)
    for at in candidates:
        conv = rest[at]
        if conv is None or conv.attribute("relu") or conv.inputs[1] not in constants:
            continue
        other = [x for x in node.inputs if x not in conv.outputs]
        if node.op == "Relu" or (len(conv.inputs) <= 3 and len(other) == 1 and other[0] not in constants):
            return at
    return None
