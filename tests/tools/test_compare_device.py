"""Comparisons on devices: through OpenCL on this processor, and through what stands in for CUDA."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import bench_arrays
import cuda_fakes
import emulated_cuda
import numpy as np
import opencl_cpu
import pytest
from comparisons import prepare
from places import HELPERS
from typer.testing import CliRunner

from portmm.cli import main
from portmm.comparison import Case, Contender, cases, compare, device, limit, shapes
from portmm.comparison import data as inputs
from portmm.comparison.clblast import Blast, BlastError
from portmm.comparison.device_arrays import TorchArrays, parsed
from portmm.comparison.peers import CONTENDERS, MissingError, Setup, UnsupportedError, find, open_adapter
from portmm.comparison.report import from_json
from portmm.comparison.text import heading, notes
from portmm.errors import NoDeviceError
from portmm.runtime import cuda

SMALL = Case("small", "x", 20, 24, 32)
PORTMM = "portmm.comparison.device:open_portmm"


def there(name, *, peer=True, language="opencl"):
    return Contender(name, f"device_peers:{name}", peer=peer, device=language)


# -- OpenCL --------------------------------------------------------------------------------


def installed():
    try:
        Blast()
    except BlastError:
        return ()
    return ("clblast",)


@pytest.mark.rest("takes long for what it finds")
def test_a_comparison_through_opencl(monkeypatch):
    """portmm is right; a peer that is wrong, and one that crashes, are named."""
    opencl_cpu.opencl_device()
    monkeypatch.syspath_prepend(str(HELPERS))
    every = [SMALL, Case("tt", "x", 9, 10, 11, a="col", b="col", c="col", dtype="s8-s8-s32")]
    report = compare(
        every, device="opencl", contenders=["portmm", *installed(), there("wrong"), there("crashing"), there("absent")],
        rounds=2, turn_s=0.001, budget_s=600,
    )  # fmt: skip
    entries = [{name: x.state for name, x in result.entries.items()} for result in report.results]
    assert [x["portmm"] for x in entries] == ["ok", "ok"]
    assert [x["wrong"] for x in entries] == ["wrong", "wrong"]
    assert entries[0]["crashing"] == "crashed"
    assert [x.get("clblast", "ok") for x in entries] == ["ok", "unsupported"] or not installed()
    assert (report.results[0].ratio is None) == (not installed())
    said = notes(report)
    assert any("crashing on small: crashed" in x for x in said)
    assert any("absent: not found" in x for x in said)
    assert report.device == "opencl"
    assert "OpenCL" in heading(report)
    assert "thread" not in heading(report)
    assert from_json(report.to_json()) == report
    assert "device" not in json.loads(replace(report, device="").to_json())


@pytest.mark.parametrize("cold", [0, 25_000])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_operands_take_turns(dtype, cold):
    opencl_cpu.opencl_device()
    on = device.OpenClArrays()
    case = Case("x", "x", 6, 7, 8, b="col", dtype=dtype)
    data = inputs.arrays(case)
    seen = []

    def ways(x):
        made = on.put((data.a.astype(np.float32) @ data.b.astype(np.float32)).astype(data.c.dtype))

        def call():
            seen.append(id(x))
            x.memory.set(made.get())
            return x.c

        return {"host": call}

    (run,) = device.runs(on, case, data, ways, cold=cold).values()
    seen.clear()
    run.spoil()
    run(3)
    run(2)
    assert len(set(seen)) == (5 if cold else 1)
    run.fetch()
    error, bound = inputs.judge(case, data, "inputs")
    assert error <= bound


# -- CUDA ----------------------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch):
    """A GPU that is emulated."""
    more = {"name": b"NVIDIA A100-SXM4-40GB", "major": 8, "minor": 0}
    monkeypatch.setattr(cuda_fakes, "PROPERTIES", cuda_fakes.PROPERTIES | more)
    return emulated_cuda.install(monkeypatch)


@pytest.mark.parametrize("dtype", ["bf16", "s8-s8-s32", "e4m3-e4m3-bf16"])
@pytest.mark.usefixtures("cupy")
def test_portmm_on_cuda_is_right(dtype):
    library = open_adapter(PORTMM, Setup(device="cuda"))
    _, reply = prepare(library, Case("x", "x", 18, 16, 32, b="col", dtype=dtype), 0)
    assert reply["state"] == "ok", reply
    assert set(reply["methods"]) == {"matmul", "plan"}
    assert "cupy 14.0.0" in library.version


@pytest.mark.usefixtures("cupy")
def test_a_type_that_no_library_holds_is_said(monkeypatch):
    library = open_adapter(PORTMM, Setup(device="cuda"))
    monkeypatch.setattr(device.CupyArrays, "holds", lambda _self, _names: False)
    monkeypatch.setattr(device, "TorchArrays", lambda _number: (_ for _ in ()).throw(MissingError("no torch")))
    _, reply = prepare(library, SMALL, 0)
    assert reply == {"state": "unsupported", "reason": "cupy 14.0.0 has no arrays of f32; no torch"}


def test_cupys_products_are_checked(cupy):
    def multiply(a, b, out):
        out.host[...] = a.host @ b.host
        return out

    cupy.matmul = multiply
    library = open_adapter("portmm.comparison.device:open_cupy", Setup(device="cuda"))
    assert prepare(library, SMALL, 0)[1]["method"] == "matmul"
    assert prepare(library, replace(SMALL, dtype="s8-s8-s32"), 0)[1]["reason"] == "no product of s8-s8-s32 by cuBLAS"
    cupy.matmul = lambda _a, _b, out: out
    assert prepare(library, SMALL, 0)[1]["state"] == "wrong"


class Stream:
    """CuPy's, as far as graphs need it."""

    log: ClassVar[list] = []

    def __init__(self, *, non_blocking):
        assert non_blocking

    def __enter__(self):
        self.log.append("enter")

    def __exit__(self, *_):
        self.log.append("leave")

    def __getattr__(self, name):
        return lambda: self.log.append(name)

    def end_capture(self):
        self.log.append("end_capture")
        return SimpleNamespace(launch=lambda stream: self.log.append(("launch", stream is self)))


def test_cupys_graphs_are_captured_in_a_stream_of_their_own(cupy, monkeypatch):
    cupy.cuda.Stream = Stream
    monkeypatch.setattr(Stream, "log", log := [])
    on = device.CupyArrays()
    replay, result = on.graph([lambda: log.append("first"), lambda: log.append("last") or 7])
    assert result == 7
    replay()
    warm = ["enter", "first", "synchronize", "begin_capture"]
    assert log == [*warm, "first", "last", "end_capture", "leave", ("launch", True)]
    log.clear()
    with pytest.raises(ZeroDivisionError):
        on.graph([lambda: log.append("first"), lambda: 1 / 0])
    assert log == [*warm, "first", "end_capture", "leave"]  # the stream is left as it was


TORCHS = {
    "f32": {"matmul", "linear"}, "bf16": {"matmul", "linear"}, "s8-s8-s32": {"_int_mm"},
    "e4m3-e4m3-bf16": {"_scaled_mm"},
}  # fmt: skip


@pytest.mark.parametrize("dtype", TORCHS)
def test_pytorchs_calls_are_right(dtype, monkeypatch):
    torch = pytest.importorskip("torch")
    bench_arrays.tensors_there(monkeypatch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: 1 / 0)  # such a library is timed without graphs
    library = device.torch_library(TorchArrays(None, "cpu"))
    _, reply = prepare(library, Case("x", "x", 32, 16, 64, b="col", dtype=dtype), 0)
    assert reply["state"] == "ok", reply
    assert set(reply["methods"]) == TORCHS[dtype]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"dtype": "s8-s8-s32", "m": 16}, "takes 17 rows"), ({"dtype": "f32-u4-f32", "block": 8}, "four bits"),
        ({"dtype": "f32-s8-f32"}, "codes with scales"), ({"dtype": "u8-s8-s32"}, "no product of u8-s8-s32"),
    ],
)  # fmt: skip
def test_what_pytorch_lacks_is_said(more, why, monkeypatch):
    pytest.importorskip("torch")
    bench_arrays.tensors_there(monkeypatch)
    _, reply = prepare(device.torch_library(TorchArrays(None, "cpu")), replace(SMALL, **more), 0)
    assert reply["state"] == "unsupported"
    assert why in reply["reason"]


class Graphs:
    """Arrays in the host's memory, whose graphs record calls."""

    version = "host"

    def __init__(self):
        self.launched = []

    def put(self, x):
        return x.copy()

    def store(self, to, x):
        to[...] = x

    def transposed(self, x):
        return x.swapaxes(-1, -2)

    host = put

    def wait(self):
        pass

    def working(self):
        return contextlib.nullcontext()

    def graph(self, calls):
        results = [call() for call in calls]
        return lambda: self.launched.append(len([call() for call in calls])), results[-1]


def test_graphs_compute_what_calls_do():
    on, data = Graphs(), inputs.arrays(SMALL)
    made = device.runs(on, SMALL, data, lambda x: {"matmul": lambda: np.matmul(x.a, x.b, out=x.c)})
    assert set(made) == {"matmul", "matmul, graph"}
    run = made["matmul, graph"]
    for count, launched in ((1, [1]), (16, [1] * 16), (35, [16, 16, 1, 1, 1])):
        on.launched.clear()
        run.spoil()
        data.spoil()
        run(count)
        run.fetch()
        assert on.launched == launched
        assert inputs.judge(SMALL, data)[0] <= inputs.judge(SMALL, data)[1]
    with pytest.raises(UnsupportedError, match="matmul: not today"):
        device.runs(on, SMALL, data, lambda _x: {"matmul": lambda: (_ for _ in ()).throw(RuntimeError("not today"))})
    large = Case("large", "x", 65, 1 << 13, 1 << 14)  # of which only the numbers are looked at
    assert set(device.runs(on, large, data, lambda x: {"matmul": lambda: x.c})) == {"matmul"}


# -- what a device is ----------------------------------------------------------------------


def test_devices_have_names():
    assert [parsed(x) for x in ("cuda", "cuda:1", "opencl")] == [("cuda", None), ("cuda", 1), ("opencl", None)]
    for wrong in ("cuda:", "cuda:x", "opencl:1", "tpu", ""):
        with pytest.raises(ValueError, match="unknown; give cuda, cuda:1 or opencl"):
            parsed(wrong)


def test_a_described_gpu_has_limits(monkeypatch):
    more = {"name": b"NVIDIA H100 80GB HBM3", "l2CacheSize": 50 << 20}
    monkeypatch.setattr(cuda_fakes, "PROPERTIES", cuda_fakes.PROPERTIES | more)
    emulated_cuda.install(monkeypatch)
    monkeypatch.setattr(limit, "nvidia_smi", lambda _query, _which: {"power.limit": "700.00 W"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = limit.queried("cuda")
    assert (found.name, found.kind, found.cache) == ("h100", "gpu", 50 << 20)
    assert found.title == (
        "NVIDIA H100 80GB HBM3, 132 processors, up to 1.98 GHz, driver for CUDA 12.9, 700.00 W at most"
    )
    # wgmma, 2048 multiply-adds of each of 132 processors in a cycle
    assert found.peaks["bf16-bf16"] == pytest.approx(2 * 2048 * 132 * 1.98)
    assert found.peaks["f32-f32"] == pytest.approx(2 * 128 * 132 * 1.98)  # not tf32's
    square, row = Case("x", "x", 8192, 8192, 8192, dtype="bf16"), Case("x", "x", 1, 4096, 4096, dtype="bf16")
    assert found.of(square) == found.peaks["bf16-bf16"]
    assert found.of(row) is None  # it stays in L2, of which no document says enough
    assert found.of(row, cold=True) == pytest.approx(found.memory_gbs, rel=0.01)
    assert found.of(replace(row, n=1 << 16)) == pytest.approx(found.memory_gbs, rel=0.01)
    assert found.of(replace(square, dtype="f32-s8-f32")) is None


def test_a_device_that_is_not_described_has_none(monkeypatch):
    emulated_cuda.install(monkeypatch)
    monkeypatch.setattr(cuda_fakes, "PROPERTIES", cuda_fakes.PROPERTIES | {"name": b"Strange", "major": 7, "minor": 1})
    cuda._facts.cache_clear()
    found = limit.queried("cuda")
    assert (found.peaks, found.rates, found.of(SMALL)) == ({}, {}, None)


def test_a_missing_device_is_said(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NoDeviceError, match="device cuda: ended with status 1"):
        compare([SMALL], device="cuda")
    monkeypatch.undo()
    monkeypatch.setenv("OCL_ICD_VENDORS", "/nowhere")
    with pytest.raises(NoDeviceError, match=r"no OpenCL device|PyOpenCL"):
        compare([SMALL], device="opencl")


def test_a_device_is_held_to_no_target():
    with pytest.raises(ValueError, match="cannot be held to target 'avx2'"):
        compare([SMALL], device="opencl", target="avx2")
    done = CliRunner().invoke(main.app, ["compare", "smoke", "--device", "tpu"])
    assert done.exit_code == 2
    assert "unknown" in done.output


def test_each_language_has_contenders():
    assert {c.name for c in find(None, "cuda")} == {"portmm", "torch-cuda", "cupy", "cublaslt"}
    assert {c.name for c in find(None, "opencl")} == {"portmm", "clblast"}
    assert find(None) == CONTENDERS
    with pytest.raises(ValueError, match="'mkl' on devices of cuda; known are portmm, torch-cuda"):
        find(["mkl"], "cuda")


def test_suites_of_devices():
    quick = cases("device-quick")
    assert {case.dtype for case in quick} == {"f32", "bf16", "f16", "s8-s8-s32", "e4m3-e4m3-bf16"}
    assert {case.m for case in quick if case.group == "gpu-decode"} == {1, 16}
    assert cases("gpu-smoke") == cases("device-smoke")
    assert not {case.name for case in quick} & {case.name for case in cases("full,narrow")}
    asked = ("quick", "gpu"), ("quick", "cpu"), ("smoke", "cpu"), ("f16", "gpu")
    assert [shapes.suite_of(*x) for x in asked] == [
        "device-quick", "quick", "device-smoke", "f16",
    ]  # fmt: skip
