"""All candidates of a product on a device: predicted and measured seconds, which is what tunes the cost model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import gpu_families
import numpy as np

from portmm import device_arrays, foreign, grid_dispatch, on_device
from portmm.dispatch import Choice
from portmm.errors import PortmmError
from portmm.grid_candidates import candidates
from portmm.grid_cost import cost
from portmm.lower import grid_atom, lower_grid

BEST = 2 / 3
"""Of those measured, the share that are predicted to be the fastest; the rest is spread over all others."""


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


@dataclass
class Bound:
    """A schedule's kernels, ready for operands."""

    launches: tuple
    workspace: tuple
    machine: object

    def run(self, a, b, out):
        """Launch."""
        places = {name: foreign.argument(x)[1] for name, x in (("a", a), ("b", b), ("c", out))}
        kept = None
        if self.workspace[0]:
            kept, work = foreign.empty_like(a, (self.workspace[0],), self.workspace[1])
            places["work"] = foreign.argument(work)[1]
        for launch in self.launches:
            launch.run(self.machine, places, a.queue)
        return kept


def bound(call, choice, machine):
    """The kernels of a schedule for a call, compiled."""
    kernels = lower_grid(choice.schedule, machine.target.isa(choice.schedule.isa))
    route = grid_dispatch.Route(choice, kernels, tuple(machine.load(x) for x in kernels))
    return Bound(*on_device.bound(route, call.values(), call.problem), machine)


def of_each_kind(found):
    """The best of each program, unit and way to feed it."""
    kinds = {}
    for terms, s in found:
        shared = [getattr(s, name, None) for name in ("groups", "pingpong", "cluster")]
        kinds.setdefault((s.program, s.isa, s.copies, s.swap, s.split > 1, *shared), (terms, s))
    return list(kinds.values())


def survey(on, case, *, l2, most=36, turns=5, threads=8):
    """Rows of candidates: predicted and measured seconds, each checked, and how well the order was predicted.

    Without turns, the best of each kind is checked, and none is timed.
    """
    sets, _ = gpu_families._pairs(on, case, l2)  # noqa: SLF001
    left, right, _ = on_device.adopted(*sets[0])
    call, machine = on_device.question((left, right, None)), device_arrays.machine_of(left)
    p = call.problem
    every = ranked(p, machine.target, call.vectors)
    chosen = picked(every, most) if turns else of_each_kind(every)
    made = on.empty((case.m, case.n), on_device.result(left, right, None, "")[1])
    out = foreign.adopt(made)
    operands = [on_device.adopted(*x)[:2] for x in sets]
    operands = [(y, x) for x, y in operands] if call.turned else operands

    def build(x):
        try:
            return bound(call, Choice(p, machine.target, 1, x[1], x[0], ()), machine)
        except PortmmError as error:
            return error

    with ThreadPoolExecutor(threads) as pool:
        ready = list(pool.map(build, chosen))
    exact = case.dtype == "s8"
    rows = []
    for (terms, s), one in zip(chosen, ready, strict=True):
        row = {"schedule": str(s), "predicted": terms.seconds, "terms": {**terms.overlapped, **terms.added}}
        share = partial(gpu_families.share_of, on, made, *sets[0], exact=exact)
        rows.append(row | _measured(on, one, (operands, out), turns, share))
    return {"size": [case.m, case.n, case.k], "candidates": len(every), **_summary(rows), "rows": rows}


def _measured(on, one, arrays, turns, share):
    """Seconds of a schedule's kernels, the least of three turns, and whether they are right."""
    if isinstance(one, PortmmError):
        return {"seconds": None, "right": None, "why": str(one)}
    operands, out = arrays
    one.run(*operands[0], out)
    on.wait()
    right = share() <= 1
    if not turns:
        return {"seconds": None, "right": right}
    calls = [partial(one.run, *operands[i % len(operands)], out) for i in range(1, turns + 1)]
    on.seconds(calls[:1])
    return {"seconds": min(on.seconds(calls) for _ in range(3)), "right": right}


def _summary(rows):
    """Spearman's rank correlation, and the rate of what would be chosen over that of the best."""
    found = [(x["predicted"], x["seconds"]) for x in rows if x["seconds"]]
    if len(found) < 2:
        return {"correlation": None, "chosen": None}
    orders = [np.argsort(np.argsort(x)) for x in zip(*found, strict=True)]
    correlation = float(np.corrcoef(*orders)[0, 1])
    return {"correlation": correlation, "chosen": min(x for _, x in found) / found[0][1]}
