"""The public side of the package: names, documentation, messages about shapes, lines of warnings."""

from __future__ import annotations

import ast
import inspect
import warnings
from pathlib import Path

import numpy as np
import pytest

import portmm as pm
from portmm.arrays import numpy_fallback
from portmm.build import cache, kernel_store, sealed_library
from portmm.dispatch import config, schedule_choice
from portmm.errors import NoCompilerError
from portmm.ops import host_matmul
from portmm.util import user_warnings

QUICKLY = True
ONES = np.ones((4, 4), np.float32)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# -- names and documentation -----------------------------------------------------------


def test_dir_shows_what_is_public():
    assert dir(pm) == sorted(pm.__all__)
    assert all(hasattr(pm, name) for name in pm.__all__)


def documented(name, value):
    """Names of what has no documentation, of a function, or of a class and its public methods and properties."""
    if not (value.__doc__ or "").strip():
        yield name
    if inspect.isclass(value):
        for inner, held in vars(value).items():
            x = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
            if not inner.startswith("_") and inspect.isfunction(x):
                yield from documented(f"{name}.{inner}", x)


def test_everything_public_is_documented():
    lacking = [x for name in pm.__all__ if name != "__version__" for x in documented(name, getattr(pm, name))]
    q = pm.quantize(ones(32, 8))
    made = (
        pm.pack(ONES), q, pm.pack(q), pm.plan(ONES, ONES), pm.fuse(lambda x: x), pm.explain((64, 64), (64, 64)),
        pm.explain((64, 64), (64, 64), target="h100"),
    )  # fmt: skip
    lacking += [x for y in made for x in documented(type(y).__name__, type(y))]
    assert not lacking


# -- arguments that are wrong -----------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pm.fuse(3), "fuse takes a function, not 3"),
        (lambda: pm.fuse(abs, search="long"), "search is 'long'"),
        (lambda: pm.launch(3, ONES), "kernel is a int"),
        (lambda: pm.warmup("8x8x8"), "shapes is '8x8x8'"),
        (lambda: pm.warmup((8, 8, 8), "f99"), "dtype 'f99' is unknown"),
        (lambda: pm.explain((4, 4), (4, 4), threads=-3), "threads is -3"),
        (lambda: pm.explain_conv((1, 8, 8, 4), (6, 4, 3, 3), dtype=np.float32), "dtype is .*; pass one of f32"),
        (lambda: pm.explain_conv((1, 8, 8, 4), (6, 4, 3, 3), dtype="u4"), "dtype is 'u4'; pass one of f32"),
        (lambda: pm.pack_conv(ones(3, 3, 3)), r"4 dimensions: \(outputs, channels"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# -- shapes in messages -----------------------------------------------------------------


def shapes_of(call):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("a", "b"),
    [((4,), (5, 6)), ((3, 4), (5,)), ((3,), (5,)), ((2, 3, 4), (2, 5, 6)), ((2, 3, 4), (3, 4, 5)), ((7,), (2, 4, 5))],
    ids=str,
)
def test_messages_name_shapes_as_they_were_given(a, b):
    x, y = ones(*a), ones(*b)
    ways = [pm.matmul, lambda x, y: pm.matmul(x, y, dtype=np.float64), pm.plan, lambda *_: pm.explain(a, b)]
    ways += [pm.fuse(lambda x, y: x @ y), lambda x, y: pm.matmul(x, y, np.zeros(3, np.float32))]
    ways += [lambda x, y: pm.matmul(x, pm.pack(y))] if y.ndim > 1 else []
    for way in ways:
        assert f"cannot multiply {a} by {b}" in shapes_of(lambda way=way: way(x, y)).replace("np.int64", "")


def test_messages_of_groups_name_all_of_b():
    ends = np.array([3, 6])
    for b in (ones(2, 5, 6), pm.pack(ones(2, 5, 6))):
        assert "cannot multiply (6, 4) by (2, 5, 6)" in shapes_of(lambda b=b: pm.grouped_matmul(ones(6, 4), b, ends))
    said = shapes_of(lambda: pm.grouped_matmul(ones(6, 4), [ones(5, 6)] * 2, ends))
    assert "cannot multiply (6, 4) by [(5, 6), (5, 6)]" in said


def test_a_plan_names_the_type_that_it_writes():
    with pytest.raises(TypeError, match="out has dtype float64; a plan for these operands writes float32"):
        pm.plan(ONES, ONES, np.zeros((4, 4)))


def test_a_plan_refuses_masks_and_matrices_when_it_is_called():
    step = pm.plan(ONES, ONES)
    assert type(step(ONES.view(np.recarray), ONES)) is np.ndarray
    for wrong in (np.ma.masked_array(ONES, ONES > 0), ONES.view(np.matrix)):
        for call in (lambda x=wrong: step(x, ONES), lambda x=wrong: step(ONES, x), lambda x=wrong: step(ONES, ONES, x)):
            with pytest.raises(TypeError, match=r"masked array|np\.matrix"):
                call()


# -- lines of warnings ------------------------------------------------------------------


def line_of(call):
    """The line that a call is on, and whether its warning points there."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [Path(x.filename).name for x in caught] == [Path(__file__).name], [str(x) for x in caught]
    return caught[0].lineno


def test_without_a_compiler_the_warning_points_at_the_call(monkeypatch):
    def failing(_):
        raise NoCompilerError("none")

    monkeypatch.setattr(host_matmul.route_cache, "runtime", failing)
    for way in (
        lambda: pm.matmul(ONES, ONES),
        lambda: pm.matmul(ONES, ONES, dtype=np.float64),
        lambda: pm.fuse(lambda x: x @ x)(ONES),
    ):
        monkeypatch.setattr(host_matmul, "_state", {})
        monkeypatch.setattr(host_matmul, "fast", host_matmul._start)
        monkeypatch.setattr(numpy_fallback, "_warned", [])
        assert line_of(way) == way.__code__.co_firstlineno


def test_warnings_of_settings_and_schedules_and_the_cache_point_at_the_call(monkeypatch, tmp_path):
    monkeypatch.setenv("PORTMM_NUM_THREADS", "many")
    config._environment_threads.cache_clear()
    here = inspect.currentframe().f_lineno
    assert line_of(lambda: pm.get_num_threads()) == here + 1  # noqa: PLW0108 - the line that calls
    config._environment_threads.cache_clear()
    here = inspect.currentframe().f_lineno
    assert line_of(lambda: pm.config(deterministic=True).__enter__() and pm.get_num_threads()) == here + 1
    monkeypatch.setattr(schedule_choice, "_warned", set())
    here = inspect.currentframe().f_lineno
    assert line_of(lambda: schedule_choice._warn_once("a schedule")) == here + 1
    monkeypatch.setattr(cache, "_warned", set())
    here = inspect.currentframe().f_lineno
    assert line_of(lambda: cache._warn(tmp_path, "a reason")) == here + 1


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("PORTMM_RACE", config._environment_race),
        ("PORTMM_LOAD", sealed_library._from_file),
        ("PORTMM_BASE", lambda text: kernel_store._without_base(Path(text))),
    ],
)
def test_a_setting_of_the_environment_that_has_no_meaning_is_named(name, read):
    with pytest.warns(RuntimeWarning, match=name):
        read("nosuch")
    read("nosuch")  # once a process


def test_a_warning_in_a_thread_without_user_code_is_given_all_the_same():
    space = {"__name__": "portmm.made_up", "warn": user_warnings.warn}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec("def f(): warn('said')", space)  # noqa: S102 - a function of a module of portmm's
        space["f"]()
    assert [str(x.message) for x in caught] == ["said"]


def test_every_warning_goes_through_one_function():
    root = Path(user_warnings.__file__).parent
    for path in root.rglob("*.py"):
        calls = [x.func for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Call)]
        direct = [x for x in calls if ast.unparse(x) in ("warnings.warn", "warnings.warn_explicit")]
        assert len(direct) == (path == Path(user_warnings.__file__)), path
