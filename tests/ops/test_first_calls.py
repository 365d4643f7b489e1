"""What the first call of a shape does: little for a new class, next to nothing for another M of a class.

Calls of Python and of C are counted, since times depend on what else a machine does.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

import portmm as pm
from portmm.dispatch import config, schedule_choice
from portmm.ops import host_matmul, routes
from portmm.spec.problem import Problem
from portmm.spec.row_classes import row_class
from portmm.trace import bind
from portmm.util import memo

QUICKLY = "fast"

K, N = 48, 40
ROWS = (200, 199, 193, 196)
"""All of one class: the largest first, then the least among the rest."""
LIMIT = 800
"""Calls of Python and of C in `api._resolve`, of a known kernel; NumPy calls for each term took 1100."""

RNG = np.random.default_rng(0)
X = RNG.standard_normal((256, K)).astype(np.float32)
W = RNG.standard_normal((K, N)).astype(np.float32)
CODES = RNG.integers(-9, 9, (256, K)).astype(np.int8)
WEIGHT = RNG.integers(-9, 9, (K, N)).astype(np.int8)
BIAS = RNG.standard_normal(N).astype(np.float32)


@pytest.fixture(autouse=True)
def one_class():
    """All `ROWS` are of one class; nothing is remembered."""
    assert {row_class(m) for m in ROWS} == {(193, 200)}
    pm.matmul(X[:2], W)
    memo.forget_all()
    host_matmul._state["runtime"].clear_memo()


@pytest.fixture
def work(monkeypatch):
    """What is asked and traced from now on."""
    done = []

    def counted(module, name):
        real = getattr(module, name)

        def call(*args, **options):
            done.append(name)
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    counted(routes, "routed")
    counted(bind, "trace")
    return done


def near(made, expected):
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-4)


def relu(acc, i):
    return np.maximum(acc + BIAS[i.n], 0)


def test_linear_asks_once_for_a_class(work):
    weight = pm.pack(WEIGHT, activations=np.dtype(np.int8))
    for m in ROWS:
        made = pm.linear(CODES[:m], weight, BIAS, x_scale=0.5, w_scale=0.25)
        near(made, 0.125 * (CODES[:m].astype(np.float32) @ WEIGHT) + BIAS)
        by_rows = np.linspace(0, 1, m, dtype=np.float32)
        near(pm.linear(CODES[:m], weight, x_scale=by_rows), by_rows[:, None] * (CODES[:m].astype(np.float32) @ WEIGHT))
        assert len(work) == 2  # with a bias, and without
    made = pm.linear(CODES[:195].reshape(5, 39, K), weight, BIAS)
    assert made.shape == (5, 39, N)
    assert len(work) == 3


def test_linear_with_an_epilogue_asks_once_for_a_class(work):
    weight = pm.pack(WEIGHT, activations=np.dtype(np.int8))
    for m in ROWS:
        made = pm.linear(CODES[:m], weight, x_scale=0.5, epilogue=relu)
        near(made, np.maximum(0.5 * (CODES[:m].astype(np.float32) @ WEIGHT) + BIAS, 0))
    assert sorted(work) == ["routed", "trace"]


@pytest.mark.parametrize("packed", [False, True])
def test_an_epilogue_is_traced_once_for_a_class(work, packed):
    w = pm.pack(W) if packed else W
    for m in ROWS:
        near(pm.matmul(X[:m], w, epilogue=relu), np.maximum(X[:m] @ W + BIAS, 0))
        out = np.empty((m, N), np.float32)
        assert pm.matmul(X[:m], w, out, epilogue=relu) is out
        near(out, np.maximum(X[:m] @ W + BIAS, 0))
    assert sorted(work) == ["routed", "trace"] or sorted(work) == ["routed", "routed", "trace", "trace"]


def test_an_epilogue_with_a_default_is_traced_once_for_a_class(work):
    """Functions that take a longer look have a class as well."""

    def shifted(acc, i, by=2.0):
        return acc + by * BIAS[i.n]

    for m in ROWS:
        near(pm.matmul(X[:m], W, epilogue=shifted), X[:m] @ W + 2 * BIAS)
    assert sorted(work) == ["routed", "trace"]


def test_operands_along_the_rows_are_of_the_class(work):
    for m in ROWS:
        residual, by_row = RNG.standard_normal((m, N)).astype(np.float32), RNG.standard_normal(m).astype(np.float32)

        def added(acc, i):
            return acc * by_row[i.m] + residual[i.m, i.n], acc  # noqa: B023 - called now

        first, second = pm.matmul(X[:m], W, epilogue=added)
        near(first, X[:m] @ W * by_row[:, None] + residual)
        near(second, X[:m] @ W)
    assert sorted(work) == ["routed", "trace"]


def test_results_of_integers_have_scales_for_their_rows(work):
    for m in ROWS:
        near(pm.matmul(CODES[:m], WEIGHT, epilogue=relu), np.maximum(CODES[:m].astype(np.float32) @ WEIGHT + BIAS, 0))
    assert sorted(work) == ["routed", "trace"]


def test_an_operand_that_is_long_enough_for_some_rows_only():
    """A vector along the rows with more elements than the first M has serves as many as it has, and not more."""
    scale = RNG.standard_normal(197).astype(np.float32)

    def scaled_by_row(acc, i):
        return acc * scale[i.m]

    def in_long(acc, i, by=1.0):
        return acc * scale[i.m] * by

    for function in (scaled_by_row, in_long):
        for m in (193, 196, 197, 194):
            near(pm.matmul(X[:m], W, epilogue=function), X[:m] @ W * scale[:m, None])
        for m in (198, 200):
            with pytest.raises(ValueError, match="does not fit"):
                pm.matmul(X[:m], W, epilogue=function)


def test_weights_whose_panels_are_of_one_size_are_told_apart():
    """The last panel of a weight may be partial."""
    for n in (N, N - 1, N - 2):
        for _ in range(2):
            got = pm.matmul(X[:9], pm.pack(W[:, :n]), epilogue=lambda acc, i: acc + BIAS[i.n])
            np.testing.assert_allclose(got, X[:9] @ W[:, :n] + BIAS[:n], rtol=1e-4, atol=1e-4)


def test_an_extent_that_is_as_many_as_the_rows_is_not_taken_for_them():
    """N = M at first: what lies along the columns must not follow the rows."""
    for n in ROWS:
        w = RNG.standard_normal((K, n)).astype(np.float32)
        for m in (n, *ROWS):
            bias = RNG.standard_normal(n).astype(np.float32)

            def plus(acc, i):
                return acc + bias[i.n]  # noqa: B023 - called now

            near(pm.matmul(X[:m], w, epilogue=plus), X[:m] @ w + bias)
        short = RNG.standard_normal(n - 1).astype(np.float32)

        def wrong(acc, i):
            return acc + short[i.n]  # noqa: B023 - called now

        for m in (n - 1, n):
            with pytest.raises(ValueError, match="does not fit"):
                pm.matmul(X[:m], w, epilogue=wrong)
    for k in ROWS:  # K = M
        a, b = np.ones((k, k), np.float32), np.ones((k, N), np.float32)
        near(pm.matmul(a, b, epilogue=relu), np.maximum(k + BIAS, 0) * np.ones((k, 1)))


def test_a_b_by_columns_is_decided_for_each_number_of_rows(work):
    """Whether the product alone and a kernel over its rows are faster depends on M: no M decides for another."""
    by_columns = np.asfortranarray(W)
    for m in ROWS:
        near(pm.matmul(X[:m], by_columns, epilogue=relu), np.maximum(X[:m] @ W + BIAS, 0))
    assert work.count("trace") >= len(ROWS)


def calls(function, *args):
    """How many functions of Python and of C a call runs."""
    count = 0

    def look(_, event, __):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(look)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


def test_a_new_class_with_a_known_kernel_takes_few_calls():
    """No step for each candidate: tens of candidates would take thousands of calls."""
    counts = []
    for k in range(64, 64 + 12):
        about = ("f32", 200, 96, k, "row", "row", "row", "", True)
        counts.append(calls(host_matmul._resolve, *about))
    candidates = len(schedule_choice.choose(Problem(200, 96, 70), config.target()).runners_up)
    assert candidates > 20
    assert min(counts) <= LIMIT


@pytest.mark.parametrize("m", [1, 4, 32, 33, 200])
def test_a_repeated_shape_runs_no_python(m):
    a, out = X[:m], np.empty((m, N), np.float32)
    pm.matmul(a, W, out)
    assert calls(host_matmul.fast, a, W, out) <= 2  # the call itself, and the end of the count


def test_another_row_count_of_a_class_runs_no_python():
    for m in ROWS:
        a, out = X[:m], np.empty((m, N), np.float32)
        counted = calls(host_matmul.fast, a, W, out)
        assert m == ROWS[0] or counted <= 2


@pytest.mark.parametrize("packed", [False, True])
def test_a_stack_of_a_class_runs_no_python(packed):
    """A stack by one matrix is a taller matrix: of the class of all its rows, and of the route of that matrix."""
    w = pm.pack(W) if packed else W
    near(host_matmul.fast(X[:200], w), X[:200] @ W)
    for items in (2, 4, 5, 8):
        a, out = X[:200].reshape(items, 200 // items, K), np.empty((items, 200 // items, N), np.float32)
        assert calls(host_matmul.fast, a, w, out) <= 2
        near(out, a @ W)
        near(host_matmul.fast(a, w), a @ W)
    a = X[:198].reshape(2, 99, K)
    assert calls(host_matmul.fast, a, w, None) <= 2
    near(host_matmul.fast(a, w), a @ W)


@pytest.mark.parametrize("by_columns", [False, True])
def test_stacks_of_a_class_run_no_python(by_columns):
    """Stacks of as many matrices each have the route of their class of rows, as two matrices do."""
    w = np.stack([W, -W, 2 * W])
    w = np.ascontiguousarray(w.swapaxes(1, 2)).swapaxes(1, 2) if by_columns else w
    stacks = np.stack([X[:200], X[1:201], X[2:202]])
    host_matmul.fast(stacks, w)
    for m in ROWS:
        a, wide = stacks[:, :m].copy(), np.full((3, m, N), np.nan, np.float32)
        assert calls(host_matmul.fast, a, w) <= 2
        near(host_matmul.fast(a, w), a @ w)
        assert calls(host_matmul.fast, a, w, wide) <= 2
        near(wide, a @ w)


@pytest.mark.parametrize(
    ("change", "same"),
    {
        "steps back": (lambda a, w: (a[::-1], w), True),
        "one matrix repeated": (lambda a, w: (a, np.broadcast_to(w[:1], w.shape)), True),
        "matrices that overlap": (
            lambda a, w: (np.lib.stride_tricks.as_strided(a, (4, 20, K), (K * 4, K * 4, 4)), w),
            True,
        ),
        "one against many": (lambda a, w: (a[:1], w), True),
        "more dimensions": (lambda a, w: (a.reshape(2, 2, 20, K), w.reshape(2, 2, K, N)), True),
        "dimensions exchanged": (lambda a, w: (a.reshape(2, 2, 20, K).swapaxes(0, 1), w.reshape(2, 2, K, N)), True),
        "more dimensions of one": (lambda a, w: (a[None], w), True),
        "gaps": (lambda a, w: (np.repeat(a, 2, 0)[::2], np.repeat(w, 3, 0)[::3]), True),
        "counts that differ": (lambda a, w: (a, w[:3]), False),
    }.values(),
)
def test_stacks_at_all_steps_are_multiplied(change, same):
    a, w = change(np.stack([X[20 * i : 20 * i + 20] for i in range(4)]), np.stack([W, -W, 2 * W, 3 * W]))
    if not same:
        with pytest.raises(ValueError, match="broadcast"):
            host_matmul.fast(a, w)
        return
    for _ in range(2):
        near(host_matmul.fast(a, w), a @ w)
    out = np.full((*(a @ w).shape[:-1], N + 3), 7, np.float32)
    host_matmul.fast(a, w, out[..., :N])
    near(out[..., :N], a @ w)
    assert (out[..., N:] == 7).all()


def test_an_out_of_stacks_keeps_off_what_they_read():
    buffer = np.concatenate([X[:40].ravel(), np.zeros(4 * 20 * N, np.float32)])
    a = buffer[: 2 * 20 * K].reshape(2, 20, K)
    w, expected = np.stack([W, -W]), X[:40].reshape(2, 20, K) @ np.stack([W, -W])
    out = buffer[20 * K : 20 * K + 2 * 20 * N].reshape(2, 20, N)
    host_matmul.fast(a, w, out)
    near(out, expected)
