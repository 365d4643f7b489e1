"""Compare fused products with the best of others, and with portmm's own products that are not fused.

    python bench/fusion.py [--threads 1] [--groups epilogue,blocks] [--cases llama] [--rounds 7]
                           [--budget 3600] [--limit 60] [--save [FILE]] [--smoke]

Groups: "epilogue", products with a bias, a residual, a function or a requantisation after
them; "overhead", what an epilogue costs portmm beside the bare product (at most 3 % is the
bar); "blocks", gated MLP, LoRA, RMSNorm with a product, Q K V; "attention".

Everyone has a process of its own, and works while all others wait, in turns: portmm fused;
portmm not fused (a product at a time, then its kernels over rows, or NumPy); NumPy; PyTorch
eager; PyTorch compiled (max-autotune, weights frozen), where that is done within `--limit`
seconds; oneDNN's linear operator with post-ops. Weights are laid out untimed, results are
new in each call. Every result is judged against float64 before it is timed and after. A
ratio is formed within a round; the median over rounds counts. Variants of an overhead are
timed in turns in one process, on the same packed weight.

Cases for which the budget has no time are listed as not run. The exit status is 1 where
portmm is wrong or fails. `--save` keeps all of it, after each case; `bench/report.py` shows
what is in bench/results.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
from fusion_cases import GROUPS, VARIANTS, Case, case_of, cases, operands, right, smoke_cases

from portmm.comparison.contest import FEWEST_ROUNDS, ROUNDS, TURN
from portmm.comparison.limit import chip
from portmm.comparison.peers import Contender, Setup, removed
from portmm.comparison.process import OPENING, Worker, WorkerError
from portmm.comparison.report import geomean
from portmm.comparison.worker import TRIAL
from portmm.host.detect import host

RESULTS = Path(__file__).parent / "results"
FUSED, UNFUSED = "portmm", "unfused"
CONTENDERS = (
    Contender(FUSED, "fusion_ways:open_fused", peer=False),
    Contender(UNFUSED, "fusion_ways:open_unfused", peer=False),
    Contender("numpy", "fusion_ways:open_numpy", uses_openblas=True),
    Contender("torch", "fusion_torch:open_eager"),
    Contender("compiled", "fusion_torch:open_compiled"),
    Contender("onednn", "fusion_torch:open_onednn"),
)
PEERS = tuple(c.name for c in CONTENDERS if c.peer)
SMOKE = (FUSED, UNFUSED, "numpy", "torch")
BAR = 0.03
"""Most that an epilogue should cost, of the bare product's time."""
# Beside the limit for each method, of which there are few: inputs of some hundred megabytes are made and packed.
PATIENCE = 180.0
LIVES = 5


@dataclass(frozen=True)
class Entry:
    """One contender on one case.

    Attributes:
        state: "ok", "unsupported", "wrong", "missing", "crashed" or "timeout".
        samples: method -> seconds per call, round by round.
        reason: why it is not ok, or why some of its methods are not.
        error: largest error found, as a share of what is allowed.
    """

    state: str
    samples: dict = field(default_factory=dict)
    reason: str = ""
    error: float = 0.0

    @property
    def method(self):
        """The way that was fastest."""
        return min(self.samples, key=lambda name: median(self.samples[name]), default="")

    @property
    def seconds(self):
        """The median over rounds, 0 unless ok."""
        return median(self.samples[self.method]) if self.samples else 0.0


def over(theirs, own):
    """The median over rounds of their time over one's own."""
    return median(a / b for a, b in zip(theirs, own, strict=True))


@dataclass(frozen=True)
class Result:
    """All contenders on one case."""

    case: Case
    entries: dict

    def _samples(self, name):
        entry = self.entries.get(name)
        return entry.samples[entry.method] if entry and entry.state == "ok" and entry.samples else None

    @property
    def best(self):
        """The fastest peer, empty if there is none."""
        done = [name for name in PEERS if self._samples(name)]
        return min(done, key=lambda name: self.entries[name].seconds, default="")

    @property
    def ratio(self):
        """portmm's rate over that of the best peer."""
        return self._against(self.best)

    @property
    def gain(self):
        """portmm's rate over its own without fusion."""
        return self._against(UNFUSED)

    def _against(self, name):
        """portmm's rate over another's; None without either."""
        ours, theirs = self._samples(FUSED), self._samples(name)
        return over(theirs, ours) if self.case.group != "overhead" and ours and theirs else None

    @property
    def overheads(self):
        """The cost of each epilogue, as a share of the bare product's time."""
        samples = self.entries[FUSED].samples if FUSED in self.entries else {}
        if self.case.group != "overhead" or VARIANTS[0] not in samples:
            return {}
        return {name: over(samples[name], samples[VARIANTS[0]]) - 1 for name in VARIANTS[1:] if name in samples}


def to_json(result):
    """A result as it is stored; what follows from the samples is there to be read only."""
    entries = {name: asdict(e) | {"method": e.method, "seconds": e.seconds} for name, e in result.entries.items()}
    derived = {"best": result.best, "ratio": result.ratio, "gain": result.gain, "overheads": result.overheads}
    return {"case": asdict(result.case), "entries": entries} | derived


def from_json(kept):
    """A stored result."""
    known = ("state", "samples", "reason", "error")
    entries = {name: Entry(**{k: e[k] for k in known}) for name, e in kept["entries"].items()}
    return Result(case_of(kept["case"]), entries)


# -- taking turns -----------------------------------------------------------------


@dataclass
class Lane:
    """A contender, and its process."""

    contender: Contender
    setup: Setup
    worker: Worker | None = None
    version: str = ""
    state: str = "ok"
    reason: str = ""
    lives: int = LIVES

    @property
    def name(self):
        return self.contender.name

    def open(self):
        """Start the process if there is none."""
        if self.worker is not None or self.state == "missing" or not self.lives:
            return
        self.worker = Worker(self.contender, self.setup, "fusion_worker:Bench")
        try:
            hello = self.worker.hear(OPENING)
        except WorkerError as error:
            hello = {"state": error.state, "reason": str(error)}
        self.state, self.reason = hello["state"], hello.get("reason", "")
        self.version = hello.get("version", self.version)
        if self.state != "ok":
            self.lives -= 1
            self.close()

    def close(self):
        """End the process."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def ask(self, request, patience=PATIENCE):
        """The answer to a request; the end of the process is one too."""
        if self.worker is None:
            return {"state": "missing" if self.state == "missing" else "crashed", "reason": self.reason or "given up"}
        try:
            return self.worker.ask(request, patience)
        except WorkerError as error:
            self.lives -= 1
            self.close()
            return {"state": error.state, "reason": str(error)}


def keep_right(case, path):
    """Store what is right, for all processes."""
    given, kept = operands(case), {}
    for variant in VARIANTS if case.group == "overhead" else ("",):
        want, bound, rows = right(case, given, variant)
        kept |= {f"want{variant}": want, f"bound{variant}": bound} | ({} if rows is None else {"rows": rows})
    np.savez(path, **kept)


def measured(lanes, case, options, share):
    """One case, in about so many seconds after everyone is ready."""
    entries = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "right.npz")
        keep_right(case, path)
        request = {"do": "prepare", "case": asdict(case), "right": path, "limit": options.limit, "trial": TRIAL}
        for lane in lanes:
            lane.open()
            answer = lane.ask(request, PATIENCE + 4 * options.limit)
            reason = answer.get("reason", "") or "; ".join(answer.get("refused", ()))
            entries[lane.name] = Entry(answer["state"], {}, reason, answer.get("error", 0.0))
    running = [lane for lane in lanes if entries[lane.name].state == "ok"]
    until = time.monotonic() + share
    for i in range(options.rounds):
        if i >= min(FEWEST_ROUNDS, options.rounds) and time.monotonic() > until:
            break
        first = i % max(len(running), 1)
        for lane in (*running[first:], *running[:first]):
            turn(lane, entries, options.turn)
    for lane in running:
        entry = entries[lane.name]
        if entry.state == "ok":
            answer = lane.ask({"do": "drop"})
            if answer["state"] != "ok":
                entries[lane.name] = Entry(answer["state"], reason=answer["reason"])
    return Result(case, entries)


def turn(lane, entries, seconds):
    """One lane's part of a round."""
    entry = entries[lane.name]
    if entry.state != "ok":
        return
    answer = lane.ask({"do": "time", "seconds": seconds})
    if answer["state"] != "ok":
        entries[lane.name] = Entry(answer["state"], reason=answer["reason"])
        return
    for name, taken in answer["seconds"].items():
        entry.samples.setdefault(name, []).append(taken)


# -- what is shown ----------------------------------------------------------------


def flags(result):
    """Unmet expectations, as sentences."""
    found = [f"{n} costs {100 * x:.1f} %" for n, x in result.overheads.items() if x > BAR]
    if result.gain is not None and result.gain < 1:
        found.append("slower than not fused")
    bad = {name: e for name, e in result.entries.items() if e.state in ("wrong", "crashed", "timeout")}
    ours = result.entries[FUSED]
    bad |= {} if ours.state == "ok" else {FUSED: ours}
    found += [f"not had: {ours.reason}"] if ours.state == "ok" and ours.reason else []
    return "; ".join([*found, *(f"{name} {e.state}: {e.reason}" for name, e in bad.items())])


def table(results):
    """The results as text, microseconds per call, by group."""
    head = ("case", *(c.name for c in CONTENDERS), "best", "ratio", "gain", "")
    rows = []
    for r in results:
        times = []
        for c in CONTENDERS:
            entry = r.entries.get(c.name)
            times.append(f"{1e6 * entry.seconds:.4g}" if entry and entry.state == "ok" and entry.samples else "")
        shown = [f"{x:.2f}" if x is not None else "" for x in (r.ratio, r.gain)]
        rows.append((r.case.name, *times, r.best, *shown, flags(r)))
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows))


def summary(results):
    """A line for each group and type: geometric means and lowest."""
    lines, kinds = [], {}
    for r in results:
        kinds.setdefault((r.case.group, r.case.dtype), []).append(r)
    for (group, dtype), mine in kinds.items():
        ratios, gains = ([x for r in mine if (x := getattr(r, of)) is not None] for of in ("ratio", "gain"))
        if ratios:
            mean = f"{geomean(ratios):.2f} ({min(ratios):.2f})"
            lines.append(f"{group}, {dtype}: {mean} of the best peer, {len(ratios)} cases")
        if gains:
            slower = sum(x < 1 for x in gains)
            lines.append(f"{group}, {dtype}: {geomean(gains):.2f} ({min(gains):.2f}) of not fused, {slower} slower")
        costs = [x for r in mine for x in r.overheads.values()]
        if costs:
            high = f"highest {max(costs):+.1%}, {sum(x > BAR for x in costs)} above {BAR:.0%}"
            lines.append(f"{group}, {dtype}: median {median(costs):+.1%}, {high}")
    return "\n".join(lines)


def report(results, lanes, options, skipped):
    """Everything, to be stored."""
    return {
        "chip": chip(), "machine": host().name, "threads": options.threads,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {lane.name: lane.version or f"{lane.state}: {lane.reason}" for lane in lanes},
        "removed": list(removed(os.environ)), "skipped": skipped, "fusion": [to_json(r) for r in results],
    }  # fmt: skip


def chosen(options):
    """The cases that are asked for."""
    groups = options.groups.split(",")
    unknown = set(groups) - set(GROUPS)
    if unknown:
        raise SystemExit(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    return [c for c in (smoke_cases if options.smoke else cases)(groups) if options.cases in c.name]


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", default=",".join(GROUPS), help="joined with commas")
    parser.add_argument("--cases", default="", help="only cases whose name has this in it")
    parser.add_argument("--contenders", default="", help="only these, joined with commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--turn", type=float, default=TURN, help="seconds of timing in a turn")
    parser.add_argument("--budget", type=float, default=7200.0, help="seconds for all")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for making a method ready, compiling say")
    parser.add_argument("--save", type=Path, nargs="?", const=Path(), help="keep it, by default in bench/results")
    parser.add_argument("--smoke", action="store_true", help="small cases once, to see that it runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rounds, options.turn = 1, 0.002
    if options.save == Path():
        options.save = RESULTS / f"{host().name}-{options.threads}t-fusion.json"
    return options


def main(arguments=None):
    options = parsed(arguments)
    wanted = chosen(options)
    names = options.contenders.split(",") if options.contenders else SMOKE if options.smoke else None
    taking_part = [c for c in CONTENDERS if not names or c.name in (FUSED, *names)]
    lanes = [Lane(c, Setup(threads=options.threads)) for c in taking_part]
    results, skipped, start = [], [], time.monotonic()
    try:
        for i, case in enumerate(wanted):
            left = options.budget - (time.monotonic() - start)
            if left <= 0:
                skipped.append(case.name)
                continue
            took = f"{time.monotonic() - start:.0f} s"
            print(f"\r{i} of {len(wanted)} cases, {took}, {case.name:40}", end="", file=sys.stderr)
            mine = [lane for lane in lanes if case.group != "overhead" or lane.name == FUSED]
            results.append(measured(mine, case, options, left / (len(wanted) - i)))
            if options.save:
                rest = skipped + [c.name for c in wanted[i + 1 :]]
                options.save.write_text(json.dumps(report(results, lanes, options, rest), indent=1) + "\n")
    finally:
        for lane in lanes:
            lane.close()
    print(file=sys.stderr)
    print(table(results))
    print(f"\n{summary(results)}\n")
    for lane in lanes:
        print(f"{lane.name}: {lane.version or f'{lane.state}, {lane.reason}'}")
    if skipped:
        print(f"not run, for want of time: {', '.join(skipped)}")
    if options.save:
        print(f"wrote {options.save}")
    return 1 if any(r.entries[FUSED].state != "ok" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
