"""The elements that the threads of a device store, found by running the statements that lead there in NumPy.

All threads of all blocks run at once: each integer is an array. What leads to no store is passed over.
"""

from __future__ import annotations

import numpy as np

from portmm.ir.index import OPERATORS
from portmm.ir.nodes import For, If, Let, LetPtr, Move, children
from portmm.ir.thread_nodes import Vector


def value(x, env):
    """An integer expression."""
    if x.op == "const":
        return x.args[0]
    if x.op == "var":
        return env[x.args[0]]
    a, b = (value(y, env) for y in x.args)
    if x.op in ("min", "max"):
        return (np.minimum if x.op == "min" else np.maximum)(a, b)
    return {"<": np.less, "==": np.equal}.get(x.op, OPERATORS.get(x.op))(a, b)


def stores(body, env, ends, size, there):  # noqa: C901 - a node each
    """Yield (elements past the root, how many, which threads) of each store to some pointers.

    `ends` are these pointers, and how far past the root they are; what is derived from them joins them. Elements
    have `size` bytes; `there` are the threads that come here.
    """
    for s in body:
        if isinstance(s, Let):
            if all(name in env for name in names(s.value)):
                env[s.name] = value(s.value, env)
        elif isinstance(s, LetPtr):
            if s.value.name in ends:
                ends[s.name] = ends[s.value.name] + value(s.value.offset, env)
        elif isinstance(s, Move | Vector):
            if s.to.name in ends:
                count = s.bytes // size if isinstance(s, Vector) else 1
                yield ends[s.to.name] + value(s.to.offset, env), count, there
        elif isinstance(s, For) and leads(s, ends):
            for i in range(value(s.begin, env), value(s.end, env), value(s.step, env)):
                yield from stores(s.body, env | {s.var: i}, ends, size, there)
        elif isinstance(s, If) and leads(s, ends):
            holds = np.broadcast_to(value(s.cond, env), there.shape).astype(bool)
            yield from stores(s.then, dict(env), ends, size, there & holds)
            yield from stores(s.orelse, dict(env), ends, size, there & ~holds)


def names(x):
    """The variables of an expression."""
    if x.op == "var":
        return {x.args[0]}
    return set() if x.op == "const" else {name for y in x.args for name in names(y)}


def leads(s, ends):
    """A statement has stores to some pointers inside, or pointers derived from them."""
    for x in children(s):
        if isinstance(x, Move | Vector) and x.to.name in ends:
            return True
        if (isinstance(x, LetPtr) and x.value.name in ends) or leads(x, ends):
            return True
    return False


def counted(body, values, grid, root, elements, size):  # noqa: PLR0917 - one call
    """How often each element that a pointer leads to is stored, by all threads of (slices, blocks, threads)."""
    slice_, block, thread = np.meshgrid(*map(np.arange, grid), indexing="ij")
    env = dict(values) | {"thread": thread, "block": block, "slice": slice_}
    found = np.zeros(elements, np.int64)
    for at, count, there in stores(body, env, {root: 0}, size, np.ones(thread.shape, bool)):
        for i in range(count):
            np.add.at(found, np.broadcast_to(at + i, there.shape)[there], 1)
    return found
