"""Convolutions of ResNet-50, of Stable Diffusion's U-Net, and of groups, one by one, beside oneDNN and ONNX Runtime.

    python bench/convolutions.py [--only resnet] [--type bf16] [--rounds 7] [--seconds 110] [--save FILE]

Images are float32, bfloat16 or unsigned bytes (`--type`), channels last, results of bytes in float32 after a scale;
filters are prepacked by each library. ONNX Runtime is a peer in float32 only. Each library has a process of its own,
and rounds alternate between them, so that both see the same clock; a case's ratio is the median over rounds of the best
peer's time over portmm's. Results are compared with PyTorch's in float64 where that takes less than a second. Peak
memory is portmm's resident set beyond images, filters and result. oneDNN is called through PyTorch, with filters in
the layout that it asks for; ONNX Runtime gets a model of one node.

Run it on one processor that does nothing else; `--save` appends to a file of results, from which cases that it has of
a type are not measured again, so that runs may be short.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from result_tables import heading


@dataclass(frozen=True)
class Case:
    """A convolution of square images."""

    model: str
    size: int
    channels: int
    outputs: int
    kernel: int
    stride: int = 1
    groups: int = 1
    batch: int = 1

    @property
    def padding(self):
        """Zeros on each side."""
        return self.kernel // 2

    @property
    def out(self):
        """Rows of a result."""
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def flops(self):
        """Multiplications and additions."""
        return 2 * self.batch * self.out**2 * self.outputs * self.kernel**2 * self.channels // self.groups

    @property
    def name(self):
        """A short name."""
        stride = f"s{self.stride}" if self.stride > 1 else ""
        groups = f"-{self.groups} groups" if self.groups > 1 else ""
        return f"{self.model}-{self.size}-{self.channels}-{self.outputs}-{self.kernel}x{self.kernel}{stride}{groups}"


def resnet(*sizes):
    """Convolutions of ResNet-50."""
    return [Case("resnet", *x) for x in sizes]


def unet(*sizes):
    """Convolutions of the U-Net of Stable Diffusion 1.5, for an image of 512 by 512."""
    return [Case("unet", *x) for x in sizes]


def groups(*sizes):
    """Convolutions of ResNeXt-50, of RegNets and ShuffleNets."""
    return [Case("groups", *x) for x in sizes]


CASES = [
    *resnet(
        (224, 3, 64, 7, 2), (56, 64, 64, 1), (56, 64, 64, 3), (56, 64, 256, 1), (56, 256, 64, 1), (56, 256, 128, 1),
        (56, 128, 128, 3, 2), (28, 128, 512, 1), (56, 256, 512, 1, 2), (28, 512, 128, 1), (28, 128, 128, 3),
        (28, 512, 256, 1), (28, 256, 256, 3, 2), (14, 256, 1024, 1), (28, 512, 1024, 1, 2), (14, 1024, 256, 1),
        (14, 256, 256, 3), (14, 1024, 512, 1), (14, 512, 512, 3, 2), (7, 512, 2048, 1), (14, 1024, 2048, 1, 2),
        (7, 2048, 512, 1), (7, 512, 512, 3),
    ),
    *unet(
        (64, 4, 320, 3), (64, 320, 320, 3), (64, 320, 320, 1), (64, 320, 320, 3, 2), (32, 320, 640, 3),
        (32, 320, 640, 1), (32, 640, 640, 3), (32, 640, 640, 1), (32, 640, 640, 3, 2), (16, 640, 1280, 3),
        (16, 640, 1280, 1), (16, 1280, 1280, 3), (16, 1280, 1280, 1), (16, 1280, 1280, 3, 2), (8, 1280, 1280, 3),
        (8, 2560, 1280, 3), (8, 2560, 1280, 1), (16, 2560, 1280, 3), (16, 1920, 1280, 1), (32, 1920, 640, 3),
        (32, 960, 640, 3), (32, 1280, 1280, 3), (64, 640, 640, 3), (64, 960, 320, 3), (64, 640, 320, 1),
        (64, 320, 4, 3),
    ),
    *groups(
        (56, 128, 128, 3, 1, 32), (56, 256, 256, 3, 2, 32), (28, 256, 256, 3, 1, 32), (28, 512, 512, 3, 2, 32),
        (14, 512, 512, 3, 1, 32), (14, 1024, 1024, 3, 2, 32), (7, 1024, 1024, 3, 1, 32), (56, 24, 24, 3, 1, 3),
        (28, 56, 56, 3, 1, 7), (14, 152, 152, 3, 1, 19), (7, 368, 368, 3, 1, 46), (56, 64, 64, 3, 1, 4),
        (28, 160, 160, 3, 1, 10), (14, 400, 400, 3, 1, 25), (56, 72, 72, 3, 1, 3), (28, 168, 168, 3, 1, 7),
        (14, 408, 408, 3, 1, 17), (7, 912, 912, 3, 1, 38), (56, 96, 96, 3, 1, 2), (14, 432, 432, 3, 1, 9),
        (7, 1008, 1008, 3, 1, 21), (28, 512, 512, 3, 1, 8), (28, 240, 60, 1, 1, 3), (28, 60, 240, 1, 1, 3),
        (14, 480, 120, 1, 1, 3), (28, 272, 68, 1, 1, 4), (28, 384, 96, 1, 1, 8), (28, 96, 384, 1, 1, 8),
        (14, 768, 192, 1, 1, 8),
    ),
]  # fmt: skip


def operands(case, kind="f32"):
    """Images, channels last, and filters."""
    rng = np.random.default_rng(0)
    at = (case.batch, case.size, case.size, case.channels)
    shape = (case.outputs, case.channels // case.groups, case.kernel, case.kernel)
    if kind == "u8":
        return rng.integers(0, 256, at, np.uint8), rng.integers(-127, 128, shape, np.int8)
    x = rng.standard_normal(at, np.float32)
    w = rng.standard_normal(shape, np.float32) / math.sqrt(math.prod(shape[1:]))
    if kind == "bf16":
        import ml_dtypes

        return x.astype(ml_dtypes.bfloat16), w.astype(ml_dtypes.bfloat16)
    return x, w


SCALE = 2.0**-12
"""Of sums of bytes."""


# -- libraries -------------------------------------------------------------------


def options_of(case):
    """Options of portmm's call."""
    return {"stride": case.stride, "padding": case.padding, "groups": case.groups}


def scaled(acc, i):
    """The epilogue of sums of bytes."""
    del i
    return acc * SCALE


def open_portmm(kind):
    """Prepared calls of portmm."""
    import portmm as pm

    pm.set_num_threads(1)

    def prepare(case):
        x, w = operands(case, kind)
        packed, how = pm.pack_conv(w, groups=case.groups, activations=x.dtype), options_of(case)
        if kind == "u8":
            return lambda: pm.conv(x, packed, dtype=np.float32, epilogue=scaled, **how)
        return lambda: pm.conv(x, packed, **how)

    return prepare


def open_torch(kind):
    """Prepared calls of oneDNN through PyTorch."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)

    def of_bytes(case):
        x, w = (torch.from_numpy(y) for y in operands(case, kind))
        x = x.permute(0, 3, 1, 2)
        pads, strides, ones = ([y, y] for y in (case.padding, case.stride, 1))
        scales, zeros = torch.full((case.outputs,), SCALE), torch.zeros(case.outputs, dtype=torch.int32)
        ops = torch.ops.onednn
        packed = ops.qconv_prepack(w, scales, 1.0, 0, strides, pads, ones, case.groups, list(x.shape))
        how = (strides, pads, ones, case.groups, 1.0, 0, torch.float32, "none", [], "")
        return lambda: ops.qconv2d_pointwise(x, 1.0, 0, packed, scales, zeros, None, *how).permute(0, 2, 3, 1)

    def prepare(case):
        if kind == "u8":
            return of_bytes(case)
        x, w = (torch.from_numpy(np.asarray(y, np.float32)) for y in operands(case, kind))
        x, w = (y.to(torch.bfloat16) for y in (x, w)) if kind == "bf16" else (x, w)
        x = x.permute(0, 3, 1, 2)
        pads, strides, ones = ([y, y] for y in (case.padding, case.stride, 1))
        reorder, call = (
            getattr(torch.ops.mkldnn, y) for y in ("_reorder_convolution_weight", "_convolution_pointwise")
        )
        w = reorder(w.contiguous(memory_format=torch.channels_last), pads, strides, ones, case.groups, list(x.shape))
        return lambda: call(x, w, None, pads, strides, ones, case.groups, "none", [], "").permute(0, 2, 3, 1)

    return prepare


def open_onnxruntime(kind):
    """Prepared calls of ONNX Runtime, whose images have channels first, in float32."""
    assert kind == "f32"
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    def prepare(case):
        x, w = operands(case)
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        node = helper.make_node("Conv", ["x", "w"], ["y"], strides=[case.stride] * 2, pads=[case.padding] * 4,
                                group=case.groups)  # fmt: skip
        out = (case.batch, case.outputs, case.out, case.out)
        graph = helper.make_graph(
            [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)], [numpy_helper.from_array(w, "w")],
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(onnx.ModelProto.SerializeToString(model), options, ["CPUExecutionProvider"])
        return lambda: session.run(None, {"x": x})[0].transpose(0, 2, 3, 1)

    return prepare


LIBRARIES = {"portmm": open_portmm, "onednn": open_torch, "onnxruntime": open_onnxruntime}


def serve(name, kind):
    """Answer requests, one a line: prepare a case, time it for some seconds, write its result, or peak memory."""
    prepare, call = LIBRARIES[name](kind), None
    for line in sys.stdin:
        word, value = json.loads(line)
        answer = None
        if word == "prepare":
            call = prepare(CASES[value])
            call()
        elif word == "time":
            answer, end = math.inf, time.perf_counter() + value
            while True:
                start = time.perf_counter()
                call()
                now = time.perf_counter()
                answer = min(answer, now - start)
                if now > end:
                    break
        elif word == "result":
            result = call()
            np.save(value, np.asarray(result.float() if hasattr(result, "float") else result).astype(np.float32))
        print(json.dumps(answer), flush=True)


class Worker:
    """A library in a process of its own."""

    def __init__(self, name, kind):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name, "--type", kind], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, word, value):
        """The answer to a request."""
        self.process.stdin.write(json.dumps([word, value]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a worker has ended: see its message above")
        return json.loads(answer)

    def close(self):
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


# -- measurement -----------------------------------------------------------------


def measure(workers, index, rounds):
    """Seconds of each library: a list of rounds."""
    for x in workers.values():
        x.ask("prepare", index)
    times = {name: [] for name in workers}
    for i in range(rounds + 1):
        for name in sorted(workers, reverse=bool(i % 2)):
            seconds = workers[name].ask("time", 0.02 if i else 0.0)
            if i:
                times[name].append(seconds)
    return times


def ratio(times):
    """The median over rounds of the best peer's time over portmm's, and that peer."""
    peers = {name: statistics.median(x / y for x, y in zip(v, times["portmm"], strict=True))
             for name, v in times.items() if name != "portmm"}  # fmt: skip
    best = min(peers, key=peers.get)
    return peers[best], best


def worst_error(workers, folder):
    """The largest difference of results between libraries, relative to the largest element."""
    found = []
    for name, x in workers.items():
        path = Path(folder, f"{name}.npy")
        x.ask("result", str(path))
        found.append(np.load(path).astype(np.float64))
        path.unlink()
    return max(np.abs(x - found[0]).max() for x in found) / np.abs(found[0]).max()


def memory(index, kind):
    """MiB of portmm's peak resident set beyond images, packed filters and the result."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import convolutions
import portmm as pm
from portmm.runtime.cpu import runtime

def of_status(name):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(name))

case, kind = convolutions.CASES[int(sys.argv[2])], sys.argv[3]
pm.set_num_threads(1)
x, w = convolutions.operands(case, kind)
packed, how = pm.pack_conv(w, groups=case.groups, activations=x.dtype), convolutions.options_of(case)
if kind == "u8":
    how |= {"epilogue": convolutions.scaled}
out = np.zeros((case.batch, case.out, case.out, case.outputs), np.float32 if kind == "u8" else x.dtype)
pm.conv(x, packed, out, **how)
runtime().set_scratch(0)  # workspaces are given back after each call, so that the next one has them anew
pm.conv(x, packed, out, **how)
before = of_status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
pm.conv(x, packed, out, **how)
print((of_status("VmHWM") - before) / 1024)
"""
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(index), kind]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def table(rows):
    """Lines of a table."""
    for name, row in rows.items():
        best = f"{row['ratio']:5.2f} of {row['best']:12}"
        yield f"{name:34} {row['gflops']:7.1f} GFLOP/s  {best} error {row['error']:.0e}"
    every = [row["ratio"] for row in rows.values()]
    mean = math.exp(statistics.fmean(map(math.log, every)))
    yield f"geometric mean {mean:.3f}, least {min(every):.2f}, {len(every)} cases"


def main():
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--type", default="f32", choices=("f32", "bf16", "u8"), help="of images")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=110, help="after which no further case begins")
    parser.add_argument("--peers", default="onednn,onnxruntime")
    parser.add_argument("--save", default="", help="file that results are kept in")
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.type)
        return
    wanted = [i for i, x in enumerate(CASES) if args.only in x.name]
    if args.memory:
        for i in wanted:
            print(f"{CASES[i].name:34} {memory(i, args.type):6.1f} MiB")
        return
    path = Path(args.save or os.devnull)
    kept = json.loads(path.read_text()) if args.save and path.exists() else heading("convolutions", {})
    rows = kept["convolutions"].setdefault(args.type, {})
    begin = time.monotonic()
    peers = [x for x in args.peers.split(",") if x and (args.type == "f32" or x != "onnxruntime")]
    workers = {name: Worker(name, args.type) for name in ["portmm", *peers]}
    folder = tempfile.mkdtemp()
    for i in wanted:
        case = CASES[i]
        if case.name in rows or time.monotonic() - begin > args.seconds:
            continue
        times = measure(workers, i, args.rounds)
        best, peer = ratio(times)
        rate = case.flops / statistics.median(times["portmm"]) / 1e9
        rows[case.name] = {"ratio": best, "best": peer, "gflops": rate, "error": worst_error(workers, folder)}
        if args.save:
            path.write_text(json.dumps(kept, indent=1) + "\n")
    for x in workers.values():
        x.close()
    Path(folder).rmdir()
    measured = {CASES[i].name: rows[CASES[i].name] for i in wanted if CASES[i].name in rows}
    print(*table(measured) if measured else ("no case",), sep="\n")


if __name__ == "__main__":
    main()
