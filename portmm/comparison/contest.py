"""Taking turns.

Owns `compare`: it starts one process per contender, lets exactly one of them
work at a time, and turns their answers into a `Report`. Imports the rest of
`compare`, and `detect`.
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
from portmm.comparison.limit import Limits, chip, forced_isa, measured
from portmm.comparison.peers import Contender, find
from portmm.comparison.process import Worker, WorkerError
from portmm.comparison.report import Entrant, Entry, Report, Result
from portmm.comparison.seen import shaped
from portmm.comparison.suite import cases
from portmm.detect import host

if TYPE_CHECKING:
    from portmm.comparison.case import Case

Progress = Callable[[int, int, str], None]

ROUNDS = 7
FEWEST_ROUNDS = 3
# Seconds of one contender's turn: long enough that the clock and a page fault
# do not matter, short enough for a suite in two minutes.
TURN = 0.02
OPENING = 120.0
PATIENCE = 60.0
# The slowest contender that is still waited for, in flop/s, with some calls to make.
SLOWEST = 1e8
LONGEST = 3600.0
LIVES = 3


@dataclass(slots=True)
class _Lane:
    """A contender during the contest."""

    contender: Contender
    worker: Worker | None = None
    entrant: Entrant | None = None
    lives: int = LIVES
    samples: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.contender.name


@dataclass(frozen=True, slots=True)
class _Rules:
    setup: Setup
    rounds: int
    turn: float
    patience: float
    seed: int


def compare(
    suite: str | Sequence[Case | Sequence[int]] = "quick",
    *,
    threads: int = 1,
    contenders: Iterable[str | Contender] | None = None,
    rounds: int = ROUNDS,
    budget_s: float = 100.0,
    turn_s: float = TURN,
    patience_s: float = PATIENCE,
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
        budget_s: seconds for the whole; cases for which none are left are
            reported as skipped.
        turn_s: seconds of one turn.
        patience_s: seconds before a contender that does not answer is ended.
        target: value for PORTMM_TARGET; None takes the caller's. If its best ISA
            is less than the machine's, every peer is held to the same.
        device: where the arrays are: "cuda", "cuda:1" or "opencl"; empty for the processor.
            There "quick" and "smoke" are suites for devices, and the contenders others.
        limits: measure what the machine could reach; of a device, look it up.
        cold: each call finds its operands in memory, not in caches.
        seed: of the inputs.
        progress: called with (cases done, cases, what happens now).

    Raises:
        ValueError: a suite, contender or device is unknown, or a device is to be held to a target.
        TargetError: the target is unknown, or this machine cannot run it.
        NoDeviceError: there is no such device.
    """
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
    deadline = time.monotonic() + budget_s
    tell(0, len(chosen), "probing the machine")
    reach = there or (measured(setup.target) if limits else Limits())
    rules = _Rules(setup, max(rounds, 1), turn_s, patience_s, seed)
    results: list[Result] = []
    skipped: list[str] = []
    with ExitStack() as stack:
        lanes = [_Lane(contender) for contender in field_]
        for lane in lanes:
            tell(0, len(chosen), f"opening {lane.name}")
            stack.callback(_close, lane)
            _open(lane, setup)
        for i, case in enumerate(chosen):
            left = deadline - time.monotonic()
            if left <= 0:
                skipped.append(case.name)
                continue
            tell(i, len(chosen), case.name)
            field_of_it = [lane for lane in lanes if asked or lane.contender.adds_to(case)]
            entries = _case(field_of_it, case, rules, left / (len(chosen) - i))
            limit = reach.of(case, setup.threads, cold=cold) if limits else None
            results.append(_result(case, field_of_it, entries, limit))
        entrants = tuple(lane.entrant for lane in lanes if lane.entrant)
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
        rates=reach.rates if limits else {},
        device=device,
        cold=setup.cold,
        alone="" if setup.isa or device else forced_isa(setup.target),
    )


def _held_to(target: str | None, threads: int, *, cold: bool) -> Setup:
    """On the processor: what a target, by default the environment's, asks of everyone."""
    target = target if target is not None else os.environ.get("PORTMM_TARGET", "")
    isa = forced_isa(target)
    return Setup(threads, isa if isa in FORCED else "", target, cold=enough(host().levels, threads) if cold else 0)


def _open(lane: _Lane, setup: Setup) -> None:
    """Start a lane's worker; a library that is not there is an answer, not an error."""
    contender = lane.contender
    lane.worker = Worker(contender, setup)
    try:
        hello = lane.worker.hear(OPENING)
    except WorkerError as error:
        hello = {"state": error.state, "reason": str(error)}
    if hello["state"] != "ok":
        _close(lane)
    if lane.entrant is None:
        version, reason = hello.get("version", ""), hello.get("reason", "")
        rough = hello.get("approximate", False)
        lane.entrant = Entrant(contender.name, contender.peer, hello["state"], version, reason, contender.hint, rough)


def _close(lane: _Lane) -> None:
    if lane.worker:
        lane.worker.close()
        lane.worker = None


def _ask(lane: _Lane, request: dict[str, Any], case: Case, rules: _Rules) -> dict[str, Any]:
    """Ask a lane's worker; the end of the worker comes back as an answer too."""
    if lane.worker is None:
        return {"state": "crashed", "reason": "crashed before, given up"}
    try:
        return lane.worker.ask(request, min(rules.patience + case.flops / SLOWEST, LONGEST))
    except WorkerError as error:
        _close(lane)
        lane.lives -= 1
        return {"state": error.state, "reason": str(error)}


def _case(lanes: Sequence[_Lane], case: Case, rules: _Rules, share: float) -> dict[str, Entry]:
    """Run one case in about `share` seconds."""
    start = time.monotonic()
    entries: dict[str, Entry] = {}
    for lane in lanes:
        lane.samples.clear()
        if lane.entrant is None or lane.entrant.state != "ok":
            continue
        if lane.worker is None and lane.lives > 0:
            _open(lane, rules.setup)
        answer = _ask(lane, {"do": "prepare", "case": asdict(case), "seed": rules.seed}, case, rules)
        entries[lane.name] = _entry(answer)
    running = [lane for lane in lanes if lane.name in entries and entries[lane.name].state == "ok"]
    _rounds(running, entries, case, rules, start + share)
    for lane in running:
        if entries[lane.name].state == "ok":
            answer = _ask(lane, {"do": "drop"}, case, rules)
            entries[lane.name] = _finished(entries[lane.name], lane.samples, answer)
    return entries


def _rounds(lanes: Sequence[_Lane], entries: dict[str, Entry], case: Case, rules: _Rules, deadline: float) -> None:
    """Each lane's turn, round after round, with another one first each time."""
    for i in range(rules.rounds):
        if i >= min(FEWEST_ROUNDS, rules.rounds) and time.monotonic() > deadline:
            return
        first = i % max(len(lanes), 1)
        for lane in (*lanes[first:], *lanes[:first]):
            if entries[lane.name].state != "ok":
                continue
            answer = _ask(lane, {"do": "time", "seconds": rules.turn}, case, rules)
            if answer["state"] == "ok":
                lane.samples.append(answer["seconds"])
            else:
                entries[lane.name] = Entry(answer["state"], reason=answer["reason"])


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


def _result(case: Case, lanes: Sequence[_Lane], entries: dict[str, Entry], limit: float | None) -> Result:
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
    return Result(case, entries, best, ratio, limit)
