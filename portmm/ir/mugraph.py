"""Graphs of kernels whose dimensions are labelled, down to the tiles of each: µGraphs.

Owns `MuGraph`, `Step` and `Tensor`, their text and their serialised form. A step is a block program: one operation, as
a product or a sum is, or many that share a grid and a loop. Which part of a tensor a tile has follows from labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from portmm.errors import ScheduleError
from portmm.ir.block_program import BlockProgram, Pass, TileGemm, TileReduce, TileTransfer
from portmm.ir.operator_text import operator_lines
from portmm.ir.program_types import check_types
from portmm.spec.epilogue import Operand, argument, contraction, load, reduction
from portmm.spec.expr import Expr, const, node, ordered


class Tensor(NamedTuple):
    """An array in memory.

    Attributes:
        name: for messages.
        axes: a label for each dimension; "1" has extent 1.
        dtype: type of its elements.
    """

    name: str
    axes: str
    dtype: str = "f32"


class Binding(NamedTuple):
    """A tensor as an operand of a program.

    Attributes:
        tensor: its number.
        dims: for each dimension of the operand the dimensions of the tensor that are one there, in order; those that
            are in none have extent 1. None: the same ones.
        part: a dimension of a concatenation, the labels of its parts before this one, and the label of this one.
    """

    tensor: int
    dims: tuple[tuple[int, ...], ...] | None = None
    part: tuple[int, str, str] | None = None


class Threads(NamedTuple):
    """The thread level of a kernel: a fragment of accumulators in registers, and the lanes of these.

    Attributes:
        unit: the instruction set.
        rows, columns: of the fragment.
        lanes: elements of a register.
        over: what threads share.
        runs: of the loop, that threads share; 1 where it is not split.
    """

    unit: str
    rows: int
    columns: int
    lanes: int
    over: str
    runs: int = 1

    def __str__(self) -> str:
        split = f", the loop in {self.runs} runs" if self.runs > 1 else ""
        return f"fragment {self.rows} x {self.columns}, {self.lanes} lanes of {self.unit}, over {self.over}{split}"


class Step(NamedTuple):
    """A kernel.

    Attributes:
        program: its block program.
        operands: the tensor of each of its operands.
        threads: its thread level, where a schedule was selected.
    """

    program: BlockProgram
    operands: tuple[Binding, ...]
    threads: Threads | None = None


@dataclass(frozen=True)
class MuGraph:
    """A µGraph.

    Attributes:
        tensors: all tensors.
        steps: kernels, in order of execution.
        inputs: numbers of the tensors that are arguments.
        results: numbers of those that are results.
        joined: labels of concatenations, each with those of its parts.

    Raises:
        ScheduleError: a step reads a tensor before one writes it, an operand has more or fewer dimensions than its
            tensor, a number is that of no tensor or dimension, or an expression is ill-typed.
    """

    tensors: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    joined: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        known = {*self.inputs}
        if outside := {*self.inputs, *self.results} - {*range(len(self.tensors))}:
            raise ScheduleError(f"{outside} are inputs or results; there are {len(self.tensors)} tensors")
        for i, x in enumerate(self.steps):
            self._check(x, f"step {i}")
            read = {x.operands[y.args[0]].tensor for y in x.program.fused.steps if y.op == "load"}
            if early := sorted(read - known):
                raise ScheduleError(f"step {i} reads {self.tensors[early[0]]} before it is written")
            known |= {x.operands[j].tensor for j, _ in x.program.fused.results}
        if not known >= {*self.results}:
            raise ScheduleError("a result is written by no step")

    def _check(self, step: Step, where: str) -> None:
        """Check of the operands of a step, and of its expressions.

        Raises:
            ScheduleError: an operand is none of a tensor, or an expression is ill-typed.
        """
        if len(step.operands) != len(step.program.operands):
            raise ScheduleError(
                f"{where} binds {len(step.operands)} of {len(step.program.operands)} operands: bind each"
            )
        for j, (operand, at) in enumerate(zip(step.program.operands, step.operands, strict=True)):
            if not 0 <= at.tensor < len(self.tensors):
                raise ScheduleError(f"operand {j} of {where} is tensor {at.tensor} of {len(self.tensors)}")
            of = self.tensors[at.tensor]
            dims, part = [y for group in at.dims or () for y in group], 0 if at.part is None else at.part[0]
            if len({*dims}) < len(dims) or {*dims, part} - {0, *range(len(of.axes))}:
                raise ScheduleError(f"operand {j} of {where} has dimensions {dims} of {of}: name each once")
            if len(self.labels(at)) != len(operand.axes):
                raise ScheduleError(
                    f"operand {j} of {where} is along {operand.axes!r}, its tensor {of}: bind a dimension to each label"
                )
        try:
            check_types(step.program)
        except ScheduleError as error:
            raise ScheduleError(f"{where}: {error}") from error

    def labels(self, at: Binding) -> tuple[str, ...]:
        """The labels that are one dimension of an operand, for each."""
        axes = self.tensors[at.tensor].axes
        if at.part is not None:
            axes = axes[: at.part[0]] + at.part[2] + axes[at.part[0] + 1 :]
        return tuple(axes) if at.dims is None else tuple("".join(axes[i] for i in x) for x in at.dims)

    def __str__(self) -> str:
        lines = [f"in  {_tensor(self, i)}" for i in self.inputs]
        for x in self.steps:
            names = [self.tensors[y.tensor].name for y in x.operands]
            lines.append(f"kernel({', '.join(names)}) grid {x.program.grid}, loop {x.program.loop}")
            for i, (first, *rest) in enumerate(operator_lines(x.program, names)):
                lines += [f"    pass {i}: {first}", *(f"            {y}" for y in rest)]
            lines += [f"    thread: {x.threads}"] if x.threads is not None else []
        return "\n".join([*lines, *(f"out {_tensor(self, i)}" for i in self.results)])


def _tensor(graph: MuGraph, i: int) -> str:
    x = graph.tensors[i]
    return f"{x.name}[{x.axes}] {x.dtype}"


# The serialised form: steps of expressions by their number.


def to_json(graph: MuGraph) -> dict[str, Any]:
    """A graph as lists and strings, which `graph_reader.from_json` reads."""
    return {
        "tensors": [list(x) for x in graph.tensors],
        "steps": [_step_to_json(x) for x in graph.steps],
        "inputs": list(graph.inputs),
        "results": list(graph.results),
        "joined": [list(x) for x in graph.joined],
    }


def _step_to_json(x: Step) -> dict[str, Any]:
    threads = {} if x.threads is None else {"threads": list(x.threads)}
    return {"operands": [list(y) for y in x.operands], **program_to_json(x.program), **threads}


def program_to_json(x: BlockProgram) -> dict[str, Any]:
    """A block program as lists and strings, which `graph_reader.program_from_json` reads."""
    values = [y.value for one in x.passes for y in one]
    rescaled = [r for one in x.passes for y in one if (r := getattr(y, "rescaled", None)) is not None]
    every = ordered((*values, *rescaled))
    at = {y: i for i, y in enumerate(every)}

    def spelled(y: Any) -> list[Any]:
        parts = dict(zip(y._fields, y, strict=True))
        named = {k: at[v] if isinstance(v, Expr) else v for k, v in parts.items()}
        return [type(y).__name__, named]

    return {
        "grid": x.grid,
        "loop": x.loop,
        "arrays": [[y.dtype, y.axes, y.dense] for y in x.operands],
        "values": [[y.op, y.dtype, [f"%{at[z]}" if isinstance(z, Expr) else z for z in y.args]] for y in every],
        "passes": [[spelled(y) for y in one] for one in x.passes],
    }


# Graphs of one operation for each step.


class Builder:
    """A builder of graphs from operations on whole tensors, each a step of its own.

    Dimensions with the same label are the same; a tensor is broadcast along labels that it lacks.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.steps: list[Step] = []
        self.inputs: list[int] = []
        self.joined: list[tuple[str, str]] = []

    def tensor(self, name: str, axes: str, dtype: str = "f32") -> int:
        """A new tensor."""
        self.tensors.append(Tensor(name, axes, dtype))
        return len(self.tensors) - 1

    def input(self, name: str, axes: str, dtype: str = "f32") -> int:
        """An argument."""
        self.inputs.append(self.tensor(name, axes, dtype))
        return self.inputs[-1]

    def map(self, template: Expr, *of: int, axes: str = "", name: str = "") -> int:
        """An element-wise function of tensors: `epilogue.argument` i stands for the i-th."""
        labels = axes or "".join(dict.fromkeys(x for i in of for x in self.tensors[i].axes if x != "1"))
        return self._step(template, of, labels, "", name or "map")

    def sum(self, x: int, along: str, template: Expr | None = None) -> int:
        """The sum of a tensor, or of a function of it, along a label."""
        value = argument(0, "f32") if template is None else template
        return self._step(contraction(value, const(1.0), along), (x,), self.tensors[x].axes.replace(along, ""), along)

    def max(self, x: int, along: str) -> int:
        """The maximum of a tensor along a label."""
        return self._step(node("most", (along, argument(0, "f32")), "f32"), (x,),
                          self.tensors[x].axes.replace(along, ""), along, "max")  # fmt: skip

    def matmul(self, a: int, b: int, along: str, axes: str = "") -> int:
        """The sum of products of two tensors along a label."""
        labels = "".join(dict.fromkeys(self.tensors[a].axes + self.tensors[b].axes)).replace(along, "")
        value = contraction(argument(0, "f32"), argument(1, "f32"), along)
        return self._step(value, (a, b), axes or labels.replace("1", ""), along, "matmul")

    def concat(self, label: str, along: tuple[int, ...], *of: int) -> int:
        """Tensors one after the other, each along one of its dimensions; `label` is that of the result."""
        axes = self.tensors[of[0]].axes
        parts = [self.tensors[i].axes[j] for i, j in zip(of, along, strict=True)]
        to = self.tensor(f"concat{len(self.tensors)}", axes[: along[0]] + label + axes[along[0] + 1 :])
        for n, i in enumerate(of):
            one = self.tensors[i]
            step = one_step([one], (i,), Tensor("", one.axes), to, argument(0, "f32"), "")
            at = step.operands[1]._replace(part=(along[0], "".join(parts[:n]), parts[n]))
            self.steps.append(step._replace(operands=(step.operands[0], at)))
        if (label, "".join(parts)) not in self.joined:
            self.joined.append((label, "".join(parts)))
        return to

    def _step(self, value: Expr, of: tuple[int, ...], axes: str, along: str, name: str = "sum") -> int:
        to = self.tensor(f"{name}{len(self.tensors)}", axes)
        self.steps.append(one_step([self.tensors[i] for i in of], of, self.tensors[to], to, value, along))
        return to

    def graph(self, *results: int) -> MuGraph:
        """The graph."""
        return MuGraph(tuple(self.tensors), tuple(self.steps), tuple(self.inputs), results, tuple(self.joined))


def one_step(  # noqa: PLR0917 - the parts of an operation
    tensors: list[Tensor], of: tuple[int, ...], result: Tensor, to: int, value: Expr, along: str
) -> Step:
    """A step of one operation, an expression of `epilogue.argument`s, reduced along a label or an empty string."""
    swapped = {}
    if value.op == "most" and along != "n":
        swapped = {along: "n", "n": along}  # maxima are along n

    def local(axes: str) -> str:
        return "".join(swapped.get(x, x) for x in axes)

    def filled(x: Expr) -> Expr:
        if x.op == "given":
            return load(x.args[0], tensors[x.args[0]].dtype)
        args = tuple(filled(y) if isinstance(y, Expr) else y for y in x.args)
        if x.op == "most":
            return reduction("max", args[1])
        if x.op in ("index", "extent"):
            return node(x.op, (local(x.args[0]),), x.dtype)
        return node(x.op, args, x.dtype)

    every = [(x, local(x.axes.replace("1", ""))) for x in (*tensors, result)]
    alone = not any(axes for _, axes in every)  # without labels, the loop is along one of extent 1
    operands = tuple(Operand(x.dtype, "n" if alone else axes) for x, axes in every)
    loop = local(along) or next(x.axes[-1] for x in operands if x.axes)
    body, store = filled(value), len(tensors)
    if along:
        carried = (TileGemm if body.op == "contract" else TileReduce)(body)
        passes: tuple[Pass, ...] = ((carried,), (TileTransfer(store, body),))
    else:
        passes = ((TileTransfer(store, body),),)
    grid = "".join(x for x in dict.fromkeys("".join(y.axes for y in operands)) if x != loop)
    dims = [((),) if alone else tuple((j,) for j, y in enumerate(x.axes) if y != "1") for x, _ in every]
    same = ["1" not in x.axes and not alone for x, _ in every]
    bindings = tuple(Binding(i, None if x else y) for i, x, y in zip((*of, to), same, dims, strict=True))
    return Step(BlockProgram(grid, loop, operands, passes), bindings)
