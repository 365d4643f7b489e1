"""Options of the benchmarks.

`--smoke` runs the smallest case of everything once and asserts no ratio: it
shows that the benchmarks work, not that portmm is fast. `--store` writes what
is found into bench/baselines, instead of holding it against them.
"""

import sys
from pathlib import Path

import pytest

# The driver of kernels without Python belongs to the tests.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))


def pytest_addoption(parser):
    parser.addoption("--smoke", action="store_true", help="smallest cases once, no ratio asserted")
    parser.addoption("--store", action="store_true", help="write bench/baselines")
    parser.addoption("--threads", type=int, default=1, metavar="N", help="of cases that are held against a baseline")


@pytest.fixture
def smoke(request):
    return request.config.getoption("--smoke")


@pytest.fixture(scope="session")
def storing(request):
    return request.config.getoption("--store")


@pytest.fixture(scope="session")
def threads(request):
    return request.config.getoption("--threads")
