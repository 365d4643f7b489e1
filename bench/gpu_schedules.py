"""All candidates of a case on a device: predicted and measured seconds, which is what tunes the cost model.

A call is made once to see which problem it poses; then again with each candidate in place of what would be chosen.
So candidates of products, of products with an epilogue, of weights of four bits, of groups and of attention are
surveyed alike, through the call that a user makes. Kernels are compiled beforehand, by several threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gpu_families
import numpy as np
from gpu_peers import NoPeers
from gpu_run import say

from portmm.codegen.lower import grid_atom
from portmm.dispatch import device_routes
from portmm.dispatch.schedule_choice import Choice
from portmm.dispatch.tuned_schedule import problem_text
from portmm.errors import PortmmError
from portmm.schedule import gpu_attention, gpu_attention_choice
from portmm.schedule.candidates import candidates
from portmm.schedule.gpu_cost import cost
from portmm.schedule.text import spell
from portmm.util.memo import forget_all

BEST = 2 / 3
"""Of those measured, the share that are predicted to be the fastest; the rest is spread over all others."""
SHORT = 3e-4
"""Seconds below which candidates are timed in graphs."""
ROUNDS, MANY = 3, 16
"""Measurements of which the least counts, and calls of a graph, at least."""


def ranked(problem, target, vectors):
    """Candidates and their costs, the best predicted first."""
    found = [
        (cost(problem, s, grid_atom(target.isa(s.isa), s), target), s) for s in candidates(problem, target, vectors)
    ]
    return sorted(found, key=lambda x: x[0].seconds)


def picked(found, most):
    """The best, and some of all others."""
    if len(found) <= most:
        return found
    first = int(most * BEST)
    rest = found[first:]
    step = len(rest) / (most - first)
    return found[:first] + [rest[int(i * step)] for i in range(most - first)]


@dataclass(frozen=True)
class Candidate:
    """A way to compute a call.

    Attributes:
        spelt: its name, which tells it apart from others.
        shown: for people.
        kind: what it has in common with those that are like it.
        predicted: seconds; None where nothing predicts them.
        terms: what the prediction is made of.
        build: compiles it, and gives what `forced` puts in place of the choice.
    """

    spelt: str
    shown: str
    kind: tuple
    predicted: float | None
    terms: dict
    build: Any


def of_each_kind(found):
    """The best of each program, unit and way to feed it."""
    kinds = {}
    for x in found:
        kinds.setdefault(x.kind, x)
    return list(kinds.values())


@contextmanager
def replaced(module, name, value):
    """A function of a module, for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield before
    finally:
        setattr(module, name, before)


@dataclass(frozen=True)
class Surveyed:
    """The problem that a call poses: as text, with the hook that replaces its choice, and candidates."""

    problem: Any
    place: tuple
    found: tuple

    @contextmanager
    def forced(self, built):
        """Calls are computed so, for a while: what was found out about kinds of calls is forgotten before and after."""
        forget_all()
        try:
            with replaced(*self.place, lambda *_: built):
                yield
        finally:
            forget_all()


def opened(call, operands):
    """The problem of a call, and its candidates, the best predicted first.

    Raises:
        PortmmError: it poses nothing that has candidates.
    """
    routes, tiles = [], []
    route, listed = device_routes.route, gpu_attention_choice.choices

    def seen(p, on, vectors):
        routes.append((p, on, vectors))
        return route(p, on, vectors)

    def seen_tiles(wanted, target):
        tiles.append((wanted, target))
        return listed(wanted, target)

    forget_all()
    with replaced(device_routes, "route", seen), replaced(gpu_attention_choice, "choices", seen_tiles):
        call(operands)
    if tiles:
        return Surveyed(tiles[0][0]._asdict(), (gpu_attention_choice, "choices"), tuple(_attention(*tiles[0])))
    if not routes:
        raise PortmmError("the call poses no problem that has candidates")
    p, on, vectors = max(routes, key=lambda x: x[0].m * x[0].n * x[0].k * x[0].batch)
    return Surveyed(p, (device_routes, "route"), tuple(_schedules(p, on, vectors)))


def _schedules(p, on, vectors):
    """Candidates of a product."""
    for terms, s in ranked(p, on.target, vectors):
        shared = (s.parallel.warpgroups, s.parallel.pingpong, s.parallel.cluster)

        def build(s=s, terms=terms):
            choice = Choice(p, on.target, 1, s, terms, ())
            return device_routes.Route(choice, device_routes._code(s, on))  # noqa: SLF001

        kind = (s.program, s.isa, s.a.asynchronous, s.atom.swap, s.parallel.split > 1, *shared)
        yield Candidate(
            spell(s), str(s), kind, terms.seconds, {"overlapped": terms.overlapped, "added": terms.added}, build
        )


def _attention(wanted, target):
    """Candidates of attention, of which one compiles when it is first called."""
    hertz = 1e9 * (target.frequency_ghz or 1)
    for s in (*gpu_attention_choice.matrix_units(wanted, target), *gpu_attention.candidates(wanted, target)):
        cycles = gpu_attention_choice.time(s, wanted, target)
        seconds = cycles / hertz if cycles else None
        text = f"{s.program} {s.block.m}x{s.block.n} threads {s.threads}" + (f" slots {s.stages}" if seconds else "")
        text += " in turns" if s.parallel.pingpong else ""
        yield Candidate(str(s), text, (s.program, s.threads, s.stages), seconds, {}, lambda s=s: [s])


def survey(on, case, *, l2, most=36, turns=5, threads=8, skip=(), part=(0, 1), compile_only=False, said=False):
    """Rows of candidates: predicted and measured seconds, each checked, and how well the order was predicted.

    Without turns, the best of each kind is checked, and none is timed.

    Args:
        on: arrays.
        case: what to compute.
        l2: bytes of the last cache, which operands that rotate exceed; 1 for as few operands as can be.
        most: candidates.
        turns: calls that are timed together.
        threads: that compile.
        skip: names of candidates that are left out.
        part: of those chosen, each that is i-th of n.
        compile_only: none is run.
        said: name each candidate when it is compiled and before it runs, and give its row, for whoever reads lines of
            this process and takes silence for a fault.
    """
    work = gpu_families.made(on, NoPeers(), case, l2)
    seen = opened(work.ours, work.sets[0])
    chosen = picked(list(seen.found), most) if turns else of_each_kind(seen.found)
    chosen = [x for x in chosen if x.spelt not in skip][part[0] :: part[1]]

    def build(x):
        try:
            return x.build()
        except PortmmError as error:
            return error
        finally:
            if said:
                say("built", x.spelt)

    with ThreadPoolExecutor(threads) as pool:
        ready = list(pool.map(build, chosen))
    head = {"size": [case.m, case.n, case.k], "candidates": len(seen.found), "problem": _text(seen.problem)}
    rows = []
    for x, built in zip(chosen, ready, strict=True):
        row = {"schedule": x.shown, "spelt": x.spelt, "predicted": x.predicted, "terms": x.terms}
        if said:
            say("trying", x.spelt)
        if isinstance(built, PortmmError):
            row |= {"seconds": None, "right": None, "why": str(built)}
        elif compile_only:
            row |= _compiled(seen, built, work)
        else:
            row |= _tried(on, seen, built, work, turns)
        rows.append(row)
        if said:
            say("part", row)
    return head | {**_summary(rows), "rows": rows}


def _text(problem):
    return problem if isinstance(problem, dict) else problem_text(problem)


def _compiled(seen, built, work):
    with seen.forced(built):
        work.ours(work.sets[0])
    return {"seconds": None, "right": None}


def _tried(on, seen, built, work, turns):
    """A candidate's measurement, or the reason for none; a fault of the device ends the survey."""
    try:
        return _measured(on, seen, built, work, turns)
    except Exception as error:  # noqa: BLE001 - one candidate must not end the others
        on.wait()
        return {"seconds": None, "right": None, "why": f"{type(error).__name__}: {error}"[:500]}


def _measured(on, seen, built, work, turns):
    """Seconds of calls that are computed so, the least of some rounds, and whether they are right."""
    with seen.forced(built):
        try:
            found = work.ours(work.sets[0])
        except PortmmError as error:
            return {"seconds": None, "right": None, "why": str(error)}
        on.wait()
        share = float(work.share(found, work.sets[0]))
        row = {"seconds": None, "right": share <= 1, "error": share}
        del found
        if not turns:
            return row
        calls = [lambda i=i: work.ours(work.sets[i % len(work.sets)]) for i in range(1, turns + 1)]
        on.seconds(calls[:1])
        taken = min(on.seconds(calls) for _ in range(ROUNDS))
        row |= {"seconds": taken, "timed": "calls"}
        if taken < SHORT:
            many = [lambda i=i: work.ours(work.sets[i % len(work.sets)]) for i in range(max(MANY, len(work.sets)))]
            try:
                clock = on.replayed(many)
                row |= {"seconds": min(clock() for _ in range(ROUNDS)), "timed": "graph", "calls": taken}
            except (RuntimeError, PortmmError, NotImplementedError) as error:
                row["not captured"] = str(error)[:200]
        return row


def _summary(rows):
    """Spearman's rank correlation, and the rate of what would be chosen over that of the best."""
    found = [(x["predicted"], x["seconds"]) for x in rows if x["seconds"] and x["predicted"]]
    if len(found) < 2:
        return {"correlation": None, "chosen": None}
    orders = [np.argsort(np.argsort(x)) for x in zip(*found, strict=True)]
    correlation = float(np.corrcoef(*orders)[0, 1])
    return {"correlation": correlation, "chosen": min(x for _, x in found) / found[0][1]}
