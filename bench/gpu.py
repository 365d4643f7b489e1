"""Checks and times kernels on this machine's device, beside the libraries that are there, within minutes.

    python gpu.py --save results/h200-gpu.json          # a CUDA GPU, with PyTorch and CuPy
    python gpu.py --section prefill --section decode    # parts
    python gpu.py --schedules 4096x4096x4096:bf16:col   # all candidates: predicted beside measured
    python gpu.py --sanitize                            # small cases under compute-sanitizer
    python gpu.py --device opencl --smoke               # OpenCL on this processor, a few small cases

Each case is checked against float64 before it is timed. Times are medians of turns that
alternate between portmm and its peers, on random data, with operands rotated through more
memory than twice L2. Cases run in a process of their own, the most important first; what is found is
saved after each, and what the budget leaves no time for is named. `gpu_cases` has the cases and the bars.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import gpu_arrays
import gpu_cases
import gpu_compile
import gpu_measure
import gpu_peers
import gpu_run
import gpu_schedules
import gpu_tools
import numpy as np

from portmm.build import cache_contents
from portmm.build.nvrtc import find_nvrtc
from portmm.comparison.cublaslt import LIMIT
from portmm.comparison.limit import nvidia_smi
from portmm.dispatch import machine
from portmm.errors import NoCompilerError
from portmm.ops import grid_product
from portmm.spec.dtype import BY_NAME
from portmm.version import VERSION

SURVEYED = ("4096x4096x4096:bf16:col", "8192x8192x8192:bf16:col", "16x4096x4096:bf16:col", "4096x4096x4096:s8:col")
KINDS = [f"200x264x328:{dtype}:{b}" for dtype in ("f32", "bf16", "f16", "s8", "e4m3") for b in ("col", "row")]
"""Products of which every kind of kernel is checked, beside the small cases."""
QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"


def opened(device, *, peers=True, search=LIMIT):
    """Arrays of a device, and its peers; cublasLt's search takes so many seconds of a case."""
    if device == "described":
        return gpu_compile.rehearsing(), gpu_peers.NoPeers()
    if device == "cuda":
        on = gpu_arrays.Torch()
        return on, gpu_peers.TorchPeers(on, limit=search) if peers else gpu_peers.NoPeers()
    on = gpu_arrays.OpenCl()
    return on, gpu_peers.ClPeers(on) if peers else gpu_peers.NoPeers()


def clocks():
    """The device's state as nvidia-smi reports it now."""
    return nvidia_smi(QUERY)


def machine_of(on):
    """The device of arrays, as portmm sees it."""
    probe = on.random((8, 8), "f32", 0)
    return machine.machine_of(grid_product.adopted(probe, probe).a)


def facts(on, peers, machine):
    """The device, and versions of all that takes part."""
    versions = {"portmm": VERSION, "python": platform.python_version(), "numpy": np.__version__, **peers.versions()}
    if on.name == "cuda":
        import cupy

        try:
            compiler = find_nvrtc().name
        except NoCompilerError as error:
            compiler = str(error)
        versions |= {"cupy": cupy.__version__, "nvrtc": compiler}
    return {
        "target": machine.target.name, "title": machine.target.title, "host": platform.platform(),
        "versions": versions, "clocks": clocks() if on.name == "cuda" else {}, **asdict(machine.target.device),
        **({"facts": gpu_compile.device_facts()} if on.name == "cuda" else {}),
    }  # fmt: skip


def product(text):
    """The case that "MxNxK:type:layout of B" names."""
    size, dtype, b = text.split(":")
    return gpu_cases.Case("schedules", "dense", *map(int, size.split("x")), dtype, b)


def peers_of(given):
    """Whether a worker needs others to compare with."""
    return not (given.checks or given.no_peers)


def work(on, peers, jobs, given):
    """Run jobs as they come, and say what is found."""
    machine = machine_of(on)
    level = machine.target.level("L2")
    l2 = level.bytes if level else 1 << 22
    gpu_run.say("device", facts(on, peers, machine))
    for job in jobs:
        kind = job["do"]
        gpu_run.say("begin", job["name"])
        case = gpu_cases.Case(**job["case"]) if job["case"] else None
        if kind == "note":
            gpu_run.say("note", _notes(on, given))
        elif kind == "measure":
            checks, load = given.checks or job.get("check", False), job.get("load", False)
            found = gpu_measure.measure(on, peers, case, l2=l2, turns=given.turns, check_only=checks, load=load)
            gpu_run.say("rows", found | {"name": job["name"]})
            if found["state"] == "failed" and not well(on):
                # The context that a device's fault leaves behind fails every further case: another process goes on.
                raise SystemExit(gpu_run.UNWELL)
        else:
            turns, l2_used = (0, 1) if kind == "check" else (5, l2)
            found = _survey(on, case, l2_used, turns, given, job.get("skip", ()))
            if found["state"] == "failed" and not well(on):
                raise SystemExit(gpu_run.UNWELL)  # the survey is begun again without what was tried last
            gpu_run.say("surveys", found | {"name": job["name"]})
        on.free()


def well(on):
    """Whether the device still computes."""
    try:
        on.wait()
        x = on.random((8, 8), "f32", 0)
        on.wide(x)
        on.wait()
    except Exception:  # noqa: BLE001 - whatever a broken context raises
        return False
    return True


def _survey(on, case, l2, turns, given, skip):  # noqa: PLR0917 - all that a survey has
    """All candidates of a case, or why there are none."""
    found = {"name": case.name, "state": "ok"}
    if case.dtype not in BY_NAME:
        return found | {"state": "refused", "why": f"portmm has no elements of {case.dtype}"}
    try:
        more = gpu_schedules.survey(
            on, case, l2=l2, turns=turns, most=given.most, threads=given.threads, skip=skip, said=True
        )
    except Exception as error:  # noqa: BLE001 - one product must not end the others
        return found | {"state": "failed", "why": f"{type(error).__name__}: {error}"}
    return found | more


def _notes(on, given):
    """Facts of the device and the run that are measured once."""
    asked = {
        "cache": lambda: {"cache": cache_contents.cache_size()},
        "call_seconds": lambda: {"call_seconds": gpu_measure.overhead(on, 5 if given.smoke else 50)},
    }
    if on.name == "cuda":
        size = 1 << 20 if given.smoke else 1 << 30
        asked["copy_gbs"] = lambda: {"copy_gbs": gpu_measure.bandwidth(on, size) / 1e9}
    found = {}
    for name, ask in asked.items():
        try:
            found |= ask()
        except Exception as error:  # noqa: BLE001 - one note must not end the others
            found |= {name: f"{type(error).__name__}: {error}"[:300]}
    return found


def jobs_of(given):
    """The jobs of a run, the most important first."""
    if given.schedules is not None:
        return [_job("survey", product(text)) for text in given.schedules or SURVEYED]
    every = (gpu_cases.tiny if given.smoke or given.checks else gpu_cases.cases)(given.section)
    if given.device == "opencl" and not (given.smoke or given.checks or given.section):
        every = gpu_cases.for_processors()
    found = [_job("measure", case) for case in every]
    if not given.checks:
        found.insert(len(gpu_cases.SECTIONS["squares"]()), {"do": "note", "name": "notes", "case": {}})
    return found + ([_job("check", product(text)) for text in KINDS] if given.checks or given.smoke else [])


def _job(kind, case):
    name = case.name if kind == "measure" else f"{kind} {case.name}"
    return {"do": kind, "name": name, "case": asdict(case)}


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "opencl", "described"), default="cuda")
    parser.add_argument("--section", action="append", default=[], choices=tuple(gpu_cases.SECTIONS))
    parser.add_argument("--smoke", action="store_true", help="every kind of case at small sizes")
    parser.add_argument("--checks", action="store_true", help="small cases, checked and not timed")
    parser.add_argument("--sanitize", action="store_true", help="those, under each tool of compute-sanitizer")
    parser.add_argument("--schedules", nargs="*", metavar="MxNxK:TYPE:B", help="candidates of products")
    parser.add_argument("--most", type=int, default=36, help="candidates that are measured of each product")
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--search", type=float, default=LIMIT, help="seconds of cublasLt's search for each case")
    parser.add_argument("--no-peers", action="store_true", help="nothing to compare with")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compiler", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def command(given, *more):
    """The command that starts a worker."""
    words = [sys.executable, str(Path(__file__)), "--device", given.device, "--worker", "--turns", str(given.turns)]
    words += ["--most", str(given.most), "--threads", str(given.threads), "--search", str(given.search)]
    return [*words, *(f"--{x}" for x in ("smoke", "checks", "no-peers") if getattr(given, x.replace("-", "_"))), *more]


def sanitize(given, report):
    """Small cases under each tool, each in what time is left."""
    ends = time.monotonic() + given.budget
    jobs = Path(f"{given.save or 'gpu'}.jobs")
    jobs.write_text(json.dumps(jobs_of(given)))
    try:
        for i, tool in enumerate(gpu_tools.TOOLS):
            left = max(30.0, (ends - time.monotonic()) / (len(gpu_tools.TOOLS) - i))
            words = command(given, "--jobs", str(jobs))
            found = gpu_tools.sanitized(tool, words, seconds=left)
            report.sanitizer.append(found)
            print(f"{tool}: {found['state']} {found.get('summary', '')}{found.get('why', '')}")
            report.save(given.save)
    finally:
        jobs.unlink()


def ended(report, *, tools=True):
    """Say which bars are met; whether all that ran is right, and each tool is there unless none is needed."""
    report.bars = gpu_cases.judged(report.rows)
    for bar in report.bars:
        reached = "" if bar["reached"] is None else f" {bar['reached']:.3f}"
        print(f"{bar['state']}: {bar['bar']} >= {bar['least']}:{reached} ({bar['measured']} of {bar['of']})")
    wrong = [x["name"] for x in report.rows if x.get("right") is False or x["state"] in ("failed", "crashed")]
    wrong += [x["name"] for x in report.surveys if x["state"] in ("failed", "crashed")]
    wrong += [x["name"] for x in report.surveys if any(y["right"] is False for y in x.get("rows", ()))]
    wrong += [x["tool"] for x in report.sanitizer if x["state"] != "clean" and (tools or x["state"] != "missing")]
    if wrong:
        print(f"WRONG: {', '.join(wrong)}")
    return not wrong


def main(argv=None):
    given = arguments(argv)
    if given.compiler:
        gpu_compile.work(json.loads(sys.stdin.readline()), gpu_run.given_jobs(), given)
        return 0
    if given.worker:
        on, peers = opened(given.device, peers=peers_of(given), search=given.search)
        work(on, peers, json.loads(given.jobs.read_text()) if given.jobs else gpu_run.given_jobs(), given)
        return 0
    began, report = time.monotonic(), gpu_run.Report()
    if given.sanitize:
        given.checks = True
        sanitize(given, report)
    else:
        gpu_run.run(command(given), jobs_of(given), report, budget=given.budget, save=given.save)
    right = ended(report)
    report.notes["seconds"] = time.monotonic() - began
    report.save(given.save)
    print(json.dumps(report.notes, indent=1))
    return 0 if right and not (given.smoke and "stopped" in report.notes) else 1


if __name__ == "__main__":
    sys.exit(main())
