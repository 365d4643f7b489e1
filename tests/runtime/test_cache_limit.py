"""The cache stays under its limit, and what killed processes leave is swept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from build_compilers import SOURCE, answer, start_worker, wait_until
from typer.testing import CliRunner

from portmm.build import cache, cache_eviction, compiler, temp_directories
from portmm.build.cache import cache_dir
from portmm.build.cache_contents import cache_entries, cache_size
from portmm.build.shared_object import build
from portmm.cli.main import app

pytestmark = pytest.mark.usefixtures("empty_cache")
DAY = 86400.0


@pytest.fixture(autouse=True)
def _looked_at_nothing(monkeypatch):
    monkeypatch.setattr(temp_directories, "_swept", set())
    monkeypatch.setattr(cache, "_kept", {})
    monkeypatch.delenv("PORTMM_CACHE_LIMIT", raising=False)


def keep(i, size=1000, suffix=".so", age=0.0):
    """An entry of some bytes that was last used `age` seconds ago."""
    entry = cache.keep(f"{i:064x}", bytes(size), name=f"k{i}", seconds=0.1, compiler="gcc", command="cc", suffix=suffix)
    for path in (entry.path, entry.path.with_suffix(".txt")):
        os.utime(path, (time.time() - age,) * 2)
    return entry


def tidy():
    return cache_eviction.tidy(cache_dir(), cache.VERSION)


# -- the limit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 1 << 30),
        ("off", None),
        ("1000", 1000),
        ("2k", 2048),
        ("1.5M", 3 << 19),
        ("2GiB", 2 << 30),
        ("1 gb", 1 << 30),
    ],
)
def test_limits(monkeypatch, text, count):
    monkeypatch.setenv("PORTMM_CACHE_LIMIT", text)
    assert cache_eviction.limit() == count


@pytest.mark.parametrize("text", ["0", "-5", "many", "1X", "nan", "1e400"])
def test_a_limit_that_is_none(monkeypatch, text):
    monkeypatch.setenv("PORTMM_CACHE_LIMIT", text)
    cache_eviction._limit.cache_clear()
    with pytest.warns(RuntimeWarning, match="PORTMM_CACHE_LIMIT"):
        assert cache_eviction.limit() == cache_eviction.DEFAULT_LIMIT


def test_the_least_recently_used_goes_first(monkeypatch):
    monkeypatch.setattr(cache, "EVERY", 10**9)
    entries = [keep(i, 10_000, (".so", ".cubin", ".clbin")[i % 3], age=100.0 * (10 - i)) for i in range(10)]
    os.utime(entries[2].path)  # used just now
    monkeypatch.setenv("PORTMM_CACHE_LIMIT", "60000")
    assert tidy() > 0
    left = {e.name for e in cache_entries()}
    assert left == {"k2", "k6", "k7", "k8", "k9"}
    assert cache_size() <= 60_000
    assert tidy() == 0


def test_what_is_loaded_counts_as_used(fake):
    path = build(SOURCE, flags=()).path
    os.utime(path, (1, 1))
    build(SOURCE, flags=())
    assert time.time() - path.stat().st_mtime < DAY
    before = path.stat().st_mtime_ns
    build(SOURCE, flags=())
    assert path.stat().st_mtime_ns == before  # not on every call
    assert len(fake.runs()) == 1


def test_keeping_an_entry_evicts_others(monkeypatch):
    monkeypatch.setenv("PORTMM_CACHE_LIMIT", "100k")
    for i in range(3 * cache_eviction.EVERY):
        keep(i, 5000, age=10.0 * (200 - i))
    assert cache_size() < 100_000 + (cache_eviction.EVERY + 1) * 5500
    assert f"k{3 * cache_eviction.EVERY - 1}" in {e.name for e in cache_entries()}


def test_versions_that_are_gone(monkeypatch):
    monkeypatch.setattr(cache, "EVERY", 10**9)
    own = keep(0, age=100 * DAY)
    with monkeypatch.context() as aside:
        aside.setattr(cache, "VERSION", "0.0.0")
        old, new = keep(1, age=15 * DAY), keep(2, age=13 * DAY)
    assert tidy() == 2
    assert (own.path.exists(), old.path.exists(), new.path.exists()) == (True, False, True)


def test_other_versions_go_before_this_one(monkeypatch):
    monkeypatch.setattr(cache, "EVERY", 10**9)
    own = keep(0, 10_000, age=100.0)
    with monkeypatch.context() as aside:
        aside.setattr(cache, "VERSION", "0.0.0")
        other = keep(1, 10_000)
    monkeypatch.setenv("PORTMM_CACHE_LIMIT", "15000")
    tidy()
    assert (own.path.exists(), other.path.exists()) == (True, False)


def test_notes_that_stay_and_notes_that_go():
    for name in ("rates-x", "hung-x", "book-x"):
        cache.write_note(name, "text")
        os.utime(cache_dir() / f"{name}.note", (time.time() - 2 * DAY,) * 2)
    other = cache_dir() / "somebody.else"
    other.write_text("x")
    os.utime(other, (1, 1))
    tidy()
    assert {p.name for p in cache_dir().iterdir()} == {"rates-x.note", "book-x.note", "somebody.else"}


READER = """
import sys, time
from portmm.build.shared_object import build
source, seconds = sys.argv[1], float(sys.argv[2])
end, sound = time.monotonic() + seconds, 0
import ctypes
from portmm.build import sealed_library as sealed
while time.monotonic() < end:
    artifact = build(source, flags=())
    assert sealed.load(artifact.code, artifact.path, lambda p: ctypes.CDLL(p).answer()) == 42
    sound += 1
print(sound)
"""


@pytest.mark.rest("takes long for what it finds")
def test_eviction_beside_processes_that_load(fake, monkeypatch):
    """They find an entry or build it; none ever loads half of one."""
    build(SOURCE, flags=())
    monkeypatch.setenv("PORTMM_CACHE_LIMIT", "1")
    command = [sys.executable, "-c", READER, SOURCE, "3"]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    while any(reader.poll() is None for reader in readers):
        tidy()
    for reader in readers:
        out, error = reader.communicate()
        assert reader.returncode == 0, error
        assert int(out) > 1
    assert len(fake.runs()) > 2


def test_the_command_shows_size_and_limit(fake, monkeypatch):
    import json

    build(SOURCE, flags=())
    assert fake.runs()
    monkeypatch.setenv("PORTMM_CACHE_LIMIT", "2M")
    found = json.loads(CliRunner().invoke(app, ["cache", "--json"]).stdout)
    assert (found["bytes"], found["limit"]) == (cache_size(), 2 << 20)
    assert "limit" in CliRunner().invoke(app, ["cache"]).stdout
    monkeypatch.setenv("PORTMM_CACHE_LIMIT", "off")
    assert json.loads(CliRunner().invoke(app, ["cache", "--json"]).stdout)["limit"] is None
    assert "no limit" in CliRunner().invoke(app, ["cache"]).stdout


# -- what is left behind -------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A temporary directory for this process and those that it starts."""
    made = tmp_path / "t"
    made.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(made))
    monkeypatch.setattr("tempfile.tempdir", None)
    return made


def old(path):
    os.utime(path, (time.time() - 2 * temp_directories.LEFT_SECONDS,) * 2)


def test_a_killed_process_leaves_nothing(place, tmp_path, fake):
    """Files left behind are removed by the next that builds, when it is old enough."""
    fake.stall.touch()
    worker = start_worker(SOURCE, tmp_path, 0)
    (tmp_path / "go").touch()
    fake.wait_for_runs(1)
    (left,) = place.glob("portmm-build-*")
    old(left)
    temp_directories.sweep(place)
    assert left.exists()  # its owner lives
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    fake.release()
    wait_until(lambda: not any(os.path.exists(f"/proc/{line.split()[0]}") for line in fake.runs()))  # noqa: PTH110
    old(left)
    temp_directories._swept.clear()
    assert answer(build(SOURCE, flags=())) == 42
    assert list(place.iterdir()) == []


def test_what_is_swept(place):
    dead, young, other = place / "portmm-build-a", place / "portmm-kernels-b", place / "portmm-else"
    for path in (dead, young, other):
        path.mkdir()
        (path / "x").touch()
    link, aim = place / "portmm-load-link", place / "aim"
    aim.mkdir()
    (aim / "x").touch()
    link.symlink_to(aim)
    (place / "portmm-build-file").touch()
    for path in (dead, other, aim, place / "portmm-build-file"):
        old(path)
    assert temp_directories.sweep(place) == 1
    held, number = temp_directories.create(temp_directories.BUILD_PREFIX, place)
    old(held)
    temp_directories._swept.clear()
    assert temp_directories.sweep(place) == 0
    assert not dead.exists()
    assert all(p.exists() for p in (young, other, aim / "x", held, place / "portmm-build-file"))
    os.close(number)
    temp_directories._swept.clear()
    assert temp_directories.sweep(place) == 1
    assert not held.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_directories_stay(place):
    left = place / "portmm-build-a"
    left.mkdir()
    os.chown(left, 65534, 65534)
    old(left)
    assert temp_directories.sweep(place) == 0
    assert left.exists()


def test_the_private_directory_of_a_killed_process(place):
    script = (
        "import os, signal; from portmm.build import cache; cache.private_dir(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    (left,) = place.iterdir()
    old(left)
    temp_directories.sweep(place)
    assert list(place.iterdir()) == []


def test_locks_and_parts_that_were_left():
    cache.write_note("x", "y")
    lock, part = cache_dir() / "a.lock", cache_dir() / "a.so.1.tmp"
    for path in (lock, part):
        path.touch()
        os.utime(path, (1, 1))
    tidy()
    assert not lock.exists()
    assert not part.exists()
    assert compiler.COMPILE_SECONDS == 30
    assert Path(cache_dir()).exists()
