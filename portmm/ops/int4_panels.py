"""Packed weights of four bits.

Owns `Folded`, panels of codes with the scales of their groups (kernels/cpu/int4_panels.py
has the layout), how a `Quantized` weight becomes one and back, and the product
with one. Imports `arrays.numpy_arrays`, `dispatch.cpu`, `arrays.numpy_fallback`, `util.memo`, `weights.quantized`, `dispatch.config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays, numpy_fallback
from portmm.dispatch import config
from portmm.errors import BuildError, PackError, ScheduleError
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import CODE_BITS, CODES_AT, CODES_KR
from portmm.spec.problem import Family, Problem, family
from portmm.util.memo import Memory
from portmm.weights.quantized import Quantized, QuantizedMatrix, dequantize

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_CALLS = 256
"""Shapes of activations that a weight remembers the kernel for."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Folded(QuantizedMatrix):
    """A weight of four bits in panels, usable wherever `b` is, beside float activations.

    Attributes:
        owner: the panels, 1-D int32, read-only.
        shape: (k, n) of the weight.
        family: how it lies, for example "u4x32k8g128".
    """

    owner: Array
    shape: tuple[int, int]
    family: str
    _calls: Memory = field(default_factory=lambda: Memory(MOST_CALLS), repr=False)

    @property
    def b_k(self) -> int:
        """Words from one eight rows to the next."""
        return family(self.family).nr

    @property
    def b_n(self) -> int:
        """Words from one panel to the next."""
        return family(self.family).panel(self.shape[0])

    @property
    def b_batch(self) -> int:
        """Words from one item of a batch to the next: there is one."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return int(self.owner.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return (restore, (np.asarray(self.owner), self.shape, self.family))

    def __repr__(self) -> str:
        return f"<portmm.Folded {self.shape} u4, family {self.family}>"


def restore(owner: Array, shape: tuple[int, ...], family_name: str) -> Folded:
    """Make a folded weight from its panels.

    Raises:
        PackError: nothing is folded like this, or there are too few panels.
    """
    try:
        kept = family(family_name)
    except ValueError as error:
        raise PackError(str(error)) from error
    if kept.dtype != "u4" or kept.kr != CODES_KR or kept.group % CODES_KR or len(shape) != 2 or min(shape) < 0:
        raise PackError(f"a weight of four bits cannot have family {family_name} and shape {shape}")
    k, n = shape
    if not numpy_arrays.can_be_addressed(shape, kept.nr * CODES_KR * owner.itemsize):
        raise PackError(f"a folded weight of shape {shape} is larger than what can be addressed")
    needed = _words(kept, k, n)
    if owner.dtype != np.int32 or owner.ndim != 1 or owner.size < needed:
        raise PackError(
            f"a folded weight of shape {shape} needs {needed} words of int32; got {owner.size} {owner.dtype}"
        )
    return Folded(numpy_arrays.aligned_readonly(owner, needed), (k, n), family_name)


def _words(kept: Family, k: int, n: int) -> int:
    """Words of all panels; a weight without rows has none, however many columns it claims."""
    return -(-n // kept.nr) * kept.panel(k) if k else 0


def fold(q: Quantized) -> Folded:
    """Lay a weight of four bits out for the kernels of the current target.

    Raises:
        PackError: it has another number of bits, or its groups are no multiple of 8 rows.
    """
    from portmm.dispatch.cpu import family_of_codes

    k, n = q.shape
    if q.bits != CODE_BITS:
        raise PackError(
            f"the weight has {q.bits} bits; kernels read codes of {CODE_BITS}: dequantize it, or quantize it anew"
        )
    group = 0 if q.group >= k else q.group
    if group % CODES_KR:
        raise PackError(f"the weight has groups of {q.group} rows; kernels read multiples of {CODES_KR}: dequantize it")
    kept = family_of_codes(config.target(), group)
    owner = numpy_arrays.aligned_empty(_words(kept, k, n), np.int32)
    if q.codes.size:
        try:
            _fold_by_kernel(q, kept, owner)
        except ScheduleError:
            _fold_by_numpy(q, kept, owner)
        except BuildError as error:
            numpy_fallback.fall_back(error)
            _fold_by_numpy(q, kept, owner)
    else:
        owner[...] = 0
    owner.flags.writeable = False
    return Folded(owner, (k, n), str(kept))


def _fold_by_kernel(q: Quantized, kept: Family, owner: Array) -> None:
    from portmm.dispatch.cpu import fold_route

    route = fold_route(kept, config.target(), config.get_num_threads())
    (k, n), (codes, c, scales, offsets) = q.shape, (x.ctypes.data for x in (q.codes, owner, q.scales, q.offsets))
    numbers = (1, n, k, 1, codes, 0, 0, 0, codes, n, 1, 0, c, *numpy_arrays.page_ends(owner, owner.itemsize), 0)
    runtime().execute(route, *numbers, None, 0, scales, offsets, 0, 0, 0)


def _fold_by_numpy(q: Quantized, kept: Family, owner: Array) -> None:
    """The same without a compiler, ten times as slow."""
    (k, n), nr, groups = q.shape, kept.nr, kept.groups(q.shape[0])
    units, panels = -(-k // CODES_KR), -(-n // nr)
    codes = np.zeros((units * CODES_KR, panels * nr), np.uint8)
    codes[:k, :n] = q.codes
    words = np.zeros((units, panels * nr), np.uint32)
    for e in range(CODES_KR):
        words |= codes[e::CODES_KR].astype(np.uint32) << np.uint32(CODES_AT[e])
    rows = owner.reshape(panels, -1, nr)
    long = kept.group // CODES_KR or units
    heads = np.arange(groups) * (2 + long)
    for place, values in ((heads, q.scales), (heads + 1, q.offsets)):
        wide = np.zeros((groups, panels * nr), np.float32)
        wide[:, :n] = values
        rows[:, place] = wide.view(np.int32).reshape(groups, panels, nr).transpose(1, 0, 2)
    place = np.arange(units) + 2 * (np.arange(units) // max(long, 1) + 1)
    rows[:, place] = words.view(np.int32).reshape(units, panels, nr).transpose(1, 0, 2)


def unfold(w: Folded) -> Quantized:
    """The weight that was folded."""
    kept, (k, n) = family(w.family), w.shape
    if not k or not n:
        codes, wide = np.empty((k, n), np.uint8), np.empty((-(-k // (kept.group or max(k, 1))), n), np.float32)
        return Quantized(codes, wide, wide, CODE_BITS, kept.group or max(k, 1))
    nr, units, groups = kept.nr, -(-k // CODES_KR), kept.groups(k)
    panels = -(-n // nr)
    rows = w.owner[: panels * kept.panel(k)].reshape(panels, -1, nr)
    long = kept.group // CODES_KR or units
    heads = np.arange(groups) * (2 + long)

    def flat(place: Array) -> Array:
        return np.ascontiguousarray(rows[:, place].transpose(1, 0, 2)).reshape(len(place), panels * nr)[:, :n]

    scales, offsets = (np.ascontiguousarray(flat(x)).view(np.float32) for x in (heads, heads + 1))
    words = flat(np.arange(units) + 2 * (np.arange(units) // max(long, 1) + 1)).view(np.uint32)
    codes = np.empty((units * CODES_KR, n), np.uint8)
    for e in range(CODES_KR):
        codes[e::CODES_KR] = words >> np.uint32(CODES_AT[e]) & np.uint32(15)
    return Quantized(codes[:k], scales, offsets, CODE_BITS, kept.group or max(k, 1))


def product(a: Any, w: Folded, out: Any, routed: Callable[[Problem], Any], dense: Callable[[Any, Any], Any]) -> Any:
    """The product of float activations and a folded weight: see `api.matmul`.

    `routed` gives the kernel for a problem; `dense` multiplies by the weight unfolded.
    """
    left = numpy_arrays.as_operand(a, "a")
    key = (left.shape, left.strides, left.dtype, config.current(), config.limit())
    found = w._calls.get(key)  # noqa: SLF001 - its own
    if found is None or not left.flags.aligned:
        return _product(left, w, out, key, (routed, dense))
    route, numbers, shape, dtype = found
    if out is not None and not (numpy_arrays.dense_at(out, dtype, left) and out.shape == shape):
        return _product(left, w, out, key, (routed, dense))
    result = np.empty(shape, dtype) if out is None else out
    at, c = left.__array_interface__["data"][0], result.__array_interface__["data"][0]
    runtime().execute(route, *numbers[:4], at, *numbers[5:12], c, *numbers[13:])
    return result


def _product(left: Array, w: Folded, out: Any, key: Any, ways: tuple[Callable[..., Any], Callable[..., Any]]) -> Any:
    k, n = w.shape
    if left.shape[-1] != k:
        raise ValueError(
            f"cannot multiply {left.shape} by {w.shape}: a has {left.shape[-1]} columns and b has {k} rows"
        )
    shape = (*left.shape[:-1], n)
    dtype = left.dtype.newbyteorder("=")
    if numpy_arrays.name_of(dtype) not in ("f32", "f16", "bf16"):
        raise TypeError(
            f"a has dtype {left.dtype}; a weight of four bits is multiplied by float32, float16 or bfloat16, "
            "and in linear by int8"
        )
    wanted = numpy_arrays.check_out(out, shape, dtype).dtype.newbyteorder("=") if out is not None else dtype
    types = (dtype, np.dtype(np.uint8), wanted if numpy_arrays.name_of(wanted) in ("f32", "f16", "bf16") else dtype)
    rows = left if left.ndim == 2 else left.reshape(math.prod(left.shape[:-1]), k)
    direct = numpy_arrays.dense_at(out, types[2], left)
    result = out if direct else np.empty(shape, types[2])
    if result.size:
        if k:
            _run(rows, w, result, types, key if rows is left and out is None else None, ways)
        else:
            result[...] = 0
    if out is not None and not direct:
        np.copyto(out, result, casting="same_kind")
        return out
    return result


def _run(  # noqa: PLR0917 - one place calls it
    rows: Array, w: Folded, result: Array, types: numpy_arrays.DTypes, key: Any, ways: tuple[Callable[..., Any], ...]
) -> None:
    operand = numpy_arrays.canonical(rows, types[0])
    (m, k), n = rows.shape, w.shape[1]
    word = "-".join((numpy_arrays.name_of(types[0]), "u4", numpy_arrays.name_of(types[2])))
    deterministic = config.current().deterministic
    p = Problem(m, n, k, word, a=operand.layout, b="codes", family=w.family, deterministic=deterministic)
    try:
        route = ways[0](p)
    except (BuildError, ScheduleError) as error:
        if isinstance(error, BuildError):
            numpy_fallback.fall_back(error)
        # Else it was folded on another machine.
        weight = dequantize(unfold(w))
        np.copyto(result.reshape(m, n), ways[1](rows, weight), casting="same_kind")
        return
    at, c = (int(x.__array_interface__["data"][0]) for x in (w.owner, result))
    numbers = (m, n, k, 1, operand.address, operand.row, operand.col, 0, at, w.b_k, w.b_n, w.b_batch, c, n, 1, 0)
    runtime().execute(route, *numbers)
    if key is not None and operand.array is rows:
        w._calls.keep(key, (route, numbers, result.shape, types[2]))  # noqa: SLF001 - its own
