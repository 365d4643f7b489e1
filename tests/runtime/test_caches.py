"""The three caches of a process are bounded, have a size each, and are dropped together."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import portmm as pm
from portmm.cli.main import app
from portmm.util import memo

QUICKLY = True
pytestmark = pytest.mark.calls
X, W, BIAS = np.ones((5, 6), np.float32), np.ones((6, 7), np.float32), np.ones(7, np.float32)
FUSED = pm.fuse(lambda x: np.maximum(x @ W, 0) + BIAS)


def calls():
    assert (pm.matmul(X, W, epilogue=lambda c, i: c + BIAS[i.n]) == 7).all()
    assert (FUSED(X) == 7).all()
    assert (pm.matmul(X, W) == 6).all()


def test_what_is_remembered_has_a_size_and_is_forgotten():
    calls()
    sizes = memo.sizes()
    assert list(sizes) == ["calls", "kernels", "routes"]
    assert all(0 < x.entries <= x.most for x in sizes.values())
    pm.forget()
    assert not any(x.entries for x in memo.sizes().values())
    calls()


def test_a_table_is_cleared_when_it_is_full():
    table = memo.Memory(3, "calls")
    for i in range(10):
        assert table.keep(i, -i) == -i
        assert len(table) <= 3
    before = memo.sizes()["calls"].tables
    del table
    assert memo.sizes()["calls"].tables == before - 1


def test_the_command_shows_the_size_of_each():
    calls()
    data = json.loads(CliRunner().invoke(app, ["cache", "--json"]).stdout)
    assert list(data["caches"]) == list(memo.CACHES)
    assert data["caches"]["kernels"]["bytes"] == sum(x["bytes"] for x in data["kernels"]) > 0
    text = CliRunner().invoke(app, ["cache"]).stdout
    assert all(f"{name}: " in text for name in memo.CACHES)
