"""Schedule of a product.

Owns `Schedule` and `Tile`. A schedule has one tile per memory level; it is legal
if every tile's footprint fits its level, on every kind of machine alike. Selection
is in other modules: see `candidates` and `cost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.spec.dtype import BY_NAME, CODES_KR, accumulator, types, unit
from portmm.spec.kernel_name import KernelName
from portmm.spec.problem import Family

if TYPE_CHECKING:
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target


ALL = 0
TALLEST = 1024
"""Largest MR of any register tile, so that a parsed string can be bounded by it."""
WARPGROUP = 128
"""Threads that multiply together on Hopper."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The block of the product that is computed from one memory level.

    An extent of `ALL` means the whole of that dimension, at any size, so that
    one kernel serves many problems.

    Attributes:
        level: "registers", "L1", "L2" or "L3".
        m: rows.
        n: columns.
        k: depth.
    """

    level: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.level} {'x'.join(str(x or 'all') for x in (self.m, self.n, self.k))}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The parameters that define the kernel of a product.

    Attributes:
        program: the block program, a module of `kernels/`: "gemm", "dot" or "tiles".
        isa: name of the instruction set.
        dtype: element types of A, B and C, as in a `Problem`.
        tiles: one per memory level, nearest first: registers, L1, L2, L3.
        heights: MR variants, the rows of register tiles that the kernel contains; a dynamic M is
            partitioned into panels of nearly equal rows, all in this tuple.
        panels: B panels that one call of the micro-kernel covers.
        a: layout of A: "row", "col" or "any".
        b: layout of B: "row", "col", "any" or "packed".
        pack_a: A is copied to panels first.
        pack_b: B is copied to panels first.
        once: all of B is packed before any product, by all threads for all of them;
            else each thread packs its panels just before use.
        swap: the kernel computes C^T = B^T . A^T.
        over: the parallel dimension: "tiles" of C, "batch" items, or "k".
        lanes: lanes of the atom, 0 for the ISA's widest.
        prefetch: prefetch distance in rows of a B in place, or for tiles in steps of a B in panels, 0 for none.
        ahead: the micro-kernel prefetches the next tile of C and the next B panel.
        kr: adjacent elements of k in a fragment; extents of k count such units.
        static: m, n, k if they are compiled in; of a device, n and k.
        post: conversion of sums to elements of C, as in a `Problem`.
        group: of a B of int4 or int8 values, rows that share a scale.
        source: the type of A before its rows are quantised.
        fused: expressions of sums for C and other results, as in a `Problem`.
        stages: of a device, tiles of A and B in shared memory, one in use while the others are filled.
        copies: tiles are filled by asynchronous copies, without registers.
        split: blocks along k; where there are several, a second kernel adds their sums,
        joined: or the last block of each tile does, in the same kernel.
        vectors: elements of A, B and C that a thread moves at once.
        cell: adjacent rows and columns of C in one thread.
        c: layout of C on a device: "row" or "any".
        grouped: of a device, rows are partitioned among the items of B, by row offsets in memory.
        resident: occupancy, the number of blocks per processor that compilers must leave registers for; 0 for
            no bound.
        groups: consumer warpgroups of a block, besides the producer; 0 where threads do both.
        pingpong: each of two warpgroups has tiles of its own, and stores one while the other multiplies.
        cluster: neighbouring blocks along the rows that load the same columns of B once for all.
        persistent: maximum number of blocks, which process one tile after the other; 0 if each has one.
    """

    program: str
    isa: str
    dtype: str
    tiles: tuple[Tile, ...]
    heights: tuple[int, ...]
    panels: int = 1
    a: str = "row"
    b: str = "row"
    pack_a: bool = True
    pack_b: bool = True
    once: bool = False
    swap: bool = False
    over: str = "tiles"
    lanes: int = 0
    prefetch: int = 0
    ahead: bool = False
    kr: int = 1
    static: tuple[int, int, int] | None = None
    post: str = ""
    group: int = 0
    source: str = ""
    fused: str = ""
    stages: int = 0
    copies: bool = False
    split: int = 1
    vectors: tuple[int, int, int] = (1, 1, 1)
    cell: tuple[int, int] = (1, 1)
    c: str = "row"
    resident: int = 0
    groups: int = 0
    pingpong: bool = False
    cluster: int = 1
    persistent: int = 0
    grouped: bool = False
    joined: bool = False

    @property
    def mr(self) -> int:
        """Rows of the register tile."""
        return self.tiles[0].m

    @property
    def nr(self) -> int:
        """Columns of the register tile."""
        return self.tiles[0].n

    @property
    def kc(self) -> int:
        """Depth of a block of k: that of the blocks of A and B in L2."""
        return self.tiles[2].k

    @property
    def mc(self) -> int:
        """Rows of A kept in L2."""
        return self.tiles[2].m

    @property
    def nc(self) -> int:
        """Columns of the block of C kept in L3."""
        return self.tiles[3].n

    @property
    def family(self) -> str:
        """The packed layout of B: element type, panel width, and adjacent elements of k."""
        a, b, _ = self.types
        if self.b == "codes":
            return str(Family(b, self.nr, CODES_KR, group=self.group))
        return str(Family(b, self.nr, self.kr, accumulator(a, b) == "s32"))

    @property
    def types(self) -> tuple[str, str, str]:
        """Names of the element types of A, B and C."""
        return types(self.dtype)

    def element_types(self, atom: Atom) -> tuple[str, str]:
        """Element types that micro-kernels read of A and B: fragments of a packed operand, else the operand's own."""
        a, b, _ = self.types
        in_b = unit(b, self.kr) if self.b == "packed" else "s32" if self.b == "codes" else b
        return (atom.left if self.pack_a else a), (atom.right if self.pack_b else in_b)

    @property
    def slices(self) -> bool:
        """Whether, on a device, slices of k are added by another kernel (split-K reduction)."""
        return self.split > 1 and not self.joined

    def along_k(self, side: int) -> bool:
        """Whether k is contiguous in A (0), or in B (1)."""
        return (self.a, self.b)[side] == ("row", "col")[side]

    @property
    def block(self) -> Tile:
        """The tile of a block of threads of a device."""
        return self.tiles[2]

    @property
    def threads(self) -> int:
        """The threads of a block of a device."""
        if self.groups:
            return WARPGROUP * (self.groups + 1)
        along_k = self.block.k // self.tiles[0].k if self.program in ("stream", "coded") else 1  # threads split k, too
        return (self.block.m // self.mr) * (self.block.n // self.nr) * along_k

    @property
    def warp_lanes(self) -> int:
        """Lanes of a warp of a device that share the warp's tile."""
        return (self.tiles[1].m // self.mr) * (self.tiles[1].n // self.nr)

    def _b(self) -> str:
        if self.pack_b:
            return "B packed once" if self.once else "B packed"
        return "B prepacked" if self.b == "packed" else f"B {self.b} in place"

    def name(self, atom: Atom) -> KernelName:
        """The kernel's name."""
        return KernelName(self.program, atom.acc, atom.a, atom.b, self.mr, self.nr, atom.k_pack, self.isa)

    def __str__(self) -> str:
        if self.stages:
            return self._on_device()
        how = [
            "A packed" if self.pack_a else f"A {self.a} in place",
            self._b(),
        ]
        how += ["transposed"] if self.swap else []
        how += [f"{self.panels} panels a visit"] if self.panels > 1 else []
        how += [f"threads over {self.over}"]
        how += [f"sums finished by {self.post}"] if self.post else []
        how += ["expressions fused"] if self.fused else []
        how += [f"static {'x'.join(map(str, self.static))}"] if self.static else []
        return f"{self.program} {self.isa}: {', '.join(map(str, self.tiles))}; {', '.join(how)}"

    def _on_device(self) -> str:
        moved = " x ".join(map(str, self.vectors))
        how = [f"{self.threads} threads", f"A {self.a}, B {self.b}, {moved} elements at once"]
        how += [f"{self.stages} stages{' of asynchronous copies' if self.copies else ''}"]
        how += self._groups() if self.groups else []
        how += [f"k split in {self.split}{', joined' if self.joined else ''}"] if self.split > 1 else []
        how += [f"n {self.static[1]} and k {self.static[2]} compiled in"] if self.static else []
        how += ["rows in groups"] if self.grouped else []
        how += ["expressions fused"] if self.fused else []
        return f"{self.program} {self.isa}: {', '.join(map(str, self.tiles))}; {', '.join(how)}"

    def _groups(self) -> list[str]:
        """Description of the warpgroups of a block."""
        how = [f"{self.groups} warpgroup{'s' if self.groups > 1 else ''}{' in turns' if self.pingpong else ''}"]
        how += ["operands exchanged"] if self.swap else []
        how += [f"clusters of {self.cluster}"] if self.cluster > 1 else []
        return [*how, *([f"{self.persistent} persistent blocks"] if self.persistent else [])]


def finishes(s: Schedule, atom: Atom) -> bool:
    """Whether sums are not yet elements of C: scaled, in expressions, of another type, or whole tiles."""
    return s.program == "tiles" or bool(s.post or s.fused) or s.types[2] != atom.acc


def shifts(s: Schedule, atom: Atom) -> bool:
    """Whether A is shifted by 128 as it is packed, from signed to unsigned or back."""
    return atom.acc == "s32" and {s.types[0], atom.a} == {"s8", "u8"}


def registers(s: Schedule, atom: Atom) -> int:
    """Number of live vector registers, or tiles, of the largest micro-kernel of a schedule."""
    if s.program == "tiles":
        rows, columns = s.mr // atom.m, s.nr // atom.n * s.panels
        return rows * columns + rows + 1
    if s.program == "dot":
        return s.mr * s.nr + s.mr + 2
    columns = s.nr // atom.n * s.panels
    if s.b == "codes" and not s.pack_b:
        # Sums over a group and over all of k; words, int4 values, a broadcast, a table. Where a group
        # takes few steps, sums over all of k may stay in memory.
        sums = 1 if atom.takes_int4 else 2
        return (max(s.heights) * sums + 2) * columns + 2
    return atom.strips(max(s.heights)) * columns + columns + 1


def footprint(tile: Tile, s: Schedule, p: Problem, atom: Atom) -> int:
    """Bytes that must stay in a tile's level while the tile is computed.

    L1 has a panel of B and a slice of A, or, of a panel that
    is streamed from L2, as much of its depth as fits; L2
    the block of A (MC x KC) and the panels of B that are packed together: Low et al., "Analytical Modeling
    Is Enough for High-Performance BLIS", ACM TOMS 43(2), 2016, section 4. L3
    has the block of C (MC x NC) between passes over k.
    """
    m, n = (p.n, p.m) if s.swap else (p.m, p.n)
    depth = -(-p.k // s.kr)
    tm, tn, tk = min(tile.m or m, m), min(tile.n or n, n), min(tile.k or depth, depth)
    a, b = (BY_NAME[x].bytes for x in s.element_types(atom))
    if tile.level == "L1":
        return (s.mr * a + s.nr * s.panels * b) * tk
    if tile.level == "L2":
        return (tm * a + max(tn if tile.n else 0, s.nr * s.panels) * b) * tk
    return tm * tn * BY_NAME[atom.acc].bytes


def inconsistent(s: Schedule) -> str:
    """The contradiction between parameters of a schedule, for any problem, or an empty string."""
    if s.once and not (s.pack_b and s.over == "tiles"):
        return "packs B once for all threads, but does not pack B or does not have over=tiles"
    return ""


def illegal(s: Schedule, p: Problem, isa: Isa, atom: Atom, target: Target) -> str:
    """The reason why a schedule cannot be used for a problem on a target, or an empty string.

    A level limits only the tiles that the schedule keeps there: a tile
    whose extents are ALL is streamed through it.
    """
    if inconsistent(s):
        return inconsistent(s)
    if p.b in ("packed", "codes") and s.family != p.family:
        return f"reads panels of {s.family}, but B is packed as {p.family}"
    if registers(s, atom) > isa.registers:
        return f"needs {registers(s, atom)} registers of {isa.registers}"
    for tile in s.tiles[1:]:
        level = target.level(tile.level)
        if level is not None and ALL not in (tile.m, tile.n, tile.k) and footprint(tile, s, p, atom) > level.bytes:
            return f"{tile} takes {footprint(tile, s, p, atom)} bytes of {level.bytes} in {level.name}"
    return ""


def spell(s: Schedule) -> str:
    """A schedule as one string, for a kernel's header and the command line."""
    tiles = "/".join(f"{t.m}x{t.n}x{t.k}" for t in s.tiles)
    mr_range = f"{s.heights[0]}-{s.heights[-1]}"
    marks = [f"{name}={getattr(s, name)}" for name in _NAMED]
    marks += [f"kr={s.kr}"] if s.kr > 1 else []
    marks += [f"post={s.post}"] if s.post else []
    marks += [f"source={s.source}"] if s.source else []
    marks += [f"fused={s.fused}"] if s.fused else []
    marks += [f"group={s.group}"] if s.b == "codes" else []
    marks += [name for name in _MARKS if getattr(s, name)]
    if s.stages:
        marks += [f"stages={s.stages}", f"split={s.split}"]
        marks += [f"vectors={'x'.join(map(str, s.vectors))}", f"cell={'x'.join(map(str, s.cell))}"]
        marks += [f"c={s.c}"] if s.c != "row" else []
        marks += [f"resident={s.resident}"] if s.resident else []
        marks += [f"groups={s.groups}", f"cluster={s.cluster}"] if s.groups else []
        marks += [f"persistent={s.persistent}"] if s.persistent else []
    marks += [f"static={'x'.join(map(str, s.static))}"] if s.static else []
    return ":".join([s.program, s.isa, s.dtype, tiles, mr_range, ",".join(marks)])


def parse(text: str) -> Schedule:
    """The schedule that `spell` wrote.

    Raises:
        ValueError: `text` is not such a string.
    """
    try:
        program, isa, dtype, tiles, mr_range, marks = text.split(":")
        sizes = [[int(x) for x in t.split("x")] for t in tiles.split("/")]
        least, most = (min(int(x), TALLEST) for x in mr_range.split("-"))
        named = dict(x.partition("=")[::2] for x in marks.split(","))
        static = named.get("static")
        return Schedule(
            program,
            isa,
            dtype,
            tuple(Tile(level, *size) for level, size in zip(_levels(named), sizes, strict=True)),
            tuple(range(least, most + 1)),
            int(named["panels"]),
            named["a"],
            named["b"],
            over=named["over"],
            lanes=int(named["lanes"]),
            prefetch=int(named["prefetch"]),
            kr=int(named.get("kr", 1)),
            post=named.get("post", ""),
            group=int(named.get("group", 0)),
            source=named.get("source", ""),
            fused=named.get("fused", ""),
            static=tuple(int(x) for x in static.split("x")) if static else None,  # type: ignore[arg-type]
            stages=int(named.get("stages", 0)),
            split=int(named.get("split", 1)),
            vectors=tuple(int(x) for x in named.get("vectors", "1x1x1").split("x")),  # type: ignore[arg-type]
            c=named.get("c", "row"),
            cell=tuple(int(x) for x in named.get("cell", "1x1").split("x")),  # type: ignore[arg-type]
            resident=int(named.get("resident", 0)),
            groups=int(named.get("groups", 0)),
            cluster=int(named.get("cluster", 1)),
            persistent=int(named.get("persistent", 0)),
            **{name: name in named for name in _MARKS},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is not a schedule; an emitted kernel's header has one ({error})") from error


_NAMED = ("a", "b", "panels", "over", "lanes", "prefetch")
_MARKS = ("pack_a", "pack_b", "once", "swap", "ahead", "copies", "pingpong", "grouped", "joined")
_LEVELS = ("registers", "L1", "L2", "L3")
DEVICE_LEVELS = ("registers", "warp", "shared", "L2")
"""Memory levels of a device: of a thread, a warp, a block, and all blocks."""


def _levels(named: dict[str, str]) -> tuple[str, ...]:
    return DEVICE_LEVELS if "stages" in named else _LEVELS
