"""Kernels that compute with expressions: the loops that are printed as C, run on symbols in the place of floats.

Owns `Symbols`, a table of expressions, `run`, which gives the expression of each element that a kernel writes, and
`Symbolic`, a machine of `ir.interpreter` whose registers hold numbers of expressions as the bits of floats: what moves
elements, packs them or pads them is as ever, and what computes builds expressions. So the same loops, packing, tails,
accumulators and expansions of functions are judged that a compiler gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.ir import interpreter
from portmm.ir.grid_kernel import GridKernel
from portmm.ir.interpreter import _Frame, _Machine
from portmm.ir.thread_interpreter import _Thread, run_grid
from portmm.spec.expr import Expr, apply, const, node
from portmm.util import locks
from portmm.verification.values import UnsupportedError

if TYPE_CHECKING:
    from portmm.ir.lane_nodes import Map, Reduce, RowScale, Total
    from portmm.ir.nodes import Add, Kernel, Mac, Verb

Array = np.ndarray[Any, Any]
POISON = 0xFFFFFFFF
"""Number of what was never written, as scratch has it."""
_ZERO = const(0.0)


class Symbols:
    """Expressions by number; zero is the literal 0.0, as the bits of a float are."""

    def __init__(self) -> None:
        self.every: list[Expr] = [_ZERO]
        self.numbers: dict[Expr, int] = {_ZERO: 0}
        self.done: dict[tuple[Any, ...], int] = {}
        self.lock = locks.lock()

    def number(self, x: Expr) -> int:
        """The number of an expression; threads of a block share the table."""
        with self.lock:
            known = self.numbers.get(x)
            if known is None:
                known = self.numbers[x] = len(self.every)
                self.every.append(x)
        return known

    def array(self, name: int, count: int) -> Array:
        """An operand's elements, as symbols."""
        numbers = [self.number(element(name, i)) for i in range(count)]
        return np.array(numbers, np.uint32).view(np.float32)

    def apply(self, op: str, *of: int) -> int:
        """The number of an operation's result."""
        if op == "select" and of[0] != POISON and (mask := self.every[of[0]]).op == "const":
            return of[1] if mask.args[0] else of[2]
        if POISON in of:
            return POISON
        key = (op, *of)
        known = self.done.get(key)
        if known is None:
            known = self.done[key] = self.number(applied(op, [self.every[i] for i in of]))
        return known


def element(operand: int, at: int) -> Expr:
    """The symbol of an element of an operand."""
    return node("element", (operand, at), "f32")


def applied(op: str, values: list[Expr]) -> Expr:
    """The result of an operation; a sum with zero, and a selection by a literal, are an operand."""
    if op == "fma" and any([x.op != "const" for x in values]):  # noqa: C419 - faster
        return node(op, tuple(values), "f32")  # most of all operations: nothing is simplified
    if op in ("shl", "shr"):
        return apply(op, values[0], int(values[1].args[0]))
    if op == "add" and (values[0] is _ZERO or values[1] is _ZERO):
        return values[1] if values[0] is _ZERO else values[0]
    if op == "select" and values[0].op == "const":
        return values[1] if values[0].args[0] else values[2]
    return apply(op, *values)


def run(
    kernel: Kernel | GridKernel, ints: Mapping[str, int], shapes: Mapping[str, int], results: Sequence[str]
) -> dict[str, Any]:
    """The expressions of the elements that a kernel writes.

    Args:
        kernel: the kernel.
        ints: the caller's integer fields.
        shapes: number of elements of each array, which are numbered in this order.
        results: arrays that are written: an element that is not stays None.

    Raises:
        UnsupportedError: the kernel has instructions that have no meaning on symbols.
    """
    symbols = Symbols()
    arrays = {
        name: np.full(n, POISON, np.uint32).view(np.float32) if name in results else symbols.array(i, n)
        for i, (name, n) in enumerate(shapes.items())
    }
    places = {x: (y, 0) for x, y in arrays.items()}
    if isinstance(kernel, GridKernel):
        run_grid(kernel, ints, places, partial(SymbolicThread.of, symbols))
    else:
        interpreter.run(kernel, ints, places, machine=partial(Symbolic.of, symbols))
    numbers = {x: arrays[x].view(np.uint32) for x in results}
    return {x: [symbols.every[i] if i != POISON else None for i in y.tolist()] for x, y in numbers.items()}


class _Operations:
    """Operations of a machine whose registers hold symbols: of floats as float32, of integers and masks as int32."""

    __slots__ = ()
    symbols: Any
    word: Any
    value: Any
    at: Any

    @classmethod
    def of(cls, symbols: Symbols, *of: Any, **more: Any) -> Any:
        """A machine with a table of symbols."""
        machine = cls(*of, **more)
        machine.symbols = symbols
        return machine

    def lanes(self, op: str, count: int, *of: Array) -> Array:
        """An operation lane by lane, of numbers of symbols."""
        every = [np.broadcast_to(x, (count,)).tolist() for x in of]
        return np.array([self.symbols.apply(op, *x) for x in zip(*every, strict=True)], np.uint32)

    def bits(self, register: Any) -> Array:
        """Numbers of symbols of a register."""
        x = np.asarray(register)
        if x.dtype == np.bool_:
            words = [self.symbols.number(const(bool(y), "mask")) for y in x.ravel()]
            return np.array(words, np.uint32).reshape(x.shape)
        if x.dtype.itemsize != 4:
            raise UnsupportedError(f"registers of {x.dtype} hold no symbols")
        return x.reshape(-1).view(np.uint32) if x.ndim else x.reshape(1).view(np.uint32)

    def do_verb(self, s: Verb, f: _Frame) -> None:
        """A verb: those that compute build expressions."""
        atom = self.word(s.of) if s.of else f.atom
        if atom.m > 1 or atom.k_pack > 1 or s.name == "load_rows":
            raise UnsupportedError(f"{s.name} of units of several elements has no meaning on symbols")
        if s.p is not None or s.name in ("zero", "mask", "hold"):
            machine: Any = self
            _Machine.do_verb(machine, s, f)
        elif s.name == "mac":
            a, b, d = (self.bits(f.regs[x]) for x in (s.a, s.b, s.d))
            f.regs[s.d] = self.lanes("fma", len(d), a, b, d).view(np.float32)
        elif s.name == "add":
            d = self.bits(f.regs[s.d])
            f.regs[s.d] = self.lanes("add", len(d), d, self.bits(f.regs[s.a])).view(np.float32)
        else:
            raise UnsupportedError(f"{s.name} has no meaning on symbols")

    def do_map(self, s: Map, f: _Frame) -> None:
        """An element-wise operation."""
        lanes = self.word(s.of).n
        if s.op in ("lanes", "whole"):
            first = self.value(s.count, f) if s.count else 0
            each = [const(first + i * (s.op == "lanes"), "s32") for i in range(lanes)]
            bits = np.array([self.symbols.number(x) for x in each], np.uint32)
        else:
            of = [self.bits(f.regs[x]) if isinstance(x, str) else self.literal(x, s) for x in s.args]
            same = s.op in ("literal", "splat")
            bits = np.array(np.broadcast_to(of[0], (lanes,))) if same else self.lanes(s.op, lanes, *of)
        f.regs[s.d] = bits.view(np.float32 if s.dtype == "f32" else np.int32)

    def literal(self, x: float, s: Map) -> Array:
        """A literal of an operation."""
        value = const(x, s.dtype if s.op == "literal" else "s32" if s.op in ("shl", "shr") else s.operand)
        return np.array([self.symbols.number(value)], np.uint32)

    def do_total(self, s: Total, f: _Frame) -> None:
        """A sum or maximum of neighbours."""
        (to, i, _), (src, j, _) = self.at(s.to, f, 1), self.at(s.src, f, s.count)
        x = src[j : j + s.count].view(np.uint32).tolist()
        while len(x) > 1:
            half = len(x) // 2
            x = [self.symbols.apply(s.kind, a, b) for a, b in zip(x[:half], x[half:], strict=True)]
        to[i : i + 1] = np.array(x, np.uint32).view(np.float32)

    def do_reduce(self, s: Reduce, f: _Frame) -> None:
        """A store of the sum of lanes."""
        array, at, _ = self.at(s.p, f, 1)
        lanes = self.bits(f.regs[s.d]).tolist()
        start = self.bits(array[at : at + 1]).tolist() if self.value(s.accumulate, f) else []
        total = reduce(partial(self.symbols.apply, "add"), [*start, *lanes])
        array[at : at + 1] = np.array([total], np.uint32).view(np.float32)

    def do_mac(self, s: Mac, f: _Frame) -> None:
        """A multiply-add in memory."""
        if getattr(self, "kernel").atom.unit:  # noqa: B009 - of a machine
            raise UnsupportedError("products of matrix units have no meaning on symbols")
        places = [self.at(p, f, 1) for p in (s.a, s.b, s.d)]
        words = [int(x[i : i + 1].view(np.uint32)[0]) for x, i, _ in places]
        to, i, _ = places[2]
        to[i : i + 1] = np.array([self.symbols.apply("fma", *words)], np.uint32).view(np.float32)

    def do_add(self, s: Add, f: _Frame) -> None:
        """An addition in memory."""
        places = [self.at(p, f, 1) for p in (s.to, s.src)]
        words = [int(x[i : i + 1].view(np.uint32)[0]) for x, i, _ in places]
        to, i, _ = places[0]
        to[i : i + 1] = np.array([self.symbols.apply("add", *words)], np.uint32).view(np.float32)

    def do_rowscale(self, s: RowScale, f: _Frame) -> None:  # noqa: ARG002 - as the method that it overrides
        """A scale of rows, which depends on bits."""
        raise UnsupportedError("rows are quantized, which has no meaning on symbols")


@dataclass(slots=True)
class Symbolic(_Operations, _Machine):
    """A machine of a host."""

    symbols: Any = None


@dataclass(slots=True)
class SymbolicThread(_Operations, _Thread):
    """A thread of a device."""

    symbols: Any = None
