"""The meaning of the loop language, in NumPy.

Owns the interpreter that tests hold every emitted kernel against. Imports `ir`.
It is slow and strict: every access is checked against the bounds of the array
it was derived from, reading scratch that was never written yields NaN, and a
register must be written before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from portmm.ir import (
    FIELDS,
    FOLD,
    OPERANDS,
    SWAPPED,
    Add,
    Call,
    For,
    Function,
    If,
    Index,
    Kernel,
    Let,
    LetPtr,
    MacScalar,
    Move,
    Parallel,
    Prefetch,
    Ptr,
    Reduce,
    Scratch,
    Shuffle,
    Stmt,
    Switch,
    Verb,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

Address = tuple[np.ndarray, int]


@dataclass(slots=True)
class _Frame:
    ints: dict[str, int]
    ptrs: dict[str, Address]
    regs: dict[str, np.ndarray] = field(default_factory=dict)


def evaluate(x: Index, ints: Mapping[str, int]) -> int:
    """The value of an integer expression."""
    if x.op == "const":
        return int(x.args[0])  # type: ignore[arg-type]
    if x.op == "var":
        return ints[str(x.args[0])]
    left, right = (evaluate(y, ints) for y in x.args)  # type: ignore[arg-type]
    return FOLD[x.op](left, right)


def run(kernel: Kernel, ints: Mapping[str, int], arrays: Mapping[str, Address], *, shuffle: int = 0) -> None:
    """Execute `kernel` as if its entry were called.

    Args:
        kernel: what to run.
        ints: the caller's integer fields, in elements.
        arrays: "a", "b", "c" -> (1-D array, offset of element zero).
        shuffle: seed for the order of tasks; 0 keeps it.

    Raises:
        IndexError: an access leaves its array.
        KeyError: a register or name is read before it is written.
    """
    source = SWAPPED if kernel.swap else {name: name for name in SWAPPED}
    mine = {f: ints[source[f]] for f in FIELDS} | dict(kernel.constants)
    dtype = arrays["c"][0].dtype
    work = np.full(evaluate(kernel.workspace, mine), np.nan, dtype)
    ptrs = {name: (work, 0) if name == "work" else arrays[source[name]] for name in OPERANDS}
    _Machine(kernel, mine, ptrs, np.random.default_rng(shuffle) if shuffle else None).call(kernel.entry, {}, {})


@dataclass(slots=True)
class _Machine:
    kernel: Kernel
    block: dict[str, int]
    pointers: dict[str, Address]
    order: np.random.Generator | None

    def call(self, f: Function, ints: dict[str, int], ptrs: dict[str, Address]) -> None:
        seen = f.kind != "inner"
        frame = _Frame((self.block if seen else {}) | ints, (self.pointers if seen else {}) | ptrs)
        self.body(f.body, frame)

    def body(self, body: tuple[Stmt, ...], f: _Frame) -> None:
        for s in body:
            getattr(self, f"do_{type(s).__name__.lower()}")(s, f)

    def at(self, p: Ptr, f: _Frame, count: int) -> Address:
        array, base = f.ptrs[p.name]
        start = base + evaluate(p.offset, f.ints)
        if count and (start < 0 or start + count > array.size):
            raise IndexError(f"{p.name}[{start}:{start + count}] of {array.size} elements in {self.kernel.name}")
        return array, start

    def do_let(self, s: Let, f: _Frame) -> None:
        f.ints[s.name] = evaluate(s.value, f.ints)

    def do_letptr(self, s: LetPtr, f: _Frame) -> None:
        f.ptrs[s.name] = self.at(s.value, f, 0)

    def do_scratch(self, s: Scratch, f: _Frame) -> None:
        f.ptrs[s.name] = (np.full(s.elements, np.nan, f.ptrs[next(iter(f.ptrs))][0].dtype), 0)

    def do_for(self, s: For, f: _Frame) -> None:
        begin, end, step = (evaluate(x, f.ints) for x in (s.begin, s.end, s.step))
        for i in range(begin, end, step):
            self.block_of(s.body, f, {s.var: i})

    def do_if(self, s: If, f: _Frame) -> None:
        self.block_of(s.then if evaluate(s.cond, f.ints) else s.orelse, f, {})

    def do_switch(self, s: Switch, f: _Frame) -> None:
        self.block_of(dict(s.cases)[evaluate(s.value, f.ints)], f, {})

    def block_of(self, body: tuple[Stmt, ...], f: _Frame, ints: dict[str, int]) -> None:
        """Run a body with names of its own, as in C; registers belong to the function."""
        self.body(body, _Frame(f.ints | ints, dict(f.ptrs), f.regs))

    def do_verb(self, s: Verb, f: _Frame) -> None:
        atom = self.kernel.atom
        if s.name == "mac":
            f.regs[s.d] = f.regs[s.d] + f.regs[s.a] * f.regs[s.b]
        elif s.name == "zero":
            f.regs[s.d] = np.zeros(atom.n, f.ptrs["c" if "c" in f.ptrs else next(iter(f.ptrs))][0].dtype)
        elif s.name == "mask":
            assert s.count is not None  # noqa: S101 - a malformed node is a bug of the lowering
            f.regs[s.d] = np.arange(atom.n) < evaluate(s.count, f.ints)
        else:
            self._memory(s, f)

    def _memory(self, s: Verb, f: _Frame) -> None:
        assert s.p is not None  # noqa: S101 - as above
        keep = int(f.regs[s.mask].sum()) if s.mask else (1 if s.name == "load_a" else self.kernel.atom.n)
        array, at = self.at(s.p, f, keep)
        if s.name in ("store", "store_mask"):
            array[at : at + keep] = f.regs[s.d][:keep]
        elif s.name == "load_a":
            f.regs[s.d] = array[at].copy()
        else:
            f.regs[s.d] = np.zeros(self.kernel.atom.n, array.dtype)
            f.regs[s.d][:keep] = array[at : at + keep]

    def do_shuffle(self, s: Shuffle, f: _Frame) -> None:
        f.regs[s.d] = np.concatenate([f.regs[s.a], f.regs[s.b]])[list(s.pick)]

    def do_reduce(self, s: Reduce, f: _Frame) -> None:
        array, at = self.at(s.p, f, 1)
        array[at] = f.regs[s.d].sum() + (array[at] if evaluate(s.accumulate, f.ints) else 0)

    def do_macscalar(self, s: MacScalar, f: _Frame) -> None:
        (to, i), (x, j), (y, k) = (self.at(p, f, 1) for p in (s.p, s.a, s.b))
        to[i] += x[j] * y[k]

    def do_move(self, s: Move, f: _Frame) -> None:
        to, i = self.at(s.to, f, 1)
        if s.src is None:
            to[i] = 0
        else:
            src, j = self.at(s.src, f, 1)
            to[i] = src[j]

    def do_add(self, s: Add, f: _Frame) -> None:
        (to, i), (src, j) = self.at(s.to, f, 1), self.at(s.src, f, 1)
        to[i] += src[j]

    def do_prefetch(self, s: Prefetch, f: _Frame) -> None:
        evaluate(s.p.offset, f.ints)

    def do_call(self, s: Call, f: _Frame) -> None:
        ints: dict[str, int] = {}
        ptrs: dict[str, Address] = {}
        for p, x in zip(s.function.params, s.args, strict=True):
            if isinstance(x, Ptr):
                ptrs[p.name] = self.at(x, f, 0)
            else:
                ints[p.name] = evaluate(x, f.ints)
        self.call(s.function, ints, ptrs)

    def do_parallel(self, s: Parallel, f: _Frame) -> None:
        tasks = np.arange(evaluate(s.tasks, f.ints))
        if self.order is not None:
            self.order.shuffle(tasks)
        args = {p.name: evaluate(x, f.ints) for p, x in zip(s.function.params, s.args, strict=True)}
        workers = self.block["workers"]
        for i, task in enumerate(tasks):
            self.call(s.function, args | {"task": int(task), "worker": i % workers}, {})
