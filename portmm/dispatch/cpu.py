"""From a problem to something that runs.

Owns the choice of a schedule, and the memos of kernels and routes that this
process has made. Imports everything below. Nothing under this floor looks at
which problem, target or thread count is current; it is all passed down from
here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import atom_of, lower, lower_attention, lower_int4_repack, lower_pack, lower_rows
from portmm.dispatch.cost_selection import predict, select
from portmm.dispatch.overrides import active, given
from portmm.dispatch.selection import Choice, overlaid
from portmm.errors import BuildError, DatabaseError, ScheduleError, TargetError
from portmm.ir.index import meaning, parsed, spelled
from portmm.runtime import route_cache
from portmm.schedule.cost_table import macs_per_cycle
from portmm.schedule.cpu_candidates import PACKED_VECTORS, units
from portmm.schedule.cpu_cost import Cost, cost
from portmm.schedule.schedule import spell
from portmm.spec.dtype import BY_NAME, CODES_KR, types
from portmm.spec.epilogue import parse as parse_fused
from portmm.spec.problem import Family
from portmm.spec.problem import family as family_of
from portmm.spec.row_classes import rows
from portmm.target.supports import lacks
from portmm.util import locks
from portmm.util.memo import Memory, forget_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portmm.build.shared_object import Artifact
    from portmm.ir.nodes import Kernel
    from portmm.kernels.cpu.attention_geometry import Form
    from portmm.runtime.route_cache import Book
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.spec.problem import Problem
    from portmm.target.target import Atom, Isa, Target

USUAL_GROUP = 128
"""Rows of a weight of four bits that share a scale, where nobody says how many."""
MOST_ROUTES = 4096
"""Routes remembered before starting afresh: endless new shapes must not fill memory."""
MOST_LOADED = 1024
"""Kernels that are loaded before starting afresh: each takes some 30 KiB, and five of the 65,530 mappings that Linux
lets a process have."""


def choose(p: Problem, target: Target, threads: int = 1, *, tuned: bool = True) -> Choice:
    """The schedule that was measured to be fastest, or the model's choice.

    That is the one with the least predicted time, the first of equals, unless `textbook.preferred` finds another.

    Args:
        p: what to compute.
        target: the machine to compute it on.
        threads: the most threads to use; one is used if that is predicted faster.
        tuned: ask the database of tuned schedules.

    Raises:
        ScheduleError: nothing is legal, or there is nothing to multiply.
    """
    _check(p, target)
    found = select(p, target, threads)
    schedules = found.listed.schedules
    (costs,) = predict(p, found.listed, (p.n if p.c == "col" else p.m,), (found.workers,))
    terms = costs.at(0)
    order = sorted(range(len(schedules)), key=lambda i: terms[i].seconds)
    rest = tuple((schedules[i], terms[i]) for i in order if i != found.index)
    choice = Choice(p, target, found.workers, found.schedule, terms[found.index], rest, found.origin)
    return overlaid(choice, schedules, threads, predicted) if tuned else choice


def predicted(p: Problem, s: Schedule, target: Target, workers: int) -> Cost:
    """The time that the model predicts for a schedule, with its terms."""
    return cost(p, s, atom_of(isa_of(s, target), s.dtype, s.lanes), target, workers)


def _check(p: Problem, target: Target) -> None:
    """There is something to multiply, and B is not packed for another machine, whose panels no vectors here make up.

    Raises:
        ScheduleError: it is otherwise.
    """
    if 0 in (p.m, p.n, p.k, p.batch):
        raise ScheduleError(f"{p} has no products: there is nothing to choose")
    if p.b != "packed":
        return
    takes = [(isa.columns(atom), atom.k_pack) for isa, atom in units(p.dtype, target)]
    kept = family_of(p.family)
    if not any(kept.nr % n == 0 and kept.kr == kr for n, kr in takes):
        said = " or ".join(f"multiples of {n}{f' by {kr}' if kr > 1 else ''}" for n, kr in takes)
        raise ScheduleError(f"B is packed as {p.family}; {target.name} takes {said}: pack it again here")


def isa_of(s: Schedule, target: Target) -> Isa:
    """The ISA record that a schedule names.

    Raises:
        TargetError: the target lacks it.
    """
    isa = target.isa(s.isa)
    if isa is None:
        raise TargetError(f"schedule needs {s.isa}, which {target.name} does not have")
    return isa


def packing_unit(dtype: str, target: Target) -> tuple[Isa, Atom]:
    """The unit that a weight for products of these types is packed for: the one that multiplies fastest.

    Raises:
        ScheduleError: no atom of the target multiplies these types.
    """

    def rate(pair: tuple[Isa, Atom]) -> float:
        isa, atom = pair
        return macs_per_cycle(target, isa, atom, dtype) * atom.m * atom.n * atom.k

    return max(units(dtype, target), key=rate)


def family(dtype: str, target: Target) -> str:
    """The packed layout that suits a target: see `candidates.PACKED_VECTORS`; of codes, in the usual groups.

    Raises:
        ScheduleError: no atom of the target multiplies these types.
    """
    if types(dtype)[1] == "u4":
        return str(family_of_codes(target, USUAL_GROUP))
    isa, atom = packing_unit(dtype, target)
    return str(Family(types(dtype)[1], isa.columns(atom) * PACKED_VECTORS, atom.k_pack, atom.acc == "s32"))


def family_of_codes(target: Target, group: int) -> Family:
    """How a weight of four bits lies on a target: one layout, whatever it is multiplied by.

    Raises:
        ScheduleError: no atom of the target multiplies codes.
    """
    _, atom = _folding_unit(target)
    return Family("u4", atom.n * PACKED_VECTORS, CODES_KR, group=group)


def _folding_unit(target: Target) -> tuple[Isa, Atom]:
    return units("f32-u4-f32", target)[0]


@lru_cache(maxsize=64)  # 150 KiB each
def kernel_of(s: Schedule, isa: Isa) -> Kernel:
    """The loops of a schedule, made once."""
    return lower(s, isa)


def _outline(kernel: Kernel) -> Kernel:
    """A kernel without its loops, which take most of its memory and of which code that is loaded has no need."""
    return replace(kernel, entry=replace(kernel.entry, body=()))


def build_kernel(kernel: Kernel) -> Artifact:
    """Emit and compile a kernel, or find it in the cache.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    from portmm.build.shared_object import build
    from portmm.codegen.c_kernel import source

    arch = None if kernel.isa.arch == "any" else kernel.isa.arch
    return build(source(kernel), flags=kernel.isa.flags, arch=arch, name=kernel.name, symbols=(kernel.name,))


_loaded: dict[str, Any] = {}
_lock = locks.lock()


def loaded(kernel: Kernel) -> Any:
    """The kernel's code in this process, built and loaded once per source."""
    from portmm.runtime.cpu import load_kernel, runtime

    artifact = build_kernel(kernel)
    if len(_loaded) >= MOST_LOADED and artifact.key not in _loaded:
        forget()  # what is remembered keeps code loaded
        runtime().clear_memo()
    with _lock:
        found = _loaded.get(artifact.key)
        if found is None:
            found = _loaded[artifact.key] = load_kernel(runtime(), artifact.code, artifact.path, kernel.name)
    return found


@dataclass(frozen=True, slots=True)
class _Code:
    """The code of a schedule, in this process: other sizes need no source.

    Attributes:
        code: what the run time launches.
        swap: the kernel computes the transpose.
        workspace: elements of scratch that it needs, from fields of the argument block.
        bytes: those of an element of scratch.
    """

    code: Any
    swap: bool
    workspace: Callable[[Mapping[str, int]], int]
    bytes: int

    def scratch(self, p: Problem, rows: int, workers: int) -> int:
        """Bytes of scratch that it needs for problems like `p` of so many rows."""
        return self.workspace(_fields(p, rows, workers, swap=self.swap)) * self.bytes


def workspace_bytes(kernel: Kernel, p: Problem, workers: int) -> int:
    """Scratch that a kernel needs for a problem, in bytes."""
    return meaning(kernel.workspace)(_fields(p, p.m, workers, swap=kernel.swap)) * BY_NAME[kernel.atom.acc].bytes


def _fields(p: Problem, rows: int, workers: int, *, swap: bool) -> dict[str, int]:
    m, n = (p.n, rows) if swap else (rows, p.n)
    return {"m": m, "n": n, "k": p.k, "batch": p.batch, "workers": workers}


def route_of(kernel: Kernel, code: Any, fields: dict[str, int], dtype: str) -> Any:
    """A launchable kernel whose code is loaded, with scratch for these fields of the argument block."""
    from portmm.runtime.cpu import runtime

    work = meaning(kernel.workspace)(fields) * BY_NAME[kernel.atom.acc].bytes
    return runtime().make_route(code, work, fields["workers"], dtype)


_codes = Memory(MOST_LOADED)


def _code(s: Schedule, target: Target, kept: Book | None = None) -> _Code:
    """The code of a schedule: in this process, in the book, or built now."""
    isa = isa_of(s, target)
    key = s, isa
    found: _Code | None = _codes.get(key)
    if found is None:
        found = (_recalled(s, isa, kept) if kept is not None else None) or _built(s, isa, target, kept)
        _codes.keep(key, found)
    return found


def _recalled(s: Schedule, isa: Isa, kept: Book) -> _Code | None:
    """The code that an earlier process built, found without its source."""
    from portmm.runtime.cpu import runtime

    found = route_cache.code(kept, spell(s), runtime())
    if found is None:
        return None
    code, workspace = found
    return _Code(code, s.swap, meaning(parsed(workspace)), BY_NAME[atom_of(isa, s.dtype, s.lanes).acc].bytes)


def _built(s: Schedule, isa: Isa, target: Target, kept: Book | None) -> _Code:
    kernel = kernel_of(s, isa)
    code = loaded(kernel)
    if kept is not None:
        route_cache.keep_code(kept, spell(s), code, spelled(kernel.workspace), target)
    return _Code(code, kernel.swap, meaning(kernel.workspace), BY_NAME[kernel.atom.acc].bytes)


def _route(found: _Code, p: Problem, workers: int, rows: int | None = None) -> Any:
    """A launchable kernel for problems like `p`, of so many rows at most."""
    from portmm.runtime.cpu import runtime

    work = found.scratch(p, p.m if rows is None else rows, workers)
    return runtime().make_route(found.code, work, workers, p.storage, p.unit)


def route_by(s: Schedule, p: Problem, target: Target, workers: int) -> Any:
    """A launchable kernel for a problem by a schedule that is legal for it."""
    return _route(_code(s, target), p, workers)


_routes = Memory(MOST_ROUTES)


def route_for(p: Problem, target: Target, threads: int) -> Any:
    """A launchable kernel for a problem, chosen or ordered once per class of problems, target and thread bound.

    Raises:
        ScheduleError: nothing is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    return routed(p, target, threads)[0]


def routed(p: Problem, target: Target, threads: int, kept: Book | None = None) -> tuple[Any, tuple[int, int]]:
    """A launchable kernel for a problem, and the least and the largest M that it serves.

    Args:
        p: the problem.
        target: the machine.
        threads: the most threads to use.
        kept: the book of this target, which knows code that was built for it.

    Raises:
        ScheduleError: nothing is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    own, served = (p.m, p.m), rows(p)
    if served != own and not active():
        found = _kept(p, target, (threads, served), lambda: _shared(p, served, target, threads, kept))
        if found is not None:
            return found, served
    return _kept(p, target, (threads, own), lambda: _alone(p, target, threads, kept)), own


def _kept(p: Problem, target: Target, about: Any, make: Callable[[], Any]) -> Any:
    """A value made once for problems like `p` on a target, `about` saying for how many rows."""
    # A target holds dicts, so its identity stands for it; the entry keeps it alive.
    key = (p.but_rows, id(target), about)
    found = _routes.get(key)
    if found is None or (isinstance(found[1], BuildError) and time.monotonic() >= found[1].retry_at):
        try:
            made = make()
        except BuildError as error:
            _routes.keep(key, (target, error.again()))
            raise
        found = _routes.keep(key, (target, made))
    if isinstance(found[1], BuildError):
        raise found[1].again()
    return found[1]


def _shared(p: Problem, served: tuple[int, int], target: Target, threads: int, kept: Book | None) -> Any:
    """The route of the class of a problem; None if its problems have different ones."""
    _check(p, target)
    if _tuned_within(p, served, target, threads):
        return None
    found = select(p, target, threads)
    if found.rows != served:
        return None
    return _route(_code(found.schedule, target, kept), p, found.workers, served[1])


def _alone(p: Problem, target: Target, threads: int, kept: Book | None) -> Any:
    """The route of one problem."""
    ordered = given(p)
    if ordered is None and not _tuned_within(p, (p.m, p.m), target, threads):
        _check(p, target)
        found = select(p, target, threads)
        ordered = found.schedule, found.workers
    if ordered is None:
        choice = choose(p, target, threads)
        ordered = choice.schedule, choice.workers
    schedule, workers = ordered
    return _route(_code(schedule, target, kept), p, workers)


def _tuned_within(p: Problem, served: tuple[int, int], target: Target, threads: int) -> bool:
    """Whether there may be findings for problems with so many rows; a database that cannot be read is asked again."""
    from portmm.dispatch.tuning_database import tuned_rows

    try:
        return any(served[0] <= m <= served[1] for m in tuned_rows(p, target, threads))
    except DatabaseError:
        return True


@lru_cache(maxsize=256)
def _packer(isa: Isa, dtype: str, nr: int, layout: str) -> Any:
    return loaded(lower_pack(isa, dtype, nr, layout))


def pack_route(isa: Isa, dtype: str, nr: int, layout: str, threads: int) -> Any:
    """A launchable kernel that packs a B.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    from portmm.runtime.cpu import runtime

    held = types(dtype)[1]
    return runtime().make_route(_packer(isa, dtype, nr, layout), 1024, threads, held)


@lru_cache(maxsize=256)
def _folder(isa: Isa, kept: Family) -> Any:
    return loaded(lower_int4_repack(isa, kept))


def fold_route(kept: Family, target: Target, threads: int) -> Any:
    """A launchable kernel that lays a weight of four bits out.

    Raises:
        ScheduleError: the ISA has no word for it.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    from portmm.runtime.cpu import runtime

    isa, _ = _folding_unit(target)
    return runtime().make_route(_folder(isa, kept), 1024, threads, "s32")


@lru_cache(maxsize=256)
def _rows(text: str, isa: Isa, lanes: int) -> tuple[Kernel, Any]:
    real = isa.vector("f32", lanes)
    assert real is not None  # noqa: S101 - `unit_for` found it
    kernel = lower_rows(isa, real, text)
    return _outline(kernel), loaded(kernel)


def unit_for(fused: Fused, target: Target) -> tuple[Isa, Atom]:
    """The instruction set, and its lanes of f32, that compute fused expressions.

    Raises:
        ScheduleError: none of the target's can.
    """
    missing = ""
    for isa in target.isas:
        real = isa.atom("f32")
        missing = lacks(isa, real, fused) if real else "f32"
        if real and not missing:
            return isa, real
    raise ScheduleError(f"{target.name} has no {missing} for {fused}")


def rows_route(text: str, size: tuple[int, int, int], target: Target, workers: int) -> Any:
    """A launchable kernel for fused expressions over m rows of n columns, and a batch.

    Raises:
        ScheduleError: no unit of the target computes them.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    isa, real = unit_for(parse_fused(text), target)
    m, n, batch = size
    return route_of(*_rows(text, isa, real.n), {"m": m, "n": n, "batch": batch, "workers": workers}, "f32")


@lru_cache(maxsize=256)
def _attention(form: Form, isa: Isa, atom: Atom, real: Atom) -> tuple[Kernel, Any]:
    kernel = lower_attention(isa, atom, real, form)
    return _outline(kernel), loaded(kernel)


def attention_unit(held: str, fused: Fused, target: Target, rows: int) -> tuple[Isa, Atom, Atom]:
    """The fastest unit for products of a type among those that attention is written for, and its lanes of f32.

    A unit whose rows are not filled by as many `rows` of queries is left out.

    Raises:
        ScheduleError: there is none.
    """
    found = []
    for isa, atom in units(f"{held}-{held}-f32" if held != "f32" else held, target):
        real = isa.vector("f32", atom.n)
        lines = isa.row_atom(atom) or atom
        weaves = atom.k_pack == 1 or isa.spelling(lines, "load_rows", "f32", atom.right)
        if (
            (rows >= atom.m if atom.tiled else atom.m == 1)
            and atom.acc == "f32"
            and weaves
            and real
            and not lacks(isa, real, fused)
        ):
            rate = macs_per_cycle(target, isa, atom, held) * atom.m * atom.n * atom.k
            found.append((rate, isa, atom, real))
    if not found:
        raise ScheduleError(f"{target.name} has no unit that computes {fused} of {held}")
    return max(found, key=lambda x: x[0])[1:]


def attention_route(form: Form, unit: tuple[Isa, Atom, Atom], fields: dict[str, int]) -> Any:
    """A launchable kernel for a kind of attention; `fields` are those of the argument block.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    return route_of(*_attention(form, *unit), fields, "f32")


def forget() -> None:
    """Drop every memo of this process; the cache on disk stays."""
    for memo in (kernel_of, _packer, _folder, _rows, _attention):
        memo.cache_clear()
    forget_all()
    with _lock:
        _loaded.clear()
