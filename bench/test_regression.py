"""No case is slower beside its peers than it was: see `regression.py`.

`pytest bench/test_regression.py --store` on a machine that does nothing else writes
bench/baselines/CHIP-THREADSt.json; without `--store` the same cases are held against it.
"""

from datetime import UTC, datetime
from functools import partial

import pytest
import regression
from regression import ROUNDS

from portmm.comparison import cases
from portmm.host.detect import host

CASES = (
    "cube-256", "cube-1024", "bert-128-768x768", "resnet-784x128x1152", "llama-m1-q", "llama-m16-q", "dlrm-256x512",
    "odd-127x131x137", "trans-tn", "tiny-8", "tiny-32", "packed-m1", "packed-m16",
    "bf16-llama-kv-m1-packed", "bf16-llama-kv-m64-packed", "f16-cube-512", "u8-llama-kv-m1-packed",
    "linear-llama-kv-m16-packed", "u4-llama-kv-m1", "w4a8-llama-kv-m64",
)  # fmt: skip
"""Of the suites quick and narrow-quick: one of each kind."""
SMOKE = ("tiny-8",)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        names = SMOKE if metafunc.config.getoption("--smoke") else CASES
        metafunc.parametrize("case", cases(",".join(names)), ids=lambda case: case.name)


@pytest.fixture(scope="module")
def path(threads):
    return regression.path_of(host().name, threads)


@pytest.fixture(scope="module")
def measured(path, storing, threads):
    """Rows by case, which are stored in the end."""
    rows = {}
    yield rows
    if storing and rows:
        today = datetime.now(UTC).date().isoformat()
        regression.store(path, rows, machine=host().name, threads=threads, date=today)


@pytest.fixture
def ratios(smoke, threads, case):
    """Measures the case, for longer where that is asked for; once and briefly for a smoke run."""
    few = {"rounds": 1, "turn_s": 0.002}
    return lambda longer=1: regression.measure(case, threads, **(few if smoke else {"rounds": longer * ROUNDS}))


@pytest.fixture
def check(smoke, storing, path, measured, case):
    """The function that judges or stores the case's ratios."""
    if smoke:
        return _measurable
    if storing:
        return partial(_store, measured, case)
    rows = (regression.load(path) or {}).get(case.name)
    if not rows:
        what = f"baselines/{path.name} has no {case.name}" if path.exists() else f"there is no baselines/{path.name}"
        pytest.skip(f"{what}: `pytest bench/test_regression.py --store`, while nothing else runs")
    return partial(_hold, rows)


def _measurable(benchmark, ratios):
    found = benchmark.pedantic(ratios, rounds=1)
    assert all(x.ratio > 0 for x in found.values())


def _store(measured, case, benchmark, ratios):
    runs = benchmark.pedantic(lambda: [ratios() for _ in range(regression.RUNS)], rounds=1)
    measured[case.name], noisy = regression.rows_of(runs)
    if noisy:
        pytest.skip(f"too noisy to be stored: {'; '.join(noisy)}")


def _hold(rows, benchmark, ratios):
    verdict = benchmark.pedantic(regression.judge, args=(rows, ratios), rounds=1)
    benchmark.extra_info.update({peer: x.ratio for peer, x in verdict.ratios.items()})
    assert not verdict.misses, "\n".join(verdict.misses)
    if len(verdict.notes) == len(rows):
        pytest.skip("; ".join(verdict.notes))


def test_ratio(benchmark, ratios, check):
    check(benchmark, ratios)
