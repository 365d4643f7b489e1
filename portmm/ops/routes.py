"""Routes of products on the host: a launchable kernel for a problem.

Owns the memo of routes by row class. A route comes from the memo, from the route cache of earlier processes, or is
selected and built now. `route_of_rows` prefers a kernel that is compiled for another number of rows if that is nearly
as fast as the best: a kernel serves any number of rows, and compiling another takes as long as a thousand calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.dispatch import config
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.spec.row_classes import rows
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem

MOST_CLASSES = 4096
"""Routes of row classes remembered for calls through Python."""
NEARLY = 1.15
"""Predicted time, relative to the best kernel, up to which a compiled kernel is preferred."""
MOST = 1024
"""Products of fused functions remembered before the memo is emptied."""

_classes = Memory(MOST_CLASSES, "routes")
_met, _staying = Memory(MOST_CLASSES, "routes"), Memory(MOST_CLASSES, "routes")
"""Classes that were served by the base set, and its kernels that no better one replaces."""
_kinds, _routes = Memory(MOST, "routes"), Memory(MOST, "routes")


def route(p: Problem) -> Any:
    """A launchable kernel for a problem: from the memo or the route cache, or selected and built now."""
    return routed(p)[0]


def routed(p: Problem) -> tuple[Any, bool]:
    """A launchable kernel, and whether it serves all problems of the class of `p` (see `row_classes`)."""
    kernel, shared = routed_for_call(p, background=False)
    return kernel, bool(shared)


def routed_first(p: Problem) -> tuple[Any, bool | None]:
    """As `routed`, perhaps by a kernel of the base set: None if it is for this call only, as one is in the making."""
    from portmm.dispatch import base_kernels

    return ((_known(p) or _basic(p)) if base_kernels.active() else None) or routed(p)


def routed_for_call(p: Problem, *, background: bool = True) -> tuple[Any, bool | None]:
    """As `routed`; with `background`, None if the kernel is for this call only, while that of `p` is being built."""
    known = _known(p)
    if known is not None:
        return known
    from portmm.dispatch import base_kernels

    if background and base_kernels.active():
        basic = _basic(p)
        if basic is not None:
            return basic
    from portmm.dispatch import cpu_race, cpu_routes

    target, kept, limit = config.target(), route_cache.of_target(config.target_name()), config.limit()
    threads = limit or config.get_num_threads()

    def keep(kernel: Any, served: tuple[int, int]) -> None:
        if kept is not None:
            route_cache.keep(kept, route_cache.question(p, served, limit), kernel, target)

    kernel, served = cpu_routes.routed(p, target, threads, kept, later=keep if background else None)
    if served is None:
        return kernel, None
    keep(kernel, served)
    return _remembered(p, cpu_race.enter(kernel, p, served, kept), served)


def _basic(p: Problem) -> tuple[Any, bool | None] | None:
    """A kernel of the base set for this call, while a better one may be in the making; None if there is none.

    Returns:
        The kernel, and None; or whether it serves the class of `p`, where it stays.
    """
    from portmm.dispatch import base_kernels

    key = _key(p)
    if (staying := _staying.get(key)) is not None:
        return staying, True
    limit = config.limit()
    basic = base_kernels.route(p)
    if basic is None:
        return None
    kernel, schedule = basic

    def keep(better: Any, served: tuple[int, int]) -> None:
        kept = route_cache.of_target("")
        if kept is not None:
            route_cache.keep(kept, route_cache.question(p, served, limit), better, config.target(""))
        if served == rows(p):
            _classes.keep(key, better)

    def stay() -> None:
        _staying.keep(key, kernel)

    if key in _met:  # not in the first call of a kind: modules that build are slow to import
        base_kernels.improve(p, schedule, keep, stay)
    _met.keep(key, True)
    return kernel, None


def _key(p: Problem) -> tuple[Any, ...]:
    """The key of the class of a problem, under the current settings."""
    return rows(p)[1], p.but_rows, config.target_name(), config.limit(), config.race() == "any"


def _remembered(p: Problem, kernel: Any, served: tuple[int, int]) -> tuple[Any, bool]:
    """A route, which is remembered if it serves the class of a problem, and whether it does."""
    shared = served == rows(p)
    return (_classes.keep(_key(p), kernel) if shared else kernel), shared


def _known(p: Problem) -> tuple[Any, bool] | None:
    """A route from the memo or from the route cache, and whether it serves the class; None if there is none."""
    kernel = _classes.get(_key(p))
    if kernel is not None:
        return kernel, True
    from portmm.dispatch import base_kernels, stored_kernels

    if (stored := stored_kernels.route(p, config.machine_of, config.get_num_threads)) is not None:
        return _remembered(p, *stored)
    if base_kernels.leads() and not route_cache.is_open(config.target_name()):
        return None  # reading it would take longer than all of a first call
    from portmm.dispatch import cpu_race

    kept = route_cache.of_target(config.target_name())
    for served in dict.fromkeys((rows(p), (p.m, p.m))):
        question = cpu_race.question(p, served, kept)
        kernel = None if kept is None else route_cache.route(kept, question, runtime(), p)
        if kept is not None and kernel is not None:
            if not cpu_race.is_over(question, kept):
                kernel = cpu_race.enter(kernel, p, served, kept)
            return _remembered(p, kernel, served)
    return None


def packing(word: str, layout: str, n: int, elements: int) -> tuple[str, Any] | None:
    """The packed layout of weights and the route that packs, of the base set or a bundle; None if neither has them.

    Args:
        word: as of `stored_kernels.packing_question`.
        layout: "row" or "col", of the weight.
        n: its columns.
        elements: of the weight.

    Raises:
        BundleError: a bundle or the base set is damaged.
    """
    from portmm.dispatch import base_kernels, stored_kernels

    if base_kernels.active():
        return base_kernels.packing(word, layout, elements)
    known = stored_kernels.bundled_packing(word, layout, n, config.machine_of)
    return known and (known[0], base_kernels.packing_route(*known, word, config.get_num_threads()))


def build_selected(p: Problem) -> None:
    """Build and load the kernel that is selected for a problem: its route then takes no compiler."""
    from portmm.dispatch import cpu_kernels, overrides, schedule_choice

    if overrides.active():
        return
    target = config.target()
    choice = schedule_choice.choose(p, target, config.limit() or config.get_num_threads())
    cpu_kernels.code_of(choice.schedule, target, route_cache.of_target(config.target_name()))


def route_of_rows(p: Problem) -> Any:
    """A launchable kernel for a product of a fused function, perhaps that of another number of rows."""
    but_rows = (p.but_rows, config.current(), config.limit())
    first, schedules = _kinds.get(but_rows) or _kinds.keep(but_rows, (p, []))
    known = _known(p)
    if known is not None or p.static or first == p:
        return route(p) if known is None else known[0]
    key = (p.m, but_rows)
    kernel = _routes.get(key)
    return _routes.keep(key, _of_other_rows(p, first, schedules)) if kernel is None else kernel


def _of_other_rows(p: Problem, first: Problem, schedules: list[Schedule]) -> Any:
    """A route by one of the schedules that are compiled for problems like `p`, which came `first`, or by another."""
    from portmm.dispatch import cpu_routes, schedule_choice

    target, threads = config.target(), config.get_num_threads()
    if not schedules:
        schedules.append(schedule_choice.choose(first, target, threads).schedule)
    choice = schedule_choice.choose(p, target, threads)
    costs = {choice.schedule: choice.cost.seconds} | {s: c.seconds for s, c in choice.runners_up}
    known = [s for s in schedules if costs.get(s, float("inf")) <= NEARLY * choice.cost.seconds]
    if known:
        return cpu_routes.route_by(min(known, key=costs.__getitem__), p, target, choice.workers)
    schedules.append(choice.schedule)
    return route(p)
