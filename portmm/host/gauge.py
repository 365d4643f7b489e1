"""Timed loops that gauge what one core of this machine reaches.

Owns `Gauge`, a loop of `probe` that is built, loaded and given operands, and the timing of
repetitions. Imports `ir.abi`, `spec.dtype`, `host.microbenchmarks`, `target.target`; `build` and `emit` when a loop is
opened, NumPy and cffi only then.

Operands are random, since zeros run faster on some units. Multiply-adds work on panels that stay in
L1, bandwidths on a buffer of a given size.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from portmm.ir.abi import ARGS
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from portmm.host.microbenchmarks import Probe
    from portmm.target.target import Atom, Isa

SHORTEST = 1e-3
"""Seconds of one timed run: a thousand times the cost of a call and of the clock."""
PEAK_STEPS = 64
"""Steps of a panel: (14 + 32) * 64 elements of f32 take 12 KB, a part of any L1."""
WINDOW = 8 << 20
"""Bytes that a gauge of memory reads in one repetition beside other work: a millisecond's worth, and so much more than
a page that the prefetchers' start does not count."""
_BLOCK = 1 << 20  # bytes of random numbers, repeated to fill a buffer
_LINE = 64
_GROWTH = 64


@dataclass(frozen=True, slots=True)
class Loop:
    """A probe that is loaded: `start` takes repetitions, steps and three arrays."""

    probe: Probe
    library: Any
    start: Callable[[int, int, Any, Any, Any], None]

    @property
    def step_bytes(self) -> int:
        """Bytes of B that a step reads."""
        return self.probe.b * BY_NAME[self.probe.kernel.atom.right].bytes


@dataclass(frozen=True, slots=True)
class Gauge:
    """A rate that can be measured at any time.

    Attributes:
        name: of the rate: an atom, a level of memory.
        work: 1e9 operations, or bytes, of one repetition.
        run: does so many repetitions.
    """

    name: str
    work: float
    run: Callable[[int], object]


def open_loop(probe: Probe) -> Loop:
    """Compile and load a probe.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
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
    """A number of repetitions that take `SHORTEST` seconds or more."""
    repeats = 1
    # The least of some: one that was interrupted, or the first, seems long enough when it is not.
    while (took := min(timed(run, repeats) for _ in range(3))) < SHORTEST:
        repeats *= min(_GROWTH, max(2, round(SHORTEST / max(took, 1e-9))))
    return repeats


def timed(run: Callable[[int], object], repeats: int) -> float:
    """Seconds of some repetitions."""
    start = time.perf_counter()
    run(repeats)
    return time.perf_counter() - start


def least(run: Callable[[int], object], repeats: int, seconds: float) -> float:
    """The least seconds of one repetition, over as many runs as fit into some time, and one at least."""
    end = time.perf_counter() + seconds
    found = timed(run, repeats)
    while time.perf_counter() < end:
        found = min(found, timed(run, repeats))
    return found / repeats


def peak(isa: Isa, atom: Atom) -> Gauge:
    """The gauge of an atom's multiply-adds: 1e9 operations."""
    from portmm.host.microbenchmarks import peak as loop_of

    loop = open_loop(loop_of(isa, atom))
    p = loop.probe
    a, b = random(p.a * PEAK_STEPS, atom.left), random(p.b * PEAK_STEPS, atom.right)
    c = random(p.c, atom.acc)
    return Gauge(atom.name, p.flops * PEAK_STEPS / 1e9, lambda repeats: loop.start(repeats, PEAK_STEPS, a, b, c))


def streaming(isa: Isa, atom: Atom) -> Loop:
    """The loop that measures bandwidths by an atom's loads."""
    from portmm.host.microbenchmarks import stream

    return open_loop(stream(isa, atom))


def bandwidth(loop: Loop, name: str, size: int, window: int = 0) -> Gauge:
    """The gauge of one core's bandwidth over a buffer of about `size` bytes: 1e9 bytes.

    Args:
        loop: reads.
        name: of the level.
        size: bytes of the buffer.
        window: bytes that a repetition reads, each the next ones; 0 for all of the buffer. A buffer that
            no cache holds is so read in pieces, none of which is in a cache when its turn comes again.
    """
    atom = loop.probe.kernel.atom
    steps = max(1, (window or size) // loop.step_bytes)
    parts = max(1, size // window) if window else 1
    a, c = random(loop.probe.a, atom.left), random(loop.probe.c, atom.acc)
    rows = random(parts * steps * loop.probe.b, atom.right).reshape(parts, -1)
    turns: Iterator[Any] = cycle(rows)

    def windows(repeats: int) -> None:
        for _ in range(repeats):
            loop.start(1, steps, a, next(turns), c)

    def whole(repeats: int) -> None:
        loop.start(repeats, steps, a, rows[0], c)

    return Gauge(name, steps * loop.step_bytes / 1e9, windows if window else whole)


def bandwidth_of_all(loop: Loop, name: str, size: int, pool: Executor, cores: int) -> Gauge:
    """The gauge of the bandwidth that all cores reach together over a buffer of about `size` bytes: 1e9 bytes.

    Args:
        loop: reads.
        name: of the rate.
        size: bytes of the buffer, of which each core has a part.
        pool: has a thread for each core.
        cores: how many.
    """
    atom = loop.probe.kernel.atom
    steps = max(1, size // loop.step_bytes // cores)
    a = random(loop.probe.a, atom.left)
    parts = aligned(cores * steps * loop.probe.b, atom.right).reshape(cores, -1)
    sums = [random(loop.probe.c, atom.acc) for _ in range(cores)]
    # Pages belong to the memory node of the thread that writes them first.
    list(pool.map(_fill, parts))

    def share(repeats: int, core: int) -> None:
        loop.start(repeats, steps, a, parts[core], sums[core])

    return Gauge(
        name,
        cores * steps * loop.step_bytes / 1e9,
        lambda repeats: list(pool.map(partial(share, repeats), range(cores))),
    )


def random(elements: int, dtype: str) -> Any:
    """Elements or units: numbers in [-0.5, 0.5), whose products sum to something small, or any integers."""
    to = aligned(elements, dtype)
    _fill(to)
    return to


def aligned(elements: int, dtype: str) -> Any:
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
