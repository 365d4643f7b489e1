"""How a product is computed.

Owns `Schedule` and `Tile`. Imports `spec.problem`, `target.target`. A schedule has one tile
per memory level; it is legal if every tile's footprint fits its level, on every
kind of machine alike. Nothing here chooses: see `candidates` and `cost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.spec.dtype import BY_NAME, CODES_KR, accumulator, types, unit
from portmm.spec.kernel_name import KernelName
from portmm.spec.problem import Family

if TYPE_CHECKING:
    from portmm.spec.problem import Problem
    from portmm.target.target import Atom, Isa, Target


ALL = 0
TALLEST = 1024
"""No register tile has more rows, so nothing is lost where a word says so."""
WARPGROUP = 128
"""Threads that multiply together on Hopper."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the product that is worked on while in one memory level.

    An extent of `ALL` means the whole of that dimension, whatever it is, so that
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
    """A way to compute a product.

    Attributes:
        program: the block program, a module of `kernels/`: "gemm", "dot" or "tiles".
        isa: name of the instruction set.
        dtype: element types of A, B and C, as a `Problem` has them.
        tiles: one per memory level, nearest first: registers, L1, L2, L3.
        heights: register-tile heights that the kernel contains; a dynamic M is
            cut into panels of nearly equal height, all in this tuple.
        panels: B panels that one visit of the micro-kernel covers.
        a: how A is read: "row", "col" or "any".
        b: how B is read: "row", "col", "any" or "packed".
        pack_a: A is copied to panels first.
        pack_b: B is copied to panels first.
        once: all of B is packed before any work, by all threads for all of them;
            else each thread packs what it needs just before.
        swap: the kernel computes C^T = B^T . A^T.
        over: what threads share out: "tiles" of C, "batch" items, or "k".
        lanes: lanes of the atom, 0 for the ISA's widest.
        prefetch: rows of a B in place, or for tiles steps of a B in panels, that are asked for ahead, 0 for none.
        ahead: the micro-kernel asks for the next tile of C and the next B panel.
        kr: elements of k that sit side by side in a fragment; extents of k count such units.
        static: m, n, k if they are compiled in; of a device, n and k.
        post: what becomes of sums on their way to C, as a `Problem` has it.
        group: of a B of codes, rows that share a scale.
        source: the type that A is given in, before its rows are quantised.
        fused: expressions of sums that C and other results are, as a `Problem` has them.
        stages: of a device, tiles of A and B in shared memory, one being computed with, others being filled.
        copies: tiles are filled by asynchronous copies, past the registers.
        split: blocks along k; where there are several, a second kernel adds what they leave,
        joined: or the last block of each tile does, in the same kernel.
        vectors: elements of A, B and C that a thread moves at once.
        cell: rows and columns of C side by side in one thread.
        c: how C lies on a device: "row" or "any".
        grouped: of a device, rows are shared out among the items of B, by ends that lie in memory.
        resident: blocks that a processor is to hold at once, for which compilers must leave registers; 0 if
            they need not care.
        groups: warpgroups of a block that multiply, beside one that feeds them; 0 where threads do both.
        pingpong: each of two warpgroups has tiles of its own, and stores one while the other multiplies.
        cluster: neighbouring blocks along the rows that read the same columns of B once for all.
        persistent: blocks, at most, which take one tile after the other; 0 if each has one.
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
        """Depth of a block of k: what L2 holds of A and B."""
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
        """What a packed B depends on: element type, panel width, and elements of k side by side."""
        a, b, _ = self.types
        if self.b == "codes":
            return str(Family(b, self.nr, CODES_KR, group=self.group))
        return str(Family(b, self.nr, self.kr, accumulator(a, b) == "s32"))

    @property
    def types(self) -> tuple[str, str, str]:
        """Names of the element types of A, B and C."""
        return types(self.dtype)

    def given(self, atom: Atom) -> tuple[str, str]:
        """What micro-kernels read of A and B: fragments where it is packed here, else the operand's own type."""
        a, b, _ = self.types
        in_b = unit(b, self.kr) if self.b == "packed" else "s32" if self.b == "codes" else b
        return (atom.left if self.pack_a else a), (atom.right if self.pack_b else in_b)

    @property
    def slices(self) -> bool:
        """Of a device, sums are left for another kernel to add."""
        return self.split > 1 and not self.joined

    def along_k(self, side: int) -> bool:
        """Whether elements of A (0), or of B (1), that lie side by side are of one row, or column."""
        return (self.a, self.b)[side] == ("row", "col")[side]

    @property
    def block(self) -> Tile:
        """Of a device, the tile of a block of threads."""
        return self.tiles[2]

    @property
    def threads(self) -> int:
        """Of a device, the threads of a block."""
        if self.groups:
            return WARPGROUP * (self.groups + 1)
        shares = self.block.k // self.tiles[0].k if self.program in ("stream", "coded") else 1  # they share out k, too
        return (self.block.m // self.mr) * (self.block.n // self.nr) * shares

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
        """How warpgroups share the work."""
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
    """Vector registers, or tiles, that the widest micro-kernel of a schedule keeps alive."""
    if s.program == "tiles":
        rows, columns = s.mr // atom.m, s.nr // atom.n * s.panels
        return rows * columns + rows + 1
    if s.program == "dot":
        return s.mr * s.nr + s.mr + 2
    columns = s.nr // atom.n * s.panels
    if s.b == "codes" and not s.pack_b:
        # Sums over a group and over all of k; words, codes, a broadcast, a table. Where a group
        # takes few steps, sums over all of k may wait in memory.
        sums = 1 if atom.takes_codes else 2
        return (max(s.heights) * sums + 2) * columns + 2
    return atom.strips(max(s.heights)) * columns + columns + 1


def footprint(tile: Tile, s: Schedule, p: Problem, atom: Atom) -> int:
    """Bytes that must stay resident in a tile's level while it is worked on.

    L1 holds a panel of B and the slice of A that passes, or, of a panel that
    streams from L2, as much of its depth as fits; L2
    the block of A (MC x KC) beside the panels of B that are packed together: Low et al., "Analytical Modeling
    Is Enough for High-Performance BLIS", ACM TOMS 43(2), 2016, section 4. L3
    holds the block of C (MC x NC) between passes over k.
    """
    m, n = (p.n, p.m) if s.swap else (p.m, p.n)
    depth = -(-p.k // s.kr)
    tm, tn, tk = min(tile.m or m, m), min(tile.n or n, n), min(tile.k or depth, depth)
    a, b = (BY_NAME[x].bytes for x in s.given(atom))
    if tile.level == "L1":
        return (s.mr * a + s.nr * s.panels * b) * tk
    if tile.level == "L2":
        return (tm * a + max(tn if tile.n else 0, s.nr * s.panels) * b) * tk
    return tm * tn * BY_NAME[atom.acc].bytes


def inconsistent(s: Schedule) -> str:
    """What contradicts itself in a schedule, whatever the problem, or an empty string."""
    if s.once and not (s.pack_b and s.over == "tiles"):
        return "packs B once for all threads, but does not pack B or does not share out tiles"
    return ""


def illegal(s: Schedule, p: Problem, isa: Isa, atom: Atom, target: Target) -> str:
    """Why a schedule cannot be used for a problem on a target, or an empty string.

    A level is a limit only for what the schedule means to keep there: a tile
    whose extents are ALL streams through it.
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
    """A schedule as one word, for a kernel's header and the command line."""
    tiles = "/".join(f"{t.m}x{t.n}x{t.k}" for t in s.tiles)
    heights = f"{s.heights[0]}-{s.heights[-1]}"
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
    return ":".join([s.program, s.isa, s.dtype, tiles, heights, ",".join(marks)])


def parse(text: str) -> Schedule:
    """The schedule that `spell` wrote.

    Raises:
        ValueError: `text` is not such a word.
    """
    try:
        program, isa, dtype, tiles, heights, marks = text.split(":")
        sizes = [[int(x) for x in t.split("x")] for t in tiles.split("/")]
        low, high = (min(int(x), TALLEST) for x in heights.split("-"))
        named = dict(x.partition("=")[::2] for x in marks.split(","))
        static = named.get("static")
        return Schedule(
            program,
            isa,
            dtype,
            tuple(Tile(level, *size) for level, size in zip(_levels(named), sizes, strict=True)),
            tuple(range(low, high + 1)),
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
"""Levels of a device: a thread's, a warp's, a block's, and all blocks'."""


def _levels(named: dict[str, str]) -> tuple[str, ...]:
    return DEVICE_LEVELS if "stages" in named else _LEVELS
