"""The ratios that portmm promises, one benchmark for each, on one thread and on all.

`pytest bench` measures and asserts them; `pytest bench --smoke` only shows that
they can be measured. Ratios are to the best peer of each case, from
`portmm.comparison`, and are kept in the benchmark's `extra_info`.
"""

from dataclasses import dataclass

import pytest

from portmm.comparison import cases, compare
from portmm.comparison.report import geomean
from portmm.comparison.text import markdown
from portmm.host.detect import host

SECONDS = 1800.0
SMOKE = {"rounds": 1, "turn_s": 0.002, "budget_s": 60.0, "limits": False}


@dataclass(frozen=True)
class Bar:
    """A bar that a set of cases must meet."""

    name: str
    cases: tuple
    each: float = 0.0
    mean: float = 0.0
    limit: float = 0.0
    target: str = ""


def _large_cubes():
    return tuple(c for c in cases("cube") if c.m >= 1024)


def _suite():
    return tuple(c for c in cases("full") if c.group not in ("tiny", "packed"))


def _packed(rows):
    return tuple(c for c in cases("packed") if c.m in rows)


BARS = (
    Bar("large cubes", _large_cubes(), each=0.97, limit=0.90),
    Bar("suite", _suite(), each=0.90, mean=1.10),
    Bar("tiny batches", cases("tiny"), mean=1.3),
    Bar("packed, M = 1", _packed([1]), each=1.0, limit=0.90),
    Bar("packed, M = 2 to 16", _packed(range(2, 17)), each=1.0),
    Bar("cubes on AVX2", _large_cubes(), each=0.97, target="avx2"),
)


def _faults(bar, report, threads):
    """Bars that are missed, as sentences."""
    found = [f"{name}: no time was left" for name in report.skipped]
    found += [f"{r.case.name}: no ratio ({r.entries.get(report.ours)})" for r in report.results if r.ratio is None]
    rated = [r for r in report.results if r.ratio is not None]
    found += [f"{r.case.name}: {r.ratio:.3f} of {r.best}, under {bar.each}" for r in rated if r.ratio < bar.each]
    mean = geomean(r.ratio for r in rated) or 0.0
    if mean < bar.mean:
        found.append(f"geometric mean {mean:.3f}, under {bar.mean}")
    if bar.limit and threads == 1:
        for r in rated:
            share = r.gflops(report.ours) / r.limit if r.limit else 0.0
            if share < bar.limit:
                found.append(f"{r.case.name}: {share:.3f} of the measured limit, under {bar.limit}")
    return found


@pytest.mark.parametrize("threads", [1, host().cores], ids=["one-thread", "all-cores"])
@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name.replace(" ", "-"))
def test_bar(benchmark, smoke, capsys, bar, threads):
    if bar.target and (host().isa(bar.target) is None or host().isas[0].name == bar.target):
        pytest.skip(f"this machine cannot be held to less than its best by {bar.target}")
    chosen = (min(bar.cases, key=lambda c: c.flops),) if smoke else bar.cases
    options = {"threads": threads, "target": bar.target, **(SMOKE if smoke else {"budget_s": SECONDS})}
    report = benchmark.pedantic(compare, args=(chosen,), kwargs=options, rounds=1, iterations=1)
    benchmark.extra_info["ratios"] = {r.case.name: r.ratio for r in report.results}
    benchmark.extra_info["geomean"] = geomean(r.ratio for r in report.results if r.ratio)
    assert report.ours, [e for e in report.entrants if not e.peer]
    assert all(r.entries[report.ours].state == "ok" for r in report.results), markdown(report)
    if smoke:
        return
    with capsys.disabled():
        print(f"\n{markdown(report)}")
    faults = _faults(bar, report, threads)
    assert not faults, "\n".join(faults)
