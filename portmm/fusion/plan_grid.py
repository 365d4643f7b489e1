"""Programs of fused functions on a device: launches of units, and the arrays between them.

Owns `GridBuilder`, which selects kernels for the units of a graph whose arrays are on a device, and `runner`, which
returns a function that runs the steps of such a program. Shapes and strides are known when a program is built. An
operation without a kernel is an error: NumPy does not compute on a device. Each call allocates the arrays between
kernels in the library of its first array, and on its queue; it drops them after their last read, and their library
frees them when the queue is done with them.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop, operand
from portmm.arrays.grid_call import numbers
from portmm.arrays.numpy_arrays import contiguous, stand_in
from portmm.arrays.operand import WIDEST, Operand, address
from portmm.dispatch import config, grid_routes
from portmm.dispatch.grid_rows import launches
from portmm.dispatch.machine import machine_of
from portmm.errors import ScheduleError
from portmm.fusion.partition import LEAVES
from portmm.fusion.plan import Builder, kernel_type
from portmm.fusion.program_cpu import Kernel
from portmm.ops.kernel_call import start
from portmm.spec.dtype import spell
from portmm.spec.problem import Problem
from portmm.trace.buffers import Place
from portmm.trace.placeholders import Array, rebuilt

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.dispatch.machine import Launch, Machine
    from portmm.fusion.graph import Graph, Node
    from portmm.fusion.partition import Split, Unit
    from portmm.fusion.plan import Expressions, Operands
    from portmm.ops.kernel_call import Moves
    from portmm.trace.buffers import Walk

State = dict[str, Operand]
"""Arrays of a call, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Make:
    """A step that allocates an array.

    Attributes:
        name: of the array.
        shape: its shape.
        dtype: its type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def run(self, state: State, like: Operand, _: list[Any]) -> None:
        """Allocate it."""
        state[self.name] = interop.empty_like(like, self.shape, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A step that launches kernels.

    Attributes:
        on: the device.
        launches: the kernels.
        buffers: parameter -> array, and bytes from its first element.
        numbers: parameter -> leaf.
        workspace: elements of 32 bits shared by the kernels.
    """

    on: Machine
    launches: tuple[tuple[Launch, Moves], ...]
    buffers: tuple[tuple[str, str, int], ...]
    numbers: tuple[tuple[str, int], ...]
    workspace: int = 0

    def run(self, state: State, like: Operand, leaves: list[Any]) -> None:
        """Launch them."""
        values = {name: address(state[root], at) for name, root, at in self.buffers}
        values |= {name: float(leaves[i]) for name, i in self.numbers}
        start(self.on, self.launches, values, like, (self.workspace, "f32"))


@dataclass(frozen=True, slots=True, eq=False)
class Own:
    """A step that calls a function of portmm.

    Attributes:
        name: of its result.
        function: the function.
        arguments: the names of its arrays.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]

    def run(self, state: State, _: Operand, __: list[Any]) -> None:
        """Call it."""
        result = interop.adopt(self.function(*(state[x].source for x in self.arguments)))
        assert result is not None  # noqa: S101 - of arrays on a device
        state[self.name] = result


Step = Make | Run | Own


@dataclass(frozen=True, slots=True)
class Output:
    """An array that is returned.

    Attributes:
        root: its name.
        shape: of the returned array.
        masks: its elements are bytes of 0 and 1.
    """

    root: str
    shape: tuple[int, ...]
    masks: bool

    def array(self, state: State) -> Any:
        """The array to return."""
        source = state[self.root].source
        if self.masks:
            own = isinstance(source.dtype, np.dtype)
            source = source.view(np.dtype(np.bool_) if own else sys.modules["torch"].bool)
        return (
            source if self.root.startswith("L") or state[self.root].shape == self.shape else source.reshape(self.shape)
        )


def runner(every: tuple[Step, ...], arrays: tuple[int, ...], result: Any) -> Callable[[list[Any]], Any]:
    """A function of the arrays and numbers of a call.

    Args:
        every: the steps.
        arrays: indices of the leaves that are arrays.
        result: the value to return, with an `Output` for each array.
    """
    kept: set[str] = set()
    rebuilt(result, lambda x: kept.add(x.root) if isinstance(x, Output) else None)
    steps = _until(every, kept)

    def run(leaves: list[Any]) -> Any:
        state: State = {}
        for i in arrays:
            array = interop.adopt(leaves[i])
            assert array is not None  # noqa: S101 - the key of the call says so
            state[f"L{i}"] = array
        like = state[f"L{arrays[0]}"]
        for step, done in steps:
            step.run(state, like, leaves)
            for name in done:
                del state[name]
        return rebuilt(result, lambda x: x.array(state) if isinstance(x, Output) else x)

    return run


def _until(steps: tuple[Step, ...], kept: set[str]) -> tuple[tuple[Step, tuple[str, ...]], ...]:
    """Steps, each with the arrays between kernels that no later step reads."""
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        if isinstance(step, Run):
            names = [root for _, root, _ in step.buffers]
        else:
            names = [step.name, *(step.arguments if isinstance(step, Own) else ())]
        last |= {x: i for x in names if x.startswith("M") and x not in kept}
    return tuple((x, tuple(n for n, at in last.items() if at == i)) for i, x in enumerate(steps))


class GridBuilder(Builder):
    """A builder of the launches of units: see `Builder`.

    Raises:
        TypeError: some arrays are in the host's memory.
        ValueError: they are on several devices.
    """

    between = False

    def __init__(self, graph: Graph, outputs: list[Node], split: Split) -> None:
        super().__init__(graph, outputs, split)
        arrays = graph.device_arrays
        operand.same_device(list(arrays.values()))
        for x in graph.nodes:
            if x.leaf >= 0 and x.leaf not in arrays and x.kind in ("array", "weight"):
                what = "a packed weight" if x.kind == "weight" else "an array in the host's memory"
                raise TypeError(f"{x.name} ({x.where}) is {what}, others are on a device: copy it there first")
        self.like = next(iter(arrays.values()))
        self.on = machine_of(self.like)
        self.steps: list[Make | Run | Own] = []
        self.aligned = {f"L{i}": math.gcd(x.at, WIDEST) for i, x in arrays.items()}

    # Buffers.

    def leaf(self, x: Node) -> Place:
        """The buffer of an argument."""
        if x.leaf not in self.graph.device_arrays:
            raise ScheduleError(f"{x.name} ({x.where}) cannot be read on a device")
        return Place(f"L{x.leaf}", 0, operand.standin(self.graph.device_arrays[x.leaf]), "")

    def view(self, x: Node) -> Place:
        """A view of a buffer, or a copy where strides cannot express the view."""
        base = self.buffer_of(x.inputs[0])
        viewed = _viewed(base, x.plain)
        if viewed is None:
            to = self.allocate(x, base.like.shape)
            self.copy(base, to, x)
            viewed = _viewed(to, x.plain)
        if viewed is None:
            raise ScheduleError(f"{x.name} ({x.where}) moves elements in a way that has no kernel")
        return viewed

    def allocate(self, x: Node, shape: tuple[int, ...] | None = None, fusing: Expressions | None = None) -> Place:
        """Allocate an array for a node; no memory is reused."""
        del fusing
        shape, kind, name = x.shape if shape is None else shape, kernel_type(np.dtype(x.dtype)), f"M{len(self.steps)}"
        if not kind:
            raise ScheduleError(f"kernels do not write {x.dtype}")
        self.steps.append(Make(name, shape, kind))
        return self.place(name, shape, x.dtype)

    def place(self, name: str, shape: tuple[int, ...], dtype: Any) -> Place:
        """A new array."""
        self.aligned[name] = WIDEST
        strides = contiguous(shape, np.dtype(dtype).itemsize)
        return Place(name, 0, stand_in(shape, np.dtype(dtype), strides), "")

    def gcd(self, x: Place, moved: list[int]) -> int:
        """The alignment in bytes of a buffer at all offsets from which kernels run."""
        return math.gcd(self.aligned[x.root], x.offset, *(i * x.like.itemsize for i in moved))

    # Kernels.

    def launch_rows(self, fusing: Expressions, w: Walk, columns: list[int], size: tuple[int, int, int]) -> None:
        """Add runs of kernels over rows for expressions, of `size` rows, columns and items."""
        strides = list(zip(w.batch[1], w.rows[1], columns, strict=True))
        aligned = [self.gcd(p, [moved[i] for moved in w.repeats]) for i, p in enumerate(fusing.buffers)]
        every, workspace = launches(fusing.text(), size, strides, aligned, self.on)
        for moved in w.repeats:
            self.launch(every, self.operands(fusing, moved), fusing, workspace)

    @staticmethod
    def operands(fusing: Expressions, moved: tuple[int, ...]) -> list[tuple[str, str, int]]:
        """The buffers and offsets of the operands of expressions, for one run of a kernel."""
        return [
            (f"x{i}_all", p.root, p.offset + far * p.like.itemsize)
            for i, (p, far) in enumerate(zip(fusing.buffers, moved, strict=True))
        ]

    def launch(
        self, every: tuple[Launch, ...], buffers: list[tuple[str, str, int]], fusing: Expressions, workspace: int
    ) -> None:
        """Add a launch of kernels on buffers."""
        leaves = tuple((f"number_{i}", leaf) for i, leaf in enumerate(fusing.numbers))
        unmoved = tuple((launch, ()) for launch in every)
        self.steps.append(Run(self.on, unmoved, tuple(buffers), leaves, workspace))

    def launch_product(
        self, operands: Operands, size: tuple[int, int], fusing: Expressions, w: Walk, columns: list[int], *, text: str
    ) -> Problem:
        """Add runs of a product of `size` k and n with an epilogue `text`, and return its problem."""
        p, values, vectors = self.problem(operands, size, w, text)
        for i, steps_ in enumerate(zip(w.batch[1][3:], w.rows[1][3:], columns, strict=True)):
            values |= {f"x{i}_{axis}": s for axis, s in zip("bmn", steps_, strict=True)}
        route = grid_routes.route(replace(p, k=max(p.k, 1)), self.on, vectors)
        every, (workspace, _) = route.launches(values, p)
        for moved in w.repeats:
            at = zip("abc", operands, moved, strict=False)
            buffers = [(name, y.root, y.offset + i * y.like.itemsize) for name, y, i in at]
            self.launch(every, [*buffers, *self.operands(fusing, moved[3:])], fusing, workspace)
        return p

    def problem(
        self, operands: tuple[Place, Place, Place], size: tuple[int, int], w: Walk, text: str
    ) -> tuple[Problem, dict[str, Any], tuple[int, int, int]]:
        """The problem, its sizes and strides by parameter, and the vector widths of A, B and C."""
        a, b, _ = operands
        (k, n), (m, rows), (items, apart) = size, w.rows, w.batch
        columns = max(n, 1)
        parts = []
        ends = ((m, k, rows[0], _step(a, -1)), (k, n, _step(b, -2), _step(b, -1)), (m, n, rows[2] or columns, 1))
        for i, (x, (rows_, columns_, row, col)) in enumerate(zip(operands, ends, strict=True)):
            others = (apart[i], *(moved[i] for moved in w.repeats))
            at = self.gcd(x, [])
            stand_in = Operand(None, "cuda", (), at, (), (), kernel_type(x.like.dtype), None, readonly=False)
            parts.append(operand.matrix(stand_in, rows_, columns_, (row, col), others))
        word = spell(*(kernel_type(x.like.dtype) for x in operands))
        p = Problem(
            m, n, k, word, items, parts[0].layout, parts[1].layout, "row",
            deterministic=config.current().deterministic, fused=text, tf32=config.rounds(word),
        )  # fmt: skip
        left, right, result = parts
        result = replace(result, row=rows[2] or columns, col=1)
        values = numbers((m, n, k), items, (left, right, result), apart)
        vector = parts[2].vector if parts[2].layout == "row" else 1
        return p, values, (parts[0].vector, parts[1].vector, vector)

    def call(self, unit: Unit) -> None:
        """Add a call of a function of portmm.

        Raises:
            ScheduleError: it is another function, or does not take arrays on a device.
        """
        x, *items = unit.members
        if x.kind != "call" or items:
            raise ScheduleError(f"{x.name} ({x.where}) has no kernel, and NumPy does not compute on a device")
        arguments = tuple(self.contiguous(y) for y in x.inputs)
        name = f"M{len(self.steps)}"
        self.steps.append(Own(name, x.plain, arguments))
        self.buffers[x] = self.place(name, x.shape, x.dtype)
        self.kernels.append(Kernel("product", x.name, (x.where,)))

    def contiguous(self, x: Node) -> str:
        """The name of an array with the elements of a node only; copied if needed."""
        buffer = self.buffer_of(x)
        if buffer.root.startswith("L") and x.kind in LEAVES:
            return buffer.root
        if not buffer.offset and buffer.like.flags.c_contiguous and self.shape_of(buffer.root) == x.shape:
            return buffer.root
        to = self.allocate(x)
        self.copy(buffer, to, x)
        return to.root

    def shape_of(self, root: str) -> tuple[int, ...] | None:
        """The shape of an array allocated between kernels."""
        allocated = next((x for x in self.steps if isinstance(x, Make) and x.name == root), None)
        own = next((p for p in self.buffers.values() if p.root == root), None)
        return allocated.shape if allocated is not None else None if own is None else own.like.shape

    def output(self, x: Node) -> Output:
        """The returned array of a node."""
        buffer = self.buffer_of(x)
        own = buffer.root.startswith("M") and not buffer.offset and buffer.like.flags.c_contiguous
        root = buffer.root if own and math.prod(self.shape_of(buffer.root) or (0,)) == x.size else self.contiguous(x)
        return Output(root, x.shape, bool(x.dtype == np.bool_))

    def program(self, result: Any) -> tuple[Callable[[list[Any]], Any], str]:
        """The function of the arrays and numbers of a call; it has no text."""
        # `outputs` drops the values of the graph, which refer to arrays of this call.
        outputs = rebuilt(result, lambda x: self.output(x.node) if isinstance(x, Array) else x)
        return runner(tuple(self.steps), tuple(self.graph.device_arrays), outputs), ""


def _step(x: Place, axis: int) -> int:
    """The stride along an axis, in elements."""
    return int(x.like.strides[axis]) // x.like.itemsize if x.like.shape[axis] > 1 else 1 if axis == -1 else 0


def _viewed(buffer: Place, function: Any) -> Place | None:
    """A view of a buffer; None if it needs a copy.

    The function is applied to uninitialized host memory: it may be copied, and nothing is read from the device.
    """
    like = buffer.like
    steps = [(max(n, 1) - 1) * s for n, s in zip(like.shape, like.strides, strict=True)]
    low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
    memory = np.empty(high - low + like.itemsize, np.uint8)
    shadow = np.ndarray(like.shape, like.dtype, memory, -low, like.strides)
    viewed = function(shadow)
    if not viewed.size:
        return Place(buffer.root, buffer.offset, np.empty(viewed.shape, like.dtype), "")
    if not np.may_share_memory(viewed, memory):
        return None
    moved = viewed.__array_interface__["data"][0] - shadow.__array_interface__["data"][0]
    return Place(buffer.root, buffer.offset + moved, stand_in(viewed.shape, like.dtype, viewed.strides), "")
