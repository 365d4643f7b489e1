"""Plan of a function for the library for C: kernels alone, with every address known by what it is an offset into.

Owns `LibraryBuilder`, which records where `HostBuilder` writes Python. Functions of portmm that are a step by
themselves, as attention, are run twice on other operands, with a run time that only records: what differs is computed
from operands by NumPy, and such a step is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.build.cache import digest
from portmm.errors import ScheduleError
from portmm.fusion.plan_cpu import HostBuilder
from portmm.fusion.program import ARENA, NUMBERS, ROW, TABLE, Kernel, Writer
from portmm.ops.c_programs import Address, Program, Step
from portmm.runtime.cpu import runtime
from portmm.trace.placeholders import Placeholder, rebuilt

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node
    from portmm.fusion.partition import Split, Unit
    from portmm.fusion.plan import Expressions
    from portmm.ops.recorded_kernels import Launch
    from portmm.trace.buffers import Place

RECORDED = ("attention", "linear")
"""Functions of portmm whose launch is recorded."""
MATRICES = (4, 8, 12)
"""Places of the addresses of A, B and C among the numbers of a launch."""


class LibraryWriter(Writer):
    """A builder of the steps of a program.

    Args:
        arguments: number of leaves that are arguments; the others are captured.
        leaves: the leaves.
    """

    def __init__(self, arguments: int, leaves: list[Any]) -> None:
        super().__init__()
        self.arguments, self.leaves = arguments, leaves
        self.steps: list[Step] = []
        self.rows: list[tuple[Address, tuple[int, ...]]] = []
        self.values: list[float | str] = []
        self.constants_at: dict[int, Any] = {}
        self.constants: dict[str, bytes] = {}
        self.results: dict[str, Place] = {}

    def name(self, prefix: str, value: Any) -> str:
        """A new name, bound to a value; arrays are remembered by their addresses."""
        memory = getattr(value, "owner", value)
        if isinstance(memory, np.ndarray):
            self.constants_at[_first(memory)] = memory
        return super().name(prefix, value)

    def address(self, root: str, offset: int) -> Address:
        """An address by what it is an offset into.

        Raises:
            ScheduleError: it is unknown before a call.
        """
        if root == ARENA:
            return ARENA, offset
        if root in self.results:
            return root, offset
        if root.startswith("a") and root[1:].isdigit():
            leaf = int(root[1:])
            if leaf >= self.arguments:
                return self.constant(self.leaves[leaf], offset)
            return f"x{leaf - self.floats(leaf)}", offset
        if root.isdigit() and int(root) in self.constants_at:
            return self.constant(self.constants_at[int(root)], offset)
        raise ScheduleError("it reads memory that only a call of Python's knows")

    def constant(self, x: Any, offset: int = 0) -> Address:
        """The address of an element of an array that is a constant."""
        low, high = _span(x)
        data = ctypes.string_at(low, high - low)
        key = digest(data)[:20]
        self.constants[key] = data
        return f"c{key}", _first(x) - low + offset

    def execute(
        self, route: Any, numbers: list[int], addresses: list[tuple[str, int] | None], outer: Any = None
    ) -> None:
        """Add a run of a kernel, as `Writer.execute` does."""
        *matrices, table, constants = addresses
        of_matrices = tuple(None if x is None else self.address(*x) for x in matrices)
        row, number = (-1 if x is None else x[1] for x in (table, constants))
        self.add(route, numbers, of_matrices, (row, number), outer)

    def add(
        self, route: Any, numbers: Sequence[int], addresses: tuple[Address | None, ...], rows: tuple[int, int],
        outer: Any,
    ) -> None:  # fmt: skip
        """Add a run of a kernel whose operands and numbers begin at these rows."""
        offsets = () if outer is None else tuple(np.frombuffer(outer, np.int64).tolist())
        of = route.kernel.kernel, route.work_bytes, route.workers, route.bytes
        self.steps.append(Step(*of, tuple(map(int, numbers)), addresses, *rows, offsets))

    def operands(
        self, buffers: list[Place], strides: Sequence[tuple[int, ...]], offsets: tuple[int, ...]
    ) -> tuple[str, int]:
        """Add operands of a run, and return the first row."""
        start = len(self.rows)
        for buffer, step, moved in zip(buffers, strides, offsets, strict=True):
            at = self.address(buffer.root, buffer.offset + moved * buffer.like.itemsize)
            self.rows.append((at, (*step, *(0,) * (ROW - 1 - len(step)))))
        return TABLE, start if buffers else -1

    def pass_numbers(self, leaves: list[int], fixed: tuple[float, ...] = ()) -> tuple[str, int] | None:
        """Add the scalars of a kernel, and then fixed ones, and return the first."""
        if not leaves and not fixed:
            return None
        start = len(self.values)
        self.values += [f"v[{self.floats(i)}]" if i < self.arguments else float(self.leaves[i]) for i in leaves]
        self.values += fixed
        return NUMBERS, start

    def floats(self, leaf: int) -> int:
        """The index of an argument among those that are numbers."""
        return sum(isinstance(x, float) for x in self.leaves[:leaf])


class _Recorded(NamedTuple):
    """The one launch of a call.

    Attributes:
        launch: as the run time recorded it.
        memory: of the call's arrays and results: first address, end, and address of the first element.
        kept: what must live as long as addresses are compared.
    """

    launch: Launch
    memory: list[tuple[int, int, int]]
    kept: Any

    @property
    def numbers(self) -> list[int]:
        """The numbers of the launch, with addresses in the place of arrays."""
        return [_first(x) if isinstance(x, np.ndarray) else int(x) for x in self.launch.numbers]

    @property
    def sizes(self) -> list[int]:
        """The arguments that are sizes and strides."""
        return [x for i, x in enumerate(self.numbers) if i not in MATRICES]

    @property
    def matrices(self) -> list[int]:
        """The arguments that are addresses."""
        return [self.numbers[i] for i in MATRICES]

    @property
    def rows(self) -> list[list[int]]:
        """The operands."""
        return [] if self.launch.table is None else self.launch.table.tolist()

    @property
    def scalars(self) -> list[float]:
        """The numbers of expressions."""
        return [] if self.launch.constants is None else [float(x) for x in np.ravel(self.launch.constants)]


class LibraryBuilder(HostBuilder):
    """A builder of a program without Python.

    Args:
        graph, outputs, split: as of `Builder`.
        arguments: number of leaves that are arguments.
        done: takes the program, its writer, the places of results, and the nodes.
    """

    between = False

    def __init__(
        self, graph: Graph, outputs: list[Node], split: Split, *, arguments: int,
        done: Callable[[Program, LibraryWriter, list[Place]], None],
    ) -> None:  # fmt: skip
        super().__init__(graph, outputs, split)
        self.writer: LibraryWriter = LibraryWriter(arguments, graph.leaves)
        self.done = done

    def leaf(self, x: Node) -> Place:
        """The buffer of an argument or of a constant.

        Raises:
            ScheduleError: kernels cannot address its elements.
        """
        if x not in self.graph.fixed and not numpy_arrays.addressable(self.graph.leaves[x.leaf], x.dtype):
            raise ScheduleError(f"{x.name} in {x.where} has elements that kernels cannot read in place")
        return super().leaf(x)

    def moved(self, x: Node, base: Place) -> Place:  # noqa: ARG002 - of the interface
        """Refuse a copy by NumPy.

        Raises:
            ScheduleError: always.
        """
        raise ScheduleError(f"{x.name} in {x.where} is copied by NumPy")

    def allocate(self, x: Node, shape: tuple[int, ...] | None = None, fusing: Expressions | None = None) -> Place:
        """Allocate a buffer for a node, and remember it if it is a result."""
        place = super().allocate(x, shape, fusing)
        if place.root != ARENA:
            self.writer.results[place.root] = place
        return place

    def call(self, unit: Unit) -> None:
        """Add the launch of a function of portmm that is a step by itself.

        Raises:
            ScheduleError: it is another function, or not one launch of a kernel.
        """
        x, *items = unit.members
        if x.name not in RECORDED:
            raise ScheduleError(f"{x.name} in {x.where} is computed by NumPy")
        places = {y: self.buffer_of(y) for y in x.inputs if y.kind not in ("weight", "number")}
        first, second = (self.recorded(x, items, places, seed) for seed in (1, 2))
        if (first.sizes, first.scalars) != (second.sizes, second.scalars):
            raise ScheduleError(f"{x.name} in {x.where} has numbers that NumPy computes from arguments")
        for y in items or [x]:
            self.buffers[y] = self.allocate(y)
        roots = [*places.values(), *(self.buffers[y] for y in items or [x])]
        written: set[int] = set()

        def located(at: int, at_other: int) -> Address | None:
            for i, ((low, high, start), place) in enumerate(zip(first.memory, roots, strict=True)):
                if low <= at < high:
                    written.add(i)
                    return self.writer.address(place.root, place.offset + at - start)
            return self.writer.constant(self.fixed(x, (first, at), (second, at_other))) if at else None

        matrices = tuple(located(*y) for y in zip(first.matrices, second.matrices, strict=True))
        row, number = len(self.writer.rows), len(self.writer.values)
        for mine, theirs in zip(first.rows, second.rows, strict=True):
            at = located(mine[0], theirs[0])
            assert at is not None  # noqa: S101 - operands have addresses
            self.writer.rows.append((at, tuple(mine[1:])))
        if not written.issuperset(range(len(places), len(roots))):
            raise ScheduleError(f"{x.name} in {x.where} has results that NumPy converts")
        self.writer.values += first.scalars
        begin = row if first.rows else -1, number if first.scalars else -1
        self.writer.add(first.launch.route, first.sizes, matrices, begin, first.launch.outer)
        self.kernels.append(Kernel(x.name, x.name, (x.where,)))

    def recorded(self, x: Node, items: list[Node], places: dict[Node, Place], seed: int) -> _Recorded:
        """The launch of a call with operands made up from a seed.

        Raises:
            ScheduleError: it is not one.
        """
        recorder, rng = runtime(), np.random.default_rng(seed)
        operands: list[Any] = []
        for y in x.inputs:
            if y in places:
                operands.append(_filled(places[y].like, rng))
            elif y.kind == "weight":
                operands.append(self.weight(y))
            else:
                operands.append(float(seed if y.leaf < self.writer.arguments else self.graph.leaves[y.leaf]))
        launches: list[Any] = []
        recorder.launches = launches  # type: ignore[attr-defined]
        result = x.plain(*operands)
        results = [y.plain(result) for y in items] or [result]
        if len(launches) != 1:
            raise ScheduleError(f"{x.name} in {x.where} is {len(launches)} launches; a program in C takes one")
        arrays = [y for y, of in zip(operands, x.inputs, strict=True) if of in places]
        memory = [(*_span(y), _first(y)) for y in (*arrays, *results)]
        return _Recorded(launches[0], memory, (result, operands))

    def fixed(self, x: Node, first: tuple[_Recorded, int], second: tuple[_Recorded, int]) -> Any:
        """The array of constants that a launch reads at an address, which two launches have in common.

        Raises:
            ScheduleError: it is computed from arguments.
        """
        weights = [y.owner for y in map(self.weight, x.inputs) if hasattr(y, "owner")]
        mine, theirs = (
            next((y for y in (*weights, *run.launch.arrays) if _first(y) == at), None) for run, at in (first, second)
        )
        if mine is None or theirs is None or mine.tobytes() != theirs.tobytes():
            raise ScheduleError(f"{x.name} in {x.where} reads what NumPy computes from arguments")
        return mine

    def program(self, result: Any) -> tuple[Callable[[list[Any]], Any], str]:
        """The program, which the owner of `done` gets; in Python it returns arrays without values.

        Raises:
            ScheduleError: a result is not an array of its own.
        """
        nodes: list[Node] = []
        rebuilt(result, lambda x: nodes.append(x.node) if isinstance(x, Placeholder) else None)
        places = [self.buffer_of(x) for x in nodes]
        roots = [x.root for x in places]
        for x, place in zip(nodes, places, strict=True):
            whole = place.offset == 0 and place.like.flags.c_contiguous
            if place.root not in self.writer.results or not whole or roots.count(place.root) > 1:
                raise ScheduleError(f"{x.name} in {x.where} is a result that shares memory with another array: copy it")
        w = self.writer
        arrays = w.arguments - w.floats(w.arguments)
        renamed = {root: f"x{arrays + i}" for i, root in enumerate(roots)}
        self.done(_renamed(w, renamed), w, places)

        def empty(x: Any) -> Any:
            return np.zeros(x.node.shape, x.node.dtype) if isinstance(x, Placeholder) else x

        return lambda _: rebuilt(result, empty), ""


def _renamed(w: LibraryWriter, roots: dict[str, str]) -> Program:
    """The program, with results by their numbers among arguments."""

    def at(x: Address | None) -> Address | None:
        return x if x is None else (roots.get(x[0], x[0]), x[1])

    steps = tuple(s._replace(addresses=tuple(map(at, s.addresses))) for s in w.steps)
    rows = tuple((at(x) or x, steps_) for x, steps_ in w.rows)
    return Program(steps, rows, tuple(w.values), w.arena.size)


def _filled(like: Any, rng: Any) -> Any:
    """An array of a shape, a type and strides, of small numbers."""
    low, high = numpy_arrays.span_of(like.shape, like.strides, like.itemsize)
    x = np.ndarray(like.shape, like.dtype, np.empty(high - low, np.uint8), -low, like.strides)
    x[...] = rng.integers(1, 100, like.shape).astype(like.dtype)
    return x


def _first(x: Any) -> int:
    """The address of the first element of an array."""
    return int(x.__array_interface__["data"][0])


def _span(x: Any) -> tuple[int, int]:
    """The addresses of an array's elements, and their end."""
    low, end = numpy_arrays.span_of(x.shape, x.strides, x.itemsize)
    return _first(x) + low, _first(x) + end
