"""Rewrites of a graph before it is divided: what follows a convolution becomes a part of it.

Owns `with_epilogues`. A convolution takes the addition of another array of its shape, a residual, and a ReLU that alone
read its result.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from portmm.onnx.model import Node

DOMAIN = "portmm"
"""Domain of operators that only rewrites write."""


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
