"""Coordinator of a comparison: alternates contenders, case by case.

Owns `compare`: it starts one process per contender, lets exactly one of them
work at a time, and turns their replies into a `Report`.

The budget covers the start of workers, compilers, checks and turns. A case that is not finished when it
ends is reported as skipped, as are those that come after it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from portmm.comparison.case import Case
from portmm.comparison.device_arrays import parsed
from portmm.comparison.limit import Facts, Limits, chip, facts, forced_isa
from portmm.comparison.measure import enough
from portmm.comparison.peers import FORCED, Contender, Setup, find, removed
from portmm.comparison.process import LATE, LIMIT, LIMIT_BENCH, PATIENCE, Lane, Rules, close, keep_log
from portmm.comparison.random_shapes import seeded
from portmm.comparison.report import Entry, Report, Result
from portmm.comparison.shapes import cases, shaped, suite_of
from portmm.host import machine_load
from portmm.host.detect import host

Progress = Callable[[int, int, str], None]

ROUNDS = 7
FEWEST_ROUNDS = 3
# Seconds of one contender's turn: long enough for the clock and a page fault to be
# negligible, short enough for a suite in two minutes.
TURN = 0.02
PATIENT = 60.0
CHECKING = 0.5
"""Most time of the check after timing, as a share of that of the preparation: both compute results and check them,
and the preparation also allocates operands, packs weights and compiles."""


@dataclass(slots=True)
class _Gauge:
    """Measurement of the machine's limits, alternating with the contenders.

    Attributes:
        lane: its worker's lane; None for a device, or without limits.
        facts: of a device, whose limits are looked up.
        best: name of a rate -> the highest that was measured.
        peak: name of the atom that bounds the current case, empty if none does.
        samples: name of a rate -> its rounds on the current case.
    """

    lane: Lane | None = None
    facts: Facts | None = None
    best: dict[str, float] = field(default_factory=dict)
    peak: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)

    def prepare(self, case: Case, rules: Rules) -> None:
        """Select the rates that bound a case."""
        self.peak = ""
        self.samples.clear()
        if self.lane and self.lane.opened:
            self.lane.relaunch(rules)
            request = {"do": "prepare", "case": asdict(case), "seed": rules.seed}
            self.peak = self.lane.ask(request, case, rules).get("peak", "")

    def measure(self, case: Case, rules: Rules) -> None:
        """Run a turn."""
        if self.lane and self.peak:
            answer = self.lane.ask({"do": "time", "seconds": rules.turn}, case, rules)
            for name, rate in answer.get("rates", {}).items():
                self.samples.setdefault(name, []).append(rate)
                self.best[name] = max(rate, self.best.get(name, 0.0))


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
    """Time portmm and every other library that is installed, each in its own process.

    Args:
        suite: name of a suite, group or case, several joined with commas; or cases; or shapes: (m, n, k) or
            (batch, m, n, k) of float32.
        threads: threads of each contender.
        contenders: names or records; None for all that are known, some of them only for
            certain cases: see `Contender.only`.
        rounds: turns of each contender on each case; fewer, but at least three,
            where the budget is short.
        budget_s: seconds for the whole comparison, with the start of libraries and all checks; cases for
            which no time is left are reported as skipped.
        turn_s: seconds of one turn.
        patience_s: seconds after which a contender that does not reply is ended.
        target: value for PORTMM_TARGET; None takes the caller's. If its best ISA
            is less than the machine's, every peer is restricted to the same ISA.
        device: device of the arrays: "cuda", "cuda:1" or "opencl"; empty for the processor.
            On devices "quick" and "smoke" name other suites, and the contenders are others.
        limits: measure the machine's limits, alternating with the contenders; for a device, look them up.
        cold: each call finds its operands in memory, not in caches.
        seed: of the inputs, and of the shapes of random suites.
        progress: called with (cases done, cases, text about the current step).

    Raises:
        ValueError: a suite, contender or device is unknown, or a device has a target too.
        TargetError: the target is unknown, or this machine cannot run it.
        NoDeviceError: there is no such device.
    """
    began = time.monotonic()
    if device and target:
        raise ValueError(f"device {device} cannot be held to target {target!r}; leave one of them out")
    chip_facts = facts(device) if device else None
    if chip_facts and isinstance(suite, str):
        suite = suite_of(suite, chip_facts.kind)
    selected = cases(suite, seed) if isinstance(suite, str) else tuple(map(shaped, suite))
    if threads < 1 or rounds < 1 or not selected:
        raise ValueError(f"{threads} threads, {rounds} rounds, {len(selected)} cases: there must be one of each")
    field_ = find(contenders, parsed(device)[0] if device else "")
    by_name = contenders is not None
    field_ = tuple(contender for contender in field_ if by_name or any(map(contender.adds_to, selected)))
    if chip_facts:
        setup = Setup(device=device, cold=chip_facts.cold if cold else 0)
    else:
        setup = _host_setup(target, threads, cold=cold)
    tell = progress or (lambda _done, _all, _text: None)
    rules = Rules(setup, max(rounds, 1), turn_s, patience_s, seed, began + budget_s)
    limit_lane = Lane(LIMIT, bench=LIMIT_BENCH) if limits and not chip_facts else None
    gauge = _Gauge(limit_lane, chip_facts if limits else None)
    lanes = [Lane(contender) for contender in field_]
    everyone = [*lanes, *([gauge.lane] if gauge.lane else [])]
    results: list[Result] = []
    skipped: list[str] = []
    before = machine_load.snapshot()
    with ExitStack() as stack:
        stack.callback(lambda: close(everyone, max(0.0, min(PATIENCE, rules.left))))
        for lane in everyone:
            lane.launch(rules)
        for lane in everyone:
            tell(0, len(selected), f"opening {lane.name}")
            lane.greet(rules)
        for i, case in enumerate(selected):
            if rules.left <= 0:
                skipped.append(case.name)
                continue
            tell(i, len(selected), case.name)
            field_of_it = [lane for lane in lanes if by_name or lane.contender.adds_to(case)]
            result = _case(field_of_it, gauge, case, rules, rules.left / (len(selected) - i))
            if result is None:
                skipped.append(case.name)
            else:
                results.append(result)
    keep_log(rules.log)
    # A limit that could not be measured is reported like a missing contender.
    entrants = tuple(x.entrant for x in everyone if x.entrant and (x is not gauge.lane or not x.opened))
    tell(len(selected), len(selected), "done")
    return Report(
        chip=chip_facts.title if chip_facts else chip(),
        machine=chip_facts.name if chip_facts else host().name,
        threads=setup.threads,
        isa=setup.isa,
        suite=seeded(suite, seed) if isinstance(suite, str) else "custom",
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


def _host_setup(target: str | None, threads: int, *, cold: bool) -> Setup:
    """Setup on the processor: the ISA of a target, by default the environment's, restricts all contenders."""
    target = target if target is not None else os.environ.get("PORTMM_TARGET", "")
    isa = forced_isa(target)
    return Setup(threads, isa if isa in FORCED else "", target, cold=enough(host().levels, threads) if cold else 0)


def _pids(lanes: Iterable[Lane]) -> list[int]:
    return [lane.worker.pid for lane in lanes if lane.worker]


def _case(lanes: Sequence[Lane], gauge: _Gauge, case: Case, rules: Rules, share: float) -> Result | None:
    """Result of one case, run for about `share` seconds; None if the budget ends before."""
    began = time.monotonic()
    everyone = [*lanes, *([gauge.lane] if gauge.lane else [])]
    before = machine_load.snapshot(_pids(everyone))
    entries: dict[str, Entry] = {}
    for lane in lanes:
        lane.samples.clear()
        if not lane.opened:
            continue
        lane.relaunch(rules)
        answer = lane.ask({"do": "prepare", "case": asdict(case), "seed": rules.seed}, case, rules)
        if answer["state"] == LATE:
            return None
        entries[lane.name] = _entry(answer)
    gauge.prepare(case, rules)
    running = [lane for lane in lanes if lane.name in entries and entries[lane.name].state == "ok"]
    checks = CHECKING * (time.monotonic() - began)
    ends = (began + share, rules.deadline - checks)
    if not _rounds(running, gauge, entries, case, rules, ends=ends):
        return None
    for lane in running:
        if entries[lane.name].state == "ok":
            answer = lane.ask({"do": "drop"}, case, rules)
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
    """Run rounds with a turn for each lane, each round beginning with another one.

    Args:
        lanes: those that are ready.
        gauge: has a turn in each round too.
        entries: entries of the lanes; updated for those that fail.
        case: the case that is timed.
        rules: rounds and turns.
        ends: time after which no further round starts once the fewest are complete; and time at which the last
            one must have ended.

    Returns:
        Whether the fewest rounds were completed.
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
            answer = lane.ask({"do": "time", "seconds": rules.turn}, case, rules)
            if answer["state"] == LATE:
                return False
            if answer["state"] == "ok":
                lane.samples.append(answer["seconds"])
            else:
                entries[lane.name] = _entry(answer)
        gauge.measure(case, rules)
    return True


def _limit(gauge: _Gauge, case: Case, rules: Rules) -> tuple[float | None, str]:
    """Limit of a case in GFLOP/s, and the name of the rate that sets it."""
    setup, cold = rules.setup, bool(rules.setup.cold)
    if gauge.facts:
        return gauge.facts.of(case, setup.threads, cold=cold), ""
    rates = {name: statistics.median(values) for name, values in gauge.samples.items()}
    known = Limits(rates, host().levels, {case.problem.dtype: gauge.peak})
    limit = known.of(case, setup.threads, cold=cold)
    return limit, known.roof(case, cold=cold) if limit else ""


def _entry(answer: dict[str, Any]) -> Entry:
    """Entry of a lane after its reply to a request: a failure, or what is known before any timing."""
    if answer["state"] != "ok":
        return Entry(answer["state"], reason=answer["reason"])
    wrong = "; ".join(answer.get("wrong", ()))
    return Entry(
        "ok", method=answer.get("method", ""), reason=wrong, error=answer["error"], bound=answer.get("bound", 0)
    )


def _finished(entry: Entry, samples: Sequence[float], answer: dict[str, Any]) -> Entry:
    if answer["state"] != "ok":
        return _entry(answer)
    error = max(entry.error, answer["error"])
    return replace(entry, seconds=statistics.median(samples), samples=tuple(samples), error=error)


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
