"""The process that prepares races: one at most, at the lowest priority, gone with the process that asked it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from portmm.dispatch import rival_process
from portmm.runtime.cpu import python_headers

SECONDS = 300.0
"""After which a test has failed; each takes some seconds on a machine that does nothing else."""
BEGIN = """
import os, sys, time
import numpy as np
import portmm as pm
from portmm.dispatch import cpu_race, rival_process
from portmm.ops import routes
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.spec.problem import Problem
cpu_race.AFTER_SECONDS = 0.0
kept = route_cache.RouteCache(f"{route_cache.ROUTES}{os.getpid()}")  # nothing has raced before
if not os.environ.get("TEST_KEEPS"):
    route_cache.of_target = lambda _: kept
pm.set_num_threads(1)

def calls(until, n=120):
    a, b = np.ones((100, n), np.float32), np.ones((n, 128), np.float32)
    end = time.monotonic() + 200
    pm.matmul(a, b)
    while (state := runtime().racing(routes.route(Problem(100, 128, n)))) != until:
        assert time.monotonic() < end, state
        pm.matmul(a, b)
    return state

pm.matmul(np.ones((100, 120), np.float32), np.ones((120, 128), np.float32))
"""


def start(code, **options):
    """A process that runs code after `BEGIN`, with races."""
    if python_headers() is None:
        pytest.skip("only the extension times calls")
    env = {**os.environ, "PORTMM_RACE": "on"}
    text = BEGIN + textwrap.dedent(code)
    argv = options.pop("argv", [sys.executable, "-c", text])
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, **options)


def run(code, **options):
    """What such a process prints, at its end."""
    process = start(code, **options)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    return output.split()


def gone(pid):
    """Whether a process ends soon."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # its parent is gone, and init is slow
            return True
        time.sleep(0.01)
    return False


def test_races_need_one_helper_which_is_a_process_apart():
    pid, again, parent, session, nice, *streams = run("""
        calls("waiting")
        helper = rival_process._helpers[0]
        calls("done")
        time.sleep(0.1)
        calls("waiting", 150)
        again = rival_process._helpers[0].pid
        files = [os.readlink(f"/proc/{helper.pid}/fd/{i}").partition(":")[0] for i in range(3)]
        nice = os.getpriority(os.PRIO_PROCESS, helper.pid)
        print(helper.pid, again, os.getpid(), os.getsid(helper.pid), nice, *files)
    """)
    assert pid == again == session != parent
    assert int(nice) == 19
    assert streams == ["socket", "/dev/null", "/dev/null"]
    assert gone(int(pid))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_helpers_end_with_their_process(end):
    process = start("""
        calls("waiting")
        print(rival_process._helpers[0].pid, flush=True)
        time.sleep(1000)
    """)
    pid = int(process.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    process.send_signal(end)
    process.communicate(timeout=SECONDS)
    assert gone(pid)


def test_helpers_that_are_killed_leave_no_zombie_and_no_race_waiting():
    (state,) = run("""
        import signal
        for n in (120, 150):
            calls("waiting", n)
            pid = rival_process._helpers[0].pid
            os.kill(pid, signal.SIGKILL)
            calls("done", n)
            end = time.monotonic() + 30
            while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
                time.sleep(0.01)
            assert not os.path.exists(f"/proc/{pid}")
        print(rival_process.possible())
    """)
    assert state == "False", "no third one is started"


@pytest.mark.rest("takes long for what it finds")
def test_idle_helpers_end_and_others_start():
    first, second = run("""
        rival_process.IDLE_SECONDS = 0.2
        calls("waiting")
        first = rival_process._helpers[0].pid
        calls("done")
        end = time.monotonic() + 30
        while os.path.exists(f"/proc/{first}") and time.monotonic() < end:
            time.sleep(0.01)
        assert not os.path.exists(f"/proc/{first}"), "a zombie"
        calls("waiting", 150)
        print(first, rival_process._helpers[0].pid)
        calls("done", 150)
    """)
    assert first != second


def test_forked_children_have_helpers_of_their_own():
    parent, child, ended = run("""
        calls("waiting")
        mine = rival_process._helpers[0].pid
        pid = os.fork()
        if not pid:
            assert not rival_process._helpers
            calls("waiting", 150)
            print(rival_process._helpers[0].pid, flush=True)
            calls("done", 150)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        calls("done")
        print(mine, "done", flush=True)
    """)
    assert parent != child
    assert ended == "done"
    assert gone(int(parent))
    assert gone(int(child))


def test_a_child_that_lives_longer_does_not_keep_the_helper():
    process = start(
        """
        calls("waiting")
        helper = rival_process._helpers[0].pid
        if not os.fork():
            os.close(1)
            time.sleep(1000)
        print(helper, flush=True)
    """,
        start_new_session=True,
    )
    try:
        assert gone(int(process.stdout.readline()))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_main_module_is_not_imported_again(tmp_path):
    script, count, other = tmp_path / "main.py", tmp_path / "count", tmp_path / "json.py"
    script.write_text(f"open({str(count)!r}, 'a').write('x')\n{BEGIN}\ncalls('done')\nprint('done')\n")
    other.write_text("raise ImportError('not this one')\n")  # in the working directory
    assert run("", argv=[sys.executable, "-P", str(script)], cwd=tmp_path) == ["done"]
    assert count.read_text() == "x"


def test_signals_of_broken_pipes_kill_nothing():
    assert (
        run("""
        import signal
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        calls("waiting")
        os.kill(rival_process._helpers[0].pid, signal.SIGKILL)
        rival_process.ask({"a": 1}, [].append)
        calls("done")
        print("alive")
    """)[-1]
        == "alive"
    )


def test_programs_that_embed_python_start_none(monkeypatch):
    monkeypatch.setattr(rival_process, "_helpers", [])  # another test's may still wait for work
    monkeypatch.setattr(sys, "executable", "/usr/bin/blender")
    assert not rival_process.possible()
    monkeypatch.setattr(sys, "executable", None)
    assert not rival_process.possible()


@pytest.mark.rest("takes long for what it finds")
def test_a_process_that_ends_early_leaves_kernels_to_the_next(tmp_path):
    tmp_path.chmod(0o700)
    env = {**os.environ, "PORTMM_RACE": "on", "PORTMM_CACHE": str(tmp_path), "TEST_KEEPS": "1"}
    early = BEGIN + "\ncalls('waiting')\nrival_process.wait()\n"
    later = BEGIN + "\ncalls('done')\nprint(len(rival_process._helpers))\n"
    if python_headers() is None:
        pytest.skip("only the extension times calls")
    subprocess.run([sys.executable, "-c", early], env=env, check=True, timeout=SECONDS)
    done = subprocess.run([sys.executable, "-c", later], env=env, check=True, timeout=SECONDS, capture_output=True)
    assert done.stdout.split() == [b"0"], "it needs no helper"
