"""Rewrite of a graph that is split into kernels: one product of several that share their first operand.

Owns `join_products`, which returns the reasons where it does not. One product packs or streams A once and forks threads
once; its weights must be adjacent in memory, so only immutable weights are joined: packed ones, once, kept as long as a
program uses them. What follows each product in its kernel follows the joined one if it is the same but for vectors
along columns, as biases are: constants are joined with the weights, others in each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from portmm.fusion.graph import Graph, Node
from portmm.fusion.partition import LEAVES, Split, Unit
from portmm.ops.prepack import join

MOST_BYTES = 1 << 26
"""Weights that are joined, in bytes: they are then in memory twice. It saves one fork of threads,
a microsecond, and reading A again, which is little beside weights with many columns."""
VECTOR = "vector"
_joined: dict[tuple[int, ...], tuple[weakref.ref[Any], ...]] = {}
"""Weights, by identity -> the joined weight, and they themselves: kept by the programs that use them."""


class Chain(NamedTuple):
    """A product and what follows it in its kernel.

    Attributes:
        members: its nodes, the product first.
        stored: the one that is read by others.
        key: equal for those that one kernel computes side by side.
    """

    members: list[Node]
    stored: Node
    key: tuple[Any, ...]


def join_products(graph: Graph, split: Split) -> list[tuple[str, str]] | None:
    """Join products that share A where that pays; return (line, reason) where it does not, None if no two share A."""
    groups: dict[Node, list[Unit]] = {}
    for unit in split.units:
        if unit.kind == "product" and unit.members[0].kind == "matmul":
            groups.setdefault(unit.members[0].inputs[0], []).append(unit)
    reasons: list[tuple[str, str]] = []
    shared = False
    for units in groups.values():
        if len(units) < 2:
            continue
        shared = True
        alike: dict[tuple[Any, ...], list[Chain]] = {}
        for unit in units:
            chain = _chain(unit)
            if isinstance(chain, str):
                reasons.append(_unjoined(unit.members[0], chain))
            else:
                alike.setdefault(chain.key, []).append(chain)
        for chains in alike.values():
            if len(chains) > 1:
                reasons += _join(graph, sorted(chains, key=lambda c: c.members[0].number))
            elif len(alike) > 1 or len(units) > 1:
                reasons.append(_unjoined(chains[0].members[0], "no other has the same epilogue"))
    return reasons if shared else None


def _unjoined(x: Node, why: str) -> tuple[str, str]:
    return x.where, f"{x.name} is not joined with other products of the same rows: {why}"


def _chain(unit: Unit) -> Chain | str:
    """The product of a unit and what follows it; or the reason why it cannot be a part of a wider one."""
    product, weight = unit.members[0], unit.members[0].inputs[1]
    if weight.kind != "weight":
        return "its weight may change; pack it"
    if weight.dtype is None:
        return "its weight has groups of rows"
    if len(unit.stored) != 1:
        return "several of its results are read"
    position = {x: i for i, x in enumerate(unit.members)}
    key: list[Any] = []
    for x in unit.members:
        operands = x.inputs[2:] if x is product else x.inputs
        used: list[Any] = []
        for y in operands:
            if y in position:
                used.append(position[y])
            elif y.size != product.shape[-1] or y.shape[-1:] != product.shape[-1:]:
                if y.shape[-1:] == product.shape[-1:] and y.size > 1:
                    return "its epilogue reads a matrix"
                used.append(y)
            elif y.origin.kind in LEAVES:
                used.append((VECTOR, y.dtype))
            else:
                return "its epilogue reads a vector that is computed"
        key.append((x.template, x.dtype, x.rounds, *used))
    return Chain(unit.members, unit.stored[0], (position[unit.stored[0]], weight.dtype, *key))


def _join(graph: Graph, chains: list[Chain]) -> list[tuple[str, str]]:
    """Replace several products, and what follows them, by one; their results become views of its result."""
    products = [c.members[0] for c in chains]
    sources = [x.inputs[1] for x in products]
    weights = tuple(graph.fixed[y] if y in graph.fixed else graph.leaves[y.leaf] for y in sources)
    if len(set(map(id, weights))) < len(weights):
        return []
    size = sum(w.nbytes for w in weights)
    if size > MOST_BYTES:
        return [_unjoined(x, f"their weights of {size >> 20} MiB would be in memory twice") for x in products]
    joined = _weight(weights)
    if joined is None:
        return [_unjoined(x, "their packed layouts cannot be joined") for x in products]
    new: list[Node] = []
    weight = _like(products[0], new, "weight", joined.shape, joined.owner.dtype, (), "weights", plain=lambda: joined)
    graph.fixed[weight] = joined
    last = _joined_nodes(graph, chains, weight, new)
    lines = ", ".join(dict.fromkeys(x.where for x in products))
    new[
        -len(chains[0].members)
    ].note = f"{len(products)} products of the same rows ({lines}), their packed weights joined once"
    position = min(graph.nodes.index(c.stored) for c in chains)
    graph.nodes[position:position] = new
    start = 0
    for c in chains:
        x = c.stored
        columns = slice(start, start + x.shape[-1])
        start += x.shape[-1]
        x.kind, x.inputs, x.name, x.template = "view", (last,), "[]", None
        x.plain = lambda y, columns=columns: y[..., columns]
    return []


def _joined_nodes(graph: Graph, chains: list[Chain], weight: Node, new: list[Node]) -> Node:
    """Add the product with a joined weight, and what follows it, to new nodes; return the one that is stored."""
    wide = {x: i for i, x in enumerate(chains[0].members)}
    grown: dict[Node, Node] = {}
    vectors: dict[tuple[Node, ...], Node] = {}

    def operand(row: int, i: int) -> Node:
        own = [c.members[row].inputs[i] for c in chains]
        if own[0] in wide:
            return grown[own[0]]
        if all(y is own[0] for y in own) and own[0].size != chains[0].members[0].shape[-1]:
            return own[0]
        if tuple(own) not in vectors:
            vectors[tuple(own)] = _vector(graph, own, new)
        return vectors[tuple(own)]

    rest: list[Node] = []
    for row, x in enumerate(chains[0].members):
        first = (x.inputs[0], weight) if row == 0 else ()
        inputs = (*first, *(operand(row, i) for i in range(len(first), len(x.inputs))))
        shape = (*x.shape[:-1], weight.shape[-1])
        grown[x] = _like(x, rest, x.kind, shape, x.dtype, inputs, x.name, plain=x.plain)
        grown[x].template, grown[x].rounds = x.template, x.rounds
    new += rest
    return grown[chains[0].stored]


def _vector(graph: Graph, own: list[Node], new: list[Node]) -> Node:
    """Vectors along columns, one after the other: of constants now, of others in each call."""
    size = sum(y.size for y in own)
    node = _like(own[0], new, "join", (size,), own[0].dtype, tuple(own), "concatenate", plain=_after_another)
    if all(y in graph.fixed for y in own):
        value = _after_another(*(graph.fixed[y] for y in own))
        node.kind, node.inputs, node.plain = "array", (), lambda: value
        graph.fixed[node] = value
    return node


def _after_another(*vectors: Any) -> Any:
    return np.concatenate([x.reshape(-1) for x in vectors])


def _like(  # noqa: PLR0917 - the fields of a node
    x: Node, to: list[Node], kind: str, shape: tuple[int, ...], dtype: Any, inputs: Iterable[Node], name: str,
    *, plain: Any,
) -> Node:  # fmt: skip
    """Add a node in the place of another to a list."""
    to.append(Node(kind, shape, dtype, tuple(inputs), plain, name, x.line, x.number))
    return to[-1]


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
