"""Execution of a graph: programs of kernels for parts of it, and what runs between them.

Owns `Executor`. A graph is cut where a value that decides on shapes is computed from data, and at operators whose
results have such shapes; what lies between is traced once for each kind of its inputs, as `fuse` traces functions, and
is a program of kernels from then on. Values that follow from shapes and constants are computed while it is traced.

If, Loop and Scan run graphs of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.pages import Chunk, adjoining
from portmm.errors import ChangedError
from portmm.fusion.compilation import compiled_program
from portmm.onnx import operators
from portmm.onnx.arrays import ModelArrays
from portmm.onnx.model import Graph, Node, OnnxError, free_names
from portmm.onnx.precision import with_precision
from portmm.onnx.rewrites import (
    with_codes,
    with_epilogues,
    with_groups,
    with_integers,
    with_reciprocals,
    with_rounding,
    with_scales,
)
from portmm.trace.placeholders import Array as Traced
from portmm.trace.placeholders import Placeholder
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.fusion.program import Kernel


def run_node(executor: Any, node: Node, inputs: list[Any], outer: dict[str, Any]) -> tuple[Any, ...]:
    """The results of an operator with graphs, of its inputs and the values outer it that they read."""
    return {"If": _if, "Loop": _loop, "Scan": _scan}[node.op](executor, node, inputs, outer)


def _run(executor: Any, graph: Graph, inputs: list[Any], outer: dict[str, Any]) -> list[Any]:
    """The results of an inner graph."""
    inner = executor.inner(graph)
    values = {x: outer[x] for x in free_names(graph)}
    values.update(zip((x.name for x in graph.inputs), inputs, strict=True))
    return inner.run(values)


def _if(executor: Any, node: Node, inputs: list[Any], outer: dict[str, Any]) -> tuple[Any, ...]:
    branch = "then_branch" if bool(np.asarray(inputs[0]).reshape(())) else "else_branch"
    return tuple(_run(executor, node.attributes[branch], [], outer))


def _loop(executor: Any, node: Node, inputs: list[Any], outer: dict[str, Any]) -> tuple[Any, ...]:
    body: Graph = node.attributes["body"]
    most = None if inputs[0] is None else int(np.asarray(inputs[0]).reshape(()))
    going = True if inputs[1] is None else bool(np.asarray(inputs[1]).reshape(()))
    carried, scanned = list(inputs[2:]), []
    i = 0
    while going and (most is None or i < most):
        results = _run(executor, body, [np.asarray(i, np.int64), np.asarray(going), *carried], outer)
        going = bool(np.asarray(results[0]).reshape(()))
        carried = results[1 : 1 + len(carried)]
        scanned.append(results[1 + len(carried) :])
        i += 1
    outputs = len(body.outputs) - 1 - len(carried)
    if not scanned and outputs:
        raise OnnxError(f"{node.name}: a loop that runs no iteration has no shapes for its {outputs} scanned results")
    return (*carried, *(np.stack([x[j] for x in scanned]) for j in range(outputs)))


def _scan(executor: Any, node: Node, inputs: list[Any], outer: dict[str, Any]) -> tuple[Any, ...]:
    body: Graph = node.attributes["body"]
    if node.version < 9:
        raise OnnxError(f"{node.name}: Scan of operator set {node.version}; convert the model to 9 or later")
    count = int(node.attribute("num_scan_inputs"))
    states, scanned = list(inputs[: len(inputs) - count]), inputs[len(inputs) - count :]
    axes = node.attribute("scan_input_axes", [0] * count)
    back = node.attribute("scan_input_directions", [0] * count)
    length = scanned[0].shape[axes[0]]
    steps: list[list[Any]] = []
    for i in range(length):
        slices = [np.take(x, length - 1 - i if b else i, axis=a) for x, a, b in zip(scanned, axes, back, strict=True)]
        results = _run(executor, body, [*states, *slices], outer)
        states = results[: len(states)]
        steps.append(results[len(states) :])
    outputs = len(body.outputs) - len(states)
    out_axes = node.attribute("scan_output_axes", [0] * outputs)
    reverse = node.attribute("scan_output_directions", [0] * outputs)
    results = []
    for j in range(outputs):
        rows = [x[j] for x in steps]
        results.append(np.stack(rows[::-1] if reverse[j] else rows, axis=out_axes[j]))
    return (*states, *results)


MOST_KINDS = 64
"""Kinds of inputs whose programs a part of a graph caches before it drops them all."""
SHAPES = ("Shape", "Size")
"""Operators whose results follow from the shapes of their inputs."""
TYPES = frozenset(
    (
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
        "float32", "float64",
    )
)  # fmt: skip
"""Types of arrays that programs of kernels and NumPy take."""
MOST_CONSTANT = 1 << 28
"""Bytes up to which a result of constants is computed at load."""


@dataclass(eq=False, slots=True)
class Program:
    """A part of a graph for one kind of inputs.

    Attributes:
        run: of the arrays of a call; None where NumPy computes one node after the other.
        kernels: its steps.
        copied: for each output, whether it must be copied since kernels or the caller keep its memory.
        reasons: (node, why it is not fused).
        scratch: bytes between its kernels.
    """

    run: Callable[[list[Any]], Any] | None
    kernels: list[Kernel]
    copied: tuple[bool, ...]
    reasons: list[tuple[str, str]]
    scratch: int = 0


@dataclass(eq=False, slots=True)
class Part:
    """Consecutive nodes of a graph.

    Attributes:
        nodes: its nodes.
        alone: an operator that runs by itself.
        arrays: names that it reads as arrays.
        values: names that it reads by value: they select its program.
        outputs: names that other parts or the caller read.
    """

    nodes: list[Node]
    alone: bool = False
    arrays: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    programs: Memory = field(default_factory=lambda: Memory(MOST_KINDS, "calls"))


class Executor:
    """A graph that can run.

    Args:
        graph: its record.
        memory: of packed constants.
        precision: in which float32 products multiply.
    """

    def __init__(self, graph: Graph, memory: Chunk | None = None, precision: str = "f32") -> None:
        self.graph = graph
        self.precision = precision
        self.memory = memory or Chunk()
        self.inputs = [x.name for x in graph.inputs] + free_names(graph)
        self.outputs = [x.name for x in graph.outputs]
        self.constants = dict(graph.constants)
        self.executors: dict[int, Executor] = {}
        for node in graph.nodes:
            operators.check(node)
        nodes = with_codes(computed_constants(graph, self.constants), self.outputs, self.constants)
        nodes = with_integers(nodes, self.outputs, self.constants)
        nodes = with_rounding(with_scales(nodes, self.outputs, self.constants), self.outputs, self.constants)
        nodes = with_groups(with_reciprocals(nodes, self.outputs, self.constants), self.outputs, self.constants)
        nodes = with_epilogues(nodes, self.outputs, self.constants)
        self.parts = self.divided(with_precision(nodes, self.outputs, self.constants, precision))

    def divided(self, nodes: list[Node]) -> list[Part]:
        """The parts of the graph, with what they read and return."""
        known = set(self.constants)
        by_value = {n.inputs[i] for n in nodes for i in operators.find(n).host if i < len(n.inputs)} - known - {""}
        known |= by_value & set(self.inputs)
        parts: list[Part] = []
        produced: set[str] = set()
        for node in nodes:
            row = operators.find(node)
            wanted = [node.inputs[i] for i in row.host if i < len(node.inputs) and node.inputs[i]]
            alone = row.alone
            if alone:
                parts.append(Part([node], alone=True))
                produced = set()
                known |= by_value & set(node.outputs)
                continue
            if not parts or parts[-1].alone or any(x not in known and x in produced for x in wanted):
                parts.append(Part([]))
                known |= by_value & produced
                produced = set()
            known.update(x for x in wanted if x not in known)
            parts[-1].nodes.append(node)
            produced.update(node.outputs)
            if node.op in SHAPES or all(not x or x in known for x in node.inputs):
                known.update(node.outputs)
        self.connect(parts, known)
        return parts

    def inner(self, graph: Graph) -> Executor:
        """The executor of a graph of one of its operators."""
        if id(graph) not in self.executors:
            self.executors[id(graph)] = Executor(graph, self.memory, self.precision)
        return self.executors[id(graph)]

    def connect(self, parts: list[Part], known: set[str]) -> None:
        """Set what parts read and return."""
        wanted = set(self.outputs)
        for part in reversed(parts):
            inside = {x for n in part.nodes for x in n.outputs if x}
            part.outputs = [x for n in part.nodes for x in n.outputs if x in wanted]
            read = dict.fromkeys(x for n in part.nodes for x in (*n.inputs, *n.captured) if x and x not in inside)
            outside = [x for x in read if x not in self.constants]
            part.values = [] if part.alone else [x for x in outside if x in known]
            part.arrays = [x for x in outside if x not in part.values]
            wanted.update(outside)

    def run(self, values: dict[str, Any]) -> list[Any]:
        """The results of the graph for some inputs by name."""
        with np.errstate(all="ignore"):
            for part in self.parts:
                self.run_part(part, values)
        return [values[x] if x in values else self.constants[x].copy() for x in self.outputs]

    def run_part(self, part: Part, values: dict[str, Any]) -> None:
        """Run a part, and add what it computes to the values."""
        if part.alone:
            self.run_alone(part.nodes[0], values)
            return
        arrays = [values[x] for x in part.arrays]
        if any(type(x) is not np.ndarray for x in arrays):
            self.interpret(part, values)
            return
        key = (*[(x.shape, x.dtype) for x in arrays], *[(values[x].shape, values[x].tobytes()) for x in part.values])
        program = part.programs.get(key)
        if program is None:
            program = part.programs.keep(key, self.compiled(part, values))
        if program.run is None:
            self.interpret(part, values)
            return
        try:
            results = program.run(arrays)
        except ChangedError:
            self.interpret(part, values)
            return
        for name, x, copied in zip(part.outputs, results, program.copied, strict=True):
            values[name] = x.copy() if copied else x if x.flags.c_contiguous else np.ascontiguousarray(x)

    def interpret(self, part: Part, values: dict[str, Any]) -> None:
        """Compute a part by NumPy, one node after the other."""
        for node in part.nodes:
            inputs = [self.value(x, values) for x in node.inputs]
            values.update(zip(node.outputs, operators.apply(node, inputs, None), strict=False))

    def run_alone(self, node: Node, values: dict[str, Any]) -> None:
        """Run an operator that runs by itself, with the outer values that its graphs read."""
        inputs = [self.value(x, values) for x in node.inputs]
        if node.op in operators.CONTROL:
            outer = {x: self.value(x, values) for x in node.captured}
            results = run_node(self, node, inputs, outer)
        else:
            results = operators.results(operators.computed(node, operators.find(node).function, inputs))
        values.update(zip(node.outputs, results, strict=False))

    def value(self, name: str, values: dict[str, Any]) -> Any:
        """A constant or a value by name; None for an input that is left out."""
        return None if not name else values[name] if name in values else self.constants[name]

    def recorded(self, part: Part, values: dict[str, Any]) -> tuple[ModelArrays, dict[str, Any]]:
        """The graph of whole arrays of a part, and its values: arrays or placeholders."""
        recorder = ModelArrays()
        known: dict[str, Any] = {x: values[x] for x in part.values}
        for name in part.arrays:
            recorder.label = name
            known[name] = Traced(recorder, recorder.leaf(values[name], name))
        for node in part.nodes:
            inputs = [self.value(x, known) for x in node.inputs]
            known.update(zip(node.outputs, operators.apply(node, inputs, recorder), strict=False))
        return recorder, known

    def compiled(self, part: Part, values: dict[str, Any], clock: Callable[[int], None] | None = None) -> Program:
        """The program of a part for inputs of this kind."""
        if any(values[x].dtype.name not in TYPES for x in part.arrays):
            return Program(None, [], (), [("", "its types are NumPy's alone")])
        with np.errstate(all="ignore"), adjoining(self.memory):
            recorder, known = self.recorded(part, values)
        results = [known[x] for x in part.outputs]
        outputs = [x.node for x in results if isinstance(x, Placeholder)]
        if any(x.dtype is not None and x.dtype.name not in TYPES for x in recorder.nodes):
            return Program(None, [], (), [("", "its types are NumPy's alone")])
        if not outputs:
            return Program(lambda _: results, [], (True,) * len(results), [])
        program = compiled_program(recorder, outputs, results, clock)
        copied = tuple(not isinstance(x, Placeholder) or x.node.origin.kind == "array" for x in results)
        recorder.leaves, recorder.values = [], {}
        reasons = list(dict.fromkeys([*recorder.blocked, *program.apart, *(("", x) for x in program.notes)]))
        return Program(program.run, program.kernels, copied, reasons, program.scratch)


def computed_constants(graph: Graph, constants: dict[str, Any]) -> list[Node]:
    """The nodes that are left when those of constants alone are computed, which become constants."""
    rest: list[Node] = []
    for node in graph.nodes:
        row = operators.find(node)
        ready = not node.captured and all(not x or x in constants for x in node.inputs)
        random = node.op.startswith("Random") or node.op in ("Multinomial", "Bernoulli", "Dropout")
        if not ready or row.alone or random or node.op == "DequantizeLinear":
            rest.append(node)
            continue
        with np.errstate(all="ignore"):
            inputs = [constants[x] if x else None for x in node.inputs]
            results = operators.apply(node, inputs, None)
        if sum(getattr(x, "nbytes", 0) for x in results) > MOST_CONSTANT or any(x is None for x in results):
            rest.append(node)
            continue
        constants.update(zip(node.outputs, results, strict=False))
    return rest
