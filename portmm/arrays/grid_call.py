"""Reduction of a product of operands on a device to a problem and the numbers of its kernels, and relayout.

Owns `Product`, the operands of a call, and `GridCall`, what kernels over a grid need to know of them but addresses: the
counterpart of `call`, whose kernels run on the processor. Owns `arranged`, which decides whether a product is faster
when operands are first copied so that they are contiguous along k, in aligned rows: matrix units cannot load fragments
from every layout (`kernels/gpu/transpose.py`). The time of copies is a term of the cost, so that operands of small
products stay in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from portmm.arrays import numpy_arrays
from portmm.arrays.interop import empty_like
from portmm.arrays.operand import Matrix, Operand, address, dense_like, elements, matrix, over
from portmm.codegen.lower import lower_int4_floats, lower_lines
from portmm.dispatch import config, schedule_choice
from portmm.dispatch.machine import MOST, Launch, Machine, bind
from portmm.errors import ScheduleError
from portmm.kernels.gpu.transpose import ALIGNED, WORD, lines
from portmm.schedule.candidates import units
from portmm.schedule.gpu_cost import copying
from portmm.schedule.gpu_gemv import ROWS
from portmm.spec.dtype import BY_NAME, accumulator, spell
from portmm.spec.dtype import size as size_of
from portmm.spec.problem import Problem, family
from portmm.target.model import DEVICE as MODEL

if TYPE_CHECKING:
    from portmm.schedule.program import Vectors
    from portmm.target.target import Target

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The operands of a product.

    Attributes:
        a: the left one.
        b: the right one.
        out: the array of the result, or None.
        weight: B, if that is a quantized weight in several arrays; `b` then describes its values.
        ends: the ends of groups of rows of A, each of which has a matrix of its own, or None.
    """

    a: Operand
    b: Operand
    out: Operand | None = None
    weight: Any = None
    ends: Operand | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that kernels depend on."""
        family = "" if self.weight is None else self.weight.family
        return (self.a.kind, self.b.kind, None if self.out is None else self.out.kind, family, self.ends is not None)

    @property
    def parts(self) -> dict[str, Operand]:
        """The operands by the names of kernels' parameters."""
        parts = {"a": self.a, **({"b": self.b} if self.weight is None else self.weight.parts)}
        return parts if self.ends is None else parts | {"ends": self.ends}

    @property
    def shapes(self) -> tuple[Shape, Shape, tuple[int, int, int]]:
        """The shape of the result, that of a batch, and m, n and k.

        Raises:
            ValueError: the operands do not match.
        """
        if self.ends is None:
            return numpy_arrays.product_shape(self.a.shape, self.b.shape)
        (m, k), n = self.a.shape, self.b.shape[2]
        return (m, n), (), (m, n, k)


@dataclass(frozen=True, slots=True)
class GridCall:
    """A product reduced to a problem.

    Attributes:
        problem: of one item, one evenly strided batch of them, or groups of equal sizes.
        values: the numbers of a kernel, by name.
        vectors: elements of the widest vector accesses to A, B and C.
        outer: offsets of A, B and C at which the batch is repeated, in elements, or None for once.
        transposed: A is the user's B^T, and so on.
    """

    problem: Problem
    values: dict[str, int]
    vectors: tuple[int, int, int]
    outer: Any = None
    transposed: bool = False


def grid_call(x: Product, dtype: str, fused: str = "") -> GridCall:
    """The problem of a product whose first result is of a type, with expressions of the sums if there are any."""
    direct = x.out is not None and x.out.dtype == dtype
    to = x.out if x.out is not None and direct else dense_like(x.a, x.shapes[0], dtype)
    call = _of_groups(x, to, fused) if x.ends is not None else _of_batch(x, to, fused)
    if x.weight is None:
        return call
    p = replace(call.problem, b="codes", family=x.weight.family)
    vectors = call.vectors[0], x.weight.vector, call.vectors[2]
    return replace(call, problem=p, vectors=vectors, values=call.values | x.weight.numbers)


def numbers(
    size: tuple[int, int, int], batch: int, parts: tuple[Matrix, Matrix, Matrix], steps: tuple[int, ...]
) -> dict[str, int]:
    """The numbers of a kernel, by name: sizes, and strides between rows, columns and items of a batch."""
    m, n, k = size
    (a, b, c), (a_batch, b_batch, c_batch, *_) = parts, steps
    return {
        "m": m, "n": n, "k": k, "batch": batch, "a_m": a.row, "a_k": a.col, "a_batch": a_batch,
        "b_k": b.row, "b_n": b.col, "b_batch": b_batch, "c_m": c.row, "c_n": c.col, "c_batch": c_batch,
    }  # fmt: skip


def settings(a: str, b: str, c: str, fused: str) -> dict[str, Any]:
    """The fields of a problem that follow from types and the configuration."""
    word = spell(a, b, c)
    return {"dtype": word, "deterministic": config.current().deterministic, "fused": fused}


def _of_batch(x: Product, to: Operand, fused: str) -> GridCall:
    a, b, (_, batch, (m, n, k)) = x.a, x.b, x.shapes
    used = (min(2, len(a.shape)), min(2, len(b.shape)), (len(a.shape) > 1) + (len(b.shape) > 1))
    steps = [over(y, batch, count) for y, count in zip((a, b, to), used, strict=True)]
    a_m, a_k = (0, *elements(a))[-2:] if used[0] == 1 else elements(a)[-2:]
    b_k, b_n = (*elements(b)[-1:], 0) if used[1] == 1 else elements(b)[-2:]
    ends = list(elements(to)[len(batch) :])
    c_m = ends.pop(0) if used[0] == 2 else 0
    c_n = ends.pop(0) if used[1] == 2 else 0
    if not fused and not any(steps[1]):
        # One B for the whole batch: evenly strided items are more rows of one product. Expressions depend on rows.
        rows = numpy_arrays.collapse((*batch, m), tuple((*s, y) for s, y in zip(steps, (a_m, 0, c_m), strict=True)))
        if rows.outer is None and rows.count == math.prod(batch) * m <= MOST:
            m, (a_m, _, c_m) = rows.count, rows.strides
            batch, steps = (), [(), (), ()]
    transposed = not fused and _transposes(m, n, a.dtype, b.dtype)
    if transposed:
        a, b, m, n, steps = b, a, n, m, [steps[1], steps[0], steps[2]]
        (a_m, a_k), (b_k, b_n), (c_m, c_n) = (b_n, b_k), (a_k, a_m), (c_n, c_m)
    walk = numpy_arrays.collapse(batch, tuple(steps))
    parts = (
        matrix(a, m, k, (a_m, a_k), steps[0]), matrix(b, k, n, (b_k, b_n), steps[1]),
        matrix(to, m, n, (c_m, c_n), steps[2]),
    )  # fmt: skip
    # Column-major or any strides: kernels support both.
    c = "row" if parts[2].layout == "row" else "col"
    how = settings(a.dtype, b.dtype, to.dtype, fused)
    tf32 = config.rounds(how["dtype"])
    p = Problem(m, n, k, batch=walk.count, a=parts[0].layout, b=parts[1].layout, c=c, tf32=tf32, **how)
    vectors = parts[0].vector, parts[1].vector, parts[2].vector if c == "row" else 1
    values = numbers((m, n, k), walk.count, parts, walk.strides)
    return GridCall(p, values, vectors, walk.outer, transposed)


def _transposes(m: int, n: int, a: str, b: str) -> bool:
    """Whether C^T = B^T . A^T is faster: with few columns, as the gemv kernels are for few rows."""
    try:
        accumulator(b, a)
    except ValueError:
        return False
    return n <= ROWS < m


def _of_groups(x: Product, to: Operand, fused: str) -> GridCall:
    (_, _, (m, n, k)), groups = x.shapes, x.b.shape[0]
    (a_m, a_k), (b_batch, b_k, b_n), (c_m, c_n) = map(elements, (x.a, x.b, to))
    a, b, c = matrix(x.a, m, k, (a_m, a_k)), matrix(x.b, k, n, (b_k, b_n), (b_batch,)), matrix(to, m, n, (c_m, c_n))
    by_rows = c.layout == "row"
    # A group may begin at any row.
    vectors = (1 if a.layout == "col" else a.vector, b.vector, c.vector if by_rows else 1)
    each = 1 << max(-(-m // groups) - 1, 0).bit_length()
    p = Problem(
        each, n, max(k, 1), batch=groups, a=a.layout, b=b.layout, c="row" if by_rows else "col", grouped=True,
        **settings(x.a.dtype, x.b.dtype, to.dtype, fused),
    )  # fmt: skip
    return GridCall(p, numbers((m, n, k), groups, (a, b, c), (0, b_batch, 0)), vectors)


SIDES = "ab"
_ALONG_K = {"a": "row", "b": "col"}
_KINDS = {1: "u8", 2: "f16", 4: "s32"}
"""Bytes of an element -> a type of that size: the copy does not interpret bits."""
_NARROW, _PARTS = 2, ("scales", "offsets")
"""Bytes of an element of floats that are made of int4 weights, and what of these they are made of besides words."""
_SHARE = 32
"""Part of a device's memory, as 1 / 32, that such floats may take."""


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
    """
    if p.b == "codes":
        return _as_floats(p, target, vectors)
    device = target.device
    scopes = {atom.unit for _, atom in units(p.dtype, target, tf32=p.tf32)} if device is not None else set()
    if not scopes - {""}:
        return "", 0.0
    # Fragments of words can be loaded transposed; warpgroups multiply words along k only.
    sizes = (1, WORD) if "warpgroup" in scopes else (1,)
    candidates = [x for x in SIDES if _hinders(p, vectors, x, sizes)]
    if not candidates or p.deterministic or p.grouped:
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


def _as_floats(p: Problem, target: Target, vectors: Vectors) -> tuple[str, float]:
    """As `faster`, of an int4 weight: whether warpgroups multiply floats that are made of it first.

    Weights are rounded to the type of A, as by other kernels of many rows, so the result has as few bits.
    """
    a, _, c = p.types
    narrow = BY_NAME[a].bytes == BY_NAME[c].bytes == _NARROW
    device = target.device
    if device is None or not narrow or p.deterministic or p.grouped or p.batch > 1 or p.source:
        return "", 0.0
    if p.n * p.k * _NARROW * _SHARE > device.memory_bytes:
        return "", 0.0
    floats = after_copies(p, "b")
    if "warpgroup" not in {atom.unit for _, atom in units(floats.dtype, target)}:
        return "", 0.0
    spent = copying(_bytes(p, "b", once=True) * MODEL.unfolding, target)
    rest = schedule_choice.choose(floats, target, vectors=vectors_after_copies(p, vectors, "b")).cost.seconds
    faster_so = spent + rest < schedule_choice.choose(p, target, vectors=vectors).cost.seconds
    return ("b", spent) if faster_so else ("", 0.0)


def _hinders(p: Problem, vectors: Vectors, side: str, sizes: tuple[int, ...]) -> bool:
    """Whether matrix units load fragments of an operand slowly, or not at all, as `sizes` of bytes not along k."""
    i = SIDES.index(side)
    layout, size = (p.a, p.b)[i], BY_NAME[p.types[i]].bytes
    if layout not in ("row", "col", "any"):
        return False
    return layout == "any" or vectors[i] * size < ALIGNED or (layout != _ALONG_K[side] and size in sizes)


def _bytes(p: Problem, side: str, once: bool) -> int:
    """Bytes that a copy reads and writes."""
    i = SIDES.index(side)
    if p.b == "codes":
        return int(p.n * (p.k * size_of("u4") + lines(p.k, _NARROW) * _NARROW))
    size = BY_NAME[p.types[i]].bytes
    return (p.m, p.n)[i] * (p.k + lines(p.k, size)) * size * (1 if once else p.batch)


def after_copies(p: Problem, sides: Any) -> Problem:
    """The problem after the copies of some operands."""
    if p.b == "codes" and "b" in sides:
        a, _, c = p.types
        return replace(p, b="col", family="", dtype=spell(a, a, c))
    return replace(p, a="row" if "a" in sides else p.a, b="col" if "b" in sides else p.b)


def vectors_after_copies(p: Problem, vectors: Vectors, sides: Any) -> Vectors:
    """Elements of the widest vector accesses after the copies."""
    types = after_copies(p, sides).types
    own = [ALIGNED // BY_NAME[t].bytes if x in sides else v for x, t, v in zip(SIDES, types, vectors, strict=False)]
    return own[0], own[1], vectors[2]


def arranged(
    p: Problem, vectors: Vectors, values: dict[str, Any], on: Machine
) -> tuple[Problem, Vectors, dict[str, Any], tuple[Copy, ...]]:
    """The fastest equivalent problem, its vector widths and numbers, and the copies that come first."""
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
    if p.b == "codes":
        return _floats(p, values, on)
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


def _floats(p: Problem, values: dict[str, Any], on: Machine) -> Copy:
    """The kernel that makes floats of an int4 weight."""
    dtype, group = p.types[0], family(p.family).group
    key = (dtype, group)
    ((kernel, function),) = on.loaded(("int4", *key), lambda: (lower_int4_floats(on.target.isas[-1], *key),))
    line = lines(p.k, _NARROW)
    sizes = {"n": p.n, "k": p.k, "words": values["words"], "groups": values["groups"], "line": line}
    return Copy("b", p.n * line, dtype, bind(kernel, function, sizes), kernel.name)


def run_copies(copies: tuple[Copy, ...], on: Machine, pointers: dict[str, Any], like: Operand) -> list[Any]:
    """Launch the copies, replace the operands' addresses by theirs, and return the arrays that own their memory."""
    arrays = []
    for x in copies:
        copied = empty_like(like, (x.elements,), x.dtype)
        parts = {name: pointers[name] for name in _PARTS if name in pointers}
        x.launch.run(on, {"x": pointers[x.side], "to": address(copied), **parts}, like.queue)
        pointers[x.side] = address(copied)
        arrays.append(copied)
    return arrays


def copy_notes(p: Problem, sides: str, seconds: float) -> tuple[str, ...]:
    """The lines of `explain` about copies."""
    names = " and ".join(x.upper() for x in sides)
    return (f"{names} of {p} first copied, contiguous along k, in {seconds * 1e6:.3g} us",) if sides else ()
