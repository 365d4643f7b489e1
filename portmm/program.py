"""Units become a program: kernels, memory, and the Python that calls them.

Owns `build`, which finds a kernel for each unit of a split graph, lays out what lies
between them, and writes one function that fills in addresses and runs the kernels,
one after the other. Imports `api`, `call`, `dispatch`, `places`, `splitter`. All shapes and
strides are literals in that function; it is made once for each kind of arguments.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm import api, arrays, settings
from portmm.call import reduce_call
from portmm.dtype import spell
from portmm.errors import ScheduleError
from portmm.expr import apply, const, node
from portmm.fused import AXES, C, Fused, Operand, acc, load
from portmm.fusing import BYTES_PER_SECOND, FORK, substituted
from portmm.places import Arena, Place, looked, walk
from portmm.problem import Problem
from portmm.run.host import runtime
from portmm.splitter import LEAVES

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.expr import Expr
    from portmm.graph import Graph, Node
    from portmm.splitter import Split, Unit

ROW = 1 + len(AXES)
"""Integers of an operand in the argument block: an address, strides."""
MOST_KEPT = 1 << 26
"""Bytes of memory between kernels that a function keeps for its next call."""
FOREVER = 1 << 30


class ChangedError(Exception):
    """A call of NumPy between kernels gave another shape or type than before."""


@dataclass(eq=False, slots=True)
class Kernel:
    """One step of a program.

    Attributes:
        kind: "product", "rows", "copy" or "numpy".
        what: the operations, in the user's words.
        lines: where they are.
        fused: what it computes beside the first.
        text: the fused expressions, or nothing.
        detail: the problem, or the shape that is gone over.
        notes: what else there is to say.
    """

    kind: str
    what: str
    lines: tuple[str, ...]
    fused: tuple[str, ...] = ()
    text: str = ""
    detail: str = ""
    notes: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class State:
    """Memory of a running call: what lies between kernels, operands and numbers of all kernels."""

    arena: Any
    base: int
    table: Any
    at: int
    numbers: Any
    numbers_at: int
    arrays: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Program:
    """What runs for one kind of arguments.

    Attributes:
        run: a function of the arrays of a call and a state.
        kernels: what it does.
        source: its text.
        make: makes a state.
        free: states that no call uses.
    """

    run: Callable[[list[Any], State], Any]
    kernels: list[Kernel]
    source: str
    make: Callable[[], State]
    bytes: int
    free: list[State] = field(default_factory=list)

    def __call__(self, leaves: list[Any]) -> Any:
        """Run it on the arrays, weights and numbers of a call."""
        try:
            state = self.free.pop()
        except IndexError:
            state = self.make()
        found = self.run(leaves, state)
        if self.bytes <= MOST_KEPT and len(self.free) < 2:
            self.free.append(state)
        return found


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
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"empty": np.empty, "execute": runtime().execute, "address": runtime().address}
        self.arena = Arena()
        self.offsets: dict[str, int] = {}
        self.template: list[int] = []
        self.fixed: list[tuple[int, int]] = []
        self.filled: list[str] = []
        self.numbers: list[str] = []
        self.held: list[tuple[int, tuple[int, ...], Any]] = []
        self.kernels: list[Kernel] = []
        self.now = 0
        self.read = self.last_reads()

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

    def name(self, prefix: str, value: Any) -> str:
        """A name for something in the text."""
        made = f"{prefix}{len(self.names)}"
        self.names[made] = value
        return made

    # Places.

    def place(self, x: Node) -> Place:
        """Where an array lies."""
        if x not in self.places:
            self.places[x] = self.leaf(x) if x.kind in LEAVES else self.view(x)
        return self.places[x]

    def leaf(self, x: Node) -> Place:
        """An array of a call, copied if kernels cannot address its elements."""
        value = self.graph.leaves[x.leaf]
        text = f"L{x.leaf}"
        if not arrays.addressable(value, x.dtype):
            fix = self.name("f", lambda y: np.require(y, x.dtype, ("C", "A")))
            self.lines.append(f"{text} = {fix}({text})")
            value = np.require(value, x.dtype, ("C", "A"))
        self.lines.append(f"a{x.leaf} = address({text})")
        return Place(f"a{x.leaf}", 0, value, text)

    def view(self, x: Node) -> Place:
        """Another look at a place, or a copy where that cannot be had."""
        base = self.place(x.inputs[0])
        function = self.name("f", x.plain)
        found = looked(base, x.plain, f"{function}({base.text})")
        if found is not None:
            return found
        if x.name == "reshape" and x.dtype.name in (*_NAMES, "bool"):
            to = self.buffer(x, base.like.shape)
            self.copy(base, to, x)
            made = looked(to, x.plain, f"{function}({to.text})")
            assert made is not None  # noqa: S101 - it is dense
            return made
        dense, made = self.name("g", np.ascontiguousarray), f"v{x.number}"
        self.lines += [f"{made} = {dense}({function}({base.text}))", f"w{x.number} = address({made})"]
        self.kernels.append(Kernel("numpy", x.name, (x.where,)))
        return Place(f"w{x.number}", 0, np.ascontiguousarray(x.plain(base.like)), made)

    def kept(self, x: Node) -> bool:
        """What is stored for a node goes to the caller."""
        stack, seen = [x], set()
        while stack:
            y = stack.pop()
            if y in self.outputs:
                return True
            if y not in seen:
                seen.add(y)
                stack += [z for z in self.graph.nodes if z.kind == "view" and y in z.inputs]
        return False

    def buffer(self, x: Node, shape: tuple[int, ...] | None = None, instead: Node | None = None) -> Place:
        """New memory for a node: of the caller, or between kernels."""
        shape = x.shape if shape is None else shape
        like = np.empty(shape, x.dtype)
        if self.kept(x):
            dtype, made = self.name("t", np.dtype(x.dtype)), f"o{x.number}"
            self.lines += [f"{made} = empty({shape}, {dtype})", f"p{x.number} = address({made})"]
            return Place(f"p{x.number}", 0, like, made)
        until = self.read.get(x, self.now)
        if instead is not None:
            at = self.places[instead].offset
            self.arena.keep(at, until)
        else:
            at = self.arena.take(like.nbytes, self.now, until)
        self.held.append((at, shape, x.dtype))
        return Place("A", at, like, f"S[{len(self.held) - 1}]")

    # Steps.

    def step(self, unit: Unit) -> None:
        """What runs for a unit."""
        if unit.kind == "call":
            self.call(unit)
        elif unit.kind == "rows":
            self.rows(unit)
        elif len(unit.members) > 1:
            self.fused_product(unit)
        elif unit.members[0].inputs[1].dtype is None:
            self.call(unit)  # a weight of four bits remembers its calls by itself
        else:
            self.product(unit)

    def call(self, unit: Unit) -> None:
        """NumPy, between kernels."""
        x, *items = unit.members
        function = self.name("g", _checked(x, items))
        given = [self.graph_text(y) for y in x.inputs]
        self.lines.append(f"c{x.number} = {function}(S, {', '.join(given)})")
        for i, y in enumerate(items or [x]):
            text = f"c{x.number}[{i}]"
            self.lines.append(f"q{y.number} = address({text})")
            self.places[y] = Place(f"q{y.number}", 0, np.empty(y.shape, y.dtype), text)
        self.kernels.append(Kernel("numpy", x.name, (x.where,)))

    def graph_text(self, x: Node) -> str:
        """An array in the text."""
        return f"L{x.leaf}" if x.kind in ("weight", "number") else self.place(x).text

    def product(self, unit: Unit) -> None:
        """A product alone."""
        (x,) = unit.members
        a, b = self.place(x.inputs[0]), self.weight(x.inputs[1])
        to = self.buffer(x)
        right = self.graph.leaves[x.inputs[1].leaf] if x.inputs[1].kind == "weight" else b.like
        held = right.owner.dtype if x.inputs[1].kind == "weight" else right.dtype
        made = reduce_call(a.like, right, to.like, arrays.types_of(a.like.dtype, held, x.dtype))
        route = self.name("r", api.route(made.problem))
        v = list(made.numbers())
        v[4], v[8], v[12] = a.address, b.address, to.address
        outer = self.name("u", made.walk.outer) if made.walk.outer is not None else "None"
        self.lines.append(f"execute({route}, {', '.join(map(str, v))}, {outer})")
        self.places[x] = to
        self.kernels.append(Kernel("product", x.name, (x.where,), detail=str(made.problem)))

    def weight(self, x: Node) -> Place:
        """The second operand of a product."""
        if x.kind != "weight":
            return self.place(x)
        owner = self.graph.leaves[x.leaf].owner
        return Place(str(runtime().address(owner)), 0, owner, f"L{x.leaf}")

    def rows(self, unit: Unit) -> None:
        """Expressions over rows."""
        fusing = _Expressions(self, unit, unit.shape)
        expressions = [fusing.of(x) for x in unit.stored]
        shape = unit.shape
        results = []
        for x in unit.stored:
            results.append(self.buffer(x, instead=fusing.dying(x)))
            self.places[x] = results[-1]
        for x, e, to in zip(unit.stored, expressions, results, strict=True):
            full = x.shape == shape
            fusing.result(x, e, to, full)
        self.go_over(shape, fusing, [*fusing.operands, *fusing.written], whole=any(x.of("index") for x in unit.members))
        self.kernels.append(
            Kernel(
                "rows", unit.members[0].name, tuple(dict.fromkeys(x.where for x in unit.members)),
                tuple(x.name for x in unit.members[1:]), fusing.text(), " x ".join(map(str, shape)),
            )
        )  # fmt: skip

    def go_over(self, shape: tuple[int, ...], fusing: _Expressions, all_: list[tuple[Place, Any]], *, whole: bool) -> None:
        """Run expressions over rows."""
        from portmm import dispatch

        steps = [p.strides(shape) for p, _ in all_]
        w = walk(shape[:-1], [s[:-1] for s in steps], whole=whole)
        columns = [s[-1] for s in steps]
        fusing.settle(w, columns)
        (m, _), (batch, _), n = w.rows, w.batch, shape[-1]
        size = (m, n, batch)
        bytes_ = m * n * batch * 4 * len(all_)
        workers = settings.get_num_threads() if bytes_ > FORK * BYTES_PER_SECOND else 1
        route = self.name("r", dispatch.rows_route(fusing.text(), size, settings.target(), workers))
        for offsets in w.repeats:
            table = self.table(all_, [(b, r, c) for b, r, c in zip(w.batch[1], w.rows[1], columns, strict=True)], offsets)
            numbers = self.call_numbers(fusing.numbers)
            self.lines.append(
                f"execute({route}, {m}, {n}, 1, {batch}{', 0' * 12}{', None' * 7}, t+{8 * table}, {numbers})"
            )

    def copy(self, source: Place, to: Place, x: Node) -> None:
        """Elements moved to where they follow each other."""
        fusing = _Expressions(self, None, source.like.shape)
        e = fusing.load(source)
        fusing.result(x, e, to, full=True)
        self.go_over(source.like.shape, fusing, [*fusing.operands, *fusing.written], whole=False)
        self.kernels.append(Kernel("copy", x.name, (x.where,), detail=" x ".join(map(str, x.shape))))

    def table(self, places: list[tuple[Place, Any]], strides: list[tuple[int, int, int]], offsets: tuple[int, ...]) -> int:
        """Operands of one run of a kernel: where they are in the table of all."""
        start = len(self.template)
        for (place, _), step, moved in zip(places, strides, offsets, strict=True):
            at = len(self.template)
            self.template += [0, *step, *(0,) * (ROW - 4)]
            offset = place.offset + moved * place.like.itemsize
            if place.root == "A":
                self.fixed.append((at, offset))
            else:
                self.lines.append(f"T[{at}] = {place.root}+{offset}")
        return start

    def call_numbers(self, leaves: list[int]) -> str:
        """The numbers of a kernel."""
        if not leaves:
            return "None"
        start = len(self.numbers)
        for i in leaves:
            self.lines.append(f"N[{len(self.numbers)}] = L{i}")
            self.numbers.append(f"L{i}")
        return f"n+{4 * start}"

    def fused_product(self, unit: Unit) -> None:
        """A product, and what becomes of its sums."""
        x = unit.members[0]
        fusing = _Expressions(self, unit, unit.shape)
        stored = sorted(unit.stored, key=lambda y: y.dtype.kind in "iub")
        if stored[0].dtype.kind in "iub":
            raise ScheduleError("its results are integers or masks, which kernels write beside floats")
        expressions = [fusing.of(y) for y in stored]
        a, b = self.place(x.inputs[0]), self.weight(x.inputs[1])
        for y, e in zip(stored, expressions, strict=True):
            to = self.buffer(y, instead=fusing.dying(y))
            self.places[y] = to
            fusing.result(y, e, to, True, first=y is stored[0])
        self.multiply(unit, fusing, a, b, stored[0])

    def multiply(self, unit: Unit, fusing: _Expressions, a: Place, b: Place, first: Node) -> None:
        """Find the kernel of a product with expressions, and run it."""
        x, c = unit.members[0], self.places[first]
        shape, k = x.shape[:-1], x.inputs[0].shape[-1]
        n = x.shape[-1]
        others = [*fusing.operands, *fusing.written[1:]]
        weight = self.graph.leaves[x.inputs[1].leaf] if x.inputs[1].kind == "weight" else None
        if weight is not None and len(weight.shape) > 2:
            raise ScheduleError("a batch of packed weights takes nothing else")
        none = (0,) * len(shape)
        a_steps, b_steps = a.strides((*shape, k)), none if weight is not None else (*b.strides((*shape[:-1], k, n))[:-2], 0)
        steps = [p.strides(x.shape) for p, _ in others]
        c_steps = c.strides(x.shape)
        whole = any(y.of("index") for y in unit.members)
        w = walk(shape, [a_steps[:-1], b_steps, c_steps[:-1], *(s[:-1] for s in steps)], 1, whole=whole)
        (m, rows), (batch, items) = w.rows, w.batch
        columns = [s[-1] for s in steps]
        fusing.settle(w, columns, 3)
        size = a.like.itemsize
        a_k = 1 if k == 1 else a.like.strides[-1] // size
        left = arrays.canonical(np.lib.stride_tricks.as_strided(a.like, (m, k), (rows[0] * size, a_k * size)), a.like.dtype)
        if weight is None:
            right = arrays.canonical(b.like[(0,) * (b.like.ndim - 2)], b.like.dtype)
            b_k, b_n, layout, family, b_type = right.row, right.col, right.layout, "", arrays.name_of(b.like.dtype)
            if n == 1 and b_k == 1:
                b_n, layout = k, "col"
        else:
            b_k, b_n, layout, family, b_type = weight.b_k, weight.b_n, "packed", weight.family, weight.dtype
            if type(weight).__name__ != "Packed":
                layout, b_type = "codes", "u4"
        word = spell(arrays.name_of(a.like.dtype), b_type, arrays.name_of(c.like.dtype))
        p = Problem(
            m, n, k, word, batch, left.layout, layout, "row", family, settings.current().deterministic,
            fused=fusing.text(),
        )  # fmt: skip
        route = self.name("r", api.route(p))
        for moved in w.repeats:
            at = [f"{y.root}+{y.offset + i * y.like.itemsize}" for y, i in zip((a, b, c), moved, strict=False)]
            strides = list(zip(items[3:], rows[3:], columns, strict=True))
            table = self.table(others, strides, moved[3:])
            numbers = self.call_numbers(fusing.numbers)
            self.lines.append(
                f"execute({route}, {m}, {n}, {k}, {batch}, {at[0]}, {left.row}, {left.col}, {items[0]}, "
                f"{at[1]}, {b_k}, {b_n}, {items[1]}, {at[2]}, {rows[2] or n}, 1, {items[2]}{', None' * 7}, "
                f"t+{8 * table}, {numbers})"
            )
        self.kernels.append(
            Kernel(
                "product", x.name, tuple(dict.fromkeys(y.where for y in unit.members)),
                tuple(y.name for y in unit.members[1:]), fusing.text(), str(p),
            )
        )  # fmt: skip

    def program(self, text: str, names: dict[str, Any]) -> Program:
        """All steps, and what the caller gets, as one function."""
        leaves = "".join(f"L{i}, " for i in range(len(self.graph.leaves)))
        head = [f"{leaves}= leaves"] if leaves else []
        body = [*head, "A, T, t, N, n, S = state.base, state.table, state.at, state.numbers, state.numbers_at, state.arrays"]
        source = "def run(leaves, state):\n" + "".join(f"  {x}\n" for x in [*body, *self.lines, f"return {text}"])
        space = {**self.names, **names}
        exec(compile(source, "<portmm.fuse>", "exec"), space)  # noqa: S102 - the text above, of literals and our names
        return Program(space["run"], self.kernels, source, self.maker(), self.arena.size)

    def maker(self) -> Callable[[], State]:
        """What makes the memory of a call."""
        size, template, fixed, held, numbers = self.arena.size, self.template, self.fixed, self.held, len(self.numbers)

        def make() -> State:
            memory = arrays.aligned_empty(max(size, 1), np.uint8)
            base = runtime().address(memory)
            table = array("q", template or [0])
            for i, offset in fixed:
                table[i] = base + offset
            numbers_ = array("f", [0.0] * max(numbers, 1))
            views = tuple(np.ndarray(shape, dtype, memory, at) for at, shape, dtype in held)
            return State(
                memory, base, table, table.buffer_info()[0], numbers_, numbers_.buffer_info()[0], views or (memory,)
            )

        return make


_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "s8", "uint8": "u8", "int32": "s32"}


def _name(dtype: Any) -> str:
    return "u8" if dtype.kind == "b" else _NAMES[dtype.name]


class _Expressions:
    """The expressions of a unit, and what they read and write."""

    def __init__(self, builder: Builder, unit: Unit | None, shape: tuple[int, ...]) -> None:
        self.builder, self.unit, self.shape = builder, unit, shape
        self.operands: list[tuple[Place, bool]] = []
        self.written: list[tuple[Place, bool]] = []
        self.results: list[tuple[int, Expr]] = []
        self.numbers: list[int] = []
        self.known: dict[Node, Expr] = {}
        self.words: list[Operand] = []
        self.reads: dict[Node, Place] = {}

    def of(self, x: Node) -> Expr:
        """What a node is, in this unit."""
        if x not in self.known:
            self.known[x] = self.find(x)
        return self.known[x]

    def find(self, x: Node) -> Expr:
        if self.unit is not None and x is self.unit.members[0] and x.kind == "matmul":
            return acc()
        if x.kind == "number":
            if x.leaf not in self.numbers:
                self.numbers.append(x.leaf)
            return node("number", (self.numbers.index(x.leaf),), "f32")
        mine = self.unit is not None and self.builder.split.of.get(x) is self.unit
        if mine or x in self.builder.split.inline:
            inner = [self.of(y) for y in x.inputs]
            assert x.template is not None  # noqa: S101 - the splitter takes no others
            return substituted(x.template, lambda e: inner[e.args[0]] if e.op == "given" else None, {})
        place = self.builder.place(x)
        self.reads[x] = place
        return self.load(place)

    def load(self, place: Place) -> Expr:
        """The element of an array."""
        self.operands.append((place, place.like.shape == self.shape))
        found = load(len(self.operands) - 1, _name(place.like.dtype))
        return apply("ne", found, 0) if place.like.dtype.kind == "b" else found

    def dying(self, x: Node) -> Node | None:
        """An operand whose memory a result may take: it lies as the result does, and nobody reads it later."""
        b, unit = self.builder, self.unit
        assert unit is not None  # noqa: S101 - copies have no results in place
        if b.kept(x) or x.shape != unit.shape:
            return None
        product = unit.members[0].inputs if unit.kind == "product" else ()
        others = [b.places[y] for y in product if y in b.places] + [p for p, _ in self.written]
        for y, place in self.reads.items():
            here = range(place.offset, place.offset + place.like.nbytes)
            if (
                place.root == "A" and b.read.get(y, FOREVER) <= b.now and (y.shape, y.dtype) == (x.shape, x.dtype)
                and y in b.split.of and place.like.flags.c_contiguous
                and not any(p.root == "A" and p is not place and p.offset in here for p in [*others, *self.reads.values()])
            ):  # fmt: skip
                return y
        return None

    def result(self, x: Node, e: Expr, to: Place, full: bool, *, first: bool = False) -> None:  # noqa: FBT001
        """Something to be written."""
        if e.dtype == "mask":
            e = node("select", (e, const(1.0), const(0.0)), "f32")
        self.written.append((to, full))
        self.results.append((C if first else -2, e))

    def settle(self, w: Any, columns: list[int], before: int = 0) -> None:
        """The words of operands, now that it is known along which axes they vary."""
        first = any(i == C for i, _ in self.results)
        places = [*self.operands, *self.written[first:]]
        words = []
        for i, (place, full) in enumerate(places):
            made = i >= len(self.operands)
            b, m, n = w.batch[1][before + i], w.rows[1][before + i], columns[i]
            axes = ("b" if b else "") + ("m" if m or full or made else "") + ("n" if n or (made and full) else "")
            words.append(Operand(_name(place.like.dtype), axes, n in (0, 1)))
        self.words = words
        number = len(self.operands)
        settled = []
        for i, e in self.results:
            settled.append((i if i == C else number, e))
            number += i != C
        self.results = settled

    def text(self) -> str:
        """All of it, as a word."""
        return str(Fused(tuple(self.words), tuple(self.results)))


def _checked(x: Node, items: list[Node]) -> Callable[..., tuple[Any, ...]]:
    """The call of a node, whose results must be what they were, and are made dense."""
    wanted = [(y.shape, y.dtype) for y in items or [x]]

    def run(held: Any, *given: Any) -> tuple[Any, ...]:
        found = x.plain(*given)
        several = found if items else (found,)
        made = []
        for value, (shape, dtype) in zip(several, wanted, strict=True):
            y = np.asarray(value)
            if y.shape != shape or y.dtype != dtype:
                raise ChangedError
            own = held[0] if held[0].base is None else held[0].base
            if not (y.flags.c_contiguous and y.flags.aligned) or np.may_share_memory(y, own):
                y = y.copy()
            made.append(y)
        return tuple(made)

    return run
