"""Statements that all languages of the C family share.

Owns the spelling of integers, addresses and common statements, and the elimination of unused
names. The languages, of `c_kernel`, `cuda` and `opencl`, differ in the declarations of functions
and pointers, and in statements of their own. The type of the pointer selects the
text of a load or a store.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from portmm.codegen import vector_spelling
from portmm.codegen.conversions import converted
from portmm.errors import ScheduleError
from portmm.ir.index import Index, Ptr
from portmm.ir.lane_nodes import Map, Repeat, Shuffle
from portmm.ir.nodes import (
    BLOCKS,
    Add,
    For,
    If,
    Let,
    LetPtr,
    Move,
    Parallel,
    Read,
    Scratch,
    Stmt,
    Switch,
    UntilAligned,
    Verb,
    walk,
)
from portmm.ir.thread_nodes import Exchange
from portmm.spec.dtype import BY_NAME, base

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

_WRITES = {
    "zero": "acc_type", "load_c": "acc_type", "load_a": "a_type", "load_b": "b_type",
    "load_mask": "b_type", "load_rows": "b_type", "mask": "mask_type", "ones": "a_type", "code": "b_type",
    "centred": "b_type", "below": "b_type", "e2m1": "b_type", "real": "acc_type",
}  # fmt: skip
"""Verb -> the field of an atom that is the C type of the register it writes."""

_DIVISIONS = {"/": "div", "%": "mod"}
_BITS = ("^", ">>", "&")
_PRECEDENCE = {"==": 1, "<": 2, "+": 3, "-": 3, "*": 4, "/": 4, "%": 4}
SUM, _ALWAYS = _PRECEDENCE["+"], 9
_LEAVES = ("const", "var")
_DECLARATIONS = (Let, LetPtr, Read, Scratch, UntilAligned)


def index(x: Index, outer: int = -1, *, guarded: bool = False) -> str:
    """The C spelling of an integer expression; `guarded` divisions by 1 take a comparison, not a division."""
    op = x.op
    if op in _LEAVES:
        return str(x.args[0])
    first: Any
    second: Any
    first, second = x.args
    level = _PRECEDENCE.get(op)
    if guarded and op in _DIVISIONS and second.op != "const":
        op, level = _DIVISIONS[op], None
    if level is not None:
        # Only + needs no brackets around a right operand: integer division does not associate.
        left = first.args[0] if first.op in _LEAVES else index(first, level, guarded=guarded)
        right = second.args[0] if second.op in _LEAVES else index(second, level + (op != "+"), guarded=guarded)
        return f"({left} {op} {right})" if level < outer else f"{left} {op} {right}"
    if op in _BITS:  # which bind less than a comparison, or a sum: compilers warn without brackets
        text = f"{index(first, _ALWAYS, guarded=guarded)} {op} {index(second, _ALWAYS, guarded=guarded)}"
        return f"({text})" if outer >= 0 else text
    return f"{op}_({index(first, guarded=guarded)}, {index(second, guarded=guarded)})"


def address(p: Ptr, *, guarded: bool = False) -> str:
    """The C spelling of an address."""
    if p.offset == Index("const", (0,)):
        return p.name
    return f"{p.name} + {index(p.offset, _PRECEDENCE['+'], guarded=guarded)}"


def _add_names(x: Any, names: set[str]) -> None:
    """Add the names of the variables of an expression to a set."""
    op = x.op
    if op == "var":
        names.add(x.args[0])
    elif op != "const":
        for y in x.args:
            _add_names(y, names)


@cache
def _read_slots(kind: Any) -> tuple[str, ...]:
    """The fields of a kind of statement that can hold expressions and addresses, alone or in a tuple."""
    read = (x for x in fields(kind) if re.search(r"\b(Index|Ptr|Any)\b", str(x.type)))
    return tuple(x.name for x in read)


def _add_names_read(s: Stmt, names: set[str]) -> None:
    """Add the names of all variables and pointers that a statement itself reads to a set."""
    own: Any = type(s)
    for slot in _read_slots(own):
        values = getattr(s, slot)
        for value in values if type(values) is tuple else (values,):
            kind = type(value)
            if kind is Ptr:
                names.add(value.name)
                _add_names(value.offset, names)
            elif kind is Index:
                _add_names(value, names)
    if isinstance(s, Parallel):
        names.add("workers")


def pruned(body: tuple[Stmt, ...]) -> tuple[tuple[Stmt, ...], set[str]]:
    """A block without unused declarations, and all names that it reads."""
    kept: list[Stmt] = []
    used: set[str] = set()
    for s in reversed(body):
        if isinstance(s, _DECLARATIONS) and s.name not in used:
            continue
        now, inside = _pruned_inside(s)
        kept.append(now)
        used |= inside
        _add_names_read(s, used)
    return tuple(reversed(kept)), used


def _pruned_inside(s: Stmt) -> tuple[Stmt, set[str]]:
    if not isinstance(s, BLOCKS):
        return s, set()
    if isinstance(s, For):
        body, used = pruned(s.body)
        return replace(s, body=body), used
    if isinstance(s, If):
        (then, used), (orelse, more) = pruned(s.then), pruned(s.orelse)
        return replace(s, then=then, orelse=orelse), used | more
    cases = [(number, pruned(body)) for number, body in s.cases]
    return replace(s, cases=tuple((n, body) for n, (body, _) in cases)), set().union(*(u for _, (_, u) in cases))


@dataclass(slots=True)
class Printer:
    """Printer of the lines of one function.

    Attributes:
        isa: the instruction set of its statements.
        own: the atom of its verbs, unless they name another.
        points: pointer -> its element type.
        lines: lines printed so far.
        integer: the type of integers.
        guarded: see `index`.
    """

    integer: ClassVar[str] = "long"
    guarded: ClassVar[bool] = False
    isa: Isa
    own: Atom
    points: dict[str, str]
    lines: list[str]

    def at(self, p: Ptr, to: str) -> str:
        """The spelling of the element at an address, converted to type `to`."""
        return converted(self.element(p), self.points[p.name], to)

    def index(self, x: Index, outer: int = -1) -> str:
        """The spelling of an integer expression."""
        return index(x, outer, guarded=self.guarded)

    def address(self, p: Ptr) -> str:
        """The spelling of an address."""
        return address(p, guarded=self.guarded)

    def element(self, p: Ptr) -> str:
        """The spelling of the element at an address."""
        return f"*({self.address(p)})"

    def named(self, name: str) -> str:
        """The name of an integer in the language."""
        return name

    def unrolled(self, factor: int) -> str:
        """The line before a loop with this hint; empty without one."""
        return f"#pragma GCC unroll {factor}" if factor > 1 else ""

    def put(self, depth: int, line: str) -> None:
        self.lines.append("  " * depth + line)

    def registers(self, body: tuple[Stmt, ...]) -> dict[str, list[str]]:
        """C type -> names of the registers that verbs write."""
        ctypes: dict[str, str] = {}
        for s in walk(body):
            if isinstance(s, Verb) and s.name in _WRITES:
                written = "acc_type" if s.to == self.atom(s).acc else _WRITES[s.name]
                ctypes.setdefault(s.d, (s.name == "ones" and self.atom(s).ones_type) or getattr(self.atom(s), written))
            elif isinstance(s, Shuffle | Repeat):
                ctypes.setdefault(s.d, self.own.b_type)
            elif isinstance(s, Exchange):
                ctypes.setdefault(s.d, "float")
            elif isinstance(s, Map):
                ctypes.setdefault(s.d, self.lanes(s)[("f32", "s32", "mask").index(s.dtype)])
        types: dict[str, list[str]] = {}
        for name, ctype in ctypes.items():
            if ctype:  # a tile is not a variable
                types.setdefault(ctype, []).append(name)
        return types

    def body(self, body: tuple[Stmt, ...], depth: int) -> None:
        for s in body:
            getattr(self, f"do_{type(s).__name__.lower()}")(s, depth)

    def do_let(self, s: Let, depth: int) -> None:
        self.put(depth, f"const long {s.name} = {self.index(s.value)};")

    def do_read(self, s: Read, depth: int) -> None:
        self.put(depth, f"const {self.integer} {s.name} = {self.element(s.p)};")

    def do_letptr(self, s: LetPtr, depth: int) -> None:
        ctype = f"{'const ' if s.readonly else ''}{BY_NAME[s.dtype].c} *"
        value = self.address(s.value)
        if self.points[s.value.name] != s.dtype:
            value = f"({ctype})({value})"
        self.put(depth, f"{ctype}{s.name} = {value};")

    def do_scratch(self, s: Scratch, depth: int) -> None:
        self.put(depth, f"{BY_NAME[s.dtype].c} {s.name}[{s.elements}] __attribute__((aligned(64)));")
        if s.guarded:
            self.put(depth, f'__asm__("" : "=m"({s.name}));')

    def do_for(self, s: For, depth: int) -> None:
        if hint := self.unrolled(s.unroll):
            self.put(depth, hint)
        i = self.named(s.var)
        step = f"++{i}" if s.step == Index("const", (1,)) else f"{i} += {self.index(s.step)}"
        self.put(depth, f"for ({self.integer} {i} = {self.index(s.begin)}; {i} < {self.index(s.end, SUM)}; {step}) {{")
        self.body(s.body, depth + 1)
        self.put(depth, "}")

    def do_if(self, s: If, depth: int) -> None:
        cond = self.index(s.cond)
        self.put(depth, f"if ({f'__builtin_expect({cond}, 0)' if s.rare else cond}) {{")
        self.body(s.then, depth + 1)
        if s.orelse:
            self.put(depth, "} else {")
            self.body(s.orelse, depth + 1)
        self.put(depth, "}")

    def do_switch(self, s: Switch, depth: int) -> None:
        self.put(depth, f"switch ({self.index(s.value)}) {{")
        for number, body in s.cases:
            self.put(depth + 1, f"case {number}:")
            self.body(body, depth + 2)
            self.put(depth + 2, "break;")
        self.put(depth + 1, "default:")
        self.put(depth + 2, "__builtin_trap();")
        self.put(depth, "}")

    def do_verb(self, s: Verb, depth: int) -> None:
        memory = self.points[s.p.name] if s.p else ""
        atom = self.atom(s)
        text = atom.stream if s.passing and atom.stream else self.isa.spelling(atom, s.name, memory, s.to)
        if not text:
            raise ScheduleError(f"{self.isa.name} has no {s.name} of {memory} for {self.atom(s).name} {s.to}")
        self.put(
            depth,
            text.format(
                d=s.d,
                a=s.a,
                b=s.b,
                mask=s.mask,
                p=self.address(s.p) if s.p else "",
                count=self.index(s.count) if s.count else "",
                step=self.index(s.step) if s.step else "",
            ),
        )

    def lanes(self, s: Map) -> tuple[str, str, str]:
        """The C types of vectors of f32, of s32 and of masks in an operation."""
        return vector_spelling.types(self.isa, self.isa.word(s.of))

    def do_map(self, s: Map, depth: int) -> None:
        isa, real = self.isa, self.isa.word(s.of)
        text = vector_spelling.text(isa, real, s.op, s.operand)
        if not text:
            raise ScheduleError(f"{isa.name} has no {s.op} of {real.n} lanes of {s.operand}")
        operands = [x if isinstance(x, str) else vector_spelling.literal(isa, real, x, s.operand) for x in s.args]
        if s.op == "literal":
            self.put(depth, f"{s.d} = {operands[0]};")
            return
        if s.op in ("shl", "shr"):
            operands[1] = str(s.args[1])
        first, second, third = self.lanes(s)
        result = {"f32": first, "s32": second, "mask": third}[s.dtype]
        names = dict(zip("abc", operands, strict=False))
        count = self.index(s.count) if s.count else ""
        lanes = ", ".join(map(str, range(real.n)))
        line = text.format(
            d=s.d, **names, R=first, W=second, U=vector_spelling.unsigned(isa, real), T=result, count=count, lanes=lanes
        )
        self.put(depth, line)

    def do_move(self, s: Move, depth: int) -> None:
        value = self.at(s.src, base(self.points[s.to.name])) if s.src else str(s.value)
        self.put(depth, f"{self.element(s.to)} = {value};")

    def do_add(self, s: Add, depth: int) -> None:
        self.put(depth, f"{self.element(s.to)} += {self.element(s.src)};")

    def atom(self, s: Verb) -> Atom:
        """The atom of a verb."""
        return self.isa.word(s.of) if s.of else self.own
