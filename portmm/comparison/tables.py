"""The tables of the README and of docs/performance.md, made of stored results.

Owns which kinds of result files there are, and which table stands where.
Imports `comparison.report` and the modules of tables beside this one.

A folder of results has JSON files of these kinds: reports of `portmm compare`
and of `portmm tune`, searches of `bench/exhaustive.py --json`, surveys of
`bench/cliff.py --json`, rates of `bench/packing.py --json`, fused products of
`bench/fusion.py --save`, devices of `bench/gpu.py --save`, and what
`keep_overhead` keeps of `pytest bench/test_overhead.py --benchmark-json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portmm.comparison.report import Report, from_json
from portmm.comparison.speed_picture import shows, svg
from portmm.comparison.tables_chips import Ratios, by_chip, chips, ratios_by_setting
from portmm.comparison.tables_device import device
from portmm.comparison.tables_fusion import fusion, fusion_cases
from portmm.comparison.tables_products import cliff, overhead, packing, ratios, search
from portmm.comparison.tables_tuning import is_tuning, tuning, tuning_cases
from portmm.comparison.text import markdown

if TYPE_CHECKING:
    from pathlib import Path

BEGIN, END = "<!-- results: made by portmm report -->", "<!-- end of results -->"
"""What the README has before and after its tables."""
NOTHING = "Nothing has been measured for this version yet; `python bench/run_suite.py` measures."
HEAD = "# Performance\n\nMade by `portmm report` from `bench/results/`; how is told in [measuring](measuring.md).\n"
KINDS = {
    "overhead": "overheads",
    "cliff": "cliffs",
    "packing": "packings",
    "fusion": "fusions",
    "device": "devices",
}
"""What only files of one kind have at their top -> the field of `Found` for them; reports may have any of them."""

Kept = list[tuple[str, Any]]
"""File's stem, and its contents."""


@dataclass(frozen=True, slots=True)
class Found:
    """Stored results by kind.

    Attributes:
        reports: of `portmm compare`, as `Report`.
        searches: every candidate of every case, timed.
        tunings: of `portmm tune`.
        overheads: what calls, imports and first calls cost.
        cliffs: narrow types beside float32.
        packings: rates of `pack` beside a copy.
        fusions: fused products.
        devices: runs on devices.
    """

    reports: Kept = field(default_factory=list)
    searches: Kept = field(default_factory=list)
    tunings: Kept = field(default_factory=list)
    overheads: Kept = field(default_factory=list)
    cliffs: Kept = field(default_factory=list)
    packings: Kept = field(default_factory=list)
    fusions: Kept = field(default_factory=list)
    devices: Kept = field(default_factory=list)


def load(path: Path) -> Found:
    """The results in a folder, or in one file.

    Raises:
        ValueError: a file is no result, or of another schema.
        OSError: it is not there.
    """
    found = Found()
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        try:
            _sort(file.stem, file.read_text(), found)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: its fields are not those of a result: {error}") from error
    return found


def _sort(stem: str, text: str, found: Found) -> None:
    data = json.loads(text)
    if isinstance(data, list):
        found.searches.append((stem, data))
    elif "entrants" in data:
        found.reports.append((stem, from_json(text)))
    elif is_tuning(data):
        found.tunings.append((stem, data))
    else:
        kind = next((x for x in KINDS if x in data), None)
        if kind is None:
            raise ValueError(f"no result has {', '.join(data) or 'nothing'} at its top; see docs/measuring.md")
        getattr(found, KINDS[kind]).append((stem, data))


def _second(kept: Kept) -> list[Any]:
    return [data for _, data in kept]


def _measured(found: Found) -> dict[tuple[str, str], Ratios]:
    reports: list[Report] = _second(found.reports)
    return ratios_by_setting(reports, _second(found.fusions), found.devices)


def overview(found: Found) -> str:
    """All results in one table, by chip and type."""
    return chips(_measured(found))


def speed(found: Found) -> str:
    """The README's tables: one for each chip."""
    return by_chip(_measured(found)) or NOTHING


def picture(found: Found) -> str:
    """The README's picture as SVG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return svg(_measured(found))


def picture_is_current(path: Path, found: Found) -> bool:
    """Whether a file is the picture of these results."""
    return path.exists() and shows(path.read_text(), _measured(found))


def summary(found: Found) -> str:
    """Every kind of result, with a row for each group of cases."""
    parts = [*ratios(_second(found.reports)), *(f"{stem}: {search(rows)}" for stem, rows in found.searches)]
    parts += tuning(_second(found.tunings))
    parts += map(overhead, _second(found.overheads))
    parts += map(cliff, _second(found.cliffs))
    parts += map(packing, _second(found.packings))
    parts += fusion(_second(found.fusions))
    parts += [device(stem, data) for stem, data in found.devices]
    return "\n\n".join(filter(None, parts)) or NOTHING


def details(found: Found) -> str:
    """Every case."""
    parts = [markdown(report).rstrip() for report in _second(found.reports)]
    parts += [f"**{stem}**: {search(rows)}" for stem, rows in found.searches]
    parts += [tuning_cases(data) for data in _second(found.tunings)]
    parts += [fusion_cases(data) for data in _second(found.fusions)]
    return "\n\n".join(filter(None, parts)) or NOTHING


def readme(text: str, found: Found) -> str:
    """The README's text with the tables that are due.

    Raises:
        ValueError: the text has no place for them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"tables have no place in it: it needs a line {BEGIN} and, after it, a line {END}")
    return f"{before}{BEGIN}\n{speed(found)}\n{END}{after}"


def page(found: Found) -> str:
    """The text of docs/performance.md: all chips in one table, groups of cases, every case."""
    chips_part = overview(found)
    top = f"## portmm beside the best peer, by chip and type\n\n{chips_part}\n\n" if chips_part else ""
    return f"{HEAD}\n{top}## Groups of cases\n\n{summary(found)}\n\n## Every case\n\n{details(found)}\n"


def pages(found: Found, readme_path: Path, page_path: Path) -> dict[Path, str]:
    """Path and due contents of the files that have tables.

    Raises:
        ValueError: the README has no place for its tables.
        OSError: the README is not there.
    """
    try:
        due = readme(readme_path.read_text(), found)
    except ValueError as error:
        raise ValueError(f"{readme_path}: {error}") from error
    return {readme_path: due, page_path: page(found)}


def keep_overhead(raw: Path, folder: Path) -> Path:
    """Store the figures of a file of pytest-benchmark, and nothing of the machine but its chip.

    Returns:
        The file that was written, `overhead-CHIP.json` in the folder.

    Raises:
        ValueError: it is no such file.
    """
    from portmm.comparison.limit import chip
    from portmm.host.detect import host

    try:
        rows = json.loads(raw.read_text())["benchmarks"]
        infos = {row["name"].removeprefix("test_").replace("_", " "): row["extra_info"] for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{raw} is not what `pytest --benchmark-json` writes") from error
    figures = {
        name: {what: value for what, value in info.items() if isinstance(value, int | float)}
        for name, info in infos.items()
    }
    path = folder / f"overhead-{host().name}.json"
    kept = {name: values for name, values in figures.items() if values}
    path.write_text(json.dumps({"chip": chip(), "overhead": kept}, indent=1) + "\n")
    return path
