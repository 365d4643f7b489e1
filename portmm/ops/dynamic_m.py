"""Kernels for any number of rows.

Owns `route`, which finds a kernel for a product of a fused function, and takes one
that another number of rows has led to if that is nearly as good as the best:
a kernel serves any number of rows, and compiling another takes a thousand calls'
time. Imports `ops.matmul`, `dispatch.cpu`, `util.memo`, `dispatch.config`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from portmm.dispatch import config
from portmm.ops import matmul as matmul_op
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.spec.problem import Problem

NEARLY = 1.15
"""Predicted time, over that of the best kernel, up to which one that is there is taken."""
MOST = 1024
"""Products that are remembered before starting afresh."""

_first, _schedules, _routes = Memory(MOST), Memory(MOST), Memory(MOST)


def route(p: Problem) -> Any:
    """A launchable kernel.

    Raises:
        ScheduleError: nothing is legal.
        BuildError: it cannot be compiled.
    """
    if p.static:
        return matmul_op.route(p)
    about = (replace(p, m=0), config.current(), config.limit())
    found = _routes.get((p.m, about))
    if found is None:
        found = _found(p, about)
        if len(_routes) >= MOST:
            for memo in (_routes, _first, _schedules):
                memo.clear()
        _routes[p.m, about] = found
    return found


def _found(p: Problem, about: Any) -> Any:
    book = route_cache.of_target(config.current().target or os.environ.get("PORTMM_TARGET", ""))
    asked = route_cache.question(p, (p.m, p.m), config.limit())
    found = None if book is None else route_cache.route(book, asked, runtime(), p)
    first = _first.setdefault(about, p)
    if first is p:
        return found or matmul_op.route(p)
    if found is not None:
        return found
    from portmm.dispatch import cpu as cpu_dispatch

    target, threads = config.target(), config.get_num_threads()
    schedules = _schedules.get(about)
    if schedules is None:
        schedules = _schedules[about] = [cpu_dispatch.choose(first, target, threads).schedule]
    choice = cpu_dispatch.choose(p, target, threads)
    costs = {choice.schedule: choice.cost.seconds} | {s: c.seconds for s, c in choice.runners_up}
    known = [s for s in schedules if costs.get(s, float("inf")) <= NEARLY * choice.cost.seconds]
    if not known:
        schedules.append(choice.schedule)
        return matmul_op.route(p)
    return cpu_dispatch.route_by(min(known, key=costs.__getitem__), p, target, choice.workers)
