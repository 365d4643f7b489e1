"""Runs cases of a device in a process of their own: what crashes or hangs there ends one case, not the others.

The worker reads a list of cases, and prints a line of JSON before and after each. A worker that dies, or that says
nothing for too long, is replaced by one for the cases that are left. Results are saved after each row.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

PATIENCE = 100.0
"""Seconds that a case may take."""
START = 90.0
"""Seconds in which a worker must have begun."""


@dataclass
class Report:
    """What came out.

    Attributes:
        device: what the driver says of it, and versions.
        rows: of cases.
        surveys: of all candidates of some products.
        sanitizer: of each of its tools.
        bars: what was reached of each.
        notes: what is measured once.
    """

    device: dict = field(default_factory=dict)
    rows: list = field(default_factory=list)
    surveys: list = field(default_factory=list)
    sanitizer: list = field(default_factory=list)
    bars: list = field(default_factory=list)
    notes: dict = field(default_factory=dict)

    def save(self, path):
        """Write all of it, in one step."""
        if path:
            draft = Path(f"{path}.part")
            draft.write_text(json.dumps(vars(self), indent=1) + "\n")
            draft.replace(path)


def say(kind, value):
    """One line of a worker."""
    sys.stdout.write(f"{json.dumps({'kind': kind, 'value': value})}\n")
    sys.stdout.flush()


def _lines(process, into):
    """What a worker says, as it does; its end is None."""
    for line in process.stdout:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict) and "kind" in found:
            into.put(found)
        elif line.strip():
            print(line, end="")
    into.put(None)


def run(command, jobs, report, *, budget, save=None, patience=PATIENCE, start=START, told=print):
    """Run jobs, dicts with a "name", in workers begun by `command`; what is not run for want of time is noted."""
    ends, left = time.monotonic() + budget, list(jobs)
    while left and time.monotonic() < ends:
        before = len(left)
        left = _worker(command, left, report, ends, save, patience, start, told)
        if len(left) == before:
            report.notes["stopped"] = "a worker ended before its first case"
            break
    if left:
        report.notes["not run"] = [x["name"] for x in left]
        told(f"{len(left)} cases were not run")
    report.save(save)


def _worker(command, left, report, ends, save, patience, start, told):  # noqa: PLR0917 - all that a run has
    """Run cases in one worker until it ends; what is left."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lines = queue.Queue()
    reader = threading.Thread(target=_lines, args=(process, lines), daemon=True)
    reader.start()
    running, limit, why = None, start, ""
    try:
        _give(process, left)
        while True:
            try:
                found = lines.get(timeout=max(0.05, min(limit, ends - time.monotonic())))
            except queue.Empty:
                late = time.monotonic() >= ends
                why = "the time of this run was over" if late else f"nothing was heard for {limit:.0f} s"
                break
            if found is None:
                why = f"the worker ended with status {process.wait()}"
                break
            kind, value = found["kind"], found["value"]
            if kind == "begin":
                running, limit = value, patience
            elif kind == "device":
                report.device |= value
            elif kind == "note":
                report.notes |= value
            elif kind in ("rows", "surveys"):
                getattr(report, kind).append(value)
                told(spelt(value))
            if kind in ("rows", "surveys", "note") and running:
                left = [x for x in left if x["name"] != running]
                running = None
                report.save(save)
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
    if running is not None and "over" not in why:
        case = next(x for x in left if x["name"] == running)
        crashed = {**case["case"], "name": running, "state": "crashed", "why": why}
        (report.rows if case["do"] == "measure" else report.surveys).append(crashed)
        told(f"CRASHED {running}: {why}")
        left = [x for x in left if x["name"] != running]
    report.save(save)
    return left


def _give(process, jobs):
    try:
        process.stdin.write(json.dumps(jobs))
        process.stdin.close()
    except BrokenPipeError:
        pass  # its end is reported


def spelt(row):
    """A row, or a survey, in a line."""
    if "correlation" in row:
        text = f"{row['name']}: {len(row['rows'])} of {row['candidates']} candidates"
        return text if row["correlation"] is None else (
            f"{text}, rank correlation {row['correlation']:.2f}, chosen at {row['chosen']:.2f} of the best"
        )  # fmt: skip
    if row.get("state") != "ok":
        return f"{row.get('state', '').upper()} {row['name']}: {row.get('why', '')}"
    right = f"error {row['error']:.2f} of the bound" if row["right"] else f"WRONG, error {row['error']:.3g}"
    if "portmm" not in row["seconds"]:
        return f"{row['name']}: {right}"
    suffix = "_graph" if row.get("graph") else ""
    times = row.get("graph") or row["seconds"]
    shown = ", ".join(f"{name} {1e6 * x:.1f} us" for name, x in times.items())
    ratio = f", {row[f'ratio{suffix}']:.3f} of the best peer's speed" if row[f"ratio{suffix}"] else ""
    return f"{row['name']}: {shown}{ratio}, {row[f'tflops{suffix}']:.1f} TFLOP/s, {right}"


# -- compute-sanitizer ----------------------------------------------------------------------

TOOLS = ("memcheck", "racecheck", "synccheck")
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
FOUND = 9
"""The status that the sanitizer is to end with if it finds something."""


def sanitized(tool, command, *, seconds=240.0, sanitizers=SANITIZERS):
    """Run a command under one tool, on portmm's kernels alone; what was found."""
    import shutil

    found = next((path for x in sanitizers if (path := shutil.which(x))), None)
    if found is None:
        return {"tool": tool, "state": "missing", "why": "compute-sanitizer is not installed"}
    words = [found, "--tool", tool, "--kernel-regex", "kns=portmm", "--error-exitcode", str(FOUND), *command]
    # Without a pool, every array ends where its memory does.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=seconds, env=environment, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        return {"tool": tool, "state": "late", "why": f"after {seconds:.0f} s", "said": str(error.stdout)[-2000:]}
    state = {0: "clean", FOUND: "errors"}.get(done.returncode, "failed")
    said = [x for x in done.stdout.splitlines() if x.startswith("=========")]
    checked = sum('"kind": "rows"' in x or '"kind": "surveys"' in x for x in done.stdout.splitlines())
    state = state if checked or state != "clean" else "failed"
    record = {"tool": tool, "state": state, "cases": checked, "summary": said[-1] if said else ""}
    return record if state == "clean" else record | {"said": "\n".join(said[:80]), "errors": done.stderr[-2000:]}
