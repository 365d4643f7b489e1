"""Fit the constants of the cost model to exhaustive searches.

    python bench/fit_cost.py bench/results/zen4-search.json bench/results/zen4-avx2-search.json --steps 400

Each file is what `bench/exhaustive.py --json` wrote on one machine. Without
`--steps` it only tells how near the present choices come to the best candidates,
and `--rechoose` marks these choices in the files. A chip with a file of its own under
`targets/model/` has its own constants fitted. A fit prints constants; a
person decides whether they mean anything, rounds them and writes them down.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exhaustive import problem_of, write

from portmm.codegen.lower import atom_of
from portmm.comparison.shapes import cases
from portmm.dispatch import config, cpu_kernels
from portmm.schedule import cpu_cost
from portmm.schedule.cpu_table import Table
from portmm.schedule.cpu_textbook import follows
from portmm.schedule.text import parse
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from portmm.spec.problem import Problem
    from portmm.target.target import Target

FACTORS = ("crowded", "thrashed", "overfull")
FREE = (
    *("ahead_cycles", "exposed", "short_runs", "short_ahead", "copy_once", "copy_passing"),
    *("conflicts", "apart", "tile_cycles", "loop_cycles", *FACTORS),
    *("line_ahead", "unseen", "unhidden", "unhidden_rows", "sweep_cycles", "streams"),
)
"""Constants that one thread determines; `cut_runs` and the cost of threads are not among them."""
NEAR = 1.6
"""Times of the best up to which the shape of the prediction counts: what is slower need not be ranked."""


@dataclass(frozen=True)
class Search:
    """One case: what every candidate took.

    Attributes:
        name: the case.
        problem: its problem.
        target: the machine, limited to the instruction set that was searched.
        tried: (row of the file, schedule, atom), one per candidate.
        textbook: indices of those that are never chosen.
    """

    name: str
    problem: Problem
    target: Target
    tried: tuple
    textbook: frozenset

    def predicted(self):
        """Predicted seconds of every candidate."""
        p = self.problem
        q = p.transposed() if p.c == "col" else p
        rows, schedules, atoms = zip(*self.tried, strict=True)
        counts = sorted({row["workers"] for row in rows})
        every = cpu_cost.costs(Table(q, schedules, atoms, self.target), q, (q.m,), counts)
        seconds = {count: x.seconds[0].tolist() for count, x in zip(counts, every, strict=True)}
        return [seconds[row["workers"]][i] for i, row in enumerate(rows)]


def searches(rows, target):
    """The cases of a file; what the suite no longer has is left out."""
    known = {case.name: case for case in cases("full")}
    grouped = {}
    for row in rows:
        if row["case"] in known:
            grouped.setdefault(row["case"], []).append(row)
    for name, mine in grouped.items():
        schedules = [parse(row["schedule"]) for row in mine]
        held = target.limited_to(schedules[0].isa)
        tried = tuple(
            (row, s, atom_of(cpu_kernels.isa_of(s, held), s.dtype, s.atom.lanes))
            for row, s in zip(mine, schedules, strict=True)
        )
        p = problem_of(known[name])
        textbook = frozenset(i for i, (_, s, _) in enumerate(tried) if target.searches and follows(s, p, held))
        yield Search(name, p, held, tried, textbook)


def choice(search, predicted):
    """The index of the candidate that the model chooses; of equals the slowest, so that no order decides.

    On a chip with stored searches, textbook blockings are not among them.
    """
    fair = [i for i in range(len(predicted)) if i not in search.textbook] or range(len(predicted))
    least = min(predicted[i] for i in fair)
    equals = (i for i in fair if predicted[i] == least)
    return max(equals, key=lambda i: search.tried[i][0]["seconds"])


def share(search, predicted):
    """Seconds of the best candidate over those of the chosen one."""
    took = [row["seconds"] for row, _, _ in search.tried]
    return min(took) / took[choice(search, predicted)]


def quality(found):
    """The objective that a fit minimises, and the geometric mean of the shares.

    The mean regret counts most; the spread of predicted over measured times
    among good candidates and the worst regret keep it from chasing noise.
    """
    regrets, spreads = [], []
    for x in found:
        predicted = x.predicted()
        regrets.append(-math.log(share(x, predicted)))
        took = [row["seconds"] for row, _, _ in x.tried]
        errors = [math.log(p / t) for p, t in zip(predicted, took, strict=True) if t < NEAR * min(took)]
        mean = sum(errors) / len(errors)
        spreads.append(sum((e - mean) ** 2 for e in errors) / len(errors))
    regret = sum(regrets) / len(regrets)
    return regret + 0.3 * math.sqrt(sum(spreads) / len(spreads)) + 0.02 * max(regrets), math.exp(-regret)


def give(model, values):
    """Let a model have these constants."""
    for name, value in values.items():
        setattr(model, name, value)


def fit(model, found, steps, seed=1):
    """Constants that serve better, by random steps from the present ones."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    best, kept = quality(found), {name: getattr(model, name) for name in FREE}
    for step in range(steps):
        tried = dict(kept)
        for name in rng.sample(FREE, rng.choice((1, 1, 2, 3))):
            above = 1.0 if name in FACTORS else 0.0
            tried[name] = above + (kept[name] - above) * math.exp(rng.gauss(0, 0.35))
        give(model, tried)
        now = quality(found)
        if now[0] < best[0]:
            best, kept = now, tried
            print(f"step {step}: {best[1]:.4f} of the best, objective {best[0]:.4f}", flush=True)
    give(model, kept)
    for name, value in kept.items():
        print(f"{name} = {value:.3g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--target", help="the machine that the files come from, if not this one")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--rechoose", action="store_true", help="mark the present choices in the files")
    options = parser.parse_args()
    with config.config(**({"target": options.target} if options.target else {})):
        files = {path: json.loads(path.read_text()) for path in options.files}
        found = [x for rows in files.values() for x in searches(rows, config.target())]
    if options.steps:
        fit(MODEL.of(found[0].target.name), found, options.steps)
    shares = [(share(x, x.predicted()), x.name, x.target.isas[0].name) for x in found]
    for value, name, isa in sorted(shares)[:20]:
        print(f"{value:.2f} {name} {isa}")
    print(f"{quality(found)[1]:.3f} of the best, geometric mean of {len(found)} cases")
    if options.rechoose:
        for x in found:
            chosen = choice(x, x.predicted())
            for i, (row, _, _) in enumerate(x.tried):
                row["chosen"] = i == chosen
        for path, rows in files.items():
            write(path, rows)


if __name__ == "__main__":
    main()
