"""Findings of one process that the next one remembers, only where they still hold."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import portmm as pm
from portmm.build import cache
from portmm.dispatch import config
from portmm.errors import NoCompilerError
from portmm.host import calibrate
from portmm.ops import host_matmul
from portmm.runtime import cpu as cpu_runtime
from portmm.runtime import route_cache
from portmm.spec.problem import Problem

F32 = Problem(1, 1, 1)
CHILD = """
import sys
import numpy as np, portmm as pm
a = np.arange(12.0).reshape(3, 4)
assert (pm.matmul(a, a.T) == a @ a.T).all()
v = np.ones((2, 3, 4), np.float32)
assert (pm.matmul(v, v.swapaxes(1, 2)) == 4).all()
late = ("portmm.host.detect", "portmm.codegen.c_kernel", "portmm.dispatch.cpu_routes", "subprocess")
print(*sorted(m for m in sys.modules if m in late))
"""


def child(folder, **variables):
    """Modules of interest that a new process loads for two products."""
    environment = {**os.environ, "PORTMM_CACHE": str(folder), **variables}
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()


@pytest.fixture(autouse=True)
def needs_a_compiler():
    try:
        cpu_runtime.runtime()
    except NoCompilerError:
        pytest.skip("no compiler")


@pytest.mark.rest("takes long for what it finds")
def test_a_second_process_neither_detects_nor_generates(tmp_path):
    assert "portmm.dispatch.cpu_routes" in child(tmp_path)
    (book,) = tmp_path.glob("book-*.note")
    if cpu_runtime.python_headers():
        assert child(tmp_path) == []
    else:
        assert "portmm.dispatch.cpu_routes" not in child(tmp_path)
    whole = book.read_text()
    renamed = whole.replace("\tportmm_", "\tportmn_")
    for damaged in (whole[:-9], "", whole.replace("\tbook\t", "\tbool\t"), renamed, whole.replace("\n", "\nx")):
        assert damaged != whole
        book.write_text(damaged)
        assert "portmm.dispatch.cpu_routes" in child(tmp_path)
        assert "portmm.dispatch.cpu_routes" not in child(tmp_path)
    for lost in list(tmp_path.glob("*.so")):
        lost.write_bytes(lost.read_bytes()[:100])
    child(tmp_path)
    assert "portmm.dispatch.cpu_routes" not in child(tmp_path)
    assert "portmm.dispatch.cpu_routes" in child(tmp_path, PORTMM_TARGET="scalar")
    assert "portmm.dispatch.cpu_routes" in child(tmp_path, PORTMM_NUM_THREADS="1")
    assert "portmm.dispatch.cpu_routes" not in child(tmp_path, PORTMM_NUM_THREADS="1")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A fresh cache with a book of one answer, and a way to read it as a new process would."""
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path))
    monkeypatch.setattr(config, "_targets", {})
    monkeypatch.setattr(route_cache, "_caches", {})
    monkeypatch.setattr(route_cache, "_kernels", {})
    monkeypatch.setattr(route_cache, "_closed", False)  # as if no test of this process had overridden a schedule
    from portmm.dispatch import cpu_kernels

    cpu_kernels.forget()
    pm.matmul(np.ones((7, 9), np.float32), np.ones((9, 5), np.float32))
    host_matmul._state["runtime"].clear_memo()
    pm.matmul(np.ones((7, 9), np.float32), np.ones((9, 5), np.float32))

    def again(target=""):
        route_cache._caches.clear()
        return route_cache.of_target(target)

    assert len(again().lines) == 1
    yield again
    cpu_kernels.forget()


def test_what_a_book_depends_on(kept, monkeypatch):
    assert not kept("scalar").lines
    assert kept("some.toml") is None
    for name, value in (("CC", "cc"), ("PATH", "/bin")):
        with monkeypatch.context() as m:
            m.setenv(name, value)
            assert not kept().lines
    with monkeypatch.context() as m:
        m.setattr(route_cache, "generator", lambda: ["another.py 1 2"])
        assert not kept().lines
    assert kept().lines


def test_a_book_depends_on_programs_on_facts_and_on_the_run_time():
    names = {line.split()[0] for line in route_cache.generator()}
    assert names >= {"cpu_cost.py", "gemm.py", "avx512.toml", "zen4.toml", "matmul.c"}


def test_another_host_has_another_book(kept, monkeypatch):
    shot = route_cache.snapshot()
    changes = {
        "cpuinfo": shot.cpuinfo + "\nflags : more",
        "files": {**shot.files, "/sys/x": "1"},
        "affinity": (*shot.affinity, 999),
        "cpuid": {**shot.cpuid, "7.0": (1, 2, 3, 4)},
        "xcr0": shot.xcr0 ^ 64,
        "hwcap": shot.hwcap ^ 1,
        "sve_bytes": 16,
        "tiles": not shot.tiles,
    }
    for field, value in changes.items():
        other = replace(shot, **{field: value})
        monkeypatch.setattr(route_cache, "snapshot", lambda other=other: other)
        assert not kept().lines, field
    answers = dict(shot.cpuid)
    if "1.0" in answers:
        a, b, c, d = answers["1.0"]
        answers["1.0"] = (a, b ^ 1 << 24, c, d)
    same = replace(shot, cpuid=answers, cpuinfo=shot.cpuinfo + "\ncpu MHz : 1")
    monkeypatch.setattr(route_cache, "snapshot", lambda: same)
    assert kept().lines


def test_new_rates_make_a_book_stale(kept):
    target = config.target()
    calibrate.remember(target, {target.isas[0].atoms[0].name: 50.0})
    assert not kept().lines


def test_a_kernel_that_is_gone_is_no_answer(kept):
    (question, line) = next(iter(kept().lines.items()))
    rt = cpu_runtime.runtime()
    assert route_cache.route(kept(), question, rt, F32) is not None
    assert route_cache.route(kept(), "another question", rt, F32) is None
    route_cache._kernels.clear()
    (cache.cache_dir() / f"{line.split()[0]}.so").unlink()
    assert route_cache.route(kept(), question, rt, F32) is None


def test_a_book_is_bounded(kept, monkeypatch):
    monkeypatch.setattr(route_cache, "MOST_LINES", 3)
    book = kept()
    answer = route_cache.route(book, next(iter(book.lines)), cpu_runtime.runtime(), F32)
    for i in range(5):
        route_cache.keep(book, f"question {i}", answer, config.target())
    assert list(kept().lines) == ["question 2", "question 3", "question 4"]


def test_a_book_is_appended_to_and_compacted(kept, monkeypatch):
    """A new answer is one line more; a book of twice its bound is written anew with its newest answers."""
    monkeypatch.setattr(route_cache, "MOST_LINES", 8)
    book = kept()
    answer = route_cache.route(book, next(iter(book.lines)), cpu_runtime.runtime(), F32)
    file = cache.cache_dir() / f"{book.name}.note"
    before = file.read_text()
    route_cache.keep(book, "a question", answer, config.target())
    assert file.read_text().startswith(before)
    assert file.read_text().count("\n") == before.count("\n") + 1
    for i in range(60):
        route_cache.keep(book, f"question {i}", answer, config.target())
        assert file.read_text().count("\n") <= 2 * 8 + 2
    assert list(kept().lines) == [f"question {i}" for i in range(52, 60)]


def test_processes_that_share_a_book_lose_no_answers(kept):
    first = kept()
    route_cache._caches.clear()
    second = route_cache.of_target("")
    assert first is not second
    answer = route_cache.route(first, next(iter(first.lines)), cpu_runtime.runtime(), F32)
    for i in range(10):
        route_cache.keep((first, second)[i % 2], f"question {i}", answer, config.target())
    assert {f"question {i}" for i in range(10)} <= kept().lines.keys()


def test_damaged_lines_are_left_out_alone(kept):
    book = kept()
    answer = route_cache.route(book, next(iter(book.lines)), cpu_runtime.runtime(), F32)
    for i in range(5):
        route_cache.keep(book, f"question {i}", answer, config.target())
    file = cache.cache_dir() / f"{book.name}.note"
    whole = file.read_text()
    assert len(kept().lines) == 6
    file.write_text(whole.replace("question 3", "question 7") + "\n" + "0" * 40 + "\ttorn li")
    assert [x for x in kept().lines if x.startswith("question")] == [f"question {i}" for i in (0, 1, 2, 4)]
    route_cache.keep(kept(), "after", answer, config.target())
    assert "after" in kept().lines


def test_answers_of_other_rates_do_not_mix(kept, monkeypatch):
    """Lines hold under the heading that they were written for, whichever process wrote the last heading."""
    old = kept()
    answer = route_cache.route(old, next(iter(old.lines)), cpu_runtime.runtime(), F32)
    target = config.target()
    calibrate.remember(target, {target.isas[0].atoms[0].name: 50.0})
    new = kept()
    route_cache.keep(new, "of new rates", answer, target)
    with monkeypatch.context() as m:
        m.setattr(route_cache, "_state", lambda path: f"0 {path}")
        route_cache.keep(old, "of no rates", answer, target)
    assert list(kept().lines) == ["of new rates"]


def test_a_book_that_others_can_write_is_not_used(kept):
    book = kept()
    answer = route_cache.route(book, next(iter(book.lines)), cpu_runtime.runtime(), F32)
    file = cache.cache_dir() / f"{book.name}.note"
    file.chmod(0o622)
    before = file.read_bytes()
    route_cache.keep(book, "a question", answer, config.target())
    assert file.read_bytes() == before
    assert not kept().lines


def test_a_read_only_cache_keeps_nothing(kept, monkeypatch):
    book = kept()
    answer = route_cache.route(book, next(iter(book.lines)), cpu_runtime.runtime(), F32)
    monkeypatch.setenv("PORTMM_CACHE", "/proc/nowhere")
    route_cache.keep(book, "question", answer, config.target())
    assert "question" not in book.lines


def test_a_failure_ahead_is_told_where_it_matters(monkeypatch):
    """The first call builds two things at once; what fails there falls back to NumPy, with one warning."""

    def fails(*_args):
        raise NoCompilerError("no compiler here")

    monkeypatch.setattr(cpu_runtime, "_loaded", [])
    monkeypatch.setattr(cpu_runtime, "load_extension", fails)
    monkeypatch.setattr(cpu_runtime, "load_cffi_runtime", fails)
    monkeypatch.setattr(route_cache, "of_target", lambda _: None)
    monkeypatch.setattr(host_matmul, "fast", host_matmul._start)
    monkeypatch.setattr(host_matmul, "_state", {})
    a = np.ones((3, 3), np.float32)
    with pytest.warns(RuntimeWarning, match="no compiler here"):
        assert (pm.matmul(a, a) == 3).all()
    assert (pm.matmul(a, a) == 3).all()
    q = pm.Quantized(np.full((3, 2), 9, np.uint8), np.ones((1, 2), np.float32), np.full((1, 2), -8, np.float32), 4, 8)
    for weight in (q, pm.pack(q)):
        np.testing.assert_array_equal(pm.matmul(a, weight), np.full((3, 2), 3.0))


def test_code_that_another_process_built_needs_no_source(kept, monkeypatch):
    """Another size with a schedule that is known is neither lowered nor emitted; damaged code is made again."""
    from portmm.dispatch import cpu_kernels

    expected = np.full((7, 5), 10.0, np.float32)

    def product():
        """The same schedule as the answer in the book has, for another K."""
        cpu_kernels.forget()
        route_cache._kernels.clear()
        host_matmul._state["runtime"].clear_memo()
        return pm.matmul(np.ones((7, 10), np.float32), np.ones((10, 5), np.float32))

    (schedule, line) = next(iter(kept().codes.items()))
    assert schedule.startswith(("gemm:", "dot:", "tiles:"))
    with monkeypatch.context() as m:
        m.setattr(cpu_kernels, "lower", None)
        np.testing.assert_array_equal(product(), expected)
    assert len(kept().lines) == 2
    (cache.cache_dir() / f"{line.split()[0]}.so").write_bytes(b"damaged")
    (cache.cache_dir() / f"{next(iter(kept().lines.values())).split()[0]}.so").unlink(missing_ok=True)
    np.testing.assert_array_equal(product(), expected)


def test_lines_follow_a_note_that_was_replaced_or_removed(tmp_path, monkeypatch):
    """A note stays open between lines, while another process may rewrite it, or empty the cache."""
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    note = tmp_path / "book-x.note"
    cache.append_note("book-x", "one")
    cache.append_note("book-x", "two")
    assert note.read_text() == "\none\ntwo"
    cache.write_note("book-x", "three")
    cache.append_note("book-x", "four")
    assert note.read_text() == "three\nfour"
    note.unlink()
    cache.append_note("book-x", "five")
    assert note.read_text() == "\nfive"


def test_a_descriptor_that_became_another_file_is_not_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    other = tmp_path / "other"
    cache.append_note("book-x", "one")
    (fd, _) = cache._appended[str(tmp_path / "book-x.note")]
    with other.open("wb") as file:
        os.dup2(file.fileno(), fd)
        cache.append_note("book-x", "two")
        assert (tmp_path / "book-x.note").read_text() == "\none\ntwo"
        assert not other.read_text()
        os.close(fd)
