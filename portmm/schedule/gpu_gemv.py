"""The schedules worth considering for a product with few rows on a device: see `kernels.stream`.

Owns their enumeration, and what they need of registers and shared memory. Imports `schedule.schedule`,
`spec.problem`, `target.target`. What sets them apart is how many bytes are on their way at once, how long
the runs are that neighbours read, and how many blocks there are; the cost model chooses.
On CPUs under OpenCL `kernels.direct` streams as fast, without barriers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.schedule.schedule import ALL, Schedule, Tile
from portmm.spec.dtype import BY_NAME, CODES_KR, size
from portmm.spec.problem import family

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.spec.problem import Problem
    from portmm.target.target import Atom, Isa, Target

ROWS = 8
"""Rows of A, at most: beyond, multiply-adds take longer than B."""
ADDRESSES = 20
"""Registers of a thread for counters and what a compiler needs, beside two for each address."""
BANKS = 32
SPLITS = (2, 4, 8, 16, 32, 64)
SUMS = 31
"""Sums of a thread that leave room for enough threads."""
UNROLLED = 256
"""Multiply-adds in a row, of all that a thread asks for at once: compilers take long over more."""
FLYING = 128
"""Bytes that a thread asks for at once, at most: 200 such threads have enough on their way for a processor."""


def candidates(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: tuple[int, int, int]) -> Iterator[Schedule]:
    """Schedules for a problem, none if it has many rows.

    Args:
        p: what to compute.
        isa: the instruction set.
        atom: multiplies.
        target: a device.
        vectors: elements of A, B and C that may be moved at once.
    """
    if p.m > ROWS or p.deterministic:
        return
    deep_first = p.b in ("col", "codes")
    whole_units = deep_first and p.a == "row" and min(vectors[:2]) >= atom.k_pack
    if atom.k_pack > 1 and not whole_units:
        return
    wide = vectors[1] if p.b != "any" else 1
    width = wide // atom.k_pack if deep_first else 1
    warp = target.device.warp if target.device else 1
    shapes = _along_k(warp) if deep_first else _along_n(warp, wide, p.m)
    for nr, shared, across in shapes:
        turns = -(-p.k // (shared * width * atom.k_pack))
        most = min(
            turns, UNROLLED // (p.m * nr * width), int(FLYING // (size(p.types[1]) * nr * (wide if deep_first else 1)))
        )
        for deep in _deep(most):
            one = _schedule(p, isa, atom, (nr, deep, shared, across), (width, wide, vectors[0]), target)
            yield from _split(one, p, target)


def _deep(most: int) -> tuple[int, ...]:
    """Pieces that a thread asks for at once, two ways; hardly more than there are."""
    found = [x for x in (8, 4, 2, 1) if x <= max(most, 1)]
    return tuple(found[:2])


def _along_k(warp: int) -> Iterator[tuple[int, int, int]]:
    """Columns of a thread, threads along k and across, where columns are side by side."""
    for nr in (1, 2, 4):
        for shared in (max(warp // 4, 1), warp, 4 * warp):
            for threads in (4 * warp, 8 * warp):
                yield nr, shared, threads // shared


def _along_n(warp: int, wide: int, m: int) -> Iterator[tuple[int, int, int]]:
    """The same where rows of n are side by side: a thread's columns are those of a vector, or, of many sums, half."""
    for nr in (wide, wide // 2) if wide * m > SUMS else (wide,):
        for across in (warp // 16, warp // 8, warp // 4, warp // 2, warp):
            for threads in (4 * warp, 8 * warp, 16 * warp, 32 * warp):
                if across:
                    yield nr, threads // across, across


def _schedule(  # noqa: PLR0917 - parts of one record
    p: Problem, isa: Isa, atom: Atom, shape: tuple[int, int, int, int], moved: tuple[int, int, int], target: Target
) -> Schedule:
    nr, deep, shared, across = shape
    width, wide, vector = moved
    piece, warp = deep * width, target.device.warp if target.device else 1
    deep_first = p.b in ("col", "codes")
    near = min(warp, shared if deep_first else across)
    far = max(1, min(warp // near, across if deep_first else shared))
    along, beside = (near, far) if deep_first else (far, near)
    tiles = (
        Tile("registers", p.m, nr, piece), Tile("warp", p.m, nr * beside, piece * along),
        Tile("shared", p.m, nr * across, piece * shared), Tile("L2", p.m, ALL, ALL),
    )  # fmt: skip
    chunk = min(vector, width * atom.k_pack, CODES_KR if p.b == "codes" else vector) if p.a == "row" else 1
    return Schedule(
        "stream", isa.name, p.dtype, tiles, (p.m,), a=p.a, b=p.b, pack_a=False, pack_b=False, kr=atom.k_pack,
        fused=p.fused, group=group_of(p), stages=1, vectors=(chunk, wide if deep_first else nr, 1),
        c="row" if p.c == "row" else "any",
    )  # fmt: skip


def group_of(p: Problem) -> int:
    """Rows of codes that share a scale, 0 for all."""
    return family(p.family).group if p.b == "codes" else 0


def _split(s: Schedule, p: Problem, target: Target) -> Iterator[Schedule]:
    """A schedule, and with slices of k where there are few blocks."""
    device = target.device
    assert device is not None  # noqa: S101 - `grid_candidates` looked
    blocks = -(-p.n // s.block.n) * p.batch
    yield s
    if p.acc != "f64":
        enough = [x for x in SPLITS if blocks < device.processors < 1.5 * blocks * x]
        yield from (replace(s, split=x) for x in enough[:2])


def along_k(s: Schedule) -> bool:
    """B's columns are side by side in memory."""
    return s.b in ("col", "codes")


def width(s: Schedule) -> int:
    """Units that a thread takes of k at once."""
    return s.vectors[1] // s.kr if along_k(s) else 1


def shares(s: Schedule) -> int:
    """Threads of a block with the same columns."""
    return s.block.k // s.tiles[0].k


def flying(s: Schedule) -> int:
    """Bytes of B that a thread has on their way at once."""
    return int(s.nr * s.tiles[0].k * s.kr * size(s.types[1]))


def registers(s: Schedule) -> int:
    """Registers of a thread."""
    a, b, _ = s.types
    chunk = s.vectors[0] // s.kr or 1
    narrow = s.kr == 1 and BY_NAME[b].bytes < BY_NAME["f32"].bytes
    parts = (s.nr if narrow else 0) * chunk + chunk + -(-chunk * s.kr * BY_NAME[a].bytes // 4)
    addresses = 2 * (s.mr + (s.nr if along_k(s) else 1))
    if s.b == "codes":
        parts, addresses = CODES_KR * (s.nr + 1) + s.mr * (s.nr + 1), addresses + 4 * s.nr
    words = 2 if a == b == "f64" else 1
    return words * (s.mr * s.nr + parts) + -(-flying(s) // 4) + addresses + ADDRESSES


def apart(s: Schedule) -> tuple[int, int]:
    """Words of shared memory from one output to the next, and from one thread's sum of it to another's.

    Threads of a warp write one output each at a time, and add one each: all of them find banks of their own.
    """
    across = s.block.n // s.nr
    outputs = s.mr * s.block.n
    if along_k(s):
        return shares(s) + 1, 1
    return 1, outputs if across >= BANKS else -(-outputs // BANKS) * BANKS + across


def shared_words(s: Schedule) -> int:
    """Sums that wait in shared memory of a block."""
    outputs, (far, near) = s.mr * s.block.n, apart(s)
    return (outputs - 1) * far + (shares(s) - 1) * near + 1


def shared_bytes(s: Schedule) -> int:
    """Shared memory of a block."""
    return shared_words(s) * (8 if s.dtype == "f64" else 4)
