"""Surveys of schedules beside the cost model, and their best schedules for the database of tuned ones.

    python gpu_fit.py results/h100-1.json results/h100-2.json                        # how well the order is predicted
    python gpu_fit.py results/h100-*.json       --fit                                # a factor for each term
    python gpu_fit.py results/h100-*.json       --toml ../targets/tuned/h100.toml    # what was faster than the choice

Each file is what `lease.py` or `gpu.py --schedules --save` wrote. A row of a survey has its problem, its schedule as
`portmm.schedule.text.parse` reads it, the terms of its prediction, and seconds. A fit finds for each term the
factor by which predictions come nearest; a person decides which constant of `targets/model/device.toml` it stands for.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from portmm.dispatch.tuned_schedule import Tuned, architecture, to_toml
from portmm.schedule.roofline import roofline
from portmm.schedule.text import parse
from portmm.spec.problem import Problem
from portmm.target.model import DEVICE as MODEL
from portmm.target.target import load_target
from portmm.version import VERSION

LEAST_GAIN = 1.03
"""Times as fast as the model's choice that a schedule must be to be kept: timings spread by a percent or two."""
STEPS = (0.5, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 2.0)
ROUNDS = 40


@dataclass(frozen=True)
class Row:
    """A candidate that was measured."""

    survey: str
    program: str
    overlapped: dict
    added: dict
    seconds: float

    def predicted(self, factors):
        """Seconds, with a factor for each term."""
        hidden, added = (
            {name: x * factors.get(name, 1.0) for name, x in terms.items()} for terms in (self.overlapped, self.added)
        )
        return roofline(hidden, {}, added, MODEL.exposed).seconds


def measured(surveys):
    """Rows of all surveys that can be predicted."""
    found = []
    for survey in surveys:
        for x in survey.get("rows", ()):
            if x.get("seconds") and x.get("right") and x.get("terms"):
                terms, program = x["terms"], x["spelt"].partition(":")[0]
                found.append(Row(survey["name"], program, terms["overlapped"], terms["added"], x["seconds"]))
    return found


def rank_correlation(x, y):
    """Spearman's."""
    orders = [np.argsort(np.argsort(z)) for z in (x, y)]
    return float(np.corrcoef(*orders)[0, 1])


def error(rows, factors):
    """The mean distance of predictions from what was measured, as a factor: 0.1 is about ten percent."""
    return statistics.fmean(abs(math.log(x.predicted(factors) / x.seconds)) for x in rows)


def fitted(rows):
    """Factors of terms, by descent along one after the other."""
    names = sorted({name for x in rows for name in (*x.overlapped, *x.added)})
    factors, best = dict.fromkeys(names, 1.0), error(rows, {})
    for _ in range(ROUNDS):
        before = best
        for name in names:
            for step in STEPS:
                tried = factors | {name: factors[name] * step}
                found = error(rows, tried)
                if found < best - 1e-6:
                    factors, best = tried, found
        if before - best < 1e-4:
            break
    return factors, best


def told(surveys):
    """A line for each survey, and one for each program."""
    rows = measured(surveys)
    for name in dict.fromkeys(x.survey for x in rows):
        some = [x for x in rows if x.survey == name]
        predicted, seconds = [x.predicted({}) for x in some], [x.seconds for x in some]
        if len(some) < 2:
            continue
        chosen = min(seconds) / seconds[int(np.argmin(predicted))]
        order = rank_correlation(predicted, seconds)
        yield f"{name}: {len(some)} candidates, rank correlation {order:.2f}, chosen at {chosen:.2f} of the best"
    for program in sorted({x.program for x in rows}):
        logs = [math.log(x.seconds / x.predicted({})) for x in rows if x.program == program]
        spread = statistics.pstdev(logs) if len(logs) > 1 else 0.0
        mean = math.exp(statistics.fmean(logs))
        yield f"{program}: {len(logs)} rows take {mean:.2f} of the prediction, spread {spread:.2f}"


def tuned(data, least=LEAST_GAIN):
    """Schedules of surveys that are faster than the model's choice, as findings of the database of tuned ones."""
    target = load_target(data["device"]["target"])
    date = datetime.now(UTC).date().isoformat()
    found = []
    for survey in data["surveys"]:
        rows = [x for x in survey.get("rows", ()) if x.get("seconds") and x.get("right") and x.get("terms")]
        if not rows or not isinstance(survey.get("problem"), str):
            continue  # attention has tiles, not schedules
        choice, best = min(rows, key=lambda x: x["predicted"]), min(rows, key=lambda x: x["seconds"])
        if choice["seconds"] / best["seconds"] < least:
            continue
        problem = Problem(**json.loads(survey["problem"]))
        found.append(
            Tuned(
                problem, 1, parse(best["spelt"]), 1, best["seconds"], choice["seconds"], target.name,
                architecture(target), target.vendor, False, date, VERSION, target.title,
            )
        )  # fmt: skip
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--fit", action="store_true", help="factors of terms, of all programs and of each")
    parser.add_argument("--toml", type=Path, help="where tuned schedules are written")
    given = parser.parse_args(argv)
    every = [json.loads(x.read_text()) for x in given.files]
    surveys = [y for x in every for y in x["surveys"]]
    print("\n".join(told(surveys)))
    rows = measured(surveys)
    if given.fit and rows:
        for program in ("", *sorted({x.program for x in rows})):
            some = [x for x in rows if not program or x.program == program]
            factors, left = fitted(some)
            shown = {name: round(x, 2) for name, x in factors.items() if abs(x - 1) > 0.01}
            print(f"{program or 'all'}: error {error(some, {}):.2f}, {left:.2f} with {shown}")
    if given.toml:
        found = [y for x in every for y in tuned(x)]
        given.toml.write_text(to_toml(found))
        print(f"{given.toml}: {len(found)} schedules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
