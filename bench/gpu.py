"""Checks and times kernels on this machine's device, beside the library that is there, within minutes.

    python gpu.py --save results/h200-gpu.json          # a CUDA GPU, with PyTorch and CuPy
    python gpu.py --device opencl --smoke               # OpenCL on this processor, a few small cases

Each product is checked against NumPy in float64 before it is timed. Times are medians of turns that
alternate between portmm and the peer, on random data, with operands rotated through more
memory than twice L2. A row of the report has the seconds of both, and their ratio.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import portmm as pm
from portmm import cache, device_arrays, foreign, grid_dispatch, on_device
from portmm.dtype import BY_NAME, accumulator
from portmm.emit import cuda as emit_cuda
from portmm.version import VERSION

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

SQUARES = (512, 1024, 2048, 4096, 8192)
SUITE = (
    (1024, 4096, 1024),
    (4096, 1024, 4096),
    (128, 4096, 4096),
    (4096, 4096, 128),
    (256, 256, 16384),
    (1000, 1000, 1000),
)
DECODE = ((1, 4096, 4096), (1, 14336, 4096), (1, 4096, 14336), (4, 4096, 4096), (8, 4096, 4096))
SMOKE = ((64, 48, 80), (33, 17, 65))
ROTATED = 3.0
"""Times L2 that rotated operands fill."""


@dataclass
class Report:
    """What came out."""

    device: dict
    rows: list = field(default_factory=list)
    checks: list = field(default_factory=list)
    notes: dict = field(default_factory=dict)


class Torch:
    """Arrays of PyTorch on a CUDA device."""

    name = "cuda"

    def __init__(self):
        import torch

        self.torch = torch
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self.types = {
            "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "s8": torch.int8, "s32": torch.int32,
        }  # fmt: skip

    def array(self, x, dtype):
        made = self.torch.from_numpy(np.ascontiguousarray(x)).cuda()
        return made.to(self.types[dtype])

    def numpy(self, x):
        return x.to(self.torch.float64).cpu().numpy() if x.dtype != self.torch.int32 else x.cpu().numpy()

    def wait(self):
        self.torch.cuda.synchronize()

    def peer(self, a):
        if a.dtype != self.torch.int8:
            return self.torch.matmul
        # What PyTorch has for int8 refuses few rows.
        return self.torch._int_mm if a.shape[0] > 16 else None  # noqa: SLF001

    def seconds(self, call):
        """Of the device."""
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def copy(self, x, y):
        return lambda: y.copy_(x)

    def empty(self, n):
        return self.torch.empty(n, dtype=self.torch.uint8, device="cuda")


class OpenCl:
    """Arrays of PyOpenCL on the first device."""

    name = "opencl"

    def __init__(self):
        from opencl_cpu import opencl_device

        self.context, self.queue = opencl_device()
        import pyopencl.array

        self.module = pyopencl.array

    def array(self, x, dtype):
        from portmm.arrays import numpy_of

        return self.module.to_device(self.queue, np.ascontiguousarray(x.astype(numpy_of(dtype))))

    def numpy(self, x):
        found = x.get()
        return found if found.dtype == np.int32 else found.astype(np.float64)

    def wait(self):
        self.queue.finish()

    def peer(self, a):
        """CLBlast, where it is installed: of f32."""
        if a.dtype != np.float32:
            return None
        try:
            library = ctypes.CDLL("libclblast.so.1")
        except OSError:
            return None
        queue = ctypes.c_void_p(self.queue.int_ptr)
        size, one, none = ctypes.c_size_t, ctypes.c_float(1), ctypes.c_float(0)

        def multiply(x, y):
            (m, k), n = x.shape, y.shape[1]
            out = self.module.empty(self.queue, (m, n), np.float32)
            by_rows, plain = ctypes.c_int(101), ctypes.c_int(111)  # as CBLAS counts
            held = [ctypes.c_void_p(z.data.int_ptr) for z in (x, y, out)]
            status = library.CLBlastSgemm(
                by_rows, plain, plain, size(m), size(n), size(k), one, held[0], size(0), size(k), held[1], size(0),
                size(n), none, held[2], size(0), size(n), ctypes.byref(queue), None,
            )  # fmt: skip
            assert status == 0, status
            return out

        return multiply

    def seconds(self, call):
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start


def values(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    if dtype == "s8":
        return rng.integers(-127, 128, shape, dtype=np.int8)
    return rng.standard_normal(shape, dtype=np.float32)


def check(on, report, size, dtype, *, layout="row", epilogue=False):
    """One product, compared with float64."""
    m, n, k = size
    a, b = values((m, k), dtype, 1), values((k, n) if layout == "row" else (n, k), dtype, 2)
    left, right = on.array(a, dtype), on.array(b, dtype)
    x, y = on.numpy(left).astype(np.float64), on.numpy(right).astype(np.float64)
    right, y = (right, y) if layout == "row" else (right.T, y.T)
    bias = values((n,), "f32", 3)
    there = on.array(bias, "f32")
    wanted = np.maximum(x @ y + bias, 0) if epilogue else x @ y
    if epilogue:
        found = pm.matmul(left, right, epilogue=lambda acc, i: pm.relu(acc + there[i.n]))
    else:
        found = pm.matmul(left, right)
    error = float(np.abs(on.numpy(found) - wanted).max())
    spread = float((np.abs(x) @ np.abs(y)).max())
    kind = accumulator(dtype, dtype)
    eps = BY_NAME["f32"].eps if dtype in ("f32", "s8") else BY_NAME[dtype].eps
    bound = 0.0 if kind == "s32" and not epilogue else spread * (k * BY_NAME["f32"].eps + 2 * eps)
    row = {"size": size, "dtype": dtype, "b": layout, "epilogue": epilogue, "error": error, "bound": bound}
    report.checks.append(row | {"right": error <= bound})
    if error > bound:
        print(f"WRONG: {row}")


def timed(on, report, size, dtype, *, turns, l2, layout="row", epilogue=False):
    """One product beside the peer's, or one with an epilogue beside the bare one."""
    m, n, k = size
    bytes_ = (m * k + k * n) * BY_NAME[dtype].bytes
    copies = max(2, min(64, int(ROTATED * l2 / max(bytes_, 1)) + 1))
    shape = (k, n) if layout == "row" else (n, k)
    sets = [
        (on.array(values((m, k), dtype, i), dtype), on.array(values(shape, dtype, 99 + i), dtype))
        for i in range(copies)
    ]
    sets = [(a, b if layout == "row" else b.T) for a, b in sets]
    bias = on.array(values((n,), "f32", 3), "f32")
    ours = pm.matmul
    if epilogue:

        def ours(a, b):
            return pm.matmul(a, b, epilogue=lambda acc, i: pm.gelu(acc + bias[i.n]))

    other = pm.matmul if epilogue else on.peer(sets[0][0])
    found = {"portmm": [], "peer": []}
    for turn in range(turns + 2):
        a, b = sets[turn % copies]
        for name, call in (("portmm", ours), ("peer", other)):
            if call is not None:
                seconds = on.seconds(lambda call=call, a=a, b=b: call(a, b))
                if turn >= 2:  # the first ones compile and warm up
                    found[name].append(seconds)
    mine, theirs = (statistics.median(x) if x else None for x in found.values())
    schedule = str(_route(sets[0][0], sets[0][1]).choice.schedule)
    row = {
        "size": size, "dtype": dtype, "b": layout, "epilogue": epilogue, "seconds": mine, "peer": theirs,
        "ratio": theirs / mine if theirs else None, "gflops": 2 * m * n * k / mine / 1e9,
        "gbs": (bytes_ + m * n * 4) / mine / 1e9, "schedule": schedule,
    }  # fmt: skip
    report.rows.append(row)
    said = f"{size} {dtype} B {layout}{' epilogue' if epilogue else ''}"
    beside = f", {row['ratio']:.2f} of the peer's speed" if theirs else ""
    print(f"{said}: {mine * 1e6:.1f} us, {row['gflops']:.0f} GFLOP/s{beside}")


def coded(on, report, size, turns):
    """A weight of four bits beside the peer's product with the weight in bf16."""
    m, n, k = size
    weight = pm.quantize(values((k, n), "f32", 7), group=128)
    a = on.array(values((m, k), "f32", 8), "bf16")
    there, plain = pm.pack(weight, like=a), on.array(pm.dequantize(weight), "bf16")
    x, y = on.numpy(a), pm.dequantize(weight).astype(np.float64)
    found = on.numpy(pm.matmul(a, there))
    bound = float((np.abs(x) @ np.abs(y)).max()) * (k * BY_NAME["f32"].eps + 2 * BY_NAME["bf16"].eps)
    error = float(np.abs(found - x @ y).max())
    report.checks.append({"size": size, "dtype": "bf16-u4", "error": error, "bound": bound, "right": error <= bound})
    other = on.peer(a)
    times = {"portmm": [], "peer": []}
    for turn in range(turns + 2):
        for name, call in (("portmm", lambda: pm.matmul(a, there)), ("peer", other and (lambda: other(a, plain)))):
            if call is not None:
                seconds = on.seconds(call)
                times[name] += [seconds] if turn >= 2 else []
    mine, theirs = (statistics.median(x) if x else None for x in times.values())
    held = k * n / 2 + 8 * n * -(-k // 128)
    report.rows.append({
        "size": size, "dtype": "bf16-u4", "b": "codes", "epilogue": False, "seconds": mine, "peer": theirs,
        "ratio": theirs / mine if theirs else None, "gflops": 2 * m * n * k / mine / 1e9, "gbs": held / mine / 1e9,
        "schedule": "codes",
    })  # fmt: skip
    print(f"{size} bf16 by codes of four bits: {mine * 1e6:.1f} us, {held / mine / 1e9:.0f} GB/s of weight")


def attention(on, report, turns):
    """Attention beside the peer's, causal, heads of 64 and 128."""
    torch = on.torch
    for d, length in ((64, 1024), (64, 4096), (128, 2048)):
        q, k, v = (on.array(values((2, 8, length, d), "f32", i), "f16") for i in range(3))
        ways = {
            "portmm": lambda q=q, k=k, v=v: pm.attention(q, k, v, causal=True),
            "peer": lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        }
        error = float((on.torch.as_tensor(ways["portmm"]()).float() - ways["peer"]().float()).abs().max())
        report.checks.append({"attention": [length, d], "error": error, "bound": 4e-3, "right": error <= 4e-3})
        times = {
            name: statistics.median([on.seconds(call) for _ in range(turns + 2)][2:]) for name, call in ways.items()
        }
        report.notes.setdefault("attention", []).append({"length": length, "d": d, **times})
        faster = times["peer"] / times["portmm"]
        print(f"attention {length} x {d}: {times['portmm'] * 1e6:.0f} us, {faster:.2f} of the peer's speed")


def _route(a, b):
    left, right, _ = on_device.adopted(a, b)
    shape, batch, size = device_arrays.shapes(left, right)
    made = foreign.empty_like(left, shape, device_arrays.result_type(left.dtype, right.dtype, ""))[1]
    call = on_device.posed((left, right, made), batch, size)
    return grid_dispatch.route(call.problem, device_arrays.machine_of(left), call.vectors)


def bandwidth(on, report):
    """What a copy moves, counting reads and writes."""
    n = 1 << 30
    x, y = on.empty(n), on.empty(n)
    copy = on.copy(x, y)
    seconds = statistics.median([on.seconds(copy) for _ in range(12)][2:])
    report.notes["copy_gbs"] = 2 * n / seconds / 1e9


def overhead(on, report):
    """Host seconds of a call that is put into a stream."""
    a, b = (on.array(values((16, 16), "f32", i), "f32") for i in range(2))
    out = on.array(values((16, 16), "f32", 5), "f32")
    plan = pm.plan(a, b, out)
    ways = {"portmm.plan": lambda: plan(a, b, out), "portmm.matmul": lambda: pm.matmul(a, b, out)}
    if on.name == "cuda":
        ways["torch"] = lambda: on.torch.matmul(a, b, out=out)
        try:
            import cupy

            left, right, to = (cupy.from_dlpack(x) for x in (a, b, out))
            ours = pm.plan(left, right, to)
            ways |= {
                "cupy": lambda: cupy.matmul(left, right, out=to),
                "portmm.plan of CuPy's": lambda: ours(left, right, to),
            }
        except ImportError:
            report.notes["cupy"] = "not installed"
    found = {}
    for name, call in ways.items():
        call()
        on.wait()
        turns = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(50):
                call()
            turns.append((time.perf_counter() - start) / 50)
            on.wait()
        found[name] = statistics.median(turns)
    report.notes["call_seconds"] = found


def compiled(report, target):
    """Cold and warm seconds of a kernel."""
    from portmm.nvrtc import compile_cuda
    from portmm.problem import Problem

    cold, warm = [], []
    for size in ((4096, 4096, 4096), (512, 512, 512), (64, 64, 64)):
        choice = grid_dispatch.choose(Problem(*size), target, (4, 4, 4))
        isa = target.isa(choice.schedule.isa)
        from portmm.lower import lower_grid

        kernel = lower_grid(choice.schedule, isa)[0]
        text = emit_cuda.source(kernel) + f"/* {time.time_ns()} */\n"
        for found in (cold, warm):
            start = time.perf_counter()
            compile_cuda(text, kernel.name, target.device.architecture)
            found.append(time.perf_counter() - start)
    report.notes["compile_seconds"] = {"cold": cold, "warm": warm}


def checked(on, report, *, smoke):
    """Products of every type, layouts and edges."""
    types = ("f32", "f16", "bf16", "s8")
    for dtype in types:
        for size in SMOKE if smoke else (*SMOKE, (513, 257, 1025), (1, 1000, 4096), (2048, 2048, 2048)):
            for layout in ("row", "col"):
                check(on, report, size, dtype, layout=layout)
        if dtype != "s8":
            check(on, report, SMOKE[0], dtype, epilogue=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "opencl"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a few small cases")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    began = time.monotonic()
    on = Torch() if given.device == "cuda" else OpenCl()
    probe = on.array(values((8, 8), "f32", 0), "f32")
    machine = device_arrays.machine_of(on_device.adopted(probe, probe)[0])
    level = machine.target.level("L2")
    l2 = level.bytes if level else 1 << 22
    facts = {
        "target": machine.target.name,
        "version": VERSION,
        "host": platform.platform(),
        **asdict(machine.target.device),
    }
    report = Report(facts)
    checked(on, report, smoke=given.smoke)
    squares = SQUARES[: 1 if given.smoke else 3 if on.name == "opencl" else len(SQUARES)]
    cases = [((n, n, n), "f32", "row", False) for n in squares]
    if not given.smoke and on.name == "cuda":
        cases += [(size, "f32", "row", False) for size in SUITE] + [((2048,) * 3, "f32", "col", False)]
        cases += [
            (size, dtype, layout, False)
            for dtype in ("bf16", "s8", "f32")
            for layout in ("row", "col")
            for size in DECODE
        ]
        cases += [((2048, 2048, 2048), "f32", "row", True), ((4096, 4096, 4096), "f32", "row", True)]
        cases += [((2048, 2048, 2048), dtype, "col", False) for dtype in ("s8", "bf16", "f16")]
    for size, dtype, layout, epilogue in cases:
        if time.monotonic() - began > given.budget:
            report.notes["cut short"] = f"after {len(report.rows)} of {len(cases)} cases"
            break
        timed(on, report, size, dtype, turns=3 if given.smoke else given.turns, l2=l2, layout=layout, epilogue=epilogue)
    for size in SMOKE[:1] if given.smoke else DECODE if on.name == "cuda" else ():
        coded(on, report, size, 3 if given.smoke else given.turns)
    overhead(on, report)
    if on.name == "cuda":
        attention(on, report, given.turns)
        bandwidth(on, report)
        compiled(report, machine.target)
    report.notes["cache"] = cache.cache_size()
    report.notes["seconds"] = time.monotonic() - began
    text = json.dumps(asdict(report), indent=1)
    if given.save:
        given.save.write_text(text + "\n")
    print(json.dumps(report.notes, indent=1))
    return 0 if all(x["right"] for x in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
