"""One case of a device: checked, then timed beside its peers; and what is measured but once.

Turns alternate between contenders, each of some calls in a row on operands that rotate; medians are kept. Decode
layers are timed once more as graphs, so that what the host does for a launch does not count.
"""

from __future__ import annotations

import statistics
import time
import traceback
from functools import partial

import gpu_families
from gpu_cases import GRAPHED

import portmm as pm
from portmm.errors import PortmmError

TURN = 5e-4
"""Seconds of the device that the calls of a turn take, about."""
MOST_CALLS = 24
WARM = 2
"""Turns that do not count."""


def measure(on, peers, case, *, l2, turns=15, check_only=False):
    """The row of a case: what it took and whether it is right, or why there is nothing."""
    peers.missing.clear()
    peers.notes.clear()
    row = case.record()
    began = time.monotonic()
    try:
        work = gpu_families.made(on, peers, case, l2)
        row |= {"seconds": {}, "missing": dict(peers.missing), "notes": dict(peers.notes), **work.choice}
        found = work.ours(work.sets[0])
        on.wait()
        row["error"] = work.share(found, work.sets[0])
        row["right"] = row["error"] <= 1
        del found
        if not check_only:
            row |= _timed(on, work, turns, graphs=case.m <= GRAPHED and case.kind != "attention")
        row["state"] = "ok"
    except (gpu_families.RefusedError, PortmmError, TypeError, ValueError, NotImplementedError) as error:
        row |= {"state": "refused", "why": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001 - one case must not end the others
        row |= {"state": "failed", "why": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
    row["took"] = round(time.monotonic() - began, 2)
    return row


def _timed(on, work, turns, *, graphs):
    """Seconds of all contenders, and what follows from them."""
    ways = {"portmm": work.ours} | work.peers
    bound = {name: _Turns(on, call, work.sets) for name, call in ways.items()}
    seconds, spread = _interleaved({name: x.clock for name, x in bound.items()}, turns)
    row = {"seconds": seconds, "spread": spread, **_figures(work, seconds, "")}
    if graphs:
        clocks, why = {}, {}
        for name, x in bound.items():
            try:
                clocks[name] = on.replayed(x.calls(max(4, x.count)))
            except Exception as error:  # noqa: BLE001 - a contender that cannot be captured is left out
                why[name] = f"{type(error).__name__}: {str(error)[:200]}"
        if "portmm" in clocks:
            replayed = _interleaved(clocks, turns)[0]
            row |= {"graph": replayed, **_figures(work, replayed, "_graph")}
        row |= {"not captured": why} if why else {}
    return row


def _figures(work, seconds, suffix):
    mine, others = seconds["portmm"], [x for name, x in seconds.items() if name != "portmm"]
    return {
        f"ratio{suffix}": min(others) / mine if others else None,
        f"tflops{suffix}": work.flops / mine / 1e12,
        f"gbs{suffix}": work.bytes / mine / 1e9,
    }


class _Turns:
    """A contender: so many calls each turn, of operands that rotate on from turn to turn."""

    def __init__(self, on, call, sets):
        self.on, self.call, self.sets, self.at, self.count = on, call, sets, 0, 1
        self.clock()
        self.count = max(1, min(MOST_CALLS, round(TURN / max(self.clock(), 1e-7))))

    def calls(self, count):
        self.at += count
        return [partial(self.call, self.sets[i % len(self.sets)]) for i in range(self.at - count, self.at)]

    def clock(self):
        return self.on.seconds(self.calls(self.count))


def _interleaved(clocks, turns):
    """Medians of each clock, which take turns and begin in turn, and half the distance of the quartiles over them."""
    found = {name: [] for name in clocks}
    names = list(clocks)
    for turn in range(turns + WARM):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken = clocks[name]()
            if turn >= WARM:
                found[name].append(taken)
    medians = {name: statistics.median(x) for name, x in found.items()}
    return medians, {name: _spread(x) / medians[name] for name, x in found.items()}


def _spread(x):
    quarter = sorted(x)[len(x) // 4], sorted(x)[-1 - len(x) // 4]
    return (quarter[1] - quarter[0]) / 2


def bandwidth(on, size=1 << 30):
    """Bytes per second of a copy, reads and writes counted."""
    x, y = (on.empty((size,), "u8") for _ in range(2))
    return 2 * size / statistics.median([on.seconds([lambda: y.copy_(x)]) for _ in range(12)][WARM:])


def overhead(on, count=50):
    """Host seconds of calls that are put into a stream."""
    a, b, out = (on.random((16, 16), "f32", i) for i in range(3))
    plan = pm.plan(a, b, out)
    ways = {"portmm.plan": lambda: plan(a, b, out), "portmm.matmul": lambda: pm.matmul(a, b, out)}
    if hasattr(on, "torch"):
        ways["torch.matmul"] = lambda: on.torch.matmul(a, b, out=out)
    return {name: _host_seconds(on, call, count) for name, call in ways.items()}


def _host_seconds(on, call, count):
    call()
    found = []
    for _ in range(20):
        on.wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found)
