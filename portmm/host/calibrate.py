"""Measured rates of this machine.

Owns the measurement (`probe`) and the cache note of its results (`remember`,
`measured`, `forget`).

The rates are those of one core, each the best of short runs on random data. Multiply-adds: every
atom of the target's ISAs, on panels that stay in L1. Bandwidth: the widest atom's loads,
over a buffer of half of each cache, and over one that exceeds every cache.

A disturbance only makes a run slower: the shortest time counts, and runs of one rate are spread over rounds
between those of all others, so that a disturbance of a second spoils a part of each and all of none. For the same
reason a later measurement only raises a recorded rate; `forget` discards all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from portmm.build.cache import read_note, write_note
from portmm.errors import TargetError
from portmm.host.detect import host, missing
from portmm.host.host_probe import CPUINFO, processors, substitute_cpuinfo
from portmm.spec.dtype import BY_NAME
from portmm.version import VERSION

if TYPE_CHECKING:
    from portmm.host.gauge import Gauge
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

Progress = Callable[[int, int, str], None]
"""Callback with (measurements done, measurements in all, name of the current one)."""

ALL_CORES = "memory@all"
"""Name of the memory bandwidth of all cores together."""

SECONDS = 0.12
"""Duration of one measurement, of about a dozen."""
ROUNDS = 5
"""Rounds that the time of a measurement is spread over: with two dozen rates each has a turn every half second."""
MEMORY_BYTES = 256 << 20
"""Smallest buffer for main memory; larger where the outermost cache is large."""
MEMORY_CACHES = 4
"""Buffer for memory, in sizes of the outermost cache, which then holds at most a quarter of its lines."""
MEMORY_SHARE = 4
"""Divisor of free memory: the most that each of the two buffers for memory takes."""
_NAME_FIELDS = ("model name", "CPU implementer", "CPU part", "CPU variant")


def widest(target: Target) -> Atom:
    """The atom with the largest loads, the first among equals."""
    return max(basis(target).atoms, key=lambda atom: atom.n * BY_NAME[atom.right].bytes)


def basis(target: Target) -> Isa:
    """The best instruction set that extends no other: loads are measured with it."""
    return next((isa for isa in target.isas if isa.base is None), target.isas[0])


def free_memory() -> int:
    """Bytes that can be allocated without swapping, 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    available = next((line for line in lines if line.startswith("MemAvailable:")), "0 0")
    return int(available.split()[1]) << 10


def memory_buffer(target: Target) -> int:
    """Size of the buffer for measuring memory; 0 where too little memory is free."""
    wanted = max(MEMORY_BYTES, MEMORY_CACHES * max((x.bytes for x in target.levels), default=0))
    return wanted if wanted <= free_memory() // MEMORY_SHARE else 0


def probe(target: Target, progress: Progress | None = None, *, seconds: float = SECONDS) -> dict[str, float]:
    """Measure one core of this machine, in a few seconds.

    Args:
        target: this machine, or a subset of its ISAs.
        progress: called before each gauge is built, and before each part of its measurement.
        seconds: duration of each measurement, without compilation.

    Returns:
        "<atom>" in GFLOP/s, "<level>" and "memory" in GB/s of one core, and
        "memory@all" in GB/s of all cores. Memory is left out where too little is free.

    Raises:
        TargetError: this machine cannot run the target.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    from concurrent.futures import ThreadPoolExecutor
    from contextlib import ExitStack

    from portmm.host import gauge

    for isa in target.isas:
        if lacking := missing(isa):
            raise TargetError(f"cannot measure {target.name}: this machine lacks {', '.join(lacking)} for {isa.name}")
    loop = gauge.streaming(basis(target), widest(target))
    memory_bytes = memory_buffer(target)
    makers: dict[str, Callable[[], Gauge]] = {
        atom.name: partial(gauge.peak, isa, atom) for isa in target.isas for atom in isa.atoms
    }
    makers |= {level.name: partial(gauge.bandwidth, loop, level.name, level.bytes // 2) for level in target.levels}
    with ExitStack() as stack:
        if memory_bytes:
            makers["memory"] = partial(gauge.bandwidth, loop, "memory", memory_bytes)
            if target.cores > 1:
                pool = stack.enter_context(ThreadPoolExecutor(target.cores))
                makers[ALL_CORES] = partial(gauge.bandwidth_of_all, loop, ALL_CORES, memory_bytes, pool, target.cores)
        return _best_rates(makers, progress or (lambda _done, _all, _text: None), seconds)


def _best_rates(makers: dict[str, Callable[[], Gauge]], report: Progress, seconds: float) -> dict[str, float]:
    """The best rate of each gauge over several rounds, in each of which every gauge has a turn."""
    from portmm.host.gauge import least, repetitions

    steps, done = len(makers) * (1 + ROUNDS), 0
    gauges: list[tuple[Gauge, int]] = []
    for name, make in makers.items():
        report(done, steps, name)
        gauges.append((gauge := make(), repetitions(gauge.run)))
        done += 1
    times = dict.fromkeys(makers, inf)
    for _ in range(ROUNDS):
        for gauge, repeats in gauges:
            report(done, steps, gauge.name)
            times[gauge.name] = min(times[gauge.name], least(gauge.run, repeats, seconds / ROUNDS))
            done += 1
    report(steps, steps, "done")
    return {gauge.name: gauge.work / times[gauge.name] for gauge, _ in gauges}


# -- recorded rates ----------------------------------------------------------
# Lines of machine, rate, value, separated by tabs: with JSON the first call of
# every process would import its parser.


def note_name(target: Target) -> str:
    """Name of the cache note that holds the rates measured on machines of this kind."""
    return f"rates-{VERSION}-{target.name.replace('_', '-')}"


def _processor() -> str:
    """Name of the processor in /proc/cpuinfo or from py-cpuinfo; on Arm its implementer, part and variant."""
    text = ""
    with suppress(OSError), Path(CPUINFO).open("rb", buffering=0) as file:
        text = (file.read(4096) or b"").decode(errors="replace")
    fields = (processors(text or substitute_cpuinfo(flags=False)) or [{}])[0]
    return " ".join(value for key, value in fields.items() if key in _NAME_FIELDS)


def _machine(target: Target) -> str:
    """Key of the rates of a machine: its processor, caches, cores and widest loads."""
    levels = " ".join(f"{x.name}={x.bytes}" for x in target.levels)
    return " ".join(f"{_processor()} {levels} cores={target.cores} {target.isas[0].name}".split())


def _is_host(target: Target) -> bool:
    here = host()
    return target.name == here.name and target.levels == here.levels and target.cores == here.cores


def remember(target: Target, rates: dict[str, float]) -> bool:
    """Record rates in the cache for `measured`, each unless a higher one is recorded.

    Returns:
        False if nothing was recorded, because `target` describes another machine.
    """
    if not _is_host(target):
        return False
    text = read_note(note_name(target)) or ""
    best = _rates(target, text)
    best |= {name: max(value, best.get(name, 0.0)) for name, value in rates.items()}
    _write(target, text, best)
    return True


def forget(target: Target) -> bool:
    """Remove the rates of this machine from the cache; False if there were none."""
    text = read_note(note_name(target)) or ""
    if not _is_host(target) or not any(line.startswith(f"{_machine(target)}\t") for line in text.splitlines()):
        return False
    _write(target, text, {})
    return True


def _write(target: Target, text: str, rates: dict[str, float]) -> None:
    """Replace the lines of this machine in a note, and keep those of others."""
    machine = _machine(target)
    others = [line for line in text.splitlines() if not line.startswith(f"{machine}\t")]
    own = [f"{machine}\t{rate}\t{value!r}" for rate, value in rates.items()]
    write_note(note_name(target), "".join(f"{line}\n" for line in (*others, *own)))


def measured(target: Target) -> Target:
    """`target` with the rates recorded for it; `target` itself if there are none.

    Only this machine, or a subset of its ISAs, has been measured: a chip that was
    requested by name keeps its description. A clock that is not described is
    derived from the measured rate of the best atom, so that rates described in
    cycles and rates measured in seconds agree. Takes a fraction of a millisecond.
    """
    text = read_note(note_name(target)) if _is_host(target) else None
    rates = _rates(target, text) if text else {}
    if not rates:
        return target
    return replace(
        target, measured={**target.measured, **rates}, frequency_ghz=target.frequency_ghz or _clock(target, rates)
    )


def _clock(target: Target, rates: dict[str, float]) -> float:
    """Clock in GHz, derived from the best atom's measured rate; 0 if that is unknown."""
    best = widest(target)
    flops = 2 * best.m * best.n * best.k * target.rates.get(best.name, 0.0)
    return rates.get(best.name, 0.0) / flops if flops else 0.0


def _rates(target: Target, text: str) -> dict[str, float]:
    machine = _machine(target)
    known = {atom.name for isa in target.isas for atom in isa.atoms} | {level.name for level in target.levels}
    known |= {"memory", ALL_CORES}
    rates = {}
    for line in text.splitlines():
        owner, _, rest = line.partition("\t")
        name, _, number = rest.partition("\t")
        if owner != machine or name not in known:
            continue
        try:
            value = float(number)
        except ValueError:
            continue
        if value > 0 and isfinite(value):
            rates[name] = value
    return rates
