"""One of the commands for a device that is lent for a while: see `lease.sh`, which makes portmm importable first.

    python lease.py 0 --out DIR           # a look: checks, the first cases of each section, four surveys
    python lease.py 1 --out DIR           # checks, squares, prefill, attention, fp8, int8, surveys
    python lease.py 2 --out DIR           # decode, W4A16, epilogues, grouped, tf32, f32, rows, surveys
    python lease.py 3 --out DIR           # compute-sanitizer, counters of single kernels
    python lease.py 1 --dry-run           # the same on a device that computes nothing

Results are in DIR/lease-N.json, written after each row, so that a kill loses nothing; `lease_plan` says what is done.
Kernels are compiled by many processes while checks run; what is timed waits for them. This process opens no device:
it feeds a worker, replaces it when it dies or hangs, and samples clocks and power through NVML.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import gpu
import gpu_cases
import gpu_compile
import gpu_load
import gpu_run
import gpu_tools
import lease_plan

SECONDS = 560.0
"""Of a command: ten minutes, less what starting and returning take."""
COMPILE, EARLY = 240.0, 100.0
"""Seconds that compiling may take, and how long what is timed waits for it; what is left is compiled when it is needed.
Kernels of surveys are last: processes that compile them give way to what is timed."""
MOST_COMPILERS = 16
SEARCH = 2.0
"""Seconds of cublasLt's search for each case; it proposes the likeliest algorithms first."""
MOST = 24
"""Candidates of each survey."""
START = 90.0


class Lease:
    """A command: its plan, its report, and the time that is left.

    Args:
        given: arguments.
        worker: begins a worker, by default `gpu.py`.
    """

    def __init__(self, given, worker=None):
        self.given, self.began = given, time.monotonic()
        self.ends = self.began + given.seconds
        self.report = gpu_run.Report()
        self.save = given.out / f"lease-{given.command}.json"
        self.worker = worker or self.worker_command()
        # Kernels of a dry run take milliseconds: samples at the usual interval would miss them.
        self.load = gpu_load.Load(_Still(), every=0.001) if given.dry_run else gpu_load.Load()
        self.compilers, self.early = None, False
        self.jobs = []

    def left(self):
        return self.ends - time.monotonic()

    def worker_command(self, *more):
        """The command that starts a worker."""
        words = ["--device", "described", "--turns", "1", "--most", "3"] if self.given.dry_run else []
        words = words or ["--most", str(MOST)]
        words += ["--search", str(SEARCH), "--threads", "8"]
        return [sys.executable, str(Path(gpu.__file__)), "--worker", *words, *more]

    def compiler_command(self):
        return [x if x != "--worker" else "--compiler" for x in self.worker]

    def compile(self, said):
        """Begin to compile for all jobs, as soon as it is known for which device."""
        if self.compilers is not None or "facts" not in said:
            return
        count = max(1, min(MOST_COMPILERS, (os.cpu_count() or 2) - 2))
        seconds = min(COMPILE, self.left() / 3)
        self.compilers = gpu_compile.Compilers(
            self.compiler_command(),
            said["facts"],
            self.jobs[: 2 if self.given.dry_run else None],
            count=count,
            seconds=seconds,
        )

    def before(self, job):
        """Wait for the kernels of a job that is timed."""
        if not job.get("timed") or self.compilers is None:
            return
        if job["do"] == "survey":
            self.compiled()
        elif not self.early:
            self.early = True
            self.compilers.early(EARLY)

    def compiled(self):
        """Wait for compilers, once."""
        if self.compilers is not None and "compiled" not in self.report.notes:
            self.report.notes["compiled"] = found = self.compilers.wait()
            failed = f", {len(found['failed'])} failed" if found["failed"] else ""
            print(f"compiled for {found['jobs']} jobs in {found['seconds']:.0f} s{failed}")

    def phases(self):
        """Run the phases of this command."""
        plan = lease_plan.COMMANDS[self.given.command]()
        plan = [lease_plan.thinned(x) for x in plan] if self.given.dry_run else plan
        self.jobs = [job for phase in plan for job in phase.jobs]
        if self.given.command == 3:
            every = gpu_cases.cases()
            self.jobs += [] if self.given.dry_run else [
                {"do": "measure", "name": x.name, "case": vars(x), "compile only": True}
                for name in lease_plan.PROFILED for x in every if x.name == name
            ]  # fmt: skip
        caps = {x.name: x.seconds for x in plan}
        runner = gpu_run.Runner(
            self.worker, self.report, save=self.save, start=START, caps=caps, load=self.load, began=self.compile,
            before=self.before,
        )  # fmt: skip
        budget = sum(caps.values()) if self.given.command == 3 else self.left()
        runner.run([x for x in self.jobs if "compile only" not in x], budget=min(budget, self.left()))
        self.compiled()

    def tools(self):
        """compute-sanitizer over small cases, then counters of single kernels."""
        file = self.given.out / "checks.part"
        file.write_text(json.dumps([x for phase in lease_plan.third() for x in phase.jobs]))
        command = [*self.worker, "--checks", "--jobs", str(file)]
        for tool, seconds in lease_plan.TOOLS.items():
            if self.left() < 20:
                break
            found = gpu_tools.sanitized(tool, command, seconds=min(seconds, self.left() - 5))
            self.report.sanitizer.append(found)
            print(f"{tool}: {found['state']} {found.get('summary', '')}{found.get('why', '')}")
            self.report.save(self.save)
        file.unlink()
        self.profiles()

    def profiles(self):
        """Counters by ncu, or clocks and power where it does not work."""
        counters = gpu_tools.installed(gpu_tools.NCUS) is not None
        if not counters:
            self.report.notes["ncu"] = "not installed"
        failures = 0
        for name in lease_plan.PROFILED[: 1 if self.given.dry_run else None]:
            if self.left() < 15:
                self.report.notes.setdefault("not profiled", []).append(name)
                continue
            seconds = min(lease_plan.PROFILE, self.left() - 5)
            one = [sys.executable, str(Path(__file__).with_name("profile_one.py")), name]
            one += ["--device", "described"] if self.given.dry_run else []
            if counters and failures < 2:
                keep = self.given.out / "ncu.csv" if not self.report.profiles else None
                found = gpu_tools.profiled(name, [*one, "--quick", "--count", "1"], seconds=seconds, keep=keep)
                failures = 0 if found["state"] == "ok" else failures + 1
            else:
                found = self.clocked(name, [*one, "--count", "400"], seconds)
            self.report.profiles.append(found)
            print(f"profile {name}: {found['state']} {found.get('why', '')}")
            self.report.save(self.save)

    def clocked(self, name, command, seconds):
        """Clocks and power while a case runs many times."""
        began = time.monotonic()
        status, out, err = gpu_tools.heard(command, seconds)
        found = {"name": name, "state": "clocks", "load": self.load.between(began, time.monotonic())}
        return found | {"status": status, "said": out[-1500:], "errors": err[-1000:]}

    def run(self):
        """All of it; 0 if something ran, and all of that is right."""
        try:
            self.phases()
            if self.given.command == 3:
                self.tools()
        finally:
            self.load.stop()
            self.report.notes |= {"load": self.load.why or "NVML", "seconds": round(time.monotonic() - self.began, 1)}
            right = gpu.ended(self.report, tools=False)
            self.report.save(self.save)
        self.shown()
        return 0 if right and any(x.get("right") for x in self.report.rows) else 1

    def shown(self):
        """The summary: how many are right, refused and not run."""
        rows = self.report.rows
        print(f"{sum(x.get('right') is True for x in rows)} of {len(rows)} cases are right", end="; ")
        surveys = [y for x in self.report.surveys for y in x.get("rows", ())]
        print(f"{sum(x['right'] is True for x in surveys)} of {len(surveys)} candidates")
        for x in [*rows, *self.report.surveys]:
            if x.get("state") in ("refused", "failed", "crashed"):
                print(f"{x['state']} {x['name']}: {str(x.get('why', ''))[:160]}")
        print(f"{self.save}: {self.report.notes['seconds']:.0f} s")


class _Still:
    """Clocks of a rehearsal."""

    @staticmethod
    def sample():
        return {"sm_mhz": 1980, "watts": 300.0}


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", type=int, choices=tuple(lease_plan.COMMANDS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "lease-out"))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--dry-run", action="store_true", help="on a device that computes nothing")
    return parser.parse_args(argv)


def main(argv=None, worker=None):
    given = arguments(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    # Whoever ends this process lets it end its workers, and say what it has.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return Lease(given, worker).run()


if __name__ == "__main__":
    sys.exit(main())
