"""Parts of a function that has operations without terms: between these, each part is searched by itself.

Owns `in_parts`, the search, `parts_of`, and `Parts`, which makes one program of the programs of all parts. Operations
are in stages: a term follows, by a stage, what has no term and what it reads; a part is what is connected in a stage,
of one type of floats. What has no term is fused as ever, stage by stage: calls of NumPy, conversions of types,
integers, convolutions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.dispatch import config, program_database
from portmm.errors import ChangedError
from portmm.fusion import turns
from portmm.fusion.compilation import compiled_program
from portmm.fusion.finding import Finding, Run, Task
from portmm.fusion.partition import live_nodes
from portmm.fusion.program import Explained
from portmm.fusion.recorder import WholeArrays
from portmm.fusion.term_reader import TYPES, term_of, viewed
from portmm.fusion.terms import UnlabelledError, literal, spelled
from portmm.trace.placeholders import Array, Placeholder, rebuilt
from portmm.util.records import replace
from portmm.verification.certificate import together

if TYPE_CHECKING:
    from portmm.fusion.budget import Budget
    from portmm.fusion.graph import Node

    Progress = Callable[[int, int, str], None]
    Search = Callable[[Task, float, Progress], Finding]

LEAVES = ("array", "number", "weight")


class Part(NamedTuple):
    """Some operations of a function.

    Attributes:
        nodes: in order.
        reads, writes: what others compute and it reads, and what it computes and others read.
        searched: it has terms, among them a product or a reduction.
    """

    nodes: tuple[Node, ...]
    reads: tuple[Node, ...]
    writes: tuple[Node, ...]
    searched: bool


class Copy(NamedTuple):
    """A graph of a part's own, whose leaves are what the part reads.

    Attributes:
        graph, outputs, result: as of `Task`.
    """

    graph: WholeArrays
    outputs: list[Node]
    result: tuple[Array, ...]


class Layout(NamedTuple):
    """Layout of an array between parts."""

    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]


def in_parts(parts: Parts, optimize: Search, budget: Budget, progress: Progress) -> Finding:
    """Search each part of a function, and keep the program of all where it is faster than the function as it is.

    An interrupt outside the search of a part leaves the function as it is; what is found for parts is stored.

    Args:
        parts: of the function.
        optimize: the search of a part.
        budget: of all parts.
        progress: as of `superoptimizer.optimize`.
    """
    findings: dict[int, Finding] = {}
    try:
        best = _searched(parts, findings, optimize, budget, progress)
    except KeyboardInterrupt:
        if budget.seconds <= 0:  # there is no search that it could end
            raise
        best = _counted(parts, findings)._replace(interrupted=True)
        best = best if best.forms else best._replace(note="")
    return best._replace(elapsed=budget.elapsed)


def _searched(
    parts: Parts, findings: dict[int, Finding], optimize: Search, budget: Budget, progress: Progress
) -> Finding:
    """Search each part, whose findings it adds, and the program of all."""
    seconds = budget.seconds
    key, target, threads = parts.key(), config.target().name, config.get_num_threads()
    if seconds <= 0 and program_database.find(key, target, threads) is None:
        return Finding()
    parts.build()
    for i in parts.searched:
        left = budget.left / (len(parts.searched) - len(findings)) if seconds > 0 else 0.0
        if any(x.interrupted for x in findings.values()):
            left = 0.0
        findings[i] = optimize(parts.task(i), max(0.0, left), progress)
    every = tuple(findings.values())
    certificates = [x.certificate for x in every if x.certificate is not None]
    best = _counted(parts, findings)._replace(certificate=together(certificates))
    if all(x.run is None for x in every):
        return best
    run, explained = parts.program(findings)
    if seconds > 0:
        (times,) = turns.drawn(parts.whole.before, [run], parts.whole.arrays)
        best = best._replace(before=times.before, seconds=times.seconds)
        if not times.faster:
            return best
        program_database.store(key, target, threads, program_database.Entry((), {}, times.before / times.seconds))
    path, stored = tuple(y for x in every for y in x.path), all(x.stored or x.run is None for x in every)
    return best._replace(run=run, explained=explained, path=path, stored=stored)


def _counted(parts: Parts, findings: dict[int, Finding]) -> Finding:
    """The numbers of what the searches of parts have seen."""
    every = tuple(findings.values())
    return Finding(
        forms=sum(x.forms for x in every), bounded=sum(x.bounded for x in every),
        verified=sum(x.verified for x in every), parts=every, interrupted=any(x.interrupted for x in every),
        note=f"split at {', '.join(parts.splits)} into {len(parts.searched)} parts that are searched",
    )  # fmt: skip


def parts_of(task: Task) -> Parts | None:
    """The parts of a function, or None if none is to be searched.

    Raises:
        UnlabelledError: a convolution is among its operations, or a weight or a constant is.
    """
    every = live_nodes(task.graph, task.outputs)
    if any(x in task.graph.windows or (x.kind in LEAVES and (x.leaf < 0 or x.kind == "weight")) for x in every):
        raise UnlabelledError("a function with convolutions or packed weights is not split")
    terms = {x for x in every if _has_term(x)}
    stages: dict[Node, int] = {}
    for x in every:
        if x.kind in LEAVES:
            stages[x] = -1
        elif x in terms:
            stages[x] = max([0, *(stages[y] + (y not in terms and y.kind not in LEAVES) for y in x.inputs)])
        else:
            stages[x] = max([-1, *(stages[y] for y in x.inputs)])
    parts: list[Part] = []
    ends = {*task.outputs}
    for stage in range(-1, max(stages.values()) + 1):
        here = [x for x in every if stages[x] == stage and x.kind not in LEAVES]
        groups = _connected([x for x in here if x in terms])
        groups += [rest] if (rest := [x for x in here if x not in terms]) else []
        parts += [_part(group, every, ends, terms) for group in groups]
    splits = dict.fromkeys(f"{x.name} ({x.where})" for x in every if x not in terms and x.kind not in (*LEAVES, "view"))
    return Parts(task, parts, tuple(splits)) if any(x.searched for x in parts) else None


def _has_term(x: Node) -> bool:
    """Whether a node is an operation of terms, of operands of its own type."""
    if x.dtype is None or np.dtype(x.dtype).name not in TYPES or any(y.dtype not in (None, x.dtype) for y in x.inputs):
        return False
    try:
        if x.kind == "map" and x.template is not None:
            spelled(x.template, [literal(0.0)] * len(x.inputs))
            return True
        if x.kind == "view":
            viewed(x, list(range(len(x.inputs[0].shape))))
            return x.origin.kind in ("map", "reduce", "matmul")
    except UnlabelledError:
        return False
    return x.kind == "reduce" or (x.kind == "matmul" and x.template is None and x.inputs[0].shape[-1] > 1)


def _connected(nodes: Sequence[Node]) -> list[list[Node]]:
    """Groups of nodes of one type that read one another, or the same array."""
    parent: dict[Any, Any] = {}

    def root(x: Any) -> Any:
        while parent.setdefault(x, x) is not x:
            x = parent[x]
        return x

    for x in nodes:
        for y in x.inputs:
            if y.kind != "number":
                parent[root(y)] = root(x)
    groups: dict[Any, list[Node]] = {}
    for x in nodes:
        groups.setdefault(root(x), []).append(x)
    return list(groups.values())


def _part(nodes: Sequence[Node], every: Sequence[Node], ends: set[Node], terms: set[Node]) -> Part:
    own = set(nodes)
    reads = dict.fromkeys(y for x in nodes for y in x.inputs if y not in own)
    needed = {y for x in every if x not in own for y in x.inputs} | ends
    writes = tuple(x for x in nodes if x in needed and x.kind != "several")
    searched = nodes[0] in terms and any(x.kind in ("matmul", "reduce") for x in nodes)
    return Part(tuple(nodes), tuple(reads), writes, searched)


class Parts:
    """The parts of a function, in the order in which they run, and their programs.

    Attributes:
        whole: the function.
        parts: all of them.
        splits: operations without terms.
        searched: numbers of the parts that are searched.
    """

    def __init__(self, whole: Task, parts: Sequence[Part], splits: tuple[str, ...]) -> None:
        self.whole, self.parts, self.splits = whole, parts, splits
        self.searched = [i for i, x in enumerate(parts) if x.searched]
        self.values: dict[Node, Any] = {}
        self.compiled: list[tuple[Run, Explained]] = []

    def key(self) -> str:
        """A digest of the structure, without sizes."""
        words: list[Any] = []
        for x in self.parts:
            if x.searched:
                copy = _copy(x, {y: _like(y) for y in x.reads})
                try:
                    words.append(term_of(copy.graph, copy.outputs).structure())
                except UnlabelledError as error:
                    words.append(str(error))
            else:
                words.append([(y.kind, y.name, str(y.dtype), len(y.shape)) for y in x.nodes])
        return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()

    def build(self) -> None:
        """Compile all parts as they are, and run them: others need arrays to be measured with."""
        for x in live_nodes(self.whole.graph, self.whole.outputs):
            if x.kind in LEAVES:
                self.values[x] = self.whole.arrays[x.leaf]
        for part in self.parts:
            arrays = [self.values[y] for y in part.reads]
            copy = _copy(part, self.values)
            built = compiled_program(copy.graph, copy.outputs, copy.result)
            copy.graph.leaves, copy.graph.values = [], {}
            self.compiled.append((built.run, Explained("part", tuple(built.kernels), (), (), built.source)))
            self.values.update(zip(part.writes, built.run(arrays), strict=True))

    def task(self, i: int) -> Task:
        """The search of a part."""
        part, (run, explained) = self.parts[i], self.compiled[i]
        copy, whole = _copy(part, self.values), self.whole
        arrays = [self.values[y] for y in part.reads]
        return Task(
            copy.graph, copy.outputs, copy.result, arrays, run, whole.compiled, whole.described, explained.kernels
        )

    def program(self, findings: Mapping[int, Finding]) -> tuple[Run, Explained]:
        """One program of those that were found, and of the parts as they are."""
        numbers = {x: i for i, x in enumerate(self.values)}
        steps, every = [], []
        for i, part in enumerate(self.parts):
            run, explained = self.compiled[i]
            if i in findings and findings[i].run is not None:
                run, explained = findings[i].run, findings[i].explained or explained
            every.append(explained)
            layouts = [Layout(y.shape, y.dtype, y.strides) for y in (self.values[x] for x in part.writes)]
            steps.append((run, [numbers[x] for x in part.reads], [numbers[x] for x in part.writes], layouts))
        leaves = [(numbers[x], x.leaf) for x in self.values if x.kind in LEAVES]
        result, count = rebuilt(self.whole.result, _numbered(numbers)), len(numbers)

        def program(arrays: Sequence[Any]) -> Any:
            values: list[Any] = [None] * count
            for at, leaf in leaves:
                values[at] = arrays[leaf]
            for run, reads, writes, layouts in steps:
                got = run([values[y] for y in reads])
                for at, x, layout in zip(writes, got, layouts, strict=True):
                    values[at] = _laid_out(x, layout)
            return rebuilt(result, lambda x: values[x.index] if isinstance(x, Slot) else x)

        kernels = tuple(k for x in every for k in x.kernels)
        return program, Explained("function", kernels, (), (), "\n".join(x.source for x in every))


def _laid_out(x: Any, layout: Layout) -> Any:
    """An array in the layout that others were compiled for: a found program may return another one than greedy fusion.

    Raises:
        ChangedError: it has another shape or type, or the layout is none of an array that is dense.
    """
    shape, dtype, strides = layout
    if x.shape != shape or x.dtype != dtype:
        raise ChangedError
    if x.strides == strides:
        return x
    size = dtype.itemsize
    for step, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if step != size:
            raise ChangedError
        size *= n
    y = np.lib.stride_tricks.as_strided(np.empty(x.size, dtype), shape, strides)
    y[...] = x
    return y


class Slot:
    """The number of a value, in the place of a placeholder."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _numbered(numbers: Mapping[Node, int]) -> Any:
    return lambda x: Slot(numbers[x.node]) if isinstance(x, Placeholder) else x


def _like(x: Node) -> Any:
    """A value that stands for one while terms are read."""
    return 1.0 if x.dtype is None else np.broadcast_to(np.zeros((), x.dtype), x.shape)


def _copy(part: Part, values: Mapping[Node, Any]) -> Copy:
    """The graph of a part, of its own: a compiler changes it."""
    graph = WholeArrays(strict=False)
    known: dict[Node, Node] = {}
    for x in part.reads:
        graph.line = x.line
        known[x] = graph.leaf(values[x], x.name)
    graph.line = None
    for x in part.nodes:
        inputs = tuple(known[y] for y in x.inputs)
        known[x] = replace(x, inputs=inputs, number=len(graph.nodes))
        graph.nodes.append(known[x])
    outputs = [known[x] for x in part.writes]
    return Copy(graph, outputs, tuple(Array(graph, x) for x in outputs))
