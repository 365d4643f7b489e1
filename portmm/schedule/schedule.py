"""Schedule of a kernel.

Owns `Schedule`: one tile per memory level, a plan for each operand, and what shares the work, on every kind of
machine alike. Selection is in other modules: see `candidates` and `cost`; `legality` says which schedules are legal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.schedule.parts import ALL, SHARED, AtomUse, OperandPlan, Parallel, Tile
from portmm.spec.dtype import CODES_KR, UNCONVERTED, accumulator, types, unit
from portmm.spec.epilogue import Fused, parse
from portmm.spec.kernel_name import KernelName
from portmm.spec.problem import Family
from portmm.target.model import CPU as MODEL
from portmm.target.summation import BlockOfK, block_of_k, chained
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.target.atom import Atom

WARPGROUP = 128
"""Threads that multiply together on Hopper."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The parameters that define a kernel.

    Attributes:
        program: the block program, a module of `kernels/`.
        isa: name of the instruction set.
        dtype: element types of A, B and C, as in a `Problem`.
        tiles: one per memory level, nearest first: registers, L1, L2, L3; of a device, those of a thread, a warp, a
            block and all blocks: registers, warp, shared, L2.
        atom: the atom, and the side of its operands.
        a, b, c: plans of the operands. A prefetch of C is one of the next tile of C and the next panel of B; a C that
            is packed is one of sums in tiles of their own, between blocks of k. Of attention, Q, K and the result.
        parallel: partition of the work.
        epilogue: steps between sums and elements of C.
        static: m, n, k if they are compiled in; of a device, n and k; of attention, elements of a head of V and of Q.
        v: of attention, the plan of V.
    """

    program: str
    isa: str
    dtype: str
    tiles: tuple[Tile, ...]
    atom: AtomUse = AtomUse()
    a: OperandPlan = OperandPlan()
    b: OperandPlan = OperandPlan()
    c: OperandPlan = OperandPlan()
    parallel: Parallel = Parallel()
    epilogue: str = ""
    static: tuple[int, int, int] | None = None
    v: OperandPlan | None = None

    def tile(self, level: str) -> Tile:
        """The tile of a memory level.

        Raises:
            KeyError: there is none.
        """
        for x in self.tiles:
            if x.level == level:
                return x
        raise KeyError(level)

    @property
    def mr(self) -> int:
        """Rows of the register tile."""
        return self.tiles[0].m

    @property
    def nr(self) -> int:
        """Columns of the register tile."""
        return self.tiles[0].n

    @property
    def heights(self) -> tuple[int, ...]:
        """MR variants, the rows of register tiles that the kernel contains."""
        first = self.tiles[0]
        return tuple(range(first.least or first.m, first.m + 1))

    @property
    def kc(self) -> int:
        """Depth of a block of k: that of the blocks of A and B in L2."""
        return self.tiles[2].k

    @property
    def mc(self) -> int:
        """Rows of a block of A: those kept in L2, or, where slices of A sweep panels of B, in L3."""
        return self.tiles[2].m or self.tiles[3].m

    @property
    def nc(self) -> int:
        """Columns of the block of C kept in L3."""
        return self.tiles[3].n

    @property
    def family(self) -> str:
        """The packed layout of B: element type, panel width, and adjacent elements of k."""
        a, b, _ = self.types
        if self.b.layout == "codes":
            heads = {"symmetric": self.b.symmetric, "e2m1": self.b.e2m1, "half": self.b.half}
            return str(Family(b, self.nr, CODES_KR, group=self.b.group, **heads))
        # Dot products copy a few columns of a panel.
        nr = self.tiles[2].n if self.program == "dot" else self.nr
        return str(Family(b, nr, self.atom.kr, accumulator(a, b) == "s32"))

    @property
    def types(self) -> tuple[str, str, str]:
        """Names of the element types of A, B and C."""
        return types(self.dtype)

    def element_types(self, atom: Atom) -> tuple[str, str]:
        """Element types that micro-kernels read of A and B: fragments of a packed operand, else the operand's own."""
        a, b, _ = self.types
        layout = self.b.layout
        in_b = unit(b, self.atom.kr) if layout == "packed" else "s32" if layout == "codes" else b
        return (atom.left if self.a.packed else a), (atom.right if self.b.packed else in_b)

    @property
    def fused(self) -> Fused | None:
        """The epilogue's expressions, or None."""
        return parse(self.epilogue) if self.epilogue else None

    @property
    def on_device(self) -> bool:
        """Whether the schedule is of a device."""
        return self.tiles[1].level == "warp"

    @property
    def stages(self) -> int:
        """Tiles of A and B in shared memory, one in use while the others are filled; 1 where operands are in place."""
        staging = self.b.at(SHARED)
        return staging.buffers if staging else int(self.on_device)

    @property
    def vectors(self) -> tuple[int, int, int]:
        """Elements of A, B and C that a thread of a device moves at once."""
        return self.a.vector, self.b.vector, self.c.vector

    @property
    def slices(self) -> bool:
        """Whether, on a device, slices of k are added by another kernel (split-K reduction)."""
        return self.parallel.split > 1 and not self.parallel.fixup

    def along_k(self, side: int) -> bool:
        """Whether k is contiguous in A (0), or in B (1)."""
        return (self.a, self.b)[side].layout == ("row", "col")[side]

    @property
    def block(self) -> Tile:
        """The tile of a block of threads of a device."""
        return self.tiles[2]

    @property
    def threads(self) -> int:
        """The threads of a block of a device."""
        if self.parallel.warpgroups:
            return WARPGROUP * (self.parallel.warpgroups + 1)
        along_k = self.block.k // self.tiles[0].k if self.program in ("stream", "coded") else 1  # threads split k, too
        return (self.block.m // self.mr) * (self.block.n // self.nr) * along_k

    @property
    def warp_lanes(self) -> int:
        """Lanes of a warp of a device that share the warp's tile."""
        return (self.tiles[1].m // self.mr) * (self.tiles[1].n // self.nr)

    def name(self, atom: Atom) -> KernelName:
        """The kernel's name."""
        return KernelName(self.program, atom.acc, atom.a, atom.b, self.mr, self.nr, atom.k_pack, self.isa)

    def __str__(self) -> str:
        how = self._on_device() if self.on_device else self._on_cpu()
        return f"{self.program} {self.isa}: {', '.join(map(str, self.tiles))}; {', '.join(how)}"

    def _on_cpu(self) -> list[str]:
        a, b = self.a, self.b
        in_place = "B prepacked" if b.layout == "packed" else f"B {b.layout} in place"
        how = [
            "A packed" if a.packed else f"A {a.layout} in place",
            ("B packed once" if b.once else "B packed inside" if b.inside else "B packed") if b.packed else in_place,
        ]
        how += ["transposed"] if self.atom.swap else []
        how += ["sums in tiles of their own"] if self.c.packed else []
        how += [f"{b.panels} panels a visit"] if b.panels > 1 else []
        how += [f"threads over {self.parallel.over}"]
        how += ["expressions fused"] if self.epilogue else []
        return how + ([f"static {'x'.join(map(str, self.static))}"] if self.static else [])

    def _on_device(self) -> list[str]:
        a, b, x = self.a, self.b, self.parallel
        moved = " x ".join(map(str, self.vectors))
        how = [f"{self.threads} threads", f"A {a.layout}, B {b.layout}, {moved} elements at once"]
        how += [f"{self.stages} stages{' of asynchronous copies' if b.asynchronous else ''}"]
        how += self._warpgroups() if x.warpgroups else []
        how += [f"k split in {x.split}{', joined' if x.fixup else ''}"] if x.split > 1 else []
        how += [f"n {self.static[1]} and k {self.static[2]} compiled in"] if self.static else []
        how += ["rows in groups"] if x.grouped else []
        return how + (["expressions fused"] if self.epilogue else [])

    def _warpgroups(self) -> list[str]:
        """Description of the warpgroups of a block."""
        x = self.parallel
        how = [f"{x.warpgroups} warpgroup{'s' if x.warpgroups > 1 else ''}{' in turns' if x.pingpong else ''}"]
        how += ["operands exchanged"] if self.atom.swap else []
        how += [f"clusters of {x.cluster}"] if x.cluster > 1 else []
        return [*how, *([f"{x.persistent} persistent blocks"] if x.persistent else [])]


def finishes(s: Schedule, atom: Atom) -> bool:
    """Whether sums are not yet elements of C: scaled, in expressions, of another type, or whole tiles."""
    return s.program == "tiles" or bool(s.epilogue) or s.types[2] != atom.acc


def finishes_in_c(s: Schedule, atom: Atom) -> bool:
    """Whether sums are in C until its epilogue: those of a sweep of panels, of whose operands none may be C."""
    return sweeps_panels(s) and s.types[2] == atom.acc == "f32" and not reads_matrix(s.epilogue)


def reads_matrix(fused: str) -> bool:
    """Whether an operand of expressions has an element for each one of C, which C may overlap."""
    return bool(fused) and any(x.whole for x in parse(fused).operands)


def shifts(s: Schedule, atom: Atom) -> bool:
    """Whether A is shifted by 128 as it is packed, from signed to unsigned or back."""
    return atom.acc == "s32" and {s.types[0], atom.a} == {"s8", "u8"}


def sweeps(s: Schedule, atom: Atom) -> bool:
    """Whether one call of a micro-kernel covers all columns of a task, or all panels that are packed together.

    A B in place is streamed a few rows at a time; a task has all rows, and sums are in C between blocks of k.
    """
    if sweeps_panels(s):
        return True
    whole = s.program == "gemm" and not s.mc and s.b.panels == 1 and not s.static
    in_place = s.b.layout == "row" and not s.b.packed and not s.a.packed and not s.c.prefetch
    part = not chained(atom) and block_of_k(s.kc, s.atom.kr) is BlockOfK.PART
    return whole and in_place and part


def sweeps_panels(s: Schedule) -> bool:
    """Whether a slice of A stays in L1 while panels of B pass, which stay in L2: the tile of L1 has all columns."""
    return s.program == "gemm" and s.tiles[1].n == ALL


def by_columns(s: Schedule, atom: Atom) -> bool:
    """Whether a call of a micro-kernel covers many slices of rows by a panel of few steps of k.

    The panel is packed before, or by the first slice. Rows of A have an address each, so that those of the next slice
    are prefetched.
    """
    panel = s.b.inside or (s.program == "gemm" and s.b.layout == "packed" and s.b.panels == 1 and not sweeps_panels(s))
    few = panel and 0 < s.kc <= MODEL.column_depths[-1] and s.mr <= MODEL.in_place_rows
    rows = s.a.layout == "row" and not s.a.packed and s.dtype in UNCONVERTED and s.static is None
    return bool(few and rows and not (finishes(s, atom) or finishes_in_c(s, atom)))
