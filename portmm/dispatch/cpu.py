"""Dispatch of problems to compiled kernels on the CPU.

Owns the selection of a schedule, and the memos of kernels and routes of this
process. Modules below do not read the current problem, target or number of
threads: they are passed from here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import atom_of, lower, lower_attention, lower_int4_repack, lower_pack, lower_rows
from portmm.dispatch.cost_selection import predict, select
from portmm.dispatch.overrides import active, schedule_for
from portmm.dispatch.selection import Choice, overlaid
from portmm.errors import BuildError, DatabaseError, ScheduleError, TargetError
from portmm.ir.index import meaning, parsed, spelled
from portmm.runtime import route_cache
from portmm.schedule.cpu_candidates import PACKED_VECTORS, units
from portmm.schedule.cpu_cost import Cost, cost
from portmm.schedule.cpu_cost_table import macs_per_cycle
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
    from portmm.runtime.route_cache import RouteCache
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

USUAL_GROUP = 128
"""Rows of an int4 weight that share a scale, by default."""
MOST_ROUTES = 4096
"""Routes kept before all are dropped: an endless series of new shapes must not fill memory."""
MOST_LOADED = 1024
"""Kernels loaded before all are dropped: each takes some 30 KiB, and five of the 65,530 mappings that Linux
lets a process have."""


def choose(p: Problem, target: Target, threads: int = 1, *, tuned: bool = True) -> Choice:
    """The schedule measured to be fastest, or the model's selection.

    The model selects the least predicted time, the first of equals, unless `cpu_textbook.preferred` selects another.

    Args:
        p: the problem.
        target: the machine.
        threads: the most threads to use; one is used if that is predicted faster.
        tuned: look in the database of tuned schedules.

    Raises:
        ScheduleError: no schedule is legal, or the product is empty.
    """
    _check(p, target)
    best = select(p, target, threads)
    schedules = best.listed.schedules
    (costs,) = predict(p, best.listed, (p.n if p.c == "col" else p.m,), (best.workers,))
    terms = costs.at(0)
    order = sorted(range(len(schedules)), key=lambda i: terms[i].seconds)
    rest = tuple((schedules[i], terms[i]) for i in order if i != best.index)
    choice = Choice(p, target, best.workers, best.schedule, terms[best.index], rest, best.origin)
    return overlaid(choice, schedules, threads, predicted) if tuned else choice


def predicted(p: Problem, s: Schedule, target: Target, workers: int) -> Cost:
    """The time that the model predicts for a schedule, with its terms."""
    return cost(p, s, atom_of(isa_of(s, target), s.dtype, s.lanes), target, workers)


def _check(p: Problem, target: Target) -> None:
    """Check that a product is not empty, and that panels of a packed B are multiples of this target's vectors.

    Raises:
        ScheduleError: it is empty, or B is packed for another target.
    """
    if 0 in (p.m, p.n, p.k, p.batch):
        raise ScheduleError(f"{p} has no products: there is nothing to choose")
    if p.b != "packed":
        return
    takes = [(isa.columns(atom), atom.k_pack) for isa, atom in units(p.dtype, target)]
    layout = family_of(p.family)
    if not any(layout.nr % n == 0 and layout.kr == kr for n, kr in takes):
        multiples = " or ".join(f"multiples of {n}{f' by {kr}' if kr > 1 else ''}" for n, kr in takes)
        raise ScheduleError(f"B is packed as {p.family}; {target.name} takes {multiples}: pack it again here")


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
    """The unit that weights for products of these types are packed for: the fastest one.

    Raises:
        ScheduleError: no atom of the target multiplies these types.
    """

    def rate(pair: tuple[Isa, Atom]) -> float:
        isa, atom = pair
        return macs_per_cycle(target, isa, atom, dtype) * atom.m * atom.n * atom.k

    return max(units(dtype, target), key=rate)


def family(dtype: str, target: Target) -> str:
    """The packed layout that suits a target: see `PACKED_VECTORS`; of int4 values, in groups of the default size.

    Raises:
        ScheduleError: no atom of the target multiplies these types.
    """
    if types(dtype)[1] == "u4":
        return str(family_of_codes(target, USUAL_GROUP))
    isa, atom = packing_unit(dtype, target)
    return str(Family(types(dtype)[1], isa.columns(atom) * PACKED_VECTORS, atom.k_pack, atom.acc == "s32"))


def family_of_codes(target: Target, group: int) -> Family:
    """The packed layout of an int4 weight on a target: one for all types of A.

    Raises:
        ScheduleError: no atom of the target multiplies int4 values.
    """
    _, atom = _int4_unit(target)
    return Family("u4", atom.n * PACKED_VECTORS, CODES_KR, group=group)


def _int4_unit(target: Target) -> tuple[Isa, Atom]:
    return units("f32-u4-f32", target)[0]


@lru_cache(maxsize=64)  # 150 KiB each
def kernel_of(s: Schedule, isa: Isa) -> Kernel:
    """The loop nest of a schedule, lowered once."""
    return lower(s, isa)


def _outline(kernel: Kernel) -> Kernel:
    """A kernel without its loop nest, which takes most of its memory and is not needed once code is loaded."""
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
        forget()  # memos keep code loaded
        runtime().clear_memo()
    with _lock:
        code = _loaded.get(artifact.key)
        if code is None:
            code = _loaded[artifact.key] = load_kernel(runtime(), artifact.code, artifact.path, kernel.name)
    return code


@dataclass(frozen=True, slots=True)
class _Code:
    """The loaded code of a schedule, which serves other sizes too.

    Attributes:
        code: the function that the run time launches.
        swap: the kernel computes the transpose.
        workspace: elements of its scratch, from fields of the argument block.
        bytes: of an element of scratch.
    """

    code: Any
    swap: bool
    workspace: Callable[[Mapping[str, int]], int]
    bytes: int

    def scratch(self, p: Problem, rows: int, workers: int) -> int:
        """Bytes of its scratch for problems like `p` with `rows` rows."""
        return self.workspace(_fields(p, rows, workers, swap=self.swap)) * self.bytes


def workspace_bytes(kernel: Kernel, p: Problem, workers: int) -> int:
    """Bytes of scratch of a kernel for a problem."""
    return meaning(kernel.workspace)(_fields(p, p.m, workers, swap=kernel.swap)) * BY_NAME[kernel.atom.acc].bytes


def _fields(p: Problem, rows: int, workers: int, *, swap: bool) -> dict[str, int]:
    m, n = (p.n, rows) if swap else (rows, p.n)
    return {"m": m, "n": n, "k": p.k, "batch": p.batch, "workers": workers}


def route_of(kernel: Kernel, code: Any, fields: dict[str, int], dtype: str) -> Any:
    """A route for loaded code, with scratch for these fields of the argument block."""
    from portmm.runtime.cpu import runtime

    work = meaning(kernel.workspace)(fields) * BY_NAME[kernel.atom.acc].bytes
    return runtime().make_route(code, work, fields["workers"], dtype)


_codes = Memory(MOST_LOADED)


def _code(s: Schedule, target: Target, kept: RouteCache | None = None) -> _Code:
    """The code of a schedule: from this process, from the route cache, or built now."""
    isa = isa_of(s, target)
    key = s, isa
    code: _Code | None = _codes.get(key)
    if code is None:
        code = (_looked_up(s, isa, kept) if kept is not None else None) or _built(s, isa, target, kept)
        _codes.keep(key, code)
    return code


def _looked_up(s: Schedule, isa: Isa, kept: RouteCache) -> _Code | None:
    """Code that an earlier process built, looked up without its source."""
    from portmm.runtime.cpu import runtime

    entry = route_cache.code(kept, spell(s), runtime())
    if entry is None:
        return None
    code, workspace = entry
    return _Code(code, s.swap, meaning(parsed(workspace)), BY_NAME[atom_of(isa, s.dtype, s.lanes).acc].bytes)


def _built(s: Schedule, isa: Isa, target: Target, kept: RouteCache | None) -> _Code:
    kernel = kernel_of(s, isa)
    code = loaded(kernel)
    if kept is not None:
        route_cache.keep_code(kept, spell(s), code, spelled(kernel.workspace), target)
    return _Code(code, kernel.swap, meaning(kernel.workspace), BY_NAME[kernel.atom.acc].bytes)


def _route(code: _Code, p: Problem, workers: int, rows: int | None = None) -> Any:
    """A route for problems like `p`, of at most `rows` rows."""
    from portmm.runtime.cpu import runtime

    work = code.scratch(p, p.m if rows is None else rows, workers)
    return runtime().make_route(code.code, work, workers, p.storage, p.unit)


def route_by(s: Schedule, p: Problem, target: Target, workers: int) -> Any:
    """A route for a problem by a schedule that is legal for it."""
    return _route(_code(s, target), p, workers)


_routes = Memory(MOST_ROUTES)


def route_for(p: Problem, target: Target, threads: int) -> Any:
    """A route for a problem, selected or overridden once per class of problems, target and limit of threads.

    Raises:
        ScheduleError: no schedule is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    return routed(p, target, threads)[0]


def routed(p: Problem, target: Target, threads: int, kept: RouteCache | None = None) -> tuple[Any, tuple[int, int]]:
    """A route for a problem, and the least and the largest M that it serves.

    Args:
        p: the problem.
        target: the machine.
        threads: the most threads to use.
        kept: the route cache of this target, which finds code built for it.

    Raises:
        ScheduleError: no schedule is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    own, served = (p.m, p.m), rows(p)
    if served != own and not active():
        route = _kept(p, target, (threads, served), lambda: _shared(p, served, target, threads, kept))
        if route is not None:
            return route, served
    return _kept(p, target, (threads, own), lambda: _alone(p, target, threads, kept)), own


def _kept(p: Problem, target: Target, about: Any, make: Callable[[], Any]) -> Any:
    """A value computed once for problems like `p` on a target; `about` holds the range of rows."""
    # A target holds dicts, so its identity stands for it; the entry keeps it alive.
    key = (p.but_rows, id(target), about)
    entry = _routes.get(key)
    if entry is None or (isinstance(entry[1], BuildError) and time.monotonic() >= entry[1].retry_at):
        try:
            value = make()
        except BuildError as error:
            _routes.keep(key, (target, error.again()))
            raise
        entry = _routes.keep(key, (target, value))
    if isinstance(entry[1], BuildError):
        raise entry[1].again()
    return entry[1]


def _shared(p: Problem, served: tuple[int, int], target: Target, threads: int, kept: RouteCache | None) -> Any:
    """The route of the class of a problem; None if its problems need different ones."""
    _check(p, target)
    if _tuned_within(p, served, target, threads):
        return None
    best = select(p, target, threads)
    if best.rows != served:
        return None
    return _route(_code(best.schedule, target, kept), p, best.workers, served[1])


def _alone(p: Problem, target: Target, threads: int, kept: RouteCache | None) -> Any:
    """The route of a single problem."""
    selected = schedule_for(p)
    if selected is None and not _tuned_within(p, (p.m, p.m), target, threads):
        _check(p, target)
        best = select(p, target, threads)
        selected = best.schedule, best.workers
    if selected is None:
        choice = choose(p, target, threads)
        selected = choice.schedule, choice.workers
    schedule, workers = selected
    return _route(_code(schedule, target, kept), p, workers)


def _tuned_within(p: Problem, served: tuple[int, int], target: Target, threads: int) -> bool:
    """Test for tuned schedules of problems in a range of rows; True if the database is unreadable: `choose` retries."""
    from portmm.dispatch.tuning_database import tuned_rows

    try:
        return any(served[0] <= m <= served[1] for m in tuned_rows(p, target, threads))
    except DatabaseError:
        return True


@lru_cache(maxsize=256)
def _packer(isa: Isa, dtype: str, nr: int, layout: str) -> Any:
    return loaded(lower_pack(isa, dtype, nr, layout))


def pack_route(isa: Isa, dtype: str, nr: int, layout: str, threads: int) -> Any:
    """A route of the kernel that packs a B.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    from portmm.runtime.cpu import runtime

    storage = types(dtype)[1]
    return runtime().make_route(_packer(isa, dtype, nr, layout), 1024, threads, storage)


@lru_cache(maxsize=256)
def _repacker(isa: Isa, kept: Family) -> Any:
    return loaded(lower_int4_repack(isa, kept))


def int4_repack_route(kept: Family, target: Target, threads: int) -> Any:
    """A route of the kernel that repacks an int4 weight.

    Raises:
        ScheduleError: the ISA lacks an instruction for it.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    from portmm.runtime.cpu import runtime

    isa, _ = _int4_unit(target)
    return runtime().make_route(_repacker(isa, kept), 1024, threads, "s32")


@lru_cache(maxsize=256)
def _rows(text: str, isa: Isa, lanes: int) -> tuple[Kernel, Any]:
    real = isa.vector("f32", lanes)
    assert real is not None  # noqa: S101 - `unit_for` found it
    kernel = lower_rows(isa, real, text)
    return _outline(kernel), loaded(kernel)


def unit_for(fused: Fused, target: Target) -> tuple[Isa, Atom]:
    """The instruction set, and its vectors of f32, that compute fused expressions.

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
    """A route for fused expressions over m rows of n columns, and a batch.

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


def attention_unit(dtype: str, fused: Fused, target: Target, rows: int) -> tuple[Isa, Atom, Atom]:
    """The fastest unit for products of a type that attention kernels support, and its vectors of f32.

    Units with more rows than there are `rows` of queries are excluded.

    Raises:
        ScheduleError: there is none.
    """
    fits = []
    for isa, atom in units(f"{dtype}-{dtype}-f32" if dtype != "f32" else dtype, target):
        real = isa.vector("f32", atom.n)
        lines = isa.row_atom(atom) or atom
        interleaves = atom.k_pack == 1 or isa.spelling(lines, "load_rows", "f32", atom.right)
        if (
            (rows >= atom.m if atom.tiled else atom.m == 1)
            and atom.acc == "f32"
            and interleaves
            and real
            and not lacks(isa, real, fused)
        ):
            rate = macs_per_cycle(target, isa, atom, dtype) * atom.m * atom.n * atom.k
            fits.append((rate, isa, atom, real))
    if not fits:
        raise ScheduleError(f"{target.name} has no unit that computes {fused} of {dtype}")
    return max(fits, key=lambda x: x[0])[1:]


def attention_route(form: Form, unit: tuple[Isa, Atom, Atom], fields: dict[str, int]) -> Any:
    """A route for a form of attention; `fields` are those of the argument block.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    return route_of(*_attention(form, *unit), fields, "f32")


def forget() -> None:
    """Drop all memos of this process; the cache on disk stays."""
    for memo in (kernel_of, _packer, _repacker, _rows, _attention):
        memo.cache_clear()
    forget_all()
    with _lock:
        _loaded.clear()
