"""Prepacked int4 weights.

Owns `PackedInt4`, panels of int4 values with the scales of their groups (layout: kernels/cpu/int4_panels.py),
packing from and unpacking to `Quantized`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from portmm.arrays import numpy_fallback, pages
from portmm.dispatch import base_kernels, config
from portmm.dispatch.stored_kernels import HALF
from portmm.errors import BuildError, PackError, ScheduleError
from portmm.ops import routes
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import CODE_BITS, CODES_AT, CODES_KR, ZERO_CODE, ZERO_E2M1
from portmm.spec.problem import AXES, Family, family
from portmm.util.records import dataclass, replace
from portmm.weights.kinds import WeightKind
from portmm.weights.quantized import Quantized, QuantizedMatrix, int4_words

Array = np.ndarray[Any, Any]
HEADS = (np.float32, np.float16)
"""Types of scales and offsets in panels, by whether they have 16 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedInt4(QuantizedMatrix):
    """An int4 weight in panels, usable as any `b` with float activations.

    Attributes:
        owner: the panels, 1-D int32, read-only.
        shape: (k, n) of the weight.
        family: the layout, for example "u4x32k8g128", "u4x32k8g128c" without offsets, "u4x32k8g32ch" with scales
            of 16 bits, or "u4x32k8g32e" of floats.
    """

    weight_kind: ClassVar[WeightKind] = WeightKind.INT4_PANELS
    owner: Array
    shape: tuple[int, int]
    family: str
    _largest: list[float] = field(default_factory=list, repr=False)

    @property
    def b_k(self) -> int:
        """Words between groups of eight rows."""
        return family(self.family).nr

    @property
    def b_n(self) -> int:
        """Words between panels."""
        return family(self.family).panel(self.shape[0])

    @property
    def b_batch(self) -> int:
        """Words between items of a batch: there is one."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return int(self.owner.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return (restore, (np.asarray(self.owner), self.shape, self.family))

    def __repr__(self) -> str:
        return f"<portmm.PackedInt4 {self.shape} u4, family {self.family}>"


def largest_weight(w: PackedInt4) -> float:
    """A bound on the magnitude of a weight's values, and of the terms that kernels make of them."""
    known = w._largest  # noqa: SLF001 - computed once
    if not known:
        layout, (k, n) = family(w.family), w.shape
        if not n:
            return 0.0
        group, wide = layout.group or max(k, 1), layout.head_words // layout.heads
        first = np.arange(-(-k // group)) * (-(-group // CODES_KR) * layout.nr + layout.head_words)
        panels, of = w.owner.reshape(-(-n // layout.nr), -1), HEADS[layout.half]
        rows = (panels[:, first[:, None] + i * wide + np.arange(wide)] for i in range(layout.heads))
        scales, *offsets = (float(np.abs(np.ascontiguousarray(x).view(of)).max(initial=0)) for x in rows)
        known.append(2.0**CODE_BITS * scales + (offsets[0] if offsets else max(ZERO_CODE, ZERO_E2M1) * scales))
    return known[0]


def restore(owner: Array, shape: tuple[int, ...], family_name: str) -> PackedInt4:
    """A prepacked weight from its panels.

    Raises:
        PackError: the family is invalid, or there are too few panels.
    """
    try:
        layout = family(family_name)
    except ValueError as error:
        raise PackError(str(error)) from error
    if layout.dtype != "u4" or layout.kr != CODES_KR or layout.group % CODES_KR or len(shape) != 2 or min(shape) < 0:
        raise PackError(f"an int4 weight cannot have family {family_name} and shape {shape}")
    k, n = shape
    if not pages.can_be_addressed(shape, layout.nr * CODES_KR * owner.itemsize):
        raise PackError(f"an int4 weight of shape {shape} is too large to be addressed")
    needed = layout.units(k, n)
    if owner.dtype != np.int32 or owner.ndim != 1 or owner.size < needed:
        raise PackError(
            f"an int4 weight of shape {shape} needs {needed} words of int32; got {owner.size} {owner.dtype}"
        )
    return PackedInt4(pages.aligned_readonly(owner, needed), (k, n), family_name)


def group_of(q: Quantized) -> int:
    """The rows of a quantized weight that share a scale, as kernels count them: 0 for all.

    Raises:
        PackError: it has another number of bits, or its groups are not multiples of 8 rows.
    """
    if q.bits != CODE_BITS:
        raise PackError(
            f"the weight has {q.bits} bits; kernels read {CODE_BITS}: dequantize it, or quantize it to {CODE_BITS} bits"
        )
    group = 0 if q.group >= q.shape[0] else q.group
    if group % CODES_KR:
        raise PackError(f"the weight has groups of {q.group} rows; kernels read multiples of {CODES_KR}: dequantize it")
    return group


def pack_int4(q: Quantized, *, symmetric: bool | None = None) -> PackedInt4:
    """A quantized int4 weight prepacked for the kernels of the current target.

    Args:
        q: the weight.
        symmetric: whether panels have scales without offsets; by default where these are -8 times scales.
            Scales are stored in 16 bits where these hold all of them, and there are no offsets.

    Raises:
        PackError: it has another number of bits, or its groups are not multiples of 8 rows.
    """
    (k, n), route, group = q.shape, None, group_of(q)
    symmetric = not q.e2m1 and (q.symmetric if symmetric is None else symmetric)
    word = base_kernels.int4_word(group, symmetric=symmetric)
    basic = None if q.e2m1 else routes.packing(word, "row", n, k * n)
    if basic is not None and not base_kernels.active() and _is_half(q, family(basic[0])):
        basic = routes.packing(word + HALF, "row", n, k * n)
    if basic is not None:
        layout, route = family(basic[0]), basic[1]
    else:
        from portmm.dispatch.cpu_kernels import family_of_codes

        layout = family_of_codes(config.target(), group, symmetric=symmetric, e2m1=q.e2m1)
        layout = replace(layout, half=_is_half(q, layout))
    owner = pages.lasting_empty(layout.units(k, n), np.int32)
    if q.codes.size:
        try:
            _pack_by_kernel(q, layout, owner, route)
        except ScheduleError:
            _pack_by_numpy(q, layout, owner)
        except BuildError as error:
            numpy_fallback.fall_back(error)
            _pack_by_numpy(q, layout, owner)
    else:
        owner[...] = 0
    owner.flags.writeable = False
    return PackedInt4(owner, (k, n), str(layout))


def _is_half(q: Quantized, layout: Family) -> bool:
    """Whether a weight has no offsets in a layout, and scales that 16 bits hold."""
    return layout.heads == 1 and _fit_half(heads_of(q, layout)[0])


def _pack_by_kernel(q: Quantized, layout: Family, owner: Array, route: Any) -> None:
    if route is None:
        from portmm.dispatch.cpu_routes import int4_repack_route

        route = int4_repack_route(layout, config.target(), config.get_num_threads())
    rows, kept = rows_of(q, layout), codes_of(q, layout)
    (k, n), (codes, c) = q.shape, (x.ctypes.data for x in (kept, owner))
    heads = [(x.ctypes.data, *(0,) * len(AXES)) for x in rows]
    numbers = (1, n, k, 1, codes, 0, 0, 0, codes, n, 1, 0, c, *pages.page_ends(owner, owner.itemsize), 0)
    runtime().execute(route, *numbers, None, np.array(heads), None)


def codes_of(q: Quantized, layout: Family) -> Array:
    """The codes as panels have them."""
    return q.codes ^ np.uint8(15) if layout.e2m1 else q.codes


def heads_of(q: Quantized, layout: Family) -> tuple[Array, ...]:
    """The scales, and the offsets if there are any, as panels have them."""
    return (q.scales * np.float32(0.5),) if layout.e2m1 else (q.scales, q.offsets)[: layout.heads]


def rows_of(q: Quantized, layout: Family) -> tuple[Array, ...]:
    """Rows of scales and offsets for the kernel that packs them, to whole panels where they have 16 bits."""
    rows = heads_of(q, layout)
    if not layout.half:
        return rows
    return tuple([_padded(x.astype(np.float16), -x.shape[1] % layout.nr) for x in rows])


def _fit_half(values: Array) -> bool:
    """Whether 16 bits hold values exactly."""
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16) == values).all())


def _padded(values: Array, columns: int) -> Array:
    """Values with further columns of zeros."""
    return np.pad(values, ((0, 0), (0, columns))) if columns else values


def panels_of(q: Quantized, layout: Family) -> Array:
    """The panels of a weight in a layout, by NumPy."""
    owner = np.empty(layout.units(*q.shape), np.int32)
    _pack_by_numpy(q, layout, owner)
    return owner


def _pack_by_numpy(q: Quantized, layout: Family, owner: Array) -> None:
    """The same without a compiler, ten times slower."""
    k, n = q.shape
    owner[...] = 0
    *heads, words = layout.parts(k, n)
    for part, values in zip(heads, heads_of(q, layout), strict=True):
        owner.view(HEADS[layout.half])[part.offsets()] = values
    owner[words.offsets()] = int4_words(codes_of(q, layout)).view(np.int32)


def unpack_int4(w: PackedInt4) -> Quantized:
    """The quantized weight of a prepacked one."""
    layout, (k, n) = family(w.family), w.shape
    if not k or not n:
        codes, empty = np.empty((k, n), np.uint8), np.empty((-(-k // (layout.group or max(k, 1))), n), np.float32)
        return Quantized(codes, empty, empty, CODE_BITS, layout.group or max(k, 1), _values(layout))
    *rows, units = layout.parts(k, n)
    of = np.asarray(w.owner).view(HEADS[layout.half])
    heads = [np.ascontiguousarray(x.gather(of)).astype(np.float32) for x in rows]
    scales = heads[0] * np.float32(2 if layout.e2m1 else 1)
    offsets = np.zeros_like(scales) if layout.e2m1 else -np.float32(ZERO_CODE) * scales
    offsets = heads[1] if layout.heads > 1 else offsets
    words = np.ascontiguousarray(units.gather(w.owner)).view(np.uint32)
    codes = np.empty((len(words) * CODES_KR, n), np.uint8)
    for e in range(CODES_KR):
        codes[e::CODES_KR] = words >> np.uint32(CODES_AT[e]) & np.uint32(15)
    codes = codes[:k] ^ np.uint8(15) if layout.e2m1 else codes[:k]
    return Quantized(codes, scales, offsets, CODE_BITS, layout.group or max(k, 1), _values(layout))


def _values(layout: Family) -> str:
    return "e2m1" if layout.e2m1 else "int"
