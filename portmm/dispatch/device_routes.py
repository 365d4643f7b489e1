"""Routes on a device: compiled kernels of problems, and of expressions over rows or down columns.

Owns the memo of kernels of problems, and the selection of how threads share rows: the counterpart of `cpu_routes`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import lower_grid, lower_program
from portmm.dispatch.cpu_kernels import isa_of
from portmm.dispatch.machine import MOST, Launch, bind
from portmm.dispatch.schedule_choice import Choice, choose
from portmm.errors import ScheduleError
from portmm.ir.block_program import program_of
from portmm.schedule.gpu_wgmma import boxes
from portmm.schedule.rows import candidates, kept_in, slices
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import parse
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.dispatch.machine import Machine
    from portmm.ir.block_program import BlockProgram
    from portmm.ir.grid_kernel import GridKernel
    from portmm.schedule.program import Vectors
    from portmm.schedule.rows import Size
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.spec.layouts import Views
    from portmm.spec.problem import Problem
    from portmm.target.target import Target

MOST_ROUTES = 4096
"""Routes kept before all are dropped: an endless series of new shapes must not fill memory."""
READ_VIEWS = ("simt", "mma", "direct")
"""Programs whose transfers read operands by layouts with transforms."""
NEIGHBOURS = 4
"""Columns of a vector access where all operands are aligned: 16 bytes of f32."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The compiled kernels of a problem on a device.

    Attributes:
        choice: the schedule, and its alternatives.
        kernels: with their compiled functions, in the order in which they run.
    """

    choice: Choice
    kernels: tuple[tuple[GridKernel, Any], ...]

    def workspace(self, m: int, n: int, batch: int) -> int:
        """Elements of 32 bits for the partial sums of k splits, which another kernel or block reduces."""
        s = self.choice.schedule
        if s.parallel.fixup:  # full tiles
            return s.parallel.split * batch * -(-m // s.block.m) * -(-n // s.block.n) * s.block.m * s.block.n
        return s.parallel.split * batch * m * n if s.parallel.split > 1 else 0

    def launches(self, values: dict[str, Any], p: Problem) -> tuple[tuple[Launch, ...], tuple[int, str]]:
        """The kernels with their numbers, and the elements of 32 bits of their workspace, and its type."""
        first, *rest = self.kernels
        apart = {"c_m": p.n, "c_batch": p.m * p.n} if self.choice.schedule.slices else {}
        launches = (bind(*first, values | apart), *(bind(*x, values | {"work_batch": p.m * p.n}) for x in rest))
        return launches, (self.workspace(p.m, p.n, p.batch), p.acc)


_routes = Memory(MOST_ROUTES, "routes")


def route(p: Problem, on: Machine, vectors: Vectors, views: Views | None = None) -> Route:
    """Kernels for a problem, selected and compiled once per problem and device, perhaps of views of A or B.

    Raises:
        ScheduleError: no schedule is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    key = (p, on.key, vectors) if views is None else (p, on.key, vectors, views)
    kept: Route | None = _routes.get(key)
    if kept is None:
        choice = choose(p, on.target, vectors=vectors) if views is None else of_views(p, on.target, vectors, views)
        kept = _routes.keep(key, Route(choice, _code(choice.schedule, on, views)))
    return kept


def of_views(p: Problem, target: Target, vectors: Vectors, views: Views) -> Choice:
    """The schedule predicted to be fastest among those whose transfers read views.

    Raises:
        ScheduleError: there is none.
    """
    choice = choose(p, target, vectors=vectors, tuned=False)
    every = ((choice.schedule, choice.cost), *choice.runners_up)
    reads = [x for x in every if _reads(x[0], views)]
    if not reads:
        raise ScheduleError(f"no schedule of {p} reads views on {target.name}")
    return replace(choice, schedule=reads[0][0], cost=reads[0][1], runners_up=tuple(reads[1:]))


def _reads(s: Schedule, views: Views) -> bool:
    """Whether the transfers of a schedule read views."""
    if views.padding and s.a.asynchronous:
        return False
    if s.program == "wgmma" and views.a is not None and views.b is None:
        return boxes(views.a, s.types[0]) is not None
    return s.program in READ_VIEWS


def routes(requested: Sequence[tuple[Problem, Vectors]], on: Machine, compilers: int) -> list[Route]:
    """Routes for several problems, whose kernels are compiled in parallel by `compilers` threads.

    Raises:
        ScheduleError: no schedule is legal for one of them.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    new = [
        choose(p, on.target, vectors=vectors).schedule
        for p, vectors in requested
        if (p, on.key, vectors) not in _routes
    ]
    with ThreadPoolExecutor(compilers) as pool:
        list(pool.map(lambda s: _code(s, on), dict.fromkeys(new)))
    return [route(p, on, vectors) for p, vectors in requested]


def _code(s: Schedule, on: Machine, views: Views | None = None) -> tuple[tuple[GridKernel, Any], ...]:
    """The kernels of a schedule and their compiled functions, which serve other sizes too."""
    key = s if views is None else (s, views)
    return on.loaded(key, lambda: lower_grid(s, isa_of(s, on.target), views))


# -- rows ------------------------------------------------------------------------------


def launches(
    what: str | BlockProgram, size: Size, strides: Sequence[tuple[int, ...]], aligned: list[int], on: Machine
) -> tuple[tuple[Launch, ...], int]:
    """The kernels for expressions over rows, or down columns, and the f32 elements of their workspace.

    Args:
        what: the expressions, or a block program.
        size: rows, columns, items.
        strides: of each operand, along a batch, rows and columns, in elements.
        aligned: bytes that each operand's address is a multiple of.
        on: the device.

    Raises:
        ScheduleError: there are too many elements.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    program = program_of(parse(what)) if isinstance(what, str) else what
    fused = program.fused
    if not fused.column_reductions:
        size, strides = merged(fused, size, strides)
    m, n, batch = size
    if m * batch > MOST or n > MOST:
        raise ScheduleError(f"{batch} x {m} rows of {n}: kernels count rows, and columns, in 32 bits; split the array")
    values: dict[str, Any] = {"m": m, "n": n, "batch": batch}
    for i, steps in enumerate(strides):
        values |= {f"x{i}_{axis}": s for axis, s in zip("bmn", steps, strict=False)}
    neighbours = 1 if fused.column_reductions else vector(fused, size, strides, aligned)
    schedules = candidates(program, size, on.target, neighbours, exchange=on.language == "cuda")
    if not schedules:
        return (), 0
    s, parts = schedules[0], 0
    if s.parallel.split != 1:
        parts = values["slices"] = slices(size, s.threads, on.target)
    isa = next(x for x in on.target.isas if x.vector("f32", 1))

    def lower() -> tuple[Any, ...]:
        return lower_program(program_of(parse(what), kept_in(s)) if isinstance(what, str) else what, s, isa)

    kernels = on.loaded((what, s), lower)
    return tuple(bind(*x, values) for x in kernels), parts * batch * len(fused.column_reductions) * n


def merged(fused: Fused, size: Size, strides: Sequence[tuple[int, ...]]) -> tuple[Size, Sequence[tuple[int, ...]]]:
    """The size and strides as one long row, if expressions are element-wise and operands contiguous."""
    m, n, batch = size
    alone = fused.reductions or any(x.op in ("index", "extent") for x in fused.steps)
    if alone or m * batch == 1 or m * n * batch > MOST:
        return size, strides
    for x, (b, row, *_) in zip(fused.operands, strides, strict=True):
        even = x.axes == "bmn" and x.dense and (m == 1 or row == n) and (batch == 1 or b == m * n)
        if x.axes and not even:
            return size, strides
    return (1, m * n * batch, 1), strides


def vector(fused: Fused, size: Size, strides: Sequence[tuple[int, ...]], aligned: list[int]) -> int:
    """The number of neighbouring columns that a vector access may cover."""
    m, n, batch = size
    if n % NEIGHBOURS:
        return 1
    for x, (b, row, *_), at in zip(fused.operands, strides, aligned, strict=True):
        if "n" not in x.axes or not x.dense:
            continue
        moved = [b] * ("b" in x.axes and batch > 1) + [row] * ("m" in x.axes and m > 1)
        if any(s % NEIGHBOURS for s in moved) or at % (NEIGHBOURS * BY_NAME[x.dtype].bytes):
            return 1
    return NEIGHBOURS
