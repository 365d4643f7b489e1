"""Tiers of the tests, and runs of kernels that are not repeated: what makes one new, and what is recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import machines
import numpy as np
import operands
import passed
import pytest
import runs
import tiers
from passed import Ledger, digest
from places import HELPERS

from portmm.build import compiler
from portmm.codegen.lower import lower
from portmm.schedule.candidates import candidates
from portmm.spec.problem import Problem


@pytest.fixture
def asked(monkeypatch):
    """The keys that are asked for, of which none is known."""
    ledger = Ledger(frozenset(), every=True)
    monkeypatch.setattr(passed, "LEDGER", ledger)
    return ledger.asked


def chosen():
    p = Problem(5, 7, 9)
    s = candidates(p, machines.TINY)[0]
    return lower(s, machines.TINY.isa(s.isa)), operands.case(p, seed=1)


def test_an_equal_run_has_an_equal_key(asked):
    for _ in range(2):
        kernel, k = chosen()
        runs.check_built(kernel, k)
    assert asked[0] == asked[1]


def test_whatever_a_result_depends_on_makes_a_run_new(asked, monkeypatch):
    kernel, k = chosen()
    other = candidates(k.problem, machines.TINY)[-1]
    runs.called_as_before(kernel, k, 1)
    runs.called_as_before(lower(other, machines.TINY.isa(other.isa)), k, 1)
    runs.called_as_before(replace(kernel, isa=replace(kernel.isa, flags=(*kernel.isa.flags, "-g"))), k, 1)
    runs.called_as_before(kernel, operands.case(k.problem, seed=2), 1)
    runs.called_as_before(kernel, k, 2)
    runs.called_as_before(kernel, replace(k, want=k.want + 1), 1)
    monkeypatch.setattr(compiler, "_BASE", (*compiler._BASE, "-g"))
    runs.called_as_before(kernel, k, 1)
    monkeypatch.undo()
    assert len(set(asked)) == len(asked) == 7


@pytest.mark.parametrize("what", ["compiler", "processor", "run_time", "text_of"])
def test_other_tools_make_a_run_new(what, asked, monkeypatch):
    kernel, k = chosen()
    runs.called_as_before(kernel, k, 1)
    if what == "compiler":
        newer = replace(compiler.find_compiler(None), version="gcc 99.1")
        monkeypatch.setattr(compiler, "find_compiler", lambda _arch: newer)
    else:
        monkeypatch.setattr(passed, what, lambda *_: "another")
    runs.called_as_before(kernel, k, 1)
    assert len(set(asked)) == 2


def test_arrays_count_by_all_they_hold():
    x = np.arange(6, dtype=np.float32)
    kinds = (x, x.reshape(2, 3), x.view(np.int32), x[::-1], x + 1, x.astype(np.float64))
    assert len({digest((y,)) for y in kinds}) == len(kinds)
    assert digest((x,)) == digest((x.copy(),))
    assert digest(("ab", "c")) != digest(("a", "bc"))


def test_the_text_of_a_test_is_that_of_its_helpers_too(monkeypatch, tmp_path):
    texts = {"test_a.py": "import near\n", "near.py": "from far import x\n", "far.py": "x = 1\n", "other.py": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(passed, "_files", lambda: {name: tmp_path / name for name in texts})
    text_of = passed.text_of.__wrapped__
    before = text_of("test_a.py")
    (tmp_path / "other.py").write_text("y = 2\n")
    assert text_of("test_a.py") == before
    (tmp_path / "far.py").write_text("'''A number.'''\nx = (\n    1)  # one\n")
    assert text_of("test_a.py") == before
    (tmp_path / "far.py").write_text("x = 2\n")
    assert text_of("test_a.py") != before


def test_of_new_runs_some_are_repeated_and_of_known_ones_none():
    keys = [digest((i,)) for i in range(400)]
    ledger = Ledger(frozenset(keys[::2]), every=False)
    repeated = [x for x in keys if not ledger.unchanged(x)]
    assert not set(repeated) & ledger.known
    assert repeated[: passed.FIRST] == keys[1 : 2 * passed.FIRST : 2]
    assert len(repeated) == ledger.counts.repeated
    assert 200 / passed.SHARE / 2 < len(repeated) < 200 / passed.SHARE * 2
    assert ledger.counts.unchanged == 200
    assert ledger.counts.left_out == 200 - len(repeated)
    ledger.end(well=True)
    assert not ledger.unchanged(keys[1]), "each test has first ones"
    every = Ledger(frozenset(keys), every=True)
    assert not any(every.unchanged(x) for x in keys)


CONFTEST = """
import sys
sys.path.insert(0, {helpers!r})
from pathlib import Path
import passed, tiers
FILE = Path(__file__).with_name("passed.txt")
passed.LEDGER = passed.Ledger(passed.known(FILE), passed.LEDGER.every)
def pytest_addoption(parser):
    parser.addoption("--record", action="store_true")
def pytest_configure(config):
    for line in ("rest(why): x", "thin(n): x", "emulated: x"):
        config.addinivalue_line("markers", line)
    config.pluginmanager.register(tiers.Tiers(config, FILE))
"""
MODULE = """
import passed, pytest
@pytest.mark.parametrize("i", range(6))
def test_right(i):
    if not passed.unchanged("right", i):
        print("ran", i)
def test_wrong():
    assert passed.unchanged("wrong")
@pytest.fixture
def falling():
    yield
    assert False
def test_wrong_at_its_end(falling):
    passed.unchanged("later")
def test_skipped():
    passed.unchanged("skipped")
    pytest.skip("no tool")
@pytest.mark.rest("another compiler")
def test_elsewhere():
    pass
@pytest.mark.thin(3)
@pytest.mark.parametrize("i", range(5))
def test_many(i):
    pass
"""


@pytest.fixture
def session(tmp_path):
    """Runs pytest on a few tests in a folder of their own; its output."""
    (tmp_path / "conftest.py").write_text(CONFTEST.format(helpers=str(HELPERS)))
    (tmp_path / "test_few.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(tier, *words):
        environment = {**os.environ, "PORTMM_TESTS": tier, "PYTEST_ADDOPTS": "-p no:cacheprovider"}
        environment.pop("PYTEST_XDIST_WORKER", None)
        command = [sys.executable, "-m", "pytest", "-vv", *words]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120, env=environment
        )
        return done.stdout + done.stderr

    return run


@pytest.mark.rest("starts pytest many times")
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["here", "workers"])
def test_only_what_has_passed_is_recorded(session, tmp_path, workers):
    said = session("fast", "--record", *workers)
    assert "9 runs of kernels\n" in said
    assert "6 runs of kernels are recorded" in said
    path = tmp_path / "passed.txt"
    kept = passed.read(path)
    assert len(kept["fast"]) == 6
    said = session("", *workers)
    assert "3 runs of kernels; 6 not repeated" in said
    assert "PORTMM_TESTS=full repeats all" in said
    # A part of the tests adds to what is known; all of them replace it.
    more = {"fast": {*kept["fast"], "0" * passed.DIGITS}, "rest": {"1" * passed.DIGITS}}
    passed.write(more, path)
    said = session("fast", "--record", "-k", "right", *workers)
    assert "7 runs of kernels are recorded" in said
    assert passed.read(path) == more
    assert "3 runs of kernels; 6 not repeated" in session("fast", "--record", *workers)
    assert passed.read(path) == kept | {"rest": more["rest"]}, "known runs stay, those of another tier too"


@pytest.mark.rest("starts pytest many times")
def test_a_changed_test_runs_again(session, tmp_path):
    session("fast", "--record")
    path = tmp_path / "test_few.py"
    path.write_text(path.read_text().replace("def test_wrong():", "def test_wrong():  # a remark"))
    assert "6 not repeated" in session("")
    path.write_text(path.read_text().replace('"right", i', '"left", i'))
    assert "not repeated" not in session("")


@pytest.mark.rest("starts pytest many times")
@pytest.mark.parametrize(
    ("tier", "count", "there", "absent"),
    [
        ("", 11, "test_many[3]", "test_elsewhere"),
        ("rest", 4, "test_elsewhere", "test_many[3]"),
        ("full", 15, "test_elsewhere", "deselected"),
    ],
)
def test_a_tier_has_its_tests(session, tier, count, there, absent):
    said = session(tier)
    assert f"collected {11 + 4} items" in said
    assert sum(" ERROR " not in x for x in said.splitlines() if x.startswith("test_few.py::") and "%]" in x) == count
    assert there in said
    assert absent not in said


@pytest.mark.rest("starts pytest many times")
def test_what_is_no_tier_is_told(session):
    assert "PORTMM_TESTS='most' is none of fast, rest, full, all" in session("most")
    assert "fast and rest, not full" in session("full", "--record")


def test_every_case_is_of_one_tier():
    class Item:
        def __init__(self, i):
            self.nodeid = f"test_x.py::test[{i}]"

        def get_closest_marker(self, name):
            return pytest.mark.thin(3).mark if name == "thin" else None

    items = [Item(i) for i in range(10)]
    fast, rest = (tiers.chosen(items, tier)[0] for tier in ("fast", "rest"))
    assert fast == items[::3]
    assert sorted(x.nodeid for x in fast + rest) == sorted(x.nodeid for x in items)
    assert tiers.chosen(items, "full") == (items, [])
