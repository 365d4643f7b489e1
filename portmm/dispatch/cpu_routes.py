"""Routes on a CPU: loaded kernels with the workspace and the threads of a call.

Owns the route of a problem, which is selected, built and loaded once per class of problems, and routes of kernels
around products: packing, expressions over rows, attention. `ops.routes` comes here with problems that neither its memo
nor the route cache knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.codegen.lower import lower_group_norm, lower_int4_repack, lower_pack, lower_program
from portmm.dispatch import config, cpu_background, missing
from portmm.dispatch.cpu_background import StandIn, stand_in
from portmm.dispatch.cpu_kernels import (
    can_build,
    code_of,
    int4_unit,
    is_loaded,
    isa_of,
    known_code,
    loaded_program,
    stored_code,
    unit_for,
)
from portmm.dispatch.overrides import active, schedule_for
from portmm.dispatch.schedule_choice import ClassSelection, check, choose, predicted, select_for_class
from portmm.errors import BuildError, DatabaseError, NoCompilerError
from portmm.ir.index import meaning
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import BY_NAME, types
from portmm.spec.row_classes import rows
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.dispatch.stored_kernels import Code
    from portmm.ir.block_program import BlockProgram
    from portmm.ir.nodes import Kernel
    from portmm.runtime.route_cache import RouteCache
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.spec.problem import Family, Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

MOST_ROUTES = 4096
"""Routes kept before all are dropped: an endless series of new shapes must not fill memory."""

MOST_SUBSTITUTES = 32
"""Candidates, the fastest first, that are looked for without a compiler: the source of each takes milliseconds. Of the
others those that are loaded are taken."""

_routes = Memory(MOST_ROUTES, "routes")
_stand_ins = Memory(MOST_ROUTES, "routes")


def routed(
    p: Problem,
    target: Target,
    threads: int,
    kept: RouteCache | None = None,
    *,
    later: Callable[[Any, tuple[int, int]], None] | None = None,
) -> tuple[Any, tuple[int, int] | None]:
    """A route for a problem, and the least and the largest M that it serves.

    Args:
        p: the problem.
        target: the machine.
        threads: the most threads to use.
        kept: the route cache of this target, which finds code built for it.
        later: if it is set, and while the kernel is being built, the route may be another one with the same results,
            for this call only, and None in place of a range; `later` gets both when the kernel is there, in a thread.
    """
    own, served = (p.m, p.m), rows(p)
    build, route = _Building(target, kept, None if active() or missing.strict() else later), None
    if served != own and not active():
        route = _kept(p, target, (threads, served), lambda: _shared(p, served, target, threads, build))
    if route is None:
        served, route = own, _kept(p, target, (threads, own), lambda: _alone(p, target, threads, build))
    if isinstance(route, StandIn):
        return _route(code_of(route.schedule, target, kept), p, route.workers), None
    return route, served


class _Building(NamedTuple):
    """A way to the code of a selected schedule.

    Attributes:
        target: the machine.
        kept: the route cache.
        later: gets a route whose code was built in the background, and its range of rows; None if calls wait.
    """

    target: Target
    kept: RouteCache | None
    later: Callable[[Any, tuple[int, int]], None] | None

    def route(self, best: ClassSelection, p: Problem, rows: int | None = None) -> Any:
        """The route of a selection for at most `rows` rows, or a `StandIn` while its code is built elsewhere."""
        if self.later is not None and known_code(best.schedule, self.target, self.kept) is None:
            other = self._begin(best, p, rows)
            if other is not None:
                return other
        return _route(self._code(best, p), p, best.workers, rows)

    def _code(self, best: ClassSelection, p: Problem) -> Code:
        """The code of the selected schedule, or without a compiler that of the fastest one that was built before."""
        try:
            return code_of(best.schedule, self.target, self.kept)
        except NoCompilerError as error:
            none = NoCompilerError(f"there is no kernel for {p}: {error}")
            if missing.strict():
                raise none from error
            seconds = predicted(p, best.listed, best.workers)
            nearest = sorted(zip(seconds, best.listed.schedules, strict=True), key=lambda x: x[0])
            for i, (x, s) in enumerate(nearest):
                searched = i < MOST_SUBSTITUTES or is_loaded(s, self.target)
                code = stored_code(s, self.target, self.kept) if searched else None
                if code is not None:
                    missing.substituted(p, x / seconds[best.index], str(error))
                    return code
            raise none from error

    def _begin(self, best: ClassSelection, p: Problem, rows: int | None) -> StandIn | None:
        """Begin to build the code of the selected schedule if another one can take its place, which is returned."""
        wanted, target = best.schedule, self.target
        listed, key = best.listed, (best.schedule, id(target), best.rows, p.but_rows)
        other = _stand_ins.get(key)
        if other is None or other not in listed.schedules or not is_loaded(other, target):
            seconds = partial(predicted, p, listed, best.workers)
            other = stand_in(p, wanted, listed.schedules, seconds, lambda s: is_loaded(s, target))
        # Without a compiler a call gets what there is, which it says: nothing would come of a thread.
        if other is None or not can_build(isa_of(wanted, target)):
            return None
        if not cpu_background.begin((*key, rows), partial(self._built, best, p, rows)):
            return None
        _stand_ins.keep(key, other)
        return StandIn(other, best.workers)

    def _built(self, best: ClassSelection, p: Problem, rows: int | None) -> None:
        """Build the code of the selected schedule, and hand its route on."""
        route = _route(self._code(best, p), p, best.workers, rows)
        if self.later is not None:
            self.later(route, (p.m, p.m) if rows is None else best.rows)


def _kept(p: Problem, target: Target, about: Any, make: Callable[[], Any]) -> Any:
    """A route found once for problems like `p`; `about` holds the range of rows. A `StandIn` is not kept."""
    # A target holds dicts, so its identity stands for it; the entry keeps it alive.
    key = (p.but_rows, id(target), about)
    entry = _routes.get(key)
    if entry is None or (isinstance(entry[1], BuildError) and time.monotonic() >= entry[1].retry_at):
        try:
            value = make()
        except BuildError as error:
            _routes.keep(key, (target, error.again()))
            raise
        if isinstance(value, StandIn):
            return value
        entry = _routes.keep(key, (target, value))
    if isinstance(entry[1], BuildError):
        raise entry[1].again()
    return entry[1]


def _shared(p: Problem, served: tuple[int, int], target: Target, threads: int, build: _Building) -> Any:
    """The route of the class of a problem; None if its problems need different ones."""
    check(p, target)
    if tuned_within(p, served, target, threads):
        return None
    best = select_for_class(p, target, threads)
    if best.rows != served:
        return None
    return build.route(best, p, served[1])


def _alone(p: Problem, target: Target, threads: int, build: _Building) -> Any:
    """The route of a single problem."""
    selected = schedule_for(p)
    if selected is None and not tuned_within(p, (p.m, p.m), target, threads):
        check(p, target)
        best = select_for_class(p, target, threads)
        return build.route(best, p)
    if selected is None:
        choice = choose(p, target, threads)
        selected = choice.schedule, choice.workers
    schedule, workers = selected
    return _route(code_of(schedule, target, build.kept), p, workers)


def tuned_within(p: Problem, served: tuple[int, int], target: Target, threads: int) -> bool:
    """Test for tuned schedules of problems in a range of rows; True if the database is unreadable: `choose` retries."""
    from portmm.dispatch.tuning_database import tuned_rows

    try:
        return any(served[0] <= m <= served[1] for m in tuned_rows(p, target, threads))
    except DatabaseError:
        return True


def route_by(s: Schedule, p: Problem, target: Target, workers: int) -> Any:
    """A route for a problem by a schedule that is legal for it."""
    return _route(code_of(s, target), p, workers)


def _route(code: Code, p: Problem, workers: int, rows: int | None = None) -> Any:
    """A route for problems like `p`, of at most `rows` rows."""
    work = code.scratch(p, p.m if rows is None else rows, workers)
    return runtime().make_route(code.code, work, workers, p.storage, p.unit)


def route_of(kernel: Kernel, code: Any, fields: dict[str, int], dtype: str) -> Any:
    """A route for loaded code, with scratch for these fields of the argument block."""
    work = meaning(kernel.workspace)(fields) * BY_NAME[kernel.atom.acc].bytes
    return runtime().make_route(code, work, fields["workers"], dtype)


def pack_route(isa: Isa, dtype: str, nr: int, layout: str, threads: int) -> Any:
    """A route of the kernel that packs a B."""
    storage = types(dtype)[1]
    return runtime().make_route(loaded_program(lower_pack, isa, dtype, nr, layout).code, 1024, threads, storage)


def int4_repack_route(kept: Family, target: Target, threads: int) -> Any:
    """A route of the kernel that repacks an int4 weight.

    Raises:
        ScheduleError: the ISA lacks an instruction for it.
    """
    code = loaded_program(lower_int4_repack, int4_unit(target)[0], kept)
    return runtime().make_route(code.code, 1024, threads, "s32")


def rows_route(program: BlockProgram, size: tuple[int, int, int], target: Target, workers: int) -> Any:
    """A route for a block program over m rows of n columns, and a batch.

    Raises:
        ScheduleError: no unit of the target computes them.
    """
    from portmm.schedule.rows import core_schedule, work

    isa, atom = unit_for(program.fused, target)
    real = isa.vector("f32", atom.n)
    assert real is not None  # noqa: S101 - `unit_for` finds it
    m, n, batch = size
    fields = {"m": m, "n": n, "batch": batch, "workers": workers}
    l2 = target.level("L2")
    far = l2 is not None and work(program, size).counts["memory"] > l2.bytes
    return program_route(program, core_schedule(program, isa, real, far=far), isa, real, fields)


def expressions_route(fused: Fused, size: tuple[int, int, int]) -> Any:
    """A route for expressions over m rows of n columns, and a batch, under the current settings; see `rows_route`."""
    from portmm.ir.block_program import program_of
    from portmm.schedule.rows import workers

    program = program_of(fused, "L1")
    return rows_route(program, size, config.target(), workers(program, size, config.get_num_threads()))


def group_norm_route(fused: Fused, group: int, eps: float, size: tuple[int, int, int]) -> Any:
    """A route for a group norm of images with channels last, and expressions of it, under the current settings.

    Args:
        fused: expressions: see `kernels.blocks.group_norm`.
        group: channels of a group.
        eps: added to variances.
        size: pixels, channels, images.

    Raises:
        ScheduleError: no unit of the target computes them.
    """
    from portmm.ir.block_program import of_rows
    from portmm.schedule.rows import task_channels, workers

    target, (m, n, batch) = config.target(), size
    isa, real = unit_for(fused, target)
    threads = workers(of_rows(fused), size, config.get_num_threads())
    width = task_channels(size, group, threads)
    code = loaded_program(lower_group_norm, isa, real, str(fused), group, repr(eps), width)
    fields = {"m": m, "n": n, "batch": batch, "workers": threads}
    return runtime().make_route(code.code, code.workspace(fields) * code.bytes, threads, "f32")


def program_route(program: BlockProgram, s: Schedule, isa: Isa, atom: Atom, fields: dict[str, int]) -> Any:
    """A route for a block program by a schedule; `fields` are those of the argument block."""
    code = loaded_program(_lowered, program, s, isa, atom)
    return runtime().make_route(code.code, code.workspace(fields) * code.bytes, fields["workers"], "f32")


def _lowered(program: BlockProgram, s: Schedule, isa: Isa, atom: Atom) -> Kernel:
    """The kernel of a host."""
    return lower_program(program, s, isa, atom)[0]
