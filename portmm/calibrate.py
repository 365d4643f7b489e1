"""Measured rates of this machine.

Owns the measurement (`probe`) and the file that remembers it (`remember`,
`measured`). May import `abi`, `build`, `cache`, `detect`, `dtype`, `emit`,
`errors`, `probe`, `target`, `version`; NumPy and cffi only to measure.

One core's rates, each the median of short runs on random data (zeros run
faster on some units). Multiply-adds: every atom of the target's ISAs, on panels
that stay in L1. Bandwidth: the widest atom's loads, over a buffer of half of
each cache, and over one that no cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portmm.abi import ARGS
from portmm.cache import read_note, write_note
from portmm.detect import host, missing
from portmm.dtype import BY_NAME
from portmm.errors import TargetError
from portmm.version import VERSION

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from portmm.probe import Probe
    from portmm.target import Atom, Isa, Target

Progress = Callable[[int, int, str], None]
"""Called with (measurements done, measurements, what happens now)."""

ALL_CORES = "memory@all"
"""Name of the bandwidth of memory that all cores reach together."""

SECONDS = 0.12
"""For one measurement; of a dozen, so that all take a few seconds."""
SHORTEST = 1e-3
"""Seconds of one timed run: a thousand times the cost of a call and of the clock."""
FEWEST_RUNS = 5
PEAK_STEPS = 64
"""Steps of a panel: (14 + 32) * 64 elements of f32 take 12 KB, a part of any L1."""
MEMORY_BYTES = 256 << 20
"""The least for main memory; more where the outermost cache is large."""
MEMORY_CACHES = 4
"""Buffer for memory, in outermost caches: at most a quarter of its lines can be found there."""
MEMORY_SHARE = 4
"""One part in so many of the memory that is free is the most that is taken."""
_BLOCK = 1 << 20  # bytes of random numbers, repeated to fill a buffer
_LINE = 64
_GROWTH = 64


@dataclass(frozen=True, slots=True)
class _Loop:
    """A probe that is loaded: `start` takes repetitions, steps and three arrays."""

    probe: Probe
    library: Any
    start: Callable[[int, int, Any, Any, Any], None]

    @property
    def step_bytes(self) -> int:
        return self.probe.b * BY_NAME[self.probe.kernel.atom.right].bytes


def _open(probe: Probe) -> _Loop:
    from cffi import FFI  # type: ignore[import-untyped]

    from portmm.build import build
    from portmm.emit.c import source

    kernel = probe.kernel
    arch = None if kernel.isa.arch == "any" else kernel.isa.arch
    artifact = build(source(kernel), flags=kernel.isa.flags, arch=arch, name=kernel.name)
    ffi: Any = FFI()
    ffi.cdef(f"{ARGS}\nvoid {kernel.name}(const portmm_args *g);")
    library = ffi.dlopen(str(artifact.path))
    function = getattr(library, kernel.name)

    def start(repeats: int, steps: int, a: Any, b: Any, c: Any) -> None:
        addresses = {
            x: ffi.cast("void *", y.__array_interface__["data"][0]) for x, y in zip("abc", (a, b, c), strict=True)
        }
        function(ffi.new("portmm_args *", {"m": repeats, "k": steps, **addresses}))

    return _Loop(probe, library, start)


def _median(run: Callable[[int], object], seconds: float) -> float:
    """Seconds of one repetition."""

    def timed(repeats: int) -> float:
        start = time.perf_counter()
        run(repeats)
        return time.perf_counter() - start

    end = time.perf_counter() + seconds
    repeats = 1
    # The least of some: one that was interrupted, or the first, seems long enough when it is not.
    while (took := min(timed(repeats) for _ in range(3))) < SHORTEST:
        repeats *= min(_GROWTH, max(2, round(SHORTEST / max(took, 1e-9))))
    samples: list[float] = []
    while len(samples) < FEWEST_RUNS or time.perf_counter() < end:
        samples.append(timed(repeats))
    return sorted(samples)[len(samples) // 2] / repeats


def _random(elements: int, dtype: str) -> Any:
    """Elements or units: numbers in [-0.5, 0.5), whose products sum to something small, or any integers."""
    to = _aligned(elements, dtype)
    _fill(to)
    return to


def _aligned(elements: int, dtype: str) -> Any:
    """An array that starts on a line, as a kernel's panels do: a load across two lines takes twice as long."""
    import numpy as np

    bytes_ = elements * BY_NAME[dtype].bytes
    raw = np.empty(bytes_ + _LINE, np.uint8)
    first = -raw.__array_interface__["data"][0] % _LINE
    numpy = BY_NAME[dtype].numpy
    # NumPy has no bfloat16 of its own: its bits.
    return raw[first : first + bytes_].view("uint16" if numpy == "bfloat16" else numpy)


def _fill(to: Any) -> None:
    import numpy as np

    count, rng = min(to.size, _BLOCK // to.itemsize), np.random.default_rng(0)
    if to.dtype.kind == "f":
        block = rng.random(count).astype(to.dtype) - to.dtype.type(0.5)
    elif to.dtype == np.uint16:
        block = ((rng.random(count, np.float32) - np.float32(0.5)).view(np.uint32) >> 16).astype(np.uint16)
    else:
        block = rng.integers(np.iinfo(to.dtype).min, np.iinfo(to.dtype).max, count, to.dtype, endpoint=True)
    for first in range(0, to.size, block.size):
        part = to[first : first + block.size]
        part[:] = block[: part.size]


def _peak(isa: Isa, index: int, seconds: float) -> float:
    """GFLOP/s of an atom."""
    from portmm.probe import peak

    loop = _open(peak(isa, isa.atoms[index]))
    p, atom = loop.probe, isa.atoms[index]
    a, b = _random(p.a * PEAK_STEPS, atom.left), _random(p.b * PEAK_STEPS, atom.right)
    c = _random(p.c, atom.acc)
    once = _median(lambda repeats: loop.start(repeats, PEAK_STEPS, a, b, c), seconds)
    return p.flops * PEAK_STEPS / once / 1e9


def _bandwidth(loop: _Loop, size: int, seconds: float) -> float:
    """GB/s of one core over a buffer of about `size` bytes."""
    atom = loop.probe.kernel.atom
    steps = max(1, size // loop.step_bytes)
    a, b, c = (
        _random(loop.probe.a, atom.left),
        _random(steps * loop.probe.b, atom.right),
        _random(loop.probe.c, atom.acc),
    )
    once = _median(lambda repeats: loop.start(repeats, steps, a, b, c), seconds)
    return steps * loop.step_bytes / once / 1e9


def _bandwidth_of_all(loop: _Loop, size: int, seconds: float, cores: int) -> float:
    """GB/s of all cores over a buffer of about `size` bytes, a part for each."""
    from concurrent.futures import ThreadPoolExecutor

    atom = loop.probe.kernel.atom
    steps = max(1, size // loop.step_bytes // cores)
    a = _random(loop.probe.a, atom.left)
    parts = _aligned(cores * steps * loop.probe.b, atom.right).reshape(cores, -1)
    sums = [_random(loop.probe.c, atom.acc) for _ in range(cores)]

    def share(repeats: int, core: int) -> None:
        loop.start(repeats, steps, a, parts[core], sums[core])

    def run(pool: Executor, repeats: int) -> None:
        list(pool.map(partial(share, repeats), range(cores)))

    with ThreadPoolExecutor(cores) as pool:
        # Pages belong to the memory node of the thread that writes them first.
        list(pool.map(_fill, parts))
        once = _median(partial(run, pool), seconds)
    return cores * steps * loop.step_bytes / once / 1e9


def _widest(target: Target) -> Atom:
    """The atom that loads most at once, the first of equals."""
    return max(_basis(target).atoms, key=lambda atom: atom.n * BY_NAME[atom.right].bytes)


def _basis(target: Target) -> Isa:
    """The best instruction set that stands on its own: what loads are measured with."""
    return next((isa for isa in target.isas if isa.base is None), target.isas[0])


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith("MemAvailable:")), "0 0")
    return int(found.split()[1]) << 10


def memory_buffer(target: Target) -> int:
    """Bytes over which memory is measured; 0 where there are too few."""
    wanted = max(MEMORY_BYTES, MEMORY_CACHES * max((x.bytes for x in target.levels), default=0))
    return wanted if wanted <= _free_memory() // MEMORY_SHARE else 0


def probe(target: Target, progress: Progress | None = None, *, seconds: float = SECONDS) -> dict[str, float]:
    """Measure one core of this machine, in a few seconds.

    Args:
        target: what to measure: this machine, or less of it.
        progress: called before each measurement.
        seconds: of each measurement, beyond the compilation.

    Returns:
        "<atom>" in GFLOP/s, "<level>" and "memory" in GB/s of one core, and
        "memory@all" in GB/s of all cores. Memory is left out where too little is free.

    Raises:
        TargetError: this machine cannot run the target.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    from portmm.probe import stream

    for isa in target.isas:
        if lacking := missing(isa):
            raise TargetError(f"cannot measure {target.name}: this machine lacks {', '.join(lacking)} for {isa.name}")
    loop = _open(stream(_basis(target), _widest(target)))
    far = memory_buffer(target)
    jobs: dict[str, Callable[[], float]] = {
        atom.name: partial(_peak, isa, i, seconds) for isa in target.isas for i, atom in enumerate(isa.atoms)
    }
    jobs |= {level.name: partial(_bandwidth, loop, level.bytes // 2, seconds) for level in target.levels}
    if far:
        jobs["memory"] = partial(_bandwidth, loop, far, seconds)
        if target.cores > 1:
            jobs[ALL_CORES] = partial(_bandwidth_of_all, loop, far, seconds, target.cores)
    tell = progress or (lambda _done, _all, _text: None)
    rates = {}
    for i, (name, job) in enumerate(jobs.items()):
        tell(i, len(jobs), name)
        rates[name] = job()
    tell(len(jobs), len(jobs), "done")
    return rates


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
    """Keep rates in the cache, where `measured` finds them.

    Returns:
        False if nothing was kept, because `target` describes another machine.
    """
    if not _is_host(target):
        return False
    name, machine = note_name(target), _machine(target)
    others = [line for line in (read_note(name) or "").splitlines() if not line.startswith(f"{machine}\t")]
    own = [f"{machine}\t{rate}\t{value!r}" for rate, value in rates.items()]
    write_note(name, "\n".join([*others, *own]) + "\n")
    return True


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
    best = _widest(target)
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
