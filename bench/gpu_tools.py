"""NVIDIA's tools over kernels of portmm: compute-sanitizer, and counters by ncu, each given up in time.

compute-sanitizer 2025.3 and later, of CUDA 13: `--kernel-name` takes pairs of a key and a value. ncu leaves clocks as
they are. Where a tool is missing, that is said, and nothing fails.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import gpu_run

TOOLS = ("memcheck", "racecheck", "synccheck")
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
NCUS = (
    "ncu",
    "/usr/local/cuda/bin/ncu",
    *sorted(map(str, Path("/opt/nvidia/nsight-compute").glob("*/ncu")), reverse=True),
)
FOUND = 9
"""The status that the sanitizer is to end with if it finds something."""
MOST_SAID = 60_000
"""Characters of a tool's words that are kept."""
METRICS = (
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.max",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes.sum",
    "lts__t_sector_hit_rate.pct",
    "l1tex__t_sector_hit_rate.pct",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block",
    "launch__grid_size",
    "launch__block_size",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
    "launch__waves_per_multiprocessor",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "smsp__sass_inst_executed_op_local.sum",
)
"""Counters that are kept of what ncu collects, and all its reasons for warps that wait."""
STALLS = "smsp__average_warps_issue_stalled_"


def installed(names):
    """The first of some programs that is there, or None."""
    return next((path for x in names if (path := shutil.which(x))), None)


def heard(words, seconds, environment=None):
    """Status and words of a process; the status is None if it was killed for taking too long."""
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0, env=environment
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        gpu_run.ended(process)
        found = []
        for file in (out, err):
            file.seek(0)
            found.append(file.read())
    return status, *found


def sanitized(tool, command, *, seconds=240.0, sanitizers=None):
    """Run a command under one tool, on portmm's kernels alone; what was found."""
    found = installed(SANITIZERS if sanitizers is None else sanitizers)
    if found is None:
        return {"tool": tool, "state": "missing", "why": "compute-sanitizer is not installed"}
    words = [
        found,
        "--tool",
        tool,
        "--kernel-name",
        "kernel_substring=portmm",
        "--error-exitcode",
        str(FOUND),
        *command,
    ]
    # Without a pool, every array ends where its memory does.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    status, out, err = heard(words, seconds, environment)
    said = [x for x in out.splitlines() if x.startswith("=========")]
    checked = sum('"kind": "rows"' in x or '"kind": "surveys"' in x for x in out.splitlines())
    record = {"tool": tool, "cases": checked, "summary": said[-1] if said else ""}
    if status is None:
        return record | {"state": "late", "why": f"after {seconds:.0f} s", "said": out[-2000:]}
    state = {0: "clean", FOUND: "errors"}.get(status, "failed")
    state = state if checked or state != "clean" else "failed"
    if state == "clean":
        return record | {"state": state}
    return record | {"state": state, "said": "\n".join(said[:200])[:MOST_SAID], "errors": err[-2000:]}


def profiled(name, command, *, seconds=60.0, keep=None, ncus=None):
    """Counters of the last portmm kernels that a command launches; `keep`: where ncu's own report is left."""
    found = installed(NCUS if ncus is None else ncus)
    if found is None:
        return {"name": name, "state": "missing", "why": "ncu is not installed"}
    words = [
        found,
        "--kernel-name",
        "regex:portmm",
        "--clock-control",
        "none",
        "--set",
        "full",
        "--csv",
        "--page",
        "raw",
    ]
    status, out, err = heard([*words, *command], seconds)
    kernels = counters(out)
    record = {"name": name, "state": "ok" if kernels else "failed", "kernels": kernels}
    if keep and kernels:
        Path(keep).write_text(out[: MOST_SAID * 20])
    if kernels:
        return record
    why = f"after {seconds:.0f} s" if status is None else f"status {status}"
    return record | {"why": why, "said": out[-1500:], "errors": err[-1500:]}


def counters(text):
    """Kernels of ncu's page "raw" as CSV: a line of names, one of units, and one for each launch."""
    lines = [x for x in text.splitlines() if x.startswith('"')]
    table = list(csv.reader(lines))
    if len(table) < 3:
        return []
    head, units, *rows = table
    found = []
    for row in rows:
        said = dict(zip(head, row, strict=False))
        unit = dict(zip(head, units, strict=False))
        wanted = [x for x in head if x in METRICS or x.startswith(STALLS)]
        found.append(
            {
                "kernel": said.get("Kernel Name", ""),
                "grid": said.get("Grid Size", ""),
                "block": said.get("Block Size", ""),
            }
            | {x: f"{said[x]} {unit.get(x, '')}".strip() for x in wanted if said.get(x)}
        )
    return found
