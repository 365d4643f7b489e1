"""How far the analytical choice is from the best of an exhaustive search.

For every case of a suite, every candidate schedule is built, checked and timed in
turns with the model's choice, in a process of its own; the table shows what was chosen, what was
fastest, and the geometric mean of their ratio. `--json` keeps measured seconds, a line per candidate.

    python bench/exhaustive.py --suite quick --threads 1
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from rich.console import Console

from portmm.comparison import cases
from portmm.dispatch import config, cpu_kernels
from portmm.tuning import tune
from portmm.tuning.records import bar, view

DAY = 86400.0


def problem_of(case):
    """The problem that `pm.matmul` poses for a case."""
    from portmm.arrays.call import STATIC_BATCH, problem

    b = "packed" if case.packed else case.b
    family = cpu_kernels.family(case.dtype, config.target(), case.n) if case.packed else ""
    static = case.batch >= STATIC_BATCH and not case.packed
    size = (case.m, case.n, case.k)
    return problem(case.dtype, size, (case.a, b, case.c), family, case.batch, dense=True, static=static)


def write(path, rows):
    """Store what was searched, a line per candidate."""
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def rows(found):
    """A row for each candidate that was right, the fastest of each case first."""
    for case in found.cases:
        for x in sorted(case.measured, key=lambda x: x.seconds):
            chosen = (x.schedule, x.workers) == (case.analytical, case.analytical_workers)
            seconds = float(f"{x.seconds:.4g}")
            yield {
                "case": case.case.name,
                "schedule": x.schedule,
                "workers": x.workers,
                "seconds": seconds,
                "chosen": chosen,
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.01, help="per sample")
    parser.add_argument("--budget", type=float, default=DAY, help="seconds for all of it")
    parser.add_argument("--top", type=int, default=1, help="fastest candidates to print")
    parser.add_argument("--database", type=Path, help="what a search that was cut short goes on from")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, bar(Console(stderr=True), options.budget) as tell:
        found = tune(
            cases(options.suite),
            threads=options.threads,
            budget_s=options.budget,
            database=options.database or Path(folder, "search.sqlite"),
            search="candidates",
            turn_s=options.seconds,
            progress=tell,
        )
    Console(width=200, highlight=False).print(view(found))
    for case in found.cases:
        rate = case.case.flops / 1e9
        for x in sorted(case.measured, key=lambda x: x.seconds)[: options.top]:
            print(f"{case.case.shape:28} {rate / x.seconds:7.1f} ({rate / x.predicted:7.1f} predicted)  {x.schedule}")
    if options.json:
        write(options.json, list(rows(found)))


if __name__ == "__main__":
    main()
