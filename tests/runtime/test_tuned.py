"""The database of tuned schedules: kept, merged, found, and never trusted further than it is sound."""

import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import portmm as pm
from portmm.cli.main import app
from portmm.dispatch import (
    cpu_kernels,
    cpu_routes,
    overrides,
    program_database,
    schedule_choice,
    tuned_schedule,
    tuning_database,
)
from portmm.dispatch.tuned_schedule import Tuned
from portmm.errors import DatabaseError, ScheduleError
from portmm.host.detect import host
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_neighbourhood import KNOBS, neighbourhood_of, skeleton, unsound
from portmm.schedule.parts import Tile
from portmm.schedule.text import varied
from portmm.spec.dequantization import Dequantization
from portmm.spec.problem import Problem
from portmm.target.target import load_target

QUICKLY = "fast"

HERE = load_target("sapphire_rapids")
LARGE = Problem(1000, 1000, 1000)


@pytest.fixture
def base(tmp_path, monkeypatch):
    path = tmp_path / "tuned.sqlite"
    monkeypatch.setenv("PORTMM_TUNED", str(path))
    schedule_choice._warned.clear()
    return path


def finding(p=LARGE, target=HERE, threads=1, which=3, **more):
    """A finding whose schedule is not the model's choice."""
    choice = schedule_choice.choose(p, target, threads, tuned=False)
    facts = {"chip": target.name, "architecture": tuned_schedule.architecture(target), "vendor": target.vendor}
    s = choice.runners_up[which][0]
    return Tuned(**({"problem": p, "threads": threads, "schedule": s, "workers": 1, "seconds": 1.0} | facts
                    | {"analytical": 1.5, "date": "2026-01-01"} | more))  # fmt: skip


# -- what is kept


def test_kept_and_found(base):
    x = finding()
    assert tuning_database.record(base, [x]) == 1
    assert tuning_database.rows(base) == [x]
    assert x in tuning_database.find(LARGE, HERE, 1)
    assert not tuning_database.find(replace(LARGE, m=999), HERE, 1)
    assert not tuning_database.find(LARGE, HERE, 2)
    tuning_database.record(base, [two := finding(threads=2)])
    assert [x in tuning_database.find(LARGE, HERE, threads) for threads in (1, 2, 3)] == [True, False, False]
    assert [two in tuning_database.find(LARGE, HERE, threads) for threads in (1, 2, 3)] == [False, True, False]


def test_later_findings_replace_earlier_ones(base):
    tuning_database.record(base, [finding()])
    tuning_database.record(base, [finding(which=5)])
    assert [x.schedule for x in tuning_database.rows(base)] == [finding(which=5).schedule]


@pytest.mark.parametrize("p", [
    LARGE,
    Problem(64, 64, 64, "u8-s8-s32", batch=7, c="col"),
    Problem(16, 4096, 4096, "f32-s8-f32", b="packed", family="s8x32", fused=Dequantization().text),
    Problem(8, 8, 8, static=True, deterministic=True),
])  # fmt: skip
def test_toml_says_everything(p):
    x = replace(finding(), problem=p, seconds=1.25e-3, analytical=2.5e-3, cold=True, title='a "chip"', version="1")
    assert tuned_schedule.from_toml(tuned_schedule.to_toml([x, finding()])) == [x, finding()]


def test_problems_of_older_versions_are_read():
    p = Problem(16, 64, 64, "s8-s8-f32", b="packed", family="s8x32k4s", fused=Dequantization(bias=True).text)
    values = json.loads(tuned_schedule.problem_text(p))
    old = values | {"post": "scale+bias"}
    del old["fused"]
    assert tuned_schedule.problem_from(json.dumps(old)) == p
    assert tuned_schedule.problem_from(json.dumps(values)) == p


def test_rows_of_older_versions_are_found(base):
    p = Problem(16, 64, 64, "s8-s8-f32", b="packed", family="s8x32k4s", fused=Dequantization(bias=True).text)
    x, other = replace(finding(), problem=p), replace(finding(), problem=replace(p, n=128))
    tuning_database.record(base, [x, other])
    values = json.loads(tuned_schedule.problem_text(p)) | {"post": "scale+bias"}
    del values["fused"]
    with tuning_database.opened(base, write=True) as connection:
        connection.execute("UPDATE findings SET problem = ? WHERE problem LIKE '%64%64%'", (json.dumps(values),))
    assert tuning_database.find(p, HERE, 1) == [x]
    assert tuning_database.tuned_rows(p, HERE, 1) == {16}


def test_merge_takes_what_is_better(base, tmp_path):
    other, third = tmp_path / "other.sqlite", tmp_path / "third.toml"
    mine, better = finding(), finding(which=5, seconds=0.5)
    new = finding(replace(LARGE, m=77))
    tuning_database.record(base, [mine])
    tuning_database.record(other, [better])
    third.write_text(tuned_schedule.to_toml([new, finding(which=6, seconds=1.4)]))
    assert tuning_database.merge(base, [other, third]) == 2
    assert {x.problem.m: x.schedule for x in tuning_database.rows(base)} == {1000: better.schedule, 77: new.schedule}
    assert tuning_database.merge(base, [other, third]) == 0


def _write(path, start):
    for m in range(start, start + 25):
        tuning_database.record(path, [finding(replace(LARGE, m=m))])


def test_two_writers(base):
    # Not forked: a copy of this process may hold locks of its threads.
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(base, m)) for m in (500, 600)]
    for x in writers:
        x.start()
    for x in writers:
        x.join(60)
        assert x.exitcode == 0
    assert len(tuning_database.rows(base)) == 50


ROWS = {
    "version": "PRAGMA user_version = 99",
    "row": "UPDATE findings SET schedule = 'nonsense'",
    "workers": "UPDATE findings SET workers = 'many'",
    "endless": "UPDATE findings SET workers = 1e400",
    "no rows": "UPDATE findings SET schedule = replace(schedule, ':f32:', ':f32:-')",
    "heights": "UPDATE findings SET schedule = replace(schedule, ':a=', '9999999999:a=')",
    "gain": "UPDATE findings SET seconds = 1e-320",
}
"""How a row may be damaged."""


@pytest.mark.parametrize("damage", ["text", "cut", "folder", *ROWS])
def test_damage_is_told_once_and_harms_nothing(base, damage):
    tuning_database.record(base, [finding()])
    if damage == "text":
        base.write_text("no database at all, but long enough to be taken for one" * 9)
    elif damage == "cut":
        base.write_bytes(base.read_bytes()[:5000])
    elif damage == "folder":
        base.unlink()
        base.mkdir()
    else:
        with sqlite3.connect(base) as raw:
            raw.execute(ROWS[damage])
        raw.close()
    with pytest.warns(RuntimeWarning):
        choice = schedule_choice.choose(LARGE, HERE, 1)
    assert choice.origin == "analytical"
    assert schedule_choice.choose(LARGE, HERE, 1).origin == "analytical"
    if damage in ("text", "cut", "version", "folder"):
        with pytest.raises(DatabaseError, match="PORTMM_TUNED"):
            tuning_database.record(base, [finding()])


# -- who may use it


def test_chip_before_architecture_before_vendor(base):
    other = {"chip": "granite_rapids"}
    vendors = {"chip": "skylake_sp", "architecture": "x86_64/avx512"}
    rows = [finding(which=i, **x) for i, x in enumerate((vendors, other, {}), 1)]
    tuning_database.record(base, rows)
    assert [x for x in tuning_database.find(LARGE, HERE, 1) if x in rows] == rows[::-1]
    assert not {x.chip for x in tuning_database.find(LARGE, load_target("zen4"), 1)} & {x.chip for x in rows}


def test_choice_says_where_it_comes_from(base):
    x = finding(title="Xeon of tests")
    tuning_database.record(base, [x])
    choice = schedule_choice.choose(LARGE, HERE, 1)
    analytical = schedule_choice.choose(LARGE, HERE, 1, tuned=False)
    assert (choice.schedule, choice.workers, choice.origin) == (x.schedule, 1, "tuned on Xeon of tests")
    assert choice.runners_up[0] == (analytical.schedule, analytical.cost)
    assert x.schedule not in [s for s, _ in choice.runners_up]
    assert analytical.origin == "analytical"


def test_neighbours_are_believed_only_where_the_model_agrees(base):
    slow = max(range(len(schedule_choice.choose(LARGE, HERE).runners_up)), key=int)
    tuning_database.record(base, [finding(chip="granite_rapids", which=slow)])
    assert schedule_choice.choose(LARGE, HERE, 1).origin == "analytical"
    tuning_database.record(base, [finding(which=slow)])
    assert schedule_choice.choose(LARGE, HERE, 1).origin.startswith("tuned")


def test_off(base, monkeypatch):
    tuning_database.record(base, [finding()])
    monkeypatch.setenv("PORTMM_TUNED", "off")
    assert schedule_choice.choose(LARGE, HERE, 1).origin == "analytical"


def test_a_limited_chip_is_another(base):
    tuning_database.record(base, [finding()])
    assert schedule_choice.choose(LARGE, HERE.limited_to("avx2"), 1).origin == "analytical"


def test_unsound_findings_are_told_and_not_used(base):
    runners_up = schedule_choice.choose(LARGE, HERE, 1, tuned=False).runners_up
    s = next(s for s, _ in runners_up if s.tiles[2].m)  # with blocks of rows
    tiles = (*s.tiles[:2], s.tiles[2]._replace(m=s.mc + 1), s.tiles[3]._replace(m=s.mc + 1))
    tuning_database.record(base, [replace(finding(), schedule=replace(s, tiles=tiles))])
    with pytest.warns(RuntimeWarning, match="whole tiles"):
        assert schedule_choice.choose(LARGE, HERE, 1).origin == "analytical"


# -- what is sound


SAMPLES = [
    LARGE,
    Problem(37, 1000, 513, c="col"),
    Problem(300, 300, 300, "bf16"),
    Problem(300, 300, 300, "bf16", deterministic=True),
    Problem(3, 512, 700, a="col"),
    Problem(64, 64, 3000, "s8-s8-s32"),
    Problem(300, 256, 128, "f16-f16-f32", b="col"),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("chip", ["sapphire_rapids", "zen4", "haswell", "neoverse_v1"])
@pytest.mark.parametrize("p", SAMPLES, ids=str)
def test_spaces_hold_what_is_sound(p, chip):
    target = load_target(chip)
    listed = candidates(p, target)
    found = neighbourhood_of(p, target, listed)
    rng = np.random.default_rng(0)
    assert all(not unsound(s, p, target, listed) for s in listed)
    made = {found.schedule({k: rng.choice(v) for k, v in found.knobs.items()}) for _ in range(200)} - {None}
    assert {skeleton(s) for s in made} <= {skeleton(s) for s in listed}
    assert len(made - set(listed)) > 20 or not any(x.mc and x.nc for x in listed)


BREAKS = {
    "rows": lambda s: replace(s, tiles=(s.tiles[0]._replace(m=s.mr + 50), *s.tiles[1:])),
    "heights": lambda s: replace(s, tiles=(s.tiles[0]._replace(least=s.heights[1]), *s.tiles[1:])),
    "isa": lambda s: replace(s, isa="amx_int8"),
    "program": lambda s: replace(s, program="dot"),
    "packing": lambda s: varied(s, pack_b=False, pack_a=False, once=False, b="any"),
    "huge": lambda s: replace(s, tiles=(*s.tiles[:3], s.tiles[3]._replace(n=s.nr << 40))),
    "negative": lambda s: replace(s, tiles=(*s.tiles[:3], s.tiles[3]._replace(n=-s.nr))),
    "ragged": lambda s: replace(s, tiles=(*s.tiles[:2], s.tiles[2]._replace(n=s.nr + 1), s.tiles[3])),
    "depths": lambda s: replace(s, tiles=(*s.tiles[:3], s.tiles[3]._replace(k=s.kc + 8))),
    # All of A and B, in blocks of a run of k: 3 MB.
    "too much": lambda s: replace(
        s, tiles=(*s.tiles[:2], *(Tile(t.level, s.mr << 12, t.n << 4, t.k) for t in s.tiles[2:]))
    ),
    "prefetch": lambda s: varied(s, prefetch=1 << 20),
    "fused": lambda s: varied(s, fused="relu"),
    "panels": lambda s: varied(s, panels=9),
}


@pytest.mark.parametrize("how", BREAKS)
def test_unsound(how):
    s = next(x for x in candidates(LARGE, HERE) if x.mc and x.nc and x.b.packed)
    assert unsound(BREAKS[how](s), LARGE, HERE, candidates(LARGE, HERE))


def test_an_override_must_be_legal():
    p = Problem(64, 64, 64)
    s = next(x for x in candidates(p, host()) if x.b.packed)
    for wrong, workers in ((replace(s, tiles=(s.tiles[0]._replace(m=s.mr + 50), *s.tiles[1:])), 1), (s, 0)):
        with pytest.raises(ScheduleError, match="64 x 64 x 64"):
            overrides.override(p, wrong, workers)
    assert not overrides.active()


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", ["f32", "bf16-bf16-f32", "s8-s8-s32"])
def test_what_is_sound_is_right(base, dtype):
    """Products by schedules that no candidate is."""
    target = pm.explain((5, 5), (5, 5), dtype=dtype).target
    rng = np.random.default_rng(3)
    size = (61, 133, 517)
    p = Problem(*size, dtype)
    found = neighbourhood_of(p, target, candidates(p, target))
    a, b = (rng.integers(-8, 8, shape) for shape in ((size[0], size[2]), (size[2], size[1])))
    exact = a @ b
    word = {"f32": np.float32, "s8-s8-s32": np.int8}.get(dtype)
    if word is None:
        word = pytest.importorskip("ml_dtypes").bfloat16
    facts = {"chip": target.name, "architecture": tuned_schedule.architecture(target), "vendor": target.vendor}
    tried = 0
    while tried < 6:
        s = found.schedule({k: rng.choice(v) for k, v in found.knobs.items()})
        if s is None or s in found.listed:
            continue
        tried += 1
        tuning_database.record(base, [Tuned(p, 1, s, 1, 1.0, 1.0, **facts)])
        cpu_kernels.forget()
        choice = schedule_choice.choose(p, target, 1)
        assert choice.schedule == s
        from portmm.runtime.cpu import runtime

        left, right = a.astype(word), b.astype(word)
        out = np.full(exact.shape, 77, np.int32 if dtype.startswith("s8") else np.float32)
        numbers = [*size[:2], size[2], 1]
        for x in (left, right, out):
            numbers += [x.ctypes.data, *(n // x.itemsize for n in x.strides), 0]
        runtime().execute(cpu_routes.routed(p, target, 1)[0], *numbers)
        assert (out == exact).all(), s


def test_knobs_are_usual_first():
    """A search that turns nothing finds what a candidate is like."""
    p = LARGE
    found = neighbourhood_of(p, HERE, candidates(p, HERE))
    assert found.schedule({"base": 0}) is not None
    assert set(found.knobs) == {"base", *KNOBS}


# -- the command line


def test_command(base, tmp_path):
    run = lambda *words: CliRunner().invoke(app, ["tuned", *map(str, words)])  # noqa: E731
    assert run("--where").output.strip() == str(base)
    assert "0 findings" in run().output
    other, text = tmp_path / "other.sqlite", tmp_path / "out.toml"
    tuning_database.record(other, [finding()])
    assert "1 findings merged" in run("--merge", other).output
    assert json.loads(run("--json").output)[0]["chip"] == "sapphire_rapids"
    assert "1.50" in run().output
    assert run("--export", text).exit_code == 0
    assert tuned_schedule.from_toml(text.read_text()) == [finding()]
    program_database.store("key", "sapphire_rapids", 1, program_database.Entry((), {}, 1.0))
    assert "1 findings, 1 programs" in " ".join(run().output.split())
    assert "1 findings removed" in run("--clear").output
    assert "programs" not in run().output
    assert tuning_database.rows(base) == []


def test_explain_says_tuned(base):
    here = pm.explain((333, 444), (444, 555)).target
    p = Problem(333, 555, 444)
    tuning_database.record(base, [finding(p, here, pm.get_num_threads(), title="this chip")])
    found = pm.explain((333, 444), (444, 555))
    assert found.origin == "tuned on this chip"
    assert "tuned on this chip" in found.summary()


def test_calls_choose_again_after_tuning(base):
    from portmm.ops import routes

    a, b = np.ones((333, 222), np.float32), np.ones((222, 444), np.float32)
    p = Problem(333, 444, 222)
    pm.set_num_threads(1)
    pm.matmul(a, b)
    before = routes.route(p).kernel.symbol
    target = pm.explain(a, b).target
    choice = schedule_choice.choose(p, target, 1)
    other = next(
        s for s, _ in choice.runners_up if cpu_kernels.kernel_of(s, cpu_kernels.isa_of(s, target)).name != before
    )
    facts = {"chip": target.name, "architecture": tuned_schedule.architecture(target), "vendor": target.vendor}
    tuning_database.record(base, [Tuned(p, 1, other, 1, 1.0, 1.0, **facts)])
    overrides.renew()
    assert (pm.matmul(a, b) == 222).all()
    assert routes.route(p).kernel.symbol != before


LATER = """
import numpy as np, portmm as pm
from portmm.ops import routes as api
from portmm.spec.problem import Problem
pm.set_num_threads(1)
pm.matmul(np.ones((333, 222), np.float32), np.ones((222, 444), np.float32))
print(api.route(Problem(333, 444, 222)).kernel.symbol)
"""


@pytest.mark.rest("takes long for what it finds")
def test_processes_that_come_later_use_it(base, tmp_path):
    """The memory between processes belongs to one database."""

    def symbol(database):
        env = {**os.environ, "PORTMM_TUNED": str(database), "PORTMM_CACHE": str(tmp_path / "cache")}
        return subprocess.run([sys.executable, "-c", LATER], env=env, check=True, capture_output=True, text=True).stdout

    before = symbol("off")
    p = Problem(333, 444, 222)
    target = pm.explain((333, 222), (222, 444)).target
    choice = schedule_choice.choose(p, target, 1)
    other = next(
        s for s, _ in choice.runners_up if cpu_kernels.kernel_of(s, cpu_kernels.isa_of(s, target)).name not in before
    )
    facts = {"chip": target.name, "architecture": tuned_schedule.architecture(target), "vendor": target.vendor}
    assert symbol(base) == before
    tuning_database.record(base, [Tuned(p, 1, other, 1, 1.0, 1.0, **facts)])
    assert symbol(base) == symbol(base) != before
    assert symbol("off") == before


@pytest.mark.parametrize("text", ["tuned = 5", "[tuned]\nx = 1", "[[tuned]]\nx = 1", "tuned = [1]", "[["])
def test_other_toml(tmp_path, text):
    path = tmp_path / "other.toml"
    path.write_text(text)
    with pytest.raises(DatabaseError, match="has no tuned schedules"):
        tuned_schedule.read_toml(path)


def test_what_loses_is_not_used(base):
    tuning_database.record(base, [finding(seconds=2.0)])
    assert schedule_choice.choose(LARGE, HERE, 1).origin == "analytical"


def test_a_python_without_sqlite_says_so(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    with pytest.raises(DatabaseError, match=r"no SQLite.*PORTMM_TUNED=off"):
        tuning_database.record(base, [finding()])
