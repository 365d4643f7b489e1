"""Scratch memory: one arena per program that runs, one budget for all, and nothing of it in results."""

import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import run_kernels as rk
from typer.testing import CliRunner

import portmm as pm
from portmm.arrays import scratch_arena, scratch_budget
from portmm.cli.main import app
from portmm.runtime.cpu import runtime

QUICKLY = "fast"

rt = rk.rt
MIB = 1 << 20


def draw(*shape):
    return np.random.default_rng(len(shape)).random(shape, np.float32) - np.float32(0.5)


def two_products():
    """A new function with memory between two kernels."""
    return pm.fuse(lambda x, w, v: np.maximum(x @ w, 0) @ v)


def with_numpy_between():
    """A new function with NumPy between two kernels."""
    return pm.fuse(lambda x, w, v: np.sort(x @ w, axis=-1) @ v)


def operands(rows=33):
    return draw(rows, 20), draw(20, 40), draw(40, 8)


def right(function, *args):
    np.testing.assert_allclose(function(*args), function.__wrapped__(*args), rtol=1e-4, atol=1e-4)


@pytest.fixture
def no_arenas():
    """As in a new process."""
    scratch_arena._waiting.clear()
    assert scratch_budget.kept() == 0
    yield
    scratch_arena._waiting.clear()


SIXTY = """
import re
import numpy as np
import portmm as pm
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
@pm.fuse
def f(x, w, v):
    return np.maximum(x @ w, 0) @ v
w, v = np.ones((64, 4096), np.float32), np.ones((4096, 16), np.float32)
f(np.ones((2, 64), np.float32), w, v)
before = resident()
for rows in range(1000, 2200, 20):
    assert (f(np.ones((rows, 64), np.float32), w, v) == 64 * 4096).all()
print(resident() - before)
"""


def test_sixty_numbers_of_rows_share_one_arena():
    done = subprocess.run([sys.executable, "-c", SIXTY], capture_output=True, text=True, check=True, timeout=400)
    assert int(done.stdout) < 160


@pytest.mark.usefixtures("no_arenas")
def test_programs_of_one_thread_share_an_arena_that_grows():
    functions = [two_products() for _ in range(3)]
    for rows in (10, 700, 33):
        for f in functions:
            right(f, *operands(rows))
            right(f, *operands(rows))
    assert len(scratch_arena._waiting) == 1
    assert scratch_budget.kept() == 1 << 17  # 700 rows of 40 numbers, doubled up to a power of two


@pytest.mark.usefixtures("no_arenas")
def test_results_are_no_part_of_the_arena():
    for f in (two_products(), with_numpy_between(), pm.fuse(lambda x, w, v: (np.maximum(x @ w, 0).T, x @ w @ v))):
        results = f(*operands())
        for y in results if isinstance(results, tuple) else (results,):
            assert not any(np.may_share_memory(y, x[scratch_arena.OWN].bytes) for x in scratch_arena._waiting)


def between(function, step, *args):
    """Have the call of NumPy in a program of `function` be preceded by `step`."""
    (made,) = function.memo[function.kind(args, {})[0]]
    space = made.run.__globals__
    (name,) = [n for n, x in space.items() if getattr(x, "__qualname__", "").startswith("_checked.")]
    whole = space[name]

    def both(held, *given):
        found = step()
        return found if found is not None else whole(held, *given)

    space[name] = both


@pytest.mark.parametrize("rows", [5, 33])
def test_a_residual_does_not_overwrite_the_operand_of_its_product(rows):
    """An addend of a product dies with it, but is also multiplied: later tiles of columns still read it."""

    @pm.fuse
    def blocks(x, w):
        h = pm.tanh(x @ w) + x
        h = pm.tanh(h @ w) + h
        return h @ w

    @pm.fuse
    def on_the_right(x, w):
        h = pm.tanh(x @ w) + x
        h = pm.tanh(w @ h) + h
        return h @ w

    x, square, w = draw(rows, 300), draw(300, 300), draw(300, 300) / np.float32(5)
    for threads in (1, 2):
        with pm.config(threads=threads):
            right(blocks, x, w)
            right(on_the_right, square, w)


@pytest.mark.usefixtures("no_arenas")
def test_a_program_inside_a_program_has_an_arena_of_its_own():
    outer, inner = with_numpy_between(), two_products()
    args = operands()
    right(outer, *args)
    between(outer, lambda: right(inner, *operands(64)), *args)
    for _ in range(3):
        right(outer, *args)
    assert len(scratch_arena._waiting) == 2
    first = [id(x) for x in scratch_arena._waiting]
    right(outer, *args)
    assert [id(x) for x in scratch_arena._waiting] == first


@pytest.mark.usefixtures("no_arenas")
def test_an_error_between_kernels_gives_the_arena_back():
    f, args = with_numpy_between(), operands()
    right(f, *args)
    failing = True

    def step():
        if failing:
            raise RuntimeError("between")

    between(f, step, *args)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="between"):
            f(*args)
    assert len(scratch_arena._waiting) == 1
    failing = False
    right(f, *args)


@pytest.mark.usefixtures("no_arenas")
def test_threads_have_arenas_of_their_own_that_others_take_over():
    functions = [two_products(), with_numpy_between()]
    wrong = []

    def work(seed):
        for i in range(60):
            f = functions[(seed + i) % 2]
            x, w, v = operands(10 + 7 * ((seed + i) % 9))
            x = x * np.float32(seed + 1)
            if not np.allclose(f(x, w, v), f.__wrapped__(x, w, v), rtol=1e-3, atol=1e-3):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for x in threads:
        x.start()
    for x in threads:
        x.join(300)
    assert not wrong
    assert 1 <= len(scratch_arena._waiting) <= len(threads)
    right(functions[0], *operands())
    assert scratch_budget.kept() == sum(x[scratch_arena.OWN].bytes.size for x in scratch_arena._waiting)


@pytest.mark.usefixtures("no_arenas")
def test_arenas_stay_within_their_share(monkeypatch):
    monkeypatch.setenv(scratch_budget.VARIABLE, "5")  # 2 MiB for arenas
    f, args = two_products(), operands(1000)
    inner, outer = two_products(), with_numpy_between()
    right(f, *args)
    assert scratch_budget.kept() == 256 << 10
    right(f, *operands(12_000))  # 1.9 MB: there is room when the other is dropped
    assert scratch_budget.kept() == 2 * MIB
    before = dict(scratch_arena._waiting[0])
    right(f, *operands(20_000))  # 3.2 MB: for this call
    assert scratch_budget.kept() == 2 * MIB
    assert scratch_arena._waiting == [before]  # and what others have is left alone
    del before
    right(outer, *operands(9000))
    between(outer, lambda: right(inner, *operands(9000)), *operands(9000))
    for _ in range(2):
        right(outer, *operands(9000))  # two arenas of 1.4 MB do not fit
        assert scratch_budget.kept() <= 2 * MIB
    monkeypatch.setenv(scratch_budget.VARIABLE, "0")
    scratch_arena._waiting.clear()
    right(f, *args)
    assert scratch_budget.kept() == 0


@pytest.mark.usefixtures("no_arenas")
def test_tables_in_an_arena_are_bounded(monkeypatch):
    monkeypatch.setattr(scratch_arena, "MOST_TABLES", 4000)
    f = two_products()
    for _ in range(2):
        for rows in range(1, 40):
            right(f, *operands(rows))
            assert len(scratch_arena._waiting[0]) <= 4000 // 400 + 3


@pytest.mark.parametrize("text", ["-1", "many", "1.5"])
def test_a_wrong_budget_is_not_taken(monkeypatch, text):
    monkeypatch.setenv(scratch_budget.VARIABLE, text)
    scratch_budget._bytes.cache_clear()
    with pytest.warns(RuntimeWarning, match=scratch_budget.VARIABLE):
        assert scratch_budget.budget() == scratch_budget.DEFAULT_MIB * MIB


def test_the_command_shows_the_budget(monkeypatch):
    monkeypatch.setenv(scratch_budget.VARIABLE, "48")
    assert "at most 48 MiB" in CliRunner().invoke(app, ["cache"]).stdout
    assert json.loads(CliRunner().invoke(app, ["cache", "--json"]).stdout)["scratch_bytes"] == 48 * MIB


FORK = """
import os, threading
import numpy as np
import portmm as pm
from portmm.arrays import scratch_arena, scratch_budget
f = pm.fuse(lambda x, w, v: np.maximum(x @ w, 0) @ v)
x, w, v = np.ones((99, 20), np.float32), np.ones((20, 40), np.float32), np.ones((40, 8), np.float32)
f(x, w, v)
taken = scratch_arena._waiting.pop()  # as by a thread in the middle of a program
child = os.fork()
if not child:
    alone = scratch_budget.kept()
    good = (f(x, w, v) == 800).all()
    os._exit(0 if alone == 0 and good and scratch_budget.kept() == 1 << 16 else 1)
assert os.waitpid(child, 0)[1] == 0
assert scratch_budget.kept() == 1 << 16
print("done")
"""


def test_a_child_does_not_count_arenas_of_threads_that_it_lacks():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# --- workspaces of kernels


def test_workspaces_stay_within_their_limit(rt):
    route, small = rk.gemm_route(rt, work=8 * MIB), rk.gemm_route(rt, work=MIB)
    a, c = np.ones((5, 5), np.float32), np.zeros((5, 5), np.float32)
    before = rt.scratch()
    limit = before + 20 * MIB
    ran, leave, held = threading.Barrier(6), threading.Event(), []

    def work():
        rk.execute(rt, route, (a, a, c.copy()))
        rk.execute(rt, small, (a, a, c.copy()))
        held.append(rt.scratch())
        ran.wait(60)
        leave.wait(60)

    try:
        rt.set_scratch(limit)
        threads = [threading.Thread(target=work) for _ in range(5)]
        for x in threads:
            x.start()
        ran.wait(60)
        assert before < rt.scratch() <= limit  # five times 8 MiB are more
        rt.set_scratch(0)
        assert rt.scratch() == 0  # those of threads that rest are given back at once
        rk.execute(rt, route, (a, a, c))
        assert (c == 5).all()
        rt.set_scratch(limit)
        leave.set()
        for x in threads:
            x.join(60)
        assert rt.scratch() <= limit
        with pytest.raises(ValueError, match="-1"):
            rt.set_scratch(-1)
    finally:
        leave.set()
        rt.set_scratch(scratch_budget.budget())


def test_a_thread_that_ends_leaves_no_workspace(rt):
    route, a = rk.gemm_route(rt, work=8 * MIB), np.ones((5, 5), np.float32)
    before = rt.scratch()

    def work():
        rk.execute(rt, route, (a, a, np.zeros((5, 5), np.float32)))

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
    until = time.monotonic() + 60
    while rt.scratch() > before and time.monotonic() < until:  # the interpreter is done with it, the system not quite
        time.sleep(0.001)
    assert rt.scratch() <= before


@pytest.mark.usefixtures("no_arenas")
def test_arenas_leave_the_rest_to_workspaces(monkeypatch):
    asked = []

    class Noting:
        def set_scratch(self, size):
            asked.append(size)

    monkeypatch.setattr(scratch_arena, "runtime", Noting)
    right(two_products(), *operands(700))
    assert asked == [scratch_budget.budget() - (1 << 17)]
    monkeypatch.undo()
    scratch_budget.bound(runtime())
    assert os.environ.get(scratch_budget.VARIABLE) is None
