"""Calls to CUDA's driver, recorded by a module in CuPy's place; and all of it on a real device."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace

import cuda_fakes
import numpy as np
import pytest
from cuda_fakes import FakeCupy, install

from portmm.build import nvrtc
from portmm.build.nvrtc import Cubin, compile_cuda
from portmm.codegen.cuda import WAIT
from portmm.dispatch.machine import described
from portmm.errors import BuildError, DeviceError, NoDeviceError
from portmm.runtime import cuda, cuda_launch

EXTENDED = cuda_launch.extended
CUBIN = Cubin(b"\x7fELF code", "", 32, 0, 0, 0.1, cached=True, version=(13, 0), architecture="90a", key="k")


@pytest.fixture
def cupy(monkeypatch):
    monkeypatch.setattr(cuda, "_functions", {})
    cuda._facts.cache_clear()
    yield install(monkeypatch, FakeCupy())
    cuda._facts.cache_clear()


def test_facts(cupy):
    found = cuda.facts()
    assert (found.language, found.kind, found.vendor, found.name) == ("cuda", "gpu", "NVIDIA", "Fake H100")
    assert (found.processors, found.warp, found.block_threads) == (132, 32, 1024)
    assert (found.shared_bytes, found.shared_most, found.registers) == (49152, 232448, 65536)
    assert (found.l2_bytes, found.memory_bytes, found.clock_ghz) == (50 << 20, 80 << 30, 1.98)
    assert found.bandwidth_gbs == pytest.approx(3352.32)
    assert (found.architecture, found.extensions, found.driver) == ("90a", (), "12.9")
    assert cuda.facts(1) == found
    assert not cupy.log


def test_clocks_where_properties_have_none(cupy, monkeypatch):
    """As of CUDA 13."""
    clocks = {13: 1980000, 36: 2619000}
    less = {key: x for key, x in cuda_fakes.PROPERTIES.items() if not key.endswith("lockRate")}
    monkeypatch.setattr(cuda_fakes, "PROPERTIES", less)
    known = cupy.cuda.runtime.deviceGetAttribute

    def attribute(number, device):
        if number in clocks and not clocks[number]:
            raise RuntimeError("cudaErrorInvalidValue")
        return clocks[number] if number in clocks else known(number, device)

    monkeypatch.setattr(cupy.cuda.runtime, "deviceGetAttribute", attribute)
    assert cuda.facts().clock_ghz == 1.98
    assert cuda.facts().bandwidth_gbs == pytest.approx(3352.32)
    clocks[13] = clocks[36] = 0
    assert (cuda.facts(1).clock_ghz, cuda.facts(1).bandwidth_gbs) == (0, 0)


@pytest.mark.usefixtures("cupy")
def test_a_device_gives_the_shared_memory_that_kernels_ask_for():
    assert described(cuda.facts()).device.shared_bytes == 232448


@pytest.mark.parametrize(
    ("capability", "name"),
    [((7, 5), "75"), ((8, 0), "80"), ((8, 9), "89"), ((9, 0), "90a"), ((10, 0), "100a"), ((12, 0), "120")],
)
def test_architectures(capability, name):
    assert cuda.architecture(*capability) == name


def test_devices_that_are_not_there(cupy):
    with pytest.raises(NoDeviceError, match="no CUDA device 2; there are 2"):
        cuda.facts(2)
    cupy.count = 0
    with pytest.raises(NoDeviceError, match="no CUDA device 0; there are 0"):
        cuda.load(CUBIN, "f")
    cupy.fail = "getDeviceCount"
    with pytest.raises(NoDeviceError, match="cudaErrorInsufficientDriver; install NVIDIA's driver"):
        cuda.facts()


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NoDeviceError, match="pip install cupy-cuda13x"):
        cuda.facts()


def test_a_kernel_is_loaded_once_for_each_device(cupy):
    first = cuda.load(CUBIN, "f")
    assert cuda.load(replace(CUBIN, cached=False), "f") is first
    second = cuda.load(CUBIN, "f", 1)
    assert (first.device, second.device, first.name) == (0, 1, "f")
    cupy.current = 1
    assert cuda.load(CUBIN, "f") is second
    cuda.load(replace(CUBIN, key="", code=b"\x7fELF other"), "f", 0)
    assert cupy.log == [("load", 0, CUBIN.code), ("load", 1, CUBIN.code), ("load", 0, b"\x7fELF other")]
    assert cupy.current == 1


def test_code_that_cannot_be_loaded(cupy):
    with pytest.raises(BuildError, match=r"kernel g: CUDA_ERROR_NOT_FOUND"):
        cuda.load(CUBIN, "g")
    cupy.fail = "load"
    with pytest.raises(BuildError, match=r"takes code for 90a, and this is for 90a by NVRTC 13\.0.* of CUDA 12\.9"):
        cuda.load(CUBIN, "f")


def test_a_launch(cupy):
    kernel = cuda.load(CUBIN, "f")
    cupy.log.clear()
    arguments = [
        ("pointer", (1 << 63) + 8), ("int", -3), ("long", 1 << 40), ("float", 0.1), ("pointer", None), ("float", -0.0),
        ("map", np.arange(16, dtype=np.uint64).view("V128")),
    ]  # fmt: skip
    cupy.formats = "QiqfQfm"
    cuda.launch(kernel, (2, 3), (32, 4), arguments, 0x1234, shared=1024)
    ((what, device, grid, block, words, shared, stream),) = cupy.log
    assert (what, device, grid, block) == ("launch", 0, (2, 3, 1), (32, 4, 1))
    assert (shared, stream) == (1024, 0x1234)
    assert words[:3] == ((1 << 63) + 8, -3, 1 << 40)
    assert words[3] == np.float32(0.1)
    assert words[4] == 0
    assert np.signbit(words[5])
    assert words[6] == np.arange(16, dtype=np.uint64).tobytes()


def test_a_prepared_launch(cupy):
    """Each launch fills in the arguments left open; a tensor map is encoded once for each address."""
    kernel, made = cuda.load(CUBIN, "f"), []

    def mapped(address):
        made.append(address)
        return np.full(16, address, np.uint64).view("V128")

    arguments = [("pointer", None), ("int", 7), ("map", mapped), ("float", None), ("long", None)]
    left = ((0, "a"), (2, "b"), (3, "number"), (4, "n"))
    run = cuda.prepared(kernel, (5,), (32,), arguments, left, 256)
    cupy.formats = "Qimfq"
    cupy.log.clear()
    for a, b, number, n, stream in ((16, 64, 0.5, -1, 3), (32, 128, -0.0, 1 << 40, 4), (48, 64, 1e300, 0, 5)):
        run({"a": a, "b": b, "number": number, "n": n, "more": 1}, stream)
        *_, words, shared, on = cupy.log[-1]
        assert (words[0], words[1], words[4], shared, on) == (a, 7, n, 256, stream)
        assert words[2] == np.full(16, b, np.uint64).tobytes()
        with np.errstate(over="ignore"):
            assert np.float32(words[3]).tobytes() == np.float32(number).tobytes()
    assert made == [64, 128]
    with pytest.raises(OverflowError, match="2147483648 does not fit an argument of 32 bits"):
        cuda.prepared(kernel, (1,), (1,), [("int", 1 << 31)], (), 0)


def test_launches_of_several_threads_have_arguments_of_their_own(cupy):
    kernel = cuda.load(CUBIN, "f")
    run = cuda.prepared(kernel, (1,), (1,), [("pointer", None)], ((0, "a"),))
    cupy.formats, seen = "Q", []

    def other(*more):
        """A launch of another thread, while the driver has not read the arguments of the first yet."""
        cupy.cuda.driver.launchKernel = cupy._launch
        run({"a": 32}, 0)
        seen.append(cuda_fakes.read_words(more[-2], "Q"))

    cupy.cuda.driver.launchKernel = other
    run({"a": 16}, 0)
    assert seen == [(16,)]
    assert cupy.log[-1][4] == (32,)


def test_a_thread_without_a_context_gets_one(cupy):
    kernel, contexts = cuda.load(CUBIN, "f", 1), []
    launch = cupy.cuda.driver.launchKernel

    def in_context(*more):
        if not contexts:
            raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT: invalid device context")
        launch(*more)

    cupy.cuda.driver.launchKernel = in_context
    cupy.cuda.runtime.memGetInfo = lambda: contexts.append(cupy.current)
    cuda.launch(kernel, (1,), (1,), [], 0)
    assert (contexts, cupy.log[-1][:2], cupy.current) == ([1], ("launch", 1), 0)


def test_a_launch_goes_to_the_kernels_device(cupy):
    kernel = cuda.load(CUBIN, "f", 1)
    cuda.launch(kernel, (1,), (1,), [], 0)
    assert cupy.log[-1][:2] == ("launch", 1)
    assert cupy.current == 0


def test_more_shared_memory_is_asked_for_once(cupy):
    kernel = cuda.load(CUBIN, "f")
    cupy.log.clear()
    for shared in (48 << 10, 100 << 10, 100 << 10, 64 << 10):
        cuda.launch(kernel, (1,), (1,), [], 0, shared=shared)
    assert [x[0] for x in cupy.log] == ["launch", "grant", "launch", "launch", "launch"]
    assert cupy.log[1] == ("grant", 77, 100 << 10)


def test_shared_memory_that_a_kernel_declares_counts_too(cupy):
    kernel = cuda.load(replace(CUBIN, shared=16 << 10), "f")
    cupy.cuda.driver.funcGetAttribute = lambda _attribute, _function: 32 << 10
    cupy.log.clear()
    for shared in (32 << 10, 33 << 10):
        cuda.launch(kernel, (1,), (1,), [], 0, shared=shared)
    assert [x[0] for x in cupy.log] == ["launch", "grant", "launch"]


def test_more_shared_memory_is_asked_for_on_the_kernels_device(cupy):
    """By a thread that has no context yet, too."""
    kernel, asked = cuda.load(CUBIN, "f", 1), []
    contexts: list[int] = []

    def get(_attribute, _function):
        if not contexts:
            raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT")
        asked.append(cupy.current)
        return 48 << 10

    cupy.cuda.driver.funcGetAttribute = get
    cupy.cuda.runtime.memGetInfo = lambda: contexts.append(cupy.current)
    cuda.launch(kernel, (1,), (1,), [], 0, shared=100 << 10)
    assert (asked, contexts, cupy.current) == ([1], [1], 0)


class _Driver:
    """cuLaunchKernelEx: it answers with a status, and hands a launch that it takes to `CuPy`."""

    def __init__(self, cupy, status=0):
        self.cupy, self.status, self.seen = cupy, status, []

    def __call__(self, config, function, arguments, extra):
        words = (ctypes.c_uint32 * 7).from_address(config)
        stream, attributes = (ctypes.c_void_p * 2).from_address(config + 32)
        count = ctypes.c_uint32.from_address(config + 48).value
        what, value = (ctypes.c_int.from_address(attributes + at).value for at in (0, 8))
        self.seen.append((count, what, value))
        if self.status:
            return self.status
        self.cupy._launch(function, *words, stream or 0, arguments, extra)
        self.cupy.log.append("early")
        return 0


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(nvrtc, "compile_cuda", lambda _text, _name, architecture: replace(CUBIN, key=architecture))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("architecture", ["75", "80", "89", "90a", "100a", "120"])
def test_kernels_that_wait_may_begin_early(cupy, monkeypatch, architecture):
    """From sm_90 on; others are launched as ever."""
    driver, early = _Driver(cupy), int(architecture.rstrip("a")) >= 90
    monkeypatch.setattr(cuda_launch, "extended", lambda: driver)
    cupy.formats = "Qi"
    for text in (f"... {WAIT}();", "..."):
        monkeypatch.setattr(cuda, "_functions", {})
        run = cuda.prepared(
            cuda.build(text, "f", architecture, 0), (5, 2), (32,), [("pointer", None), ("int", 3)], ((0, "a"),), 64
        )
        for stream in (7, 8):
            cupy.log.clear()
            run({"a": 1 << 40}, stream)
            assert cupy.log[-1 - (cupy.log[-1] == "early")] == (
                "launch", 0, (5, 2, 1), (32, 1, 1), (1 << 40, 3), 64, stream,
            )  # fmt: skip
            assert ("early" in cupy.log) == (early and WAIT in text)
    assert driver.seen == [(1, 6, 1)] * 2 * early


@pytest.mark.usefixtures("compiled")
def test_a_driver_that_refuses_early_launches_is_asked_once(cupy, monkeypatch):
    cuda_launch._refused.cache_clear()
    driver = _Driver(cupy, 801)
    monkeypatch.setattr(cuda_launch, "extended", lambda: driver)
    run = cuda.prepared(cuda.build(WAIT, "f", "90a", 0), (1,), (1,), [], ())
    with pytest.warns(RuntimeWarning, match=r"refuses programmatic dependent launch \(error 801\)"):
        run({}, 3)
    run({}, 3)
    assert [x[0] for x in cupy.log] == ["load", "launch", "launch"]
    assert len(driver.seen) == 1
    # An error that a launch without the attribute gives, too, is not about overlap.
    run = cuda.prepared(cuda.build(WAIT, "f", "90a", 0), (1,), (4096,), [], ())
    cupy.fail = "launch"
    with pytest.raises(DeviceError, match="did not launch f"):
        run({}, 3)


@pytest.mark.usefixtures("compiled")
def test_an_early_launch_of_a_thread_without_a_context(cupy, monkeypatch):
    driver = _Driver(cupy, 201)
    monkeypatch.setattr(cuda_launch, "extended", lambda: driver)
    cupy.cuda.runtime.memGetInfo = lambda: setattr(driver, "status", 0)
    cuda.prepared(cuda.build(WAIT, "f", "90a", 1), (1,), (1,), [], ())({}, 3)
    assert cupy.log[-2:] == [("launch", 1, (1, 1, 1), (1, 1, 1), (), 0, 3), "early"]


def test_where_kernels_do_not_overlap(cupy, monkeypatch):
    found = SimpleNamespace(cuLaunchKernelEx=SimpleNamespace())
    monkeypatch.setattr(cuda_launch.ctypes, "CDLL", lambda _: found)
    asked = EXTENDED.__wrapped__
    assert asked() is found.cuLaunchKernelEx
    for off in ("off", "0", "OFF"):
        monkeypatch.setenv("PORTMM_PDL", off)
        assert asked() is None
    monkeypatch.delenv("PORTMM_PDL")
    cupy.cuda.runtime.driverGetVersion = lambda: 12020
    with pytest.warns(RuntimeWarning, match=r"CUDA 12's driver is older than 12\.3"):
        assert asked() is None

    def none(_):
        raise OSError("no libcuda.so.1")

    monkeypatch.setattr(cuda_launch.ctypes, "CDLL", none)
    assert asked() is None


def test_an_empty_grid_launches_nothing(cupy):
    """CuPy would launch one block."""
    kernel = cuda.load(CUBIN, "f")
    cupy.log.clear()
    cuda.launch(kernel, (4, 0), (32,), [], 0)
    assert not cupy.log


def test_launches_that_fail(cupy):
    kernel = cuda.load(CUBIN, "f")
    with pytest.raises(ValueError, match="kind 'double' are unknown"):
        cuda.launch(kernel, (1,), (1,), [("double", 1.0)], 0)
    cupy.fail = "launch"
    with pytest.raises(DeviceError, match=r"did not launch f with grid \(1, 1, 1\), block \(2048, 1, 1\) and 0 bytes"):
        cuda.launch(kernel, (1,), (2048,), [], 0)
    cupy.fail = "grant"
    with pytest.raises(DeviceError, match="1000000 bytes of dynamic shared memory"):
        cuda.launch(kernel, (1,), (1,), [], 0, shared=1000000)


def test_the_real_cupy_has_the_drivers_launch():
    driver = pytest.importorskip("cupy.cuda").driver
    with pytest.raises((RuntimeError, driver.CUDADriverError)):  # without a driver, or for a kernel that is none
        driver.launchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)


@pytest.mark.device
def test_on_a_real_device():
    cupy = pytest.importorskip("cupy")
    try:
        here = cuda.facts()
    except NoDeviceError as error:
        pytest.skip(str(error))
    source = """
extern "C" __global__ void f(const float *a, float *b, int n, long long skip, float s)
{
    extern __shared__ float part[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x + skip] = i < n ? a[i] : 0.0f;
    __syncthreads();
    if (i < n) b[i] = part[(threadIdx.x ^ 1) + skip] * s;
}
"""
    assert here.memory_bytes > here.l2_bytes > 0
    assert here.bandwidth_gbs > 10
    kernel = cuda.load(compile_cuda(source, "f", here.architecture), "f")
    a = cupy.arange(1000, dtype=cupy.float32)
    b = cupy.zeros_like(a)
    stream = cupy.cuda.get_current_stream()
    for shared, skip in ((512, 0), (here.shared_most, here.shared_most // 4 - 128)):
        words = [("pointer", a.data.ptr), ("pointer", b.data.ptr), ("int", 1000), ("long", skip), ("float", 2.0)]
        cuda.launch(kernel, (8,), (128,), words, stream.ptr, shared=shared)
        assert np.array_equal(cupy.asnumpy(b), 2.0 * (np.arange(1000) ^ 1))
