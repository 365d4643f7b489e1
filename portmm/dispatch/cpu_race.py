"""Races between schedules, in the calls of users: the first calls of a kind run the best candidates in turn.

Owns which routes race, the choice of rivals, and what is kept of a race for other processes. Rivals give the same bits
as the selected schedule, so that no result depends on who wins. Their kernels are built in the background, by a
compiler at low priority, once calls of a kind took some time; the run time times the calls and decides
(`runtime/race.c`). A process that ends earlier leaves nothing, and the next one starts afresh; what a race found is in
the route cache, for all processes on this machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from portmm.dispatch import config
from portmm.errors import PortmmError
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import UNCONVERTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.dispatch.schedule_choice import Choice
    from portmm.runtime.route_cache import RouteCache
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem

MOST_RIVALS = 3
"""Rivals of the selected schedule."""
MOST_PREDICTED = 1.6
"""A rival's predicted time over the least: what is slower loses too much while it is tried."""
LEAST_FLOPS = 2e6
"""Operations from which a call is worth a race: some ten microseconds."""
AFTER_SECONDS = 0.3
"""Time of the calls of a kind before it races: 20 times what rivals take from them, whose choice and lowering are
Python that holds its lock for some 15 ms."""
RACED = "raced"
"""The field of a route's line in the cache after which a race follows."""


def enter(route: Any, p: Problem, served: tuple[int, int], kept: RouteCache | None) -> None:
    """Let the route of a selected schedule race, if it is one that may.

    Args:
        route: of the selected schedule.
        p: the problem.
        served: the least and the largest M that the route serves.
        kept: the route cache of the configured target.
    """
    if p.flops < LEAST_FLOPS or p.dtype not in UNCONVERTED or p.deterministic or p.static:
        return
    if config.race():
        race = _Race(replace(p, m=served[1]), served, config.limit(), config.target_name(), kept)
        runtime().race(route, race, AFTER_SECONDS)


class _Race:
    """The race of a route: called by the run time to bring rivals, and with the result.

    Args:
        p: the problem with the most rows that the route serves.
        served: the range of these.
        limit: of threads, as configured.
        target: name of the target in the settings.
        kept: its route cache.
    """

    def __init__(self, p: Problem, served: tuple[int, int], limit: int, target: str, kept: RouteCache | None) -> None:
        self.p, self.served, self.limit, self.target, self.kept = p, served, limit, target, kept
        self.schedules: dict[int, Schedule] = {}  # by the identity of their routes

    def __call__(self, route: Any, winner: Any = None, ratio: float = 1.0) -> None:
        from portmm.dispatch import cpu_background

        key = ("race", self.target, self.p, self.served, self.limit, winner is None)
        if winner is None:
            if not cpu_background.begin(key, lambda: self._bring_rivals(route)):
                runtime().start_race(route, ())
        elif self.kept is not None:
            cpu_background.begin(key, lambda: self._keep(winner, 1 / ratio))

    def _bring_rivals(self, route: Any) -> None:
        """Build the kernels of rivals, and begin; the routes live as long as the race."""
        from portmm.dispatch.cpu_routes import route_by, tuned_within
        from portmm.dispatch.overrides import active
        from portmm.dispatch.schedule_choice import predicted, select_for_class

        target, rivals = config.target(self.target), []
        threads = self.limit or max(1, target.cores)
        if active() or tuned_within(self.p, self.served, target, threads):
            runtime().start_race(route, ())
            return
        try:
            best = select_for_class(self.p, target, threads)
            seconds = predicted(self.p, best.listed, best.workers)
            self.schedules[id(route)] = best.schedule
            for s in rivals_of(best.schedule, best.listed.schedules, seconds):
                rival = route_by(s, self.p, target, best.workers)
                rivals.append(rival)
                self.schedules[id(rival)] = s
        except PortmmError:
            rivals = []  # the selected schedule stays
        runtime().start_race(route, tuple(rivals))

    def _keep(self, winner: Any, gain: float) -> None:
        """Store the winner for other processes."""
        from portmm.schedule.text import spell

        assert self.kept is not None  # noqa: S101 - its caller looks
        result = f"{RACED} {len(self.schedules)} {gain:.4f} {spell(self.schedules[id(winner)])}"
        question = route_cache.question(self.p, self.served, self.limit)
        route_cache.keep(self.kept, question, winner, config.target(self.target), result)


def rivals_of(wanted: Schedule, listed: Sequence[Schedule], seconds: Sequence[float]) -> list[Schedule]:
    """The rivals of a selected schedule, of the same results: by predicted time, no two of one register tile at first.

    Args:
        wanted: the selected schedule.
        listed: candidates.
        seconds: their predicted times.
    """
    from portmm.dispatch.cpu_background import same_results

    least = min(seconds)
    order = sorted(range(len(listed)), key=seconds.__getitem__)
    usable = [
        listed[i]
        for i in order
        if listed[i] != wanted and seconds[i] <= MOST_PREDICTED * least and same_results(listed[i], wanted)
    ]
    tiles = {(wanted.mr, wanted.nr)}
    first: list[Schedule] = []
    for s in usable:
        if (s.mr, s.nr) not in tiles:
            tiles.add((s.mr, s.nr))
            first.append(s)
    rest = [s for s in usable if s not in first]
    # The next by prediction, then other tiles.
    return [*rest[:1], *first, *rest[1:]][:MOST_RIVALS]


def raced(choice: Choice, limit: int) -> Choice:
    """A choice as a race on this machine left it: the winner, or the choice itself if there was none.

    Args:
        choice: of a schedule for the configured target.
        limit: of threads, as configured.
    """
    from portmm.dispatch.schedule_choice import schedule_cost
    from portmm.schedule.text import parse
    from portmm.spec.row_classes import rows

    p, kept = choice.problem, route_cache.of_target(config.target_name())
    if kept is None or choice.origin.startswith("tuned"):
        return choice
    for served in (rows(p), (p.m, p.m)):
        stored = route_cache.remark(kept, route_cache.question(p, served, limit))
        if not stored.startswith(RACED):
            continue
        _, count, gain, text = stored.split(" ", 3)
        s = parse(text)
        terms = schedule_cost(p, s, choice.target, choice.workers)
        rest = tuple(x for x in ((choice.schedule, choice.cost), *choice.runners_up) if x[0] != s)
        origin = f"raced: {count} candidates, {float(gain):.2f}x the predicted one"
        return replace(choice, schedule=s, cost=terms, runners_up=rest, origin=origin)
    return choice
