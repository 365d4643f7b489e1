"""Whole functions of arrays, fused.

Owns `fuse` and what it returns: a function that is traced once for each kind of
arguments, and from then on runs as a program of few kernels. Imports `fusion.captures`,
`fusion.graph`, `util.memo`, `fusion.program_cpu`, `fusion.partition`, `fusion.traced_array`.
"""

from __future__ import annotations

import functools
import math
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import numpy as np

from portmm.arrays.interop import on_device
from portmm.arrays.numpy_fallback import fall_back
from portmm.dispatch import config as settings
from portmm.errors import BuildError, ScheduleError, TraceError
from portmm.fusion.captures import Scope, arguments, found
from portmm.fusion.epilogue_axes import applied
from portmm.fusion.graph import ByValueError, Graph, Node
from portmm.fusion.horizontal_fusion import abreast
from portmm.fusion.match_attention import flash
from portmm.fusion.partition import Splitter
from portmm.fusion.plan_cpu import Builder
from portmm.fusion.program_cpu import ChangedError, Kernel
from portmm.fusion.traced_array import AROUND, Value
from portmm.ops import matmul as matmul_op
from portmm.runtime import cpu as cpu_runtime
from portmm.trace.numpy_names import rebuilt
from portmm.util import locks
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.fusion.captures import Check
    from portmm.fusion.partition import Split

AROUND["applied"] = applied
MOST_KINDS = 256
"""Kinds of arguments that a function remembers before it starts afresh."""
MOST_WAYS = 4
"""Of these, by what the function captures."""
MOST_KERNELS = 12288
"""Kernels of all programs that are remembered in a process, 4 KiB of objects each, before it starts afresh."""
KIND = 4
"""Memory of a program beside its kernels, counted in kernels."""
MOST_TRIES = 64
BY_VALUE = "by value"


@dataclass(eq=False, slots=True)
class Made:
    """What was made for one kind of arguments.

    Attributes:
        run: a program, of the arrays of a call.
        checks: what must be as it was.
        kept: objects whose identity the kind rests on.
        explained: what `explain` shows.
        lasting: it may be run again.
        simple: its arguments are all that it takes.
    """

    run: Callable[[Any], Any]
    checks: list[Check]
    kept: list[Any]
    explained: Explained
    lasting: bool
    simple: bool = False


@dataclass(frozen=True, slots=True)
class Explained:
    """How a function runs for one kind of arguments.

    Attributes:
        name: of the function.
        kernels: in the order in which they run.
        blocked: line, and what kept something there out of a kernel.
        notes: what else there is to say.
        source: the Python that calls the kernels.
    """

    name: str
    kernels: tuple[Kernel, ...]
    blocked: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        found = [f"{self.name}: {len(self.kernels)} kernel{'s' * (len(self.kernels) != 1)}"]
        for i, k in enumerate(self.kernels, 1):
            kind = "NumPy: " if k.kind == "numpy" else "" if k.kind == k.what else f"{k.kind}: "
            found.append(f"  {i}. {kind}{k.what}{f'  {k.detail}' if k.detail else ''}  [{', '.join(k.lines)}]")
            if k.fused:
                found.append(f"     fused: {', '.join(k.fused)}")
            found += [f"     {x}" for x in k.notes]
        if self.blocked:
            found.append("not fused:")
            found += [f"  {where}: {why}" for where, why in self.blocked]
        found += [f"note: {x}" for x in self.notes]
        return "\n".join(found)


class Whole:
    """A function whose calls run as few kernels. See `fuse`."""

    def __init__(self, function: Callable[..., Any], *, strict: bool) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self.strict = strict
        self.memo = Memory(MOST_KINDS)
        self.quick: tuple[Any, Memory] = (None, Memory(MOST_KINDS))
        self.describe: Callable[[Any], bytes | None] = self.begin
        with _making:
            _wholes.add(self)

    def begin(self, args: Any) -> bytes | None:
        """Have the run time ready; from then on, it describes arrays. A device needs none."""
        if any(on_device(x) for x in args):
            return None
        matmul_op.begin()
        found = cpu_runtime.types()
        if cpu_runtime.has_kernels(found):  # else there is nothing to describe arrays for, yet
            self.describe = found.describe
        described: bytes | None = found.describe(args)
        return described

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """The method of an object."""
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """What the function computes."""
        told = self.describe(args) if not options else None
        config, quick = self.quick  # together, as other threads may change them
        if told is not None and settings.current() is config:
            made: Made | None = quick.get(told)
            if made is not None:
                more = found(made.checks) if made.checks else []
                if more is not None:
                    try:
                        return made.run(args if made.simple else _leaves(args, more))
                    except ChangedError:
                        return self.again(args, options)
        key, leaves, kept = self.kind(args, options)
        made, more = self.known(key, leaves)
        if made is None:
            made, leaves = self.make(args, options, key, leaves, kept)
        elif told is not None:
            if settings.current() is not config:
                self.quick = config, quick = settings.current(), Memory(MOST_KINDS)
            quick.keep(told, made)
            made.simple = not made.checks and not any(type(x) is int for x in args)
        try:
            return made.run([*leaves, *more])
        except ChangedError:
            return self.again(args, options)

    def again(self, args: Any, options: Any) -> Any:
        """NumPy gives a shape that the program does not expect: forget it, and run the function itself."""
        self.forget()
        return self.__wrapped__(*args, **options)

    def forget(self) -> None:
        """Drop all programs."""
        self.memo.clear()
        self.quick[1].clear()

    def known(self, key: Any, leaves: list[Any]) -> tuple[Made | None, list[Any]]:
        """What was made for this kind of call, and what it captures now."""
        known = self.memo.get(key)
        if known is BY_VALUE:
            known = self.memo.get(_with_numbers(key, leaves))
        for made in known or ():
            more = found(made.checks) if made.checks else []
            if more is not None:
                return made, more
        return None, []

    def explain(self, *args: Any, **options: Any) -> Explained:
        """How a call with these arguments runs: kernels, what is fused, what is not, and on which line."""
        key, leaves, kept = self.kind(args, options)
        made, _ = self.known(key, leaves)
        return (made or self.make(args, options, key, leaves, kept)[0]).explained

    @staticmethod
    def kind(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, list[Any], list[Any]]:
        """The kind of a call, what it gives anew, and objects that the kind names by identity."""
        kinds: list[Any] = []
        leaves: list[Any] = []
        kept: list[Any] = []
        arguments(args, kinds, leaves, kept)
        if options:
            kinds.append(tuple(options))
            arguments(options.values(), kinds, leaves, kept)
        return (*kinds, settings.current(), settings.limit()), leaves, kept

    def make(self, args: Any, options: Any, key: Any, leaves: list[Any], kept: list[Any]) -> tuple[Made, list[Any]]:
        """Trace the function, make a program of it, and remember it."""
        for by_value in (False, True):
            try:
                graph, result, scope = self.trace(args, options, by_value=by_value)
                made = self.compiled(graph, result, scope, kept)
                break
            except ByValueError:
                if by_value:
                    raise
        if made.lasting:
            if by_value:
                self.memo.keep(key, BY_VALUE)
                key = _with_numbers(key, leaves)
            _make_room(len(made.explained.kernels) + KIND)
            self.memo.keep(key, [made, *self.memo.get(key, ())[: MOST_WAYS - 1]])
        leaves, graph.leaves, graph.values = graph.leaves, [], {}  # what is remembered must not keep arrays alive
        return made, leaves

    def trace(self, args: Any, options: Any, *, by_value: bool) -> tuple[Graph, Any, Scope]:
        """Run the function on values that take down what happens to them."""
        graph = Graph(strict=self.strict)
        scope = Scope(graph, by_value=by_value)
        function = self.__wrapped__
        names = getattr(getattr(function, "__code__", None), "co_varnames", ())
        given = [scope.argument(x, names[i] if i < len(names) else f"argument {i}") for i, x in enumerate(args)]
        named = {n: scope.argument(x, n) for n, x in options.items()}
        bound = scope.rebound(function) if isinstance(function, types.FunctionType) else function
        return graph, bound(*given, **named), scope

    def compiled(self, graph: Graph, result: Any, scope: Scope, kept: list[Any]) -> Made:
        """The program of a graph."""
        outputs: list[Node] = []

        def seen(x: Any) -> Any:
            if isinstance(x, Value):
                outputs.append(x.node)
            elif isinstance(x, np.ndarray):
                graph.lasting = False
            return x

        rebuilt(result, seen)
        if any(x.kind == "number" for x in outputs):
            raise ByValueError("a number is returned")
        run, kernels, apart, source, notes = _program(graph, outputs, result)
        if not graph.lasting and not notes:
            notes.append(
                "arrays arise while the function is traced, or are found where a call cannot find them again: "
                "each call traces it anew"
            )
        blocked = tuple(dict.fromkeys([*graph.blocked, *apart]))
        explained = Explained(getattr(self, "__name__", "function"), tuple(kernels), blocked, tuple(notes), source)
        return Made(run, scope.checks, [*kept, *scope.kept], explained, graph.lasting)


_making = locks.reentrant_lock()
_wholes: WeakSet[Whole] = WeakSet()
_kernels = 0


def _make_room(more: int) -> None:
    """Forget the programs of all functions if there are too many with these."""
    global _kernels  # noqa: PLW0603 - of the whole process
    with _making:
        _kernels += more
        if _kernels > MOST_KERNELS:
            _kernels = more
            for x in tuple(_wholes):
                x.forget()


def _leaves(args: tuple[Any, ...], more: list[Any]) -> list[Any]:
    """What a call gives anew, integers being part of the program."""
    return [*(x for x in args if type(x) is not int), *more]


def _with_numbers(key: Any, leaves: list[Any]) -> Any:
    return (key, tuple([x.hex() for x in leaves if isinstance(x, float)]))


def _program(graph: Graph, outputs: list[Node], result: Any) -> tuple[Any, list[Kernel], list[Any], str, list[str]]:
    """What runs a graph, its kernels, what is apart, its text, and notes."""
    if graph.there:
        from portmm.fusion import plan_gpu

        return plan_gpu.program(graph, outputs, result)
    matmul_op.begin()
    if any(0 in x.shape or (x.kind == "matmul" and 0 in x.inputs[0].shape) for x in graph.nodes):
        return _evaluated(graph, result, "an array is empty: NumPy does what is left")
    plain: dict[Node, str] = {}
    numpy: dict[Node, str] = {}
    beside: list[tuple[str, str]] = []
    stored = flash(graph, outputs)
    for _ in range(MOST_TRIES):
        split = Splitter(graph, outputs, plain, numpy).split()
        if not plain and not numpy and (said := abreast(graph, split)) is not None:
            beside = said
            split = Splitter(graph, outputs, plain, numpy).split()
        try:
            builder = Builder(graph, outputs, split)
            failed = _built(builder, split, plain, numpy)
            if failed:
                continue
            made, source = builder.writer.program(len(graph.leaves), _result(builder, result))
        except ScheduleError as error:
            return _evaluated(graph, result, f"no kernel: {error}")
        except BuildError as error:
            fall_back(error)
            graph.lasting = graph.lasting and math.isinf(error.retry_at)
            return _evaluated(graph, result, f"no kernel: {error}")
        apart = [*stored, *split.apart, *beside, *((x.where, f"{x.name}: {why}") for x, why in numpy.items())]
        return made, builder.kernels, apart, source, []
    return _evaluated(graph, result, "no way to split it was found")


def _built(builder: Builder, split: Split, plain: dict[Node, str], numpy: dict[Node, str]) -> bool:
    """Find the kernels of all units; whether some could not be found, and what they hold is to be split further."""
    for i, unit in enumerate(split.units):
        builder.now = i
        try:
            builder.step(unit)
        except ScheduleError as error:
            first = unit.members[0]
            if unit.kind == "product" and len(unit.members) > 1:
                plain[first] = str(error)
            elif unit.kind in ("product", "rows"):
                numpy.update(dict.fromkeys(unit.members, str(error)))
            else:
                raise
            return True
    builder.now = len(split.units)
    return False


def _result(builder: Builder, x: Any) -> str:
    """What the caller gets, in a program's text."""
    if isinstance(x, Value):
        return builder.text(x.node)
    if type(x) is tuple:
        return f"({''.join(f'{_result(builder, y)}, ' for y in x)})"
    if type(x) is list:
        return f"[{', '.join(_result(builder, y) for y in x)}]"
    if type(x) is dict:
        return f"{{{', '.join(f'{_result(builder, k)}: {_result(builder, y)}' for k, y in x.items())}}}"
    return builder.writer.name("x", x)


def _evaluated(graph: Graph, result: Any, why: str) -> tuple[Any, list[Kernel], list[Any], str, list[str]]:
    """The graph as NumPy computes it, one operation after the other."""

    def run(leaves: list[Any]) -> Any:
        values: dict[Node, Any] = {}
        return rebuilt(result, lambda x: graph.evaluate(x.node, leaves, values) if isinstance(x, Value) else x)

    kernels = [Kernel("numpy", x.name, (x.where,)) for x in graph.nodes if x.inputs and x.kind not in ("view", "item")]
    return run, kernels, [], "", [why]


def fuse(function: Callable[..., Any] | None = None, *, on_unfusable: Literal["split", "error"] = "split") -> Any:
    """Make a function of matrix products, element-wise operations, reductions and reshapes run as few kernels.

    The function is traced once for each kind of arguments (shapes, strides, types), with its
    arrays, those that it captures too, replaced by ones that take down what happens to them. Products then take
    the element-wise operations that follow them into their kernels; what reduces rows
    runs as one kernel over them; NumPy does what no kernel can, in between. Arrays are
    looked up at each call: new values, and new arrays in their places, are seen.

    Undecorated (`__wrapped__`), the function runs as NumPy does, and is its own reference.
    A float64 or an integer of NumPy's that is no array counts as Python's: it takes the type of what it meets.
    A number that is converted (`np.float32(scale)`) is a constant of the trace: each value is traced anew.

    Args:
        function: the function; it may take and return lists, tuples and dicts of arrays.
        on_unfusable: "split" lets NumPy compute, between kernels, what no kernel can;
            "error" raises TraceError, naming the line.

    Returns:
        A function with the same arguments, and a method `explain` that takes them too.

    Raises:
        ValueError: `on_unfusable` is neither of both.
        TraceError: when called, the function's way depends on values, or it changes an array in place.
    """
    if on_unfusable not in ("split", "error"):
        raise ValueError(f"on_unfusable is {on_unfusable!r}; use 'split' or 'error'")
    if function is None:
        return functools.partial(fuse, on_unfusable=on_unfusable)
    return Whole(function, strict=on_unfusable == "error")


__all__ = ["Explained", "TraceError", "Whole", "fuse"]
