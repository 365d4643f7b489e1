"""Whole models: portmm beside ONNX Runtime, OpenVINO and PyTorch, in turns, with checked results.

Each runtime has a process of its own, with as many threads, and they take turns; the figure is the median of their
times. Results are compared with those of ONNX Runtime, as differences over the largest magnitude. PyTorch runs models
that have a module, as it is ("torch") and compiled with its constants ("inductor"), images with channels last.

    python bench/models.py minilm resnet50 --rounds 9 --save models.json
    python bench/models.py bert-base --precision bf16 --runtimes portmm,openvino,torch,inductor

With `--precision bf16` portmm and OpenVINO multiply in bfloat16, and PyTorch's module is in that type; ONNX Runtime, if
it is named, runs in float32.
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
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

BOUNDS = {"minilm": 1e-4, "bert-base": 1e-4, "vit-b16": 1e-4, "resnet50": 1e-4, "unet": 1e-4, "minilm-int8": 0.1,
          "resnet50-int8": 0.05}  # fmt: skip
"""Largest difference of a result over its largest magnitude. A code of a quantized activation that is rounded the other
way moves all that follow: one part in 10**7 of a layer norm's weights moves ONNX Runtime's own results by 0.045. They
differ by 0.1 from those in float32."""
NARROW = 0.05
"""The same in bfloat16, of results in float32."""


LONG = 1.0
"""Seconds of a run that is so long that none has to warm the caches before it."""


def ours(path: Path, threads: int, precision: str) -> Any:
    """A function of inputs that runs portmm."""
    from portmm import onnx
    from portmm.dispatch import config

    config.set_num_threads(threads)
    session = onnx.load(path, precision=precision)
    return lambda feeds: session.run(None, feeds)[0]


def onnx_runtime(path: Path, threads: int, precision: str) -> Any:
    """A function of inputs that runs ONNX Runtime, in float32."""
    del precision
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)[0]


def openvino(path: Path, threads: int, precision: str) -> Any:
    """A function of inputs that runs OpenVINO."""
    import openvino as ov

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    model = ov.Core().compile_model(str(path), "CPU", settings)
    request = model.create_infer_request()
    return lambda feeds: request.infer(feeds)[0]


def torch_module(path: Path, threads: int, precision: str, *, backend: Any = "") -> Any:
    """A function of inputs that runs PyTorch's module of a model, compiled by a backend if one is named."""
    import torch

    if backend == "portmm":
        import portmm.torch as ours
        from portmm.dispatch import config

        config.set_num_threads(threads)
        backend = ours.compile_graph
    torch.set_num_threads(threads)
    if path.stem == "unet":
        import diffusion

        module = diffusion.module_of(path).to(memory_format=torch.channels_last)
    else:
        from model_modules import module_of

        module = module_of(path)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    module = module.to(kind)
    if backend == "inductor":
        import torch._inductor.config as settings

        settings.freezing = True
    call = torch.compile(module, backend=backend) if backend else module

    def run(feeds: Any) -> Any:
        values = [torch.from_numpy(x) for x in feeds.values()]
        values = [x.to(kind) if x.is_floating_point() else x for x in values]
        with torch.inference_mode(), torch.no_grad():
            return call(*values).float().numpy()

    return run


RUNTIMES = {
    "portmm": ours, "onnxruntime": onnx_runtime, "openvino": openvino, "torch": torch_module,
    "inductor": partial(torch_module, backend="inductor"), "portmm-torch": partial(torch_module, backend="portmm"),
}  # fmt: skip
OURS = ("portmm", "portmm-torch")


def serve(name: str, options: argparse.Namespace) -> None:
    """Answer requests, one a line: the seconds of a run, of the first with the path that its result is written to."""
    import model_graphs
    import numpy as np

    feeds = model_graphs.feeds_of(options.folder / f"{name}.onnx", batch=options.batch, length=options.length)
    begin, run = time.perf_counter(), None
    for line in sys.stdin:
        try:
            if run is None:
                run = RUNTIMES[options.serve](options.folder / f"{name}.onnx", options.threads, options.precision)
                np.save(line.strip(), run(feeds))
            else:
                begin = time.perf_counter()
                run(feeds)
            print(time.perf_counter() - begin, flush=True)
        except ImportError as error:
            print(f"{options.serve}: {error}", file=sys.stderr)
            return


class Worker:
    """A runtime of a model in a process of its own."""

    def __init__(self, name: str, runtime: str, folder: Path, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, name, "--serve", runtime, "--folder", str(folder)]
        command += ["--precision", options.precision]
        command += ["--batch", str(options.batch), "--length", str(options.length), "--threads", str(options.threads)]
        self.process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, text: str = "") -> float | None:
        """Seconds of a run; None if the runtime is not installed."""
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            with suppress(ValueError):  # what libraries print
                return float(line)
        return None

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def peak(name: str, runtime: str, path: Path, options: argparse.Namespace) -> float:
    """Mebibytes that a process of its own took at most for a runtime, a model and some runs."""
    command = [sys.executable, __file__, name, "--peak", runtime, "--folder", str(path.parent)]
    command += ["--precision", options.precision]
    command += ["--batch", str(options.batch), "--length", str(options.length), "--threads", str(options.threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak(name: str, options: argparse.Namespace) -> None:
    """Run a model a few times, and print the peak of the process."""
    import model_graphs

    path = options.folder / f"{name}.onnx"
    feeds = model_graphs.feeds_of(path, batch=options.batch, length=options.length)
    run = RUNTIMES[options.peak](path, options.threads, options.precision)
    for _ in range(3):
        run(feeds)
    status = Path("/proc/self/status").read_text()  # what getrusage says begins with the peak of the parent
    print(int(status.split("VmHWM:")[1].split()[0]) / 1024)


def opened(name: str, options: argparse.Namespace, folder: Path) -> tuple[dict[str, Worker], Any, Any]:
    """The runtimes of a model, with the seconds to their first results, and these."""
    import numpy as np

    runs: dict[str, Worker] = {}
    first, results = {}, {}
    for runtime in options.runtimes.split(","):
        worker, result = Worker(name, runtime, folder, options), folder / f"{runtime}.npy"
        seconds = worker.ask(str(result))
        if seconds is None:
            continue
        runs[runtime], first[runtime], results[runtime] = worker, seconds, np.load(result)
        result.unlink()
    return runs, first, results


def measured(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Times and differences of one model."""
    import model_graphs
    import numpy as np

    path = folder / f"{name}.onnx"
    if not path.exists():
        model_graphs.write(name, path)
    runs, first, results = opened(name, options, folder)
    until = time.perf_counter() + options.warm
    while time.perf_counter() < until:  # until races between schedules are over
        for x in OURS:
            if x in runs:
                runs[x].ask()
    times: dict[str, list[float]] = {x: [] for x in runs}
    for i in range(options.rounds):
        for runtime in [*runs][i % len(runs) :] + [*runs][: i % len(runs)]:
            seconds = runs[runtime].ask() or math.inf
            times[runtime].append(seconds if seconds > LONG else runs[runtime].ask() or math.inf)
    for x in runs.values():
        x.close()
    want = results.get("onnxruntime", results["portmm"])
    differences = {x: float(np.abs(y - want).max() / np.abs(want).max()) for x, y in results.items()}
    worst = max(differences[x] for x in OURS if x in differences)
    if worst > (BOUNDS[name] if options.precision == "f32" else NARROW):
        raise SystemExit(f"{name}: portmm differs by {worst:.2e} of the largest result")
    peers = [x for x in runs if x not in OURS]
    ratio = statistics.median(
        min(times[x][i] for x in peers) / times["portmm"][i] for i in range(options.rounds)
    ) if peers else None  # fmt: skip
    return {
        "model": name, "precision": options.precision, "batch": options.batch, "length": options.length,
        "threads": options.threads,
        "milliseconds": {x: round(1e3 * statistics.median(y), 3) for x, y in times.items()},
        "peak_mebibytes": {x: peak(name, x, path, options) for x in runs} if options.memory else {},
        "ratio": ratio, "first_seconds": first, "differences": differences,
    }  # fmt: skip


def main() -> None:
    """Measure models, and print a line for each."""
    import model_graphs

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[x for x in model_graphs.MODELS if x != "unet"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128, help="tokens of an item")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="f32", choices=("f32", "bf16"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", type=float, default=1.0, help="seconds of portmm's calls before the times")
    parser.add_argument("--runtimes", default="portmm,onnxruntime,openvino,torch,inductor")
    parser.add_argument("--folder", type=Path, help="where models are written; by default a temporary one")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--memory", action="store_true", help="the peak of a process of each runtime, too")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--peak", help="print the peak of this process for this runtime, and measure nothing else")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    if options.serve:
        serve(options.models[0], options)
        return
    if options.peak:
        print_peak(options.models[0], options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        rows = []
        for name in options.models:
            row = measured(name, options, options.folder or Path(temporary))
            rows.append(row)
            cells = ", ".join(f"{x} {y:.2f} ms" for x, y in row["milliseconds"].items())
            print(f"{name}: {cells}; ratio {row['ratio']:.3f}" if row["ratio"] else f"{name}: {cells}", flush=True)
            print(f"  first result {row['first_seconds']}, differences {row['differences']}", flush=True)
            if options.memory:
                print(f"  peak in MiB {row['peak_mebibytes']}", flush=True)
    if options.save:
        keep(options.save, rows)


def keep(path: Path, rows: list[dict[str, Any]]) -> None:
    """Store rows in a file of results, in the place of those of the same models and settings."""
    from result_tables import heading

    kept = json.loads(path.read_text()) if path.exists() else heading("models", [])
    setting = itemgetter("model", "precision", "batch", "length", "threads")
    new = {setting(x): x for x in rows}
    kept["models"] = [x for x in kept["models"] if setting(x) not in new] + rows
    path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
