"""Routes on a CPU of products whose A or B is a view of memory with transforms, as the windows of a convolution.

Owns the selection among schedules that pack the view, and the memo of routes: a kernel is made for one view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import atom_of, lower_direct, lower_grouped, lower_tiled, lower_view
from portmm.dispatch.cpu_kernels import group_unit, isa_of, loaded_program
from portmm.dispatch.schedule_choice import choose
from portmm.errors import ScheduleError
from portmm.runtime.cpu import runtime
from portmm.schedule.direct_convolution import Direct, direct
from portmm.schedule.grouped_convolution import Panels, grouped
from portmm.schedule.tile_convolution import Tiled, tiled
from portmm.spec.dtype import UNCONVERTED, base, parts, unit
from portmm.spec.layouts import Views
from portmm.spec.row_classes import of_class
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.convolution import Convolution
    from portmm.spec.problem import Problem
    from portmm.target.target import Target

MOST = 1024
"""Routes remembered before all are dropped."""

LEAST_ROW_OF_CODES = 28
"""Pixels of a row of a result from which register tiles of vectors read images of bytes in place. Zen 5, ResNet-50:
rows of 56 and 112 pixels take 0.45 to 0.92 of the time of packed ones, rows of 28 0.96 to 1, of 14 and 7 1 to 1.1."""

_routes = Memory(MOST, "routes")


def _remembered(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose routes are remembered; an entry keeps the target alive."""

    @wraps(make)
    def route(p: Problem, target: Target, threads: int, *more: Any) -> Any:
        key = (make, p, *more, id(target), threads)
        entry = _routes.get(key) or _routes.keep(key, (target, make(p, target, threads, *more)))
        return entry[1]

    return route


def _route(code: Any, p: Problem, threads: int) -> Any:
    """The route of a kernel for a problem."""
    return runtime().make_route(code.code, code.scratch(p, p.m, threads), threads, p.storage, p.unit)


def _schedules(p: Problem, views: Views, target: Target, threads: int) -> Iterator[tuple[Schedule, int]]:
    """Schedules that pack the views, the one that is predicted to be fastest first, with its threads."""
    choice = choose(of_class(p), target, threads, tuned=False)
    for s in (choice.schedule, *(s for s, _ in choice.runners_up)):
        if _packs(s, views, target):
            yield s, choice.workers


@_remembered
def direct_route(  # noqa: PLR0917 - what a kernel is made for
    p: Problem, target: Target, threads: int, x: Convolution, strides: tuple[int, ...], to: tuple[int, int] | None
) -> Any:
    """A route of a direct convolution, channels last; None where windows are packed instead.

    Args:
        p: the product of one group, of filters in panels.
        target: the machine.
        threads: the most threads to use.
        x: the convolution.
        strides: of images (n, *spatial, c), in elements.
        to: strides of rows and pixels of the result, or None: see `Direct`.
    """
    plan = None if p.deterministic or p.b != "packed" else in_place(p, x, strides, target, threads, to)
    if plan is None:
        return None
    s, sizes = plan
    lower = lower_tiled if isinstance(sizes, Tiled) else lower_direct
    return _route(loaded_program(lower, s, isa_of(s, target), sizes), p, threads)


def in_place(  # noqa: PLR0917
    p: Problem,
    x: Convolution,
    strides: tuple[int, ...],
    target: Target,
    threads: int,
    to: tuple[int, int] | None = None,
) -> tuple[Schedule, Direct | Tiled] | None:
    """The schedule and the blocks of a direct convolution; None where windows are packed instead: see `direct_route`.

    Raises:
        ScheduleError: no schedule multiplies these types.
    """
    s, _ = schedule_of(replace(p, a="any"), Views(), target, threads)
    atom = atom_of(isa_of(s, target), s.dtype, s.atom.lanes)
    sizes: Direct | Tiled | None = None
    rows = p.dtype in UNCONVERTED or (p.types[0] == "u8" and x.out[-1] >= LEAST_ROW_OF_CODES)
    if s.program == "tiles" and to is None and base(atom.left) == s.types[0]:
        sizes = tiled(x, strides, s, atom, target)
    elif s.program == "gemm" and rows and unit(s.types[0], s.atom.kr) == atom.left:
        sizes = direct(x, strides, s, target, to)
    return None if sizes is None else (s, sizes)


@_remembered
def stacked_route(p: Problem, target: Target, threads: int, x: Convolution, strides: tuple[int, ...]) -> Any:
    """A route of a convolution of groups on tile units, channels last, whose panels of filters follow each other.

    The problem is the product of pixels by all outputs; the others are as in `direct_route`.
    """
    s, sizes = stacked(p, x, strides, target, threads)
    return _route(loaded_program(lower_tiled, s, isa_of(s, target), sizes), p, threads)


def stacked(
    p: Problem, x: Convolution, strides: tuple[int, ...], target: Target, threads: int
) -> tuple[Schedule, Tiled]:
    """The schedule and the blocks of a convolution of groups on tile units: see `stacked_route`.

    Raises:
        ScheduleError: there is none, as for filters that were packed for another machine.
    """
    for s, _ in _schedules(p, Views(), target, threads):
        atom = atom_of(isa_of(s, target), s.dtype, s.atom.lanes)
        if s.program == "tiles" and base(atom.left) == s.types[0]:
            sizes = tiled(x, strides, s, atom, target, x.groups)
            if sizes is not None:
                return s, sizes
    raise ScheduleError(f"no tiles of {target.name} convolve {x}")


@_remembered
def grouped_route(  # noqa: PLR0917 - what a kernel is made for
    p: Problem, target: Target, threads: int, x: Convolution, strides: tuple[int, ...], panels: Panels
) -> Any:
    """A route of a convolution of groups of few channels, channels last, of filters in a layout of panels.

    The problem is the product of pixels by all outputs; the others are as in `direct_route`.

    Raises:
        ScheduleError: filters were packed for another machine.
    """
    isa, atom = group_unit(p.types[0], panels.dtype, target, panels.channels)
    if (atom.n, atom.k_pack) != (panels.lanes, panels.unit):
        raise ScheduleError(f"filters in vectors of {panels.lanes} are for another machine than {target.name}")
    sizes, (image, _, result) = grouped(x, strides, panels, isa, target), p.types
    return _route(loaded_program(lower_grouped, isa, atom, sizes, (image, result), p.fused), p, threads)


@_remembered
def view_route(p: Problem, target: Target, threads: int, views: Views) -> Any:
    """A route for a problem whose A or B is a view."""
    s, workers = schedule_of(p, views, target, threads)
    return _route(loaded_program(lower_view, s, isa_of(s, target), *views), p, workers)


def schedule_of(p: Problem, views: Views, target: Target, threads: int) -> tuple[Schedule, int]:
    """The schedule predicted to be fastest among those that pack the view, and its threads.

    Raises:
        ScheduleError: there is none.
    """
    for schedule in _schedules(p, views, target, threads):
        return schedule
    raise ScheduleError(f"no schedule of {p} packs its view on {target.name}")


def _packs(s: Schedule, views: Views, target: Target) -> bool:
    """Whether a schedule packs the operands that are views."""
    programs = ("gemm",) if views.b is not None or views.padding else ("gemm", "tiles")
    if s.program not in programs or s.atom.swap or s.static:
        return False
    by_tiles = s.program == "tiles" and s.b.layout == "codes" and not s.b.packed
    in_parts = by_tiles and parts(s.types[0], atom_of(isa_of(s, target), s.dtype, s.atom.lanes).a) > 1
    return (views.a is None or (s.a.packed and not in_parts)) and (views.b is None or s.b.packed)
