"""Races between schedules, in the calls of users: the first calls of a kind run the best candidates in turn.

Owns which routes race, and what is kept of a race for other processes. Rivals give the same bits as the selected
schedule, so that no result depends on the winner, unless `race="any"` was asked for. Another process selects and builds
them (`dispatch.rival_process`); this one loads what is built. The run time times the calls and decides
(`runtime/race.c`). What was built is kept in the cache, and what a race found is in the route cache, for all processes
on this machine: one that ends before its race is over leaves the next one less to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from portmm.dispatch import config, rival_process
from portmm.dispatch.rival_process import RACED, WORDS
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.util.records import replace

if TYPE_CHECKING:
    from portmm.dispatch.schedule_choice import Choice
    from portmm.runtime.route_cache import Racer, RouteCache
    from portmm.spec.problem import Problem

LEAST_FLOPS = 2e6
"""Operations from which a call is worth a race: some ten microseconds."""
AFTER_SECONDS = 0.04
"""Time of the calls of a kind before it races, and between two attempts: 20 times what a race takes from them, as far
as it is work of the calling process: it starts another, loads three kernels, and writes a line."""
WAIT_SECONDS = 20.0
"""Most seconds that `await_races` waits: three compilations, on a machine that does other work."""
ANY = " any"
"""The end of questions whose answers may be kernels of other results."""


_open: set[int] = set()
"""Races that have begun and are not over, by the identity of their tasks."""


def mark() -> str:
    """The end of the questions of the route cache under the current settings."""
    return ANY if config.race() == "any" else ""


def question(p: Problem, served: tuple[int, int], kept: RouteCache | None) -> str:
    """The question of the route cache for a route under the current settings: that of any results if it is answered.

    Args:
        p: the problem.
        served: the least and the largest M that the route serves.
        kept: the route cache of the configured target.
    """
    plain = route_cache.question(p, served, config.limit())
    return f"{plain}{ANY}" if kept is not None and mark() and f"{plain}{ANY}" in kept.lines else plain


def is_over(question: str, kept: RouteCache) -> bool:
    """Whether the route of a question is what a race left, under the current settings."""
    return bool(route_cache.remark(kept, question)) and question.endswith(mark())


def enter(route: Any, p: Problem, served: tuple[int, int], kept: RouteCache | None) -> Any:
    """Let the route of a selected schedule race, if it is one that may.

    Args:
        route: of the selected schedule.
        p: the problem.
        served: the least and the largest M that the route serves.
        kept: the route cache of the configured target.

    Returns:
        The route; a copy of it where other results are allowed, since elsewhere they are not.
    """
    if p.flops < LEAST_FLOPS or p.deterministic or kept is None:
        return route
    which = config.race()
    if which and rival_process.possible():
        if which == "any":
            route = runtime().make_route(route.kernel, route.work_bytes, route.workers, route.dtype, p.unit)
        race = _Race(replace(p, m=served[1]), served, config.limit(), config.target_name(), kept, mark())
        runtime().race(route, race, AFTER_SECONDS)
    return route


class _Race:
    """The race of a route: called by the run time to bring rivals, and with the result.

    Args:
        p: the problem with the most rows that the route serves.
        served: the range of these.
        limit: of threads, as configured.
        target: name of the target in the settings.
        kept: its route cache.
        mark: `mark` of the settings.
    """

    def __init__(  # noqa: PLR0917 - one caller
        self, p: Problem, served: tuple[int, int], limit: int, target: str, kept: RouteCache, mark: str
    ) -> None:
        self.p, self.served, self.limit, self.target, self.kept, self.mark = p, served, limit, target, kept, mark
        self.question = route_cache.question(p, served, limit) + mark
        self.schedules: dict[int, str] = {}  # by the identity of their routes

    def __call__(self, route: Any, winner: Any = None, ratio: float = 1.0) -> None:
        _open.add(id(self))
        if winner is not None:
            from portmm.dispatch import cpu_background

            _open.discard(id(self))
            cpu_background.begin(("race", self.target, self.question), lambda: self._keep(winner, 1 / ratio))
        elif racers := route_cache.racers(self.kept, self.question):
            self._start(route, racers)
        else:
            words = {"problem": asdict(self.p), "served": self.served, "limit": self.limit, "target": self.target}
            words |= {"key": _key(route), "question": self.question, "others": bool(self.mark)}
            if not rival_process.ask(words, lambda x: self._start(route, [route_cache.Racer(*y) for y in x or ()])):
                _open.discard(id(self))
                runtime().start_race(route, None)

    def _start(self, route: Any, racers: list[Racer]) -> None:
        """Load rivals and begin; without any, the selected schedule stays. The routes live as long as the race."""
        rivals = []
        if racers and racers[0].key == _key(route):
            loaded = [(x, route_cache.routed(route_cache.spelled(x), runtime(), self.p)) for x in racers[1:]]
            rivals = [(x, rival) for x, rival in loaded if rival is not None]
            self.schedules = {id(route): racers[0].schedule} | {id(rival): x.schedule for x, rival in rivals}
        if not rivals:
            _open.discard(id(self))
        runtime().start_race(route, tuple([rival for _, rival in rivals]))

    def _keep(self, winner: Any, gain: float) -> None:
        """Store the winner for other processes."""
        result = f"{RACED} {len(self.schedules)} {gain:.4f} {self.schedules[id(winner)]}"
        route_cache.keep(self.kept, self.question, winner, config.target(self.target), result)


def _key(route: Any) -> str:
    """Key of the shared object that a route launches."""
    return str(route.kernel.path).rpartition("/")[2].removesuffix(".so")


def await_races(call: Callable[[], object]) -> None:
    """Call until the races of these calls are over, for measurements of what stays."""
    start = time.perf_counter()
    while config.race() and time.perf_counter() < start + WAIT_SECONDS:
        if time.perf_counter() > start + 2 * AFTER_SECONDS and not _open:
            return
        rival_process.wait(WAIT_SECONDS)
        call()


def result_of(p: Problem) -> tuple[str, str]:
    """The sentence about the race of a problem under the current settings, and the winner; empty if there was none."""
    from portmm.spec.row_classes import rows

    kept = route_cache.of_target(config.target_name())
    for served in (rows(p), (p.m, p.m)):
        about = question(p, served, kept)
        stored = route_cache.remark(kept, about) if kept is not None and about.endswith(mark()) else ""
        if stored.startswith(RACED):
            _, count, gain, text = stored.split(" ", WORDS)
            return f"raced: {count} candidates, {float(gain):.2f}x the predicted one", text
    return "", ""


def raced(choice: Choice) -> Choice:
    """A choice as a race on this machine left it: the winner, or the choice itself if there was none.

    Args:
        choice: of a schedule for the configured target.
    """
    from portmm.dispatch.schedule_choice import schedule_cost
    from portmm.schedule.text import parse

    origin, text = ("", "") if choice.origin.startswith("tuned") else result_of(choice.problem)
    if not origin:
        return choice
    s = parse(text)
    terms = schedule_cost(choice.problem, s, choice.target, choice.workers)
    rest = tuple(x for x in ((choice.schedule, choice.cost), *choice.runners_up) if x[0] != s)
    return replace(choice, schedule=s, cost=terms, runners_up=rest, origin=origin)
