"""The text of a kernel of a device, in CUDA or OpenCL, compiled with symbols for floats: see `emitted_text`.

Owns `run`. Threads, barriers, shared memory and exchanges among threads are those of `device_symbols.h`; the text's
functions of the hardware are replaced by its, and what it says in C++ is as it is, but for the integers of registers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from portmm.ir.interpreter import evaluate
from portmm.verification.emitted_text import (
    NARROW,
    ORDER,
    Arrays,
    checks,
    declared,
    expressions,
    filled,
    header,
    number_of,
    operations,
    written,
)
from portmm.verification.values import UncompiledError

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import Argument, GridKernel
    from portmm.spec.expr import Expr

BYTES = {"float": 4, "unsigned short": 2, "ushort": 2, "unsigned char": 1, "uchar": 1, "int": 4}
_SHARED = re.compile(
    r"(?:__shared__ __align__\(16\)|__local) (float|int|unsigned short|ushort|unsigned char|uchar) (\w+)\[(\d+)\]"
    r"(?: __attribute__\(\(aligned\((\d+)\)\)\))?;"
)
_REGISTERS = re.compile(r"^( *)int (\w+(?:, \w+)*);$", re.MULTILINE)
_REGISTER_ARRAYS = re.compile(
    r"^( +)(?:__align__\(\d+\) )?float (\w+)\[(\d+)\](?: __attribute__\(\(aligned\(\d+\)\)\))?;$", re.MULTILINE
)
"""Arrays of registers."""
_HEADS = re.compile(r"\bint (bits_of_f32)\(|(f32_of_bits)\(int ")
_SHIFT = re.compile(r"\(int\)\(\(unsigned\)(\w+) << (\d+)\)")
_WRAPPED = re.compile(r"\(int\)\(\(unsigned\)(\w+) ([+-]) \(unsigned\)(\w+)\)")
_NEAREST = (
    r"const unsigned u = (?:__float_)?as_uint\(x\);\n  return \(unsigned short\)"
    r"\(\(x == x \? u \+ 0x7fff \+ \(u >> 16 & 1\) : u \| 0x400000\) >> 16\);"
)
_ROUNDING = (
    (re.compile(r"(?:__uint_)?as_float\(\(unsigned\)x << 16\)"), "widened(x)"),
    (re.compile(_NEAREST), "return narrowed(x);"),
)
"""Bits of a float, and the nearest bfloat16 of one -> the meaning."""
_SELECT = re.compile(r"^( *\w+) = ([^?;]+) \? ([^?;]+) : ([^?;]+);$", re.MULTILINE)


def run(
    kernels: Sequence[tuple[GridKernel, str]], ints: Mapping[str, int], arrays: Arrays
) -> dict[str, list[Expr | None]]:
    """The expressions of the elements that the texts of kernels write, one after the other: see `emitted_text.run`."""
    return expressions(program(kernels, ints, arrays), arrays)


def program(kernels: Sequence[tuple[GridKernel, str]], ints: Mapping[str, int], arrays: Arrays) -> str:
    """The source of a program that launches texts on symbols and writes their expressions.

    Raises:
        UncompiledError: one has arguments that are no arrays, or types that have no meaning on symbols.
    """
    parts, shared = [], 0
    for i, (kernel, text) in enumerate(kernels):
        body, end = cpp(text)
        shared = max(shared, end, kernel.shared_bytes)
        parts.append(f"namespace kernel_{i} {{\n{body}\n}}")
    begin = ["#include <ucontext.h>", operations(), f"enum {{ SHARED = {shared} }};"]
    begin += map(header, ("symbols", "half_symbols", "device_symbols", "matrix_symbols"))
    return "\n".join([*begin, *parts, _main(kernels, ints, arrays)])


def cpp(text: str) -> tuple[str, int]:
    """A text in C++, and the bytes of its shared memory where the hardware loads fragments from it by address."""
    if "wgmma" in text or "TensorMap" in text:
        raise UncompiledError("products of warpgroups have no meaning on symbols")
    for pattern, meaning in _ROUNDING:
        text = pattern.sub(meaning, text)
    text = text.replace("__global__", "").replace("__global ", "").replace('extern "C" ', "")
    end = 0

    def placed(x: re.Match[str]) -> str:
        nonlocal end
        if "ldmatrix" not in text:
            return f"static {x[1]} *const {x[2]} = ({x[1]} *)shared_array({BYTES[x[1]] * int(x[3])});"
        align = int(x[4] or 16)
        at = -(-end // align) * align
        end = at + BYTES[x[1]] * int(x[3])
        return f"{x[1]} *const {x[2]} = ({x[1]} *)(shared_area + {at});"

    text = _SHARED.sub(placed, text)
    text = _REGISTER_ARRAYS.sub(r"\1Held<\3> \2;", text)
    text = _REGISTERS.sub(r"\1I \2;", text)
    text = _HEADS.sub(lambda x: f"I {x[1]}(" if x[1] else f"{x[2]}(I ", text)
    text = _SHIFT.sub(r"shifted(\1, \2)", text)
    text = _WRAPPED.sub(r"(\1 \2 \3)", text)
    return _SELECT.sub(r"\1 = choose(\2, \3, \4);", text), end


def _main(kernels: Sequence[tuple[GridKernel, str]], ints: Mapping[str, int], arrays: Arrays) -> str:
    """The program's main function: all threads in one order, and in the other, with the same results."""
    sizes = dict(arrays.shapes) | ({"work": arrays.scratch} if arrays.scratch else {})
    lines = declared(sizes, arrays)
    types = {x: "half_t" if x in arrays.narrow else "F" for x in arrays.results}
    lines += [f"static {types[x]} first_{x}[{sizes[x]} + 1];" for x in arrays.results]
    launches: dict[bool, list[str]] = {False: [], True: []}
    for i, (kernel, text) in enumerate(kernels):
        values = ", ".join(_passed(x, ints, (sizes, arrays), buffers="__kernel" in text) for x in kernel.arguments)
        lines.append(f"static void call_{i}() {{ kernel_{i}::{kernel.name}({values}); }}")
        blocks, slices = (evaluate(x, ints) for x in kernel.grid)
        for backwards, calls in launches.items():
            calls.append(f"  launch(call_{i}, {blocks}, {slices}, {kernel.threads}, {str(backwards).lower()});")
    lines += ["int main() {", *filled(arrays), *launches[False]]
    if arrays.scratch:
        lines.append(f"  for (int i = 0; i < {arrays.scratch}; ++i) array_work[i] = F();")
    for x in arrays.results:
        none = "UNSET" if x in arrays.narrow else "F()"
        lines.append(f"  for (int i = 0; i < {sizes[x]}; ++i)")
        lines.append(f"    first_{x}[i] = array_{x}[i], array_{x}[i] = {none};")
    lines += launches[True]
    for x in arrays.results:
        lines.append(f"  for (int i = 0; i < {sizes[x]}; ++i)")
        lines.append(f"    if ({number_of(x, arrays) % 'i'} != {number_of(x, arrays, 'first') % 'i'}) return {ORDER};")
    return "\n".join([*lines, *checks(sizes, arrays), *written(arrays)])


def _passed(x: Argument, ints: Mapping[str, int], of: tuple[Mapping[str, int], Arrays], *, buffers: bool) -> str:
    """The value of an argument.

    Raises:
        UncompiledError: it is no array of these types, and no integer that a caller has.
    """
    sizes, arrays = of
    dtype = NARROW if x.name in arrays.narrow else ("f32",)
    if x.kind == "pointer" and x.dtype in dtype and x.name in sizes:
        return f"array_{x.name}" + ", 0" * buffers
    if x.kind not in ("int", "long") or x.name not in ints:
        raise UncompiledError(f"{x.name}, an argument of {x.dtype or x.kind}, is no array of floats")
    return str(ints[x.name])
