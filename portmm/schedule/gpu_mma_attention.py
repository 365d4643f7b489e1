"""Tiles of attention for units that multiply fragments which a warp holds: see `kernels.mma_attention`.

Owns `MatrixTiling`, and the choice of one. Imports `schedule.gpu_attention`, `schedule.gpu_candidates`, `spec.dtype`, `target.target`. A block of
warps keeps BM queries and their sums O in registers, 16 or 32 rows to a warp, and walks over blocks of BN keys, whose
K and V lie in slots of shared memory in turn, K, V, K, V:

    Q[BM][d]          for the whole walk; fragments in registers if these allow
    slots x [BN][d]   of K or V: one is multiplied while the others are on their way

What tiles take is estimated from the target's rates, in cycles of a processor for one block of keys: products by
matrix units, fragments and copies through shared memory at 128 bytes a cycle, and the softmax in
plain threads. Products and shared memory hide behind each other, the softmax behind both only in so far as there are
other warps. Blocks that lack neighbours, or queries, take as long as full ones. The tiles that take least are used.

These units are used for f16 and bf16 if the target has an atom of theirs, heads are of multiples of 16 elements up to
`WIDEST_HEAD`, and rows of Q, K and V dense and aligned to 4 bytes; else threads multiply: see `attention_tiling`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.schedule.gpu_candidates import PARTS, asynchronous

if TYPE_CHECKING:
    from portmm.schedule.gpu_attention import Asked
    from portmm.target.target import Atom, Device, Isa, Target

HELD = ("f16", "bf16")
WIDEST_HEAD = 256
UNIT = 16
"""Elements of heads, rows of fragments and keys that are multiplied together."""
WARP = 32
SIZE, WORD, PIECE = 2, 4, 16
LEAST_COPY = 4
"""Bytes of an asynchronous copy, at least: PTX ISA, cp.async. Fewer at once keep no unit busy."""
MANY = (
    (128, 4, 64), (128, 4, 32), (128, 8, 64), (64, 4, 64), (64, 4, 32), (64, 2, 64), (64, 2, 32),
    (32, 2, 64), (32, 2, 32), (16, 1, 64), (16, 1, 32),
)  # fmt: skip
"""Queries, warps, keys."""
SLOTS = (2, 4)
ADDRESSES, UNEVEN, THROUGH = 62, 10, 24
"""Registers of a thread for addresses, counters, an expression and fragments, for threads that do not move whole
rows, and for copies that pass through registers, beside one and a half for each that waits; the least with which
NVRTC 13 spills nothing."""
FEW = 16
"""Queries of a head up to which those of all heads that share keys make one tile, and keys are handed out in runs."""
MOST_TOGETHER = 64
"""Rows of such a tile, at most."""
RUN = 256
"""Keys of a run, at least."""
BUSY = 4
"""Blocks for each processor that runs are to make."""
MOST_RUNS = 128
SHARED_RATE, CACHE_RATE, POWERS, PLAIN = 128, 48, 16, 6
"""Of a processor in a cycle: bytes of shared memory and of L2, and powers of two (CUDA C++ Programming Guide,
throughput of native arithmetic instructions; of L2, about); other operations on a score."""
HIDDEN = 2
"""Warps of a processor of which each waits for itself as long as it works."""


@dataclass(frozen=True, slots=True)
class MatrixTiling:
    """Sizes of tiles, and how operands lie.

    Attributes:
        d: elements of a head of Q and K.
        dv: of V.
        queries: of a block; heads that share keys have theirs in turn where there are `runs`.
        warps: of a block.
        keys: of a step.
        slots: tiles of K and V in shared memory.
        held: fragments of Q stay in registers.
        vectors: elements of Q, K, V and of the result that are moved at once.
        loose: "o" where rows of the result are not dense in memory.
        runs: keys are handed out in runs, for another kernel to put together.
        copies: tiles are copied past the registers; else through them, to two slots.
    """

    d: int
    dv: int
    queries: int
    warps: int
    keys: int
    slots: int = 2
    held: bool = True
    vectors: tuple[int, int, int, int] = (8, 8, 8, 8)
    loose: str = ""
    runs: bool = False
    copies: bool = True

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.warps * WARP

    @property
    def high(self) -> int:
        """Fragments of a warp along queries."""
        return self.queries // (self.warps * UNIT)

    @property
    def rows(self) -> int:
        """Queries of a lane."""
        return 2 * self.high

    @property
    def strips(self) -> int:
        """Eights of keys."""
        return self.keys // 8

    @property
    def columns(self) -> int:
        """Eights of columns of V."""
        return self.dv // 8

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        most = max(pitch(self.d), pitch(self.dv))
        return SIZE * (self.queries * pitch(self.d) + self.slots * self.keys * most)

    @property
    def registers(self) -> int:
        """Registers of a thread, about."""
        queries = self.d // UNIT * 4 if self.held else 4
        moved = 0
        if not self.copies:
            words = -(-self.keys * max(self.d, self.dv) * SIZE // (WORD * self.threads))
            moved = words + words // 2 + THROUGH
        uneven = any(self.threads % (x * SIZE // PIECE) for x in (self.d, self.dv))
        own = self.high * (4 * (self.strips + self.columns) + queries + 8)
        return own + moved + ADDRESSES + (UNEVEN if uneven else 0)


def pitch(width: int) -> int:
    """Elements from one row of a tile to the next: see `kernels.head_tiles`."""
    pieces = width * SIZE // PIECE
    return width if pieces % 8 == 0 or pieces in (2, 4) else width + PIECE // SIZE


def unit(held: str, target: Target) -> tuple[Isa, Atom] | None:
    """What multiplies fragments of a type in a warp, or None; OpenCL has no word for it."""
    if target.device is None or target.device.language != "cuda":
        return None
    ways = ((isa, x) for isa in target.isas for x in isa.atoms if x.unit == "warp" and x.a == x.b == held)
    return next(ways, None) if held in HELD else None


def lacks(asked: Asked, target: Target) -> str:
    """Why fragments cannot be multiplied, or an empty string."""
    if unit(asked.held, target) is None:
        return f"{target.name} multiplies no fragments of {asked.held}"
    if asked.d % UNIT or asked.dv % UNIT or max(asked.d, asked.dv) > WIDEST_HEAD or 0 in (asked.d, asked.dv):
        return f"heads have {asked.d} and {asked.dv} elements: no multiples of {UNIT} up to {WIDEST_HEAD}"
    if set(asked.loose) & set("qkv") or min(asked.vectors[:3]) * SIZE < LEAST_COPY:
        return "rows of an operand are not dense, or not aligned to 4 bytes"
    return "" if tilings(asked, target) else "no tiles fit its registers and shared memory"


def tilings(asked: Asked, target: Target) -> list[MatrixTiling]:
    """Legal tiles, best first: see above."""
    device = target.device
    assert device is not None  # noqa: S101 - whoever asks has one
    together = asked.queries * asked.group
    runs = asked.queries <= FEW and asked.keys >= 2 * RUN
    rows = together if runs else asked.queries
    q, k, v, o = (min(x, PIECE // SIZE) for x in asked.vectors)
    found = []
    copies = asynchronous(target)
    for queries, warps, keys in MANY:
        half_empty = queries > UNIT and queries >= 2 * rows
        again = queries < min(rows, MOST_TOGETHER)  # keys are read again for the rest
        if half_empty or (runs and (again or warps * UNIT != queries or queries > MOST_TOGETHER)):
            continue
        for slots in SLOTS if copies else SLOTS[:1]:
            t = MatrixTiling(
                asked.d, asked.dv, queries, warps, keys, slots, True, (q, k, v, o), asked.loose, runs, copies
            )
            for held in (True, False):
                one = replace(t, held=held)
                if not _illegal(one, device):
                    found.append(one)
                    break
    return sorted(found, key=lambda t: time(t, asked, target))


def _illegal(t: MatrixTiling, device: Device) -> bool:
    """They need more than there is."""
    few = t.threads > device.block_threads or t.shared_bytes > device.shared_bytes
    return few or t.registers > device.thread_registers or t.registers * t.threads > device.registers


def resident(t: MatrixTiling, device: Device) -> int:
    """Blocks that a processor holds at once."""
    each = -(-t.registers // 8) * 8
    warps = PARTS * (device.registers // (PARTS * each * WARP))
    return max(1, min(warps // t.warps, device.processor_shared_bytes // t.shared_bytes, device.threads // t.threads))


def time(t: MatrixTiling, asked: Asked, target: Target) -> float:
    """Cycles of a processor that attention takes, about."""
    device = target.device
    found = unit(asked.held, target)
    assert device is not None and found is not None  # noqa: S101, PT018 - `lacks` said so
    rate, plain = target.rates[found[1].name], target.rates["simt_f32"]
    elements = t.keys * (t.d + t.dv)
    products = t.queries * elements / rate
    again = 0 if t.held else t.queries * t.d
    shared = SIZE * (elements * (t.warps + 1) + again) / SHARED_RATE
    cached = SIZE * elements / CACHE_RATE
    scores = t.queries * t.keys
    softmax = scores * (PLAIN / plain + 1 / POWERS) + t.queries * t.dv / plain
    rows = asked.queries * (asked.group if t.runs else 1)
    blocks = asked.heads // (asked.group if t.runs else 1) * -(-rows // t.queries)
    blocks *= min(MOST_RUNS, -(-asked.keys // RUN)) if t.runs else 1
    beside = min(resident(t, device), -(-blocks // device.processors))
    waits = 1 + HIDDEN / (beside * t.warps)
    if t.runs:
        # What is on its way hides the latency of memory: of about as much as a tile of two blocks.
        waits = 1 + 2 * 64 / (resident(t, device) * (t.slots - 1) * t.keys)
    turns = -(-blocks // device.processors) * -(-asked.keys // t.keys)
    return turns * (max(products, shared, cached) + softmax) * waits


def choose(asked: Asked, target: Target) -> MatrixTiling | None:
    """The tiles to use, None where threads are to multiply."""
    return None if lacks(asked, target) else tilings(asked, target)[0]


def runs_of(t: MatrixTiling, asked: Asked, target: Target) -> tuple[int, int]:
    """How many runs the keys are cut in, and the keys of each: a number that follows from sizes and device alone."""
    device = target.device
    assert device is not None  # noqa: S101 - whoever asks has one
    if not t.runs:
        return 1, asked.keys
    blocks = asked.heads // asked.group * -(-asked.queries * asked.group // t.queries)
    busy = min(BUSY, resident(t, device)) * device.processors
    wanted = min(MOST_RUNS, max(1, busy // blocks), -(-asked.keys // RUN))
    each = -(-asked.keys // (wanted * t.keys)) * t.keys
    return -(-asked.keys // each), each
