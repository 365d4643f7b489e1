"""Measured rates of this machine.

Owns the measurement (`probe`) and the file that remembers it (`remember`,
`measured`, `forget`). May import `build.cache`, `host.detect`, `spec.dtype`, `errors`, `host.gauge`,
`target.target`, `version`; `gauge` only to measure.

One core's rates, each the best of short runs on random data. Multiply-adds: every
atom of the target's ISAs, on panels that stay in L1. Bandwidth: the widest atom's loads,
over a buffer of half of each cache, and over one that no cache holds.

A disturbance only ever makes a run slower: the least time counts, and runs of one rate are spread over rounds
between those of all others, so that a disturbance of a second spoils a part of each and all of none. For the same
reason a later measurement only ever raises what is remembered; `forget` starts afresh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from portmm.build.cache import read_note, write_note
from portmm.errors import TargetError
from portmm.host.detect import host, missing
from portmm.spec.dtype import BY_NAME
from portmm.version import VERSION

if TYPE_CHECKING:
    from portmm.host.gauge import Gauge
    from portmm.target.target import Atom, Isa, Target

Progress = Callable[[int, int, str], None]
"""Called with (measurements done, measurements, what happens now)."""

ALL_CORES = "memory@all"
"""Name of the bandwidth of memory that all cores reach together."""

SECONDS = 0.12
"""For one measurement; of a dozen, so that all take a few seconds."""
ROUNDS = 5
"""Parts that the time of a measurement is spread over: with two dozen rates a part comes round each half second."""
MEMORY_BYTES = 256 << 20
"""The least for main memory; more where the outermost cache is large."""
MEMORY_CACHES = 4
"""Buffer for memory, in outermost caches: at most a quarter of its lines can be found there."""
MEMORY_SHARE = 4
"""One part in so many of the memory that is free is the most that is taken, for each of the two buffers for memory."""


def widest(target: Target) -> Atom:
    """The atom that loads most at once, the first of equals."""
    return max(basis(target).atoms, key=lambda atom: atom.n * BY_NAME[atom.right].bytes)


def basis(target: Target) -> Isa:
    """The best instruction set that stands on its own: loads are measured with it."""
    return next((isa for isa in target.isas if isa.base is None), target.isas[0])


def free_memory() -> int:
    """Bytes that can be taken without swapping, 0 if that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith("MemAvailable:")), "0 0")
    return int(found.split()[1]) << 10


def memory_buffer(target: Target) -> int:
    """Bytes over which memory is measured; 0 where there are too few."""
    wanted = max(MEMORY_BYTES, MEMORY_CACHES * max((x.bytes for x in target.levels), default=0))
    return wanted if wanted <= free_memory() // MEMORY_SHARE else 0


def probe(target: Target, progress: Progress | None = None, *, seconds: float = SECONDS) -> dict[str, float]:
    """Measure one core of this machine, in a few seconds.

    Args:
        target: what to measure: this machine, or less of it.
        progress: called before each gauge is made, and before each part of its measurement.
        seconds: of each measurement, beyond the compilation.

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
    far = memory_buffer(target)
    makers: dict[str, Callable[[], Gauge]] = {
        atom.name: partial(gauge.peak, isa, atom) for isa in target.isas for atom in isa.atoms
    }
    makers |= {level.name: partial(gauge.bandwidth, loop, level.name, level.bytes // 2) for level in target.levels}
    with ExitStack() as stack:
        if far:
            makers["memory"] = partial(gauge.bandwidth, loop, "memory", far)
            if target.cores > 1:
                pool = stack.enter_context(ThreadPoolExecutor(target.cores))
                makers[ALL_CORES] = partial(gauge.bandwidth_of_all, loop, ALL_CORES, far, pool, target.cores)
        return _measured(makers, progress or (lambda _done, _all, _text: None), seconds)


def _measured(makers: dict[str, Callable[[], Gauge]], tell: Progress, seconds: float) -> dict[str, float]:
    """The best rate of each gauge over some rounds, in each of which every gauge has a turn."""
    from portmm.host.gauge import least, repetitions

    steps, done = len(makers) * (1 + ROUNDS), 0
    made: list[tuple[Gauge, int]] = []
    for name, make in makers.items():
        tell(done, steps, name)
        made.append((found := make(), repetitions(found.run)))
        done += 1
    taken = dict.fromkeys(makers, inf)
    for _ in range(ROUNDS):
        for found, repeats in made:
            tell(done, steps, found.name)
            taken[found.name] = min(taken[found.name], least(found.run, repeats, seconds / ROUNDS))
            done += 1
    tell(steps, steps, "done")
    return {found.name: found.work / taken[found.name] for found, _ in made}


# -- what is remembered ------------------------------------------------------
# Lines of machine, rate, value, with tabs between: JSON would cost the first
# call of every process the import of its parser.


def note_name(target: Target) -> str:
    """Name of the cache note that holds the rates measured on machines of this kind."""
    return f"rates-{VERSION}-{target.name.replace('_', '-')}"


def _processor() -> str:
    """The processor's own name for itself."""
    try:
        with Path("/proc/cpuinfo").open("rb", buffering=0) as file:
            text = (file.read(4096) or b"").decode(errors="replace")
    except OSError:
        return ""
    wanted = ("model name", "CPU implementer", "CPU part", "CPU variant")
    pairs = (line.partition(":")[::2] for line in text.partition("\n\n")[0].splitlines())
    return " ".join(value.strip() for key, value in pairs if key.strip() in wanted)


def _machine(target: Target) -> str:
    """What rates depend on: the processor, its caches, its cores, the widest loads."""
    levels = " ".join(f"{x.name}={x.bytes}" for x in target.levels)
    return " ".join(f"{_processor()} {levels} cores={target.cores} {target.isas[0].name}".split())


def _is_host(target: Target) -> bool:
    here = host()
    return target.name == here.name and target.levels == here.levels and target.cores == here.cores


def remember(target: Target, rates: dict[str, float]) -> bool:
    """Keep rates in the cache, where `measured` finds them, each unless a higher one is there.

    Returns:
        False if nothing was kept, because `target` describes another machine.
    """
    if not _is_host(target):
        return False
    text = read_note(note_name(target)) or ""
    best = _rates(target, text)
    best |= {name: max(value, best.get(name, 0.0)) for name, value in rates.items()}
    _write(target, text, best)
    return True


def forget(target: Target) -> bool:
    """Remove from the cache what was measured on this machine; False if there was nothing."""
    text = read_note(note_name(target)) or ""
    if not _is_host(target) or not any(line.startswith(f"{_machine(target)}\t") for line in text.splitlines()):
        return False
    _write(target, text, {})
    return True


def _write(target: Target, text: str, rates: dict[str, float]) -> None:
    """Write a note in which the lines of this machine are replaced, and those of others stay."""
    machine = _machine(target)
    others = [line for line in text.splitlines() if not line.startswith(f"{machine}\t")]
    own = [f"{machine}\t{rate}\t{value!r}" for rate, value in rates.items()]
    write_note(note_name(target), "".join(f"{line}\n" for line in (*others, *own)))


def measured(target: Target) -> Target:
    """`target` with the rates that were remembered for it; itself without any.

    Only this machine, or less of it, has been measured: a chip that was asked
    for by name keeps its description. A clock that is not described is taken to
    be the one at which the best atom reaches its measured rate, so that what is
    described in cycles and what is measured in seconds agree. Takes a fraction
    of a millisecond.
    """
    text = read_note(note_name(target)) if _is_host(target) else None
    rates = _rates(target, text) if text else {}
    if not rates:
        return target
    return replace(
        target, measured={**target.measured, **rates}, frequency_ghz=target.frequency_ghz or _clock(target, rates)
    )


def _clock(target: Target, rates: dict[str, float]) -> float:
    """Cycles per nanosecond, 0 if they do not follow."""
    best = widest(target)
    flops = 2 * best.m * best.n * best.k * target.rates.get(best.name, 0.0)
    return rates.get(best.name, 0.0) / flops if flops else 0.0


def _rates(target: Target, text: str) -> dict[str, float]:
    machine = _machine(target)
    known = {atom.name for isa in target.isas for atom in isa.atoms} | {level.name for level in target.levels}
    known |= {"memory", ALL_CORES}
    found = {}
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
            found[name] = value
    return found
