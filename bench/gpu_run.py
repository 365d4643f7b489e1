"""Runs cases of a device in a process of their own: what crashes or hangs there ends one case, not the others.

The worker is given one case at a time, a line of JSON, and answers with lines of JSON. A worker that dies, or that says
nothing for too long, is replaced by one for the cases that are left. Cases may belong to phases, each with a limit on
its time; what a phase had no time for is run when all others are done. Results are saved after each row.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

PATIENCE = 100.0
"""Seconds that a case may take."""
START = 90.0
"""Seconds in which a worker must have begun."""
END = 5.0
"""Seconds for a worker to end by itself, and for one that was killed to be gone."""
STARTS = 2
"""Workers in a row that end before a case is done, after which there is no further one."""
UNWELL = 5
"""The status of a worker that ends because the device has failed it."""
SKIPPED, RETRIED = 4, 12
"""Schedules of a survey that may crash before it is given up, and surveys that are begun again, of a whole run."""


@dataclass
class Report:
    """The outcome of a run.

    Attributes:
        device: what the driver says of it, and versions.
        rows: of cases.
        surveys: of all candidates of some products.
        sanitizer: of each of its tools.
        bars: what was reached of each.
        notes: what is measured once.
        profiles: counters of single kernels.
    """

    device: dict = field(default_factory=dict)
    rows: list = field(default_factory=list)
    surveys: list = field(default_factory=list)
    sanitizer: list = field(default_factory=list)
    bars: list = field(default_factory=list)
    notes: dict = field(default_factory=dict)
    profiles: list = field(default_factory=list)

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


def given_jobs():
    """Jobs that a worker is given, one line each, as they come."""
    for line in iter(sys.stdin.readline, ""):
        if line.strip():
            yield json.loads(line)


def started(command, **more):
    """A process that leads a group of its own, so that `ended` ends what it has started as well."""
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace", process_group=0, **more
    )


def ended(process):
    """Kill a process and its children; one that the driver holds is left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(END)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end")


def closed(process):
    """Close both ends of what was said to and by a process."""
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            stream.close()


def _lines(process, into):
    """A worker's messages as they arrive; None at its end."""
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


class Runner:
    """Jobs, dicts with a "name", for workers that `command` begins.

    Args:
        command: begins a worker.
        report: what is found goes there.
        save: where the report is kept.
        patience: seconds of silence that end a case.
        start: seconds in which a worker must begin.
        told: is given a line of text for each result.
        caps: seconds of each phase; jobs say theirs as "phase".
        load: samples of clocks and power, with `between`.
        began: is called with what a worker says of the device.
        before: is called with each job before it is given.
    """

    def __init__(
        self, command, report, *, save=None, patience=PATIENCE, start=START, told=print, caps=None, load=None,
        began=None, before=None,
    ):  # fmt: skip
        self.command, self.report, self.save = command, report, save
        self.patience, self.start, self.told = patience, start, told
        self.caps, self.load, self.began, self.before = caps or {}, load, began, before
        self.spent = dict.fromkeys(self.caps, 0.0)
        self.left, self.retried = [], 0
        self.running, self.since, self.trying, self.parts, self.windows = None, 0.0, None, [], []

    def run(self, jobs, *, budget):
        """Run jobs; what is not run for want of time is noted."""
        ends, self.left, failures = time.monotonic() + budget, list(jobs), 0
        while self.left and time.monotonic() < ends and failures < STARTS:
            before = len(self.report.rows) + len(self.report.surveys) + len(self.report.notes)
            self.worker(ends)
            done = len(self.report.rows) + len(self.report.surveys) + len(self.report.notes)
            failures = failures + 1 if done == before else 0
        if failures >= STARTS:
            self.report.notes["stopped"] = "a worker ended before its first case"
        if self.left:
            self.report.notes["not run"] = [x["name"] for x in self.left]
            self.told(f"{len(self.left)} cases were not run")
        else:
            self.report.notes.pop("not run", None)
        if self.spent:
            self.report.notes["phases"] = {name: round(x, 3) for name, x in self.spent.items()}
        self.report.save(self.save)

    def next(self):
        """The first job whose phase has time left, or the first of those that have not."""
        timely = (x for x in self.left if self.spent.get(x.get("phase"), 0.0) < self.caps.get(x.get("phase"), 1e9))
        return next(timely, self.left[0] if self.left else None)

    def worker(self, ends):
        """Run jobs in one worker until it ends."""
        process = started(self.command)
        lines = queue.Queue()
        reader = threading.Thread(target=_lines, args=(process, lines), daemon=True)
        reader.start()
        self.running, why, limit, begun = None, "", self.start, False
        # One that reads only when it has begun, or has no first words, is given its first job all the same.
        self.give(process)
        try:
            while True:
                patience = limit if not begun else self.patience_now()
                try:
                    found = lines.get(timeout=max(0.05, min(patience, ends - time.monotonic())))
                except queue.Empty:
                    why = "" if time.monotonic() >= ends else f"nothing was heard for {patience:.0f} s"
                    break
                if found is None:
                    why = f"the worker ended with status {process.wait()}"
                    break
                begun = True
                if self.heard(found["kind"], found["value"]):
                    self.give(process)
        finally:
            ended(process)
            reader.join(END)
            if not reader.is_alive():  # else a child that left the group still holds it
                closed(process)
        if self.running is not None and why and begun:
            self.crashed(why)
        self.running = None
        self.report.save(self.save)

    def patience_now(self):
        """Seconds that the worker may be silent."""
        if self.running is None:
            return END
        return min(self.patience, self.running.get("patience", self.patience))

    def give(self, process):
        """Give a worker its next job, or the end."""
        self.running, self.trying, self.parts, self.windows = self.next(), None, [], []
        if self.before and self.running is not None:
            self.before(self.running)
        self.since = time.monotonic()
        try:
            if self.running is None:
                process.stdin.close()
                return
            process.stdin.write(json.dumps(self.running) + "\n")
            process.stdin.flush()
        except OSError:
            pass  # its end is reported

    def heard(self, kind, value):
        """Keep what a worker says; whether it is done with its job."""
        report = self.report
        if kind == "device":
            report.device |= value
            if self.began:
                self.began(value)
        elif kind == "begin":
            self.since = min(self.since, time.monotonic())
        elif kind == "trying":
            self.trying = value
        elif kind == "part":
            self.parts.append(value)
        elif kind == "window":
            self.windows.append((value, time.monotonic()))
        elif kind == "note":
            report.notes |= value
        elif kind in ("rows", "surveys"):
            getattr(report, kind).append(self.attributed(value))
            self.told(worded(value))
        if kind not in ("rows", "surveys", "note") or self.running is None:
            return False
        self.done()
        return True

    def attributed(self, row):
        """A row with clocks and power of the time in which each contender ran alone."""
        if self.load is None or not self.windows:
            return row
        starts = [*self.windows, ("", time.monotonic())]
        found = {}
        for (name, first), (_, last) in pairwise(starts):
            if name and (seen := self.load.between(first, last)):
                found[name] = seen
        row |= {"load": found} if found else {}
        return row

    def done(self):
        """The running job is over."""
        phase = self.running.get("phase")
        if phase in self.spent:
            self.spent[phase] += time.monotonic() - self.since
        self.left = [x for x in self.left if x is not self.running]
        self.running = None
        self.report.save(self.save)

    def crashed(self, why):
        """Note a job that ended its worker; a survey is begun again without the schedule that did."""
        case = self.running
        row = {**case["case"], "name": case["name"], "state": "crashed", "why": why}
        row |= {"trying": self.trying} if self.trying else {}
        row |= {"rows": self.parts} if self.parts else {}
        self.done()
        kept = self.report.rows if case["do"] == "measure" else self.report.surveys
        skipped = [*case.get("skip", ()), self.trying]
        kept.append(row)
        self.told(f"CRASHED {case['name']}{f' at {self.trying}' if self.trying else ''}: {why}")
        if self.trying and case["do"] != "measure" and len(skipped) <= SKIPPED and self.retried < RETRIED:
            self.retried += 1
            self.left.append({**case, "skip": skipped})


def run(command, jobs, report, *, budget, **more):
    """Run jobs, dicts with a "name", in workers begun by `command`: see `Runner`."""
    Runner(command, report, **more).run(jobs, budget=budget)


def worded(row):
    """A row, or a survey, in a line; one that lacks what is expected of it must not end a run."""
    try:
        return spelt(row)
    except (KeyError, TypeError, ValueError) as error:
        return f"{row.get('name')}: {row.get('state')}, not spelt ({error!r})"


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
