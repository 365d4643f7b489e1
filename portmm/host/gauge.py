"""Timed loops that measure rates of this machine.

Owns `Gauge`, a microbenchmark that is built, loaded and bound to operands, and the timing of
repetitions. NumPy, cffi and the compiler are loaded only when a loop is opened.

Operands are random, since zeros run faster on some units. Multiply-adds run on panels that stay in
L1, bandwidths on a buffer of a specified size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from portmm.ir.abi import ARGS
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from portmm.host.microbenchmarks import Probe
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

SHORTEST = 1e-3
"""Least seconds of one timed run: a thousand times the cost of a call and of the clock."""
PEAK_STEPS = 64
"""Steps of a panel: (14 + 32) * 64 elements of f32 take 12 KB, a part of any L1."""
WINDOW = 8 << 20
"""Bytes that a gauge of memory reads in one repetition between other work: a millisecond's worth, and so much more
than a page that the start of the prefetchers is negligible."""
_BLOCK = 1 << 20  # bytes of random numbers, repeated to fill a buffer
_LINE = 64
_GROWTH = 64


@dataclass(frozen=True, slots=True)
class Loop:
    """A microbenchmark that is loaded: `start` takes repetitions, steps and three arrays."""

    probe: Probe
    library: Any
    start: Callable[[int, int, Any, Any, Any], None]

    @property
    def step_bytes(self) -> int:
        """Bytes of B that a step reads."""
        return self.probe.b * BY_NAME[self.probe.kernel.atom.right].bytes


@dataclass(frozen=True, slots=True)
class Gauge:
    """Measurement of a rate, ready to run.

    Attributes:
        name: name of the rate: an atom, or a level of memory.
        work: 1e9 operations, or bytes, of one repetition.
        run: runs a number of repetitions.
    """

    name: str
    work: float
    run: Callable[[int], object]


def open_loop(probe: Probe) -> Loop:
    """Compile and load a microbenchmark."""
    from cffi import FFI  # type: ignore[import-untyped]

    from portmm.build.sealed_library import load
    from portmm.build.shared_object import build
    from portmm.codegen.c_kernel import source

    kernel = probe.kernel
    arch = None if kernel.isa.arch == "any" else kernel.isa.arch
    artifact = build(source(kernel), flags=kernel.isa.flags, arch=arch, name=kernel.name, symbols=(kernel.name,))
    ffi: Any = FFI()
    ffi.cdef(f"{ARGS}\nvoid {kernel.name}(const portmm_args *g);")
    library = load(artifact.code, artifact.path, ffi.dlopen)
    function = getattr(library, kernel.name)

    def start(repeats: int, steps: int, a: Any, b: Any, c: Any) -> None:
        addresses = {
            x: ffi.cast("void *", y.__array_interface__["data"][0]) for x, y in zip("abc", (a, b, c), strict=True)
        }
        function(ffi.new("portmm_args *", {"m": repeats, "k": steps, **addresses}))

    return Loop(probe, library, start)


def repetitions(run: Callable[[int], object]) -> int:
    """Number of repetitions that take `SHORTEST` seconds or more."""
    repeats = 1
    # The shortest of three: the first, or one that was interrupted, can seem long enough when it is not.
    while (seconds := min(timed(run, repeats) for _ in range(3))) < SHORTEST:
        repeats *= min(_GROWTH, max(2, round(SHORTEST / max(seconds, 1e-9))))
    return repeats


def timed(run: Callable[[int], object], repeats: int) -> float:
    """Seconds of a number of repetitions."""
    start = time.perf_counter()
    run(repeats)
    return time.perf_counter() - start


def least(run: Callable[[int], object], repeats: int, seconds: float) -> float:
    """Least seconds of one repetition, over as many runs as fit into `seconds`, at least one."""
    end = time.perf_counter() + seconds
    shortest = timed(run, repeats)
    while time.perf_counter() < end:
        shortest = min(shortest, timed(run, repeats))
    return shortest / repeats


def peak(isa: Isa, atom: Atom) -> Gauge:
    """Gauge of an atom's multiply-adds, in 1e9 operations."""
    from portmm.host.microbenchmarks import peak as loop_of

    loop = open_loop(loop_of(isa, atom))
    p = loop.probe
    a, b = random(p.a * PEAK_STEPS, atom.left), random(p.b * PEAK_STEPS, atom.right)
    c = random(p.c, atom.acc)
    return Gauge(atom.name, p.flops * PEAK_STEPS / 1e9, lambda repeats: loop.start(repeats, PEAK_STEPS, a, b, c))


def streaming(isa: Isa, atom: Atom) -> Loop:
    """Loop that measures bandwidths by an atom's loads."""
    from portmm.host.microbenchmarks import stream

    return open_loop(stream(isa, atom))


def bandwidth(loop: Loop, name: str, size: int, window: int = 0) -> Gauge:
    """Gauge of one core's bandwidth over a buffer of about `size` bytes, in 1e9 bytes.

    Args:
        loop: the loop of `streaming`.
        name: name of the level.
        size: bytes of the buffer.
        window: bytes that a repetition reads, consecutive ones in each; 0 for the whole buffer. A buffer that
            exceeds every cache is then read in windows, none of which is still cached at its next turn.
    """
    atom = loop.probe.kernel.atom
    steps = max(1, (window or size) // loop.step_bytes)
    parts = max(1, size // window) if window else 1
    a, c = random(loop.probe.a, atom.left), random(loop.probe.c, atom.acc)
    rows = random(parts * steps * loop.probe.b, atom.right).reshape(parts, -1)
    next_rows: Iterator[Any] = cycle(rows)

    def read_windows(repeats: int) -> None:
        for _ in range(repeats):
            loop.start(1, steps, a, next(next_rows), c)

    def read_all(repeats: int) -> None:
        loop.start(repeats, steps, a, rows[0], c)

    return Gauge(name, steps * loop.step_bytes / 1e9, read_windows if window else read_all)


def bandwidth_of_all(loop: Loop, name: str, size: int, pool: Executor, cores: int) -> Gauge:
    """Gauge of the bandwidth of all cores together over a buffer of about `size` bytes, in 1e9 bytes.

    Args:
        loop: the loop of `streaming`.
        name: name of the rate.
        size: bytes of the buffer, of which each core reads a part.
        pool: a pool with one thread for each core.
        cores: number of cores.
    """
    atom = loop.probe.kernel.atom
    steps = max(1, size // loop.step_bytes // cores)
    a = random(loop.probe.a, atom.left)
    parts = aligned(cores * steps * loop.probe.b, atom.right).reshape(cores, -1)
    sums = [random(loop.probe.c, atom.acc) for _ in range(cores)]
    # Pages belong to the memory node of the thread that writes them first.
    list(pool.map(_fill, parts))

    def run_part(repeats: int, core: int) -> None:
        loop.start(repeats, steps, a, parts[core], sums[core])

    return Gauge(
        name,
        cores * steps * loop.step_bytes / 1e9,
        lambda repeats: list(pool.map(partial(run_part, repeats), range(cores))),
    )


def random(elements: int, dtype: str) -> Any:
    """Array of random elements: numbers in [-0.5, 0.5), whose products have small sums, or any integers."""
    array = aligned(elements, dtype)
    _fill(array)
    return array


def aligned(elements: int, dtype: str) -> Any:
    """Array that starts at a cache line, as a kernel's panels do: a load across two lines takes twice as long."""
    import numpy as np

    bytes_ = elements * BY_NAME[dtype].bytes
    raw = np.empty(bytes_ + _LINE, np.uint8)
    first = -raw.__array_interface__["data"][0] % _LINE
    numpy = BY_NAME[dtype].numpy
    # NumPy has no bfloat16: the array holds the bits.
    return raw[first : first + bytes_].view("uint16" if numpy == "bfloat16" else numpy)


def _fill(array: Any) -> None:
    import numpy as np

    count, rng = min(array.size, _BLOCK // array.itemsize), np.random.default_rng(0)
    if array.dtype.kind == "f":
        block = rng.random(count).astype(array.dtype) - array.dtype.type(0.5)
    elif array.dtype == np.uint16:
        block = ((rng.random(count, np.float32) - np.float32(0.5)).view(np.uint32) >> 16).astype(np.uint16)
    else:
        limits = np.iinfo(array.dtype)
        block = rng.integers(limits.min, limits.max, count, array.dtype, endpoint=True)
    for first in range(0, array.size, block.size):
        part = array[first : first + block.size]
        part[:] = block[: part.size]
