"""Expressions of a table that a program writes: of its operations on symbols, each after its operands.

Owns `OPERATIONS`, which number them, and `replayed`. A sum of many products is one expression of all of them, as dot
products are most of what a kernel computes.
"""

from __future__ import annotations

import numpy as np

from portmm.spec.expr import Expr, const, node
from portmm.verification.powers import Powers
from portmm.verification.symbolic import POISON, applied, element

OPERATIONS = (
    "real", "integer", "mask", "element", "add", "sub", "mul", "div", "neg", "fma", "lt", "le", "more", "eq", "ne",
    "and", "or", "xor", "not", "shl", "shr", "bits", "from_bits", "float", "int", "select", "abs", "max", "min",
    "greater", "sqrt", "exp2", "pair", "upper",
)  # fmt: skip
"""Operations of nodes in the order of their numbers."""
_COUNTS = tuple(
    0 if x in ("real", "integer", "mask", "element")
    else 1 if x in ("neg", "not", "bits", "from_bits", "float", "int", "abs", "sqrt", "exp2", "upper")
    else 3 if x in ("fma", "select")
    else 2
    for x in OPERATIONS
)  # fmt: skip
"""Number of operands of each."""
_FMA = OPERATIONS.index("fma")
CHAIN = 8
"""Least number of products of a sum that is one expression: more than expansions of functions have."""


def replayed(
    nodes: np.ndarray[tuple[int, ...], np.dtype[np.uint32]], wanted: list[int], literals: frozenset[float]
) -> dict[int, Expr]:
    """The expressions of wanted nodes, and of those that they need."""
    rows = nodes.tolist()
    powers = Powers(literals)
    uses = _uses(rows, wanted)
    needed = [x for x in enumerate(rows) if uses[x[0]]]
    sums = _chains(needed, uses)
    known: dict[int, Expr] = {}
    for i, (op, *of) in needed:
        if i in sums:
            if sums[i]:
                known[i] = node("chain", tuple([known[x] for x in sums[i]]), "f32")
            continue
        name, args = OPERATIONS[op], [known[x] for x in of[: _COUNTS[op]]]
        if name == "upper":
            known[i] = node(name, tuple(args), "f32")
        elif name == "exp2":
            known[i] = powers.exponential(args[0])
        elif name == "mul" and (power := powers.product(*args)) is not None:
            known[i] = power
        elif args:
            known[i] = applied("lt", args[::-1]) if name == "more" else applied(name, args)
        else:
            known[i] = _leaf(name, *of[:2])
    return known


def _uses(rows: list[list[int]], wanted: list[int]) -> list[int]:
    """Number of uses of each node by wanted nodes and what they need; a wanted one has a use of its own."""
    uses = [0] * len(rows)
    for i in wanted:
        if i != POISON:
            uses[i] += 1
    for i in range(len(rows) - 1, -1, -1):
        if uses[i]:
            op, *of = rows[i]
            for x in of[: _COUNTS[op]]:
                uses[x] += 1
    return uses


def _chains(needed: list[tuple[int, list[int]]], uses: list[int]) -> dict[int, list[int]]:
    """Sums of at least `CHAIN` products: the node of the last one -> the first summand and all factors.

    Nodes of the other products, which nothing else uses, have empty lists.
    """
    ends: dict[int, tuple[list[int], list[int]]] = {}
    for i, (op, a, b, c) in needed:
        if op == _FMA:
            one = ends.pop(c, None) if uses[c] == 1 else None
            inner, parts = ([], [c]) if one is None else one
            inner.append(i)
            parts += (a, b)
            ends[i] = inner, parts
    long = [x for x in ends.values() if len(x[0]) >= CHAIN]
    return {i: [] for inner, _ in long for i in inner[:-1]} | {inner[-1]: parts for inner, parts in long}


def _leaf(name: str, first: int, second: int) -> Expr:
    """The expression of a literal or of an element."""
    if name == "element":
        return element(first, second)
    if name == "mask":
        return const(bool(first), "mask")
    word = np.array([first], np.uint32)
    return const(word.view(np.float32)[0].item()) if name == "real" else const(word.view(np.int32)[0].item(), "s32")
