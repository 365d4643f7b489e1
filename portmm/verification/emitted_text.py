"""The text of a kernel, compiled with another element type: numbers of expressions in the place of floats.

Owns `run`, which gives the expression of each element that a text writes. The text is that of `codegen.c_kernel`, to
the byte, but for three spellings that C++ lacks: types of vectors, their zeros, and instructions by name. So what the
printer writes is judged too: declarations, addresses, the order of statements and the spelling of operations.
"""

from __future__ import annotations

import math
import re
import struct
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from portmm.build import child_process
from portmm.build.compiler import find_compiler
from portmm.errors import BuildError
from portmm.ir.interpreter import evaluate
from portmm.ir.nodes import FIELDS, OPERANDS, SWAPPED, Kernel
from portmm.spec.problem import AXES
from portmm.verification.node_table import OPERATIONS, replayed
from portmm.verification.values import LateError, UncompiledError, UnsupportedError

if TYPE_CHECKING:
    from portmm.spec.expr import Expr

LIMIT = 60.0
"""Seconds of a compiler, and of a run."""
DEPENDS, OUTSIDE, STUCK, ORDER, FULL = 3, 4, 5, 6, 7
"""Status of a program whose masks depend on data, as `symbols.h` has it, or that writes outside of its results; or
whose threads do not all reach a barrier, as `device_symbols.h` has it, or have other results in another order; or that
has more different elements of 16 bits than these have numbers."""
NARROW = ("bf16", "f16")
"""Types whose elements are numbers of 16 bits."""
GUARD = 64
"""Elements before an array that hold nothing; behind it is a page that cannot be touched."""
LINE = 64
"""Bytes of a line: of an array without elements of its own, as scratch, the first one begins there."""
_FLAGS = (
    "-x", "c++", "-std=c++17", "-O0", "-w", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-fwrapv",
    "-fno-threadsafe-statics",
    "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error",  # of arrays of registers
)  # fmt: skip
_TYPES = re.compile(
    r"typedef (const )?(\w+(?: \w+)?) (\w+) "
    r"__attribute__\(\(vector_size\((\d+|sizeof\(\w+\))\)[^)]*(?:\(\d+\)[^)]*)?\)\);"
)
_ELEMENTS = {"float": "F", "int": "I", "unsigned": "I"}
_ZERO = re.compile(r"\((\w+)\)\{0\}")
_SHUFFLE = re.compile(r"#define SHUFFLE\(.*")
_REPEAT = re.compile(r"#define REPEAT\(.*")
_INSTRUCTIONS = {
    ("vmovups %1, %0%{%2%}%{z%}", "=v"): "load_lanes", ("vmovups %1, %0%{%2%}", "+m"): "store_lanes",
    ("vmaskmovps %1, %2, %0", "=x"): "load_lanes", ("vmaskmovps %1, %2, %0", "+m"): "store_lanes",
    ("vsqrtps %1, %0", "=v"): "root", ("vsqrtps %1, %0", "=x"): "root",
    ("vmaxps %2, %1, %0", "=v"): "greater", ("vmaxps %2, %1, %0", "=x"): "greater",
    ("vpmovzxwd %1, %0", "=v"): "widen", ("vpmovzxwd %1, %0", "=x"): "widen",
    ("vpmovzxwd %1, %0%{%2%}%{z%}", "=v"): "widen_some", ("vpmovdw %1, %0%{%2%}", "+m"): "narrow_some",
    ("vdpbf16ps %2, %1, %0", "+v"): "dot_pairs", ("vpermw %1, %2, %0", "=v"): "permute_pairs",
    ("vcvtne2ps2bf16 %2, %1, %0", "=v"): "join_pairs", ("vcvtneps2bf16 %1, %0", "=v"): "narrow",
    ("vmovdqu16 %1, %0%{%2%}", "+m"): "store_halves",
}  # fmt: skip
"""Instruction and constraint of its result -> its meaning on lanes, of the result and then the operands."""
_ROUNDED = """\
union { float f; unsigned u; } v = {x};
  if ((v.u & 0x7fffffff) > 0x7f800000) return (unsigned short)(v.u >> 16 | 0x40); /* NaN stays one */
  return (unsigned short)((v.u + 0x7fff + (v.u >> 16 & 1)) >> 16);"""
"""One element rounded to bfloat16: every bit of it, as another text would round in another way."""
_NARROW = tuple((re.compile(x), y) for x, y in (
    (r"union \{ unsigned u; float f; \} v = \{\(unsigned\)(.+?) << 16\};", r"struct { F f; } v = {widened(\1)};"),
    (re.escape(_ROUNDED), "return narrowed(x);"),
    (r"__builtin_convertvector\((\w+ >> 16), (\w+)\)", r"low_halves<\2>(\1)"),
    (r"__builtin_ia32_movmskps256\(", "signs("),
    (r"__builtin_memcpy\(", "moved("),
    (r"\bint \*", "Word *"),
    (r"\bint (\w+\[\d+\] __attribute__)", r"Word \1"),
))  # fmt: skip
"""Spelling -> replacement in texts with elements of 16 bits: operations on bits, and on words, or pairs of elements."""
_OPERAND = re.compile(r'\s*"([^"]*)"\s*\(')


class Arrays(NamedTuple):
    """Arrays of a call.

    Attributes:
        shapes: number of elements of each, which are numbered in this order.
        results: those that are written: an element that is not stays None.
        narrow: those with elements of 16 bits.
        scratch: floats of an array `work` of a device, which holds nothing.
        literals: of the record.
    """

    shapes: Mapping[str, int]
    results: Sequence[str]
    narrow: frozenset[str] = frozenset()
    scratch: int = 0
    literals: frozenset[float] = frozenset()


def run(
    text: str, kernel: Kernel, calls: Sequence[tuple[Mapping[str, int], Arrays]], until: float = math.inf
) -> list[dict[str, list[Expr | None]]]:
    """The expressions of the elements that a text writes, in each of some calls.

    Args:
        text: of the kernel.
        kernel: whose name, fields and scratch it has.
        calls: the caller's integer fields, and the arrays, of each.
        until: by the monotonic clock, what has not ended then is given up.

    Raises:
        LateError: it has not ended.
        UncompiledError: it has vectors or instructions that have no meaning on symbols, or no compiler has C++.
        UnsupportedError: its masks depend on data.
        BuildError: it ends with an error.
    """
    outputs = _outputs(program(text, kernel, calls), len(calls), until)
    return [_read(x, arrays) for x, (_, arrays) in zip(outputs, calls, strict=True)]


def expressions(source: str, arrays: Arrays) -> dict[str, list[Expr | None]]:
    """The expressions that a program writes: see `run`."""
    return _read(_outputs(source, 1, math.inf)[0], arrays)


def _read(data: bytes, arrays: Arrays) -> dict[str, list[Expr | None]]:
    (count,) = struct.unpack_from("<I", data)
    nodes = np.frombuffer(data, "<u4", 4 * count, 4).reshape(-1, 4)
    words = np.frombuffer(data, "<u4", -1, 4 + 16 * count).tolist()
    known = replayed(nodes, words, arrays.literals)
    each = iter(words)
    return {x: [known.get(next(each)) for _ in range(arrays.shapes[x])] for x in arrays.results}


def program(text: str, kernel: Kernel, calls: Sequence[tuple[Mapping[str, int], Arrays]]) -> str:
    """The source of a program that calls a text on symbols and writes its expressions.

    Of several calls a run makes one, of the number of its arguments.
    """
    parts = [operations(), header("symbols"), header("half_symbols"), 'extern "C" {', cpp(text), "}"]
    parts += [_call(i, kernel, *x) for i, x in enumerate(calls)]
    cases = (f"    case {i}: return call_{i}::run();" for i in range(len(calls)))
    return "\n".join([*parts, "int main(int count, char **) {\n  switch (count - 1) {", *cases, "  }\n}\n"])


def operations() -> str:
    """The numbers of operations."""
    return f"enum Operation {{ {', '.join(x.upper() for x in OPERATIONS)} }};"


@lru_cache(maxsize=4)
def header(name: str) -> str:
    """The text of a header beside this module."""
    return Path(__file__).with_name(f"{name}.h").read_text(encoding="utf-8")


def cpp(text: str) -> str:
    """A text with classes in the place of vectors, and functions in the place of instructions."""
    if "#include" in text:
        raise UncompiledError("a text with headers has vectors of its own")
    sizes: dict[str, int] = {}

    def declared(x: re.Match[str]) -> str:
        element_type, name, size = x[2], x[3], x[4]
        if element_type not in _ELEMENTS:
            return x[0] if element_type == "unsigned short" else ""
        own = size[7:-1]
        sizes[name] = sizes[own] if own in sizes else int(size) // 4
        if narrow and element_type == "int" and name.endswith("_u"):
            return f"typedef Words<{sizes[name]}> {name};"
        return f"typedef Vec<{_ELEMENTS[element_type]}, {sizes[name]}> {name};"

    narrow = "short" in text
    if narrow:
        for pattern, meaning in _NARROW:
            text = pattern.sub(meaning, text)
    text = _SHUFFLE.sub("#define SHUFFLE(x, y, ints, ...) shuffled(x, y, __VA_ARGS__)", text)
    text = _REPEAT.sub("#define REPEAT(vector, p) repeated<vector>(p)", text)
    text = text.replace("__attribute__((always_inline))", "")
    text = _TYPES.sub(declared, text)
    text = _ZERO.sub(lambda x: f"{x[1]}::all(0)" if x[1] in sizes else x[0], text)
    parts, at = [], 0
    while (begin := text.find("__asm__(", at)) >= 0:
        end = _closing(text, begin + 7)
        parts += [text[at:begin], _instruction(text[begin + 8 : end])]
        at = end + 1
    return "".join([*parts, text[at:]])


def _closing(text: str, begin: int) -> int:
    """The index of the bracket that closes the one at an index."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    raise UncompiledError("brackets do not match")


def _instruction(text: str) -> str:
    """The call that is the meaning of an instruction."""
    name, at, operands = text.split('"')[1], text.index('"', text.index('"') + 1) + 1, []
    while (start := text.find('"', at)) >= 0:
        match = _OPERAND.match(text, start)
        if match is None:
            raise UncompiledError(f"an instruction {name} without operands")
        end = _closing(text, match.end() - 1)
        operands.append((match[1], text[match.end() : end]))
        at = end + 1
    if not name:
        return "((void)0)"
    function = _INSTRUCTIONS.get((name, operands[0][0]))
    if function is None:
        raise UncompiledError(f"{name} has no meaning on symbols")
    return f"{function}({', '.join(x for _, x in operands)})"


def _call(number: int, kernel: Kernel, ints: Mapping[str, int], arrays: Arrays) -> str:
    """A call, as a function `run` in a namespace of its own."""
    source = SWAPPED if kernel.swap else {}
    extra = [f"x{i}" for i in range(len(kernel.operands))]
    fields = {x: ints[source.get(x, x)] for x in FIELDS} | dict(kernel.constants)
    strides = {f"{x}_{axis}": ints.get(f"{x}_{axis}", 0) for x in extra for axis in AXES}
    work = evaluate(kernel.workspace, fields | strides)
    sizes = {name: arrays.shapes.get(name, 0) for name in (*OPERANDS, *extra)} | {"work": work}
    lines = [f"namespace call_{number} {{", *declared(sizes, arrays)]
    lines.append("static void each(void *, void (*body)(const long *, long, long), const long *ctx, long n, long k) {")
    lines.append("  for (long i = 0; i < n; ++i) body(ctx, i, i % k);\n}\nstatic int run() {")
    lines += filled(arrays)
    lines.append(f"  static portmm_operand operands[{len(extra) + 1}];\n  static portmm_args g;")
    for i, x in enumerate(extra):
        lines.append(f"  operands[{i}].p = array_{x};")
        lines += [f"  operands[{i}].{axis} = {strides[f'{x}_{axis}']};" for axis in AXES]
    lines += [f"  g.{x} = {ints[x]};" for x in FIELDS]
    lines += [f"  g.{x} = {'(char *)' if x == 'work' else ''}array_{x};" for x in OPERANDS]
    lines.append(f"  g.parallel = each;\n  g.operands = operands;\n  {kernel.name}(&g);")
    return "\n".join([*lines, *checks(sizes, arrays), *written(arrays), "}"])


def declared(sizes: Mapping[str, int], arrays: Arrays) -> list[str]:
    """Declarations of arrays, which hold nothing; those of elements end at a page that cannot be touched."""
    types = {x: "half_t" if x in arrays.narrow else "F" for x in sizes}
    lines = [f"enum {{ GUARD = {GUARD} }};"]
    for x, n in sizes.items():
        bytes_of = f"{n} * sizeof({types[x]})"
        whole = bytes_of if x in arrays.shapes else f"({bytes_of} + {LINE - 1}) / {LINE} * {LINE}"
        lines.append(f"static {types[x]} *const array_{x} = ({types[x]} *)placed({whole});")
    return lines


def filled(arrays: Arrays) -> list[str]:
    """Statements that fill operands that are read; zero is the first of all numbers."""
    lines = ["  narrowed(F::of(real(0)));"]
    for i, (x, n) in enumerate(arrays.shapes.items()):
        if x not in arrays.results:
            value = f"F::of(make(ELEMENT, {i}, i))"
            value = f"narrowed({value})" if x in arrays.narrow else value
            lines.append(f"  for (int i = 0; i < {n}; ++i) array_{x}[i] = {value};")
    return lines


def number_of(x: str, arrays: Arrays, name: str = "array") -> str:
    """The number of an element of an array, of which the index follows."""
    return f"widened({name}_{x}[%s]).h" if x in arrays.narrow else f"{name}_{x}[%s].h"


def checks(sizes: Mapping[str, int], arrays: Arrays) -> list[str]:
    """Statements that end a program that wrote outside of its results."""
    lines = []
    for name in sizes:
        lines.append("  for (int i = 1; i <= GUARD; ++i)")
        lines.append(f"    if ({number_of(name, arrays) % '-i'} != POISON) return {OUTSIDE};")
    for i, (name, n) in enumerate(arrays.shapes.items()):
        if name not in arrays.results:
            lines.append(f"  for (int i = 0; i < {n}; ++i)")
            lines.append(f"    if ({number_of(name, arrays) % 'i'} != make(ELEMENT, {i}, i)) return {OUTSIDE};")
    return lines


def written(arrays: Arrays) -> list[str]:
    """Statements that write the table and the results, and the end of a program."""
    lines = ["  fwrite(&count, 4, 1, stdout);\n  fwrite(nodes, 16, count, stdout);"]
    for x in arrays.results:
        lines.append(f"  for (int i = 0; i < {arrays.shapes[x]}; ++i) {{")
        number = number_of(x, arrays) % "i"
        lines.append(f"    const H number = {number};\n    fwrite(&number, 4, 1, stdout);\n  }}")
    return [*lines, "  fflush(stdout);\n  return 0;\n}\n"]


@lru_cache(maxsize=4)
def _outputs(source: str, calls: int, until: float) -> list[bytes]:
    """The output of each call of a program, which is the same each time.

    Raises:
        LateError: neither its compiler nor it has ended at a time.
        UncompiledError: there is no compiler of C++, or it refuses the program.
        UnsupportedError: its masks depend on data.
        BuildError: the program fails.
    """
    import tempfile

    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="portmm-text-") as folder:
        path = Path(folder, "text.cpp")
        path.write_text(source, encoding="utf-8")
        words = [*compiler.argv, *_FLAGS, str(path), "-o", str(path.with_suffix(""))]
        done = child_process.run(words, _left(until), folder=folder)
        if done.status is None:
            _late(until)
            raise UncompiledError(f"the compiler takes longer than {LIMIT:g} s with symbols for floats")
        if done.status:
            message = done.output.strip().splitlines()
            if "cc1plus" in done.output and "error:" in done.output:
                raise UncompiledError("the compiler has no C++: install g++, or name clang by CC")
            error = next((x for x in message if "error" in x), "".join(message[-1:]))
            raise UncompiledError(f"the text does not compile with symbols for floats: {error}")
        return [_ran([str(path.with_suffix("")), *["-"] * i], folder, until) for i in range(calls)]


def _ran(words: list[str], folder: str, until: float) -> bytes:
    """The output of a call: see `_outputs`."""
    import subprocess

    try:
        ran = subprocess.run(words, capture_output=True, timeout=_left(until), check=False, cwd=folder)
    except subprocess.TimeoutExpired:
        _late(until)
        raise BuildError(f"the text does not end within {LIMIT:g} s on symbols") from None
    if ran.returncode == DEPENDS:
        raise UnsupportedError("a mask of lanes depends on data")
    if ran.returncode == FULL:
        raise UnsupportedError("there are more different elements of 16 bits than these have numbers")
    if ran.returncode == OUTSIDE:
        raise BuildError("the text writes outside of its results")
    if ran.returncode in (STUCK, ORDER):
        what = "some threads do not reach a barrier" if ran.returncode == STUCK else "results depend on their order"
        raise BuildError(f"threads of the text: {what}")
    if ran.returncode:
        reason = "it reads outside of its arrays, or traps"
        raise BuildError(f"the text ends with status {ran.returncode} on symbols: {reason}")
    return ran.stdout


def _left(until: float) -> float:
    """Seconds of a process that ends at a time."""
    return max(0.0, min(LIMIT, until - time.monotonic()))


def _late(until: float) -> None:
    if time.monotonic() >= until:
        raise LateError("the text was not checked in time")
