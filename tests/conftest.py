"""Fixtures for all tests: a kernel cache of their own, and the public functions as a new process has them."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from portmm import api, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the user's cache out of the tests, from before the first import of a test module."""
    kept = os.environ.get("PORTMM_TEST_CACHE", "")
    folder = kept or tempfile.mkdtemp(prefix="portmm-tests-")
    os.environ["PORTMM_CACHE"] = folder
    if not kept:
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(scope="module", autouse=True)
def _anew():
    """The run time is one per process, and the tests of it register resolvers of their own."""
    api._fast = api._start
    api._state.clear()
    settings._listeners.clear()
    settings.set_num_threads(0)
    yield
    settings.set_num_threads(0)
