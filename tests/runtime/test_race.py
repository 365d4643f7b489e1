"""Races between schedules in the calls of users: bounded, invisible in results, and known to other processes."""

from __future__ import annotations

import threading
import uuid

import numpy as np
import pytest

import portmm as pm
from portmm.build import child_process, compiler
from portmm.dispatch import config, cpu_background, cpu_race, cpu_routes, rival_process, rivals, schedule_choice
from portmm.ops import routes
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.schedule.candidates import candidates
from portmm.spec.problem import Problem
from portmm.util.memo import forget_all

M, N, K = 100, 128, 120
CALLS = 120


@pytest.fixture
def extension():
    """The run time, if it is the one that times calls."""
    pm.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    if not hasattr(runtime(), "__file__"):
        pytest.skip("only the extension times calls")
    return runtime()


@pytest.fixture
def racing(extension, monkeypatch):
    """Races are on, and no route is known."""
    monkeypatch.setenv("PORTMM_RACE", "on")
    monkeypatch.setattr(cpu_race, "AFTER_SECONDS", 0.0)
    kept = route_cache.RouteCache(f"{route_cache.ROUTES}{uuid.uuid4().hex}")
    monkeypatch.setattr(route_cache, "of_target", lambda _target: kept)
    cpu_background.wait()
    forget_all()
    extension.clear_memo()
    with pm.config(threads=1):
        yield extension
    rival_process.wait()
    cpu_background.wait()
    forget_all()
    extension.clear_memo()


def operands(seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((M, K), np.float32), rng.standard_normal((K, N), np.float32)


def fast_and_slow():
    """Routes of the selected schedule, and of one in plain C."""
    p, here = Problem(M, N, K), config.target()
    plain = here.limited_to("scalar")
    best = schedule_choice.choose(p, here, tuned=False).schedule
    return tuple(cpu_routes.route_by(s, p, t, 1) for s, t in ((best, here), (next(iter(candidates(p, plain))), plain)))


def call(route, c):
    a, b = operands()
    runtime().execute(route, M, N, K, 1, a, K, 1, 0, b, N, 1, 0, c, N, 1, 0, None)


def race(extension, own, rivals):
    """Arguments of the task's calls in a race of routes, and the number of launches."""
    told = []
    extension.race(own, lambda *x: told.append(x), 0.0)
    c = np.empty((M, N), np.float32)
    calls = 0
    while calls < CALLS and extension.racing(own) != "done":
        calls += 1
        call(own, c)
        if extension.racing(own) == "waiting":
            extension.start_race(own, rivals)
    np.testing.assert_allclose(c, np.matmul(*operands()), rtol=1e-4, atol=1e-4)
    return told, calls


def test_a_faster_rival_wins(extension):
    fast, slow = fast_and_slow()
    told, _ = race(extension, slow, (fast,))
    (asked,), (route, winner, ratio) = told
    assert asked is route is slow
    assert winner is fast
    assert ratio < 0.9


def test_a_slow_rival_is_soon_out(extension):
    fast, slow = fast_and_slow()
    told, calls = race(extension, fast, (slow,))
    assert told[-1] == (fast, fast, 1.0)
    assert calls < 15


def test_races_without_rivals_end(extension):
    fast, _ = fast_and_slow()
    told, _ = race(extension, fast, ())
    assert told == [(fast,)]
    assert extension.racing(fast) == "done"


def test_a_race_may_end_while_other_threads_are_in_its_first_calls(extension):
    """Calls without the GIL, which begin before rivals are asked for, and end after there are none."""
    for _ in range(20):
        fast, _ = fast_and_slow()
        extension.race(fast, lambda route: extension.start_race(route, ()), 0.0)
        threads = [threading.Thread(target=call, args=(fast, np.empty((M, N), np.float32))) for _ in range(4)]
        for x in threads:
            x.start()
        for x in threads:
            x.join()
        assert extension.racing(fast) == "done"


def test_rivals_are_asked_for_again_where_they_cannot_come_now(extension):
    fast, _ = fast_and_slow()
    told = []

    def task(route):
        told.append(route)
        extension.start_race(route, None if len(told) < 3 else ())

    extension.race(fast, task, 0.0)
    for _ in range(5):
        call(fast, np.empty((M, N), np.float32))
    assert told == [fast] * 3
    assert extension.racing(fast) == "done"


def test_an_error_of_the_task_is_no_error_of_the_call(extension, monkeypatch):
    fast, _ = fast_and_slow()
    said = []
    monkeypatch.setattr("sys.unraisablehook", lambda x: said.append(x.exc_type))
    extension.race(fast, lambda *_: 1 / 0, 0.0)
    for _ in range(20):
        call(fast, np.empty((M, N), np.float32))
    assert said == [ZeroDivisionError]


def test_rivals_are_checked(extension):
    fast, _ = fast_and_slow()
    with pytest.raises(TypeError, match="no route for f32"):
        extension.start_race(fast, (1,))
    with pytest.raises(ValueError, match="at most 3"):
        extension.start_race(fast, (fast,) * 4)


def test_calls_race_and_the_next_process_knows_the_winner(racing):
    a, b = operands()
    p = Problem(M, N, K)
    results, states = set(), []
    for _ in range(CALLS):
        results.add(pm.matmul(a, b).tobytes())
        state = racing.racing(routes.route(p))
        states += [state] if states[-1:] != [state] else []
        if state == "waiting":
            rival_process.wait()
    assert len(results) == 1
    assert states[-2:] == ["running", "done"]
    cpu_background.wait()
    kept = route_cache.of_target("")
    (remark,) = [x for q in kept.lines if (x := route_cache.remark(kept, q))]
    assert remark.startswith(cpu_race.RACED)
    assert "raced: " in pm.explain(a, b, threads=1).summary()
    forget_all()
    racing.clear_memo()
    assert pm.matmul(a, b).tobytes() in results
    assert not racing.racing(routes.route(p)), "what was raced is not raced again"


def test_measurements_wait_for_the_end_of_races(racing, monkeypatch):
    a, b = operands()
    pm.matmul(a, b)
    calls = []

    def call():
        calls.append(1)
        pm.matmul(a, b)

    cpu_race.await_races(call)
    assert racing.racing(routes.route(Problem(M, N, K))) == "done"
    assert not cpu_race._open
    del calls[:]
    monkeypatch.setenv("PORTMM_RACE", "off")
    cpu_race.await_races(call)
    assert not calls


@pytest.mark.parametrize("how", ["setting", "environment"])
def test_races_can_be_turned_off(racing, monkeypatch, how):
    a, b = operands()
    if how == "environment":
        monkeypatch.setenv("PORTMM_RACE", "off")
    with pm.config(race=None if how == "environment" else False):
        pm.matmul(a, b)
        assert not racing.racing(routes.route(Problem(M, N, K)))


def test_tuned_schedules_do_not_race(monkeypatch):
    p = Problem(M, N, K)
    monkeypatch.setattr(rivals, "tuned_within", lambda *_: True)
    assert not rivals.racers(p, (M, M), 1, config.target(), "", others=False)


@pytest.mark.usefixtures("racing")
def test_threads_race():
    a, b = operands()
    want, wrong = pm.matmul(a, b).tobytes(), []

    def calls():
        wrong.extend(1 for _ in range(CALLS) if pm.matmul(a, b).tobytes() != want)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert not wrong


def test_calls_of_little_time_do_not_race(racing, monkeypatch):
    monkeypatch.setattr(cpu_race, "AFTER_SECONDS", 1000.0)
    a, b = operands()
    for _ in range(CALLS):
        pm.matmul(a, b)
    assert racing.racing(routes.route(Problem(M, N, K))) == "counting"


def test_rivals_differ_in_packing_tile_and_depth():
    p, target = Problem(200, 300, 400), config.target()
    best = schedule_choice.select_for_class(p, target, 1)
    seconds = schedule_choice.predicted(p, best.listed, 1)
    listed = best.listed.schedules
    found = rivals.rivals_of(best.schedule, listed, seconds)
    assert len(found) == rivals.MOST_RIVALS
    assert best.schedule not in found
    assert all(cpu_background.same_results(s, best.schedule) for s in found)
    within = rivals.MOST_PREDICTED * min(seconds)
    near = [s for s, t in zip(listed, seconds, strict=True) if t <= within]
    for way in rivals._WAYS:
        if len({way(s) for s in near if cpu_background.same_results(s, best.schedule)}) > 1:
            assert len({way(s) for s in (best.schedule, *found)}) > 1


def test_a_winner_of_another_process_is_the_only_rival():
    p, target = Problem(M, N, K), config.target()
    (own, *others) = rivals.racers(p, (M, M), 1, target, "", others=False)
    assert len({x.key for x in (own, *others)}) == 1 + rivals.MOST_RIVALS
    assert rivals.racers(p, (M, M), 1, target, others[-1].schedule, others=False) == [own, others[-1]]


def test_racers_are_found_in_the_route_cache(extension):
    p, kept = Problem(M, N, K), route_cache.RouteCache(f"{route_cache.ROUTES}{uuid.uuid4().hex}")
    question = route_cache.question(p, (M, M), 1)
    racers = rivals.racers(p, (M, M), 1, config.target(), "", others=False)
    route_cache.keep_racers(kept, question, racers, config.target())
    for read in (kept, route_cache._read(kept.name)):
        assert route_cache.racers(read, question) == racers
        assert not route_cache.racers(read, f"{question}0")
    c = np.empty((M, N), np.float32)
    call(route_cache.routed(route_cache.spelled(racers[1]), extension, p), c)
    np.testing.assert_allclose(c, np.matmul(*operands()), rtol=1e-4, atol=1e-4)


def test_compilers_in_the_background_leave_processors_to_others():
    child_process.background.set(True)
    try:
        done = child_process.run(["sh", "-c", "sleep 0.2; nice"], 10)
        slow = compiler.limit_seconds("gcc")
    finally:
        child_process.background.set(False)
    assert done.output.strip() == str(child_process.LOWEST_PRIORITY)
    assert slow > compiler.limit_seconds("gcc")
