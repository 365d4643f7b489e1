"""Selection of the rivals of a race, and the process that selects and builds them.

Owns which candidates race, and `serve`, the helper's side of `dispatch.rival_process`. Candidates that add in one order
give the same bits; with `race="any"` others race as well.
"""

from __future__ import annotations

import _socket
import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from portmm.build import child_process
from portmm.dispatch import config, cpu_kernels
from portmm.dispatch.cpu_background import same_results
from portmm.dispatch.cpu_routes import tuned_within
from portmm.dispatch.rival_process import MOST_BYTES, RACED, WORDS
from portmm.dispatch.schedule_choice import predicted, select_for_class
from portmm.errors import PortmmError
from portmm.runtime import route_cache
from portmm.runtime.route_cache import Racer
from portmm.schedule.text import parse, spell
from portmm.spec.problem import Problem

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.target.target import Target

MOST_RIVALS = 3
"""Rivals of the selected schedule."""
MOST_PREDICTED = 1.6
"""A rival's predicted time over the least: what is slower loses too much while it is tried."""


def rivals_of(
    wanted: Schedule, listed: Sequence[Schedule], seconds: Sequence[float], *, others: bool = False
) -> list[Schedule]:
    """The rivals of a selected schedule: the fastest by prediction that differs in each of `_WAYS`, then the next.

    What a model gets wrong about one schedule it gets wrong about its neighbours. Of the searches of Zen 4, Zen 5 and
    Sapphire Rapids, priced by their own models, by others' and by generic ones, winners of these are 1.017 to 1.040
    times as fast as the selected schedule; of the next by prediction and other register tiles, 1.010 to 1.034.

    Args:
        wanted: the selected schedule.
        listed: candidates.
        seconds: their predicted times.
        others: also those of other results.
    """
    least = min(seconds)
    order = sorted(range(len(listed)), key=seconds.__getitem__)
    usable = [
        listed[i]
        for i in order
        if listed[i] != wanted and seconds[i] <= MOST_PREDICTED * least and (others or same_results(listed[i], wanted))
    ]
    rivals: list[Schedule] = []
    for way in _WAYS:
        known = {way(s) for s in (wanted, *rivals)}
        rivals += [s for s in usable if way(s) not in known][:1]
    return [*rivals, *(s for s in usable if s not in rivals)][:MOST_RIVALS]


def _packing(s: Schedule) -> tuple[Any, ...]:
    return s.program, s.isa, s.a.packed, s.b.packed, s.b.once, s.b.panels


_WAYS: tuple[Callable[[Schedule], Any], ...] = (_packing, lambda s: (s.mr, s.nr), lambda s: s.kc)
"""The ways in which rivals differ from the selected schedule, and from each other."""


def racers(
    p: Problem, served: tuple[int, int], limit: int, target: Target, stored: str, *, others: bool
) -> list[Racer]:
    """The kernels of a race, built now: that of the selected schedule, and its rivals; empty if there is none.

    Args:
        p: the problem with the most rows that a route serves.
        served: the range of these.
        limit: of threads, as configured.
        target: the machine.
        stored: spelling of the winner of an earlier race, which then is the only rival, or empty.
        others: also rivals of other results.
    """
    threads = limit or max(1, target.cores)
    if tuned_within(p, served, target, threads):
        return []
    best = select_for_class(p, target, threads)
    if stored:
        rivals = [parse(stored)]
    else:
        seconds = predicted(p, best.listed, best.workers)
        rivals = rivals_of(best.schedule, best.listed.schedules, seconds, others=others)
    built: dict[str, Racer] = {}
    for s in (best.schedule, *rivals):
        kernel = cpu_kernels.kernel_of(s, cpu_kernels.isa_of(s, target))
        work = cpu_kernels.workspace_bytes(kernel, p, best.workers)
        key = cpu_kernels.build_kernel(kernel).key
        built.setdefault(key, Racer(key, kernel.name, work, best.workers, spell(s)))
    return list(built.values())


def serve(idle: float) -> None:
    """Answer the questions that come on standard input, a socket, until its other end is closed, or none comes.

    Args:
        idle: seconds to wait for a question.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connection = _socket.socket(fileno=0)
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    main = threading.get_ident()

    def read() -> None:
        while message := connection.recv(MOST_BYTES):
            questions.put(message)
        signal.pthread_kill(main, signal.SIGINT)  # a compiler that runs is ended, and its files are removed

    child_process.background.set(True)
    threading.Thread(target=read, daemon=True).start()
    try:
        while True:
            number, question = json.loads(questions.get(timeout=idle))
            connection.send(json.dumps([number, _answer(**question)]).encode())
    except (KeyboardInterrupt, OSError, queue.Empty):
        os._exit(0)


def _answer(  # noqa: PLR0917 - the words of a question
    problem: dict[str, Any], served: list[int], limit: int, target: str, key: str, question: str, *, others: bool
) -> list[Racer] | None:
    """The racers for a route whose kernel has a key; None if there are none, or the route is of another schedule."""
    p, (least, most) = Problem(**problem), served
    route_cache.forget()
    kept = route_cache.of_target(target)
    if kept is None:
        return None
    stored = route_cache.remark(kept, question)  # by a process that raced meanwhile
    winner = stored.split(" ", WORDS)[-1] if stored.startswith(RACED) else ""
    try:
        machine = config.target(target)
        built = racers(p, (least, most), limit, machine, winner, others=others)
    except PortmmError:
        return None
    if len(built) < 2 or built[0].key != key:
        return None
    route_cache.keep_racers(kept, question, built, machine)
    return built
