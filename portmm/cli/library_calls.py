"""Functions of a program's own for the library for C: lines that name them, and their programs on machines.

Owns the lines of `portmm bundle --functions`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.cli.functions import function_named
from portmm.dispatch import config
from portmm.errors import BundleError, PortmmError, ScheduleError
from portmm.fusion import compilation
from portmm.fusion.fuse import FusedFunction, fuse
from portmm.fusion.plan_library import LibraryBuilder
from portmm.fusion.tracing import traced
from portmm.ops.c_programs import C_TYPES, Function, Parameter
from portmm.ops.recorded_kernels import launches_of
from portmm.trace.placeholders import ByValueError

if TYPE_CHECKING:
    from portmm.target.target import Target

EXAMPLE = "mlp layers.py:mlp 64x768 768:bf16 number"
"""A line of a file."""
RESERVED = re.compile(
    "matmul.*|pack.*|attention|machine|get_num_threads|set_num_threads|pool_threads|set_scratch|scratch|start|open|run"
    "|run_bound|bind|unbind|kernel_.*"
)
"""Names that the library has itself."""


class Line(NamedTuple):
    """A function to export.

    Attributes:
        name: in C.
        source: FILE.py:NAME, MODULE:NAME, or a model's file.
        arguments: words for its arguments, or for the sizes of a model's axes.
        where: file and line.
    """

    name: str
    source: str
    arguments: tuple[str, ...]
    where: str


def lines_of(text: str, where: str) -> list[Line]:
    """The functions that a file names: `NAME FILE.py:FUNCTION ARGUMENT ...` or `NAME MODEL.onnx AXIS=SIZE ...`.

    Raises:
        BundleError: a line names none.
    """
    lines: dict[str, Line] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words, at = line.partition("#")[0].split(), f"{where}, line {number}"
        if not words:
            continue
        name = words[0]
        why = ""
        if len(words) < 2:
            why = "there is no function"
        elif not re.fullmatch("[a-z][a-z0-9_]*", name) or RESERVED.fullmatch(name):
            why = f"{name!r} cannot be a name: write one of lower case that the library does not have itself"
        elif name in lines:
            why = f"{name!r} was there before"
        if why:
            raise BundleError(f"{at}: {line.strip()!r}: {why}; write as: {EXAMPLE}")
        lines[name] = Line(name, words[1], tuple(words[2:]), at)
    return list(lines.values())


def _argument(word: str, where: str) -> Any:
    """An argument like the one that a word describes: an array of ones, or a number."""
    if word == "number":
        return 1.0
    extents, _, dtype = word.partition(":")
    sizes = extents.split("x")
    if not all(x.isdecimal() and int(x) for x in sizes) or (dtype or "f32") not in C_TYPES:
        raise BundleError(
            f"{where}: {word!r} is no argument; write as 64x768, 768:bf16 or number; types are {', '.join(C_TYPES)}"
        )
    try:
        return np.ones(tuple(map(int, sizes)), numpy_arrays.numpy_of(dtype or "f32"))
    except (TypeError, ValueError, MemoryError) as error:
        raise BundleError(f"{where}: {word!r} is no argument: {error}") from error


def functions_of(lines: Sequence[Line], machines: Sequence[Target], counts: Sequence[int]) -> list[Function]:
    """The functions with their programs on each machine.

    Raises:
        BundleError: one is not kernels alone, or a machine has none of these.
    """
    every = {x.name: Function(x.name, (), (), {}, {}) for x in lines}
    for target in machines:
        for threads in counts:
            for x in lines:
                with launches_of(target), config.config(threads=threads):
                    every[x.name] = _with_program(every[x.name], x, (target.name, threads))
    return list(every.values())


def kernels_of(functions: Sequence[Function], machines: Sequence[Target]) -> list[tuple[Any, str]]:
    """The kernels of functions, with their architectures."""
    archs = {x.name: x.arch for x in machines}
    every = [(p, archs[name]) for f in functions for (name, _), p in f.programs.items()]
    return [(step.kernel, arch) for p, arch in every for step in p.steps]


def _with_program(known: Function, x: Line, key: tuple[str, int]) -> Function:
    """A function with one more program."""
    programs: list[Function] = []
    try:
        (_model if x.source.endswith(".onnx") else _function)(x, programs)
    except (PortmmError, TypeError, ValueError) as error:
        raise BundleError(f"{x.where}: {x.name} is no function of kernels alone for {key[0]}: {error}") from error
    if len(programs) != 1:
        raise BundleError(f"{x.where}: {x.name} is {len(programs)} programs; the library has functions of one")
    (function,) = programs
    every = known.programs | {key: function.programs["", 0]}
    return function._replace(programs=every, constants=known.constants | function.constants)


def _recorded(name: str, names: Sequence[str], leaves: list[Any], programs: list[Function]) -> Any:
    """The builder of `compilation.built_by` for a function with these arguments."""

    def done(program: Any, writer: Any, places: Any) -> None:
        arguments = [
            Parameter(n, "f32" if type(v) is float else _dtype(v.dtype), None if type(v) is float else v.shape)
            for n, v in zip(names, leaves, strict=True)
        ]
        results = [Parameter(f"result{i}", _dtype(y.like.dtype), y.like.shape) for i, y in enumerate(places)]
        programs.append(Function(name, tuple(arguments), tuple(results), {("", 0): program}, writer.constants))

    return compilation.built_by(partial(LibraryBuilder, arguments=len(leaves), done=done))


def _dtype(dtype: Any) -> str:
    name = "u8" if dtype.kind == "b" else numpy_arrays.name_of(dtype)
    if name not in C_TYPES:
        raise ScheduleError(f"an argument or a result has elements of {dtype}, which kernels do not have")
    return name


def _function(x: Line, programs: list[Function]) -> None:
    """Record a function of Python's."""
    function = function_named(x.source)
    fused = function if isinstance(function, FusedFunction) else fuse(function)
    arguments = tuple(_argument(word, x.where) for word in x.arguments)
    _, leaves, kept = fused.kind(arguments, {})
    code = getattr(fused.__wrapped__, "__code__", None)
    names = _names(getattr(code, "co_varnames", ())[: len(arguments)], len(arguments))
    with _recorded(x.name, names, leaves, programs):
        try:
            traced(fused, arguments, {}, kept, by_value=False)
        except ByValueError:
            traced(fused, arguments, {}, kept, by_value=True)


def _names(names: Sequence[str], count: int) -> list[str]:
    """Names of parameters in C."""
    words = [re.sub(r"\W", "_", x, flags=re.ASCII) for x in names]
    return [f"{y}_{i}" if f" {y} " in _KEYWORDS or words.index(y) != i else y for i, y in enumerate(words)] + [
        f"argument{i}" for i in range(len(words), count)
    ]


_KEYWORDS = (
    " auto break case char const continue default do double else enum extern float for goto if inline int long register"
    " restrict return short signed sizeof static struct switch typedef union unsigned void volatile while "
)


def _model(x: Line, programs: list[Function]) -> None:
    """Record a model in ONNX's format."""
    from portmm.cli import model_calls

    sizes = model_calls.sizes_of(" ".join(x.arguments))
    for values, run in model_calls.calls_of_onnx(Path(x.source), sizes):
        with _recorded(x.name, _names(list(values), len(values)), list(values.values()), programs):
            run()
