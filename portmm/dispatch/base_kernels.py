"""Kernels of the wheel's base set: the first calls of a process, before anything is detected, selected or compiled.

Owns the level of this processor, and the look-up of a size in the table of a kind of products. The level is the first
of the base set whose features this processor has; the table names, for sizes around a point of its grid, the kernel
that is predicted to lose least there. Nothing that is imported here is slow to import.

With a compiler the kernel that is selected for the machine is built in the background, and takes the place of one of
the base set if it gives the same bits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from portmm.build import kernel_store
from portmm.build.cache import cache_dir
from portmm.dispatch import config, stored_kernels
from portmm.errors import BundleError
from portmm.host import host_probe
from portmm.host.host_probe import Snapshot
from portmm.runtime import cpu as cpu_runtime
from portmm.runtime.route_cache import ROUTES
from portmm.spec.dtype import types
from portmm.spec.row_classes import rows as rows_of
from portmm.util import system

if TYPE_CHECKING:
    from portmm.spec.problem import Problem

LEVELS, GRID, ROWS = "levels", "grid ", "rows "
"""Questions to the base set: the features of levels, and the beginnings of those for a table, and expressions.

A table is three axes, of M, N and K; a character for each point, the number of a schedule from "0" on, or "-"; and the
schedules.
"""
FORK_FLOPS = 4e6
"""Operations from which all threads take part: some ten times what it takes to start them."""
FORK_ELEMENTS = 1 << 18
"""Elements from which all threads pack a weight, or compute rows."""
FIRST = "0"
PACKING_BYTES = 1024
"""Scratch of a kernel that packs."""


def active() -> bool:
    """Whether calls take kernels of the base set first, under the current settings."""
    return not config.overridden() and not config.target_name() and leads()


@cache
def leads() -> bool:
    """Whether the base set serves first calls.

    There is one, no bundle in use has a machine that serves this one, and no earlier process has left routes in the
    cache.
    """
    if kernel_store.base() is None:
        return False
    with suppress(BundleError):  # the call that looks into the bundle raises it
        if not any(map(config.machine_of, kernel_store.bundles())):
            return _first()
    return False


def _first() -> bool:
    """Whether no earlier process has left routes in the cache."""
    try:
        with os.scandir(cache_dir()) as entries:
            return not any(x.name.startswith(ROUTES) for x in entries)
    except OSError:
        return True


@cache
def level() -> str:
    """The level of this processor in the base set; empty if it has none."""
    base = kernel_store.base()
    has = _features()
    for text in (base.answer(LEVELS) if base else None) or ():
        name, _, words = text.partition("=")
        if has.issuperset(words.split(",")):
            return name
    return ""


def _features() -> frozenset[str]:
    """Features of this processor: by the run time of the base set, which calls need anyway; else from a snapshot."""
    if words := cpu_runtime.processor_words():
        return words
    from portmm.host.features import features
    from portmm.host.host_probe import processors, snapshot

    shot = snapshot()
    first = (processors(shot.cpuinfo) or [{}])[0] if shot.machine == "x86_64" else {}
    return features(shot) | {f"vendor={first.get('vendor_id')}", f"family={first.get('cpu family')}"}


@cache
def cores() -> int:
    """The number of cores that this process may use."""
    affinity = system.processors()
    if len(affinity) == 1:
        return 1  # whatever shares it: no file needs to be read
    return host_probe.cores(Snapshot(system.machine(), "", host_probe.sharing(affinity), affinity), affinity)


def run_time() -> cpu_runtime.Runtime | None:
    """The run time of the base set for this version of Python, loaded; None if it has none.

    Raises:
        BundleError: it is not to be trusted.
    """
    path = cpu_runtime.base_extension()
    return cpu_runtime.runtime(path=path) if path else None


def route(p: Problem) -> tuple[Any, str] | None:
    """A route of the base set for the class of a problem, and its schedule's spelling; None if it has none.

    Args:
        p: the problem.

    Raises:
        BundleError: the base set is damaged.
    """
    if p.batch != 1 or p.static or p.deterministic or p.grouped or p.c != "row":
        return None
    base = kernel_store.base()
    fields = base.answer(grid_question(level(), p)) if base else None
    if fields is None:
        return None
    ms, ns, ks = ([int(x) for x in axis.split(",")] for axis in fields[:3])
    last = rows_of(p)[1]
    i = next((i for i, m in enumerate(ms) if m >= last), len(ms) - 1)
    point = (i * len(ns) + _nearest(ns, p.n)) * len(ks) + _nearest(ks, p.k)
    number, schedules = ord(fields[3][point]) - ord(FIRST), fields[4:]
    # Where no kernel was selected, one for any rows from a least number on, or for as many.
    best = schedules[number : number + 1] if number >= 0 else []
    schedule = next((x for x in (*best, *schedules) if _serves(x, rows_of(p))), None)
    if schedule is None:
        return None
    code = stored_kernels.code(schedule, last=True)
    if code is None:
        return None
    workers = (config.limit() or cores()) if p.flops >= FORK_FLOPS else 1
    work = code.scratch(p, last, workers)
    return cpu_runtime.runtime().make_route(code.code, work, workers, p.storage, p.unit), schedule


def grid_question(name: str, p: Problem) -> str:
    """The question for the table of problems of a kind on a level."""
    return f"{GRID}{name} {p.dtype} {p.a} {p.b} {p.family} {p.source} {p.fused}"


def int4_word(group: int, *, symmetric: bool) -> str:
    """The word for packing weights of four bits, as "u4 128"."""
    return f"u4 {group}{'c' if symmetric else ''}"


def packing(word: str, layout: str, elements: int) -> tuple[str, Any] | None:
    """The packed layout of weights for products of the types `word`, and the route that packs an array in `layout`.

    Args:
        elements: of the array.
        word: types of the product, or `int4_word` for a weight of four bits.
        layout: "row" or "col", of the array.

    Raises:
        BundleError: the base set is damaged.
    """
    known = stored_kernels.packing(f"{stored_kernels.PACKING}{level()} {word} {layout}")
    if known is None:
        return None
    workers = (config.limit() or cores()) if elements >= FORK_ELEMENTS else 1
    return known[0], packing_route(*known, word, workers)


def packing_route(family: str, code: Any, word: str, workers: int) -> Any:
    """The route of code that packs weights in a layout for products of the types `word`."""
    storage = "s32" if family.startswith("u4") else types(word)[1]
    return cpu_runtime.runtime().make_route(code, PACKING_BYTES, workers, storage)


def rows_route(text: str, size: tuple[int, int, int], operands: int) -> Any:
    """A route of a kernel over rows; None if there is none.

    Args:
        text: of its expressions, as of a problem's epilogue.
        size: rows, columns and items of a batch.
        operands: their number.

    Raises:
        BundleError: the base set is damaged.
    """
    code = stored_kernels.answered(f"{ROWS}{level()} {text}", last=True)
    if code is None:
        return None
    m, n, batch = size
    workers = (config.limit() or cores()) if m * n * batch * operands >= FORK_ELEMENTS else 1
    work = code.workspace({"m": m, "n": n, "batch": batch, "workers": workers}) * code.bytes
    return cpu_runtime.runtime().make_route(code.code, work, workers, "f32")


def of_any_columns(text: str, n: int) -> str:
    """The spelling of expressions over rows whose first argument is the number of columns; empty if they have none.

    Those of a mean divide by it: a kernel that is passed it serves rows of any length.

    Args:
        text: of the expressions, without arguments.
        n: the number of columns.
    """
    changed = text.replace(f" const f32 {float(n)};", " number 0;")
    return changed if changed != text else ""


def _serves(schedule: str, served: tuple[int, int]) -> bool:
    """Whether register tiles of a schedule make up all numbers of rows of a class: see `Schedule.heights`.

    One row makes up any number.
    """
    program, *_, heights = schedule.split(":", 5)[:5]
    least, _, most = heights.partition("-")
    if program == "gemm" and most == "1":
        return True
    return served == (int(most),) * 2 if least == most else int(least) <= served[0]


def _nearest(axis: list[int], size: int) -> int:
    """Index of the point of an axis with the least ratio to a size."""
    return min(range(len(axis)), key=lambda i: abs(math.log(axis[i] / size)))


def improve(p: Problem, schedule: str, keep: Callable[[Any, tuple[int, int]], None], stay: Callable[[], None]) -> None:
    """Build the kernel that is selected for this machine in the background.

    Args:
        p: the problem.
        schedule: spelling of that of the base set.
        keep: takes the route of the selected kernel and the range of rows that it serves, if it gives the same bits.
        stay: called if that of the base set stays: where there is no compiler, and where bits would change.
    """
    from portmm.dispatch import cpu_background

    cpu_background.begin(("base", p.but_rows, rows_of(p)), lambda: _improve(p, schedule, keep, stay))


def _improve(p: Problem, schedule: str, keep: Callable[[Any, tuple[int, int]], None], stay: Callable[[], None]) -> None:
    from portmm.build.compiler import find_compiler
    from portmm.dispatch import cpu_background, cpu_routes
    from portmm.dispatch.schedule_choice import choose
    from portmm.errors import PortmmError
    from portmm.runtime import route_cache
    from portmm.schedule.text import parse

    try:
        find_compiler()
        target, threads = config.target(), config.get_num_threads()
        if cpu_background.same_results(choose(p, target, threads).schedule, parse(schedule)):
            kernel, served = cpu_routes.routed(p, target, threads, route_cache.of_target(config.target_name()))
            if served is not None:
                keep(kernel, served)
                return
    except PortmmError:
        pass
    stay()


def forget() -> None:
    """Drop what is known of this processor, of the cache, and of the base set, which is opened again if it is used."""
    kernel_store.close_base()
    for function in (leads, level, cores):
        function.cache_clear()
