"""Tests of measuring and tuning themselves: they agree with themselves, and they do not take long.

`pytest bench` measures and asserts it, which takes some ten minutes of an idle machine;
`--smoke` only shows that it can be measured. What is said of tuning is checked by another
hand than the tuner's: calls that ask the database and calls that do not, each in a
process of their own, in turns, as contenders of one comparison.
"""

import os
import time

from portmm import tune
from portmm.comparison import CONTENDERS, Contender, cases, compare
from portmm.comparison.html import page
from portmm.comparison.ours import open_portmm
from portmm.comparison.report import geomean, summaries

SMOKE = {"rounds": 1, "turn_s": 0.002, "budget_s": 20.0, "limits": False}
AGREEMENT = 0.03
"""Of geometric means of two runs."""
NOISE = 0.97
"""Ratio from which a case counts as no slower: half of what single cases differ by in two runs."""
ANALYTICAL = Contender("analytical", f"{__name__}:analytical", peer=True)
TUNED = Contender("portmm", f"{__name__}:tuned", peer=False)


def analytical(setup):
    """portmm without the database."""
    os.environ["PORTMM_TUNED"] = "off"
    return open_portmm(setup)


def tuned(setup):
    """portmm with it."""
    os.environ["PORTMM_TUNED"] = os.environ["EVIDENCE_TUNED"]
    return open_portmm(setup)


def test_two_runs_agree(benchmark, smoke):
    suite = cases("smoke" if smoke else "quick")
    start = time.monotonic()
    first = compare(suite, **(SMOKE if smoke else {}))
    taken = time.monotonic() - start
    second = benchmark.pedantic(compare, args=(suite,), kwargs=SMOKE if smoke else {}, rounds=1, iterations=1)
    one, two = ({s.group: s.mean for s in summaries(x)} for x in (first, second))
    benchmark.extra_info["means"] = [one, two]
    benchmark.extra_info["seconds"] = taken
    assert len(page(first)) <= 1 << 20
    assert smoke or taken <= 120
    assert smoke or not first.skipped
    whole = "all"
    assert smoke or abs(two[whole] / one[whole] - 1) <= AGREEMENT


def test_tuned_is_never_slower(benchmark, smoke, tmp_path, monkeypatch):
    database = tmp_path / "tuned.sqlite"
    monkeypatch.setenv("EVIDENCE_TUNED", str(database))
    suite = cases("smoke" if smoke else "quick")
    tuning = tune(suite, threads=1, budget_s=10.0 if smoke else 120.0, database=database)
    options = SMOKE if smoke else {"rounds": 15, "budget_s": 300.0, "limits": False}
    run = {"contenders": [TUNED, ANALYTICAL], **options}
    report = benchmark.pedantic(compare, args=(suite,), kwargs=run, rounds=1, iterations=1)
    ratios = {r.case.name: r.ratio for r in report.results}
    benchmark.extra_info["tuned over analytical"] = ratios
    benchmark.extra_info["rank correlation"] = tuning.rank_correlation
    assert all(ratios.values()), report
    if not smoke:
        assert not {name: x for name, x in ratios.items() if x < NOISE}
        assert 1 / geomean(ratios.values()) >= 0.95


def test_contenders_are_known():
    assert {"portmm", "numpy"} <= {c.name for c in CONTENDERS}
