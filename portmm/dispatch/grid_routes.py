"""Dispatch of problems to compiled kernels on a device.

Owns the selection of a schedule for a device, and the memo of kernels compiled for it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import grid_atom, lower_grid
from portmm.dispatch.launches import Launch, bind
from portmm.dispatch.schedule_choice import Choice, overlaid
from portmm.errors import ScheduleError
from portmm.schedule.gpu_candidates import candidates
from portmm.schedule.gpu_cost import cost
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.dispatch.machine import Machine
    from portmm.ir.grid_kernel import GridKernel
    from portmm.schedule.roofline import Cost
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.isa import Isa
    from portmm.target.target import Target

MOST_ROUTES = 4096
"""Routes kept before all are dropped: an endless series of new shapes must not fill memory."""

Vectors = tuple[int, int, int]


def choose(p: Problem, target: Target, vectors: Vectors, *, tuned: bool = True) -> Choice:
    """The schedule measured to be fastest, or the one with the least predicted time; the first of equals.

    Args:
        p: the problem.
        target: the device.
        vectors: elements of a vector access to A, B and C.
        tuned: look in the database of tuned schedules.

    Raises:
        ScheduleError: no schedule is legal, or the product is empty.
    """
    if 0 in (p.m, p.n, p.k, p.batch):
        raise ScheduleError(f"{p} has no products: there is nothing to choose")
    listed = candidates(p, target, vectors)
    timed = [(_predicted(p, s, target), s) for s in listed]
    ranked = sorted(enumerate(timed), key=lambda x: (x[1][0].seconds, x[0]))
    (_, (terms, best)), *rest = ranked
    choice = Choice(p, target, 1, best, terms, tuple((s, c) for _, (c, s) in rest))
    return overlaid(choice, listed, 1, _predicted) if tuned else choice


def _predicted(p: Problem, s: Schedule, target: Target, _workers: int = 1) -> Cost:
    return cost(p, s, grid_atom(_isa(s, target), s), target)


def _isa(s: Schedule, target: Target) -> Isa:
    isa = target.isa(s.isa)
    assert isa is not None  # noqa: S101 - candidates are the target's
    return isa


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The compiled kernels of a problem on a device.

    Attributes:
        choice: the schedule, and its alternatives.
        kernels: in the order in which they run.
        functions: their compiled functions.
    """

    choice: Choice
    kernels: tuple[GridKernel, ...]
    functions: tuple[Any, ...]

    def workspace(self, m: int, n: int, batch: int) -> int:
        """Elements of 32 bits for the partial sums of k splits, which another kernel or block reduces."""
        s = self.choice.schedule
        if s.parallel.fixup:  # full tiles
            return s.parallel.split * batch * -(-m // s.block.m) * -(-n // s.block.n) * s.block.m * s.block.n
        return s.parallel.split * batch * m * n if s.parallel.split > 1 else 0

    def launches(self, values: dict[str, Any], p: Problem) -> tuple[tuple[Launch, ...], tuple[int, str]]:
        """The kernels with their numbers, and the elements of 32 bits of their workspace, and its type."""
        kernels = list(zip(self.kernels, self.functions, strict=True))
        apart = {"c_m": p.n, "c_batch": p.m * p.n} if self.choice.schedule.slices else {}
        launches = [bind(*kernels[0], values | apart)]
        launches += [bind(*x, values | {"work_batch": p.m * p.n}) for x in kernels[1:]]
        return tuple(launches), (self.workspace(p.m, p.n, p.batch), p.acc)


_routes = Memory(MOST_ROUTES, "routes")


def route(p: Problem, on: Machine, vectors: Vectors) -> Route:
    """Kernels for a problem, selected and compiled once per problem and device.

    Raises:
        ScheduleError: no schedule is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    key = (p, on.key, vectors)
    kept: Route | None = _routes.get(key)
    if kept is None:
        choice = choose(p, on.target, vectors)
        kept = _routes.keep(key, Route(choice, *_code(choice.schedule, on)))
    return kept


def routes(requested: Sequence[tuple[Problem, Vectors]], on: Machine, compilers: int) -> list[Route]:
    """Routes for several problems, whose kernels are compiled in parallel by `compilers` threads.

    Raises:
        ScheduleError: no schedule is legal for one of them.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    new = [choose(p, on.target, vectors).schedule for p, vectors in requested if (p, on.key, vectors) not in _routes]
    with ThreadPoolExecutor(compilers) as pool:
        list(pool.map(lambda s: _code(s, on), dict.fromkeys(new)))
    return [route(p, on, vectors) for p, vectors in requested]


def _code(s: Schedule, on: Machine) -> tuple[tuple[GridKernel, ...], tuple[Any, ...]]:
    """The kernels of a schedule and their compiled functions, which serve other sizes too."""
    loaded = on.loaded(s, lambda: lower_grid(s, _isa(s, on.target)))
    return tuple([kernel for kernel, _ in loaded]), tuple([function for _, function in loaded])
