"""Rewrites of a graph before it is divided: what follows a convolution or a product of integers becomes a part of it.

Owns `with_codes`, `with_integers`, `with_rounding`, `with_epilogues`, `with_groups`, `with_reciprocals` and
`with_scales`. Pooling and reshapes of values that are dequantized before and quantized alike after them are those of
codes. A product or a convolution of values that were dequantized, the right operand from constants, becomes one of
their codes. Values that are quantized and only then dequantized are rounded in place. A product of dynamically
quantized values and a constant matrix takes the conversion of its sums, their scales and the bias. A convolution takes
the addition of another array of its shape, a residual, and a ReLU that alone read its result, or a depth-to-space. A
group norm that was written as an instance norm of reshaped images is one operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from portmm.onnx.model import Node

DOMAIN = "portmm"
"""Domain of operators that only rewrites write."""


def _uses(nodes: list[Node], outputs: Collection[str]) -> Counter[str]:
    """The number of uses of each value, as a result too."""
    uses = Counter(x for n in nodes for x in (*n.inputs, *n.captured))
    uses.update(outputs)
    return uses


def _links(nodes: list[Node], outputs: Collection[str]) -> tuple[Counter[str], dict[str, Node], dict[str, Node]]:
    """The number of uses of each value, the node that alone uses a value, and the node that makes it."""
    uses = _uses(nodes, outputs)
    user = {x: n for n in nodes for x in n.inputs if uses[x] == 1}
    return uses, user, {x: n for n in nodes for x in n.outputs}


def with_scales(nodes: list[Node], outputs: Collection[str], constants: Mapping[str, Any]) -> list[Node]:
    """The nodes, with products of integers that take the scales and the bias of their sums."""
    uses, user, maker = _links(nodes, outputs)
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


def with_groups(nodes: list[Node], outputs: Collection[str], constants: Mapping[str, Any]) -> list[Node]:
    """The nodes, with group norms that exporters wrote as instance norms of reshaped images, a product and a sum."""
    uses, user, maker = _links(nodes, outputs)
    gone: set[str] = set()
    groups: dict[str, Node] = {}
    for node in nodes:
        first, second = maker.get(node.inputs[0]) if node.inputs else None, user.get((*node.outputs, "")[0])
        if node.op != "InstanceNormalization" or first is None or second is None or uses[node.inputs[0]] != 1:
            continue
        mul = user.get(second.outputs[0])
        add = user.get(mul.outputs[0]) if mul is not None else None
        kinds = [x.op for x in (first, second, mul, add) if x is not None]
        if mul is None or add is None or kinds != ["Reshape", "Reshape", "Mul", "Add"]:
            continue
        by, plus = (next(x for x in n.inputs if x not in y.outputs) for n, y in ((mul, second), (add, mul)))
        shape = maker.get(second.inputs[1])
        known = shape is not None and shape.op == "Shape" and shape.inputs == first.inputs[:1] and not shape.attributes
        numbers = {*node.inputs[1:], first.inputs[1], by, plus, *(() if known else second.inputs[1:])}
        fixed = numbers <= set(constants)
        if not fixed or first.attribute("allowzero", 0) or second.attribute("allowzero", 0):
            continue
        gone |= {x.name for x in (first, node, second, mul)}
        groups[add.name] = replace(
            node, op="GroupedNormalization", domain=DOMAIN, name=f"{node.name}, {add.name}", outputs=add.outputs,
            inputs=(first.inputs[0], first.inputs[1], *node.inputs[1:], second.inputs[1], by, plus),
        )  # fmt: skip
    return [groups.get(n.name, n) for n in nodes if n.name not in gone]


def with_reciprocals(nodes: list[Node], outputs: Collection[str], constants: dict[str, Any]) -> list[Node]:
    """The nodes, with multiplications in the place of divisions by a constant whose results only `Erf` reads.

    The argument of an error function may differ by one unit in the last place; a division takes as long as the rest of
    GELU.
    """
    _, user, _ = _links(nodes, outputs)
    result: list[Node] = []
    for node in nodes:
        after = user.get(node.outputs[0]) if node.op == "Div" and not node.domain else None
        by = constants.get(node.inputs[1]) if after is not None and after.op == "Erf" else None
        if by is not None and by.size == 1 and by.dtype == np.float32 and by != 0 and node.inputs[0] not in constants:
            name = f"1 / {node.inputs[1]}"
            constants[name] = (1 / by.astype(np.float64)).astype(np.float32)
            result.append(replace(node, op="Mul", inputs=(node.inputs[0], name)))
        else:
            result.append(node)
    return result


FULL = 4
"""Inputs of a product of integers with both zero points."""


SELECTING = ("MaxPool", "Flatten", "Reshape", "Transpose", "Squeeze", "Unsqueeze")
"""Operators whose results are elements of their first operand, the largest ones or all."""


def with_codes(nodes: list[Node], outputs: Collection[str], constants: Mapping[str, Any]) -> list[Node]:
    """The nodes, with operators of codes in the place of those of values that are dequantized and quantized alike."""
    _, user, maker = _links(nodes, outputs)
    gone: set[str] = set()
    of_codes: dict[str, Node] = {}
    for node in nodes:
        if node.op not in SELECTING or node.domain or len(node.outputs) != 1:
            continue
        before, after = maker.get(node.inputs[0]), user.get(node.outputs[0])
        if before is None or after is None or (before.op, after.op) != ("DequantizeLinear", "QuantizeLinear"):
            continue
        if before.inputs[0] not in constants and _alike(after, before, constants):
            gone.add(after.name)
            of_codes[node.name] = replace(node, inputs=(before.inputs[0], *node.inputs[1:]), outputs=after.outputs)
    return _read([of_codes.get(n.name, n) for n in nodes if n.name not in gone], outputs)


def _read(nodes: list[Node], outputs: Collection[str]) -> list[Node]:
    """The nodes without those that dequantize what no other reads."""
    read = {x for n in nodes for x in (*n.inputs, *n.captured)} | set(outputs)
    return [n for n in nodes if n.op != "DequantizeLinear" or read & set(n.outputs)]


def _alike(to: Node, back: Node, constants: Mapping[str, Any]) -> bool:
    """Whether a node quantizes and another dequantizes with the same single constants, in this order or the other."""
    if len(to.inputs) != 3 or len(back.inputs) != 3 or to.domain or back.domain:
        return False
    if not {*to.inputs[1:], *back.inputs[1:]} <= set(constants):
        return False
    (scale, zero), (own, point) = ([constants[x] for x in y.inputs[1:]] for y in (to, back))
    single = all(x.size == 1 for x in (scale, zero, own, point)) and zero.dtype == point.dtype
    kinds = (scale.dtype.name, own.dtype.name, zero.dtype.name in ("int8", "uint8"))
    return bool(single and kinds == ("float32", "float32", True) and scale == own > 0 and zero == point)


def with_integers(nodes: list[Node], outputs: Collection[str], constants: dict[str, Any]) -> list[Node]:
    """The nodes, with products and convolutions of dequantized values that take their codes."""
    maker = {x: n for n in nodes if n.op == "DequantizeLinear" for x in n.outputs}
    products = ("MatMul", "Gemm", "Conv")
    rest = [_of_codes(n, maker, constants) if n.op in products and not n.domain else n for n in nodes]
    return _read(rest, outputs)


def _of_codes(node: Node, maker: Mapping[str, Node], constants: dict[str, Any]) -> Node:
    """A product or a convolution that takes codes, or itself if its operands are not dequantized by constants."""
    left, right = (maker.get(x) for x in node.inputs[:2])
    if left is None or right is None or right.inputs[0] not in constants:
        return node
    if any(x not in constants for y in (left, right) for x in y.inputs[1:] if x):
        return node
    weight, along = constants[right.inputs[0]], 0 if node.op == "Conv" or node.attribute("transB", 0) else 1
    scale, axis = constants[right.inputs[1]], right.attribute("axis", 1)
    each = scale.size == 1 or (scale.ndim == 1 and axis % weight.ndim == along)
    blocks = left.attribute("block_size", 0) or right.attribute("block_size", 0)
    kinds = (weight.dtype.name, _zero_point(left, constants).dtype.name)
    floats = scale.dtype.name == "float32" == constants[left.inputs[1]].dtype.name
    if blocks or not each or not floats or constants[left.inputs[1]].size > 1 or not set(kinds) <= {"int8", "uint8"}:
        return node
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    if node.op in ("MatMul", "Gemm") and weight.ndim == 2:
        return _product_of_codes(node, (left, right), bias, maker, constants)
    plain = node.attribute("group", 1) == 1 and kinds[0] == "int8" and not _zero_point(right, constants).any()
    if node.op != "Conv" or not plain:
        return node
    inputs = (left.inputs[0], right.inputs[0], bias, _named(left, constants), left.inputs[1], right.inputs[1])
    return replace(node, op="ScaledConv", domain=DOMAIN, inputs=inputs)


def _product_of_codes(
    node: Node, operands: tuple[Node, Node], bias: str, maker: Mapping[str, Node], constants: dict[str, Any]
) -> Node:
    """A product of dequantized operands as one of their codes; itself, if it scales or adds more than a bias."""
    left, right = operands
    name, swapped = right.inputs[0], bool(node.attribute("transB", 0))
    columns = (constants[name].shape[1 - swapped],)
    source = maker[bias].inputs[0] if bias in maker else bias
    added = getattr(constants.get(source), "shape", None) if bias else columns
    plain = node.attribute("alpha", 1.0) == 1 == node.attribute("beta", 1.0)
    if added != columns or not plain or node.attribute("transA", 0):
        return node
    if swapped:
        name, weight = f"{name}, transposed", constants[name]
        constants[name] = np.ascontiguousarray(weight.T)
    inputs = (left.inputs[0], name, *(_named(x, constants) for x in operands), left.inputs[1], right.inputs[1], bias)
    return replace(node, op="ScaledMatMulInteger", domain=DOMAIN, inputs=inputs)


def with_rounding(nodes: list[Node], outputs: Collection[str], constants: Mapping[str, Any]) -> list[Node]:
    """The nodes, with values that are quantized and only then dequantized rounded in place: no codes are stored.

    Of two that are added, the first is in memory until the kernel of the second reads it, as codes.
    """
    _, user, _ = _links(nodes, outputs)
    pairs: dict[str, tuple[Node, Node]] = {}
    for node in nodes:
        back = user.get(node.outputs[0]) if node.op == "QuantizeLinear" else None
        if back is not None and back.op == "DequantizeLinear" and _alike(node, back, constants):
            pairs[back.outputs[0]] = node, back
    order = {x: i for i, x in enumerate(pairs)}
    for node in nodes:
        if node.op == "Add" and not node.domain and all(x in pairs and user.get(x) is node for x in node.inputs):
            del pairs[min(node.inputs, key=order.__getitem__)]
    gone = {node.name for node, _ in pairs.values()}
    rounded = {
        back.name: replace(
            node, op="RoundToCodes", domain=DOMAIN, name=f"{node.name}, {back.name}", outputs=back.outputs
        )
        for node, back in pairs.values()
    }
    return [rounded.get(n.name, n) for n in nodes if n.name not in gone]


def _zero_point(node: Node, constants: Mapping[str, Any]) -> Any:
    """The zero point of a node that dequantizes."""
    if len(node.inputs) > 2 and node.inputs[2]:
        return constants[node.inputs[2]]
    codes = constants.get(node.inputs[0])
    return np.zeros((), np.uint8 if codes is None else codes.dtype)


def _named(node: Node, constants: dict[str, Any]) -> str:
    """The name of the constant that is the zero point of a node that dequantizes."""
    if len(node.inputs) > 2 and node.inputs[2]:
        return node.inputs[2]
    name = f"{node.name}, zero point"
    constants[name] = _zero_point(node, constants)
    return name


def with_epilogues(nodes: list[Node], outputs: Collection[str], constants: Collection[str]) -> list[Node]:
    """The nodes, with convolutions that take the residual, the ReLU and the depth-to-space that follow them."""
    uses = _uses(nodes, outputs)
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
                attributes=old.attributes | _taken(node),
            )  # fmt: skip
        if added.op == "Conv" and len(added.outputs) == 1 and uses[added.outputs[0]] == 1:
            convolutions[added.outputs[0]] = len(rest)
        rest.append(added)
    return [x for x in rest if x is not None]


def _convolution(
    node: Node, rest: list[Node | None], convolutions: dict[str, int], constants: Collection[str]
) -> int | None:
    """The index of the convolution that takes a node, the last one if there are two; or None."""
    if node.domain or node.op not in ("Add", "Relu", "DepthToSpace"):
        return None
    candidates = sorted((convolutions[x] for x in node.inputs if x in convolutions), reverse=True)
    for at in candidates:
        conv = rest[at]
        if conv is None or conv.inputs[1] not in constants:
            continue
        if node.op == "DepthToSpace" and len(conv.inputs) <= 3 and not conv.attribute("blocks"):
            return at
        if conv.attribute("relu") or node.op == "DepthToSpace" or (node.op == "Add" and conv.attribute("blocks")):
            continue
        other = [x for x in node.inputs if x not in conv.outputs]
        if node.op == "Relu" or (len(conv.inputs) <= 3 and len(other) == 1 and other[0] not in constants):
            return at
    return None


def _taken(node: Node) -> dict[str, Any]:
    """Attributes of a convolution that takes a node."""
    if node.op != "DepthToSpace":
        return {"relu": node.op == "Relu"}
    return {"blocks": node.attribute("blocksize"), "order": node.attribute("mode", "DCR")}
