"""Turns of contenders, case by case.

Owns `compare`: it starts one process per contender, lets exactly one of them
work at a time, and turns their answers into a `Report`. Imports the rest of
`compare`, `host.machine_load` and `host.detect`.

The budget is kept: it counts the start of workers, compilers, checks and turns. A case that is not finished when it
ends is reported as skipped, as are those that come after it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from portmm.comparison.cold import enough
from portmm.comparison.device_arrays import parsed
from portmm.comparison.device_facts import facts
from portmm.comparison.device_suite import meant
from portmm.comparison.environment import FORCED, Setup, removed
from portmm.comparison.lane import LATE, LIMIT, LIMIT_WORKER, Lane, Rules, ask, close, greet, keep_log, launch
from portmm.comparison.limit import Limits, chip, forced_isa
from portmm.comparison.peers import Contender, find
from portmm.comparison.process import PATIENCE
from portmm.comparison.report import Entry, Report, Result
from portmm.comparison.seen import shaped
from portmm.comparison.suite import cases
from portmm.host import machine_load
from portmm.host.detect import host

if TYPE_CHECKING:
    from portmm.comparison.case import Case
    from portmm.comparison.device_facts import Facts

Progress = Callable[[int, int, str], None]

ROUNDS = 7
FEWEST_ROUNDS = 3
# Seconds of one contender's turn: long enough that the clock and a page fault
# do not matter, short enough for a suite in two minutes.
TURN = 0.02
PATIENT = 60.0
CHECKING = 0.5
"""The check after timing takes this part of the time before it, at most: both make results and judge them, and the
latter makes operands, packs weights and compiles besides."""


@dataclass(slots=True)
class _Gauge:
    """Measurement of what the machine could reach, in turn with the contenders.

    Attributes:
        lane: its worker's; None of a device, or where no limits are wanted.
        facts: of a device, whose limits are looked up.
        best: name of a rate -> the best that was measured of it.
        peak: name of the atom that bounds the case in hand, empty if none does.
        samples: name of a rate -> its rounds on the case in hand.
    """

    lane: Lane | None = None
    facts: Facts | None = None
    best: dict[str, float] = field(default_factory=dict)
    peak: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def opened(self) -> bool:
        """Something is to be measured."""
        return self.lane is not None and self.lane.opened


def compare(
    suite: str | Sequence[Case | Sequence[int]] = "quick",
    *,
    threads: int = 1,
    contenders: Iterable[str | Contender] | None = None,
    rounds: int = ROUNDS,
    budget_s: float = 100.0,
    turn_s: float = TURN,
    patience_s: float = PATIENT,
    target: str | None = None,
    device: str = "",
    limits: bool = True,
    cold: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Time portmm beside every library that is found, each in its own process.

    Args:
        suite: name of a suite, group or case, several joined with commas; or cases; or shapes: (m, n, k) or
            (batch, m, n, k) of float32.
        threads: threads of each contender.
        contenders: names or records; None for all that are known, but those that add
            something to some cases only, for these: see `Contender.only`.
        rounds: turns of each contender on each case; fewer, but at least three,
            where the budget is short.
        budget_s: seconds for the whole, the start of libraries and all checks among them; cases for
            which none are left are reported as skipped.
        turn_s: seconds of one turn.
        patience_s: seconds before a contender that does not answer is ended.
        target: value for PORTMM_TARGET; None takes the caller's. If its best ISA
            is less than the machine's, every peer is held to the same.
        device: where the arrays are: "cuda", "cuda:1" or "opencl"; empty for the processor.
            There "quick" and "smoke" are suites for devices, and the contenders others.
        limits: measure what the machine could reach, in turn with the contenders; of a device, look it up.
        cold: each call finds its operands in memory, not in caches.
        seed: of the inputs.
        progress: called with (cases done, cases, what happens now).

    Raises:
        ValueError: a suite, contender or device is unknown, or a device is to be held to a target.
        TargetError: the target is unknown, or this machine cannot run it.
        NoDeviceError: there is no such device.
    """
    began = time.monotonic()
    if device and target:
        raise ValueError(f"device {device} cannot be held to target {target!r}; leave one of them out")
    there = facts(device) if device else None
    if there and isinstance(suite, str):
        suite = meant(suite, there.kind)
    chosen = cases(suite) if isinstance(suite, str) else tuple(map(shaped, suite))
    if threads < 1 or rounds < 1 or not chosen:
        raise ValueError(f"{threads} threads, {rounds} rounds, {len(chosen)} cases: there must be one of each")
    field_ = find(contenders, parsed(device)[0] if device else "")
    asked = contenders is not None
    field_ = tuple(contender for contender in field_ if asked or any(map(contender.adds_to, chosen)))
    setup = Setup(device=device, cold=there.cold if cold else 0) if there else _held_to(target, threads, cold=cold)
    tell = progress or (lambda _done, _all, _text: None)
    rules = Rules(setup, max(rounds, 1), turn_s, patience_s, seed, began + budget_s)
    gauge = _Gauge(Lane(LIMIT, module=LIMIT_WORKER) if limits and not there else None, there if limits else None)
    lanes = [Lane(contender) for contender in field_]
    everyone = [*lanes, *([gauge.lane] if gauge.lane else [])]
    results: list[Result] = []
    skipped: list[str] = []
    before = machine_load.snapshot()
    with ExitStack() as stack:
        stack.callback(lambda: close(everyone, max(0.0, min(PATIENCE, rules.left))))
        for lane in everyone:
            launch(lane, rules)
        for lane in everyone:
            tell(0, len(chosen), f"opening {lane.name}")
            greet(lane, rules)
        for i, case in enumerate(chosen):
            if rules.left <= 0:
                skipped.append(case.name)
                continue
            tell(i, len(chosen), case.name)
            field_of_it = [lane for lane in lanes if asked or lane.contender.adds_to(case)]
            result = _case(field_of_it, gauge, case, rules, rules.left / (len(chosen) - i))
            if result is None:
                skipped.append(case.name)
            else:
                results.append(result)
    keep_log(rules.log)
    # A limit that could not be measured is missed like a contender.
    entrants = tuple(x.entrant for x in everyone if x.entrant and (x is not gauge.lane or not x.opened))
    tell(len(chosen), len(chosen), "done")
    return Report(
        chip=there.title if there else chip(),
        machine=there.name if there else host().name,
        threads=setup.threads,
        isa=setup.isa,
        suite=suite if isinstance(suite, str) else "custom",
        entrants=entrants,
        results=tuple(results),
        date=datetime.now(UTC).date().isoformat(),
        skipped=tuple(skipped),
        removed=removed(os.environ),
        rates=gauge.facts.rates if gauge.facts else gauge.best,
        device=device,
        cold=setup.cold,
        alone="" if setup.isa or device else forced_isa(setup.target),
        load=machine_load.others(before, machine_load.snapshot()),
        cores=machine_load.cores(),
    )


def _held_to(target: str | None, threads: int, *, cold: bool) -> Setup:
    """On the processor: what a target, by default the environment's, asks of everyone."""
    target = target if target is not None else os.environ.get("PORTMM_TARGET", "")
    isa = forced_isa(target)
    return Setup(threads, isa if isa in FORCED else "", target, cold=enough(host().levels, threads) if cold else 0)


def _pids(lanes: Iterable[Lane]) -> list[int]:
    return [lane.worker.pid for lane in lanes if lane.worker]


def _case(lanes: Sequence[Lane], gauge: _Gauge, case: Case, rules: Rules, share: float) -> Result | None:
    """Run one case in about `share` seconds; None if the time of the comparison ends before."""
    began = time.monotonic()
    everyone = [*lanes, *([gauge.lane] if gauge.lane else [])]
    before = machine_load.snapshot(_pids(everyone))
    entries: dict[str, Entry] = {}
    for lane in lanes:
        lane.samples.clear()
        if not lane.opened:
            continue
        if lane.worker is None and lane.lives > 0:
            launch(lane, rules)
            greet(lane, rules)
        answer = ask(lane, {"do": "prepare", "case": asdict(case), "seed": rules.seed}, case, rules)
        if answer["state"] == LATE:
            return None
        entries[lane.name] = _entry(answer)
    _prepare(gauge, case, rules)
    running = [lane for lane in lanes if lane.name in entries and entries[lane.name].state == "ok"]
    checks = CHECKING * (time.monotonic() - began)
    ends = (began + share, rules.deadline - checks)
    if not _rounds(running, gauge, entries, case, rules, ends=ends):
        return None
    for lane in running:
        if entries[lane.name].state == "ok":
            answer = ask(lane, {"do": "drop"}, case, rules)
            if answer["state"] == LATE:
                return None
            entries[lane.name] = _finished(entries[lane.name], lane.samples, answer)
    load = machine_load.others(before, machine_load.snapshot(_pids(everyone)))
    return _result(case, lanes, entries, _limit(gauge, case, rules), load)


def _rounds(
    lanes: Sequence[Lane],
    gauge: _Gauge,
    entries: dict[str, Entry],
    case: Case,
    rules: Rules,
    *,
    ends: tuple[float, float],
) -> bool:
    """Each lane's turn, round after round, with another one first each time.

    Args:
        lanes: those that are ready.
        gauge: has a turn in each round too.
        entries: what is known of the lanes; of those that fail, what became of them.
        case: what is timed.
        rules: rounds and turns.
        ends: when no further round starts if the fewest are made; and when the last one must have ended.

    Returns:
        Whether the fewest rounds were made.
    """
    fewest = min(FEWEST_ROUNDS, rules.rounds)
    began, last = time.monotonic(), 0.0
    for i in range(rules.rounds):
        now = time.monotonic()
        last, began = now - began, now
        if (i >= fewest and now > ends[0]) or now + last > ends[1]:
            return i >= fewest
        first = i % max(len(lanes), 1)
        for lane in (*lanes[first:], *lanes[:first]):
            if entries[lane.name].state != "ok":
                continue
            answer = ask(lane, {"do": "time", "seconds": rules.turn}, case, rules)
            if answer["state"] == LATE:
                return False
            if answer["state"] == "ok":
                lane.samples.append(answer["seconds"])
            else:
                entries[lane.name] = Entry(answer["state"], reason=answer["reason"])
        _measure(gauge, case, rules)
    return True


def _prepare(gauge: _Gauge, case: Case, rules: Rules) -> None:
    """Let the gauge pick what bounds a case."""
    gauge.peak = ""
    gauge.samples.clear()
    if gauge.lane and gauge.opened:
        if gauge.lane.worker is None and gauge.lane.lives > 0:
            launch(gauge.lane, rules)
            greet(gauge.lane, rules)
        answer = ask(gauge.lane, {"do": "prepare", "case": asdict(case)}, case, rules)
        gauge.peak = answer["peak"] if answer["state"] == "ok" else ""


def _measure(gauge: _Gauge, case: Case, rules: Rules) -> None:
    """Let the gauge have its turn."""
    if gauge.lane and gauge.peak:
        answer = ask(gauge.lane, {"do": "time", "seconds": rules.turn}, case, rules)
        for name, rate in answer.get("rates", {}).items():
            gauge.samples.setdefault(name, []).append(rate)
            gauge.best[name] = max(rate, gauge.best.get(name, 0.0))


def _limit(gauge: _Gauge, case: Case, rules: Rules) -> tuple[float | None, str]:
    """GFLOP/s that could be reached on a case, and the name of the rate behind it."""
    setup, cold = rules.setup, bool(rules.setup.cold)
    if gauge.facts:
        return gauge.facts.of(case, setup.threads, cold=cold), ""
    rates = {name: statistics.median(found) for name, found in gauge.samples.items()}
    known = Limits(rates, host().levels, {case.problem.dtype: gauge.peak})
    limit = known.of(case, setup.threads, cold=cold)
    return limit, known.roof(case, cold=cold) if limit else ""


def _entry(answer: dict[str, Any]) -> Entry:
    if answer["state"] != "ok":
        return Entry(answer["state"], reason=answer["reason"])
    wrong = "; ".join(answer["wrong"])
    return Entry("ok", method=answer["method"], reason=wrong, error=answer["error"], bound=answer["bound"])


def _finished(entry: Entry, samples: Sequence[float], answer: dict[str, Any]) -> Entry:
    if answer["state"] != "ok":
        return Entry(answer["state"], reason=answer["reason"])
    error = max(entry.error, answer["error"])
    return Entry("ok", statistics.median(samples), tuple(samples), entry.method, entry.reason, error, entry.bound)


def _result(
    case: Case,
    lanes: Sequence[Lane],
    entries: dict[str, Entry],
    limit: tuple[float | None, str] = (None, ""),
    load: float | None = None,
) -> Result:
    done = {name: entry for name, entry in entries.items() if entry.state == "ok"}
    rivals = [lane for lane in lanes if case.dynamic or not (lane.entrant and lane.entrant.approximate)]
    peers = [lane.name for lane in rivals if lane.contender.peer and lane.name in done]
    ours = [lane.name for lane in lanes if not lane.contender.peer and lane.name in done]
    best = min(peers, key=lambda name: done[name].seconds, default="")
    ratio = None
    if best and ours:
        mine = min(ours, key=lambda name: done[name].seconds)
        pairs = zip(done[best].samples, done[mine].samples, strict=True)
        ratio = statistics.median(peer / own for peer, own in pairs)
    return Result(case, entries, best, ratio, *limit, load)
