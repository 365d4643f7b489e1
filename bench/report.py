"""Tables of the README and of docs/performance.md, generated from stored results.

    python bench/report.py                       # tables of bench/results by group, or of a file by case
    python bench/report.py --check               # status 1 if a page differs from the results
    python bench/report.py --write [--overhead FILE]

A folder of results has JSON files of these kinds: reports of `portmm compare`
and of `portmm tune`, searches of `bench/exhaustive.py --json`, surveys of
`bench/cliff.py --json`, rates of `bench/packing.py --json`, fused products of
`bench/fusion.py --save`, convolutions and whole models of `bench/convolutions.py --save` and `bench/models.py --save`,
devices of `bench/gpu.py --save`, choices on chips that are left out of `bench/leave_one_out.py --write`, time against M
of `bench/ragged.py --save`, and the figures that `keep_overhead` stores of `pytest bench/test_overhead.py
--benchmark-json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

from ratio_tables import Ratios, at_a_glance, by_chip, by_device, device_ratios, glance, ratios_by_setting
from result_tables import (
    convolution_cases,
    convolutions,
    device,
    devices,
    fusion,
    is_tuning,
    models,
    packing,
    part,
    ratios,
    search,
)
from speed_picture import shows, svg

from portmm.comparison.figures import grouped
from portmm.comparison.report import from_json
from portmm.comparison.text import markdown

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: made by bench/report.py -->", "<!-- end of results -->"
"""Lines of the README before and after its tables."""
NOTHING = "Nothing has been measured for this version yet; `python bench/run_suite.py` measures."
HEAD = "# Performance\n\nMade by `bench/report.py` from `bench/results/`; how is told in [measuring](measuring.md).\n"
KINDS = ("overhead", "cliff", "packing", "fusion", "device", "left_out", "ragged", "convolutions", "models")
"""Top-level keys of the files of one kind; reports may have any of these keys."""

Results = dict[str, list[tuple[str, Any]]]
"""Kind of file -> stems of files with their contents."""


def load(path: Path) -> Results:
    """Results in a folder, or in one file.

    Raises:
        ValueError: a file is no result, or of another schema.
        OSError: the file cannot be read.
    """
    results: Results = {kind: [] for kind in ("report", "search", "tuning", *KINDS)}
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        try:
            kind, content = _sorted(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: its fields are not those of a result: {error}") from error
        results[kind].append((file.stem, content))
    return results


def _sorted(text: str) -> tuple[str, Any]:
    """Kind and contents of a file."""
    data = json.loads(text)
    if isinstance(data, list):
        return "search", data
    if "entrants" in data:
        return "report", from_json(text)
    kind = "tuning" if is_tuning(data) else next((x for x in KINDS if x in data), "")
    if not kind:
        keys = ", ".join(list(data)[:8]) or "none"
        raise ValueError(f"these are no results: the keys are {keys}; `portmm compare --save` writes results")
    return kind, data


def _measured(results: Results) -> dict[tuple[str, str], Ratios]:
    reports, fusions = ([data for _, data in results[kind]] for kind in ("report", "fusion"))
    return ratios_by_setting(reports, fusions)


def _glance(results: Results) -> tuple[dict[str, Ratios], ...]:
    """The README's rows of CPUs, and those of GPUs."""
    runs = devices(results["device"])
    gpus = {name: data for name, data in runs.items() if data["device"].get("facts", {}).get("kind") == "gpu"}
    return glance(_measured(results), device_ratios(gpus))


def overview(results: Results) -> str:
    """All ratios by chip and type."""
    parts = by_chip(_measured(results)), by_device(device_ratios(devices(results["device"])))
    return "\n\n".join(filter(None, parts))


def speed(results: Results) -> str:
    """The README's tables: one for processors, one for GPUs."""
    return at_a_glance(*_glance(results)) or NOTHING


def picture(results: Results) -> str:
    """The README's picture as SVG."""
    return svg(*_glance(results))


def picture_is_current(path: Path, results: Results) -> bool:
    """Whether a file is the picture of these results."""
    return path.exists() and shows(path.read_text(), *_glance(results))


def summary(results: Results) -> str:
    """Every kind of result, with a row for each group of cases."""
    of = {kind: [data for _, data in rows] for kind, rows in results.items()}
    parts = [*ratios(of["report"]), *(f"{stem}: {search(rows)}" for stem, rows in results["search"])]
    parts += [part("left_out", data) for data in of["left_out"]]
    parts += [part("tuning", *row) for row in grouped(of["tuning"], itemgetter("chip")).items()]
    parts += [part(kind, data) for kind in ("overhead", "cliff", "ragged") for data in of[kind]]
    parts += [*map(packing, of["packing"]), *fusion(of["fusion"])]
    parts += [*map(convolutions, of["convolutions"]), *map(models, of["models"])]
    parts += [device(*row) for row in devices(results["device"]).items()]
    return "\n\n".join(filter(None, parts)) or NOTHING


def details(results: Results) -> str:
    """Tables of every case."""
    of = {kind: [data for _, data in rows] for kind, rows in results.items()}
    parts = [markdown(report).rstrip() for report in of["report"]]
    parts += [f"**{stem}**: {search(rows)}" for stem, rows in results["search"]]
    parts += [part("tuning_cases", data) for data in of["tuning"]]
    parts += [
        part("fusion_cases", x, [*dict.fromkeys(y for row in x["fusion"] for y in row["entries"])])
        for x in of["fusion"]
    ]
    parts += map(convolution_cases, of["convolutions"])
    return "\n\n".join(filter(None, parts)) or NOTHING


def readme(text: str, results: Results) -> str:
    """The README's text with its tables updated.

    Raises:
        ValueError: the text lacks the lines around them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"tables have no place in it: it needs a line {BEGIN} and, after it, a line {END}")
    return f"{before}{BEGIN}\n{speed(results)}\n{END}{after}"


def page(results: Results) -> str:
    """The text of docs/performance.md: all chips in one table, groups of cases, every case."""
    chips_part = overview(results)
    top = f"## portmm beside the best peer, by chip and type\n\n{chips_part}\n\n" if chips_part else ""
    return f"{HEAD}\n{top}## Groups of cases\n\n{summary(results)}\n\n## Every case\n\n{details(results)}\n"


def pages(results: Results, readme_path: Path, page_path: Path) -> dict[Path, str]:
    """Updated contents of the files with tables, by path.

    Raises:
        ValueError: the README lacks the lines around its tables.
        OSError: the README cannot be read.
    """
    try:
        text = readme(readme_path.read_text(), results)
    except ValueError as error:
        raise ValueError(f"{readme_path}: {error}") from error
    return {readme_path: text, page_path: page(results)}


def keep_overhead(raw: Path, folder: Path) -> Path:
    """Store the figures of a file of pytest-benchmark, and of the machine only its chip.

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
        name: {figure: value for figure, value in info.items() if isinstance(value, int | float)}
        for name, info in infos.items()
    }
    path = folder / f"overhead-{host().name}.json"
    kept = {name: values for name, values in figures.items() if values}
    path.write_text(json.dumps({"chip": chip(), "overhead": kept}, indent=1) + "\n")
    return path


def options_of(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("path", type=Path, nargs="?", default=ROOT / "bench" / "results", help="a folder of results, or one file")
    add("--write", action="store_true", help="write the tables into the README and the page")
    add("--check", action="store_true", help="status 1 if a table differs from the results")
    add("--readme", type=Path, default=ROOT / "README.md", help="the file with markers for tables")
    add("--page", type=Path, default=ROOT / "docs" / "performance.md", help="the page with every case")
    add("--picture", type=Path, default=ROOT / "docs" / "images" / "speed.svg", help="the picture of the README")
    add("--overhead", type=Path, help="first store the figures of this file of pytest-benchmark")
    options = parser.parse_args(arguments)
    if not options.path.exists():
        parser.error(f"there are no results at {options.path}; pass a file of `portmm compare --save`, or a folder")
    return options


def stale(options, results):
    """Contents by path of the files that differ from the results."""
    expected = pages(results, options.readme, options.page)
    found = {at: text for at, text in expected.items() if not at.exists() or at.read_text() != text}
    if not picture_is_current(options.picture, results):
        found[options.picture] = picture(results)
    return found


def main(arguments=None):
    options = options_of(arguments)
    if options.overhead:
        print(f"wrote {keep_overhead(options.overhead, options.path)}", file=sys.stderr)
    results = load(options.path)
    if not options.write and not options.check:
        parts = [overview(results), summary(results)] if options.path.is_dir() else [details(results)]
        print("\n\n".join(filter(None, parts)))
        return 0
    differing = stale(options, results)
    for at, text in differing.items():
        if options.write:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(text)
        line = f"wrote {at}" if options.write else f"{at} differs from {options.path}: run `bench/report.py --write`"
        print(line, file=sys.stderr)
    return 1 if differing and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
