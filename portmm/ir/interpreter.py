"""Interpreter of the loop language, in NumPy.

Owns the interpreter that tests compare every emitted kernel with. It is slow and
strict: every access is checked against the bounds of the array of its pointer,
reading scratch that was never written yields NaN or a recognisable number, and a
register must be written before it is read. Pointers have types, as in C: memory is
read as the pointer's type, and converted to the register's. `ir.register_values` has
what is computed in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.ir import register_values
from portmm.ir.index import Index, Ptr, meaning
from portmm.ir.lane_nodes import LEAST_PEAK, Map, Reduce, Repeat, RowScale, Shuffle, Total
from portmm.ir.nodes import (
    FIELDS,
    OPERANDS,
    SWAPPED,
    TILES,
    Add,
    Call,
    Configure,
    For,
    Function,
    If,
    Kernel,
    Let,
    LetPtr,
    Mac,
    Move,
    Parallel,
    Prefetch,
    Read,
    Scratch,
    Stmt,
    Switch,
    UntilAligned,
    Verb,
)
from portmm.ir.register_values import WRITTEN, converted, numpy_type
from portmm.spec.dtype import BY_NAME, CODES_KR
from portmm.spec.expr_ops import NUMPY
from portmm.spec.problem import AXES

if TYPE_CHECKING:
    from portmm.target.atom import Atom

Address = tuple[np.ndarray, int]
Typed = tuple[np.ndarray, int, str]
"""A flat array of the type's elements (for units, of their elements), the offset of the pointer, and the type."""
Registers = dict[str, np.ndarray]
UNWRITTEN = 0xFF
"""Value of bytes of scratch that were never written: NaN as a float, -1 as an integer."""


@dataclass(slots=True)
class _Frame:
    """The names and registers of a function that runs."""

    atom: Atom
    ints: dict[str, int]
    ptrs: dict[str, Typed]
    regs: Registers = field(default_factory=dict)

    def scope(self) -> _Frame:
        """A frame for a block with names of its own; registers belong to the function."""
        return _Frame(self.atom, dict(self.ints), dict(self.ptrs), self.regs)


def _declares(body: tuple[Stmt, ...]) -> bool:
    """Whether a block has names of its own."""
    return any(isinstance(s, Let | LetPtr | Read | Scratch | UntilAligned) for s in body)


def evaluate(x: Index, ints: Mapping[str, int]) -> int:
    """The value of an integer expression."""
    return meaning(x)(ints)


def run(
    kernel: Kernel,
    ints: Mapping[str, int],
    arrays: Mapping[str, Address],
    *,
    shuffle: int = 0,
    machine: Callable[..., _Machine] | None = None,
) -> None:
    """Execute `kernel` as if its entry were called.

    Args:
        kernel: the kernel.
        ints: the caller's integer fields, in elements.
        arrays: "a", "b", "c", and operands of epilogue expressions -> (1-D array, offset of element zero).
        shuffle: seed for the order of tasks; 0 keeps it.
        machine: makes another machine, whose registers hold other numbers.

    Raises:
        IndexError: an access leaves its array.
        KeyError: a register or name is read before it is written.
    """
    source = SWAPPED if kernel.swap else {name: name for name in SWAPPED}
    fields = {f: ints[source[f]] for f in FIELDS} | dict(kernel.constants)
    extra = [f"x{i}" for i in range(len(kernel.operands))]
    fields |= {f"{x}_{axis}": ints.get(f"{x}_{axis}", 0) for x in extra for axis in AXES}
    work = np.full(evaluate(kernel.workspace, fields) * BY_NAME[kernel.atom.acc].bytes, UNWRITTEN, np.uint8)
    memory: dict[str, Address] = {**arrays, "work": (work, 0)}
    ptrs = {name: memory[source[name]] for name in OPERANDS if source[name] in memory} | {x: memory[x] for x in extra}
    typed = {name: _view(x, at, kernel.type_of(name)) for name, (x, at) in ptrs.items()}
    order = np.random.default_rng(shuffle) if shuffle else None
    make = _Machine if machine is None else machine
    make(kernel, cache(kernel.isa.word), fields, typed, order).call(kernel.entry, {}, {})


def _view(array: np.ndarray, at: int, name: str) -> Typed:
    """The same address, as a pointer to another type."""
    dtype = numpy_type(name)
    if array.dtype == dtype:
        return array, at, name
    bytes_ = at * array.itemsize
    if bytes_ % dtype.itemsize:
        raise IndexError(f"byte {bytes_} of an array is not aligned to {name}")
    whole = array.nbytes // dtype.itemsize * dtype.itemsize
    # The remainder of a row of units is read element by element.
    return array.view(np.uint8)[:whole].view(dtype), bytes_ // dtype.itemsize, name


@dataclass(slots=True)
class _Machine:
    """The state of a kernel that runs."""

    kernel: Any
    word: Callable[[str], Atom]
    block: dict[str, int]
    pointers: dict[str, Typed]
    order: np.random.Generator | None
    tiles: dict[str, int] = field(default_factory=dict)
    """Tile -> its rows, as configured by the current task."""
    words: dict[str, int] = field(default_factory=dict)
    """Tile -> words of a row, if not all."""
    meanings: dict[int, tuple[Callable[[Mapping[str, int]], int], Index]] = field(default_factory=dict)
    """Identity of an expression -> its function, and the expression, which keeps the identity unique."""
    steps: dict[type, Callable[[Any, _Frame], None]] = field(default_factory=dict)
    """Class of statements -> the method that executes them."""

    def call(self, f: Function, ints: dict[str, int], ptrs: dict[str, Typed]) -> None:
        has_block = f.kind != "inner"
        atom = self.word(f.of) if f.of else self.kernel.atom
        frame = _Frame(atom, (self.block if has_block else {}) | ints, (self.pointers if has_block else {}) | ptrs)
        self.body(f.body, frame)

    def body(self, body: tuple[Stmt, ...], f: _Frame) -> None:
        steps = self.steps
        for s in body:
            step = steps.get(type(s))
            if step is None:
                step = steps[type(s)] = getattr(self, f"do_{type(s).__name__.lower()}")
            step(s, f)

    def value(self, x: Index, f: _Frame) -> int:
        """The value of an integer expression of the kernel."""
        entry = self.meanings.get(id(x))
        if entry is None:
            entry = self.meanings[id(x)] = (meaning(x), x)
        return entry[0](f.ints)

    def at(self, p: Ptr, f: _Frame, count: int, further: int = 0) -> Typed:
        """The pointer `further` elements or units past an address, after a check that `count` are in bounds."""
        array, base, name = f.ptrs[p.name]
        pack = BY_NAME[name].pack
        start = base + (self.value(p.offset, f) + further) * pack
        if count and (start < 0 or start + count * pack > array.size):
            raise IndexError(f"{p.name}[{start}:{start + count * pack}] of {array.size} elements in {self.kernel.name}")
        return array, start, name

    def do_let(self, s: Let, f: _Frame) -> None:
        f.ints[s.name] = self.value(s.value, f)

    def do_read(self, s: Read, f: _Frame) -> None:
        array, at, _ = self.at(s.p, f, 1)
        f.ints[s.name] = int(array[at])

    def do_untilaligned(self, s: UntilAligned, f: _Frame) -> None:
        array, at, _ = self.at(s.p, f, 0)
        f.ints[s.name] = -(array.ctypes.data + at * array.itemsize) % s.bytes // array.itemsize

    def do_letptr(self, s: LetPtr, f: _Frame) -> None:
        array, at, _ = self.at(s.value, f, 0)
        f.ptrs[s.name] = _view(array, at, s.dtype)

    def do_scratch(self, s: Scratch, f: _Frame) -> None:
        raw = np.full(s.elements * BY_NAME[s.dtype].bytes, UNWRITTEN, np.uint8)
        f.ptrs[s.name] = _view(raw, 0, s.dtype)

    def do_for(self, s: For, f: _Frame) -> None:
        begin, end, step = (self.value(x, f) for x in (s.begin, s.end, s.step))
        inside, declares = f.scope(), _declares(s.body)
        for i in range(begin, end, step):
            inside.ints[s.var] = i
            self.body(s.body, inside.scope() if declares else inside)

    def do_if(self, s: If, f: _Frame) -> None:
        self.block_of(s.then if self.value(s.cond, f) else s.orelse, f)

    def do_switch(self, s: Switch, f: _Frame) -> None:
        self.block_of(dict(s.cases)[self.value(s.value, f)], f)

    def block_of(self, body: tuple[Stmt, ...], f: _Frame) -> None:
        """Run a body with a scope of its own, as in C."""
        self.body(body, f.scope() if _declares(body) else f)

    def do_verb(self, s: Verb, f: _Frame) -> None:
        atom = self.word(s.of) if s.of else f.atom
        if atom.m > 1:
            self._block(s, f, atom)
        elif s.name == "load_rows":
            self._rows(s, f, atom)
        elif s.p is not None:
            self._memory(s, f, atom)
        else:
            f.regs[s.d] = WRITTEN[s.name](s, f.regs, atom, self.value(s.count, f) if s.count else 0)

    def _memory(self, s: Verb, f: _Frame, atom: Atom) -> None:
        assert s.p is not None  # noqa: S101 - a malformed node is a bug of the lowering
        one = s.name == "load_a"
        keep = int(np.count_nonzero(f.regs[s.mask])) if s.mask else 1 if one else atom.n
        array, at, memory = self.at(s.p, f, keep)
        pack = BY_NAME[memory].pack
        if s.name in ("store", "store_mask"):
            array[at : at + keep * pack] = converted(f.regs[s.d][:keep].ravel(), _of(f.regs[s.d].dtype), memory)
            return
        own = atom.left if one else atom.right if s.name in ("load_b", "load_mask") else atom.acc
        x = converted(array[at : at + keep * pack], memory, s.to or own)
        if one:
            f.regs[s.d] = x.copy() if pack > 1 else x[0]
            return
        if keep == atom.n:
            whole = x.copy()
        else:
            whole = np.zeros(atom.n * pack, x.dtype)
            whole[: keep * pack] = x
        f.regs[s.d] = whole.reshape(atom.n, pack) if pack > 1 else whole

    def _rows(self, s: Verb, f: _Frame, atom: Atom) -> None:
        assert s.p is not None  # noqa: S101 - as above
        assert s.step is not None  # noqa: S101 - as above
        step, register = self.value(s.step, f), s.to or atom.right
        codes = f.ptrs[s.p.name][2] == "u4"
        rows = [self.at(s.p, f, atom.n, step * e) for e in range(CODES_KR if codes else atom.k_pack)]
        if codes:
            f.regs[s.d] = register_values.int4_words([x[i : i + atom.n] for x, i, _ in rows])
            return
        f.regs[s.d] = np.stack([converted(x[i : i + atom.n], m, register) for x, i, m in rows], axis=1)

    def do_configure(self, s: Configure, f: _Frame) -> None:
        if bool(s.rows) == bool(self.tiles):
            raise ValueError(f"{self.kernel.name} {'configures' if s.rows else 'releases'} its tiles twice")
        self.tiles = {str(i): self.value(x, f) for i, x in enumerate(s.rows)}
        self.words = {str(i): x for i, x in enumerate(s.words)}
        if len(s.rows) > TILES or not set(self.tiles.values()) <= set(range(1, f.atom.m + 1)):
            raise ValueError(f"{self.kernel.name} configures tiles of {self.tiles} rows")

    def _block(self, s: Verb, f: _Frame, atom: Atom) -> None:
        """Execute a verb on a register of several rows; a tile has those configured, or a KeyError is raised."""
        rows = self.tiles[s.d] if atom.tiled else atom.deep if s.name == "load_b" else atom.m
        if s.name == "zero":
            f.regs[s.d] = np.zeros((rows, atom.n), numpy_type(atom.acc))
            return
        if s.name == "add":
            f.regs[s.d] = f.regs[s.d] + f.regs[s.a]
            return
        if s.name == "mac":
            d, a, b = (f.regs[x] for x in (s.d, s.a, s.b))
            if (len(a), len(b)) != (len(d), a.shape[1]):
                raise ValueError(f"{self.kernel.name} multiplies tiles of {a.shape} and {b.shape} into {d.shape}")
            f.regs[s.d] = register_values.multiplied_tiles(d, a, b)
            return
        assert s.p is not None  # noqa: S101 - as above
        assert s.step is not None or rows == 1  # noqa: S101 - as above
        step, columns = self.value(s.step, f) if s.step else 0, atom.deep if s.name == "load_a" else atom.n
        columns = self.words.get(s.d, columns)
        register = {"load_a": atom.left, "load_b": atom.right}.get(s.name, atom.acc)
        pointers = [self.at(s.p, f, columns, step * r) for r in range(rows)]
        if {memory for _, _, memory in pointers} != {register}:
            raise ValueError(f"{self.kernel.name} takes rows of {register} from elements of {pointers[0][2]}")
        pack = BY_NAME[register].pack
        if s.name == "store":
            for (array, at, _), row in zip(pointers, f.regs[s.d], strict=True):
                array[at : at + columns] = row
            return
        block = np.stack([array[at : at + columns * pack] for array, at, _ in pointers])
        f.regs[s.d] = block.reshape(rows, columns, pack) if pack > 1 else block

    def do_map(self, s: Map, f: _Frame) -> None:
        lanes, count = self.word(s.of).n, self.value(s.count, f) if s.count else 0
        result = register_values.mapped(s, f.regs, lanes, count)
        if result.dtype != NUMPY[s.dtype]:
            raise ValueError(f"{self.kernel.name}: {s.op} gives {result.dtype}, not {s.dtype}")
        f.regs[s.d] = result

    def do_total(self, s: Total, f: _Frame) -> None:
        (to, i, _), (src, j, _) = self.at(s.to, f, 1), self.at(s.src, f, s.count)
        to[i] = register_values.total(src[j : j + s.count], s.kind)

    def do_shuffle(self, s: Shuffle, f: _Frame) -> None:
        f.regs[s.d] = np.concatenate([f.regs[s.a], f.regs[s.b]])[list(s.pick)]

    def do_repeat(self, s: Repeat, f: _Frame) -> None:
        array, at, _ = self.at(s.p, f, 2)
        f.regs[s.d] = np.tile(array[at : at + 2], self.kernel.atom.n // 2)

    def do_reduce(self, s: Reduce, f: _Frame) -> None:
        array, at, memory = self.at(s.p, f, 1)
        total = f.regs[s.d].sum() + (array[at] if self.value(s.accumulate, f) else 0)
        array[at] = converted(np.asarray(total), self.kernel.atom.acc, memory)

    def do_mac(self, s: Mac, f: _Frame) -> None:
        (to, i, _), (x, j, _), (y, k, _) = (self.at(p, f, 1) for p in (s.d, s.a, s.b))
        acc = numpy_type(self.kernel.atom.acc)
        to[i] = to[i].astype(acc) + x[j].astype(acc) * y[k].astype(acc)

    def do_move(self, s: Move, f: _Frame) -> None:
        to, i, into = self.at(s.to, f, 1)
        if s.src is None:
            to[i] = s.value
        else:
            src, j, memory = self.at(s.src, f, 1)
            count = BY_NAME[into].pack
            to[i : i + count] = converted(src[j : j + count], memory, into)

    def do_add(self, s: Add, f: _Frame) -> None:
        (to, i, _), (src, j, _) = self.at(s.to, f, 1), self.at(s.src, f, 1)
        to[i] += src[j]

    def do_rowscale(self, s: RowScale, f: _Frame) -> None:
        (scale, i, _), (inverse, j, _) = self.at(s.scale, f, 1), self.at(s.inverse, f, 1)
        peaks, at, _ = self.at(s.peaks, f, s.count)
        most, top = peaks[at : at + s.count].max(), np.float32(s.top)
        scale[i] = most / top
        inverse[j] = top / most if most >= np.float32(LEAST_PEAK) else 0

    def do_prefetch(self, s: Prefetch, f: _Frame) -> None:
        self.value(s.p.offset, f)

    def do_call(self, s: Call, f: _Frame) -> None:
        ints: dict[str, int] = {}
        ptrs: dict[str, Typed] = {}
        for p, x in zip(s.function.params, s.args, strict=True):
            if isinstance(x, Ptr):
                array, at, _ = self.at(x, f, 0)
                ptrs[p.name] = _view(array, at, p.dtype)
            else:
                ints[p.name] = self.value(x, f)
        self.call(s.function, ints, ptrs)

    def do_parallel(self, s: Parallel, f: _Frame) -> None:
        tasks = np.arange(self.value(s.tasks, f))
        if self.order is not None:
            self.order.shuffle(tasks)
        args = {p.name: self.value(x, f) for p, x in zip(s.function.params, s.args, strict=True)}
        workers = self.block["workers"]
        for i, task in enumerate(tasks):
            self.call(s.function, args | {"task": int(task), "worker": i % workers}, {})
            if self.tiles:
                raise ValueError(f"{s.function.name} of {self.kernel.name} ends with tiles that it has not released")


@cache
def _of(dtype: np.dtype) -> str:
    """Portmm's name of the type of a register's elements."""
    return next(name for name, t in BY_NAME.items() if t.numpy == dtype.name)
