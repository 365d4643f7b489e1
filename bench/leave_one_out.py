"""How good the choices are on a chip that was never measured: each chip with stored searches is left out in turn.

    python bench/leave_one_out.py              # present model: which cases fall below the bars
    python bench/leave_one_out.py --fit 400    # fit the constants to the other chips, without this one, again
    python bench/leave_one_out.py --write      # bench/results/leave-one-out.json, of which the table is made

A chip that is left out has no `searches`, and no constants of its own: its caches are counted, and textbook blockings
preferred, as on any unknown chip (`cpu_textbook.preferred`). Choices are made twice, with the constants of
`targets/model/` and with constants that were fitted from `START` to the other chips' searches only. A choice is among
the candidates whose times are stored, so that its time is known; files that are older than textbook blockings hold
none of these. Choices are compared with the fastest candidate of each case, and with the best constant schedule: the
one with the least times over all cases, clipped to each.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import fit_cost

from portmm.schedule.cpu_textbook import preferred
from portmm.target.model import CPU as MODEL
from portmm.target.target import load_target, names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from portmm.schedule.schedule import Schedule

RESULTS = Path(__file__).parent / "results"
STORED = RESULTS / "leave-one-out.json"
START = {
    "ahead_cycles": 1.0, "exposed": 0.1, "short_runs": 1.0, "short_ahead": 1.0, "copy_once": 5.0, "copy_passing": 5.0,
    "conflicts": 0.2, "apart": 0.2, "tile_cycles": 50.0, "loop_cycles": 0.1, "crowded": 1.1, "thrashed": 1.5,
    "overfull": 1.5, "line_ahead": 0.5, "unseen": 0.1, "unhidden": 1.0, "unhidden_rows": 1.0, "sweep_cycles": 5.0,
    "streams": 16.0,
}  # fmt: skip
"""Constants that a fit starts from: guesses with one digit, of no chip."""
DIGITS = 3
BARS = {"of the best": (0.95, 0.85), "over the constant": (1.05, 0.95)}
"""Least geometric mean and least of each case, of the rate of choices over others'."""


@dataclass(frozen=True)
class LeftOut:
    """A file of searches, of a chip that is treated as unknown.

    Attributes:
        stem: its name.
        chip: the chip's.
        cases: its searches, of a target without `searches`.
    """

    stem: str
    chip: str
    cases: tuple[fit_cost.Search, ...]


def left_out() -> Iterator[LeftOut]:
    """All stored searches that a chip names."""
    for chip in names("chip"):
        target = load_target(chip)
        for stem in target.searches:
            rows = json.loads((RESULTS / f"{stem}.json").read_text())
            found = fit_cost.searches(rows, target)
            # Without its name, the chip has no constants of its own either.
            yield LeftOut(stem, chip, tuple(replace(x, target=replace(x.target, name="", searches=())) for x in found))


# -- choices -------------------------------------------------------------------


def choice(x: fit_cost.Search) -> int:
    """Index of the candidate that is selected first on an unknown chip."""
    predicted = x.predicted()
    order = sorted(range(len(predicted)), key=predicted.__getitem__)
    ranked = [(predicted[i], x.tried[i][1]) for i in order]
    return order[preferred(ranked, x.problem, x.target)]


def seconds(x: fit_cost.Search) -> list[float]:
    """Measured times of all candidates."""
    return [row["seconds"] for row, _, _ in x.tried]


def chosen_with(constants: Mapping[str, float], cases: Iterable[fit_cost.Search]) -> list[int]:
    """Choices of a model with these constants."""
    usual = {name: getattr(MODEL, name) for name in constants}
    fit_cost.give(MODEL, constants)
    try:
        return [choice(x) for x in cases]
    finally:
        fit_cost.give(MODEL, usual)


def fitted(others: list[fit_cost.Search], steps: int) -> dict[str, float]:
    """Constants that were fitted to searches from `START`, of few digits."""
    usual = {name: getattr(MODEL, name) for name in fit_cost.FREE}
    fit_cost.give(MODEL, START)
    try:
        fit_cost.fit(MODEL, others, steps)
        return {name: float(f"{getattr(MODEL, name):.{DIGITS}g}") for name in fit_cost.FREE}
    finally:
        fit_cost.give(MODEL, usual)


# -- constant schedules --------------------------------------------------------


def kind(s: Schedule) -> tuple:
    """The parts of a schedule that products of all sizes and layouts may share."""
    return s.program, s.atom.kr, s.tiles, s.a.packed, s.b.packed, s.b.once, s.c.prefetch


def constants(cases: Iterable[fit_cost.Search]) -> dict[tuple, Schedule]:
    """Schedules that every large product may have, those with operands by rows too: all extents are numbers."""
    by_rows = [x for x in cases if (x.problem.a, x.problem.b, x.problem.c) == ("row", "row", "row")]
    tried = [s for x in by_rows for row, s, _ in x.tried if row["workers"] == 1]
    whole = [s for s in tried if s.program == "gemm" and s.parallel.over == "tiles" and s.kc and s.mc and s.nc]
    return {kind(s): s for s in reversed(whole)}


def clipped(constant: Schedule, x: fit_cost.Search) -> int | None:
    """Index of the candidate that a constant schedule is in a case; None if there is none.

    Where it is no candidate, it is the one that packs as the constant does and has the most of its register tile: a
    product of few rows or columns has a smaller one, an item of a batch no blocks, a prepacked B its own panels.
    """
    alike = {}
    for i, (_, s, _) in enumerate(x.tried):
        if kind(s) == kind(constant):
            return i
        ready = x.problem.b == "packed"
        if s.program != constant.program or s.a.packed != constant.a.packed or s.mr > constant.mr:
            continue
        if not ready and (s.b.packed != constant.b.packed or s.b.once or s.nr > constant.nr):
            continue
        alike[i] = (s.nr, s.mr, s.kc or math.inf, -s.b.panels)
    return max(alike, key=alike.__getitem__, default=None)


def best_constant(cases: tuple[fit_cost.Search, ...]) -> tuple[Schedule, list[int | None]]:
    """The constant schedule with the least times, of those that most cases have, and its candidate in each case."""
    every = [(s, [clipped(s, x) for x in cases]) for s in constants(cases).values()]
    most = max(sum(i is not None for i in found) for _, found in every)
    whole = [(s, found) for s, found in every if sum(i is not None for i in found) == most]

    def taken(found: list[int | None]) -> float:
        return sum(math.log(seconds(x)[i]) for x, i in zip(cases, found, strict=True) if i is not None)

    return min(whole, key=lambda pair: (taken(pair[1]), str(pair[0])))  # of equals, none by chance


# -- figures -------------------------------------------------------------------


def figures(x: LeftOut, fit: Mapping[str, float]) -> dict:
    """The stored rows of a file of searches: for each case the rates of choices over others'."""
    present, refitted = chosen_with({}, x.cases), chosen_with(fit, x.cases)
    constant, places = best_constant(x.cases)
    rows = []
    for search, one, two, place in zip(x.cases, present, refitted, places, strict=True):
        took = seconds(search)
        row = {"case": search.name, "of_best": min(took) / took[one], "refitted": min(took) / took[two]}
        if place is not None:
            row |= {"over_constant": took[place] / took[one], "refitted_over_constant": took[place] / took[two]}
        rows.append({name: round(v, DIGITS) if isinstance(v, float) else v for name, v in row.items()})
    isa = x.cases[0].target.isas[0].name
    return {"search": x.stem, "chip": x.chip, "isa": isa, "constant": str(constant), "fit": dict(fit), "cases": rows}


def computed(fits: Mapping[str, Mapping[str, float]]) -> dict:
    """All that is stored, given the constants that were fitted without each chip."""
    return {"left_out": [figures(x, fits.get(x.chip, {})) for x in left_out()]}


def stored() -> dict:
    """The stored figures; none if there is no file."""
    return json.loads(STORED.read_text()) if STORED.exists() else {"left_out": []}


def fits_of(data: dict) -> dict[str, dict[str, float]]:
    """Constants that were fitted without each chip."""
    return {x["chip"]: x["fit"] for x in data["left_out"]}


def mean(values: list[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def below(data: dict) -> Iterator[str]:
    """The bars that are missed, in words."""
    for x in data["left_out"]:
        for (words, (least, each)), name in zip(BARS.items(), ("of_best", "over_constant"), strict=True):
            rated = {row["case"]: row[name] for row in x["cases"] if name in row}
            value = mean(list(rated.values()))
            said = f"{x['search']}: {value:.3f} {words}, lowest {min(rated.values()):.3f}, {len(rated)} cases"
            yield said + (f"; the bar is {least}" if value < least else "")
            yield from (f"    {v:.3f} {case}" for case, v in sorted(rated.items(), key=lambda p: p[1]) if v < each)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", type=int, default=0, metavar="STEPS", help="fit constants again, in so many steps")
    parser.add_argument("--write", action="store_true", help=f"store the figures as {STORED.name}")
    options = parser.parse_args()
    fits = fits_of(stored())
    if options.fit:
        every = [*left_out()]
        for chip in dict.fromkeys(x.chip for x in every):
            print(f"without {chip}:", flush=True)
            fits[chip] = fitted([case for x in every if x.chip != chip for case in x.cases], options.fit)
    data = computed(fits)
    print("\n".join(below(data)))
    if options.write:
        lines = [json.dumps({**x, "cases": []})[:-2] + "\n" + ",\n".join(map(json.dumps, x["cases"])) + "\n]}"
                 for x in data["left_out"]]  # fmt: skip
        STORED.write_text('{"left_out": [\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
