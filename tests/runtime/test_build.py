"""Compiling, and the cache that many processes and users share."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest
from build_compilers import SOURCE, answer, fake_compiler, start_worker, wait_until

from portmm.build import build_lock, cache, compiler
from portmm.build import shared_object as build_module
from portmm.build.cache import cache_dir
from portmm.build.cache_contents import cache_clear, cache_entries, cache_size
from portmm.build.compiler import find_compiler
from portmm.build.shared_object import build
from portmm.errors import BuildError

NOBODY = 65534
pytestmark = pytest.mark.usefixtures("empty_cache")


def test_cold_then_warm(fake):
    cold = build(SOURCE, flags=())
    warm = build(SOURCE, flags=())
    assert (cold.cached, warm.cached) == (False, True)
    assert (cold.path, cold.key, cold.command) == (warm.path, warm.key, warm.command)
    assert warm.seconds == pytest.approx(cold.seconds, abs=1e-4)
    assert warm.path.parent == cache_dir()
    assert len(fake.runs()) == 1
    assert answer(warm) == 42


def test_files_are_private(fake):
    artifact = build(SOURCE, flags=())
    assert fake.runs()
    assert cache_dir().stat().st_mode & 0o777 == 0o700
    for path in cache_dir().iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
    assert {p.suffix for p in cache_dir().iterdir()} == {".so", ".txt", ".note"}
    assert artifact.path.is_file()


def test_what_the_key_depends_on(fake, tmp_path):
    headers = tmp_path / "headers"
    headers.mkdir()
    base = build(SOURCE, flags=())
    others = [
        build(SOURCE + "\n", flags=()),
        build(SOURCE, flags=("-DX=1",)),
        build(SOURCE, flags=(), name="other"),
        build(SOURCE, flags=(), include=(headers,)),
    ]
    os.utime(headers, ns=(1, 1))
    others.append(build(SOURCE, flags=(), include=(headers,)))
    assert len({base.key, *(a.key for a in others)}) == 6
    assert len(fake.runs()) == 6


@pytest.mark.parametrize(("module", "name", "value"), [("build", "VERSION", "0.0.0"), ("abi", "VERSION", 10**6)])
def test_versions_do_not_share_entries(fake, monkeypatch, module, name, value):
    first = build(SOURCE, flags=())
    monkeypatch.setattr(build_module if module == "build" else build_module.abi, name, value)
    second = build(SOURCE, flags=())
    assert not second.cached
    assert first.path != second.path
    assert len(fake.runs()) == 2


def test_the_version_is_the_packages():
    from importlib.metadata import version

    assert version("portmm") == build_module.VERSION


def test_a_warm_hit_starts_no_process(fake):
    """A new process with a warm cache loads its kernel without importing what costs milliseconds."""
    build(SOURCE, flags=())
    script = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in ("subprocess", "tempfile", "hashlib", "_hashlib", "platformdirs", "json"):
            raise AssertionError("imported " + name)
sys.meta_path.insert(0, Blocked())
def audit(event, args):
    assert event not in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec"), event
sys.addaudithook(audit)
from portmm.build.shared_object import build
assert build({SOURCE!r}, flags=()).cached
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert len(fake.runs()) == 1


def test_the_compiler_is_asked_once(fake, monkeypatch):
    first = find_compiler()
    compiler._find.cache_clear()
    monkeypatch.setattr(compiler, "_query_version", lambda _: pytest.fail("queried again"))
    assert find_compiler() == first
    assert first.argv == (str(fake.path),)


def test_another_compiler_at_the_same_path_is_asked_again(fake):
    find_compiler()
    compiler._find.cache_clear()
    fake.path.write_text("#!/bin/sh\necho 'gcc (Other) 99.1'\n")
    assert find_compiler().version == "gcc (Other) 99.1"


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def tamper(path):
    code = bytearray(path.read_bytes())
    code[len(code) // 2] ^= 1
    path.write_bytes(code)


def replace_with_link(path):
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


SPOILERS = {
    "truncated": truncate,
    "tampered": tamper,
    "emptied": lambda path: path.write_bytes(b""),
    "removed": Path.unlink,
    "linked": replace_with_link,
    "world-writable": lambda path: path.chmod(0o666),
    "group-writable": lambda path: path.chmod(0o620),
    "manifest removed": lambda path: path.with_suffix(".txt").unlink(),
    "manifest of garbage": lambda path: path.with_suffix(".txt").write_bytes(b"\xff\x00 sha256\n\n"),
    "manifest cut": lambda path: path.with_suffix(".txt").write_text(path.with_suffix(".txt").read_text()[:80]),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS.keys())
def test_a_spoilt_entry_is_rebuilt(fake, spoil):
    path = build(SOURCE, flags=()).path
    good = path.read_bytes()
    spoil(path)
    again = build(SOURCE, flags=())
    assert not again.cached
    assert len(fake.runs()) == 2
    assert again.path.read_bytes() == good
    assert not again.path.is_symlink()
    assert build(SOURCE, flags=()).cached
    assert answer(again) == 42


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", [".so", ".txt"])
def test_a_foreign_entry_is_rebuilt(fake, which):
    path = build(SOURCE, flags=()).path
    os.chown(path.with_suffix(which), NOBODY, NOBODY)
    again = build(SOURCE, flags=())
    assert not again.cached
    assert again.path.with_suffix(which).stat().st_uid == os.geteuid()
    assert len(fake.runs()) == 2


def test_a_loaded_file_survives_its_replacement(fake):
    artifact = build(SOURCE, flags=())
    inode = artifact.path.stat().st_ino
    library = ctypes.CDLL(str(artifact.path))
    artifact.path.with_suffix(".txt").unlink()
    build(SOURCE, flags=())
    assert artifact.path.stat().st_ino != inode
    assert library.answer() == 42
    assert len(fake.runs()) == 2


def assert_falls_back(place):
    """The build works, in a private directory, with one warning and nothing left in `place`."""
    with pytest.warns(RuntimeWarning, match="PORTMM_CACHE") as caught:
        first, second = (build(SOURCE, flags=()) for _ in range(2))
    assert len(caught) == 1
    assert str(cache_dir()) in str(caught[0].message)
    assert (first.cached, second.cached) == (False, True)
    assert first.path.parent == cache.private_dir() != place
    assert answer(second) == 42
    first.path.unlink()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_that_others_may_write_to_is_not_used(fake, mode):
    cache_dir().mkdir()
    cache_dir().chmod(mode)
    assert_falls_back(cache_dir())
    assert list(cache_dir().iterdir()) == []
    assert len(fake.runs()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_foreign_directory_is_not_used(fake):
    cache_dir().mkdir(mode=0o755)
    os.chown(cache_dir(), NOBODY, NOBODY)
    assert_falls_back(cache_dir())
    assert list(cache_dir().iterdir()) == []
    assert len(fake.runs()) == 1


@pytest.mark.parametrize("below", ["file/cache", "file"])
def test_a_cache_that_cannot_be_made(fake, monkeypatch, tmp_path, below):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path / below))
    assert_falls_back(cache_dir())
    assert len(fake.runs()) == 1


def test_a_full_disk(fake, monkeypatch):
    write = cache._write

    def full(path, data):
        if path.parent == cache_dir():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(cache, "_write", full)
    assert_falls_back(cache_dir())
    assert len(fake.runs()) == 1


READ_ONLY = """
import os, pkgutil, subprocess, tempfile, fcntl, shlex, shutil, sys, warnings
import portmm
from portmm.build import cache
from portmm.build.shared_object import build
# A user without rights may not be able to read the package.
for module in pkgutil.walk_packages(portmm.__path__, "portmm."):
    if not module.name.startswith(("portmm.dask.", "portmm.jax.", "portmm.torch.")):  # these need other libraries
        __import__(module.name)
source, uid = sys.argv[1], int(sys.argv[2])
cache.digest(b"")
if uid:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first, second = build(source, flags=()), build(source, flags=())
assert [w.category for w in caught] == [RuntimeWarning], caught
assert second.cached and not first.cached
assert first.path.parent == cache.private_dir()
assert os.listdir(cache.cache_dir()) == []
"""


def test_a_read_only_directory(monkeypatch):
    # Permission bits do not bind root, so root's test runs as nobody, in a
    # directory that nobody can reach (pytest's own are closed to others).
    import tempfile

    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        place = Path(folder, "cache")
        place.mkdir()
        if root:
            os.chown(place, NOBODY, NOBODY)
        place.chmod(0o500)
        monkeypatch.setenv("PORTMM_CACHE", str(place))
        script = [sys.executable, "-c", READ_ONLY, SOURCE, str(NOBODY if root else 0)]
        done = subprocess.run(script, capture_output=True, text=True, check=False)
        if root and "NoCompilerError" in done.stderr:
            pytest.skip("the compiler cannot be run by an unprivileged user")
        assert done.returncode == 0, done.stderr


def test_the_private_directory_goes_with_its_process(tmp_path, monkeypatch):
    """Also when a child was forked in between, which must leave it alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = """
import os, sys
from portmm.build import cache
place = cache.private_dir()
child = os.fork()
if child == 0:
    assert cache.private_dir() != place
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert place.is_dir()
assert len(list(place.parent.glob("portmm-*"))) == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert list(tmp_path.glob("portmm-*")) == []


def test_no_temporary_directory(fake, monkeypatch):
    import tempfile

    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    find_compiler()
    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *_, **__: none())
    with pytest.raises(BuildError, match="TMPDIR"):
        build(SOURCE, flags=())
    assert fake.runs() == []


def test_stampede(tmp_path, monkeypatch, real):
    fake = fake_compiler(tmp_path / "bin", real, slow=True)
    monkeypatch.setenv("CC", str(fake.path))
    workers = [start_worker(SOURCE, tmp_path, i) for i in range(8)]
    wait_until(lambda: all((tmp_path / f"ready{i}").exists() for i in range(8)))
    (tmp_path / "go").touch()
    said = [worker.communicate(timeout=120)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 8
    assert len({path for path, _ in said}) == 1
    assert sorted(cached for _, cached in said) == ["False"] + ["True"] * 7
    assert len(fake.runs()) == 1
    assert list(cache_dir().glob("*.lock")) == []


def test_killed_during_a_build(tmp_path, fake, monkeypatch):
    """Neither a process that waits nor one that comes later notices."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    (tmp_path / "go").touch()
    fake.stall.touch()
    victim = start_worker(SOURCE, tmp_path, 0)
    fake.wait_for_runs(1)
    waiter = start_worker(SOURCE, tmp_path, 1)
    wait_until((tmp_path / "ready1").exists)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert list(cache_dir().glob("*.so")) == []
    fake.wait_for_runs(2)
    waiter.send_signal(signal.SIGKILL)
    waiter.communicate()
    fake.release()
    artifact = build(SOURCE, flags=())
    assert not artifact.cached
    assert answer(artifact) == 42
    assert len(fake.runs()) == 3
    assert list(cache_dir().glob("*.lock")) == []


def test_old_temporary_files_are_swept(fake):
    cache_dir().mkdir(mode=0o700)
    old, new = cache_dir() / "a.so.x.tmp", cache_dir() / "b.so.y.tmp"
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    build(SOURCE, flags=())
    assert (old.exists(), new.exists()) == (False, True)
    assert fake.runs()


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), OSError(errno.ENOLCK, "No locks available")])
def test_without_locks_the_build_goes_on(fake, monkeypatch, error):
    def refuse(_):
        raise error

    monkeypatch.setattr(build_lock, "_try_lock", refuse)
    assert answer(build(SOURCE, flags=())) == 42
    assert len(fake.runs()) == 1


def test_a_lock_that_is_never_released(fake, monkeypatch):
    monkeypatch.setattr(build_lock, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(build_lock, "_try_lock", lambda _: None)
    assert answer(build(SOURCE, flags=())) == 42
    assert len(fake.runs()) == 1


def test_entries_size_and_clear(fake):
    assert (cache_entries(), cache_size(), cache_clear()) == ([], 0, 0)
    first = build(SOURCE, flags=(), name="b")
    build(SOURCE, flags=(), name="a")
    (cache_dir() / "stranger.txt.bak").write_text("not portmm's")
    entries = cache_entries()
    assert [e.name for e in entries] == ["a", "b"]
    assert entries[1].path == first.path
    assert entries[1].bytes == first.path.stat().st_size
    assert str(fake.path) in entries[1].command
    assert cache_size() > sum(e.bytes for e in entries)
    assert cache_clear() == 6
    assert cache_entries() == []
    assert [p.name for p in cache_dir().iterdir()] == ["stranger.txt.bak"]
    assert not build(SOURCE, flags=()).cached


def test_notes():
    assert cache.read_note("rates") is None
    cache.write_note("rates", "L1 = 1\nµ\n")
    assert cache.read_note("rates") == "L1 = 1\nµ\n"
    (cache_dir() / "rates.note").chmod(0o666)
    assert cache.read_note("rates") is None


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("PORTMM_CACHE")
    for home in (str(tmp_path), "", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        expected = Path.home() / ".cache" / "portmm" if home == "relative" else platformdirs.user_cache_path("portmm")
        assert cache_dir() == expected
    monkeypatch.setenv("PORTMM_CACHE", "here")
    assert cache_dir() == Path.cwd() / "here"
