"""Relayout of operands: copies into another layout before a product.

Owns `arranged`, which decides whether a product is faster when operands are first copied so that they are contiguous
along k, in aligned rows: matrix units cannot load fragments from every layout (`kernels/gpu/transpose.py`). The time of
copies is a term of the cost, so that operands of small products stay in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from portmm.arrays.interop import empty_like
from portmm.arrays.operand import address
from portmm.codegen.lower import lower_lines
from portmm.dispatch import schedule_choice
from portmm.dispatch.launches import bind
from portmm.errors import ScheduleError
from portmm.kernels.gpu.transpose import ALIGNED, lines
from portmm.schedule.candidates import units
from portmm.schedule.gpu_cost import copying
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.arrays.operand import Operand
    from portmm.dispatch.launches import Launch
    from portmm.dispatch.machine import Machine
    from portmm.schedule.program import Vectors
    from portmm.spec.problem import Problem
    from portmm.target.target import Target

SIDES = "ab"
_ALONG_K = {"a": "row", "b": "col"}
_KINDS = {1: "u8", 2: "f16", 4: "s32"}
"""Bytes of an element -> a type of that size: the copy does not interpret bits."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of an operand in another layout.

    Attributes:
        side: "a" or "b".
        elements: number of them in the copy.
        dtype: of its elements.
        launch: the kernel.
        name: of the kernel.
    """

    side: str
    elements: int
    dtype: str
    launch: Launch
    name: str


def faster(p: Problem, target: Target, vectors: Vectors, once: str = "") -> tuple[str, float]:
    """The operands to copy first, "", "a", "b" or "ab", and the seconds that the copies take.

    Args:
        p: the problem.
        target: the device.
        vectors: elements of the widest vector access to A, B and C.
        once: operands that all items of a batch share.

    Raises:
        ScheduleError: no schedule is legal.
    """
    device = target.device
    if device is None or not any(atom.unit for _, atom in units(p.dtype, target, tf32=p.tf32)):
        return "", 0.0
    candidates = [x for x in SIDES if _hinders(p, vectors, x)]
    if not candidates or p.deterministic or p.grouped or p.b == "codes":
        return "", 0.0
    best_sides, copy_seconds, best_seconds = "", 0.0, schedule_choice.choose(p, target, vectors=vectors).cost.seconds
    for count in range(1, len(candidates) + 1):
        for sides in combinations(candidates, count):
            spent = sum(copying(_bytes(p, x, x in once), target) for x in sides)
            if spent >= best_seconds:
                continue
            try:
                moved = vectors_after_copies(p, vectors, sides)
                rest = schedule_choice.choose(after_copies(p, sides), target, vectors=moved)
            except ScheduleError:
                continue
            if rest.schedule.program in ("simt", "direct", "stream"):
                continue
            if spent + rest.cost.seconds < best_seconds:
                best_sides, copy_seconds, best_seconds = "".join(sides), spent, spent + rest.cost.seconds
    return best_sides, copy_seconds


def _hinders(p: Problem, vectors: Vectors, side: str) -> bool:
    """Whether matrix units load fragments of an operand slowly, or not at all."""
    i = SIDES.index(side)
    layout, size = (p.a, p.b)[i], BY_NAME[p.types[i]].bytes
    if layout not in ("row", "col", "any"):
        return False
    return layout == "any" or vectors[i] * size < ALIGNED or (layout != _ALONG_K[side] and size == 1)


def _bytes(p: Problem, side: str, once: bool) -> int:
    """Bytes that a copy reads and writes."""
    i = SIDES.index(side)
    size = BY_NAME[p.types[i]].bytes
    return (p.m, p.n)[i] * (p.k + lines(p.k, size)) * size * (1 if once else p.batch)


def after_copies(p: Problem, sides: Any) -> Problem:
    """The problem after the copies of some operands."""
    return replace(p, a="row" if "a" in sides else p.a, b="col" if "b" in sides else p.b)


def vectors_after_copies(p: Problem, vectors: Vectors, sides: Any) -> Vectors:
    """Elements of the widest vector accesses after the copies."""
    own = [ALIGNED // BY_NAME[t].bytes if x in sides else v for x, t, v in zip(SIDES, p.types, vectors, strict=False)]
    return own[0], own[1], vectors[2]


def arranged(
    p: Problem, vectors: Vectors, values: dict[str, Any], on: Machine
) -> tuple[Problem, Vectors, dict[str, Any], tuple[Copy, ...]]:
    """The fastest equivalent problem, its vector widths and numbers, and the copies that come first.

    Raises:
        ScheduleError: no schedule is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    once = "".join(x for x in SIDES if values[f"{x}_batch"] == 0)
    sides, _ = faster(p, on.target, vectors, once) if p.flops else ("", 0.0)
    copies = tuple(_copy(p, x, values, on) for x in sides)
    values = dict(values)
    for x, copy in zip(sides, copies, strict=True):
        rows, outer = (p.m, "m") if x == "a" else (p.n, "n")
        row_stride = lines(p.k, BY_NAME[copy.dtype].bytes)
        values |= {f"{x}_{outer}": row_stride, f"{x}_k": 1, f"{x}_batch": 0 if x in once else rows * row_stride}
    return after_copies(p, sides), vectors_after_copies(p, vectors, sides), values, copies


def _copy(p: Problem, side: str, values: dict[str, Any], on: Machine) -> Copy:
    of_a = side == "a"
    dtype, layout = p.types[0 if of_a else 1], p.a if of_a else p.b
    size, rows = BY_NAME[dtype].bytes, p.m if of_a else p.n
    along = "k" if layout in ("any", _ALONG_K[side]) else "row"
    key = (_KINDS[size], along)
    ((kernel, function),) = on.loaded(key, lambda: (lower_lines(on.target.isas[-1], *key),))
    row_stride, apart = lines(p.k, size), values[f"{side}_batch"]
    items = p.batch if apart else 1
    numbers = {
        "m": rows, "k": p.k, "line": row_stride, "batch": items, "x_m": values[f"{side}_{'m' if of_a else 'n'}"],
        "x_k": values[f"{side}_k"], "x_batch": apart, "to_m": row_stride, "to_batch": rows * row_stride,
    }  # fmt: skip
    return Copy(side, items * rows * row_stride, dtype, bind(kernel, function, numbers), kernel.name)


def run(copies: tuple[Copy, ...], on: Machine, pointers: dict[str, Any], like: Operand) -> list[Any]:
    """Launch the copies, replace the operands' addresses by theirs, and return the arrays that own their memory."""
    arrays = []
    for x in copies:
        copied = empty_like(like, (x.elements,), x.dtype)
        x.launch.run(on, {"x": pointers[x.side], "to": address(copied)}, like.queue)
        pointers[x.side] = address(copied)
        arrays.append(copied)
    return arrays


def copy_notes(p: Problem, sides: str, seconds: float) -> tuple[str, ...]:
    """The lines of `explain` about copies."""
    names = " and ".join(x.upper() for x in sides)
    return (f"{names} of {p} first copied, contiguous along k, in {seconds * 1e6:.3g} us",) if sides else ()
