"""One case of a device: checked, then timed beside its peers; and what is measured but once.

Turns alternate between contenders, each of some calls in a row on operands that rotate; medians are kept. What takes
less than `SHORT` is timed once more as graphs of many calls, peers too, so that what the host does for a launch does
not count. Last, each contender runs alone for a while, under which clocks and power are sampled by another process.
"""

from __future__ import annotations

import statistics
import time
import traceback
from functools import partial

import gpu_families
from gpu_cases import GRAPHED
from gpu_peers import NoPeers
from gpu_run import say

import portmm as pm
from portmm.errors import PortmmError

TURN = 5e-4
"""Seconds of the device that the calls of a turn take, about."""
MOST_CALLS = 24
WARM = 2
"""Turns that do not count."""
SHORT = 3e-4
"""Seconds of a call below which it is timed in graphs: the host's part of a call, 50 to 134 us, would be seen."""
FIRST_GRAPH, MOST_GRAPH, GRAPH = 8, 64, 6e-4
"""Calls of the graph that shows how long one takes, at most of the one that is timed, and its seconds, about."""
SUSTAINED = 0.25
"""Seconds that a contender runs alone while clocks and power are sampled; 0 for not at all."""
MOST_AHEAD = 256
"""Calls that are put into a stream at once: its queue holds some 1,000 launches."""


def measure(on, peers, case, *, l2, turns=15, check_only=False, load=False):
    """The row of a case: what it took and whether it is right, or why there is nothing.

    With `load`, each contender also runs alone for a while.
    """
    peers.missing.clear()
    peers.notes.clear()
    row = case.record()
    began = time.monotonic()
    try:
        # A check needs no operands that rotate, nor whoever is compared.
        work = gpu_families.made(on, NoPeers() if check_only else peers, case, 1 if check_only else l2)
        row |= {"seconds": {}, "missing": dict(peers.missing), "notes": dict(peers.notes), **work.choice}
        found = work.ours(work.sets[0])
        on.wait()
        row["error"] = work.share(found, work.sets[0])
        row["right"] = row["error"] <= 1
        del found
        if not check_only:
            row |= _timed(on, work, turns, few=case.m <= GRAPHED and case.kind != "attention")
            row |= {"sustained": _sustained(on, work, row["seconds"])} if load and SUSTAINED else {}
        row["state"] = "ok"
    except (gpu_families.RefusedError, PortmmError, TypeError, ValueError, NotImplementedError) as error:
        row |= {"state": "refused", "why": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001 - one case must not end the others
        row |= {"state": "failed", "why": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
    row["took"] = round(time.monotonic() - began, 2)
    return row


def _timed(on, work, turns, *, few):
    """Seconds of all contenders, and what follows from them; `few`: graphs whatever a call takes."""
    ways = {"portmm": work.ours} | work.peers
    bound, why = {}, {}
    for name, call in ways.items():
        try:
            bound[name] = _Turns(on, call, work.sets)
        except Exception as error:
            if name == "portmm":
                raise
            why[name] = f"{type(error).__name__}: {str(error)[:200]}"
    seconds, spread = _interleaved({name: x.clock for name, x in bound.items()}, turns)
    row = {"seconds": seconds, "spread": spread, **_figures(work, seconds, "")}
    row |= {"not timed": why} if why else {}
    if few or min(seconds.values()) < SHORT:
        row |= _graphs(on, work, bound, seconds, turns)
    return row


def _graphs(on, work, bound, seconds, turns):
    """Seconds of all contenders as graphs; of one that cannot be captured, what it took without."""
    clocks, why = {}, {}
    for name, x in bound.items():
        try:
            clocks[name] = _graph(on, x, len(work.sets))
        except Exception as error:  # noqa: BLE001 - a contender that cannot be captured is left out
            why[name] = f"{type(error).__name__}: {str(error)[:200]}"
    row = {"not captured": why} if why else {}
    if "portmm" not in clocks:
        return row
    replayed, spread = _interleaved(clocks, turns)
    plain = {name: x for name, x in seconds.items() if name not in clocks}
    return row | {"graph": replayed, "graph spread": spread, **_figures(work, replayed | plain, "_graph")}


def _graph(on, x, sets):
    """The clock of a contender's calls as a graph: as many as fill `GRAPH` seconds and take each set in turn."""
    clock = on.replayed(x.calls(FIRST_GRAPH))
    count = max(min(sets, MOST_GRAPH), round(GRAPH / max(clock(), 1e-7)))
    if count <= FIRST_GRAPH:
        return clock
    del clock
    return on.replayed(x.calls(min(count, MOST_GRAPH)))


def _sustained(on, work, seconds):
    """TFLOP/s of each contender that runs alone for a while; whoever samples clocks is told when."""
    found = {}
    for name, call in ({"portmm": work.ours} | work.peers).items():
        if name not in seconds:
            continue
        say("window", name)
        calls = [partial(call, work.sets[i % len(work.sets)]) for i in range(MOST_AHEAD)]
        count = max(1, min(MOST_AHEAD, round(SUSTAINED / 4 / seconds[name])))
        ends, taken = time.monotonic() + SUSTAINED, []
        while time.monotonic() < ends:
            taken.append(on.seconds(calls[:count]))
        found[name] = work.flops / taken[-1] / 1e12
    say("window", "")
    return found


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
    return 2 * size / statistics.median([on.seconds([lambda: on.move(x, y)]) for _ in range(12)][WARM:])


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
