"""The run time's C replays the cost model to the bit, and selects what NumPy selects."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from test_candidate_sets import MACHINES as SEARCHED

from portmm.dispatch import cpu_kernels, schedule_choice
from portmm.dispatch.schedule_choice import candidate_costs, select_for_class
from portmm.errors import ScheduleError
from portmm.runtime import cpu as cpu_runtime
from portmm.schedule.cost_tape import OPERATIONS, Tape
from portmm.schedule.cpu_candidate_sets import CandidateSet, candidate_set
from portmm.spec.dequantization import Dequantization
from portmm.spec.problem import Problem
from portmm.target.target import load_target

MACHINES = {**SEARCHED, "unsearched": load_target("zen3")}
KINDS = (
    Problem(1, 1, 1),
    Problem(1, 1, 1, b="col"),
    Problem(1, 1, 1, a="any", c="col"),
    Problem(1, 1, 1, deterministic=True),
    Problem(1, 1, 1, batch=30),
    Problem(1, 1, 1, "f64"),
    Problem(1, 1, 1, "bf16"),
    Problem(1, 1, 1, "u8-s8-s32"),
    Problem(1, 1, 1, b="packed"),
    Problem(1, 1, 1, "s8-s8-f32", b="packed", fused=Dequantization().text),
    Problem(1, 1, 1, "f32-u4-f32", b="codes"),
)
ROUND = (1, 16, 48, 64, 256, 1024)
PROBLEMS = 240
"""For each machine."""
ALIKE = 12
"""Problems of each kind for which tapes are held against all predictions."""


@pytest.fixture(scope="module")
def run():
    """What replays tapes."""
    cpu_runtime.runtime()
    found = cpu_runtime.replayer()
    if found is None:
        pytest.skip("the twin of the extension leaves tapes to NumPy")
    return found


def drawn(target, rng):
    """A problem of any kind that the target multiplies."""
    kind = rng.choice(KINDS)
    m, n, k = (rng.choice(ROUND) if rng.random() < 0.4 else int(2 ** rng.uniform(0, 13)) for _ in range(3))
    family = cpu_kernels.family(kind.dtype, target) if kind.b in ("packed", "codes") else ""
    return replace(kind, m=m, n=n, k=k, family=family)


def some(target, rng, count):
    """So many problems that the target has candidates for."""
    left = 4 * count
    while count and left:
        left -= 1
        try:
            p = drawn(target, rng)
            candidate_set(p, target)
        except ScheduleError:
            continue
        count -= 1
        yield p


@pytest.mark.parametrize("name", MACHINES)
def test_tapes_predict_to_the_bit(name, run):
    target, rng = MACHINES[name], random.Random(name)  # noqa: S311 - no secret
    for p in some(target, rng, ALIKE * 2):
        q = p.transposed() if p.c == "col" else p
        listed, threads = candidate_set(p, target), rng.choice((1, 1, 2, 7, 64))
        rows = (q.m, 2 * q.m, 3 * q.m + 1)[: rng.choice((1, 2, 3))]
        tape = Tape.of(listed.table, len(rows), several=threads > 1)
        (by_numpy,) = candidate_costs(p, listed, rows, (threads,))
        np.testing.assert_array_equal(tape.replayed(run, listed.table, q, rows, threads), by_numpy.seconds)


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", MACHINES)
def test_both_evaluators_select_the_same(name, run, monkeypatch):
    target, rng = MACHINES[name], random.Random(name)  # noqa: S311 - no secret
    asked = [(p, rng.choice((1, 1, 2, 8))) for p in some(target, rng, PROBLEMS)]
    with monkeypatch.context() as m:
        m.setattr(schedule_choice, "replayer", lambda: None)
        by_numpy = [select_for_class(p, target, threads) for p, threads in asked]
    replays = []

    def counted(*args):
        replays.append(args)
        return run(*args)

    monkeypatch.setattr(schedule_choice, "replayer", lambda: counted)
    monkeypatch.setattr(CandidateSet, "tape", lambda x, rows, *, several: Tape.of(x.table, rows, several=several))
    for (p, threads), one in zip(asked, by_numpy, strict=True):
        other = select_for_class(p, target, threads)
        assert (other.schedule, other.rows, other.workers, other.origin) == (
            (one.schedule, one.rows, one.workers, one.origin)
        ), p
    assert len(replays) >= len(asked)


def test_the_first_selection_of_a_set_makes_no_tape():
    """A tape takes longer than a selection by NumPy: it is for sets that are met again."""
    listed = candidate_set(Problem(40, 123, 77), MACHINES["avx512"])
    listed.tapes.clear()
    assert listed.tape(2, several=False) is None
    assert listed.tape(2, several=False) is listed.tape(2, several=False) is not None


def test_a_tape_that_does_not_fit_is_refused(run):
    code = np.array([[OPERATIONS.index("add"), 2, 0, 1, 0]], np.int32)
    one, sizes = np.ones((1, 6)), np.full((1, 2), 3.0)
    np.testing.assert_array_equal(run(code, one, sizes, None), np.full(6, 4.0))
    for column, value in ((0, len(OPERATIONS)), (0, -1), (1, 1), (1, 3), (2, 2), (3, -1), (4, 9)):
        wrong = code.copy()
        wrong[0, column] = value
        with pytest.raises(ValueError, match="does not fit"):
            run(wrong, one, sizes, None)
    with pytest.raises(ValueError, match="does not fit"):
        run(code, one, np.ones((1, 4)), None)
    with pytest.raises(ValueError, match="does not fit"):
        run(code[:0], one, sizes, None)
    with pytest.raises(TypeError, match="2-D array of float64"):
        run(code, one[0], sizes, None)
    with pytest.raises(TypeError, match="four arguments"):
        run(code, one)


def test_operations_mean_what_they_mean_in_numpy(run):
    rng = np.random.default_rng(0)
    x = np.concatenate((rng.uniform(-9, 9, 40), [0.0, -0.0, -0.5, 2.5, 1e300, 4503599627370497.0, -3.0, 0.999999]))
    y = np.concatenate((rng.uniform(-9, 9, 40), [1.0, 1.0, 2.0, -2.5, 3.0, 2.0, -3.0, 7.0]))
    whole = np.floor(np.abs(x[:40])) + 1
    for number, name in enumerate(OPERATIONS):
        a, b = (whole[:20], whole[20:]) if name == "remainder" else (x, y)
        columns = np.array((a, b, a < b), np.float64)
        order = (2, 0, 1) if name == "where" else (0, 1, 0)
        found = run(np.array([[number, 4, *order]], np.int32), columns, np.zeros((1, 1)), None)
        meaning = getattr(np, name)
        given = (a < b, a, b) if name == "where" else (a,) if name in ("ceil", "floor") else (a, b)
        np.testing.assert_array_equal(found, meaning(*given))
        if name in ("ceil", "floor"):  # of a zero, the sign is that of what it is divided by
            np.testing.assert_array_equal(np.signbit(found), np.signbit(meaning(*given)))
