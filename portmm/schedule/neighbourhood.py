"""The schedules around the candidates that a search may try.

Owns which numbers of a candidate may vary and how far: `Space` makes schedules for a
search, `unsound` judges those that come from elsewhere, a database say. Imports
`schedule.cpu_candidates`, `schedule.schedule`, `spec.problem`, `target.target`. A candidate without its block sizes,
heights and prefetch distance is its *skeleton*; a schedule is sound if it has the
skeleton of a candidate and its numbers keep the rules that candidates keep, so that
no record, however it came about, makes a kernel that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.schedule.cpu_candidates import IN_PLACE_ROWS, blocking, mr_variants_of, tallest
from portmm.schedule.schedule import ALL, Tile, illegal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.target import Atom, Isa, Target

KNOBS: dict[str, tuple[float, ...]] = {
    "lower": (0, 1, 2, 3, 4, 6),
    "depth": (1.5, 0.4, 0.8, 1, 2, 3, 4.5, 6, 9),
    "rows": (1, 0.25, 0.5, 2, 4),
    "near": (1, 0.25, 0.5, 2, 4),
    "columns": (1, 0.25, 0.5, 2, 8),
    "prefetch": (1, 0, 0.5, 2),
}
"""What may vary: rows of a register tile below the tallest; KC over what fits L1, or over the candidate's where B
streams; MC, the columns packed together and NC over what fits; the distance of prefetches over the candidate's."""
MOST = 1 << 24
"""No block is larger in any direction."""
FARTHEST = 64
"""Rows, or steps, that may be asked for ahead."""


def _blocked(s: Schedule) -> bool:
    """All levels have blocks: rows and columns are numbers."""
    return s.program in ("gemm", "tiles") and ALL not in (s.mc, s.nc)


def _bends(s: Schedule) -> bool:
    """The height of the register tile is free: a kernel for any M, with the panels of A cut evenly."""
    return s.program == "gemm" and _blocked(s)


def skeleton(s: Schedule) -> Schedule:
    """A schedule without what a search may vary."""
    tiles = tuple(Tile(t.level, *(min(x, 1) for x in (t.m, t.n, t.k))) for t in s.tiles[1:])
    mr = 1 if _bends(s) else s.mr
    heights = () if _bends(s) else s.heights
    return replace(s, tiles=(Tile("registers", mr, s.nr, s.tiles[0].k), *tiles), heights=heights, prefetch=0)


def unsound(s: Schedule, p: Problem, target: Target, listed: Sequence[Schedule]) -> str:
    """Why a schedule must not be used for a problem on a target, or an empty string.

    Args:
        s: the schedule.
        p: the problem.
        target: the machine.
        listed: the candidates for the problem on the target.
    """
    if s in listed:
        return ""
    bones = skeleton(s)
    like = [x for x in listed if skeleton(x) == bones]
    if s.stages or not like:
        return "it is no candidate, nor like one"
    if s.prefetch and not (0 < s.prefetch <= FARTHEST and any(x.prefetch for x in like)):
        return f"it asks for {s.prefetch} rows ahead"
    isa = target.isa(s.isa)
    atom = isa.atom(s.dtype, s.lanes) if isa else None
    if isa is None or atom is None:
        return f"{target.name} has no {s.isa} for {s.dtype}"
    q = p.transposed() if s.swap else p
    return _uneven(s, atom) or _too_tall(s, q, isa, atom) or illegal(s, p, isa, atom, target)


def _uneven(s: Schedule, atom: Atom) -> str:
    """Blocks that do not consist of whole register tiles, or of each other."""
    one, two, three = s.tiles[1:]
    near, kc = two.n, two.k
    if s.mr < 1 or s.nr < 1:
        return f"its register tile is {s.mr}x{s.nr}"
    if max(x for t in s.tiles for x in (t.m, t.n, t.k)) > MOST or min(x for t in s.tiles for x in (t.m, t.n, t.k)) < 0:
        return "its blocks are beyond all bounds"
    if one.k > kc and kc != ALL:
        return f"{one} is deeper than {two}"
    if three.k != kc or three.m != two.m:
        return f"{two} does not fill {three}"
    wrong = (
        (kc and kc % atom.deep)
        or (s.mc and s.mc % s.mr)
        or (near and near % s.nr)
        or (s.nc and near and s.nc % near)
        or (_blocked(s) and (one.m, one.n) != (s.mr, s.nr))
    )
    return f"{two} and {three} are not whole tiles of {s.mr}x{s.nr}" if wrong else ""


def _too_tall(s: Schedule, q: Problem, isa: Isa, atom: Atom) -> str:
    """Register tiles that do not fit, or that the kernel would not contain."""
    if not _bends(s):
        return ""
    most = _tallest(s, isa, atom)
    if s.mr % atom.m or not 0 < s.mr <= most or q.m <= s.mr or s.heights != mr_variants_of(s.mr):
        return f"{s.mr} rows of registers, of at most {most}, for {q.m} rows"
    return ""


def _tallest(s: Schedule, isa: Isa, atom: Atom) -> int:
    """Rows of registers that fit beside a panel; read in place, by rows, each takes an integer register."""
    most = tallest(isa, atom, s.nr)
    return min(most, IN_PLACE_ROWS) if not s.pack_a and s.a == "row" and not s.static else most


@dataclass(frozen=True, slots=True)
class Space:
    """What a search over one problem may try.

    Attributes:
        problem: the problem.
        target: the machine.
        listed: its candidates.
        bases: a candidate for each skeleton, in the candidates' order.
    """

    problem: Problem
    target: Target
    listed: tuple[Schedule, ...]
    bases: tuple[Schedule, ...]

    @property
    def knobs(self) -> dict[str, tuple[float, ...]]:
        """What may be turned -> its values, of which the first is usual; "base" counts `bases`."""
        return {"base": tuple(range(len(self.bases))), **KNOBS}

    def schedule(self, values: Mapping[str, float]) -> Schedule | None:
        """The schedule that values of `knobs` stand for, None if it would be unsound; knobs left out are usual."""
        base = self.bases[int(values.get("base", 0))]
        turned = {name: values.get(name, usual[0]) for name, usual in KNOBS.items()}
        isa = self.target.isa(base.isa)
        atom = isa.atom(base.dtype, base.lanes) if isa else None
        if isa is None or atom is None or base.stages or base.program == "dot":
            return base
        ahead = [x.prefetch for x in self.listed if x.prefetch and skeleton(x) == skeleton(base)]
        s = replace(base, prefetch=int(max(ahead, default=0) * turned["prefetch"]))
        if _blocked(base):
            s = self._reblocked(s, isa, atom, turned)
        elif base.kc:
            s = _deepened(s, atom, turned["depth"])
        return None if unsound(s, self.problem, self.target, self.listed) else s

    def _reblocked(self, s: Schedule, isa: Isa, atom: Atom, turned: Mapping[str, float]) -> Schedule:
        q = self.problem.transposed() if s.swap else self.problem
        mr = max(atom.m, _tallest(s, isa, atom) - int(turned["lower"]) * atom.m) if _bends(s) else s.mr
        _, one, two, three = blocking(q, self.target, atom, mr, s.nr, turned["depth"])
        kc, first = (two.k, one.k) if s.kc else (ALL, ALL)
        # What fits L2 at this depth, whatever the depth of a block of all of k is.
        mc = max(mr, int((two.m if s.kc else s.mc) * turned["rows"]) // mr * mr)
        near = max(1, int(two.n // s.nr * turned["near"])) * s.nr
        nc = max(near, int(three.n * turned["columns"]) // near * near)
        tiles = (
            Tile("registers", mr, s.nr, 1),
            Tile("L1", mr, s.nr, first),
            Tile("L2", mc, near, kc),
            Tile("L3", mc, nc, kc),
        )
        return replace(s, tiles=tiles, heights=mr_variants_of(mr) if _bends(s) else s.heights)


def _deepened(s: Schedule, atom: Atom, factor: float) -> Schedule:
    """B streams past, more or fewer rows of it at a time; `factor` is over the usual one of a search."""
    kc = max(1, int(s.kc * factor / KNOBS["depth"][0]) // atom.deep) * atom.deep
    return replace(s, tiles=(s.tiles[0], *(replace(t, k=kc) for t in s.tiles[1:])))


def space(p: Problem, target: Target, listed: Sequence[Schedule]) -> Space:
    """What a search may try for a problem on a target, of which `listed` are the candidates."""
    bases: dict[Schedule, Schedule] = {}
    for s in listed:
        bases.setdefault(skeleton(s), s)
    return Space(p, target, tuple(listed), tuple(bases.values()))
