"""C source of kernels in the loop language.

Owns functions, arguments and threads in header-free GNU C: vector types come from the
ISA's preamble, so no <immintrin.h> is parsed (a seventh of the compile time).
One pass over an immutable tree; the text of an atom's verbs is the only part that
depends on an ISA.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from portmm.codegen import vector_spelling
from portmm.codegen.c_like import Printer, pruned
from portmm.codegen.conversions import HELPERS, converted
from portmm.ir import abi
from portmm.ir.index import Index, Ptr
from portmm.ir.lane_nodes import LEAST_PEAK, Map, Reduce, Repeat, RowScale, Shuffle, Total
from portmm.ir.nodes import (
    FIELDS,
    OPERANDS,
    SWAPPED,
    Call,
    Configure,
    Function,
    Kernel,
    LetPtr,
    Mac,
    Parallel,
    Param,
    Prefetch,
    Scratch,
    UntilAligned,
    functions,
    walk,
)
from portmm.spec.dtype import BY_NAME
from portmm.spec.problem import AXES

if TYPE_CHECKING:
    from portmm.target.atom import Atom


def _total(name: str, kind: str, lanes: int) -> str:
    """The C function that reduces lanes in memory to one number.

    The upper half is taken into the lower until one remains, in vectors of the compiler, which has them of any width; a
    maximum selects by masks, since branches on the order of values are mispredicted.
    """
    lines, vector = [f"static inline float {name}(const float *p) {{"], lanes // 2
    sizes = [2**i for i in range(2, vector.bit_length())] or [vector]
    for n in sizes:
        lines.append(f"  typedef float h{n} __attribute__((vector_size({4 * n}), aligned(4), may_alias));")
        if kind != "add":
            lines.append(f"  typedef int m{n} __attribute__((vector_size({4 * n})));")
    operands = f"*(const h{vector} *)p", f"*(const h{vector} *)(p + {vector})"
    while True:
        n = max(vector, sizes[0])
        lines += _taken(kind, n, vector, *operands)
        if vector == 1:
            break
        x = f"x{vector}"
        vector //= 2
        wide = max(vector, sizes[0])
        low = ", ".join(f"{x}[{i % vector}]" for i in range(wide))
        high = ", ".join(f"{x}[{vector + i % vector}]" for i in range(wide))
        operands = f"(h{wide}){{{low}}}", f"(h{wide}){{{high}}}"
    return "\n".join([*lines, "  return x1[0];", "}"])


def _taken(kind: str, n: int, number: int, low: str, high: str) -> list[str]:
    """Statements that add two vectors of n lanes, or select the larger elements."""
    if kind == "add":
        return [f"  const h{n} x{number} = {low} + {high};"]
    a, b, m = f"a{number}", f"b{number}", f"t{number}"
    return [
        f"  const h{n} {a} = {low}, {b} = {high};",
        f"  const m{n} {m} = ({b} > {a}) | ({b} != {b});",
        f"  const h{n} x{number} = (h{n})(((m{n}){b} & {m}) | ((m{n}){a} & ~{m}));",
    ]


TOTALS = {
    f"{name}_{lanes}": _total(f"{name}_{lanes}", kind, lanes)
    for name, kind in (("sum", "add"), ("most", "max"))
    for lanes in (4, 8, 16)
}
"""Functions by name: the sum or the maximum of 4, 8 or 16 lanes, NaN if any is NaN."""


_PRELUDE = """\
#if defined(__clang__)
#define SHUFFLE(x, y, ints, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ints, ...) __builtin_shuffle(x, y, (ints){__VA_ARGS__})
#endif
"""
_REPEAT = """\
typedef long long pair_u __attribute__((aligned(4), may_alias));
typedef long long pairs_t __attribute__((vector_size({bytes})));
#define REPEAT(vector, p) (vector)((pairs_t){{0}} + *(const pair_u *)(p))"""
_HELPERS = {
    "min_": "static inline long min_(long x, long y) { return x < y ? x : y; }",
    "max_": "static inline long max_(long x, long y) { return x > y ? x : y; }",
    "div_": "static inline long div_(long x, long y) { return y == 1 ? x : x / y; }",
    "mod_": "static inline long mod_(long x, long y) { return y == 1 ? 0 : x % y; }",
}


def source(kernel: Kernel) -> str:
    """The C source of a kernel: self-contained, no headers, one exported symbol."""
    lane = BY_NAME[kernel.atom.right].bytes
    lanes = "int" if lane == 4 else "long"
    every = functions(kernel)
    code = [_print(kernel, f) for f in every]
    parts = [
        "\n".join(f"/* {line} */" for line in kernel.header),
        kernel.isa.preamble.strip(),
        abi.ARGS.strip(),
        _PRELUDE.strip(),
        *(text for name, text in (_HELPERS | HELPERS | TOTALS).items() if any(_calls(c, name) for c in code)),
    ]
    if kernel.isa.shuffles and kernel.atom.n > 1:
        parts.append(f"typedef {lanes} lanes_t __attribute__((vector_size({kernel.atom.n * lane})));")
    if any(_calls(c, "REPEAT") for c in code):
        parts.append(_REPEAT.format(bytes=kernel.atom.n * lane))
    used = {s.of: None for f in every for s in walk(f.body) if isinstance(s, Map)}
    parts += [vector_spelling.declaration(kernel.isa, kernel.isa.word(name)) for name in used]
    return "\n\n".join(p for p in (*parts, *code) if p) + "\n"


def _calls(code: str, name: str) -> bool:
    """Whether a function calls another; nearly always it is enough to look for the letters."""
    return f"{name}(" in code and re.search(rf"\b{name}\(", code) is not None


def _print(kernel: Kernel, f: Function) -> str:
    body, used = pruned(f.body)
    f = replace(f, body=body)
    own = kernel.isa.word(f.of) if f.of else kernel.atom
    return _Printer(kernel.isa, own, _types(kernel, f), [], kernel, f, used).text()


def _types(kernel: Kernel, f: Function) -> dict[str, str]:
    """Pointer -> its element type."""
    extra = (f"x{i}" for i in range(len(kernel.operands)))
    pointers = {} if f.kind == "inner" else {name: kernel.type_of(name) for name in (*OPERANDS, *extra)}
    pointers |= {p.name: p.dtype for p in f.params if p.dtype}
    return pointers | {s.name: s.dtype for s in walk(f.body) if isinstance(s, LetPtr | Scratch)}


@dataclass(slots=True)
class _Printer(Printer):
    """Printer of a function of a kernel.

    Attributes:
        kernel: the kernel.
        function: the function that is printed.
        used: names that its body reads.
    """

    guarded: ClassVar[bool] = True
    kernel: Kernel
    function: Function
    used: set[str]

    def text(self) -> str:
        f = self.function
        if f.comment:
            self.lines.append(f"/* {f.comment} */")
        self.lines.append(f"{self.signature()} {{")
        self.prologue()
        for ctype, names in self.registers(f.body).items():
            self.put(1, f"{ctype} {', '.join(names)};")
        self.body(f.body, 1)
        self.lines.append("}")
        return "\n".join(self.lines)

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
        """Bind the fields of the argument block that the body uses."""
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
        """Bind the operands of epilogue expressions, and their strides, that the body uses."""
        for i, (dtype, written) in enumerate(self.kernel.operands):
            ctype = f"{'' if written else 'const '}{BY_NAME[dtype].c} *"
            if f"x{i}" in self.used:
                self.put(1, f"{ctype}x{i} = ({ctype})g->operands[{i}].p;")
            for axis in AXES:
                if f"x{i}_{axis}" in self.used:
                    self.put(1, f"const long x{i}_{axis} = g->operands[{i}].{axis};")

    def do_configure(self, s: Configure, depth: int) -> None:
        rows = ", ".join(self.index(x) for x in s.rows)
        if s.words:
            self.put(depth, self.own.shape.format(rows=rows, bytes=", ".join(str(4 * x) for x in s.words)))
            return
        self.put(depth, (self.own.configure if s.rows else self.own.release).format(rows=rows))

    def do_total(self, s: Total, depth: int) -> None:
        name = f"{'sum' if s.kind == 'add' else 'most'}_{s.count}"
        if name in TOTALS:
            self.put(depth, f"*({self.address(s.to)}) = {name}({self.address(s.src)});")
            return
        if s.kind == "add":
            self.halves(s, depth)
            return
        self.put(depth, "{")
        self.put(depth + 1, f"float all = *({self.address(s.src)});")
        self.put(depth + 1, f"for (int i = 1; i < {s.count}; ++i) {{")
        self.put(depth + 2, f"const float x = ({self.address(s.src)})[i];")
        self.put(depth + 2, "if (x > all || x != x) all = x;")
        self.put(depth + 1, "}")
        self.put(depth + 1, f"*({self.address(s.to)}) = all;")
        self.put(depth, "}")

    def halves(self, s: Total, depth: int) -> None:
        """Print the sum of a power of two of numbers: the upper half is added to the lower until one remains."""
        self.put(depth, "{")
        self.put(depth + 1, f"float x[{s.count}];")
        self.put(depth + 1, f"for (int i = 0; i < {s.count}; ++i) x[i] = ({self.address(s.src)})[i];")
        self.put(depth + 1, f"for (int half = {s.count} / 2; half; half /= 2) {{")
        self.put(depth + 2, "for (int i = 0; i < half; ++i) x[i] += x[i + half];")
        self.put(depth + 1, "}")
        self.put(depth + 1, f"*({self.address(s.to)}) = x[0];")
        self.put(depth, "}")

    def do_shuffle(self, s: Shuffle, depth: int) -> None:
        self.put(depth, f"{s.d} = SHUFFLE({s.a}, {s.b}, lanes_t, {', '.join(map(str, s.pick))});")

    def do_repeat(self, s: Repeat, depth: int) -> None:
        self.put(depth, f"{s.d} = REPEAT({self.own.b_type}, {self.address(s.p)});")

    def do_reduce(self, s: Reduce, depth: int) -> None:
        acc = self.kernel.atom.acc
        old = f"({self.index(s.accumulate)} ? {self.at(s.p, acc)} : 0)"
        self.put(depth, "{")
        self.put(depth + 1, f"{BY_NAME[acc].c} sum;")
        for line in _reduction(self.kernel.atom, s.d):
            self.put(depth + 1, line)
        self.put(depth + 1, f"*({self.address(s.p)}) = {converted(f'{old} + sum', acc, self.points[s.p.name])};")
        self.put(depth, "}")

    def do_untilaligned(self, s: UntilAligned, depth: int) -> None:
        size = BY_NAME[self.points[s.p.name]].bytes
        self.put(depth, f"const long {s.name} = -(unsigned long)({self.address(s.p)}) % {s.bytes} / {size};")

    def do_mac(self, s: Mac, depth: int) -> None:
        acc = self.kernel.atom.acc
        self.put(depth, f"*({self.address(s.d)}) += {self.at(s.a, acc)} * {self.at(s.b, acc)};")

    def do_rowscale(self, s: RowScale, depth: int) -> None:
        self.put(depth, "{")
        self.put(depth + 1, "float most = 0;")
        self.put(depth + 1, f"for (int i = 0; i < {s.count}; ++i) {{")
        self.put(depth + 2, f"const float peak = ({self.address(s.peaks)})[i];")
        self.put(depth + 2, "if (peak > most || peak != peak) most = peak; /* a NaN stays */")
        self.put(depth + 1, "}")
        self.put(depth + 1, f"*({self.address(s.scale)}) = most / {s.top};")
        self.put(depth + 1, f"*({self.address(s.inverse)}) = most >= {LEAST_PEAK}f ? {s.top} / most : 0;")
        self.put(depth, "}")

    def do_prefetch(self, s: Prefetch, depth: int) -> None:
        how = f", {int(s.write)}, {3 if s.near else 2}" if s.write or not s.near else ""
        self.put(depth, f"__builtin_prefetch({self.address(s.p)}{how});")

    def do_call(self, s: Call, depth: int) -> None:
        args = ", ".join(self.argument(p, x) for p, x in zip(s.function.params, s.args, strict=True))
        self.put(depth, f"{s.function.name}({args});")

    def argument(self, p: Param, x: Index | Ptr) -> str:
        """The spelling of an argument; a pointer to another type is cast."""
        if isinstance(x, Index):
            return self.index(x)
        if self.points[x.name] == p.dtype:
            return self.address(x)
        return f"({'const ' if p.readonly else ''}{BY_NAME[p.dtype].c} *)({self.address(x)})"

    def do_parallel(self, s: Parallel, depth: int) -> None:
        values = ", ".join(["(long)g", *(self.index(x) for x in s.args)])
        self.put(depth, "{")
        self.put(depth + 1, f"const long task_ctx[] = {{{values}}};")
        self.put(depth + 1, f"g->parallel(g->pool, {s.function.name}, task_ctx, {self.index(s.tasks)}, workers);")
        self.put(depth, "}")


def _reduction(atom: Atom, d: str) -> list[str]:
    """Lines that compute the sum of the lanes in `sum`: of neighbours, then of neighbouring pairs, and so on."""
    if atom.reduce:
        return [atom.reduce.format(s="sum", d=d)]
    if atom.n == 1:
        return [f"sum = {d};"]
    lines, width = [], 1
    while width < atom.n:
        pick = ", ".join(str(i ^ width) for i in range(atom.n))
        lines.append(f"{d} += SHUFFLE({d}, {d}, lanes_t, {pick});")
        width *= 2
    return [*lines, f"sum = {d}[0];"]
