"""Options of the benchmarks.

`--smoke` runs the smallest case of everything once and asserts no ratio: it
shows that the benchmarks work, not that portmm is fast.
"""

import pytest


def pytest_addoption(parser):
    parser.addoption("--smoke", action="store_true", help="smallest cases once, no ratio asserted")


@pytest.fixture
def smoke(request):
    return request.config.getoption("--smoke")
