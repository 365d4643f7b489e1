"""Failed builds are remembered, as long as their reason lasts."""

from __future__ import annotations

import os
import subprocess
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from build_compilers import SOURCE, answer, wait_until

from portmm.build import child_process, compiler, failed_builds
from portmm.build.cache import cache_dir
from portmm.build.cache_contents import cache_entries
from portmm.build.compiler import find_compiler
from portmm.build.shared_object import build
from portmm.dispatch import config, cpu_routes
from portmm.errors import BuildError, NoCompilerError, ScheduleError
from portmm.ops import product_kernel
from portmm.runtime import cpu as cpu_runtime
from portmm.spec import problem

pytestmark = pytest.mark.usefixtures("empty_cache")

OTHER = SOURCE.replace("42", "43")


@pytest.fixture
def clock(monkeypatch):
    """Times of the memory of failures, moved on by hand."""
    now = [1000.0]
    monkeypatch.setattr(failed_builds.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def program(tmp_path, monkeypatch, real):  # noqa: ARG001 - it is looked for before
    """A compiler whose body a test writes; it writes down each compilation."""
    path, log = tmp_path / "cc", tmp_path / "runs"

    def write(body):
        asked = 'if [ "$1" = --version ]; then echo gcc 1; exit; fi'
        path.write_text(f"#!/bin/sh\n{asked}\necho run >> {log}\n{body}\n")
        path.chmod(0o700)

    monkeypatch.setenv("CC", str(path))
    write.runs = lambda: len(log.read_text().splitlines()) if log.exists() else 0
    return write


def refused(source=SOURCE, **options):
    with pytest.raises(BuildError) as caught:
        build(source, flags=(), **options)
    return caught.value


def test_a_refusal_is_not_asked_for_again(program, clock):
    program("echo no good; exit 1")
    first, second = refused(), refused()
    clock[0] += 1e9
    assert str(first) == str(second) == str(refused())
    assert "no good" in str(first)
    assert program.runs() == 1
    refused(OTHER)  # another source may be to its taste
    assert program.runs() == 2


def test_a_refusal_lasts_for_one_process(program):
    program("exit 1")
    refused()
    failed_builds.forget()
    refused()
    assert program.runs() == 2


PASSING = {
    "no space": "echo 'cc1: fatal error: error writing to x.s: No space left on device'; exit 1",
    "no memory": "echo 'cc1: out of memory allocating 65536 bytes'; exit 1",
    "child killed": "echo 'gcc: fatal error: Killed signal terminated program cc1'; exit 1",
    "killed": "kill -9 $$",
    "no processes": "echo 'sh: fork: Resource temporarily unavailable'; exit 254",
}


@pytest.mark.parametrize("body", PASSING.values(), ids=PASSING.keys())
def test_a_passing_failure_is_tried_again_later(program, clock, real, body):
    import shlex

    program(body)
    assert refused().retry_at == clock[0] + failed_builds.FIRST_DELAY
    refused()
    assert program.runs() == 1
    waits = []
    for _ in range(10):
        clock[0] = before = refused().retry_at
        waits.append(refused().retry_at - before)
    assert program.runs() == 11
    assert waits[:3] == [2, 4, 8]
    assert waits[-1] == failed_builds.LONGEST_DELAY
    program(f'exec {shlex.join(real)} "$@"')
    clock[0] = refused().retry_at
    assert answer(build(SOURCE, flags=())) == 42


def test_a_full_temporary_directory_passes(fake, clock, monkeypatch):
    import errno
    import tempfile

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as aside:
        aside.setattr(tempfile, "mkdtemp", full)
        error = refused()
        assert "No space" in str(error)
        refused()
    refused()  # too early
    assert fake.runs() == []
    clock[0] = error.retry_at
    assert answer(build(SOURCE, flags=())) == 42


def test_no_processes_pass(fake, clock, monkeypatch):
    import errno

    def none(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    find_compiler()
    with monkeypatch.context() as aside:
        aside.setattr(subprocess, "Popen", none)
        error = refused()
    clock[0] = error.retry_at
    assert answer(build(SOURCE, flags=())) == 42
    assert len(fake.runs()) == 1


def test_a_compiler_that_hangs_is_left_alone(fake, clock, monkeypatch):
    """In this process and in the next; other sources too, as it has built nothing yet."""
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.2)
    fake.stall.touch()
    assert "no answer within" in str(refused())
    refused(OTHER)
    assert len(fake.runs()) == 1
    failed_builds.forget()  # as a new process
    refused()
    assert len(fake.runs()) == 1
    clock[0] += failed_builds.HUNG_SECONDS
    monkeypatch.setattr(failed_builds.time, "time", lambda: failed_builds.HUNG_SECONDS + 1 + fake.log.stat().st_mtime)
    fake.stall.unlink()
    assert answer(build(SOURCE, flags=())) == 42


def test_one_source_that_hangs_does_not_stop_the_others(fake, monkeypatch):
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 30)
    assert answer(build(SOURCE, flags=())) == 42
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.2)
    fake.stall.touch()
    refused(OTHER)
    fake.stall.unlink()
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 30)
    refused(OTHER)
    assert answer(build(SOURCE + "\n", flags=())) == 42
    assert len(fake.runs()) == 3


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_all_that_a_compiler_started_is_killed(program, tmp_path, monkeypatch):
    """A driver's own child, which keeps the pipe open, as cc1 does."""
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.5)
    program(f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    start = time.monotonic()
    assert "no answer" in str(refused())
    assert time.monotonic() - start < 30
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not alive(pid))


def test_an_interrupt_ends_the_compiler(monkeypatch):
    """It is in another session, where the terminal's interrupt does not reach it."""
    pids = []

    class Interrupted(subprocess.Popen):
        def communicate(self, *args, **options):
            pids.append(self.pid)
            if len(pids) == 1:
                raise KeyboardInterrupt
            return super().communicate(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        child_process.run(["sleep", "600"], 600)
    assert not alive(pids[0])


def test_output_of_a_program():
    assert child_process.run(["sh", "-c", "echo said; echo loud >&2; exit 3"], 60) == child_process.Finished(
        3, "said\nloud\n"
    )
    assert child_process.run(["sh", "-c", "echo said; echo loud >&2"], 60, errors=False) == child_process.Finished(
        0, "said\n"
    )
    assert child_process.run(["sh", "-c", "kill -9 $$"], 60).status == -9


def test_limits():
    assert compiler.VERSION_SECONDS == 5
    assert compiler.limit_seconds("gcc") == compiler.limit_seconds("clang") == 30
    # Its first start unpacks it, and its first object needs parts of a C library.
    assert compiler.limit_seconds("zig") > 30


@pytest.mark.parametrize("body", ["sleep 600", "exit 1"])
def test_a_silent_compiler_is_asked_once(tmp_path, monkeypatch, body):
    program, log = tmp_path / "cc", tmp_path / "asked"
    program.write_text(f"#!/bin/sh\necho x >> {log}\n{body}\n")
    program.chmod(0o700)
    monkeypatch.setenv("CC", str(program))
    monkeypatch.setattr(compiler, "VERSION_SECONDS", 0.3)
    for _ in range(4):
        with pytest.raises(NoCompilerError, match="--version"):
            find_compiler()
    assert log.read_text() == "x\n"
    program.write_text("#!/bin/sh\necho gcc 1\n")  # repaired: another program
    assert find_compiler().version == "gcc 1"


def test_a_compiler_that_cannot_be_asked_now(fake, clock, monkeypatch):
    import errno

    def none(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as aside:
        aside.setattr(subprocess, "Popen", none)
        with pytest.raises(NoCompilerError, match="Cannot allocate") as caught:
            find_compiler()
    clock[0] = caught.value.retry_at
    assert find_compiler().argv == (str(fake.path),)


def test_temporary_files_of_the_compiler_go_with_its_directory(program, tmp_path, monkeypatch):
    """A compiler that is killed cannot remove its own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    (tmp_path / "t").mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.5)
    program('echo part > "$TMPDIR/cc1.s"; sleep 600')
    refused()
    assert list((tmp_path / "t").iterdir()) == []
    assert cache_entries() == []
    assert cache_dir().is_dir()


def test_a_run_time_that_is_not_built_keeps_no_operands(monkeypatch):
    """Frames of the call that failed first, and with them its arrays, would live as long as the process."""

    def refuse(*_):
        raise BuildError("no")

    def first_call():
        operand = np.zeros(8)
        with pytest.raises(BuildError, match="no"):
            cpu_runtime.runtime()
        return weakref.ref(operand)

    monkeypatch.setattr(cpu_runtime, "_loaded", [])
    monkeypatch.setattr(cpu_runtime, "_refused", [])
    monkeypatch.setattr(cpu_runtime, "load_extension", refuse)
    monkeypatch.setattr(cpu_runtime, "load_cffi_runtime", refuse)
    gone = first_call()
    assert cpu_runtime._refused
    assert gone() is None


def test_a_route_that_is_not_built_keeps_no_operands(monkeypatch):
    """The same of one kernel that does not build."""

    def refuse(*_):
        raise BuildError("no")

    def first_call():
        operand = np.zeros(8)
        p = problem.Problem(61, 67, 71, "f32")
        with pytest.raises(BuildError, match="no"):
            cpu_routes.routed(p, target, 1)[0]
        return weakref.ref(operand)

    target = config.target()
    monkeypatch.setattr(cpu_routes, "_route", refuse)
    monkeypatch.setattr(cpu_routes, "_routes", type(cpu_routes._routes)(8))
    gone = first_call()
    assert gone() is None


def test_a_remembered_refusal_of_a_fused_call_keeps_no_operands(monkeypatch):
    """The same of a call for which no kernel exists: what is remembered of it says only why."""

    def refuse(*_):
        raise ScheduleError("no kernel")

    monkeypatch.setattr(product_kernel.HostProduct, "selected", refuse)
    left = np.zeros((4, 4), np.float32)
    call = product_kernel.HostProduct(left, left, None, None)
    said = call.ready(None)
    gone = weakref.ref(call.left)
    del call, left
    assert str(said) == "no kernel"
    assert gone() is None
