"""Write the tables of the README and docs/results.md from bench/results/*.json.

    python bench/tables.py            after measuring
    python bench/tables.py --check    status 1 if a table is not what the results say

Seven kinds of files are understood: reports of `bench/run_suite.py`, searches of
`bench/exhaustive.py --json`, surveys of `bench/cliff.py --json`, rates of
`bench/packing.py --json`, fused products of `bench/fusion.py --save`, devices of `bench/gpu.py --save`, and what
`--overhead` keeps of a run of `pytest test_overhead.py --benchmark-json RAW.json`:

    python bench/tables.py --overhead RAW.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from portmm.comparison.report import from_json, geomean, markdown, summaries

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- results: made by bench/tables.py -->", "<!-- end of results -->"
NOTHING = "Nothing has been measured for this version yet; `python bench/run_suite.py` measures."
HEAD = "# Results\n\nMade by `bench/tables.py` from `bench/results/`; how is told in [measuring](measuring.md).\n"


def table(head, rows):
    """A Markdown table, its first column to the left."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, rule, *rows))


def load(folder):
    """(stem, contents) of every result, by kind."""
    found = {"reports": [], "searches": [], "overheads": [], "cliffs": [], "packings": [], "fusions": [], "devices": []}
    for path in sorted(folder.glob("*.json")):
        text = path.read_text()
        data = json.loads(text)
        if isinstance(data, list):
            found["searches"].append((path.stem, data))
        elif "overhead" in data:
            found["overheads"].append((path.stem, data))
        elif "cliff" in data:
            found["cliffs"].append((path.stem, data))
        elif "packing" in data:
            found["packings"].append((path.stem, data))
        elif "device" in data:
            found["devices"].append((path.stem, data))
        elif "fusion" in data:
            found["fusions"].append((path.stem, data))
        else:
            found["reports"].append((path.stem, from_json(text)))
    return found


def setting(report):
    """What distinguishes reports of one chip."""
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    held = f", {report.isa} for all" if report.isa else ""
    return threads + held + (f", {report.suite}" if report.suite not in ("full", "quick", "narrow") else "")


def is_narrow(report):
    """Whether it is of types other than float32."""
    return any(result.case.narrow for result in report.results)


def ratios(reports):
    """One table per chip, and one more for narrow types: a row per group, a column per setting."""
    chips = {}
    for _, report in reports:
        chips.setdefault((report.chip, is_narrow(report)), []).append(report)
    for (chip, narrow), mine in chips.items():
        groups = {}
        for i, report in enumerate(mine):
            for s in summaries(report):
                groups.setdefault(s.group, [""] * len(mine))[i] = f"{s.mean:.2f} ({s.lowest:.2f}) of {s.count}"
        rows = [[name, *cells] for name, cells in groups.items() if name != "all"]
        rows += [["**all**", *groups["all"]]] if "all" in groups else []
        peers = dict.fromkeys(e.version for report in mine for e in report.entrants if e.peer and e.state == "ok")
        dates = dict.fromkeys(report.date for report in mine)
        kind = "narrow types" if narrow else "float32"
        yield (
            f"**{chip}**, {kind}: rate of portmm over that of the best peer of each case, geometric mean of each "
            f"group, and in brackets its lowest.\n\n"
            f"{table(['group', *map(setting, mine)], rows)}\n\n"
            f"Peers: {'; '.join(peers)}. Measured on {', '.join(dates)}."
        )


def search(rows):
    """How near the analytical choice comes to the best candidate, in words."""
    cases = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    shares = []
    for tried in cases.values():
        chosen = [row["seconds"] for row in tried if row["chosen"]]
        shares += [min(row["seconds"] for row in tried) / chosen[0]] if chosen else []
    mean = geomean(shares)
    return (
        f"The analytical choice runs at {mean:.2f} of the rate of the best of an exhaustive search "
        f"({len(rows)} kernels over {len(shares)} cases, geometric mean; lowest {min(shares):.2f})."
        if mean
        else ""
    )


def overhead(data):
    """A table of what calls, imports and first calls cost."""
    rows = [[name, what, f"{value:.3g}"] for name, kept in data["overhead"].items() for what, value in kept.items()]
    return f"**{data['chip']}**\n\n{table(['overhead', 'measured', 'value'], rows)}"


def cliff(data):
    """How narrow types do beside float32 on every instruction set, in words."""
    rows = data["cliff"]
    short = [row for row in rows if row["share"] < 1]
    worst = min(rows, key=lambda row: row["share"])
    where = f"{worst['isa']}, {worst['dtype']}, B {worst['layout']}, M = {worst['m']}"
    return (
        f"**{data['chip']}**: {len(rows) - len(short)} of {len(rows)} products of narrow types, of all instruction "
        f"sets, layouts and classes of M, reach half of float32's rate or 80 % of what memory allows; the lowest runs "
        f"at {worst['share']:.2f} of that ({where})."
    )


def packing(data):
    """A table of how fast weights are packed, beside a copy of as many bytes: one row for each kind of weight."""
    kinds, threads = {}, sorted({row["threads"] for row in data["packing"]})
    for row in data["packing"]:
        group = f", groups of {row['group'] or 'all'} rows" if row["dtype"] == "u4" else ""
        mixed = f" for {row['activations']}" if row["activations"] != row["dtype"] and not group else ""
        kind = f"{row['dtype']}{mixed}{group}, by {'rows' if row['layout'] == 'row' else 'columns'}"
        kinds.setdefault(kind, {}).setdefault(row["threads"], []).append(row["share"])
    rows = [[kind, *(f"{geomean(x[t]):.2f} ({min(x[t]):.2f})" for t in threads)] for kind, x in kinds.items()]
    head = ["weight", *(f"{t} thread{'s' if t > 1 else ''}" for t in threads)]
    return (
        f"**{data['chip']}**: bytes read and written per second by `pack`, over those of a copy into a new array, "
        f"geometric mean over sizes, and in brackets the lowest.\n\n{table(head, sorted(rows))}"
    )


def fusion(runs):
    """Two tables for each chip: fused products by group and type, and what epilogues cost."""
    chips = {}
    for data in runs:
        # Runs of other groups or cases with as many threads add to one another; of the same cases the last counts.
        mine = chips.setdefault(data["chip"], {}).setdefault(data["threads"], ({}, {}, {}))
        mine[0].update({row["case"]["name"]: row for row in data["fusion"]})
        mine[1].update({name: text for name, text in data["versions"].items() if not text.startswith("missing")})
        mine[2][data["date"]] = None
    return [_fusion(chip, dict(sorted(mine.items()))) for chip, mine in chips.items()]


def _fusion(chip, mine):
    """Those of one chip: threads -> cases by name, versions, dates."""
    groups, costs = {}, {}
    for threads, (cases, _, _) in mine.items():
        for row in cases.values():
            kind = f"{row['case']['group']}, {row['case']['dtype']}"
            for name in ("ratio", "gain"):
                if row[name] is not None:
                    groups.setdefault(kind, {}).setdefault((threads, name), []).append(row[name])
            for name, cost in row["overheads"].items():
                costs.setdefault(f"{name}, {row['case']['dtype']}", {}).setdefault(threads, []).append(cost)
    settings = [f"{t} thread{'s' if t > 1 else ''}" for t in mine]
    head = ["group", *(f"{s}, {x}" for s in settings for x in ("best peer", "not fused"))]
    columns = [(t, x) for t in mine for x in ("ratio", "gain")]
    rows = [
        [kind, *(f"{geomean(x[c]):.2f} ({min(x[c]):.2f}) of {len(x[c])}" if c in x else "" for c in columns)]
        for kind, x in groups.items()
    ]
    versions = dict.fromkeys(text for _, known, _ in mine.values() for text in known.values())
    dates = dict.fromkeys(date for _, _, known in mine.values() for date in known)
    title = (
        f"**{chip}**, fused: rate of portmm over that of the best peer of each case, and over its own where nothing is "
        f"fused, geometric mean of each group, and in brackets its lowest."
    )
    parts = [title, table(head, rows)] if rows else []
    if costs:
        made = [
            [kind, *(f"{100 * median(x[t]):+.1f} % ({100 * max(x[t]):+.1f} %)" if t in x else "" for t in mine)]
            for kind, x in costs.items()
        ]
        parts.append(f"**{chip}**: what an epilogue costs, of the bare product's time, median and in brackets most.")
        parts.append(table(["epilogue", *settings], made))
    return "\n\n".join([*parts, f"Took part: {'; '.join(versions)}. Measured on {', '.join(dates)}."])


def fusion_cases(data):
    """Every case of fused products: microseconds per call, and ratios."""
    names = list(dict.fromkeys(name for row in data["fusion"] for name in row["entries"]))
    rows = []
    for row in data["fusion"]:
        entries = [row["entries"].get(name, {"state": ""}) for name in names]
        times = [f"{1e6 * e['seconds']:.4g}" if e["state"] == "ok" else e["state"] for e in entries]
        shown = [f"{row[x]:.2f}" if row[x] is not None else "" for x in ("ratio", "gain")]
        cost = ", ".join(f"{name} {100 * x:+.1f} %" for name, x in row["overheads"].items())
        rows.append([row["case"]["name"], *times, row["best"], *shown, cost])
    threads = f"{data['threads']} thread{'s' if data['threads'] > 1 else ''}"
    missed = f"\n\nNot run, for want of time: {', '.join(data['skipped'])}." if data["skipped"] else ""
    head = ["case", *names, "best", "ratio", "over not fused", "epilogues cost"]
    return f"**{data['chip']}**, fused, {threads}: microseconds per call.\n\n{table(head, rows)}{missed}"


def device(stem, data):
    """Tables of what ran on a device: the bars, each case beside the best of its peers, candidates of products."""
    rows = [x for x in data["rows"] if x["state"] == "ok"]
    judged = [x for x in rows if "right" in x]
    parts = [f"**{stem}**: {sum(x['right'] for x in judged)} of {len(judged)} products checked are right."]
    bars = [x for x in data["bars"] if x["reached"] is not None]
    if bars:
        shown = [[x["bar"], x["least"], f"{x['reached']:.3g}", f"{x['measured']}/{x['of']}", x["state"]] for x in bars]
        parts.append(table(["bar", "at least", "reached", "cases", ""], shown))
    timed = [_timed(x) for x in rows if x["seconds"]]
    head = ["m x n x k", "types", "B by", "", "us", "TFLOP/s", "best peer", "of its speed"]
    parts += [table(head, timed)] if timed else []
    surveys = [x for x in data["surveys"] if x.get("correlation") is not None]
    if surveys:
        shown = [[x["name"], x["candidates"], f"{x['correlation']:.2f}", f"{x['chosen']:.2f}"] for x in surveys]
        parts.append(table(["candidates of", "", "rank correlation", "chosen, of the best"], shown))
    parts += [", ".join(f"{x['tool']}: {x['state']}" for x in data["sanitizer"])]
    left = [x["name"] for x in data["rows"] if x["state"] != "ok"] + data["notes"].get("not run", [])
    parts += [f"Not measured: {', '.join(left)}."] if left else []
    return "\n\n".join(filter(None, parts))


def _timed(x):
    """Cells of a case; of decode layers as graphs, where there are."""
    times, suffix = (x["graph"], "_graph") if x.get("graph") else (x["seconds"], "")
    peers = {name: seconds for name, seconds in times.items() if name != "portmm"}
    best = min(peers, key=peers.get) if peers else ""
    rate = f"{x[f'tflops{suffix}']:.3g}"
    what = ", ".join(filter(None, (x["section"], x["more"])))
    size, us = f"{x['m']} x {x['n']} x {x['k']}", f"{1e6 * times['portmm']:.1f}"
    return [size, x["dtype"], x["b"], what, us, rate, best, f"{x[f'ratio{suffix}']:.2f}" if peers else ""]


def summary(found):
    """What stands in the README."""
    parts = [*ratios(found["reports"]), *(f"{stem}: {search(rows)}" for stem, rows in found["searches"])]
    parts += [overhead(data) for _, data in found["overheads"]]
    parts += [cliff(data) for _, data in found["cliffs"]]
    parts += [packing(data) for _, data in found["packings"]]
    parts += fusion([data for _, data in found["fusions"]])
    parts += [device(stem, data) for stem, data in found["devices"]]
    return "\n\n".join(filter(None, parts)) or NOTHING


def details(found):
    """What stands in docs/results.md: every case."""
    parts = [markdown(report).rstrip() for _, report in found["reports"]]
    parts += [f"**{stem}**: {search(rows)}" for stem, rows in found["searches"]]
    parts += [fusion_cases(data) for _, data in found["fusions"]]
    return HEAD + "\n" + ("\n\n".join(parts) or NOTHING) + "\n"


def pages(root, folder):
    """Path and due contents of each generated page."""
    found = load(folder)
    readme = root / "README.md"
    text = readme.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    return {readme: f"{before}\n{summary(found)}\n{after}", root / "docs" / "results.md": details(found)}


def keep_overhead(raw):
    """Store the figures of a pytest-benchmark file, and nothing of the machine but its chip."""
    from portmm.comparison.limit import chip
    from portmm.detect import host

    kept = {}
    for row in json.loads(raw.read_text())["benchmarks"]:
        figures = {k: v for k, v in row["extra_info"].items() if isinstance(v, int | float)}
        if figures:
            kept[row["name"].removeprefix("test_").replace("_", " ")] = figures
    path = RESULTS / f"overhead-{host().name}.json"
    path.write_text(json.dumps({"chip": chip(), "overhead": kept}, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if anything would change")
    parser.add_argument("--overhead", type=Path, metavar="RAW.json", help="keep the figures of pytest-benchmark")
    options = parser.parse_args()
    if options.overhead:
        keep_overhead(options.overhead)
    stale = {p: text for p, text in pages(ROOT, RESULTS).items() if not p.exists() or p.read_text() != text}
    if options.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what bench/results/ says: run `python bench/tables.py`")
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
