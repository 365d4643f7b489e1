"""Classes of row counts: one choice for all of a class, near the best for each, found without Python."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import portmm as pm
from portmm.dispatch import config, cpu_background, cpu_kernels, cpu_routes, schedule_choice, tuning_database
from portmm.dispatch.schedule_choice import candidate_costs, select_for_class
from portmm.ops import host_matmul, routes
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_candidate_sets import candidate_set
from portmm.spec.problem import Problem
from portmm.spec.row_classes import PER_OCTAVE, SINGLE, row_class, rows
from portmm.target.model import CPU
from portmm.target.target import load_target
from portmm.util import memo

QUICKLY = "fast"

TARGETS = {
    "avx512": load_target("zen4"),
    "avx2": load_target("zen4").limited_to("avx2"),
    "amx": load_target("sapphire_rapids"),
    "i8mm": load_target("neoverse_v2"),
}


def test_classes_cover_all_rows_once():
    last = 0
    while last < 100_000:
        least, most = row_class(last + 1)
        assert least == last + 1
        assert {row_class(m) for m in {least, (least + most) // 2, most}} == {(least, most)}
        assert most == least if least <= SINGLE else most - least < least / PER_OCTAVE
        last = most
    powers = (1 << i for i in range(50))
    assert all(row_class(m)[1] == m for m in powers)


def test_problems_whose_rows_are_compiled_in_or_change_sides_are_classes_of_their_own():
    assert rows(Problem(100, 8, 8)) == row_class(100) != (100, 100)
    assert rows(Problem(100, 8, 8, static=True)) == rows(Problem(100, 8, 8, c="col")) == (100, 100)


@pytest.mark.parametrize("name", TARGETS)
def test_a_class_has_one_choice_that_is_legal_and_near_the_best_throughout(name):
    target, rng = TARGETS[name], random.Random(name)  # noqa: S311 - no secret
    for _ in range(40):
        m, n, k = (int(2 ** rng.uniform(5, 12)) for _ in range(3))
        family = cpu_kernels.family("f32", target)
        p = rng.choice((Problem(m, n, k), Problem(m, n, k, batch=9), Problem(m, n, k, b="packed", family=family)))
        threads = rng.choice((1, 2, 8))
        found = select_for_class(p, target, threads)
        if found.rows == (p.m, p.m):
            continue
        least, most = found.rows
        for m in {least, (least + most) // 2, most}:
            one = replace(p, m=m)
            again = select_for_class(one, target, threads)
            assert (again.schedule, again.workers) == (found.schedule, found.workers)
            assert schedule_choice.choose(one, target, threads, tuned=False).schedule == found.schedule
            assert found.schedule in candidates(one, target)
            listed = candidate_set(one, target)
            seconds = [candidate_costs(one, listed, (m,), (w,))[0].seconds[0] for w in {1, threads}]
            mine = candidate_costs(one, listed, (m,), (found.workers,))[0].seconds[0][found.index]
            fair = ~listed.textbook if target.searches else np.ones(len(listed.schedules), bool)
            loss = CPU.class_loss / (1.0 if target.searches else CPU.within)
            assert mine <= loss * min(x[fair].min() for x in seconds)


@pytest.mark.parametrize("name", TARGETS)
def test_the_workspace_of_a_class_is_that_of_its_largest_problem(name):
    target, rng = TARGETS[name], random.Random(name)  # noqa: S311 - no secret
    for _ in range(12):
        p = Problem(rng.randrange(33, 3000), rng.randrange(1, 900), rng.randrange(1, 3000))
        least, most = rows(p)
        for s in rng.sample(candidates(replace(p, m=most), target), 3):
            kernel = cpu_kernels.kernel_of(s, cpu_kernels.isa_of(s, target))
            sizes = [cpu_kernels.workspace_bytes(kernel, replace(p, m=m), 3) for m in range(least, most + 1)]
            assert sizes == sorted(sizes)


@pytest.fixture
def runtime():
    """The run time, with nothing remembered and one thread."""
    a = np.ones((2, 2), np.float32)
    pm.matmul(a, a)
    rt = host_matmul._state["runtime"]

    def forget():
        memo.forget_all()
        rt.clear_memo()

    forget()
    yield rt
    forget()


PAIRS = {
    "f32": (np.float32, np.float32, np.float32),
    "f64": (np.float64, np.float64, np.float64),
    "s8": (np.int8, np.int8, np.int32),
    "u8": (np.uint8, np.int8, np.int32),
    "f32-f16": (np.float32, np.float16, np.float32),
}


@pytest.mark.parametrize("types", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_run_time_asks_once_for_a_class(runtime, types, packed):
    left, right, result = types
    asked = []

    def resolve(*about):
        asked.append(about)
        return host_matmul._resolve(*about)

    if packed and left is np.float32 and right is np.float16:
        pytest.skip("a weight is packed for activations of its own type")
    rng = np.random.default_rng(0)
    b = rng.integers(-9, 9, (40, 24)).astype(right)
    w = pm.pack(b, **({"activations": np.dtype(left)} if np.dtype(left).kind in "iu" else {})) if packed else b
    runtime.set_resolver(resolve, True)
    try:
        for m in (65, 67, 66, 68, 80):
            a = rng.integers(0, 9, (m, 40)).astype(left)
            made = pm.matmul(a, w)
            assert made.dtype == result
            np.testing.assert_array_equal(made, a.astype(np.float64) @ b.astype(np.float64))
    finally:
        runtime.set_resolver(host_matmul._resolve, True)
    expected = {row_class(m) for m in (65, 67, 66, 68, 80)}
    assert len(asked) == len(expected)


def test_classes_of_the_run_time_are_those_of_python(runtime, monkeypatch):
    """C computes the class by itself: each first M of one asks, and no other does."""
    asked = []
    # While a kernel is built in the background, every call asks.
    monkeypatch.setattr(cpu_background, "begin", lambda *_: False)

    def resolve(*about):
        asked.append(about[1])
        return host_matmul._resolve(*about)

    b = np.ones((3, 2), np.float32)
    runtime.set_resolver(resolve, True)
    try:
        for m in range(1, 600):
            pm.matmul(np.ones((m, 3), np.float32), b)
    finally:
        runtime.set_resolver(host_matmul._resolve, True)
    shared = {m for m in range(1, 600) if row_class(m)[0] == m}
    alone = {m for m in asked if m not in shared}
    for m in alone:  # of classes whose problems have different schedules
        assert not routes.routed(Problem(m, 2, 3))[1]
    assert shared <= set(asked)
    assert len(alone) < 300


@pytest.mark.usefixtures("runtime")
def test_the_first_row_count_of_a_class_decides_nothing():
    """Whichever M of a class comes first, the class runs the same kernel."""
    p = Problem(0, 768, 768)
    for least, most in (row_class(100), row_class(300)):
        kernels = set()
        for m in (least, most, (least + most) // 2):
            memo.forget_all()
            kernels.add(routes.route(replace(p, m=m)).kernel.symbol)
        assert len(kernels) == 1


@pytest.mark.usefixtures("runtime")
def test_a_finding_is_for_its_own_rows_only(monkeypatch):
    """A tuned schedule in the midst of a class is used where it was found, and nowhere else."""
    target, threads = config.target(), config.get_num_threads()
    p = Problem(100, 64, 64)
    monkeypatch.setattr(
        tuning_database, "tuned_rows", lambda q, *_: frozenset({100}) if (q.n, q.k) == (64, 64) else frozenset()
    )
    assert rows(p)[0] < 100
    assert cpu_routes.routed(p, target, threads)[1] == (100, 100)
    assert cpu_routes.routed(replace(p, m=98), target, threads)[1] == (98, 98)
    assert cpu_routes.routed(replace(p, n=65), target, threads)[1] == row_class(100)


def test_ten_thousand_row_counts_are_a_few_classes(runtime):
    b, a = np.ones((1, 1), np.float32), np.ones((10_000, 1), np.float32)
    for m in range(1, 10_001):
        pm.matmul(a[:m], b)
    assert runtime.memo_size() < len({row_class(m) for m in range(1, 10_001)}) * 2
