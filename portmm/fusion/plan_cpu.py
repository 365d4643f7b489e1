"""Units become a program: kernels, and where everything lies.

Owns `Builder`, which finds a kernel for each unit of a split graph, and lays out what
lies between them. Imports `arrays.call`, `dispatch.cpu`, `fusion.unit_expressions`, `trace.buffers`, `fusion.program_cpu`, `fusion.partition`, `ops.dynamic_m`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.arrays.call import reduce_call
from portmm.dispatch import config
from portmm.errors import ScheduleError
from portmm.fusion.partition import LEAVES
from portmm.fusion.program_cpu import ARENA, ChangedError, Kernel, Writer
from portmm.fusion.unit_expressions import Expressions, kernel_type
from portmm.ops import dynamic_m
from portmm.ops.rowwise import BYTES_PER_SECOND, FORK
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import spell
from portmm.spec.problem import Problem
from portmm.trace.buffers import Place, looked, walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.fusion.graph import Graph, Node
    from portmm.fusion.partition import Split, Unit

FOREVER = 1 << 30
OWN = ("attention", "linear")
"""Functions of portmm's that are called as they are."""


class Builder:
    """Makes a program.

    Args:
        graph: what a function does.
        outputs: what is wanted.
        split: in which kernels.
    """

    def __init__(self, graph: Graph, outputs: list[Node], split: Split) -> None:
        self.graph, self.outputs, self.split = graph, outputs, split
        self.places: dict[Node, Place] = {}
        self.writer = Writer()
        self.kernels: list[Kernel] = []
        self.now = 0
        self.looks: dict[Node, list[Node]] = {}
        for x in graph.nodes:
            if x.kind == "view":
                self.looks.setdefault(x.inputs[0], []).append(x)
        self.until = self.last_reads()

    def last_reads(self) -> dict[Node, int]:
        """Node -> the last unit that reads it, through whatever views."""
        found: dict[Node, int] = {}

        def mark(x: Node, when: int) -> None:
            if found.get(x, -1) < when:
                found[x] = when
                if x.kind == "view" or x in self.split.inline:
                    for y in x.inputs:
                        mark(y, when)

        for i, unit in enumerate(self.split.units):
            for x in unit.members:
                for y in x.inputs:
                    mark(y, i)
        for x in self.outputs:
            mark(x, FOREVER)
        return found

    # Places.

    def place(self, x: Node) -> Place:
        """Where an array lies."""
        if x not in self.places:
            self.places[x] = self.leaf(x) if x.kind in LEAVES else self.view(x)
        return self.places[x]

    def leaf(self, x: Node) -> Place:
        """An array of a call, copied if kernels cannot address its elements."""
        value, text = self.graph.leaves[x.leaf], f"L{x.leaf}"
        if not numpy_arrays.addressable(value, x.dtype):
            fix = self.writer.name("f", lambda y: np.require(y, x.dtype, ("C", "A")))
            self.writer.line(f"{text} = {fix}({text})")
            value = np.require(value, x.dtype, ("C", "A"))
        self.writer.line(f"a{x.leaf} = address({text})")
        return Place(f"a{x.leaf}", 0, value, text)

    def view(self, x: Node) -> Place:
        """Another look at a place, or a copy where that cannot be had."""
        base, function = self.place(x.inputs[0]), self.writer.name("f", x.plain)
        # What the caller gets is made by every call: without a function in between it takes half as long.
        text = f"{base.text}.reshape({x.shape})" if x.name == "reshape" else f"{function}({base.text})"
        found = looked(base, x.plain, text)
        if found is not None:
            return found
        if x.name == "reshape" and kernel_type(x.dtype):
            to = self.buffer(x, base.like.shape)
            self.copy(base, to, x)
            made = looked(to, x.plain, f"{function}({to.text})")
            assert made is not None  # noqa: S101 - it is dense
            return made
        dense, name = self.writer.name("g", np.ascontiguousarray), f"v{x.number}"
        self.writer.flush()
        self.writer.line(f"{name} = {dense}({function}({base.text}))")
        self.writer.line(f"h{x.number} = address({name})")
        self.kernels.append(Kernel("numpy", x.name, (x.where,)))
        return Place(f"h{x.number}", 0, np.ascontiguousarray(x.plain(base.like)), name)

    def kept(self, x: Node) -> bool:
        """What is stored for a node goes to the caller."""
        return x in self.outputs or any(self.kept(y) for y in self.looks.get(x, ()))

    def buffer(self, x: Node, shape: tuple[int, ...] | None = None, fusing: Expressions | None = None) -> Place:
        """New memory for a node: of the caller, or between kernels."""
        like = np.empty(x.shape if shape is None else shape, x.dtype)
        if self.kept(x):
            dtype, name = self.writer.name("t", np.dtype(x.dtype)), f"o{x.number}"
            self.writer.line(f"{name} = empty({like.shape}, {dtype})")
            self.writer.line(f"p{x.number} = address({name})")
            return Place(f"p{x.number}", 0, like, name)
        arena, until = self.writer.arena, self.until.get(x, self.now)
        at = self.dying(x, fusing) if fusing is not None else None
        if at is None:
            at = arena.take(like.nbytes, self.now, until)
        else:
            arena.keep(at, until)
        return Place(ARENA, at, like, self.writer.room(like, at))

    def dying(self, x: Node, fusing: Expressions) -> int | None:
        """The memory of an operand, for a result: it lies as that does, and nobody reads it later.

        A product's own operands are none such: other tiles read their rows and columns after the result is stored.
        """
        if x.shape != fusing.shape:
            return None
        product = fusing.product.inputs if fusing.product is not None else ()
        multiplied = [self.places[y] for y in product if y in self.places]
        others = [*fusing.written, *fusing.nodes.values()]
        for y, place in fusing.nodes.items():
            here = range(place.offset, place.offset + place.like.nbytes)
            if (
                place.root == ARENA and self.until.get(y, FOREVER) <= self.now and y in self.split.of
                and (y.shape, y.dtype) == (x.shape, x.dtype) and place.like.flags.c_contiguous
                and not any(p.root == ARENA and p.offset in here for p in multiplied)
                and not any(p.root == ARENA and p is not place and p.offset in here for p in others)
            ):  # fmt: skip
                return place.offset
        return None

    # Steps.

    def step(self, unit: Unit) -> None:
        """What runs for a unit.

        Raises:
            ScheduleError: there is no such kernel.
        """
        if unit.kind == "rows":
            self.rows(unit)
        elif unit.kind == "call":
            self.call(unit)
        elif len(unit.members) > 1:
            self.fused_product(unit)
        elif unit.members[0].inputs[1].dtype is None:
            self.call(unit)  # a weight of four bits remembers its calls by itself
        else:
            self.product(unit)

    def text(self, x: Node) -> str:
        """An array, a weight or a number in the program's text."""
        return f"L{x.leaf}" if x.kind in ("weight", "number") else self.place(x).text

    def call(self, unit: Unit) -> None:
        """NumPy, between kernels."""
        x, *items = unit.members
        given = [self.text(y) for y in x.inputs]
        function = self.writer.name("g", _checked(x, items))
        self.writer.flush()
        self.writer.line(f"c{x.number} = {function}(S, {', '.join(given)})")
        for i, y in enumerate(items or [x]):
            self.writer.line(f"q{y.number} = address(c{x.number}[{i}])")
            self.places[y] = Place(f"q{y.number}", 0, np.empty(y.shape, y.dtype), f"c{x.number}[{i}]")
        kind = "product" if x.kind == "matmul" else x.name if x.name in OWN else "numpy"
        self.kernels.append(Kernel(kind, x.name, (x.where,), tuple(x.note.split(", ")) if x.note else ()))

    def weight(self, x: Node) -> Any:
        """The packed weight that a node is, or None."""
        return (self.graph.fixed[x] if x.leaf < 0 else self.graph.leaves[x.leaf]) if x.kind == "weight" else None

    def right(self, x: Node) -> Place:
        """Where the second operand of a product lies."""
        weight = self.weight(x)
        if weight is None:
            return self.place(x)
        self.writer.name("held", weight)  # the program keeps what it has the address of
        return Place(str(runtime().address(weight.owner)), 0, weight.owner, f"L{x.leaf}")

    def product(self, unit: Unit) -> None:
        """A product alone."""
        (x,) = unit.members
        a, b = self.place(x.inputs[0]), self.right(x.inputs[1])
        right = b.like if self.weight(x.inputs[1]) is None else self.weight(x.inputs[1])
        to = self.buffer(x)
        made = reduce_call(a.like, right, to.like, numpy_arrays.types_of(a.like.dtype, b.like.dtype, x.dtype))
        v = made.numbers()
        where: list[Any] = [(a.root, a.offset), (b.root, b.offset), (to.root, to.offset), None, None]
        numbers = [*v[:4], *v[5:8], *v[9:12], *v[13:]]
        self.writer.execute(dynamic_m.route(made.problem), numbers, where, made.walk.outer)
        self.places[x] = to
        notes = (x.note,) if x.note else ()
        self.kernels.append(Kernel("product", x.name, (x.where,), detail=str(made.problem), notes=notes))

    def expressions(self, unit: Unit, product: Node | None = None) -> Expressions:
        """The expressions of a unit."""

        def inside(x: Node) -> bool:
            return self.split.of.get(x) is unit or x in self.split.inline

        return Expressions(unit.shape, inside, self.place, product)

    def store(self, stored: list[Node], fusing: Expressions) -> None:
        """Memory for what a unit writes."""
        values = [fusing.of(x) for x in stored]
        for x, value in zip(stored, values, strict=True):
            to = self.buffer(x, fusing=fusing)
            self.places[x] = to
            fusing.write(value, to)

    def rows(self, unit: Unit) -> None:
        """Expressions over rows."""
        fusing = self.expressions(unit)
        self.store(unit.stored, fusing)
        self.go_over(fusing, whole=_counts(unit))
        shape = " x ".join(map(str, unit.shape))
        self.kernels.append(Kernel("rows", unit.members[0].name, _lines(unit), _names(unit), fusing.text(), shape))

    def go_over(self, fusing: Expressions, *, whole: bool) -> None:
        """Run expressions over rows."""
        from portmm.dispatch import cpu as cpu_dispatch

        shape, places = fusing.shape, fusing.places
        steps = [p.strides(shape) for p in places]
        w, columns = walk(shape[:-1], [s[:-1] for s in steps], whole=whole), [s[-1] for s in steps]
        fusing.settle(w, columns)
        size = (w.rows[0], shape[-1], w.batch[0])
        bytes_ = size[0] * size[1] * size[2] * 4 * len(places)
        workers = config.get_num_threads() if bytes_ > FORK * BYTES_PER_SECOND else 1
        route = cpu_dispatch.rows_route(fusing.text(), size, config.target(), workers)
        strides = list(zip(w.batch[1], w.rows[1], columns, strict=True))
        for moved in w.repeats:
            table, numbers = self.writer.operands(places, strides, moved), self.writer.give(fusing.numbers)
            self.writer.execute(route, [size[0], size[1], 1, size[2], *(0,) * 9], [None, None, None, table, numbers])

    def copy(self, source: Place, to: Place, x: Node) -> None:
        """Elements moved to where they follow each other."""
        fusing = Expressions(source.like.shape, lambda _: False, self.place)
        fusing.write(fusing.load(source), to)
        self.go_over(fusing, whole=False)
        self.kernels.append(Kernel("copy", x.name, (x.where,), detail=" x ".join(map(str, x.shape))))

    def fused_product(self, unit: Unit) -> None:
        """A product, and what becomes of its sums."""
        x = unit.members[0]
        fusing = self.expressions(unit, x)
        stored = sorted(unit.stored, key=lambda y: y.dtype.kind in "iub")
        if stored[0].dtype.kind in "iub":
            raise ScheduleError("its results are integers or masks, which kernels write beside floats")
        weight = self.weight(x.inputs[1])
        if weight is not None and (len(weight.shape) > 2 or not hasattr(weight, "owner")):
            raise ScheduleError("such a weight takes nothing else")
        a, b = self.place(x.inputs[0]), self.right(x.inputs[1])
        self.store(stored, fusing)
        c, k, n = fusing.written[0], x.inputs[0].shape[-1], x.shape[-1]
        batch = x.shape[:-2]
        b_steps = (*(b.strides((*batch, k, n))[:-2] if weight is None else (0,) * len(batch)), 0)
        steps = [p.strides(x.shape) for p in fusing.places]
        outer = [a.strides((*x.shape[:-1], k))[:-1], b_steps, c.strides(x.shape)[:-1], *(s[:-1] for s in steps)]
        w, columns = walk(x.shape[:-1], outer, 1, whole=_counts(unit)), [s[-1] for s in steps]
        fusing.settle(w, columns, 3)
        (m, rows), (items, apart) = w.rows, w.batch
        left = _left(a, m, k, rows[0])
        layout, family, held, b_k, b_n = _right(b, weight, k, n)
        word = spell(numpy_arrays.name_of(a.like.dtype), held, numpy_arrays.name_of(c.like.dtype))
        p = Problem(
            m, n, k, word, items, left.layout, layout, "row", family, config.current().deterministic,
            fused=fusing.text(),
        )  # fmt: skip
        route = dynamic_m.route(p)
        numbers = [m, n, k, items, left.row, left.col, apart[0], b_k, b_n, apart[1], rows[2] or n, 1, apart[2]]
        strides = list(zip(apart[3:], rows[3:], columns, strict=True))
        for moved in w.repeats:
            at = zip((a, b, c), moved, strict=False)
            where: list[Any] = [(y.root, y.offset + i * y.like.itemsize) for y, i in at]
            where += [self.writer.operands(fusing.places, strides, moved[3:]), self.writer.give(fusing.numbers)]
            self.writer.execute(route, numbers, where)
        self.kernels.append(Kernel("product", x.name, _lines(unit), _names(unit), fusing.text(), str(p)))


def _left(a: Place, m: int, k: int, row: int) -> numpy_arrays.Operand:
    """How A lies, as a matrix whose rows are so far apart."""
    size = a.like.itemsize
    step = size if k == 1 else a.like.strides[-1]
    return numpy_arrays.canonical(np.lib.stride_tricks.as_strided(a.like, (m, k), (row * size, step)), a.like.dtype)


def _right(b: Place, weight: Any, k: int, n: int) -> tuple[str, str, str, int, int]:
    """How B lies: its layout, family, type and strides."""
    if weight is None:
        found = numpy_arrays.canonical(b.like[(0,) * (b.like.ndim - 2)], b.like.dtype)
        held = numpy_arrays.name_of(b.like.dtype)
        if n == 1 and found.row == 1:
            return "col", "", held, 1, k
        return found.layout, "", held, found.row, found.col
    packed = type(weight).__name__ == "Packed"
    return "packed" if packed else "codes", weight.family, weight.element if packed else "u4", weight.b_k, weight.b_n


def _counts(unit: Unit) -> bool:
    """Something in a unit depends on the numbers of rows and columns."""
    return any(x.of("index") for x in unit.members)


def _lines(unit: Unit) -> tuple[str, ...]:
    return tuple(dict.fromkeys(x.where for x in unit.members))


def _names(unit: Unit) -> tuple[str, ...]:
    return tuple(x.name for x in unit.members[1:])


def _checked(x: Node, items: list[Node]) -> Callable[..., tuple[Any, ...]]:
    """The call of a node, whose results must be what they were, and are made dense."""
    wanted = [(y.shape, y.dtype) for y in items or [x]]

    def run(held: Any, *given: Any) -> tuple[Any, ...]:
        found = x.plain(*given)
        made = []
        for value, (shape, dtype) in zip(found if items else (found,), wanted, strict=True):
            y = np.asarray(value)
            if y.shape != shape or y.dtype != dtype:
                raise ChangedError
            kept = y.flags.c_contiguous and y.flags.aligned and not np.may_share_memory(y, held[0])
            made.append(y if kept else y.copy())
        return tuple(made)

    return run
