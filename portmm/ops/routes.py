"""Routes of products on the host: a launchable kernel for a problem.

Owns the memo of routes by row class. A route comes from the memo, from the route cache of earlier processes, or is
selected and built now. `route_of_rows` prefers a kernel that is compiled for another number of rows if that is nearly
as fast as the best: a kernel serves any number of rows, and compiling another takes as long as a thousand calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from portmm.dispatch import config, cpu_race
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.spec.row_classes import rows
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.spec.problem import Problem

MOST_CLASSES = 4096
"""Routes of row classes remembered for calls through Python."""
NEARLY = 1.15
"""Predicted time, relative to the best kernel, up to which a compiled kernel is preferred."""
MOST = 1024
"""Products of fused functions remembered before the memo is emptied."""

_classes = Memory(MOST_CLASSES, "routes")
_first, _schedules, _routes = Memory(MOST, "routes"), Memory(MOST, "routes"), Memory(MOST, "routes")


def route(p: Problem) -> Any:
    """A launchable kernel for a problem: from the memo or the route cache, or selected and built now.

    Raises:
        ScheduleError: no schedule is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    return routed(p)[0]


def routed(p: Problem) -> tuple[Any, bool]:
    """A launchable kernel, and whether it serves all problems of the class of `p` (see `row_classes`).

    Raises:
        ScheduleError: no schedule is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    kernel, shared = routed_for_call(p, background=False)
    return kernel, bool(shared)


def routed_for_call(p: Problem, *, background: bool = True) -> tuple[Any, bool | None]:
    """As `routed`; with `background`, None if the kernel is for this call only, while that of `p` is being built.

    Raises:
        ScheduleError: no schedule is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    name, limit = config.target_name(), config.limit()
    least, most = rows(p)
    but_rows = p.but_rows
    key = (most, but_rows, name, limit)
    kernel = _classes.get(key)
    if kernel is not None:
        return kernel, True
    kept = route_cache.of_target(name)
    if kept is not None:
        for span in ((least, most), (p.m, p.m)):
            line = route_cache.question(p, span, limit)
            kernel = route_cache.route(kept, line, runtime(), p)
            if kernel is not None:
                if not route_cache.remark(kept, line):
                    cpu_race.enter(kernel, p, span, kept)
                return (_classes.keep(key, kernel), True) if span == (least, most) else (kernel, False)
    from portmm.dispatch import cpu_routes

    target = config.target()
    threads = limit or config.get_num_threads()

    def keep(kernel: Any, served: tuple[int, int]) -> None:
        if kept is not None:
            route_cache.keep(kept, route_cache.question(p, served, limit), kernel, target)

    kernel, served = cpu_routes.routed(p, target, threads, kept, later=keep if background else None)
    if served is None:
        return kernel, None
    keep(kernel, served)
    cpu_race.enter(kernel, p, served, kept)
    return (_classes.keep(key, kernel), True) if served == (least, most) else (kernel, False)


def route_of_rows(p: Problem) -> Any:
    """A launchable kernel for a product of a fused function, perhaps that of another number of rows.

    Raises:
        ScheduleError: no schedule is legal.
        BuildError: it cannot be compiled.
    """
    if p.static:
        return route(p)
    but_rows = (replace(p, m=0), config.current(), config.limit())
    kernel = _routes.get((p.m, but_rows))
    if kernel is None:
        kernel = _find(p, but_rows)
        if len(_routes) >= MOST:
            for memo in (_routes, _first, _schedules):
                memo.clear()
        _routes[p.m, but_rows] = kernel
    return kernel


def _find(p: Problem, but_rows: Any) -> Any:
    cache = route_cache.of_target(config.target_name())
    question = route_cache.question(p, (p.m, p.m), config.limit())
    kernel = None if cache is None else route_cache.route(cache, question, runtime(), p)
    first = _first.setdefault(but_rows, p)
    if first is p:
        return kernel or route(p)
    if kernel is not None:
        return kernel
    from portmm.dispatch import cpu_routes, schedule_choice

    target, threads = config.target(), config.get_num_threads()
    schedules = _schedules.get(but_rows)
    if schedules is None:
        schedules = _schedules[but_rows] = [schedule_choice.choose(first, target, threads).schedule]
    choice = schedule_choice.choose(p, target, threads)
    costs = {choice.schedule: choice.cost.seconds} | {s: c.seconds for s, c in choice.runners_up}
    known = [s for s in schedules if costs.get(s, float("inf")) <= NEARLY * choice.cost.seconds]
    if not known:
        schedules.append(choice.schedule)
        return route(p)
    return cpu_routes.route_by(min(known, key=costs.__getitem__), p, target, choice.workers)
