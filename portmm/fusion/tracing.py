"""Tracing of fused functions: the program for one kind of arguments.

Owns `Program`, and `program_of`, which traces a function with the arguments of a call and compiles what was recorded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.dispatch import cpu_race, program_database
from portmm.fusion.captures import placeholder
from portmm.fusion.compilation import compiled_program
from portmm.fusion.group_norm import needs_constants
from portmm.fusion.program import Explained, Kernel
from portmm.fusion.recorder import Converted, WholeArrays
from portmm.trace.captures import Captures
from portmm.trace.placeholders import ByValueError, Placeholder, rebuilt
from portmm.trace.recorder import run
from portmm.util.records import dataclass, replace

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node
    from portmm.trace.guards import Guards


@dataclass(eq=False, slots=True)
class Program:
    """A compiled program for one kind of arguments.

    Attributes:
        run: the function that runs it, of the arrays of a call.
        guards: on captured values.
        kept: objects that the cache key names by identity.
        explained: the result of `explain`.
        cacheable: later calls may run it too.
        simple: its inputs are the arguments, without captured values.
        by_value: never, see `guards.Way`.
    """

    run: Callable[[Any], Any]
    guards: Guards
    kept: list[Any]
    explained: Explained
    cacheable: bool
    simple: bool = False
    by_value: bool = False


def program_of(f: Any, args: Any, options: Any, kept: list[Any], *, by_value: bool) -> tuple[Program, list[Any], bool]:
    """The program of a call.

    Args:
        f: the `FusedFunction`.
        args: positional arguments.
        options: arguments by name.
        kept: objects that the cache key names by identity.
        by_value: numbers are constants of the trace.

    Returns:
        The program, the arrays and numbers of the call, and whether numbers are constants after all.
    """
    began = time.monotonic()  # a budget is for the program as it is, too
    try:
        graph, program = traced(f, args, options, kept, by_value=by_value)
    except ByValueError:
        if by_value:
            raise
        by_value = True
        graph, program = traced(f, args, options, kept, by_value=True)
    if program.cacheable and (f.search or program_database.present()):
        _superoptimize(f, program, args, options, began, by_value=by_value)
    leaves, graph.leaves, graph.values = graph.leaves, [], {}  # a cached program must not keep arrays alive
    return program, leaves, by_value


def trace(
    function: Callable[..., Any], args: Any, options: Any, *, strict: bool, by_value: bool
) -> tuple[Graph, Any, Captures]:
    """Run the function on traced values, which record its operations."""
    graph = WholeArrays(strict=strict)
    captures = Captures(graph, by_value=by_value, fresh=False)
    names = getattr(getattr(function, "__code__", None), "co_varnames", ())
    names = (*names[: len(args)], *(f"argument {i}" for i in range(len(names), len(args))))
    positional = [placeholder(captures, x, name) for x, name in zip(args, names, strict=True)]
    named = {n: placeholder(captures, x, n) for n, x in options.items()}
    bound = captures.outermost(function)
    result = run(lambda: bound(*positional, **named))
    return graph, rebuilt(result, lambda x: graph.copied(x) if type(x) is Converted else x), captures


def traced(f: Any, args: Any, options: Any, kept: list[Any], *, by_value: bool) -> tuple[Graph, Program]:
    """The graph of a call, and its program."""
    graph, result, captures = f.trace(args, options, by_value=by_value)
    outputs: list[Node] = []

    def seen(x: Any) -> Any:
        if isinstance(x, Placeholder):
            outputs.append(x.node)
        elif isinstance(x, np.ndarray):
            graph.lasting = False
        return x

    rebuilt(result, seen)
    if any(x.kind == "number" for x in outputs):
        raise ByValueError("a number is returned")
    if not by_value and needs_constants(graph, outputs, len(f.kind(args, options)[1])):
        raise ByValueError("kernels of group norms are made for what is added to variances")
    run, kernels, _, apart, source, notes = compiled_program(graph, outputs, result)
    if not graph.lasting and not notes:
        notes.append(
            "arrays are created while the function is traced, or captured where a later call cannot look them up: "
            "each call traces it again"
        )
    blocked = tuple(dict.fromkeys([*graph.blocked, *apart]))
    explained = Explained(getattr(f, "__name__", "function"), tuple(kernels), blocked, tuple(notes), source)
    return graph, Program(run, captures.finished(), kept, explained, graph.lasting)


def _superoptimize(f: Any, program: Program, args: Any, options: Any, began: float, *, by_value: bool) -> None:
    """Search a faster program, which takes the place of one if there is one: see `superoptimizer.optimize`."""
    from contextlib import nullcontext

    from portmm.fusion import superoptimizer
    from portmm.fusion.finding import Finding, Task
    from portmm.util.console import progress

    graph, result, _ = f.trace(args, options, by_value=by_value)
    finding = Finding(note="not searched: it reads other values than arrays and numbers")
    if all(type(x) in (np.ndarray, float) for x in graph.leaves):
        outputs: list[Node] = []
        rebuilt(result, lambda x: outputs.append(x.node) if isinstance(x, Placeholder) else None)
        compiled, kernels = partial(_compiled, line=_line(f)), program.explained.kernels
        task = Task(graph, outputs, result, list(graph.leaves), program.run, compiled, _described, kernels)
        shows = f.search and sys.stderr.isatty()
        with progress("superoptimize", f.search) if shows else nullcontext() as shown:
            finding = superoptimizer.optimize(task, f.search, shown, began)
    explained = finding.explained or program.explained
    if finding.run is not None:
        program.run = finding.run
    if not f.search and finding.run is None:
        return
    notes = (*explained.notes, f"search: {finding}")
    program.explained = replace(explained, name=program.explained.name, notes=notes, finding=finding)


def _line(f: Any) -> tuple[str, int] | None:
    """File and first line of the function, if it has any."""
    code = getattr(f.__wrapped__, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def _described(kernels: tuple[Kernel, ...], source: str) -> Explained:
    """The explanation of a program of some kernels."""
    return Explained("function", kernels, (), (), source)


def _compiled(
    leaves: list[Any], function: Callable[..., Any], line: tuple[str, int] | None = None
) -> tuple[Any, Explained]:
    """The program of a function of portmm's on arrays and numbers, and its explanation, which names the line."""
    graph = WholeArrays(strict=False, line=line)
    captures = Captures(graph, by_value=False, fresh=False)
    positional = [placeholder(captures, x, f"argument {i}") for i, x in enumerate(leaves)]
    result = run(lambda: function(*positional))
    outputs: list[Node] = []
    rebuilt(result, lambda x: outputs.append(x.node) if isinstance(x, Placeholder) else None)
    program, kernels, _, apart, source, notes = compiled_program(graph, outputs, result)
    graph.leaves, graph.values = [], {}
    return program, Explained("function", tuple(kernels), tuple(dict.fromkeys(apart)), tuple(notes), source)


def with_races(explained: Explained) -> Explained:
    """An explanation with remarks on the races of its products."""
    return replace(explained, kernels=tuple(map(_raced, explained.kernels)))


def _raced(x: Kernel) -> Kernel:
    """A kernel with a remark on the race of its product, if there was one."""
    race = "" if x.problem is None else cpu_race.result_of(x.problem)[0]
    return replace(x, notes=(*x.notes, race)) if race else x
