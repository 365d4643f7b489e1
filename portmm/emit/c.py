"""C from the loop language.

Owns the spelling of every node in header-free GNU C: vector types come from the
ISA's preamble, so no <immintrin.h> is parsed (a seventh of the compile time).
Imports `ir`, `abi`, `dtype`. One pass over an immutable tree; the text of an
atom's verbs is the only part that depends on an ISA. Which text of a load or a
store that is follows from the type of the pointer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from portmm import abi
from portmm.dtype import BY_NAME, base
from portmm.emit import lanes as lanes_of
from portmm.emit.scalars import HELPERS, converted
from portmm.errors import ScheduleError
from portmm.ir import (
    FIELDS,
    LEAST_PEAK,
    OPERANDS,
    STRIDES,
    SWAPPED,
    Add,
    Call,
    Configure,
    For,
    Function,
    If,
    Index,
    Kernel,
    Let,
    LetPtr,
    MacScalar,
    Map,
    Move,
    Parallel,
    Param,
    Prefetch,
    Ptr,
    Read,
    Reduce,
    RowScale,
    Scratch,
    Shuffle,
    Stmt,
    Switch,
    Total,
    Verb,
    functions,
    walk,
)

if TYPE_CHECKING:
    from portmm.target import Atom

_WRITES = {
    "zero": "acc_type", "load_c": "acc_type", "load_a": "a_type", "load_b": "b_type",
    "load_mask": "b_type", "load_rows": "b_type", "mask": "mask_type", "ones": "a_type", "code": "b_type",
    "real": "acc_type",
}  # fmt: skip
"""Verb -> the field of an atom that is the C type of the register it writes."""

_PRECEDENCE = {"==": 0, "<": 1, "+": 2, "-": 2, "*": 3, "/": 3, "%": 3}

_PRELUDE = """\
#if defined(__clang__)
#define SHUFFLE(x, y, ints, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ints, ...) __builtin_shuffle(x, y, (ints){__VA_ARGS__})
#endif
"""
_HELPERS = {
    "min_": "static inline long min_(long x, long y) { return x < y ? x : y; }",
    "max_": "static inline long max_(long x, long y) { return x > y ? x : y; }",
}


def source(kernel: Kernel) -> str:
    """The C source of a kernel: self-contained, no headers, one exported symbol."""
    lane = BY_NAME[kernel.atom.right].bytes
    lanes = "int" if lane == 4 else "long"
    code = [_print(kernel, f) for f in functions(kernel)]
    parts = [
        "\n".join(f"/* {line} */" for line in kernel.header),
        kernel.isa.preamble.strip(),
        abi.ARGS.strip(),
        _PRELUDE.strip(),
        *(text for name, text in (_HELPERS | HELPERS).items() if any(re.search(rf"\b{name}\(", c) for c in code)),
    ]
    if kernel.isa.shuffles and kernel.atom.n > 1:
        parts.append(f"typedef {lanes} lanes_t __attribute__((vector_size({kernel.atom.n * lane})));")
    used = {s.of: None for f in functions(kernel) for s in walk(f.body) if isinstance(s, Map)}
    parts += [lanes_of.declaration(kernel.isa, kernel.isa.word(name)) for name in used]
    return "\n\n".join(p for p in (*parts, *code) if p) + "\n"


def index(x: Index, outer: int = -1) -> str:
    """The C spelling of an integer expression."""
    if x.op in ("const", "var"):
        return str(x.args[0])
    if x.op in ("min", "max"):
        left, right = (index(y) for y in x.args)  # type: ignore[arg-type]
        return f"{x.op}_({left}, {right})"
    level = _PRECEDENCE[x.op]
    # Only + may drop the brackets of a right operand: integer division does not associate.
    text = f"{index(x.args[0], level)} {x.op} {index(x.args[1], level + (x.op != '+'))}"  # type: ignore[arg-type]
    return f"({text})" if level < outer else text


def address(p: Ptr) -> str:
    """The C spelling of an address."""
    if p.offset == Index("const", (0,)):
        return p.name
    return f"{p.name} + {index(p.offset, 2)}"


def _names(x: Index) -> set[str]:
    if x.op == "var":
        return {str(x.args[0])}
    return set().union(*(_names(y) for y in x.args if isinstance(y, Index)))


def _mentions(s: Stmt) -> set[str]:
    """Every variable and pointer that a statement itself reads."""
    found: set[str] = set()
    for slot in s.__slots__:
        values = getattr(s, slot)
        for value in values if isinstance(values, tuple) else (values,):
            if isinstance(value, Ptr):
                found |= {value.name} | _names(value.offset)
            elif isinstance(value, Index):
                found |= _names(value)
    return found | {"workers"} if isinstance(s, Parallel) else found


def _pruned(body: tuple[Stmt, ...]) -> tuple[tuple[Stmt, ...], set[str]]:
    """A block without the names that nothing after them reads, and all names that the rest of it reads."""
    kept: list[Stmt] = []
    used: set[str] = set()
    for s in reversed(body):
        if isinstance(s, Let | LetPtr | Read | Scratch) and s.name not in used:
            continue
        now, inside = _pruned_inside(s)
        kept.append(now)
        used |= inside | _mentions(s)
    return tuple(reversed(kept)), used


def _pruned_inside(s: Stmt) -> tuple[Stmt, set[str]]:
    if isinstance(s, For):
        body, used = _pruned(s.body)
        return replace(s, body=body), used
    if isinstance(s, If):
        (then, used), (orelse, more) = _pruned(s.then), _pruned(s.orelse)
        return replace(s, then=then, orelse=orelse), used | more
    if isinstance(s, Switch):
        cases = [(number, _pruned(body)) for number, body in s.cases]
        return replace(s, cases=tuple((n, body) for n, (body, _) in cases)), set().union(*(u for _, (_, u) in cases))
    return s, set()


def _print(kernel: Kernel, f: Function) -> str:
    body, used = _pruned(f.body)
    return _Printer(kernel, replace(f, body=body), used).text()


@dataclass(slots=True)
class _Printer:
    kernel: Kernel
    function: Function
    used: set[str]
    lines: list[str] = field(default_factory=list)
    points: dict[str, str] = field(default_factory=dict)

    def types(self) -> dict[str, str]:
        """Pointer -> type of what it points at."""
        f = self.function
        extra = (f"x{i}" for i in range(len(self.kernel.operands)))
        found = {} if f.kind == "inner" else {name: self.kernel.type_of(name) for name in (*OPERANDS, *extra)}
        found |= {p.name: p.dtype for p in f.params if p.dtype}
        return found | {s.name: s.dtype for s in walk(f.body) if isinstance(s, LetPtr | Scratch)}

    def at(self, p: Ptr, to: str) -> str:
        """The element at an address, as one of type `to`."""
        return converted(f"*({address(p)})", self.points[p.name], to)

    def text(self) -> str:
        f = self.function
        self.points = self.types()
        if f.comment:
            self.lines.append(f"/* {f.comment} */")
        self.lines.append(f"{self.signature()} {{")
        self.prologue()
        for ctype, names in self.registers().items():
            self.put(1, f"{ctype} {', '.join(names)};")
        self.body(f.body, 1)
        self.lines.append("}")
        return "\n".join(self.lines)

    def put(self, depth: int, line: str) -> None:
        self.lines.append("  " * depth + line)

    def signature(self) -> str:
        f = self.function
        if f.kind == "entry":
            return f"void {self.kernel.name}(const portmm_args *g)"
        if f.kind == "task":
            return f"static void {f.name}(const long *ctx, long task, long worker)"
        params = ", ".join(
            f"{'const ' if p.readonly else ''}{BY_NAME[p.dtype].c} *{p.name}" if p.dtype else f"long {p.name}"
            for p in f.params
        )
        how = "inline __attribute__((always_inline))" if f.inline else "__attribute__((noinline))"
        return f"static {how} void {f.name}({params})"

    def prologue(self) -> None:
        """Bind the fields of the argument block that the body mentions."""
        f, used = self.function, self.used
        if f.kind == "inner":
            return
        if f.kind == "task":
            self.put(1, "const portmm_args *g = (const portmm_args *)ctx[0];")
            for i, p in enumerate(f.params, 1):
                self.put(1, f"const long {p.name} = ctx[{i}];")
            self.put(1, "(void)g; (void)task; (void)worker;")
        source = SWAPPED if self.kernel.swap else {}
        constants = dict(self.kernel.constants)
        for name in FIELDS:
            if name in used and name not in {p.name for p in f.params}:
                value = constants.get(name, f"g->{source.get(name, name)}")
                self.put(1, f"const long {name} = {value};")
        for name, readonly in OPERANDS.items():
            if name in used:
                ctype = BY_NAME[self.points[name]].c
                qualifier = "const " if readonly else ""
                value = f"({qualifier}{ctype} *)g->{source.get(name, name)}"
                self.put(1, f"{qualifier}{ctype} *{name} = {value};")
        self.operands()

    def operands(self) -> None:
        """Bind the operands of fused expressions, and their strides, that the body mentions."""
        for i, (dtype, written) in enumerate(self.kernel.operands):
            ctype = f"{'' if written else 'const '}{BY_NAME[dtype].c} *"
            if f"x{i}" in self.used:
                self.put(1, f"{ctype}x{i} = ({ctype})g->operands[{i}].p;")
            for axis in STRIDES:
                if f"x{i}_{axis}" in self.used:
                    self.put(1, f"const long x{i}_{axis} = g->operands[{i}].{axis};")

    def registers(self) -> dict[str, list[str]]:
        """C type -> names of the registers that the function's verbs write."""
        found: dict[str, str] = {}
        for s in walk(self.function.body):
            if isinstance(s, Verb) and s.name in _WRITES:
                written = "acc_type" if s.to == self.atom(s).acc else _WRITES[s.name]
                found.setdefault(s.d, getattr(self.atom(s), written))
            elif isinstance(s, Shuffle):
                found.setdefault(s.d, self.own.b_type)
            elif isinstance(s, Map):
                found.setdefault(s.d, self.lanes(s)[("f32", "s32", "mask").index(s.dtype)])
        types: dict[str, list[str]] = {}
        for name, ctype in found.items():
            if ctype:  # a tile is no variable
                types.setdefault(ctype, []).append(name)
        return types

    def body(self, body: tuple[Stmt, ...], depth: int) -> None:
        for s in body:
            getattr(self, f"do_{type(s).__name__.lower()}")(s, depth)

    def do_let(self, s: Let, depth: int) -> None:
        self.put(depth, f"const long {s.name} = {index(s.value)};")

    def do_read(self, s: Read, depth: int) -> None:
        self.put(depth, f"const long {s.name} = *({address(s.p)});")

    def do_letptr(self, s: LetPtr, depth: int) -> None:
        ctype = f"{'const ' if s.readonly else ''}{BY_NAME[s.dtype].c} *"
        value = address(s.value)
        if self.points[s.value.name] != s.dtype:
            value = f"({ctype})({value})"
        self.put(depth, f"{ctype}{s.name} = {value};")

    def do_scratch(self, s: Scratch, depth: int) -> None:
        self.put(depth, f"{BY_NAME[s.dtype].c} {s.name}[{s.elements}] __attribute__((aligned(64)));")

    def do_for(self, s: For, depth: int) -> None:
        if s.unroll > 1:
            self.put(depth, f"#pragma GCC unroll {s.unroll}")
        step = f"++{s.var}" if s.step == Index("const", (1,)) else f"{s.var} += {index(s.step)}"
        self.put(depth, f"for (long {s.var} = {index(s.begin)}; {s.var} < {index(s.end, 2)}; {step}) {{")
        self.body(s.body, depth + 1)
        self.put(depth, "}")

    def do_if(self, s: If, depth: int) -> None:
        self.put(depth, f"if ({index(s.cond)}) {{")
        self.body(s.then, depth + 1)
        if s.orelse:
            self.put(depth, "} else {")
            self.body(s.orelse, depth + 1)
        self.put(depth, "}")

    def do_switch(self, s: Switch, depth: int) -> None:
        self.put(depth, f"switch ({index(s.value)}) {{")
        for number, body in s.cases:
            self.put(depth + 1, f"case {number}:")
            self.body(body, depth + 2)
            self.put(depth + 2, "break;")
        self.put(depth + 1, "default:")
        self.put(depth + 2, "__builtin_trap();")
        self.put(depth, "}")

    def atom(self, s: Verb) -> Atom:
        """The atom whose word a statement is."""
        return self.kernel.isa.word(s.of) if s.of else self.own

    @property
    def own(self) -> Atom:
        """The atom whose words the function's statements are unless they say otherwise."""
        return self.kernel.isa.word(self.function.of) if self.function.of else self.kernel.atom

    def do_verb(self, s: Verb, depth: int) -> None:
        memory = self.points[s.p.name] if s.p else ""
        text = self.kernel.isa.spelling(self.atom(s), s.name, memory, s.to)
        if not text:
            raise ScheduleError(f"{self.kernel.isa.name} has no {s.name} of {memory} for {self.atom(s).name} {s.to}")
        self.put(
            depth,
            text.format(
                d=s.d,
                a=s.a,
                b=s.b,
                mask=s.mask,
                p=address(s.p) if s.p else "",
                count=index(s.count) if s.count else "",
                step=index(s.step) if s.step else "",
            ),
        )

    def do_configure(self, s: Configure, depth: int) -> None:
        text = self.own.configure if s.rows else self.own.release
        self.put(depth, text.format(rows=", ".join(index(x) for x in s.rows)))

    def lanes(self, s: Map) -> tuple[str, str, str]:
        """The C types of lanes beside an operation's."""
        return lanes_of.types(self.kernel.isa, self.kernel.isa.word(s.of))

    def do_map(self, s: Map, depth: int) -> None:
        isa, real = self.kernel.isa, self.kernel.isa.word(s.of)
        text = lanes_of.text(isa, real, s.op, s.given)
        if not text:
            raise ScheduleError(f"{isa.name} has no {s.op} of {real.n} lanes of {s.given}")
        said = [x if isinstance(x, str) else lanes_of.literal(isa, real, x, s.given) for x in s.args]
        if s.op == "literal":
            self.put(depth, f"{s.d} = {said[0]};")
            return
        if s.op in ("shl", "shr"):
            said[1] = str(s.args[1])
        first, second, third = self.lanes(s)
        made = {"f32": first, "s32": second, "mask": third}[s.dtype]
        names = dict(zip("abc", said, strict=False))
        count = index(s.count) if s.count else ""
        lanes = ", ".join(map(str, range(real.n)))
        line = text.format(
            d=s.d, **names, R=first, W=second, U=lanes_of.unsigned(isa, real), T=made, count=count, lanes=lanes
        )
        self.put(depth, line)

    def do_total(self, s: Total, depth: int) -> None:
        self.put(depth, "{")
        self.put(depth + 1, f"float all = *({address(s.src)});")
        self.put(depth + 1, f"for (int i = 1; i < {s.count}; ++i) {{")
        self.put(depth + 2, f"const float x = ({address(s.src)})[i];")
        self.put(depth + 2, "all += x;" if s.kind == "add" else "if (x > all || x != x) all = x;")
        self.put(depth + 1, "}")
        self.put(depth + 1, f"*({address(s.to)}) = all;")
        self.put(depth, "}")

    def do_shuffle(self, s: Shuffle, depth: int) -> None:
        self.put(depth, f"{s.d} = SHUFFLE({s.a}, {s.b}, lanes_t, {', '.join(map(str, s.pick))});")

    def do_reduce(self, s: Reduce, depth: int) -> None:
        acc = self.kernel.atom.acc
        old = f"({index(s.accumulate)} ? {self.at(s.p, acc)} : 0)"
        self.put(depth, "{")
        self.put(depth + 1, f"{BY_NAME[acc].c} sum;")
        for line in _reduction(self.kernel.atom, s.d):
            self.put(depth + 1, line)
        self.put(depth + 1, f"*({address(s.p)}) = {converted(f'{old} + sum', acc, self.points[s.p.name])};")
        self.put(depth, "}")

    def do_macscalar(self, s: MacScalar, depth: int) -> None:
        acc = self.kernel.atom.acc
        self.put(depth, f"*({address(s.p)}) += {self.at(s.a, acc)} * {self.at(s.b, acc)};")

    def do_move(self, s: Move, depth: int) -> None:
        value = self.at(s.src, base(self.points[s.to.name])) if s.src else "0"
        self.put(depth, f"*({address(s.to)}) = {value};")

    def do_add(self, s: Add, depth: int) -> None:
        self.put(depth, f"*({address(s.to)}) += *({address(s.src)});")

    def do_rowscale(self, s: RowScale, depth: int) -> None:
        self.put(depth, "{")
        self.put(depth + 1, "float most = 0;")
        self.put(depth + 1, f"for (int i = 0; i < {s.count}; ++i) {{")
        self.put(depth + 2, f"const float peak = ({address(s.peaks)})[i];")
        self.put(depth + 2, "if (peak > most || peak != peak) most = peak; /* a NaN stays */")
        self.put(depth + 1, "}")
        self.put(depth + 1, f"*({address(s.scale)}) = most / {s.top};")
        self.put(depth + 1, f"*({address(s.inverse)}) = most >= {LEAST_PEAK}f ? {s.top} / most : 0;")
        self.put(depth, "}")

    def do_prefetch(self, s: Prefetch, depth: int) -> None:
        how = f", {int(s.write)}, {3 if s.near else 2}" if s.write or not s.near else ""
        self.put(depth, f"__builtin_prefetch({address(s.p)}{how});")

    def do_call(self, s: Call, depth: int) -> None:
        args = ", ".join(self.argument(p, x) for p, x in zip(s.function.params, s.args, strict=True))
        self.put(depth, f"{s.function.name}({args});")

    def argument(self, p: Param, x: Index | Ptr) -> str:
        """An argument; a pointer to another type is cast."""
        if isinstance(x, Index):
            return index(x)
        if self.points[x.name] == p.dtype:
            return address(x)
        return f"({'const ' if p.readonly else ''}{BY_NAME[p.dtype].c} *)({address(x)})"

    def do_parallel(self, s: Parallel, depth: int) -> None:
        values = ", ".join(["(long)g", *(index(x) for x in s.args)])
        self.put(depth, "{")
        self.put(depth + 1, f"const long task_ctx[] = {{{values}}};")
        self.put(depth + 1, f"g->parallel(g->pool, {s.function.name}, task_ctx, {index(s.tasks)}, workers);")
        self.put(depth, "}")


def _reduction(atom: Atom, d: str) -> list[str]:
    """Lines that leave the sum of the lanes in `sum`: fold the upper half onto the lower until one is left."""
    if atom.reduce:
        return [atom.reduce.format(s="sum", d=d)]
    if atom.n == 1:
        return [f"sum = {d};"]
    lines, width = [], atom.n // 2
    while width:
        pick = ", ".join(str((i + width) % atom.n) for i in range(atom.n))
        lines.append(f"{d} += SHUFFLE({d}, {d}, lanes_t, {pick});")
        width //= 2
    return [*lines, f"sum = {d}[0];"]
