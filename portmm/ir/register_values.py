"""Values of vector registers, in NumPy: conversions, products, int4 values, element-wise operations, sums of lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from portmm.spec.dtype import BY_NAME, CODES_AT, E2M1, EXTENSION_TYPES, ZERO_CODE, ZERO_E2M1, base
from portmm.spec.expr_ops import NUMPY, OPS

if TYPE_CHECKING:
    from portmm.ir.lane_nodes import Map
    from portmm.ir.nodes import Verb
    from portmm.target.atom import Atom

LESS = {"code": 0, "centred": ZERO_CODE, "below": 2 * ZERO_CODE}
"""Verb -> the number that it subtracts from an int4 value."""


@cache
def numpy_type(name: str) -> np.dtype:
    """The NumPy type of a type's elements, or of those of a unit."""
    wanted = BY_NAME[name].numpy
    if base(name) in EXTENSION_TYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, wanted))
    return np.dtype(wanted)


def converted(x: np.ndarray, memory: str, register: str) -> np.ndarray:
    """Elements of one type converted to another: see `isa.Transfer`."""
    if memory == register:
        return x
    m, r = BY_NAME[memory].base or memory, BY_NAME[register].base or register
    if m == r:
        return x
    if {m, r} == {"s8", "u8"}:
        return (x.astype(np.int16) + (128 if m == "s8" else -128)).astype(numpy_type(r))
    if BY_NAME[m].eps and not BY_NAME[r].eps:
        info = np.iinfo(numpy_type(r))
        whole: np.ndarray = np.clip(np.rint(x), info.min, info.max)
        with np.errstate(invalid="ignore"):
            return whole.astype(numpy_type(r))
    wanted = numpy_type(r)
    if wanted.itemsize > x.itemsize:
        return x.astype(wanted)
    with np.errstate(over="ignore"):
        return x.astype(wanted)


def multiplied(d: np.ndarray, a: np.ndarray, b: np.ndarray, pack: int) -> np.ndarray:
    """D + a . b on each lane, of units of `pack` elements; integers wrap around at the accumulator's width."""
    total: np.ndarray
    if pack == 1 and a.dtype is b.dtype is d.dtype and d.dtype.kind == "f":
        total = d + a * b  # most are such, and a conversion to the same type takes as long as the product
        return total
    exact = _exact(d)
    product = a.astype(exact, copy=False) * b.astype(exact, copy=False)
    total = d + (product.sum(-1) if pack > 1 else product)
    return total.astype(d.dtype, copy=False)


def multiplied_tiles(d: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """D[m][n] + a[m][u][e] . b[u][n][e], likewise."""
    exact = _exact(d)
    total: np.ndarray = d + np.einsum("mue,une->mn", a.astype(exact), b.astype(exact))
    return total.astype(d.dtype)


def _exact(d: np.ndarray) -> np.dtype:
    """Type in which integer sums do not overflow, and that of float sums."""
    return np.dtype(np.int64) if d.dtype.kind == "i" else d.dtype


def unshifted(d: np.ndarray, sums: np.ndarray, *, unsigned: bool) -> np.ndarray:
    """D without the contribution of the shift of an A to unsigned or signed bytes, by the sums of the columns of B."""
    return d - sums * d.dtype.type(128 if unsigned else -128)


def int4_values(words: np.ndarray, bit: int, pack: int) -> np.ndarray:
    """The int4 value at a bit of each word, or the unit of those that begin 8 bits further each."""
    values = np.stack([words.view(np.uint32) >> (bit + 8 * e) & 15 for e in range(pack)], -1).astype(np.int32)
    return values if pack > 1 else values.reshape(-1)


def int4_words(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Words of the int4 values of each column, at the bits of `dtype.CODES_AT`."""
    parts = [row.astype(np.uint32) << CODES_AT[e] for e, row in enumerate(rows)]
    words: np.ndarray = np.bitwise_or.reduce(parts)
    return words.view(np.int32)


def mapped(s: Map, registers: Mapping[str, np.ndarray], lanes: int, count: int) -> np.ndarray:
    """The result of an element-wise operation."""
    if s.op in ("lanes", "whole"):
        return np.int32(count) + np.arange(lanes, dtype=np.int32) * (s.op == "lanes")
    args = [registers[x] if isinstance(x, str) else NUMPY[s.operand](x) for x in s.args]
    if s.op in ("literal", "splat"):
        return np.full(lanes, args[0], NUMPY[s.dtype] if s.op == "literal" else np.float32)
    with np.errstate(all="ignore"):
        return np.broadcast_to(OPS[s.op].plain(*args), lanes)


def total(x: np.ndarray, kind: str) -> np.float32:
    """The maximum of numbers, or their sum: the upper half is added to the lower until one remains."""
    with np.errstate(all="ignore"):
        while kind == "add" and len(x) > 1:
            x = x[: len(x) // 2] + x[len(x) // 2 :]
        most: np.float32 = np.maximum.reduce(x)
    return most


def _shifted(s: Verb, regs: Mapping[str, np.ndarray], atom: Atom, bit: int) -> np.ndarray:
    numbers = int4_values(regs[s.a], bit, atom.k_pack) - LESS[s.name]
    return numbers.astype(numpy_type(atom.b))


def _e2m1(s: Verb, regs: Mapping[str, np.ndarray], atom: Atom, bit: int) -> np.ndarray:
    numbers: np.ndarray = np.array(E2M1)[15 - int4_values(regs[s.a], bit, atom.k_pack)]
    numbers = numbers + ZERO_E2M1 * (atom.acc == "s32")
    return numbers.astype(numpy_type(atom.b))


def _ones(_: Verb, __: Mapping[str, np.ndarray], atom: Atom, ___: int) -> np.ndarray:
    return np.ones(atom.k_pack, numpy_type(base(atom.a))) if atom.k_pack > 1 else np.asarray(1, np.int32)


WRITTEN: dict[str, Callable[[Verb, Mapping[str, np.ndarray], Atom, int], np.ndarray]] = {
    "mac": lambda s, regs, atom, _: multiplied(regs[s.d], regs[s.a], regs[s.b], atom.k_pack),
    "unshift": lambda s, regs, atom, _: unshifted(regs[s.d], regs[s.b], unsigned=atom.a == "u8"),
    "add": lambda s, regs, *_: regs[s.d] + regs[s.a],
    "amax": lambda s, regs, *_: np.maximum(regs[s.d], np.abs(regs[s.a])),
    **dict.fromkeys(LESS, _shifted),
    "e2m1": _e2m1,
    "ones": _ones,
    "zero": lambda _, __, atom, ___: np.zeros(atom.n, numpy_type(atom.acc)),
    "hold": lambda s, regs, *_: regs[s.d],
    "real": lambda s, regs, atom, _: regs[s.a].astype(numpy_type(atom.acc)),
    "mask": lambda _, __, atom, count: np.arange(atom.n) < count,
}
"""Verb without an address -> the value that it writes to a register, from its `count`."""
