"""Where the tests find files: the repository, its benchmarks, and what the helper modules bring with them."""

from __future__ import annotations

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
"""The folder of the modules that tests share, and of their data. Child processes import them from here."""
TESTS = next(x for x in (HELPERS, *HELPERS.parents) if (x / "conftest.py").exists())
ROOT = TESTS.parent
BENCH = ROOT / "bench"
GOLDEN = TESTS / "golden"
LESSER = HELPERS / "lesser"
MACHINES = HELPERS / "targets"
HOSTS = HELPERS / "hosts"
