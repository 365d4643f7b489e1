"""How far the analytical choice is from the best of an exhaustive search.

For every case of a suite, every candidate schedule is built, checked and timed,
interleaved; the table shows what the model chose, what was fastest, and the
geometric mean of their ratio. `--json` keeps predicted and measured seconds.

    python bench/exhaustive.py --suite quick --threads 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from portmm import dispatch, settings
from portmm.candidates import candidates
from portmm.comparison.suite import cases
from portmm.cost import cost
from portmm.lower import atom_of
from portmm.run.host import runtime
from portmm.schedule import spell


def operands(p, nr, rng):
    """Random inputs in the layouts that a schedule reads, with the numbers of `execute`."""
    dtype = p.element.numpy

    def matrix(rows, cols, layout):
        x = rng.random((p.batch, rows, cols), dtype=dtype) - 0.5
        if layout == "col":
            x = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)
        return x

    def strides(x):
        return tuple(s // x.itemsize for s in (x.strides[1], x.strides[2], x.strides[0]))

    a, c = matrix(p.m, p.k, p.a), np.empty((p.batch, p.m, p.n), dtype)
    if p.c == "col":
        c = np.empty((p.batch, p.n, p.m), dtype).transpose(0, 2, 1)
    b = matrix(p.k, p.n, "row" if p.b == "packed" else p.b)
    if p.b == "packed":
        panels = -(-p.n // nr)
        wide = np.zeros((p.batch, p.k, panels * nr), dtype)
        wide[:, :, : p.n] = b
        data = np.ascontiguousarray(wide.reshape(p.batch, p.k, panels, nr).transpose(0, 2, 1, 3))
        steps = (nr, p.k * nr, panels * p.k * nr)
    else:
        data, steps = b, strides(b)
    numbers = [p.m, p.n, p.k, p.batch, a.ctypes.data, *strides(a), data.ctypes.data, *steps, c.ctypes.data, *strides(c)]
    return (a, b, c, data), numbers


def search(p, threads, seconds, rounds):
    """Candidate -> least seconds; None marks a wrong result."""
    target = settings.target()
    rt = runtime()
    found = {}
    rng = np.random.default_rng(0)
    schedules = candidates(p, target)
    keep, numbers = operands(p, schedules[0].nr, rng)
    a, b, c, _ = keep
    reference = a[:, :64].astype(np.float64) @ b.astype(np.float64)
    routes = {}
    for s in schedules:
        isa = dispatch.isa_of(s, target)
        for workers in dict.fromkeys((1, threads)):
            route = dispatch._route(s, isa, p, workers)  # noqa: SLF001 - the search stands in for the choice
            c[...] = np.nan
            rt.execute(route, *numbers)
            error = np.abs(c[:, :64] - reference).max()
            if not error <= 1e-5 * p.k:
                print(f"WRONG: {s} on {p}: {error}", file=sys.stderr)
                continue
            start = time.perf_counter()
            rt.execute(route, *numbers)
            once = time.perf_counter() - start
            routes[s, workers] = (route, max(1, int(seconds / max(once, 1e-7))), [])
    for _ in range(rounds):
        for route, repeat, samples in routes.values():
            start = time.perf_counter()
            for _ in range(repeat):
                rt.execute(route, *numbers)
            samples.append((time.perf_counter() - start) / repeat)
    for key, (_, _, samples) in routes.items():
        found[key] = min(samples)  # noise on a shared machine only ever adds
    return found


def problem_of(case):
    """The problem that `pm.matmul` poses for a case."""
    from portmm.call import STATIC_BATCH, problem

    b = "packed" if case.packed else case.b
    family = dispatch.family(case.dtype, settings.target()) if case.packed else ""
    static = case.batch >= STATIC_BATCH and not case.packed
    size = (case.m, case.n, case.k)
    return problem(case.dtype, size, (case.a, b, case.c), family, case.batch, dense=True, static=static)


def write(path, rows):
    """Store what was searched, a line per candidate."""
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.01, help="per sample")
    parser.add_argument("--top", type=int, default=1, help="fastest candidates to print")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings.set_num_threads(options.threads)
    runtime().set_num_threads(options.threads)
    ratios, rows = [], []
    for case in cases(options.suite):
        p = problem_of(case)
        choice = dispatch.choose(p, settings.target(), options.threads)
        times = search(p, options.threads, options.seconds, options.rounds)
        ranked = sorted(times.items(), key=lambda x: x[1])
        mine = times[choice.schedule, choice.workers]
        ratio = ranked[0][1] / mine
        ratios.append(ratio)
        rate = p.flops / 1e9
        print(f"{case.shape:28} {ratio:5.2f}  chosen {rate / mine:7.1f}  {choice.schedule} [{choice.workers}]")
        for (s, w), t in ranked[: options.top]:
            atom = atom_of(dispatch.isa_of(s, choice.target), s.dtype, s.lanes)
            predicted = cost(p, s, atom, choice.target, w).seconds
            print(f"{'':35} best {rate / t:7.1f} ({rate / predicted:7.1f} predicted)  {s} [{w}]", flush=True)
        rows += [
            {
                "case": case.name,
                "schedule": spell(s),
                "workers": w,
                "seconds": float(f"{t:.4g}"),
                "chosen": (s, w) == (choice.schedule, choice.workers),
            }
            for (s, w), t in ranked
        ]
    print(f"geometric mean of best / chosen over {len(ratios)} cases: {statistics.geometric_mean(ratios):.3f}")
    if options.json:
        write(options.json, rows)


if __name__ == "__main__":
    main()
