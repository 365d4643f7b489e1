"""Products of the same rows, side by side.

Owns `abreast`, which makes one product of several that share their first operand,
and says why where it does not. Imports `fusion.graph`, `ops.prepack`, `fusion.partition`. One product packs
or streams A once and hands work to threads once; its weights must lie side by side,
so only weights that never change are joined: packed ones, once, kept as long as a program uses them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from portmm.ops.prepack import join

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node
    from portmm.fusion.partition import Split

MOST_BYTES = 1 << 26
"""Weights that are joined, in bytes: they are then in memory twice. What that saves is the handing-over of
one product to threads, a microsecond, and reading A again, which wide weights dwarf."""
_joined: dict[tuple[int, ...], tuple[weakref.ref[Any], ...]] = {}
"""Weights, by identity -> what they were joined to, and they themselves: kept by the programs that use them."""


def abreast(graph: Graph, split: Split) -> list[tuple[str, str]] | None:
    """Make one product of those that share A where that pays: line, and why it does not; None if there are none."""
    groups: dict[Node, list[Node]] = {}
    for unit in split.units:
        if unit.kind == "product":
            groups.setdefault(unit.members[0].inputs[0], []).append(unit.members[0])
    said: list[tuple[str, str]] = []
    found = False
    for products in groups.values():
        if len(products) < 2:
            continue
        found = True
        alone = [x for x in products if len(split.of[x].members) == 1]
        packed = [x for x in alone if x.inputs[1].kind == "weight" and x.inputs[1].dtype is not None]
        for x in products:
            if x not in alone:
                said.append((x.where, f"{x.name} stays apart from others of its rows: it takes what follows it"))
            elif x not in packed:
                said.append((x.where, f"{x.name} stays apart from others of its rows: its weight may change; pack it"))
        if len(packed) > 1:
            said += _join(graph, sorted(packed, key=lambda x: x.number))
    return said if found else None


def _join(graph: Graph, products: list[Node]) -> list[tuple[str, str]]:
    """One product in place of several, whose results become views of its own."""
    weights = tuple(graph.leaves[x.inputs[1].leaf] for x in products)
    if len({x.dtype for x in products}) > 1 or len(set(map(id, weights))) < len(weights):
        return []
    size = sum(w.nbytes for w in weights)
    if size > MOST_BYTES:
        why = f"their weights of {size >> 20} MiB would be there twice"
        return [(x.where, f"{x.name} stays apart from others of its rows: {why}") for x in products]
    whole = _weight(weights)
    if whole is None:
        why = "their panels do not fit together"
        return [(x.where, f"{x.name} stays apart from others of its rows: {why}") for x in products]
    first = products[0]
    kind = type(first)
    weight = kind("weight", whole.shape, whole.owner.dtype, (), lambda: whole, "weights", first.line, first.number)
    graph.fixed[weight] = whole
    shape = (*first.shape[:-1], whole.shape[1])
    lines = ", ".join(dict.fromkeys(x.where for x in products))
    product = kind(
        "matmul", shape, first.dtype, (first.inputs[0], weight), first.plain, first.name, first.line, first.number,
        note=f"{len(products)} products of the same rows ({lines}), their packed weights joined once",
    )  # fmt: skip
    at = graph.nodes.index(first)
    graph.nodes[at:at] = [weight, product]
    start = 0
    for x in products:
        columns = slice(start, start + x.shape[-1])
        start += x.shape[-1]
        x.kind, x.inputs, x.name = "view", (product,), "[]"
        x.plain = lambda y, columns=columns: y[..., columns]
    return []


def _weight(weights: tuple[Any, ...]) -> Any:
    """Packed weights side by side, the same for all programs: however many shapes, there is one copy."""
    key = tuple(map(id, weights))
    first, *rest = (x() for x in _joined.get(key, ()) or (_gone,))
    if first is not None and all(x is y for x, y in zip(rest, weights, strict=True)):
        return first
    made = join(weights)
    if made is not None:
        for old in [k for k, refs in tuple(_joined.items()) if refs[0]() is None]:
            _joined.pop(old, None)
        _joined[key] = tuple(map(weakref.ref, (made, *weights)))
    return made


def _gone() -> None:
    """In place of a reference to what is there no more."""
