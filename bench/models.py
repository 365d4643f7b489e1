"""Whole models: portmm beside ONNX Runtime and OpenVINO, in turns, with checked results.

Each runtime has a session of its own in one process, with as many threads, and they take turns; the figure is the
median of their times. Results are compared with those of ONNX Runtime, as differences over the largest magnitude.

    python bench/models.py minilm resnet50 --rounds 9 --save models.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

BOUNDS = {"minilm": 1e-4, "bert-base": 1e-4, "vit-b16": 1e-4, "resnet50": 1e-4, "minilm-int8": 0.1}
"""Largest difference of a result over its largest magnitude. A code of a quantized activation that is rounded the other
way moves all that follow: one part in 10**7 of a layer norm's weights moves ONNX Runtime's own results by 0.045. They
differ by 0.1 from those in float32."""


def ours(path: Path, threads: int) -> Any:
    """A function of inputs that runs portmm."""
    from portmm import onnx
    from portmm.dispatch import config

    config.set_num_threads(threads)
    session = onnx.load(path)
    return lambda feeds: session.run(None, feeds)[0]


def onnx_runtime(path: Path, threads: int) -> Any:
    """A function of inputs that runs ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)[0]


def openvino(path: Path, threads: int) -> Any:
    """A function of inputs that runs OpenVINO in float32."""
    import openvino as ov

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    model = ov.Core().compile_model(str(path), "CPU", settings)
    request = model.create_infer_request()
    return lambda feeds: request.infer(feeds)[0]


RUNTIMES = {"portmm": ours, "onnxruntime": onnx_runtime, "openvino": openvino}


def peak(name: str, runtime: str, path: Path, options: argparse.Namespace) -> float:
    """Mebibytes that a process of its own took at most for a runtime, a model and some runs."""
    command = [sys.executable, __file__, name, "--peak", runtime, "--folder", str(path.parent)]
    command += ["--batch", str(options.batch), "--length", str(options.length), "--threads", str(options.threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak(name: str, options: argparse.Namespace) -> None:
    """Run a model a few times, and print the peak of the process."""
    import model_graphs
    import onnx

    path = options.folder / f"{name}.onnx"
    model = onnx.load(path, load_external_data=False)
    feeds = model_graphs.feeds(model, batch=options.batch, length=options.length)
    del model
    run = RUNTIMES[options.peak](path, options.threads)
    for _ in range(3):
        run(feeds)
    status = Path("/proc/self/status").read_text()  # what getrusage says begins with the peak of the parent
    print(int(status.split("VmHWM:")[1].split()[0]) / 1024)


def measured(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Times and differences of one model."""
    import model_graphs
    import numpy as np
    import onnx

    path = folder / f"{name}.onnx"
    if not path.exists():
        model_graphs.write(name, path)
    model = onnx.load(path, load_external_data=False)
    feeds = model_graphs.feeds(model, batch=options.batch, length=options.length)
    del model
    runs, first, results = {}, {}, {}
    for runtime in options.runtimes.split(","):
        with suppress(ImportError):
            begin = time.perf_counter()
            run = RUNTIMES[runtime](path, options.threads)
            results[runtime] = np.array(run(feeds))
            first[runtime] = time.perf_counter() - begin
            runs[runtime] = run
    until = time.perf_counter() + options.warm
    while time.perf_counter() < until:  # until races between schedules are over
        runs["portmm"](feeds)
    times: dict[str, list[float]] = {x: [] for x in runs}
    for i in range(options.rounds):
        for runtime in [*runs][i % len(runs) :] + [*runs][: i % len(runs)]:
            runs[runtime](feeds)
            begin = time.perf_counter()
            runs[runtime](feeds)
            times[runtime].append(time.perf_counter() - begin)
    want = results.get("onnxruntime", results["portmm"])
    differences = {x: float(np.abs(y - want).max() / np.abs(want).max()) for x, y in results.items()}
    if differences["portmm"] > BOUNDS[name]:
        raise SystemExit(f"{name}: portmm differs by {differences['portmm']:.2e} of the largest result")
    peers = [x for x in runs if x != "portmm"]
    ratio = statistics.median(
        min(times[x][i] for x in peers) / times["portmm"][i] for i in range(options.rounds)
    ) if peers else None  # fmt: skip
    return {
        "model": name, "batch": options.batch, "length": options.length, "threads": options.threads,
        "milliseconds": {x: round(1e3 * statistics.median(y), 3) for x, y in times.items()},
        "peak_mebibytes": {x: peak(name, x, path, options) for x in runs} if options.memory else {},
        "ratio": ratio, "first_seconds": first, "differences": differences,
    }  # fmt: skip


def main() -> None:
    """Measure models, and print a line for each."""
    import model_graphs

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(model_graphs.MODELS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128, help="tokens of an item")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", type=float, default=1.0, help="seconds of portmm's calls before the times")
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument("--folder", type=Path, help="where models are written; by default a temporary one")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--memory", action="store_true", help="the peak of a process of each runtime, too")
    parser.add_argument("--peak", help="print the peak of this process for this runtime, and measure nothing else")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
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
        options.save.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
