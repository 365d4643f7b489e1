"""Dynamic M: kernels for any number of rows.

Owns `route`, which returns a kernel for a product of a fused function, preferring one
that is compiled for another number of rows if that is nearly as fast as the best:
a kernel serves any number of rows, and compiling another takes as long as a thousand calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from portmm.dispatch import config
from portmm.ops import routes
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.spec.problem import Problem

NEARLY = 1.15
"""Predicted time, relative to the best kernel, up to which a compiled kernel is preferred."""
MOST = 1024
"""Products remembered before the memo is emptied."""

_first, _schedules, _routes = Memory(MOST, "routes"), Memory(MOST, "routes"), Memory(MOST, "routes")


def route(p: Problem) -> Any:
    """A launchable kernel.

    Raises:
        ScheduleError: no schedule is legal.
        BuildError: it cannot be compiled.
    """
    if p.static:
        return routes.route(p)
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
        return kernel or routes.route(p)
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
        return routes.route(p)
    return cpu_routes.route_by(min(known, key=costs.__getitem__), p, target, choice.workers)
