"""No bit of a result changes while races go on: calls of random kinds, in threads, after forks, with gaps in memory."""

from __future__ import annotations

import os
import threading
import uuid

import numpy as np
import pytest

import portmm as pm
from portmm.dispatch import cpu_background, cpu_race, rival_process
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.util.memo import forget_all

SEED, KINDS, ROUNDS, THREADS = 20, 10, 40, 3


@pytest.fixture
def racing(monkeypatch):
    """Races are on from the first call, whatever it takes, and nothing has raced before."""
    pm.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    if not hasattr(runtime(), "__file__"):
        pytest.skip("only the extension times calls")
    monkeypatch.setenv("PORTMM_RACE", "on")
    monkeypatch.setattr(cpu_race, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(cpu_race, "LEAST_FLOPS", 0.0)
    kept = route_cache.RouteCache(f"{route_cache.ROUTES}{uuid.uuid4().hex}")
    monkeypatch.setattr(route_cache, "of_target", lambda _target: kept)
    forget()
    pm.set_num_threads(1)
    yield kept
    pm.set_num_threads(0)
    rival_process.wait()
    cpu_background.wait()
    forget()


def forget():
    forget_all()
    runtime().clear_memo()


def laid(rng, shape, dtype):
    """An array of random layout: by rows or columns, dense or with gaps, in the middle of other memory."""
    columns, gap = rng.random() < 0.3, int(rng.integers(0, 2)) * int(rng.integers(1, 9))
    outer, inner = shape[::-1] if columns else shape
    memory = np.full((outer, inner + gap), 77, dtype)
    view = memory[:, :inner]
    values = rng.integers(-99, 99, (outer, inner)) if dtype == np.int8 else rng.standard_normal((outer, inner))
    view[...] = values.astype(dtype)
    return view.T if columns else view


def calls(rng):
    """Functions of a number of rows, each of a kind of its own, and the most rows."""
    import ml_dtypes

    types = (np.float32, np.float32, np.float64, ml_dtypes.bfloat16, np.float16, np.int8)
    for _ in range(KINDS):
        dtype = np.dtype(types[rng.integers(len(types))])
        m, n, k = (int(rng.integers(*span)) for span in ((33, 65), (8, 140), (8, 400)))
        a, b, bias = laid(rng, (m, k), dtype), laid(rng, (k, n), dtype), rng.random(n, np.float32)
        form = rng.integers(4 if dtype not in (np.float64, np.int8) else 2)
        w = pm.pack(b) if form in (1, 3) and dtype != np.int8 else b

        def plain(rows, a=a, w=w):
            return pm.matmul(a[:rows], w)

        def ended(rows, a=a, w=w, bias=bias):
            return pm.matmul(a[:rows], w, epilogue=lambda x, i: pm.gelu(x * 0.5 + bias[i.n]))

        yield (plain if form < 2 else ended), m


def rows_of_class(rng, m):
    """A number of rows; those of a class race together."""
    return m - int(rng.integers(0, 2)) * (m % 2 == 0)


def different(kinds, want, seed):
    """Calls of random kinds whose results differ from those without races."""
    order = np.random.default_rng(seed)
    picks = [int(order.integers(len(kinds))) for _ in range(ROUNDS)]
    used = [(at, rows) for at in picks for rows in (*want[at], *want[at])]
    return [(at, rows) for at, rows in used if kinds[at][0](rows).tobytes() != want[at][rows]]


def different_in_child(kinds, want):
    """Exit status of a forked child in which any result differs."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            status = bool(different(kinds, want, SEED - 1))
        finally:
            os._exit(int(status))
    return os.waitpid(pid, 0)[1]


@pytest.mark.rest("takes long for what it finds")
def test_results_stay_the_same_bits(racing):
    rng = np.random.default_rng(SEED)
    kinds = list(calls(rng))
    with pm.config(race=False):
        want = [{rows: call(rows).tobytes() for rows in {m, rows_of_class(rng, m)}} for call, m in kinds]
    forget()
    wrong = []

    def look(seed):
        wrong.extend(different(kinds, want, seed))

    for turn in range(3):
        seeds = range(SEED + turn * THREADS, SEED + (turn + 1) * THREADS)
        threads = [threading.Thread(target=look, args=(x,)) for x in seeds]
        for x in threads:
            x.start()
        look(turn)
        for x in threads:
            x.join()
        if not turn:  # while races wait for kernels, or go on
            assert not different_in_child(kinds, want)
        rival_process.wait()
    assert not wrong
    cpu_background.wait()
    assert any(route_cache.remark(racing, q) for q in racing.lines), "no race was over"


def test_other_results_race_only_if_asked(racing):
    a, b = (np.random.default_rng(0).standard_normal((120, 120), np.float32) for _ in range(2))
    with pm.config(race=False):
        want = pm.matmul(a, b)
    with pm.config(race="any"):
        for _ in range(3):
            for _ in range(60):
                np.testing.assert_allclose(pm.matmul(a, b), want, rtol=1e-3, atol=1e-3)
            rival_process.wait()
        cpu_background.wait()
        assert [q for q in racing.lines if q.endswith(cpu_race.ANY)]
        assert "raced: " in pm.explain(a, b, threads=1).summary()
    forget()
    assert pm.matmul(a, b).tobytes() == want.tobytes(), "elsewhere results are as before"


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="race is 'fast'"), pm.config(race="fast"):
        pass


@pytest.mark.parametrize(("word", "which"), [("", "same"), ("on", "same"), ("off", ""), ("0", ""), ("any", "any")])
def test_the_environment_says_what_races(monkeypatch, word, which):
    from portmm.dispatch import config

    monkeypatch.setenv("PORTMM_RACE", word)
    assert config.race() == which
    with pm.config(race=True):
        assert config.race() == "same"
    with pm.config(race=False):
        assert not config.race()
