"""Rates beside a peer's in the same run, against those that were stored when the machine was quiet.

A baseline holds, for a chip and a number of threads, the ratio of portmm's rate to that of
each peer, case by case: ratios and not seconds, because a machine that is slower today is
so for both. With each goes the peer's version, and its spread: how far a run's median lay
from that of all runs, at most. A ratio is missed where it lies below the stored one by more
than five percent and more than three times the spread, in two measurements, the second a
longer one. A peer that is not here, or is of another version, is not judged.
"""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from portmm.comparison import compare

BASELINES = Path(__file__).parent / "baselines"
PEERS = ("numpy", "mkl", "onednn")
LEAST = 0.05
"""A shortfall that is never a miss."""
SPREADS = 3.0
NOISIEST = 0.10
"""Above this spread a ratio says nothing, and is not stored."""
RUNS = 3
"""Measurements that a stored ratio rests on."""
ROUNDS = 15
LONGER = 3
"""Rounds of the second measurement are as many times those of the first."""


@dataclass(frozen=True, slots=True)
class Row:
    """A stored ratio: of portmm's rate to a peer's; its spread, of the ratio; the peer's version."""

    ratio: float
    spread: float
    version: str

    @property
    def lowest(self):
        """The smallest ratio that is within the noise of the measured one."""
        return self.ratio * (1 - max(LEAST, SPREADS * self.spread))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A measured ratio, and the peer's version."""

    ratio: float
    version: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a case: misses and skipped judgements with reasons, as sentences; the last ratios by peer."""

    misses: tuple
    notes: tuple
    ratios: dict


def path_of(machine, threads, folder=BASELINES):
    """The file of a chip's baseline."""
    return folder / f"{machine}-{threads}t.json"


def load(path):
    """Case -> peer -> row; None where nothing is stored."""
    if not path.exists():
        return None
    cases = json.loads(path.read_text())["cases"]
    return {case: {peer: Row(**row) for peer, row in rows.items()} for case, rows in cases.items()}


def store(path, rows, **about):
    """Write a baseline; cases that were not measured now stay as they are."""
    kept = {**(load(path) or {}), **rows}
    cases = {case: {peer: asdict(row) for peer, row in kept[case].items()} for case in sorted(kept)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "cases": cases}, indent=1) + "\n")


def measure(case, threads, rounds=ROUNDS, **more):
    """Ratios to the peers that are here and do the case, by peer: medians over rounds of the ratio in a round.

    Raises:
        RuntimeError: portmm did not do it.
    """
    options = {"threads": threads, "contenders": ("portmm", *PEERS), "rounds": rounds, "limits": False}
    report = compare((case,), **{**options, "budget_s": 120.0, **more})
    (result,) = report.results or (None,)
    ours = result and result.entries.get(report.ours)
    if not ours or ours.state != "ok":
        raise RuntimeError(f"portmm on {case.name}: {ours or report.entrants}")
    versions = {e.name: e.version for e in report.entrants}
    return {
        name: Ratio(
            statistics.median(peer / own for peer, own in zip(entry.samples, ours.samples, strict=True)), versions[name]
        )
        for name, entry in result.entries.items()
        if name in PEERS and entry.state == "ok"
    }


def rows_of(runs):
    """Several measurements of a case combined: rows by peer, and those too noisy to keep, as sentences."""
    rows, noisy = {}, []
    for peer in runs[0]:
        ratios = [run[peer].ratio for run in runs if peer in run]
        middle = statistics.median(ratios)
        spread = max(abs(x - middle) for x in ratios) / middle
        if spread > NOISIEST:
            noisy.append(f"{peer}: {min(ratios):.3f} to {max(ratios):.3f}")
        else:
            rows[peer] = Row(round(middle, 4), round(spread, 4), runs[0][peer].version)
    return rows, noisy


def judge(rows, again):
    """Hold a case against its stored rows.

    Args:
        rows: peer -> row.
        again: measures: called with 1 and, after a miss, with how much longer to take; returns peer -> ratio.
    """
    first = again(1)
    notes = [_absent(peer, row, first.get(peer)) for peer, row in rows.items()]
    fair = {peer: row for peer, row in rows.items() if not _absent(peer, row, first.get(peer))}
    below = [peer for peer, row in fair.items() if first[peer].ratio < row.lowest]
    if not below:
        return Verdict((), tuple(filter(None, notes)), first)
    second = again(LONGER)
    misses = tuple(
        f"{peer}: {first[peer].ratio:.3f}, then {second[peer].ratio:.3f} of its rate; "
        f"stored {fair[peer].ratio:.3f}, and {fair[peer].lowest:.3f} would do"
        for peer in below
        if peer in second and second[peer].ratio < fair[peer].lowest
    )
    return Verdict(misses, tuple(filter(None, notes)), {**first, **second})


def _absent(peer, row, found):
    """Why a peer is not judged, empty if it is."""
    if found is None:
        return f"{peer} is not here, or does not do it; the baseline has {row.version}"
    if found.version != row.version:
        return f"{peer} was {row.version} and is {found.version}: store the baseline again"
    return ""
