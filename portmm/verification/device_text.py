"""The text of a kernel of a device, in CUDA or OpenCL, compiled with symbols for floats: see `emitted_text`.

Owns `run`. Threads, barriers, shared memory and exchanges among threads are those of `device_symbols.h`; the text's
functions of the hardware are replaced by its, and what it says in C++ is as it is, but for the integers of registers.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from portmm.ir.interpreter import evaluate
from portmm.verification.emitted_text import (
    OPERATIONS,
    ORDER,
    arrays,
    checks,
    declared,
    expressions,
    header,
    written,
)
from portmm.verification.values import UncompiledError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portmm.ir.grid_kernel import Argument, GridKernel
    from portmm.spec.expr import Expr

BYTES = {"float": 4, "unsigned char": 1, "uchar": 1, "int": 4}
_SHARED = re.compile(
    r"(?:__shared__ __align__\(16\)|__local) (float|int|unsigned char|uchar) (\w+)\[(\d+)\]"
    r"(?: __attribute__\(\(aligned\((\d+)\)\)\))?;"
)
_REGISTERS = re.compile(r"^( *)int (\w+(?:, \w+)*);$", re.MULTILINE)
_HEADS = re.compile(r"\bint (bits_of_f32)\(|(f32_of_bits)\(int ")
_SHIFT = re.compile(r"\(int\)\(\(unsigned\)(\w+) << (\d+)\)")
_SELECT = re.compile(r"^( *\w+) = ([^?;]+) \? ([^?;]+) : ([^?;]+);$", re.MULTILINE)


def run(
    text: str, kernel: GridKernel, ints: Mapping[str, int], shapes: Mapping[str, int], results: Sequence[str]
) -> dict[str, list[Expr | None]]:
    """The expressions of the elements that a text writes: see `emitted_text.run`."""
    return expressions(program(text, kernel, ints, shapes, results), shapes, results)


def program(
    text: str, kernel: GridKernel, ints: Mapping[str, int], shapes: Mapping[str, int], results: Sequence[str]
) -> str:
    """The source of a program that launches a text on symbols and writes its expressions.

    Raises:
        UncompiledError: it has arguments that are no arrays of floats, or types that have no meaning on symbols.
    """
    body, shared = cpp(text)
    enum = f"enum Operation {{ {', '.join(x.upper() for x in OPERATIONS)} }};\nenum {{ SHARED = {shared} }};"
    parts = ["#include <ucontext.h>", enum, header(), _device(), 'extern "C" {', body, "}"]
    return "\n".join([*parts, _main(text, kernel, ints, shapes, results)])


@lru_cache(maxsize=1)
def _device() -> str:
    return Path(__file__).with_name("device_symbols.h").read_text(encoding="utf-8")


def cpp(text: str) -> tuple[str, int]:
    """A text in C++, and the bytes of its shared memory."""
    if "wgmma" in text or "mma_" in text or "TensorMap" in text:
        raise UncompiledError("products of matrix units have no meaning on symbols")
    text = text.replace("__global__", "").replace("__global ", "").replace('extern "C" ', "")
    end = 0

    def placed(x: re.Match[str]) -> str:
        nonlocal end
        align = int(x[4] or 16)
        at = -(-end // align) * align
        end = at + BYTES[x[1]] * int(x[3])
        return f"{x[1]} *const {x[2]} = ({x[1]} *)(shared_area + {at});"

    text = _SHARED.sub(placed, text)
    text = _REGISTERS.sub(r"\1I \2;", text)
    text = _HEADS.sub(lambda x: f"I {x[1]}(" if x[1] else f"{x[2]}(I ", text)
    text = _SHIFT.sub(r"shifted(\1, \2)", text)
    return _SELECT.sub(r"\1 = choose(\2, \3, \4);", text), end


def _main(
    text: str, kernel: GridKernel, ints: Mapping[str, int], shapes: Mapping[str, int], results: Sequence[str]
) -> str:
    """The program's main function: all threads in one order, and in the other, with the same results."""
    buffers = "__kernel" in text

    def passed(x: Argument) -> str:
        if x.kind == "pointer" and x.dtype == "f32" and x.name in shapes:
            return f"array_{x.name} + GUARD" + ", 0" * buffers
        if x.kind not in ("int", "long") or x.name not in ints:
            raise UncompiledError(f"{x.name}, an argument of {x.dtype or x.kind}, is no array of floats")
        return str(ints[x.name])

    blocks, slices = (evaluate(x, ints) for x in kernel.grid)
    launch = f"launch(call, {blocks}, {slices}, {kernel.threads},"
    lines = [
        *declared(shapes),
        f"static void call() {{ {kernel.name}({', '.join(map(passed, kernel.arguments))}); }}",
        "int main() {",
    ]
    lines += ["  real(0);", *arrays(shapes, results), f"  {launch} false);"]
    for x in results:
        lines.append(f"  static H first_{x}[{shapes[x]} + 1];\n  for (int i = 0; i < {shapes[x]}; ++i)")
        lines.append(f"    first_{x}[i] = array_{x}[GUARD + i].h, array_{x}[GUARD + i].h = POISON;")
    lines.append(f"  {launch} true);")
    for x in results:
        lines.append(f"  for (int i = 0; i < {shapes[x]}; ++i)")
        lines.append(f"    if (first_{x}[i] != array_{x}[GUARD + i].h) return {ORDER};")
    return "\n".join([*lines, *checks(shapes, shapes, results), *written(shapes, results)])
