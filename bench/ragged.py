"""Time against M: products of ragged batches, whose number of rows is any.

    python bench/ragged.py [--most 600] [--rounds 5] [--save]

For float32, K = N = 768 and 4096 x 1024, B packed and not, every M from 1 to `--most` is timed in random order, round
after round, on one thread; the least of its times counts. A step is an M from which one row more takes over 10 % more
than its share: beyond the ratio of the rows, padded to those that the atom multiplies at once. A hump is an M that
takes over 10 % more than some larger one. Both are measured again, in turn with the M they are compared with, before
they are reported. The exit status is 1 if one is left. `--save` keeps figures as bench/results/CHIP-ragged.json, and
the plot as docs/images/ragged-CHIP.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

import portmm as pm
from portmm.comparison.limit import chip
from portmm.dispatch import cpu_background
from portmm.host.detect import host
from portmm.util.templates import render

ROOT = Path(__file__).resolve().parent.parent
SIZES = ((768, 768), (4096, 1024))
"""K and N: a layer of BERT, keys and values of Llama 3."""
MOST_STEP = 1.1
SECONDS, AGAIN = 0.0004, 15
"""Of a sample, and the rounds of a pair that is measured again."""
ATOM_ROWS = 1
"""Rows of C that float32's multiply-adds compute at once."""
WIDTH, HEIGHT, LEFT, TOP = 720, 220, 56, 26
"""Pixels of a panel of the plot, and of its margins."""


@dataclass
class Series:
    """Times of one weight.

    Attributes:
        k, n: of the weight.
        packed: it is prepacked.
        seconds: of M = 1, 2, and so on.
        steps: M, the M that it is compared with, their ratio of times over that of their rows, and their schedules.
    """

    k: int
    n: int
    packed: bool
    seconds: list[float]
    steps: list[dict] = field(default_factory=list)

    @property
    def title(self):
        """The shape and layout of the products."""
        return f"K = {self.k}, N = {self.n}, {'B packed' if self.packed else 'B by rows'}"


def padded(m, rows=ATOM_ROWS):
    """Rows that are multiplied for M."""
    return -(-m // rows) * rows


def suspects(seconds, rows=ATOM_ROWS):
    """Pairs of M that look like a step or a hump: the first has less time than it should for the second's.

    A step is from M to M + 1. A hump is named with the larger M that takes the least time.
    """
    found = []
    for i, (now, after) in enumerate(pairwise(seconds)):
        if after / now > MOST_STEP * padded(i + 2, rows) / padded(i + 1, rows):
            found.append((i + 1, i + 2))
    least, best = float("inf"), 0
    for i in range(len(seconds) - 1, -1, -1):
        if seconds[i] > MOST_STEP * least:
            found.append((best, i + 1))
        if seconds[i] < least:
            least, best = seconds[i], i + 1
    return sorted(set(found))


def excess(first, second, ratio, rows=ATOM_ROWS):
    """Excess of the time of the second M over its share, given its ratio to the first's."""
    return ratio / max(1.0, padded(second, rows) / padded(first, rows))


@dataclass
class Bench:
    """The products of one weight."""

    a: np.ndarray
    b: object
    c: np.ndarray

    @classmethod
    def of(cls, k, n, most, *, packed):
        """Random operands."""
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal(size, np.float32) for size in ((most, k), (k, n)))
        return cls(a, pm.pack(b) if packed else b, np.empty((most, n), np.float32))

    def prepare(self, m):
        """Build what a product needs; seconds of one call."""
        a, b, c = self.a[:m], self.b, self.c[:m]
        pm.matmul(a, b, out=c)
        cpu_background.wait()
        began = time.perf_counter()
        pm.matmul(a, b, out=c)
        return time.perf_counter() - began

    def seconds(self, m, repeats):
        """Seconds of a call."""
        a, b, c, matmul = self.a[:m], self.b, self.c[:m], pm.matmul
        matmul(a, b, out=c)
        began = time.perf_counter()
        for _ in range(repeats):
            matmul(a, b, out=c)
        return (time.perf_counter() - began) / repeats

    def schedule(self, m):
        """The schedule of a product, as text."""
        return str(pm.explain(self.a[:m], self.b).schedule)


def survey(bench, most, rounds, seed=0):
    """The least seconds of each M."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    order = list(range(1, most + 1))
    repeats = {m: max(1, int(SECONDS / bench.prepare(m))) for m in order}
    least = dict.fromkeys(order, float("inf"))
    for _ in range(rounds):
        rng.shuffle(order)
        for m in order:
            least[m] = min(least[m], bench.seconds(m, repeats[m]))
    return [least[m] for m in sorted(least)]


def confirmed(bench, pair):
    """A step or hump with its excess, if it is there when both M are timed in turn."""
    repeats = [max(1, int(SECONDS / bench.prepare(m))) for m in pair]
    samples = [[bench.seconds(m, n) for m, n in zip(pair, repeats, strict=True)] for _ in range(AGAIN)]
    ratio = statistics.median(b / a for a, b in samples)
    over = excess(*pair, ratio)
    if over <= MOST_STEP:
        return None
    return {"m": pair[1], "beside": pair[0], "excess": round(over, 3), "schedules": [bench.schedule(m) for m in pair]}


def measured(k, n, most, rounds, *, packed):
    """The series of one weight."""
    bench = Bench.of(k, n, most, packed=packed)
    seconds = survey(bench, most, rounds)
    steps = [x for pair in suspects(seconds) if (x := confirmed(bench, pair))]
    return Series(k, n, packed, [float(f"{x:.4g}") for x in seconds], steps)


def picture(found, chip_name):
    """The plot as SVG: time against M, steps and humps marked."""
    panels = []
    for i, x in enumerate(found):
        top, most, last = i * (HEIGHT + 2 * TOP) + TOP, max(x.seconds), len(x.seconds)

        def at(m, seconds, top=top, most=most, last=last):
            return f"{LEFT + (WIDTH - LEFT - 8) * m / last:.1f},{top + HEIGHT * (1 - seconds / most):.1f}"

        points = " ".join(at(m, s) for m, s in enumerate(x.seconds, 1))
        marks = [at(step["m"], x.seconds[step["m"] - 1]).split(",") for step in x.steps]
        panels.append({"top": top, "title": x.title, "most": f"{1e6 * most:.4g} us", "points": points, "marks": marks,
                       "last": last})  # fmt: skip
    height = len(found) * (HEIGHT + 2 * TOP) + TOP
    places = {"width": WIDTH, "height": height, "left": LEFT, "tall": HEIGHT}
    return render(__file__, "ragged.svg", panels=panels, chip=chip_name, **places)


def keep(found):
    """Store figures and plot under the chip's name."""
    name = host().name
    path = ROOT / "bench" / "results" / f"{name}-ragged.json"
    rows = ",\n".join(json.dumps(asdict(x)) for x in found)
    path.write_text(f'{{"chip": {json.dumps(chip())}, "machine": {json.dumps(name)}, "ragged": [\n{rows}\n]}}\n')
    plot = ROOT / "docs" / "images" / f"ragged-{name}.svg"
    plot.write_text(picture(found, chip()))
    return path, plot


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=600, help="largest M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep figures and plot")
    options = parser.parse_args(arguments)
    os.environ["PORTMM_RACE"] = "off"  # the choice is judged, not what rivals make of it
    pm.set_num_threads(1)
    found = []
    for k, n in SIZES:
        for packed in (False, True):
            found.append(measured(k, n, options.most, options.rounds, packed=packed))
            print(f"{found[-1].title}: {len(found[-1].steps)} steps above {MOST_STEP - 1:.0%}")
            for x in found[-1].steps:
                print(f"  M = {x['m']}: {x['excess']:.2f} of its share beside M = {x['beside']}")
                print("\n".join(f"    {s}" for s in dict.fromkeys(x["schedules"])))
            sys.stdout.flush()
    if options.save:
        print("wrote {} and {}".format(*keep(found)))
    return 1 if any(x.steps for x in found) else 0


if __name__ == "__main__":
    sys.exit(main())
