"""Parts of a schedule: tiles, plans of operands, the atom, what shares the work, the epilogue.

Packing A for L2 on a CPU and filling four stages of shared memory on a GPU are the same record, a `Staging`.
Parts are named tuples: candidates are compared and hashed by the hundred, which these do without Python.
"""

from __future__ import annotations

from typing import NamedTuple

ALL = 0
"""Extent of a tile that covers all of a dimension."""
REGISTERS, SHARED, MEMORY = "registers", "shared", "memory"
"""Levels of stagings that have names of their own; the others are those of a target's caches."""
LOAD, PACK, PREFETCH, SHUFFLE = "load", "pack", "prefetch", "shuffle"
THROUGH, ASYNC, TMA = "registers", "cp.async", "tma"
"""Methods of a staging: loaded where it lies, packed to panels, prefetched, exchanged
among the threads of a warp; to shared memory through registers, by
asynchronous copies of threads, or by the copy engine."""


class Tile(NamedTuple):
    """The block of the product that is computed from one memory level.

    An extent of `ALL` means the whole of that dimension, at any size, so that
    one kernel serves many problems.

    Attributes:
        level: "registers", "L1", "L2" or "L3"; of a device, "registers", "warp", "shared" or "L2".
        m: rows.
        n: columns.
        k: depth.
        least: of the registers, rows of the smallest variant that a kernel contains, 0 for one variant: a dynamic M
            is partitioned into panels of nearly equal rows.
    """

    level: str
    m: int
    n: int
    k: int
    least: int = 0

    def __str__(self) -> str:
        return f"{self.level} {'x'.join(str(x or 'all') for x in (self.m, self.n, self.k))}"


class Staging(NamedTuple):
    """A copy of an operand's tile in a nearer level.

    Attributes:
        level: where the copy is.
        method: what makes it, one of those above.
        buffers: copies under way: stages of shared memory, panels of B that registers take at once, or rows of B, or
            steps, between a prefetch and its use; 0 where both are in the same row.
        vector: elements that are moved at once; of a prefetch in the same row, elements between it and its use.
    """

    level: str
    method: str
    buffers: int = 1
    vector: int = 1


class OperandPlan(NamedTuple):
    """Layout of an operand in memory, and how its tiles come nearer.

    Attributes:
        layout: "row", "col", "any", "packed" or "codes", which are int4 or int8 values.
        stagings: nearest level first.
        group: of int4 or int8 values, rows that share a scale.
        source: the type before rows are quantised.
        symmetric: int4 values have scales without offsets.
        e2m1: in their place there are floats of four bits.
        half: scales are f16.
    """

    layout: str = "row"
    stagings: tuple[Staging, ...] = ()
    group: int = 0
    source: str = ""
    symmetric: bool = False
    e2m1: bool = False
    half: bool = False

    def by(self, method: str) -> Staging | None:
        """The staging by a method, if there is one."""
        for x in self.stagings:
            if x.method == method:
                return x
        return None

    def at(self, level: str) -> Staging | None:
        """The staging in a level, if there is one."""
        for x in self.stagings:
            if x.level == level:
                return x
        return None

    @property
    def packed(self) -> bool:
        """Whether the operand is copied to panels."""
        return self.by(PACK) is not None

    @property
    def once(self) -> bool:
        """Whether all of it is packed before any product; else each thread packs panels just before use."""
        staging = self.by(PACK)
        return staging is not None and staging.level == MEMORY

    @property
    def inside(self) -> bool:
        """Whether the micro-kernel of the first slice of rows packs a panel as it multiplies by it."""
        staging = self.by(PACK)
        return staging is not None and staging.level == "L1"

    @property
    def prefetch(self) -> int:
        """Prefetch distance in rows or steps, 0 for none."""
        staging = self.by(PREFETCH)
        return staging.buffers if staging else 0

    @property
    def along(self) -> int:
        """Prefetch distance in elements of the same row, 0 for none."""
        staging = self.by(PREFETCH)
        return staging.vector if staging and not staging.buffers else 0

    @property
    def panels(self) -> int:
        """Panels that one call of the micro-kernel covers."""
        staging = self.at(REGISTERS)
        return staging.buffers if staging else 1

    @property
    def vector(self) -> int:
        """Elements that a thread moves at once."""
        return self.stagings[-1].vector if self.stagings else 1

    @property
    def asynchronous(self) -> bool:
        """Whether shared memory is filled by asynchronous copies, without registers."""
        return self.by(ASYNC) is not None

    def with_pack(self, pack: Staging | None) -> OperandPlan:
        """The plan with this packing, or none."""
        others = tuple([x for x in self.stagings if x.method != PACK])
        return self._replace(stagings=others if pack is None else (*others, pack))

    def covering(self, panels: int) -> OperandPlan:
        """The plan with a number of panels that one call of the micro-kernel covers."""
        others = tuple([x for x in self.stagings if x.level != REGISTERS])
        return self._replace(stagings=(Staging(REGISTERS, LOAD, panels), *others) if panels > 1 else others)

    def prefetched(self, distance: int, along: int = 0) -> OperandPlan:
        """The plan with another prefetch distance: in rows or steps, or in elements along a row."""
        near = tuple([x for x in self.stagings if x.level == REGISTERS])
        far = tuple([x for x in self.stagings if x.level != REGISTERS and x.method != PREFETCH])
        ahead = (Staging("L1", PREFETCH, distance, along or 1),) if distance or along else ()
        return self._replace(stagings=(*near, *ahead, *far))

    def filled(self, method: str, buffers: int, vector: int = 0) -> OperandPlan:
        """The plan with another number of buffers in shared memory, another method, and perhaps vectors."""
        return self._replace(stagings=(Staging(SHARED, method, buffers, vector or self.vector),))

    def moved(self, vector: int) -> OperandPlan:
        """The plan with vectors of another width."""
        staging = self.stagings[-1] if self.stagings else Staging(REGISTERS, LOAD)
        return self._replace(stagings=(*self.stagings[:-1], staging._replace(vector=vector)))


PACKED = Staging("L2", PACK)
PACKED_ONCE = Staging(MEMORY, PACK)
PACKED_INSIDE = Staging("L1", PACK)
PREFETCHED = Staging("L1", PREFETCH)
AHEAD = OperandPlan(stagings=(PREFETCHED,))
"""The plan of a C whose next tile is prefetched."""


class AtomUse(NamedTuple):
    """The atom of a schedule, and the side of its operands.

    Attributes:
        lanes: its lanes, 0 for the ISA's widest.
        kr: adjacent elements of k in a fragment; extents of k count such units.
        swap: A is its right operand, so that the kernel computes C^T = B^T . A^T.
    """

    lanes: int = 0
    kr: int = 1
    swap: bool = False


class Parallel(NamedTuple):
    """Partition of the work among threads, warps, warpgroups and blocks.

    Attributes:
        over: what CPUs' threads share: "tiles" of C, "batch" items, or "k".
        split: blocks along k; where there are several, a second kernel adds their sums,
        fixup: or the last block of each tile does, in the same kernel.
        cell: adjacent rows and columns of C in one thread.
        occupancy: blocks per processor that compilers must leave registers for; 0 for no bound.
        warpgroups: consumer warpgroups of a block, besides the producer; 0 where threads do both.
        pingpong: each of two warpgroups has tiles of its own, and stores one while the other multiplies.
        cluster: neighbouring blocks along the rows that load the same columns of B once for all; of int4 values,
            blocks that have slices of k of the same tile.
        persistent: maximum number of blocks, which process one tile after the other; 0 if each has one.
        grouped: rows are partitioned among the items of B, by row offsets in memory.
    """

    over: str = "tiles"
    split: int = 1
    fixup: bool = False
    cell: tuple[int, int] = (1, 1)
    occupancy: int = 0
    warpgroups: int = 0
    pingpong: bool = False
    cluster: int = 1
    persistent: int = 0
    grouped: bool = False
