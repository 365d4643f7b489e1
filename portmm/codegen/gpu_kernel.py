"""Source of device kernels.

Owns the spelling of the statements for threads of a device, once for all languages; a
`Dialect` has the differences between them: see `cuda` and `opencl`. Integers are `int`, but
expressions of strides are `long`: subscripts of shared memory and registers must be cheap,
and an array may have more than 2**31 elements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from portmm.codegen.c_like import SUM, Printer, index
from portmm.codegen.conversions import HELPERS
from portmm.codegen.primitive_templates import called
from portmm.ir.grid_kernel import PLACES, Argument, GridKernel
from portmm.ir.index import Index, Ptr, const
from portmm.ir.nodes import Let, LetPtr, Mac, Scratch, walk
from portmm.ir.thread_nodes import (
    WHOLE,
    Apply,
    Barrier,
    Clear,
    Codes,
    CopyAsync,
    CopyCommit,
    CopyWait,
    Do,
    Exchange,
    Get,
    Interleave,
    Leave,
    Shared,
    Vector,
)
from portmm.spec.dtype import BY_NAME, CODES_AT

if TYPE_CHECKING:
    from portmm.target.isa import Primitive

TOP_CODE = 16
"""The highest offset of an int4 value, of those in `CODES_AT`, that fits the 23 bits of a mantissa."""
_BY_BITS = {"/": ">>", "%": "&"}
_SMALL = {
    "min_": "int min_(int x, int y) { return x < y ? x : y; }",
    "max_": "int max_(int x, int y) { return x > y ? x : y; }",
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The spellings of a device language.

    Attributes:
        name: of the language.
        prelude: text at the top of the source.
        inline: qualifiers of a function that kernels call.
        spaces: memory -> address-space qualifier of a pointer's element type.
        shared: declaration of a shared array of {type} called {name} with {elements}.
        private: likewise of an array of a thread.
        moved: bytes -> type of a vector of that size.
        barrier: the statement.
        unroll: the line before a loop that is fully unrolled.
        places: name of `grid_kernel.PLACES` -> its expression.
        signature: the head of a kernel.
        opening: the first lines of its body.
        copy: {to}, {src}, {bytes}, their {type}, {there}: starts an asynchronous copy, or copies synchronously.
        commit: ends a group of copies; empty if they are synchronous.
        wait: {pending}: waits; likewise.
        exchange: {x}, {mask}: the value of another lane of the warp; empty if not supported.
        primitive: the definition of a function.
        guard: lines around definitions that are instructions.
        functions: functions that the language's own statements call.
        dynamic: definition of SHARED_BYTES, which declares the shared memory that is allocated at launch; empty
            if there is none.
        reserved: words of the language that kernels have as names of integers -> names in their place.
        memory: {bytes}, {align}: declaration of all shared memory of a kernel whose arrays are parts of it.
        map: definition of a tensor map; likewise.
    """

    name: str
    prelude: str
    inline: str
    spaces: dict[str, str]
    shared: str
    private: str
    moved: dict[int, str]
    barrier: str
    unroll: str
    places: dict[str, str]
    signature: Callable[[GridKernel], str]
    opening: Callable[[GridKernel], list[str]]
    primitive: Callable[[Primitive], str]
    guard: tuple[str, str] = ("", "")
    functions: tuple[Primitive, ...] = ()
    dynamic: str = ""
    reserved: Mapping[str, str] = field(default_factory=dict)
    memory: str = "SHARED_BYTES(shared_bytes);"
    map: str = ""
    copy: str = ""
    commit: str = ""
    wait: str = ""
    exchange: str = ""


def source(kernel: GridKernel, dialect: Dialect) -> str:
    """The source of a kernel in a language: self-contained, one kernel."""
    arrays = [s for s in walk(kernel.body) if isinstance(s, Scratch | Shared)]
    points = {a.name: a.dtype for a in kernel.arguments if a.kind == "pointer"}
    points |= {s.name: s.dtype for s in walk(kernel.body) if isinstance(s, LetPtr | Scratch | Shared)}
    spaces = {a.name: "map" if a.kind == "map" else "global" for a in kernel.arguments}
    spaces |= {s.name: "shared" if isinstance(s, Shared) else "private" for s in arrays}
    longs = {a.name for a in kernel.arguments if a.kind == "long"}
    printer = _Printer(kernel.isa, kernel.atom, points, [], kernel, dialect, spaces, longs)
    body = printer.text()
    head = "\n".join(f"/* {line} */" for line in kernel.header)
    maps = dialect.map if any(a.kind == "map" for a in kernel.arguments) else ""
    memory = dialect.dynamic if kernel.dynamic else ""
    parts = (head, dialect.prelude, maps, memory, *_functions(kernel, dialect, body), body)
    return "\n\n".join(x for x in parts if x) + "\n"


def _functions(kernel: GridKernel, dialect: Dialect, body: str) -> list[str]:
    """Definitions of the functions that the body calls, callees first."""
    own = (*dialect.functions, *kernel.isa.functions)
    known = {x.name for x in own}
    plain: list[str] = []
    hardware: list[str] = []
    code = body
    for family in reversed(own):
        for x in called(family, code):
            text = dialect.primitive(x)
            code += text
            (hardware if x.hardware else plain).insert(0, f"{dialect.inline} {text.strip()}")
    helpers = _SMALL | {n: t.replace("static inline ", "") for n, t in HELPERS.items() if n not in known}
    plain += [f"{dialect.inline} {text}" for name, text in helpers.items() if re.search(rf"\b{name}\(", code)]
    first, last = dialect.guard
    return [*([x for x in (first, *hardware, last) if x] if hardware else []), *plain]


def qualified(dialect: Dialect, space: str, dtype: str, *, readonly: bool) -> str:
    """The type of a pointer."""
    words = (dialect.spaces[space], "const" if readonly else "", f"{BY_NAME[dtype].c} *")
    return " ".join(x for x in words if x)


def declared(dialect: Dialect, a: Argument, name: str = "") -> str:
    """The declaration of a parameter."""
    if a.kind == "map":
        return f"const __grid_constant__ TensorMap {a.name}"
    if a.kind != "pointer":
        return f"const {a.kind} {name or a.name}"
    return f"{qualified(dialect, 'global', a.dtype, readonly=a.readonly)}{name or a.name}"


def _shifted(x: Index) -> Index:
    """An expression whose divisions by powers of two are shifts and masks."""
    args = tuple(_shifted(y) if isinstance(y, Index) else y for y in x.args)
    by = args[1] if x.op in _BY_BITS else None
    n = by.args[0] if isinstance(by, Index) and by.op == "const" else 0
    if not isinstance(n, int) or n < 1 or n & (n - 1):
        return Index(x.op, args)
    op, bits = _BY_BITS[x.op], n.bit_length() - 1 if x.op == "/" else n - 1
    return Index(op, (args[0], const(bits)))


@dataclass(slots=True)
class _Printer(Printer):
    """Printer of the body of a kernel.

    Attributes:
        kernel: the kernel.
        dialect: the language.
        spaces: pointer -> "global", "shared" or "private".
        longs: names of integers of 64 bits.
        constant: pointers whose memory is read only.
    """

    integer: ClassVar[str] = "int"
    kernel: GridKernel
    dialect: Dialect
    spaces: dict[str, str]
    longs: set[str]
    constant: set[str] = field(default_factory=set)

    def text(self) -> str:
        kernel, dialect = self.kernel, self.dialect
        self.constant = {a.name for a in kernel.arguments if a.readonly}
        self.lines.append(f"{dialect.signature(kernel)} {{")
        for line in dialect.opening(kernel):
            self.put(1, line)
        if kernel.dynamic:
            align = max(s.align for s in kernel.layout)
            self.put(1, dialect.memory.format(bytes=kernel.shared_bytes, align=align))
        at = len(self.lines)
        for ctype, names in self.registers(kernel.body).items():
            self.put(1, f"{ctype} {', '.join(names)};")
        self.body(kernel.body, 1)
        text = "\n".join(self.lines)
        named = [name for name in PLACES if re.search(rf"\b{name}\b", text)]
        self.lines[at:at] = [f"  const int {name} = {dialect.places[name]};" for name in named]
        self.lines.append("}")
        return "\n".join(self.lines)

    def is_long(self, x: Index) -> bool:
        """Whether an integer depends on one of 64 bits."""
        if x.op == "var":
            return x.args[0] in self.longs
        return any(self.is_long(y) for y in x.args if isinstance(y, Index))

    def index(self, x: Index, outer: int = -1) -> str:
        """The spelling of an integer, with shifts for divisions by powers of two: dividends are never negative."""
        return index(self.renamed(_shifted(x)), outer)

    def renamed(self, x: Index) -> Index:
        """An expression without reserved words of the language."""
        if not self.dialect.reserved:
            return x
        if x.op == "var":
            return Index("var", (self.named(str(x.args[0])),))
        return Index(x.op, tuple(self.renamed(y) if isinstance(y, Index) else y for y in x.args))

    def named(self, name: str) -> str:
        """The name of an integer in the language."""
        return self.dialect.reserved.get(name, name)

    def unrolled(self, factor: int) -> str:
        """The line before a loop with this hint; empty without one."""
        return "" if factor == 1 else self.dialect.unroll + (f" {factor or 1}" if factor < WHOLE else "")

    def address(self, p: Ptr) -> str:
        """The spelling of an address: integers are added first, in 32 bits, so that vectorizers see adjacent lanes."""
        if p.offset.op in "+-":
            return f"{p.name} + ({self.index(p.offset)})"
        return f"{p.name} + {self.index(p.offset, SUM)}" if p.offset != const(0) else p.name

    def element(self, p: Ptr) -> str:
        """The spelling of the element at an address, by subscript where that is more readable."""
        if self.spaces[p.name] == "global":
            return f"*({self.address(p)})"
        return f"{p.name}[{self.index(p.offset)}]"

    def do_let(self, s: Let, depth: int) -> None:
        kind = "int"
        if self.is_long(s.value):
            self.longs.add(s.name)
            kind = "long"
        self.put(depth, f"const {kind} {self.named(s.name)} = {self.index(s.value)};")

    def do_letptr(self, s: LetPtr, depth: int) -> None:
        space, name = self.spaces[s.value.name], s.value.name
        readonly = s.readonly or name in self.constant
        self.spaces[s.name] = space
        if readonly:
            self.constant.add(s.name)
        ctype = qualified(self.dialect, space, s.dtype, readonly=readonly)
        value = self.address(s.value)
        if self.points[name] != s.dtype:
            value = f"({ctype})({value})"
        self.put(depth, f"{ctype}{s.name} = {value};")

    def do_shared(self, s: Shared, depth: int) -> None:
        if self.kernel.dynamic:
            kind, at = qualified(self.dialect, "shared", s.dtype, readonly=False), self.kernel.layout[s]
            self.put(depth, f"{kind}const {s.name} = ({kind})(shared_bytes + {at});")
            return
        self.put(depth, self.dialect.shared.format(type=BY_NAME[s.dtype].c, name=s.name, elements=s.elements))

    def do_scratch(self, s: Scratch, depth: int) -> None:
        self.put(depth, self.dialect.private.format(type=BY_NAME[s.dtype].c, name=s.name, elements=s.elements))

    def do_leave(self, s: Leave, depth: int) -> None:
        self.put(depth, f"if ({self.index(s.when)}) return;")

    def do_barrier(self, _: Barrier, depth: int) -> None:
        self.put(depth, self.dialect.barrier)

    def do_vector(self, s: Vector, depth: int) -> None:
        if s.bytes == BY_NAME[self.points[s.to.name]].bytes:
            self.put(depth, f"{self.element(s.to)} = {self.element(s.src)};")
            return
        kind = self.dialect.moved[s.bytes]
        to, src = (f"{self.dialect.spaces[self.spaces[p.name]]} ".lstrip() for p in (s.to, s.src))
        line = f"*({to}{kind} *)({self.address(s.to)}) = *({src}const {kind} *)({self.address(s.src)});"
        self.put(depth, line)

    def do_clear(self, s: Clear, depth: int) -> None:
        self.put(depth, self.dialect.unroll)
        self.put(depth, f"for (int i = 0; i < {s.count}; ++i) {s.name}[i] = 0;")

    def do_mac(self, s: Mac, depth: int) -> None:
        d, a, b = (self.element(p) for p in (s.d, s.a, s.b))
        self.put(depth, self.own.mac.format(d=d, a=a, b=b))

    def do_interleave(self, s: Interleave, depth: int) -> None:
        rows = [f"(unsigned){self.element(s.src + j)}" for j in range(4)]
        for i in range(4):
            parts = (f"({x} >> {8 * i} & 255) << {8 * j}" for j, x in enumerate(rows))
            self.put(depth, f"{self.element(s.to + i)} = (int)({' | '.join(parts)});")

    def do_codes(self, s: Codes, depth: int) -> None:
        # As bits of a mantissa with a unit of 1: 2**23 + value * 2**bit, exactly; a mask instead of a conversion.
        for i, bit in enumerate(CODES_AT):
            at, word = (bit, self.element(s.src)) if bit <= TOP_CODE else (bit - 12, f"({self.element(s.src)} >> 12)")
            shifted = f"f32_of_bits({word} & {15 << at:#x} | 0x4b000000)"
            value = f"fma_f32({shifted}, {2.0**-at!r}f, {-(2.0 ** (23 - at))!r}f)" if at else f"{shifted} - 8388608.0f"
            self.put(depth, f"{self.element(s.to + i)} = {value};")

    def do_copyasync(self, s: CopyAsync, depth: int) -> None:
        kind, there = self.dialect.moved[s.bytes], self.index(s.there)
        to, src = self.address(s.to), self.address(s.src)
        self.put(depth, self.dialect.copy.format(to=to, src=src, bytes=s.bytes, there=there, type=kind))

    def do_copycommit(self, _: CopyCommit, depth: int) -> None:
        if self.dialect.commit:
            self.put(depth, self.dialect.commit)

    def do_copywait(self, s: CopyWait, depth: int) -> None:
        if self.dialect.wait:
            self.put(depth, self.dialect.wait.format(pending=s.pending))

    def argument(self, x: Ptr | Index) -> str:
        """The spelling of an argument of a primitive."""
        if isinstance(x, Index):
            return self.index(x)
        return f"&{x.name}" if self.spaces.get(x.name) == "map" else self.address(x)

    def do_do(self, s: Do, depth: int) -> None:
        self.put(depth, f"{s.name}({', '.join(map(self.argument, s.args))});")

    def do_get(self, s: Get, depth: int) -> None:
        kind = "unsigned long" if s.kind == "long" else s.kind
        if s.kind == "long":
            self.longs.add(s.name)
        self.put(depth, f"const {kind} {s.name} = {s.primitive}({', '.join(map(self.argument, s.args))});")

    def do_apply(self, s: Apply, depth: int) -> None:
        self.put(depth, f"{self.element(s.to)} = {s.primitive}({', '.join(map(self.element, s.args))});")

    def do_exchange(self, s: Exchange, depth: int) -> None:
        self.put(depth, f"{s.d} = {self.dialect.exchange.format(x=s.x, mask=s.mask)};")
