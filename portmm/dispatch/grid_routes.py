"""Dispatch of problems to compiled kernels on a device.

Owns the memo of kernels compiled for a device.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import lower_grid
from portmm.dispatch.cpu_kernels import isa_of
from portmm.dispatch.machine import Launch, bind
from portmm.dispatch.schedule_choice import Choice, choose
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.dispatch.machine import Machine
    from portmm.ir.grid_kernel import GridKernel
    from portmm.schedule.program import Vectors
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem

MOST_ROUTES = 4096
"""Routes kept before all are dropped: an endless series of new shapes must not fill memory."""


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
        choice = choose(p, on.target, vectors=vectors)
        kept = _routes.keep(key, Route(choice, _code(choice.schedule, on)))
    return kept


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


def _code(s: Schedule, on: Machine) -> tuple[tuple[GridKernel, Any], ...]:
    """The kernels of a schedule and their compiled functions, which serve other sizes too."""
    return on.loaded(s, lambda: lower_grid(s, isa_of(s, on.target)))
