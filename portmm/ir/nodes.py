"""Loop language of all kernels.

Owns the nodes: statements, functions, and `Kernel`, a set of functions with one entry. Integers and pointers are in
`ir.index`, statements on the lanes of vectors in `ir.lane_nodes`, those for threads of a device in `ir.thread_nodes`.
Nodes are immutable; `ir.interpreter` executes them on NumPy arrays, `codegen` spells them in C. Vector registers are
named and typed by the verb that writes them, so a printer can declare them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.ir.index import Index, Ptr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

FIELDS = (
    "m n k batch a_m a_k a_batch b_k b_n b_batch c_m c_n c_batch workers".split()  # noqa: SIM905 - reads as the struct
)
"""Integer fields of the argument block that an entry or task function may use."""

OPERANDS = {"a": True, "b": True, "c": False, "work": False, "numbers": True}
"""Pointer fields of the argument block -> whether they are read-only."""

TILES = 8
"""Number of tiles of a unit of more than one row: that of Intel's AMX, the only one described."""


class Stmt:
    """A statement: one of those below, of `lane_nodes`, or of `thread_nodes`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Let(Stmt):
    """Declaration of an integer with the value of an expression."""

    name: str
    value: Index


@dataclass(frozen=True, slots=True)
class Read(Stmt):
    """Declaration of an integer that is loaded from memory."""

    name: str
    p: Ptr


@dataclass(frozen=True, slots=True)
class UntilAligned(Stmt):
    """Declaration of an integer: elements from an address to the first one that is aligned to a vector of `bytes`.

    It is less than a vector's elements. Of an address between elements nothing is aligned, and the number is any.
    """

    name: str
    p: Ptr
    bytes: int


@dataclass(frozen=True, slots=True)
class LetPtr(Stmt):
    """Declaration of a pointer to elements of type `dtype`, derived from a pointer to any type."""

    name: str
    value: Ptr
    dtype: str
    readonly: bool = False


@dataclass(frozen=True, slots=True)
class Scratch(Stmt):
    """A small array on the stack, 64-byte aligned, not initialised.

    With `guarded` each read follows a write, but by conditions that compilers do not relate to each other: they are
    told that the array is written, which takes no instruction.
    """

    name: str
    elements: int
    dtype: str
    guarded: bool = False


@dataclass(frozen=True, slots=True)
class For(Stmt):
    """Loop over `body` for var = begin, begin + step, ... < end; `unroll` is a hint: 0 is not to, 1 is no hint."""

    var: str
    begin: Index
    end: Index
    step: Index
    body: tuple[Stmt, ...]
    unroll: int = 1


@dataclass(frozen=True, slots=True)
class If(Stmt):
    """Branch: `then` if `cond` is not 0, else `orelse`; where that is `rare`, compilers put `then` out of the way."""

    cond: Index
    then: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...] = ()
    rare: bool = False


@dataclass(frozen=True, slots=True)
class Switch(Stmt):
    """Switch to the body whose number equals `value`; there always is one."""

    value: Index
    cases: tuple[tuple[int, tuple[Stmt, ...]], ...]


@dataclass(frozen=True, slots=True)
class Verb(Stmt):
    """One verb of an atom: an instruction on vector registers.

    A load or store converts between the type of its pointer and the
    register's; both are known where it is spelled.

    Attributes:
        name: a verb of `atom.PLACEHOLDERS`, or "load_rows", which interleaves rows
            in units, and int4 values in words.
        d: register written (or stored from).
        a: left operand of a mac, or the only one of another verb.
        b: right operand of a mac.
        p: address of a load or store.
        mask: mask register of a masked load or store.
        count: lanes kept by "mask"; the bit offset of the values of "code", "centred", "below" and "e2m1".
        step: stride of rows in elements, or units, for "load_rows", and for atoms of several rows.
        to: type of the register, where it is not the verb's default.
        of: name of the atom of this verb, where it is not the kernel's.
        passing: of a load, whether it is spelled as "stream" where the atom has that.
    """

    name: str
    d: str
    a: str = ""
    b: str = ""
    p: Ptr | None = None
    mask: str = ""
    count: Index | None = None
    step: Index | None = None
    to: str = ""
    of: str = ""
    passing: bool = False


@dataclass(frozen=True, slots=True)
class Configure(Stmt):
    """Configuration of the kernel's tiles, which are called "0", "1" and so on.

    Attributes:
        rows: of each tile; none: release of all.
        words: of a row of each tile, of four bytes; none: all that a row has.
    """

    rows: tuple[Index, ...]
    words: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Mac(Stmt):
    """Multiply-add of one element, *d += *a * *b, in the accumulator's type; on a device, of registers by the atom."""

    d: Ptr
    a: Ptr
    b: Ptr


@dataclass(frozen=True, slots=True)
class Move(Stmt):
    """Copy of one element, converted if the types differ; from None: store of an integer."""

    to: Ptr
    src: Ptr | None
    value: int = 0


@dataclass(frozen=True, slots=True)
class Add(Stmt):
    """*to += *src, one element."""

    to: Ptr
    src: Ptr


@dataclass(frozen=True, slots=True)
class Prefetch(Stmt):
    """Prefetch of the cache line at an address, which need not be valid.

    Attributes:
        p: the address.
        write: for writing, not only for reading.
        near: into L1; else into L2, which evicts nothing from L1.
    """

    p: Ptr
    write: bool = False
    near: bool = True


@dataclass(frozen=True, slots=True)
class Call(Stmt):
    """Call of an inner function; arguments match its parameters in order."""

    function: Function
    args: tuple[Index | Ptr, ...]


@dataclass(frozen=True, slots=True)
class Parallel(Stmt):
    """Parallel loop: `function` for task = 0 ... tasks-1 in any order, on at most `workers` threads."""

    function: Function
    tasks: Index
    args: tuple[Index, ...] = ()


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter: an integer, or a pointer to `dtype` if that is set."""

    name: str
    dtype: str = ""
    readonly: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """A function.

    Attributes:
        name: unique in its kernel.
        kind: "inner" has only its parameters; "task" has the argument block,
            its integer parameters, `task` and `worker`; "entry" has the block.
        params: parameters of an inner or task function.
        body: statements.
        comment: description of its computation, printed above it.
        inline: inlined into its caller, so that constants are propagated.
        of: name of the atom of its verbs, where it is not the kernel's.
    """

    name: str
    kind: str
    params: tuple[Param, ...]
    body: tuple[Stmt, ...]
    comment: str = ""
    inline: bool = False
    of: str = ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A complete kernel.

    Attributes:
        name: C name of the entry.
        isa: the instruction set, with the declarations that the atom's verbs use.
        atom: the atom, whose verbs the statements use.
        entry: the entry function.
        workspace: elements of scratch, as an expression of the integer fields.
        header: lines for the top of the source: target, schedule, command that emits it again.
        swap: the entry reads the block as C^T = B^T . A^T.
        types: element types of "a", "b" and "c", where they are not those of the atom.
        constants: fields with constant values.
        operands: types of the operands of epilogue expressions, "x0" and so on, and whether they are written;
            their strides are "x0_b", "x0_m", "x0_n" and "x0_h".
    """

    name: str
    isa: Isa
    atom: Atom
    entry: Function
    workspace: Index
    header: tuple[str, ...] = ()
    swap: bool = False
    types: tuple[tuple[str, str], ...] = ()
    constants: tuple[tuple[str, int], ...] = ()
    operands: tuple[tuple[str, bool], ...] = ()

    def type_of(self, operand: str) -> str:
        """Element type of the pointer "a", "b", "c" or "work"."""
        extra = {f"x{i}": dtype for i, (dtype, _) in enumerate(self.operands)}
        defaults = {"a": self.atom.left, "b": self.atom.right, "numbers": "f32", **extra}
        return dict(self.types).get(operand, defaults.get(operand, self.atom.acc))


SWAPPED = {
    "m": "n", "n": "m", "k": "k", "batch": "batch", "workers": "workers",
    "a_m": "b_n", "a_k": "b_k", "a_batch": "b_batch",
    "b_k": "a_k", "b_n": "a_m", "b_batch": "a_batch",
    "c_m": "c_n", "c_n": "c_m", "c_batch": "c_batch",
    "a": "b", "b": "a", "c": "c", "work": "work", "numbers": "numbers",
}  # fmt: skip
"""Field of the kernel -> field of the caller, when the product is transposed."""


BLOCKS = (For, If, Switch)
"""Statements that others are inside of."""


def children(s: Stmt) -> tuple[Stmt, ...]:
    """The statements directly inside `s`."""
    if isinstance(s, For):
        return s.body
    if isinstance(s, If):
        return s.then + s.orelse
    if isinstance(s, Switch):
        return tuple(x for _, body in s.cases for x in body)
    return ()


def walk(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """All statements of a body, outermost first."""
    rest = list(reversed(body))
    while rest:
        s = rest.pop()
        yield s
        if isinstance(s, BLOCKS):  # most are not
            rest += reversed(children(s))


def functions(kernel: Kernel) -> list[Function]:
    """All functions reachable from the entry, callees first."""
    seen: dict[str, Function] = {}

    def visit(f: Function) -> None:
        for s in walk(f.body):
            if isinstance(s, Call | Parallel) and s.function.name not in seen:
                visit(s.function)
        seen[f.name] = f

    visit(kernel.entry)
    return list(seen.values())
