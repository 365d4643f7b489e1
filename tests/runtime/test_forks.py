"""Forked children of processes with threads: no lock of portmm's, and no import, stays held in a child."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import portmm
from portmm.build import build_lock, child_process

SOURCES = Path(portmm.__file__).parent

# Each child has 60 seconds for a product, which takes milliseconds, or a compile.
START = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
import numpy as np
import portmm as pm
def child(rows):
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        a = np.ones((rows, 50), np.float32)
        fused = pm.fuse(lambda x: np.maximum(x @ x.T, 0) @ x)
        os._exit(0 if (pm.matmul(a, a.T) == 50).all() and (fused(a) == 50 * rows).all() else 9)
    _, status = os.waitpid(pid, 0)
    assert status == 0, (rows, status)
"""

FIRST_CALLS = (
    START
    + """
seed = int(sys.argv[1])
stop = threading.Event()
def work(i):
    draw = np.random.default_rng([seed, i])
    fused = pm.fuse(lambda x, w, v: np.maximum(x @ w, 0) @ v)
    while not stop.is_set():
        m, k, n = map(int, draw.integers(1, 12, 3))
        x, w, v = (np.ones(s, np.float32) for s in ((m, k), (k, n), (n, 5)))
        pm.matmul(x, w)
        fused(x, w, v)
        pm.matmul(x, w, epilogue=lambda acc, i: acc * 2.0 + m)
threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(3)]
for x in threads:
    x.start()
draw = np.random.default_rng(seed)
for i in range(25):
    time.sleep(draw.random() * 0.01)  # anywhere in a call
    child(41 + i)
stop.set()
for x in threads:
    x.join()
print("done")
"""
)

HELD = (
    START
    + """
from importlib import import_module
pm.matmul(np.ones((3, 3), np.float32), np.ones((3, 3), np.float32))
locks = [getattr(import_module(m), n) for m, n in {locks!r}]
ready, leave = threading.Event(), threading.Event()
def hold():
    for x in locks:
        x.acquire()
    ready.set()
    leave.wait()
    for x in locks:
        x.release()
holder = threading.Thread(target=hold, daemon=True)  # so that a failed child ends this process
holder.start()
ready.wait()
child(77)
assert not any(x.acquire(blocking=False) for x in locks)
leave.set()
holder.join()
print("done")
"""
)

IMPORTING = (
    START
    + """
folder = sys.argv[1]
open(folder + "/slow.py", "w").write("import time; time.sleep(0.3)")
pm.__path__.append(folder)
importer = threading.Thread(target=lambda: __import__("portmm.slow"))
importer.start()
while "portmm.slow" not in sys.modules:
    time.sleep(0.001)
pid = os.fork()
if not pid:
    signal.alarm(20)
    import portmm.slow
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
importer.join()
print("done")
"""
)

READING = """
import os, signal, sys, threading
from pathlib import Path
from portmm.dispatch.tuning_database import opened
path = Path(sys.argv[1])
def look():
    with opened(path, write=not path.exists()) as base:
        base.execute("SELECT count(*) FROM findings").fetchone()
look()
stop = threading.Event()
def read():
    while not stop.is_set():
        look()
threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
for x in threads:
    x.start()
for _ in range(60):
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        look()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
for x in threads:
    x.join()
print("done")
"""

BUILDING = """
import os, threading, time
from portmm.build.build_lock import build_lock
held = threading.Event()
def build():
    with build_lock("key"):
        held.set()
        time.sleep(60)
threading.Thread(target=build, daemon=True).start()
held.wait()
pid = os.fork()
if not pid:
    print(os.getpid(), flush=True)  # it runs, and so has closed what it does not keep
    os.close(1)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""

LOCKS = [
    (".".join(("portmm", *path.relative_to(SOURCES).with_suffix("").parts)), name)
    for path in sorted(SOURCES.rglob("*.py"))
    for name in re.findall(r"^(\w+) = locks\.(?:reentrant_)?lock\(\)$", path.read_text(), re.MULTILINE)
]
"""Modules, and the names of their locks."""


def run(script, *args, timeout=300):
    done = subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, check=False, timeout=timeout
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr[-2000:]


@pytest.mark.rest("takes long for what it finds")
@pytest.mark.parametrize("seed", range(4))  # four fresh processes, whose first calls import and load as well
def test_children_of_threads_in_first_calls(seed):
    run(FIRST_CALLS, str(seed))


def test_a_child_finds_locks_free_that_another_thread_holds():
    assert {"portmm.dispatch.cpu_kernels", "portmm.fusion.fuse", "portmm.arrays.scratch_budget"} <= dict(LOCKS).keys()
    run(HELD.format(locks=LOCKS))


def test_a_fork_waits_for_another_threads_import(tmp_path):
    run(IMPORTING, str(tmp_path))


def test_a_fork_waits_for_another_threads_database(tmp_path):
    """SQLite has locks of its own, which a child would find held for ever."""
    run(READING, str(tmp_path / "tuned.sqlite"))


def test_every_lock_is_of_the_kind_that_children_find_free():
    pattern = re.compile(
        r"\b(?:Lock|RLock|threading\.Condition|threading\.Semaphore|allocate_lock)\(|\bcached_property\b\s*\n"
    )
    found = {
        f"{path.relative_to(SOURCES)}:{text[: hit.start()].count(chr(10)) + 1}"
        for path in SOURCES.rglob("*.py")
        if path.name != "locks.py"
        for text in [path.read_text()]
        for hit in pattern.finditer(text)
    }
    assert not found, f"made elsewhere than in util.locks: {sorted(found)}"
    assert os.register_at_fork  # what all of it rests on


def test_a_fork_does_not_take_part_in_a_program_that_another_thread_starts():
    """A child that had the pipes of a compiler would keep the parent waiting for their end."""
    for _ in range(20):
        done = []
        thread = threading.Thread(target=lambda done=done: done.append(child_process.run(["true"], 20)))
        thread.start()
        children = []
        for _ in range(3):
            child = os.fork()
            if not child:
                time.sleep(3)
                os._exit(0)
            children.append(child)
        start = time.monotonic()
        thread.join()
        took = time.monotonic() - start
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert done
        assert took < 2, "the child's end was awaited"


def test_a_child_does_not_keep_the_build_lock_of_a_killed_parent(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", BUILDING], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        try:
            assert build_lock._try_lock(tmp_path / "key.lock") is None
            parent.kill()
            parent.wait()
            os.kill(child, 0)  # it lives
            fd = build_lock._try_lock(tmp_path / "key.lock")
            assert fd is not None
            os.close(fd)
        finally:
            os.kill(child, signal.SIGKILL)
