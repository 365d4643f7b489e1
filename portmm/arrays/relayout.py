"""Operands that are laid out anew before they are multiplied.

Owns `arranged`, which says whether a product is faster when operands are copied first, k side by side in aligned lines:
units that multiply fragments cannot load them from everywhere (`kernels.transposing`). The time of copies is a
term like others, so that small products are multiplied as they lie. Imports `arrays.interop`, `dispatch.gpu`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from portmm.arrays import interop
from portmm.codegen.lower import lower_lines
from portmm.dispatch import gpu as gpu_dispatch
from portmm.errors import ScheduleError
from portmm.kernels.gpu.transpose import ALIGNED, lines
from portmm.schedule.gpu_candidates import units
from portmm.schedule.gpu_cost import copying
from portmm.spec.dtype import BY_NAME
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.arrays.interop import Foreign
    from portmm.dispatch.gpu import Launch, Machine, Vectors
    from portmm.spec.problem import Problem
    from portmm.target.target import Target

SIDES = "ab"
_ALONG_K = {"a": "row", "b": "col"}
_KINDS = {1: "u8", 2: "f16", 4: "s32"}
"""Bytes of an element -> a type of that size: bits are copied."""
MOST_KERNELS = 64
_loaded = Memory(MOST_KERNELS)


@dataclass(frozen=True, slots=True)
class Copy:
    """An operand that is laid out anew.

    Attributes:
        side: "a" or "b".
        elements: of the copy.
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
    """Which operands to copy first, "", "a", "b" or "ab", and how long that takes.

    Args:
        p: what to compute.
        target: the device.
        vectors: elements of A, B and C that may be moved at once.
        once: operands that are the same for all items of a batch.

    Raises:
        ScheduleError: nothing is legal.
    """
    device = target.device
    if device is None or not any(atom.unit for _, atom in units(p.dtype, target, tf32=p.tf32)):
        return "", 0.0
    found = [x for x in SIDES if _hinders(p, vectors, x)]
    if not found or p.deterministic or p.grouped or p.b == "codes":
        return "", 0.0
    best, taken, least = "", 0.0, gpu_dispatch.choose(p, target, vectors).cost.seconds
    for count in range(1, len(found) + 1):
        for some in combinations(found, count):
            spent = sum(copying(_bytes(p, x, x in once), target) for x in some)
            if spent >= least:
                continue
            try:
                rest = gpu_dispatch.choose(laid(p, some), target, widened(p, vectors, some))
            except ScheduleError:
                continue
            if rest.schedule.program in ("simt", "direct", "stream"):
                continue
            if spent + rest.cost.seconds < least:
                best, taken, least = "".join(some), spent, spent + rest.cost.seconds
    return best, taken


def _hinders(p: Problem, vectors: Vectors, side: str) -> bool:
    """Fragments are loaded from an operand slowly, or not at all."""
    at = SIDES.index(side)
    layout, size = (p.a, p.b)[at], BY_NAME[p.types[at]].bytes
    if layout not in ("row", "col", "any"):
        return False
    return layout == "any" or vectors[at] * size < ALIGNED or (layout != _ALONG_K[side] and size == 1)


def _bytes(p: Problem, side: str, once: bool) -> int:
    """What a copy reads and writes."""
    at = SIDES.index(side)
    size = BY_NAME[p.types[at]].bytes
    return (p.m, p.n)[at] * (p.k + lines(p.k, size)) * size * (1 if once else p.batch)


def laid(p: Problem, sides: Any) -> Problem:
    """The problem of operands of which some were copied."""
    return replace(p, a="row" if "a" in sides else p.a, b="col" if "b" in sides else p.b)


def widened(p: Problem, vectors: Vectors, sides: Any) -> Vectors:
    """What may be moved at once then."""
    own = [ALIGNED // BY_NAME[t].bytes if x in sides else v for x, t, v in zip(SIDES, p.types, vectors, strict=False)]
    return own[0], own[1], vectors[2]


def arranged(
    p: Problem, vectors: Vectors, values: dict[str, Any], on: Machine
) -> tuple[Problem, Vectors, dict[str, Any], tuple[Copy, ...]]:
    """The problem that is best solved, its numbers, and the copies that come first.

    Raises:
        ScheduleError: nothing is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    once = "".join(x for x in SIDES if values[f"{x}_batch"] == 0)
    sides, _ = faster(p, on.target, vectors, once) if p.flops else ("", 0.0)
    copies = tuple(_copy(p, x, values, on) for x in sides)
    values = dict(values)
    for x, copy in zip(sides, copies, strict=True):
        rows, outer = (p.m, "m") if x == "a" else (p.n, "n")
        line = lines(p.k, BY_NAME[copy.dtype].bytes)
        values |= {f"{x}_{outer}": line, f"{x}_k": 1, f"{x}_batch": 0 if x in once else rows * line}
    return laid(p, sides), widened(p, vectors, sides), values, copies


def _copy(p: Problem, side: str, values: dict[str, Any], on: Machine) -> Copy:
    of_a = side == "a"
    dtype, layout = p.types[0 if of_a else 1], p.a if of_a else p.b
    size, rows = BY_NAME[dtype].bytes, p.m if of_a else p.n
    along = "k" if layout in ("any", _ALONG_K[side]) else "row"
    key = (_KINDS[size], along, on.key)
    kernel, function = _loaded.get(key) or _loaded.keep(key, _made(*key[:2], on))
    line, apart = lines(p.k, size), values[f"{side}_batch"]
    items = p.batch if apart else 1
    numbers = {
        "m": rows, "k": p.k, "line": line, "batch": items, "x_m": values[f"{side}_{'m' if of_a else 'n'}"],
        "x_k": values[f"{side}_k"], "x_batch": apart, "to_m": line, "to_batch": rows * line,
    }  # fmt: skip
    return Copy(side, items * rows * line, dtype, gpu_dispatch.bind(kernel, function, numbers), kernel.name)


def _made(kind: str, along: str, on: Machine) -> tuple[Any, Any]:
    kernel = lower_lines(on.target.isas[-1], kind, along)
    return kernel, on.load(kernel)


def run(copies: tuple[Copy, ...], on: Machine, places: dict[str, Any], like: Foreign) -> list[Any]:
    """Copy operands, put the copies' addresses in place of theirs, and give what keeps their memory."""
    kept = []
    for x in copies:
        held, to = interop.empty_like(like, (x.elements,), x.dtype)
        at = interop.argument(to)[1]
        x.launch.run(on, {"x": places[x.side], "to": at}, like.queue)
        places[x.side] = at
        kept.append(held)
    return kept


def said(p: Problem, sides: str, seconds: float) -> tuple[str, ...]:
    """What `explain` says of copies."""
    names = " and ".join(x.upper() for x in sides)
    return (f"{names} of {p} first copied, k side by side, in {seconds * 1e6:.3g} us",) if sides else ()
