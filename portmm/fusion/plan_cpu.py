"""Plan of a fused function on the CPU: kernels of units, and buffers between them.

Owns `HostBuilder`, which selects a kernel for each unit of a split graph, and plans the memory of
the arrays between them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.arrays.call import reduce_call
from portmm.dispatch import config
from portmm.errors import BuildError, ChangedError, ScheduleError, TraceError
from portmm.fusion import plan_windows
from portmm.fusion.plan import Builder, Expressions, Operands
from portmm.fusion.program import ARENA, TABLE, Kernel, Writer
from portmm.ops import routes
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import spell
from portmm.spec.problem import Problem
from portmm.trace.buffers import Place, Walk
from portmm.util.records import replace

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node
    from portmm.fusion.partition import Split, Unit
    from portmm.ops.attention import Launch

T = TypeVar("T")
FOREVER = 1 << 30
ATTENDS = ("attention", "attention_by_factors")
OWN = ("attention", "attention_by_factors", "linear", "grouped_matmul", "conv", "copy")
"""Functions of portmm that are a step by themselves."""


class HostBuilder(Builder):
    """A builder of a program of kernels on the processor, between which NumPy may compute: see `Builder`."""

    def __init__(
        self, graph: Graph, outputs: list[Node], split: Split, clock: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(graph, outputs, split)
        self.clock = clock
        self.writer: Writer = Writer()
        self.views: dict[Node, list[Node]] = {}
        for x in graph.nodes:
            if x.kind == "view":
                self.views.setdefault(x.inputs[0], []).append(x)
        self.until = self.last_reads()

    def last_reads(self) -> dict[Node, int]:
        """Node -> the last unit that reads it, also through views."""
        last: dict[Node, int] = {}

        def mark(x: Node, when: int) -> None:
            if last.get(x, -1) < when:
                last[x] = when
                if x.kind == "view" or x in self.split.inline:
                    for y in x.inputs:
                        mark(y, when)

        for i, unit in enumerate(self.split.units):
            for x in unit.members:
                for y in x.inputs:
                    mark(y, i)
        for x in self.outputs:
            mark(x, FOREVER)
        return last

    # Buffers.

    def leaf(self, x: Node) -> Place:
        """The buffer of an argument, copied if kernels cannot address its elements."""
        if x in self.graph.fixed:
            value = np.require(self.graph.fixed[x], x.dtype, ("A",))
            return Place(str(runtime().address(value)), 0, value, self.writer.name("held", value))
        value, text = self.graph.leaves[x.leaf], f"L{x.leaf}"
        if not numpy_arrays.addressable(value, x.dtype):
            fix = self.writer.name("f", lambda y: np.require(y, x.dtype, ("C", "A")))
            self.writer.line(f"{text} = {fix}({text})")
            value = np.require(value, x.dtype, ("C", "A"))
        self.writer.line(f"a{x.leaf} = address({text})")
        return Place(f"a{x.leaf}", 0, value, text)

    def moved(self, x: Node, base: Place) -> Place:
        """A new array with the elements of a view that neither strides nor kernels over rows can express."""
        dense, name = self.writer.name("g", lambda y: np.asarray(x.plain(y), order="C")), f"v{x.number}"
        self.writer.flush()
        self.writer.line(f"{name} = {dense}({base.text})")
        self.writer.line(f"h{x.number} = address({name})")
        self.kernels.append(Kernel("numpy", x.name, (x.where,)))
        return Place(f"h{x.number}", 0, np.asarray(x.plain(base.like), order="C"), name)

    def returned(self, x: Node) -> bool:
        """Test whether the buffer of a node is returned to the caller."""
        return x in self.outputs or any(self.returned(y) for y in self.views.get(x, ()))

    def allocate(self, x: Node, shape: tuple[int, ...] | None = None, fusing: Expressions | None = None) -> Place:
        """Allocate a buffer for a node: a returned array, or memory between kernels."""
        like = np.empty(x.shape if shape is None else shape, x.dtype)
        if self.returned(x):
            dtype, name = self.writer.name("t", np.dtype(x.dtype)), f"o{x.number}"
            self.writer.line(f"{name} = empty({like.shape}, {dtype})")
            self.writer.line(f"p{x.number} = address({name})")
            return Place(f"p{x.number}", 0, like, name)
        arena, until = self.writer.arena, self.until.get(x, self.now)
        offset = self.reusable(x, fusing) if fusing is not None else None
        if offset is None:
            offset = arena.take(like.nbytes, self.now, until)
        else:
            arena.keep(offset, until)
        return Place(ARENA, offset, like, self.writer.arena_array(like, offset))

    def reusable(self, x: Node, fusing: Expressions) -> int | None:
        """The offset of an operand whose memory the result may reuse: same shape and type, and no later reads.

        A product's own operands are excluded: other tiles read their rows and columns after the result is stored.
        """
        if x.shape != fusing.shape:
            return None
        product = fusing.product.inputs if fusing.product is not None else ()
        multiplied = [self.buffers[y] for y in product if y in self.buffers]
        others = [*fusing.written, *fusing.nodes.values()]
        for y, buffer in fusing.nodes.items():
            span = range(buffer.offset, buffer.offset + buffer.like.nbytes)
            if (
                buffer.root == ARENA and self.until.get(y, FOREVER) <= self.now and y in self.split.of
                and (y.shape, y.dtype) == (x.shape, x.dtype) and buffer.like.flags.c_contiguous
                and not any(p.root == ARENA and p.offset in span for p in multiplied)
                and not any(p.root == ARENA and p is not buffer and p.offset in span for p in others)
            ):  # fmt: skip
                return buffer.offset
        return None

    # Steps.

    def ready(self, make: Callable[[], T]) -> T:
        """The launch of a step, whose kernel is selected and built; None of a builder that only lists it."""
        return make()

    def route(self, p: Problem) -> Any:
        """The kernel of a product, as of `ready`."""
        return routes.route_of_rows(p)

    def step(self, unit: Unit) -> None:
        """Add the kernel or the call of a unit, and the clock's call after it."""
        super().step(unit)
        self.tick()

    def copy(self, source: Place, to: Place, x: Node) -> None:
        """Add a copy of elements into a contiguous buffer, and the clock's call after it."""
        super().copy(source, to, x)
        self.tick()

    def tick(self) -> None:
        """Call the clock, if there is one, after what was added."""
        if self.clock is not None:
            self.writer.flush()
            self.writer.line(f"{self.writer.name('clock', self.clock)}({len(self.kernels)})")

    def product(self, unit: Unit) -> None:
        """Add a product, with its epilogue if it has one.

        Raises:
            ScheduleError: no kernel computes it with its epilogue.
        """
        x = unit.members[0]
        if x.kind == "conv":
            return plan_windows.add_convolution(self, unit)
        if x.kind == "norm":
            return plan_windows.add_norm(self, unit)
        weight, alone = self.weight(x.inputs[1]), len(unit.members) == 1
        if alone and x.inputs[1].dtype is not None and x.template is None:
            return self.plain_product(x)
        if weight is None or (len(weight.shape) == 2 and hasattr(weight, "owner")):
            return super().product(unit)
        if alone:
            return self.call(unit)
        raise ScheduleError("a product with such a weight takes no epilogue")

    def pool(self, unit: Unit) -> None:
        """Add kernels of pooling."""
        plan_windows.add_pool(self, unit)

    def text(self, x: Node) -> str:
        """An array, a weight or a number in the program's text."""
        if x.kind == "weight" and x in self.graph.fixed:
            return self.writer.name("held", self.graph.fixed[x])
        return f"L{x.leaf}" if x.kind in ("weight", "number") else self.buffer_of(x).text

    def program(self, result: Any) -> tuple[Callable[[list[Any]], Any], str]:
        """The function of the arrays, weights and numbers of a call, and its text."""
        return self.writer.program(len(self.graph.leaves), self.result(result))

    def call(self, unit: Unit) -> None:
        """Add a call between kernels: of NumPy, or of a function that writes an array which it is given.

        Arrays of a call of their own are new memory in each, whose first touch may take longer than what is computed.
        """
        x, *items = unit.members
        launch = getattr(x.plain, "launch", None)
        if launch is not None and self.launched(x, launch):
            return
        operands = [self.text(y) for y in x.inputs]
        if getattr(x.plain, "takes_out", False):
            to = self.buffers[x] = self.allocate(x)
            self.writer.flush()
            self.writer.line(f"{self.writer.name('g', x.plain)}({', '.join([*operands, to.text])})")
        else:
            function = self.writer.name("g", _checked(x, items))
            self.writer.flush()
            self.writer.line(f"c{x.number} = {function}(S, {', '.join(operands)})")
            for i, y in enumerate(items or [x]):
                self.writer.line(f"q{y.number} = address(c{x.number}[{i}])")
                self.buffers[y] = Place(f"q{y.number}", 0, np.empty(y.shape, y.dtype), f"c{x.number}[{i}]")
        kind = "product" if x.kind == "matmul" else x.name if x.name in OWN else "numpy"
        notes = tuple(x.note.split(", ")) if x.note else ()
        self.kernels.append(Kernel(kind, x.name, (x.where,), notes, types=_types(x)))

    def launch_operands(self, x: Node) -> list[Place] | None:
        """Buffers like the operands of a function of portmm; None if their alignment may differ between calls.

        Narrow operands are memory between kernels, or constants: those of a call may be less aligned. Arguments of a
        call may overlap, as those of the next may not, so memory of their own stands for them.
        """
        places = [self.buffer_of(y) for y in x.inputs if y.kind not in ("weight", "number")]
        narrow = any(p.like.dtype != np.float32 and p.root != ARENA and not p.root.isdigit() for p in places)
        if len(places) < len(x.inputs) or narrow:
            return None
        return [p if p.root == ARENA or p.root.isdigit() else replace(p, like=_disjoint(p.like)) for p in places]

    def launched(self, x: Node, launch_of: Callable[..., Launch]) -> bool:
        """Add the launch of a function of portmm that is one kernel; False if it depends on more than addresses."""
        places = self.launch_operands(x)
        if places is None:
            return False
        result = np.empty(x.shape, x.dtype)
        try:
            launch = launch_of(result, *(p.like for p in places))
        except (BuildError, ScheduleError, TraceError):
            return False
        known = [*places, Place("", 0, result, "")]
        at = [int(row[0]) + _first(y) for row, y in zip(launch.table, launch.arrays, strict=True)]
        owners = [next((p for p in known if _holds(p.like, y)), None) for y in at]
        if launch.scalars is not None or None in owners:
            return False
        to = self.buffers[x] = self.allocate(x)
        start, w = len(self.writer.table), self.writer
        for address, owner, (_, *strides) in zip(at, owners, launch.table.tolist(), strict=True):
            assert owner is not None  # noqa: S101 - tested above
            place = to if owner.like is result else owner
            w.put("T", len(w.table), place.root, place.offset + address - _first(owner.like))
            w.table += [0, *strides]
        numbers = [y for i, y in enumerate(launch.numbers) if i not in (4, 8, 12)]
        w.execute(launch.route, numbers, [None, None, None, (TABLE, 8 * start), None])
        detail = " x ".join(map(str, (*places[0].like.shape[:-1], places[1].like.shape[-1], x.shape[-1])))
        notes = tuple(x.note.split(", ")) if x.note else ()
        self.kernels.append(Kernel(x.name, x.name, (x.where,), notes, detail=detail, types=_types(x)))
        return True

    def weight(self, x: Node) -> Any:
        """The packed weight of a node, or None."""
        if x.kind != "weight":
            return None
        return self.graph.fixed[x] if x in self.graph.fixed else self.graph.leaves[x.leaf]

    def right(self, x: Node) -> Place:
        """The buffer of B of a product."""
        weight = self.weight(x)
        if weight is None:
            return self.buffer_of(x)
        name = self.writer.name("weight", weight)  # the program stores its address, so it keeps it alive
        return Place(str(runtime().address(weight.owner)), 0, weight.owner, name)

    def plain_product(self, x: Node) -> None:
        """Add a product without epilogue."""
        a, b = self.buffer_of(x.inputs[0]), self.right(x.inputs[1])
        right = b.like if self.weight(x.inputs[1]) is None else self.weight(x.inputs[1])
        to = self.allocate(x)
        call = reduce_call(a.like, right, to.like, numpy_arrays.types_of(a.like.dtype, b.like.dtype, x.dtype))
        v = call.numbers()
        addresses: list[Any] = [(a.root, a.offset), (b.root, b.offset), (to.root, to.offset), None, None]
        numbers = [*v[:4], *v[5:8], *v[9:12], *v[13:]]
        self.buffers[x] = to
        route = self.route(call.problem)
        self.writer.execute(route, numbers, addresses, call.walk.outer)
        notes = (x.note,) if x.note else ()
        p = call.problem
        self.kernels.append(Kernel("product", x.name, (x.where,), detail=str(p), notes=notes, problem=p, flop=p.flops))

    def over_rows(self, fusing: Expressions, text: str, size: tuple[int, int, int]) -> Any:
        """A kernel over rows for expressions, spelled `text`, of `size` rows, columns and items."""
        route = self.ready(partial(_rows_route, fusing, text, size))
        return route, [size[0], size[1], 1, size[2], *(0,) * 9]

    def multiply(
        self, operands: Operands, size: tuple[int, int], fusing: Expressions, w: Walk, text: str
    ) -> tuple[Problem, Any]:
        """The problem of a product of `size` k and n with an epilogue `text`, and its kernel."""
        (a, b, c), (k, n), (m, rows), (items, apart) = operands, size, w.rows, w.batch
        assert fusing.product is not None  # noqa: S101 - of a product
        left = _left(a, m, k, rows[0])
        layout, packed_layout, storage, b_k, b_n = _right(b, self.weight(fusing.product.inputs[1]), k, n)
        word = spell(numpy_arrays.name_of(a.like.dtype), storage, numpy_arrays.name_of(c.like.dtype))
        p = Problem(
            m, n, k, word, items, left.layout, layout, "row", packed_layout, config.current().deterministic,
            fused=text,
        )  # fmt: skip
        numbers = [m, n, k, items, left.row, left.col, apart[0], b_k, b_n, apart[1], rows[2] or n, 1, apart[2]]
        return p, (self.route(p), numbers)

    def launch(self, kernel: Any, operands: tuple[Place, ...], fusing: Expressions, moved: tuple[int, ...]) -> None:
        """Add a run of a kernel, on operands of a product, if it is one, and of expressions, advanced by elements."""
        (route, numbers), at = kernel, zip(operands, moved, strict=False)
        addresses: list[Any] = [(y.root, y.offset + i * y.like.itemsize) for y, i in at] or [None] * 3
        table = self.writer.operands(fusing.buffers, fusing.strides, moved[len(operands) :])
        self.writer.execute(route, numbers, [*addresses, table, self.writer.pass_numbers(fusing.numbers, fusing.fixed)])


def _rows_route(fusing: Expressions, text: str, size: tuple[int, int, int]) -> Any:
    """The route of a kernel over rows; one of the base set may take the number of columns as an argument."""
    from portmm.dispatch import base_kernels

    route = None
    if base_kernels.active():
        route = base_kernels.rows_route(text, size, len(fusing.operands))
        any_columns = None if route or fusing.numbers else base_kernels.of_any_columns(text, size[1])
        if any_columns:
            route = base_kernels.rows_route(any_columns, size, len(fusing.operands))
            fusing.fixed = (float(size[1]),) if route else ()
    if route is None:
        from portmm.dispatch import cpu_routes
        from portmm.spec.epilogue import parse

        route = cpu_routes.expressions_route(parse(text), size)
    return route


def _first(x: Any) -> int:
    """The address of the first element of an array."""
    return int(x.__array_interface__["data"][0])


def _disjoint(x: Any) -> Any:
    """An array of the layout and the alignment of another, in memory of its own."""
    low, end = numpy_arrays.span_of(x.shape, x.strides, x.itemsize)
    space = np.empty(end - low + numpy_arrays.LINE, np.uint8)
    start = (_first(x) + low - _first(space)) % numpy_arrays.LINE
    return np.ndarray(x.shape, x.dtype, space, start - low, x.strides)


def _holds(x: Any, address: int) -> bool:
    """Whether an address is of an element of an array, or between elements."""
    low, end = numpy_arrays.span_of(x.shape, x.strides, x.itemsize)
    return low <= address - _first(x) < end


def _left(a: Place, m: int, k: int, row: int) -> numpy_arrays.Operand:
    """The layout of A as an m x k matrix with this row stride."""
    size = a.like.itemsize
    step = size if k == 1 else a.like.strides[-1]
    return numpy_arrays.canonical(np.lib.stride_tricks.as_strided(a.like, (m, k), (row * size, step)), a.like.dtype)


def _right(b: Place, weight: Any, k: int, n: int) -> tuple[str, str, str, int, int]:
    """The layout, packed layout, storage type and strides of B."""
    if weight is None:
        layout = numpy_arrays.canonical(b.like[(0,) * (b.like.ndim - 2)], b.like.dtype)
        storage = numpy_arrays.name_of(b.like.dtype)
        if n == 1 and layout.row == 1:
            return "col", "", storage, 1, k
        return layout.layout, "", storage, layout.row, layout.col
    packed = type(weight).__name__ == "Packed"
    return "packed" if packed else "codes", weight.family, weight.element if packed else "u4", weight.b_k, weight.b_n


def _checked(x: Node, items: list[Node]) -> Callable[..., tuple[Any, ...]]:
    """The call of a node: checks shapes and types of its results, and returns them contiguous."""
    expected = [(y.shape, y.dtype) for y in items or [x]]

    def run(state: Any, *operands: Any) -> tuple[Any, ...]:
        result = x.plain(*operands)
        results = []
        values = [item.plain(result) for item in items] or [result]  # the other items are not read
        for value, (shape, dtype) in zip(values, expected, strict=True):
            y = np.asarray(value)
            if y.shape != shape or y.dtype != dtype:
                raise ChangedError
            usable = y.flags.c_contiguous and y.flags.aligned and not np.may_share_memory(y, state[0])
            results.append(y if usable else y.copy())
        return tuple(results)

    return run


def _types(x: Node) -> tuple[str, str] | None:
    """The types of the operands and of the result of attention."""
    return (numpy_arrays.name_of(x.inputs[0].dtype), numpy_arrays.name_of(x.dtype)) if x.name in ATTENDS else None
