"""Horizontal fusion of products that share A.

Owns `join_products`, which makes one product of several that share their first operand,
and returns the reasons where it does not. One product packs
or streams A once and forks threads once; its weights must be adjacent in memory,
so only immutable weights are joined: packed ones, once, kept as long as a program uses them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from portmm.ops.prepack import join

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node
    from portmm.fusion.partition import Split

MOST_BYTES = 1 << 26
"""Weights that are joined, in bytes: they are then in memory twice. It saves one fork of threads,
a microsecond, and reading A again, which is little beside weights with many columns."""
_joined: dict[tuple[int, ...], tuple[weakref.ref[Any], ...]] = {}
"""Weights, by identity -> the joined weight, and they themselves: kept by the programs that use them."""


def join_products(graph: Graph, split: Split) -> list[tuple[str, str]] | None:
    """Join products that share A where that pays; return (line, reason) where it does not, None if no two share A."""
    groups: dict[Node, list[Node]] = {}
    for unit in split.units:
        if unit.kind == "product":
            groups.setdefault(unit.members[0].inputs[0], []).append(unit.members[0])
    reasons: list[tuple[str, str]] = []
    shared = False
    for products in groups.values():
        if len(products) < 2:
            continue
        shared = True
        alone = [x for x in products if len(split.of[x].members) == 1]
        packed = [x for x in alone if x.inputs[1].kind == "weight" and x.inputs[1].dtype is not None]
        for x in products:
            if x not in alone:
                reasons.append(_unjoined(x, "it has an epilogue"))
            elif x not in packed:
                reasons.append(_unjoined(x, "its weight may change; pack it"))
        if len(packed) > 1:
            reasons += _join(graph, sorted(packed, key=lambda x: x.number))
    return reasons if shared else None


def _unjoined(x: Node, why: str) -> tuple[str, str]:
    return x.where, f"{x.name} is not joined with other products of the same rows: {why}"


def _join(graph: Graph, products: list[Node]) -> list[tuple[str, str]]:
    """Replace several products by one; their results become views of its result."""
    weights = tuple(graph.leaves[x.inputs[1].leaf] for x in products)
    if len({x.dtype for x in products}) > 1 or len(set(map(id, weights))) < len(weights):
        return []
    size = sum(w.nbytes for w in weights)
    if size > MOST_BYTES:
        return [_unjoined(x, f"their weights of {size >> 20} MiB would be in memory twice") for x in products]
    joined = _weight(weights)
    if joined is None:
        return [_unjoined(x, "their packed layouts cannot be joined") for x in products]
    first = products[0]
    kind = type(first)
    weight = kind("weight", joined.shape, joined.owner.dtype, (), lambda: joined, "weights", first.line, first.number)
    graph.fixed[weight] = joined
    shape = (*first.shape[:-1], joined.shape[1])
    lines = ", ".join(dict.fromkeys(x.where for x in products))
    product = kind(
        "matmul", shape, first.dtype, (first.inputs[0], weight), first.plain, first.name, first.line, first.number,
        note=f"{len(products)} products of the same rows ({lines}), their packed weights joined once",
    )  # fmt: skip
    position = graph.nodes.index(first)
    graph.nodes[position:position] = [weight, product]
    start = 0
    for x in products:
        columns = slice(start, start + x.shape[-1])
        start += x.shape[-1]
        x.kind, x.inputs, x.name = "view", (product,), "[]"
        x.plain = lambda y, columns=columns: y[..., columns]
    return []


def _weight(weights: tuple[Any, ...]) -> Any:
    """Packed weights joined along n, one copy for all programs and shapes."""
    key = tuple(map(id, weights))
    first, *rest = (x() for x in _joined.get(key, ()) or (_gone,))
    if first is not None and all(x is y for x, y in zip(rest, weights, strict=True)):
        return first
    joined = join(weights)
    if joined is not None:
        for old in [k for k, refs in tuple(_joined.items()) if refs[0]() is None]:
            _joined.pop(old, None)
        _joined[key] = tuple(map(weakref.ref, (joined, *weights)))
    return joined


def _gone() -> None:
    """A stand-in for a dead weak reference."""
