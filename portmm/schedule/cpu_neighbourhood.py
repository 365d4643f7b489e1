"""Search neighbourhood of candidates on CPUs: the schedules that tuning may try.

Owns the parameters of a candidate that may vary, and their ranges: `Neighbourhood` makes
schedules for a search, `unsound` checks those from other sources, such as a
database. A candidate without its block sizes, MR variants and prefetch distance is
its *skeleton*; a schedule is sound if it has the skeleton of a candidate and its
numbers follow the rules of candidates, so that no record, from any source, yields
a wrong kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.schedule.cpu_blocking import blocking, cache_tiles, least_of, tallest
from portmm.schedule.legality import illegal
from portmm.schedule.parts import ALL, Tile
from portmm.spec.dtype import UNCONVERTED
from portmm.target.model import CPU as MODEL
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

KNOBS: dict[str, tuple[float, ...]] = {
    "lower": (0, 1, 2, 3, 4, 6),
    "depth": (1.5, 0.4, 0.8, 1, 2, 3, 4.5, 6, 9),
    "rows": (1, 0.25, 0.5, 2, 4),
    "near": (1, 0.25, 0.5, 2, 4),
    "columns": (1, 0.25, 0.5, 2, 8),
    "prefetch": (1, 0, 0.5, 2),
}
"""Parameters that may vary: rows of a register tile less than the largest; KC as a multiple of the depth that fits L1,
or of the candidate's where B is streamed; MC, the columns packed together and NC as multiples of those that fit; the
prefetch distance as a multiple of the candidate's."""
MOST = 1 << 24
"""Maximum extent of a block in any dimension."""
FARTHEST = 64
"""Maximum prefetch distance, in rows or steps."""


def _blocked(s: Schedule) -> bool:
    """Whether all levels have blocks: rows and columns are numbers."""
    return s.program in ("gemm", "tiles") and ALL not in (s.mc, s.nc)


def _free_mr(s: Schedule) -> bool:
    """Whether MR may vary: a kernel for any M, with an even partition of the panels of A."""
    return s.program == "gemm" and _blocked(s)


def skeleton(s: Schedule) -> Schedule:
    """A schedule without the parameters that a search may vary."""
    first, *tiles = s.tiles
    if _free_mr(s):
        first = first._replace(m=1, least=0)
    blocks = [Tile(t.level, *(min(x, 1) for x in (t.m, t.n, t.k))) for t in tiles]
    return replace(s, tiles=(first, *blocks), b=s.b.prefetched(0))


def unsound(s: Schedule, p: Problem, target: Target, listed: Sequence[Schedule]) -> str:
    """The reason why a schedule must not be used for a problem on a target, or an empty string.

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
    if s.on_device or not like:
        return "it is neither a candidate nor a variant of one"
    if s.b.prefetch and not (0 < s.b.prefetch <= FARTHEST and any(x.b.prefetch for x in like)):
        return f"its prefetch distance is {s.b.prefetch} rows"
    isa, atom = target.isa(s.isa), target.atom(s.isa, s.dtype, s.atom.lanes)
    if isa is None or atom is None:
        return f"{target.name} has no {s.isa} for {s.dtype}"
    q = p.transposed() if s.atom.swap else p
    return _uneven(s, atom) or _too_tall(s, q, isa, atom) or illegal(s, p, isa, atom, target)


def _uneven(s: Schedule, atom: Atom) -> str:
    """The reason why blocks are not multiples of register tiles, or of each other, or an empty string."""
    one, two, three = s.tiles[1:]
    near, kc = two.n, two.k
    if s.mr < 1 or s.nr < 1:
        return f"its register tile is {s.mr}x{s.nr}"
    if max(x for t in s.tiles for x in (t.m, t.n, t.k)) > MOST or min(x for t in s.tiles for x in (t.m, t.n, t.k)) < 0:
        return f"an extent of its blocks is negative or more than {MOST}"
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
    """The reason why register tiles do not fit, or are not in the kernel, or an empty string."""
    if not _free_mr(s):
        return ""
    most = _tallest(s, isa, atom)
    if s.mr % atom.m or not 0 < s.mr <= most or q.m <= s.mr or s.heights[0] != least_of(s.mr):
        return f"{s.mr} rows of registers, of at most {most}, for {q.m} rows"
    return ""


def _tallest(s: Schedule, isa: Isa, atom: Atom) -> int:
    """Largest MR that fits the registers with a panel; rows of an A in place that is converted have one each, too."""
    most, one_each = tallest(isa, atom, s.nr), not s.a.packed and s.a.layout == "row" and s.dtype not in UNCONVERTED
    return min(most, MODEL.in_place_rows) if one_each and not s.static else most


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """Search neighbourhood of one problem.

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
        """Parameter -> its values, of which the first is the default; "base" is an index of `bases`."""
        return {"base": tuple(range(len(self.bases))), **KNOBS}

    def schedule(self, values: Mapping[str, float]) -> Schedule | None:
        """The schedule with values of `knobs`, None if it would be unsound; absent parameters have their defaults."""
        base = self.bases[int(values.get("base", 0))]
        parameters = {name: values.get(name, defaults[0]) for name, defaults in KNOBS.items()}
        isa, atom = self.target.isa(base.isa), self.target.atom(base.isa, base.dtype, base.atom.lanes)
        if isa is None or atom is None or base.on_device or base.program == "dot":
            return base
        ahead = [x.b.prefetch for x in self.listed if x.b.prefetch and skeleton(x) == skeleton(base)]
        s = replace(base, b=base.b.prefetched(int(max(ahead, default=0) * parameters["prefetch"])))
        if _blocked(base):
            s = self._reblocked(s, isa, atom, parameters)
        elif base.kc:
            s = _deepened(s, atom, parameters["depth"])
        return None if unsound(s, self.problem, self.target, self.listed) else s

    def _reblocked(self, s: Schedule, isa: Isa, atom: Atom, parameters: Mapping[str, float]) -> Schedule:
        q = self.problem.transposed() if s.atom.swap else self.problem
        mr = max(atom.m, _tallest(s, isa, atom) - int(parameters["lower"]) * atom.m) if _free_mr(s) else s.mr
        _, one, two, three = blocking(q, self.target, atom, mr, s.nr, parameters["depth"])
        kc, first = (two.k, one.k) if s.kc else (ALL, ALL)
        # MC fits L2 at this depth, also where a block has all of k.
        mc = max(mr, int((two.m if s.kc else s.mc) * parameters["rows"]) // mr * mr)
        near = max(1, int(two.n // s.nr * parameters["near"])) * s.nr
        nc = max(near, int(three.n * parameters["columns"]) // near * near)
        least = least_of(mr) if _free_mr(s) else s.tiles[0].least
        return replace(s, tiles=cache_tiles(mr, s.nr, kc, mc, nc, least, first=first, near=near))


def _deepened(s: Schedule, atom: Atom, factor: float) -> Schedule:
    """A schedule that streams B, with more or fewer rows at a time; `factor` is relative to the default of a search."""
    kc = max(1, int(s.kc * factor / KNOBS["depth"][0]) // atom.deep) * atom.deep
    return replace(s, tiles=(s.tiles[0], *(t._replace(k=kc) for t in s.tiles[1:])))


def neighbourhood_of(p: Problem, target: Target, listed: Sequence[Schedule]) -> Neighbourhood:
    """The search neighbourhood of a problem on a target, of which `listed` are the candidates."""
    bases: dict[Schedule, Schedule] = {}
    for s in listed:
        bases.setdefault(skeleton(s), s)
    return Neighbourhood(p, target, tuple(listed), tuple(bases.values()))
