"""The run time: launching, the thread pool, the fast path, plans; extension and twin alike."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import run_kernels as rk
from places import HELPERS

from portmm.build.compiler import find_compiler
from portmm.errors import BuildError, NoCompilerError
from portmm.runtime import cpu as cpu_runtime

pytestmark = pytest.mark.calls

rt = rk.rt


# --- load, routes, execute


def test_load_names_what_is_wrong(rt):
    with pytest.raises(BuildError, match="nowhere"):
        rt.load("/nowhere/kernel.so", "f")
    with pytest.raises(BuildError, match="no_such_symbol"):
        rt.load(rk.library(), "no_such_symbol")
    assert rt.load(Path(rk.library()), "gemm_float").symbol == "gemm_float"


def test_a_route_refuses_nonsense(rt):
    kernel = rt.load(rk.library(), "gemm_float")
    for word in ("f8", "f32-f32", "u8-s8-f8", ""):
        with pytest.raises(ValueError, match="dtype"):
            rt.make_route(kernel, 0, 1, word)
    with pytest.raises(ValueError, match="workers"):
        rt.make_route(kernel, 0, 0, "f32")
    with pytest.raises(TypeError):
        rt.make_route("kernel", 0, 1, "f32")
    route = rt.make_route(kernel, 128, 3, "f64")
    assert (route.work_bytes, route.workers, route.dtype) == (128, 3, "f64")
    assert route.kernel is kernel
    assert rt.make_route(kernel, 0, 1, "u8-s8-s32", 4).dtype == "u8-s8-s32"
    with pytest.raises(ValueError, match="f32"):
        rt.register_dtype("f32", np.dtype(np.float32))


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 5, 7), (64, 33, 65)])
def test_execute_with_any_strides(rt, dtype, m, n, k):
    route = rk.gemm_route(rt, dtype, work=64 * 4, workers=4)
    a = rk.random((k, m), dtype).T
    b = rk.random((2 * k, 3 * n), dtype)[::-2, ::3]
    c = np.full((m, 2 * n), 7, rk.NUMPY[dtype])
    rk.execute(rt, route, (a, b, c[:, ::2]))
    rk.close(np.ascontiguousarray(c[:, ::2]), a, b)
    assert (c[:, 1::2] == 7).all()


def test_pointers_are_arrays_or_addresses(rt):
    route = rk.gemm_route(rt)
    a, b = rk.random((3, 5)), rk.random((5, 2), seed=1)
    for as_they_are in (True, False):
        c = np.zeros((3, 2), np.float32)
        x, y, z = (a, b, c) if as_they_are else map(rk.address, (a, b, c))
        for more in ((None, b), (0, rk.address(b)), (np.zeros((2, 5), np.int64), None, a, rk.address(b))):
            c[...] = 0
            rt.execute(route, 3, 2, 5, 1, x, 5, 1, 0, y, 2, 1, 0, z, 2, 1, 0, None, *more)
            rk.close(c, a, b)
    for more in ((b,), (None, None, a), (np.zeros((1, 5), np.int64), None, "a")):
        with pytest.raises(TypeError):
            rt.execute(route, 3, 2, 5, 1, a, 5, 1, 0, b, 2, 1, 0, c, 2, 1, 0, None, *more)
    with pytest.raises(TypeError):
        rt.execute(route, 3, 2, 5, 1, "a", 5, 1, 0, b, 2, 1, 0, a, 2, 1, 0)


def test_scales_are_finite_and_not_negative(rt):
    good = np.array([0.0, 1e-45, 3.4e38, 1.0] * 5, np.float32)
    assert rt.largest_scale(good) == np.float32(3.4e38)
    assert rt.largest_scale(good[:0]) == 0
    for i, wrong in ((0, -1e-45), (7, np.nan), (19, np.inf), (3, -np.inf)):
        bad = good.copy()
        bad[i] = wrong
        assert rt.largest_scale(bad) == -1
    for strange in (good.astype(float), good[::2], good.reshape(4, 5), [1.0]):
        with pytest.raises(TypeError, match="float32"):
            rt.largest_scale(strange)


def test_execute_batch_and_outer_offsets(rt):
    route = rk.gemm_route(rt)
    a, b = rk.random((4, 3, 5)), rk.random((4, 5, 2), seed=1)
    c = np.zeros((4, 3, 2), np.float32)
    rk.execute(rt, route, (a, b, c))
    rk.close(c, a, b)
    order = [2, 0, 3, 1]
    outer = np.array([(15 * i, 10 * j, 6 * i) for i, j in enumerate(order)], np.int64)
    for form in (outer, outer.tobytes()):
        c[:] = 0
        rk.execute(rt, route, (a[0], b[0], c[0]), form)
        rk.close(c, a, b[order])
    c[:] = 5
    rk.execute(rt, route, (a[0], b[0], c[0]), b"")
    assert (c == 5).all()


def test_execute_refuses_nonsense(rt):
    route = rk.gemm_route(rt)
    x = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="triples"):
        rk.execute(rt, route, (x, x, x.copy()), b"12345")
    with pytest.raises(TypeError, match="16 integers"):
        rt.execute(route, 1, 2)
    with pytest.raises(TypeError):
        rt.execute(route, *["x"] * 16)
    for table in (np.zeros((1, 5), np.int64), np.zeros(10, np.int64)):
        with pytest.raises(ValueError, match="2 arrays; the table has no row for each"):
            rt.execute(route, *[0] * 16, None, table, None, x, x)
    with pytest.raises(TypeError, match="without a table"):
        rt.execute(route, *[0] * 16, None, None, None, x, x)


def test_a_sum_over_nothing_is_zero(rt):
    c = np.full((3, 8), 9, np.float32)
    rk.execute(rt, rk.gemm_route(rt), (np.ones((3, 0), np.float32), np.ones((0, 4), np.float32), c[:, ::2]))
    assert (c[:, ::2] == 0).all()
    assert (c[:, 1::2] == 9).all()


def test_the_workspace_is_aligned_and_large_enough(rt):
    kernel = rt.load(rk.library(), "aligned")
    one = np.ones((1, 1), np.float64)
    for size in (1, 100, 1 << 16, 5 << 20, 300 << 20, 64):
        c = np.full((1, 1), -1, np.int64)
        route = rt.make_route(kernel, size, 1, "f64")
        rt.execute(route, 1, 1, min(size, 5 << 20), 1, rk.address(one), 1, 1, 0, rk.address(one), 1, 1, 0,
                   rk.address(c), 1, 1, 0)  # fmt: skip
        assert c[0, 0] == 0


def test_no_memory_for_the_workspace(rt):
    route = rk.gemm_route(rt, work=1 << 62)
    x = np.ones((2, 2), np.float32)
    for _ in range(3):
        with pytest.raises(MemoryError, match="workspace"):
            rk.execute(rt, route, (x, x, x.copy()))
    rk.execute(rt, rk.gemm_route(rt, work=4096), (x, x, c := x.copy()))
    rk.close(c, x, x)


# --- the pool


def probe(rt, tasks, workers, *, rounds=200, nested=1):
    """Counters of one run of the probe kernel: total, faults, most at once, per task."""
    c = np.zeros(3 + tasks, np.int64)
    route = rt.make_route(rt.load(rk.library(), "probe"), 0, workers, "f64")
    p = rk.address(c)
    rt.execute(route, tasks, nested, rounds, 1, p, 1, 1, 0, p, 1, 1, 0, p, 1, 1, 0)
    return c[0], c[1], c[2], c[3:]


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("tasks", [1, 2, 7, 1000])
def test_each_task_runs_once_on_a_worker_of_its_own(rt, tasks, workers):
    rt.set_num_threads(64)
    for nested in (1, 5) if min(tasks, workers) > 1 else (1,):
        total, faults, most, each = probe(rt, tasks, workers, nested=nested)
        assert (total, faults) == (tasks, 0)
        assert (each == 1).all()
        assert most <= min(workers, tasks)
    assert rt.pool_threads() < 64


def test_set_num_threads_bounds_a_call(rt):
    for threads in (1, 2, 3):
        rt.set_num_threads(threads)
        assert rt.get_num_threads() == threads
        assert probe(rt, 200, 16, rounds=5000)[2] <= threads
    with pytest.raises(ValueError, match="at least 1"):
        rt.set_num_threads(0)


def test_workers_do_take_part(rt):
    rt.set_num_threads(2)
    # The second worker may be late for one job, not for fifty long ones.
    assert max(probe(rt, 50, 2, rounds=200_000)[2] for _ in range(50)) == 2


def test_many_jobs_in_a_row(rt):
    rt.set_num_threads(3)
    for i in range(3000):
        tasks = 2 + i % 5
        total, faults, _, each = probe(rt, tasks, 3, rounds=10)
        assert (total, faults) == (tasks, 0)
        assert (each == 1).all()


def test_many_python_threads(rt):
    rt.set_num_threads(3)
    a, b = rk.random((60, 70)), rk.random((70, 50), seed=1)
    want = a @ b
    route = rk.gemm_route(rt, work=64 * 8, workers=8)
    rk.use_gemm(rt, work=64 * 8, workers=8)
    wrong = []

    def work(seed):
        c = np.empty((60, 50), np.float32)
        for i in range(60):
            c[:] = seed
            rk.execute(rt, route, (a, b, c))
            d = rt.matmul(a, b)
            if i % 7 == seed % 7:
                rt.clear_memo()
            if not (np.allclose(c, want, atol=1e-4) and np.allclose(d, want, atol=1e-4)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong
    assert not any(t.is_alive() for t in threads)


FORK = """
import os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
sys.path.insert(0, {tests!r})
import numpy as np, run_kernels as rk
rt = rk.RUNTIMES[{name!r}]()
rt.set_num_threads(4)
a = np.ones((300, 64), np.float32)
route = rk.gemm_route(rt, work=64 * 4, workers=4)
def run():
    c = np.zeros((300, 300), np.float32)
    rk.execute(rt, route, (a, a.T, c))
    assert (c == 64).all()
run()
stop = threading.Event()
def churn():
    while not stop.is_set():
        run()
busy = threading.Thread(target=churn)
busy.start()
for i in range(20):
    pid = os.fork()
    if pid == 0:
        run()
        grandchild = os.fork() if i == 0 else 0
        if grandchild:
            code = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
        else:
            run()
            code = 0 if rt.pool_threads() == 3 else 9
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, i
stop.set()
busy.join()
run()
print("done")
"""


@pytest.mark.parametrize("name", list(rk.RUNTIMES))
def test_fork_while_the_pool_is_busy(name):
    script = FORK.format(tests=str(HELPERS), name=name)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_more_threads_than_the_processors(rt):
    rt.set_num_threads(4 * (os.cpu_count() or 1) + 3)
    total, faults, _, each = probe(rt, 500, 1000, rounds=1000)
    assert (total, faults) == (500, 0)
    assert (each == 1).all()


def test_the_first_callers_share_one_runtime():
    found = []
    threads = [threading.Thread(target=lambda: found.append(cpu_runtime.runtime())) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 6
    assert all(r is found[0] for r in found)


def test_without_headers_the_twin_is_taken(monkeypatch):
    monkeypatch.setattr(cpu_runtime, "python_headers", lambda: None)
    monkeypatch.setattr(cpu_runtime, "stored_extension", lambda: None)
    monkeypatch.setattr(cpu_runtime, "_loaded", [])
    assert type(cpu_runtime.runtime()).__name__ == "CffiRuntime"
    with pytest.raises(BuildError, match=r"Python\.h"):
        cpu_runtime.load_extension()


# --- the pool as a C program


def pool_program(folder, *command, platform=""):
    """Compile the driver with the whole Python-free source; None if `command` cannot make programs at all."""
    trivial = folder / "trivial.c"
    trivial.write_text("int main(void) { return 0; }\n")
    if subprocess.run([*command, trivial, "-o", folder / "trivial"], capture_output=True, check=False).returncode:
        return None
    source = (
        cpu_runtime.source(python=False, platform=platform).replace("__dso_handle", "not_from_crtbegin")
        + rk.POOL_DRIVER
    )
    (folder / "pool.c").write_text(source)
    words = [*command, "-std=gnu11", "-w", "-pthread", folder / "pool.c", "-o", folder / "pool"]
    subprocess.run(words, check=True)
    return folder / "pool"


@pytest.mark.parametrize(
    ("sanitizer", "platform"), [("thread", ""), ("address,undefined", ""), ("thread", "aarch64-macos")]
)
def test_the_pool_under_a_sanitizer(tmp_path, sanitizer, platform):
    """The pool for macOS uses POSIX threads alone, so that it runs on Linux, too."""
    checks = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-O1", "-DFORKS")
    program = pool_program(tmp_path, *find_compiler().argv, *checks, platform=platform)
    if program is None:
        pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
    # TSan otherwise waits a second at exit for late reports, and ends a forked process that starts threads.
    environment = {**os.environ, "TSAN_OPTIONS": "atexit_sleep_ms=50 die_after_fork=0"}
    done = subprocess.run([program], capture_output=True, text=True, timeout=50, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.emulated
@pytest.mark.parametrize("arch", ["aarch64", "riscv64"])
def test_the_pool_of_another_machine(tmp_path, arch):
    emulator = shutil.which(f"qemu-{arch}") or shutil.which(f"qemu-{arch}-static")
    if emulator is None:
        pytest.skip("needs qemu-user")
    try:
        compiler = find_compiler(arch)
    except NoCompilerError as error:
        pytest.skip(str(error))
    program = pool_program(tmp_path, *compiler.argv, "-static", "-O2")
    if program is None:
        pytest.skip("the cross compiler has no libc")
    done = subprocess.run([emulator, program], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
