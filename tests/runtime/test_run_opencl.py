"""Building, caching and launching OpenCL kernels, on Intel's driver for processors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from opencl_cpu import opencl_device

from portmm.build import cache, cache_contents
from portmm.errors import BuildError, DeviceError, NoDeviceError
from portmm.runtime import opencl, opencl_programs

SOURCE = """
__kernel void scale(__global const float *a, long ao, __global float *b, long bo, int n, float s)
{
    int i = get_global_id(0) + 64 * get_global_id(1);
    if (i < n) b[bo + i] = a ? a[ao + i] * s : s;
}
__kernel void wait_long(__global float *b, long bo, long n)
{
    float x = b[bo];
    for (long i = 0; i < n; i++) x = sin(x + 1.0f);
    b[bo] = x;
}
__kernel void sizes(__global int *out, long at, int i, long l, float f)
{
    out[at] = i; out[at + 1] = (int)(l >> 32); out[at + 2] = as_int(f);
}
"""


@pytest.fixture
def device():
    return opencl_device()


@pytest.fixture(scope="module")
def program():
    context, _ = opencl_device()
    return opencl.compile_opencl(SOURCE, "scale", context)


def buffer(context, array):
    import pyopencl as cl

    return cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=array)


def read(queue, memory, n, dtype=np.float32):
    import pyopencl as cl

    out = np.empty(n, dtype)
    cl.enqueue_copy(queue, out, memory)
    return out


def test_facts(device):
    found = opencl.facts(device[1].device)
    assert (found.language, found.kind, found.architecture, found.bandwidth_gbs) == ("opencl", "cpu", "", 0)
    assert found.processors >= 1
    assert found.warp >= 1
    assert found.block_threads >= 256
    assert found.shared_most == found.shared_bytes >= 1 << 14
    assert found.memory_bytes > found.l2_bytes > 0
    assert "cl_khr_fp64" in found.extensions
    assert all((found.name, found.vendor, found.driver))
    assert opencl.facts() == found


def test_offsets_count_elements(device, program):
    context, queue = device
    a, b = buffer(context, np.arange(100, dtype=np.float32)), buffer(context, np.full(100, -1, np.float32))
    kernel = opencl.load(program, "scale")
    done = opencl.launch(
        kernel, (2, 2), (16, 1), [("pointer", (a, 10)), ("pointer", (b, 3)), ("int", 90), ("float", 2.5)], queue
    )
    out = read(queue, b, 100)
    done.wait()
    expected = np.full(100, -1, np.float32)
    at = [*range(32), *range(64, 90)]
    expected[[3 + i for i in at]] = [2.5 * (10 + i) for i in at]
    assert np.array_equal(out, expected)


def test_no_pointer_is_null(device, program):
    context, queue = device
    b = buffer(context, np.zeros(8, np.float32))
    kernel = opencl.load(program, "scale")
    opencl.launch(kernel, (1,), (8,), [("pointer", None), ("pointer", (b, 0)), ("int", 8), ("float", 7)], queue)
    assert np.array_equal(read(queue, b, 8), np.full(8, 7, np.float32))


def test_svm_is_memory_too(device, program):
    import pyopencl as cl

    context, queue = device
    memory = cl.SVMAllocation(context, 64, 0, cl.svm_mem_flags.READ_WRITE, queue=queue)
    kernel = opencl.load(program, "scale")
    opencl.launch(kernel, (1,), (16,), [("pointer", None), ("pointer", (memory, 2)), ("int", 4), ("float", 3)], queue)
    out = np.empty(16, np.float32)
    cl.enqueue_copy(queue, out, memory)
    assert np.array_equal(out[2:6], np.full(4, 3, np.float32))
    memory.release()


def test_arguments_have_their_sizes(device, program):
    context, queue = device
    out = buffer(context, np.zeros(4, np.int32))
    arguments = [("pointer", (out, 1)), ("int", -5), ("long", 7 << 32), ("float", np.float64(1.5))]
    opencl.launch(opencl.load(program, "sizes"), (1,), (1,), arguments, queue)
    assert read(queue, out, 4, np.int32).tolist() == [0, -5, 7, np.float32(1.5).view(np.int32)]


def test_a_launch_does_not_wait(device, program):
    import pyopencl as cl

    context, queue = device
    b = buffer(context, np.zeros(1, np.float32))
    kernel = opencl.load(program, "wait_long")
    done = opencl.launch(kernel, (1,), (1,), [("pointer", (b, 0)), ("long", 30_000_000)], queue)
    assert done.command_execution_status != cl.command_execution_status.COMPLETE
    queue.finish()
    assert done.command_execution_status == cl.command_execution_status.COMPLETE


def test_events_come_first(device, program):
    import pyopencl as cl

    context, queue = device
    gate = cl.UserEvent(context)
    b = buffer(context, np.zeros(4, np.float32))
    arguments = [("pointer", None), ("pointer", (b, 0)), ("int", 4), ("float", 1)]
    done = opencl.launch(opencl.load(program, "scale"), (1,), (4,), arguments, queue, wait_for=[gate])
    queue.flush()
    assert done.command_execution_status != cl.command_execution_status.COMPLETE
    gate.set_status(cl.command_execution_status.COMPLETE)
    queue.finish()
    assert read(queue, b, 4).tolist() == [1, 1, 1, 1]


def test_an_empty_grid_launches_nothing(device, program):
    assert opencl.launch(opencl.load(program, "scale"), (0, 4), (16, 1), [], device[1]) is None


def test_two_threads_share_a_kernel(device, program):
    """Each launch has the arguments that it was given, whatever another thread sets meanwhile."""
    context, queue = device
    kernel = opencl.load(program, "scale")
    outs = [buffer(context, np.zeros(64, np.float32)) for _ in range(2)]
    wrong = []

    def work(mine):
        for i in range(200):
            value = float(1000 * mine + i)
            arguments = [("pointer", None), ("pointer", (outs[mine], 0)), ("int", 64), ("float", value)]
            opencl.launch(kernel, (4,), (16,), arguments, queue)
            if i % 20 == 0:
                found = read(queue, outs[mine], 64)
                wrong.extend(x for x in found if x != value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.usefixtures("empty_cache")
def test_cold_then_warm(device):
    context, _ = device
    cold = opencl.compile_opencl(SOURCE, "scale", context)
    warm = opencl.compile_opencl(SOURCE, "scale", context)
    assert (cold.cached, warm.cached) == (False, True)
    assert (cold.key, cold.log, cold.name) == (warm.key, warm.log, warm.name)
    assert warm.seconds == pytest.approx(cold.seconds, abs=1e-3)
    (entry,) = cache_contents.cache_entries()
    assert (entry.key, entry.path.suffix, entry.name) == (cold.key, ".clbin", "scale")
    assert opencl.load(warm, "scale").name == "scale"
    others = [
        opencl.compile_opencl(SOURCE + "\n", "scale", context),
        opencl.compile_opencl(SOURCE, "scale", context, options="-cl-fast-relaxed-math"),
    ]
    assert len({cold.key, *(p.key for p in others)}) == 3
    assert not any(p.cached for p in others)


@pytest.mark.usefixtures("empty_cache")
def test_what_the_driver_refuses_is_built_again(device):
    context, queue = device
    cold = opencl.compile_opencl(SOURCE, "scale", context)
    cache.keep(cold.key, b"no binary" * 50, name="x", seconds=0, compiler="x", command="x", suffix=".clbin")
    again = opencl.compile_opencl(SOURCE, "scale", context)
    assert not again.cached
    assert opencl.compile_opencl(SOURCE, "scale", context).cached
    b = buffer(context, np.zeros(4, np.float32))
    arguments = [("pointer", None), ("pointer", (b, 0)), ("int", 4), ("float", 1)]
    opencl.launch(opencl.load(again, "scale"), (1,), (4,), arguments, queue)
    assert read(queue, b, 4).tolist() == [1, 1, 1, 1]


def test_a_cache_that_cannot_be_written_to(device, monkeypatch):
    def refuse(*_a, **_k):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "keep", refuse)
    assert not opencl.compile_opencl(SOURCE + "/* full */", "scale", device[0]).cached


@pytest.mark.usefixtures("empty_cache")
def test_a_source_that_does_not_compile(device):
    source = "__kernel void f(int a) { a = nowhere; }"
    with pytest.raises(BuildError, match=r"(?s)undeclared identifier 'nowhere'.*failed\.cl.*-DX=1") as caught:
        opencl.compile_opencl(source, "f", device[0], options="-DX=1")
    (kept,) = cache.cache_dir().glob("*.failed.cl")
    assert kept.read_text() == source
    assert str(kept) in str(caught.value)


@pytest.mark.usefixtures("empty_cache")
def test_a_source_that_does_not_compile_is_not_tried_again(device, monkeypatch):
    tried, build = [], opencl_programs._built
    monkeypatch.setattr(opencl_programs, "_built", lambda *given: (tried.append(given), build(*given))[1])
    source = "__kernel void f(int a) { a = nowhere_else; }"
    for _ in range(3):
        with pytest.raises(BuildError, match="undeclared identifier 'nowhere_else'"):
            opencl.compile_opencl(source, "f", device[0])
    assert len(tried) == 1
    with pytest.raises(BuildError):
        opencl.compile_opencl(source + "\n", "f", device[0])
    assert len(tried) == 2


def test_a_kernel_that_is_not_there(program):
    with pytest.raises(BuildError, match="program scale has no kernel nothing"):
        opencl.load(program, "nothing")


def test_launches_that_the_driver_refuses(device, program):
    context, queue = device
    kernel = opencl.load(program, "scale")
    b = ("pointer", (buffer(context, np.zeros(4, np.float32)), 0))
    with pytest.raises(DeviceError, match=r"did not launch scale with grid \(1,\), block \(1000000,\)"):
        opencl.launch(kernel, (1,), (1000000,), [b, b, ("int", 4), ("float", 1)], queue)
    with pytest.raises(DeviceError, match="7 parameters"):
        opencl.launch(kernel, (1,), (4,), [b, b, ("int", 4), ("float", 1), ("int", 4)], queue)
    with pytest.raises(ValueError, match="kind 'double' are unknown"):
        opencl.launch(kernel, (1,), (4,), [("double", 4)], queue)


def test_one_queue_for_arrays_that_have_none(device):
    context, _ = device
    assert opencl.default_queue(context) is opencl.default_queue(context)


def test_without_pyopencl(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(NoDeviceError, match="pip install pyopencl"):
        opencl.facts()


@pytest.mark.usefixtures("device")
def test_without_a_driver(tmp_path):
    """Drivers are looked for once a process."""
    (tmp_path / "broken.icd").write_text("/nowhere/libintelocl.so\n")
    script = """
from portmm.errors import NoDeviceError
from portmm.runtime import opencl
try:
    opencl.facts()
except NoDeviceError as error:
    print(error)
"""
    environment = {**os.environ, "OCL_ICD_VENDORS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "there is no OpenCL device" in done.stdout, done.stderr
