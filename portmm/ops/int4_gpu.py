"""Weights of four bits on devices.

Owns `DeviceCoded`, a quantised weight in a device's memory, and its products. On the top floor. One layout
serves few rows and many: for each column, words of eight codes along k (`dtype.CODES_AT`), zeros to a
multiple of four words, so that a thread's 16 bytes are 32 codes; and for each column the scales, and the offsets, of
its groups. Words become floats in registers, or on their way to shared memory: `kernels.coded_stream`,
`kernels.fed_codes`. Sums are f32, results as A unless an `out` says otherwise.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import device_arrays, interop
from portmm.dispatch import config
from portmm.dispatch import gpu as gpu_dispatch
from portmm.errors import PackError
from portmm.ops import fused_matmul_gpu, matmul_gpu
from portmm.ops.fused_matmul_gpu import Weight
from portmm.spec.dtype import CODE_BITS, CODES_AT, CODES_KR
from portmm.spec.problem import Family
from portmm.util.memo import Memory
from portmm.weights.quantized import QuantizedMatrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.arrays.interop import Foreign
    from portmm.dispatch.gpu import Launch
    from portmm.weights.quantized import Quantized

TOGETHER = 4
"""Words that a thread loads at once."""
FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCoded(QuantizedMatrix):
    """A weight of four bits on a device: w[k, n] ~= scale * code + offset. Made by `to_device`.

    Attributes:
        words: (n, words) of s32.
        scales: (n, groups) of f32.
        offsets: likewise.
        shape: the weight's (k, n).
        group: rows of k that share a scale, a multiple of 8; 0 for all.
    """

    words: Foreign
    scales: Foreign
    offsets: Foreign
    shape: tuple[int, int]
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 4 * (self.words.size + self.scales.size + self.offsets.size)

    @property
    def wide(self) -> int:
        """Codes that a thread takes at once, all of one group."""
        return next(x for x in (32, 16, 8) if self.group % x == 0)

    @property
    def codes(self) -> Foreign:
        """As an array of codes, k times n: as far as shapes and strides go."""
        return replace(self.words, shape=self.shape, strides=(1, self.words.shape[1] * CODES_KR), dtype="u4")

    @property
    def parts(self) -> dict[str, Foreign]:
        """Parameters of kernels, and what they point at."""
        return {"b": self.words, "scales": self.scales, "offsets": self.offsets}

    @property
    def weight(self) -> Weight:
        """As kernels know it."""
        numbers = {"words": self.words.shape[1], "groups": self.scales.shape[1]}
        kept = str(Family("u4", 1, CODES_KR, group=self.group))
        return Weight(kept, self.wide, numbers, self.parts, lambda a: product(a, self, dtype="float32"))

    def __rmatmul__(self, a: Any) -> Any:
        return product(a, self)


def to_device(w: Quantized, like: Any) -> DeviceCoded:
    """A quantised weight in the memory of the device that an array is on, of the same library.

    Raises:
        TypeError: `like` is in the host's memory.
        PackError: the weight has another number of bits, or its groups are no multiple of 8 rows.
    """
    where = like if isinstance(like, interop.Foreign) else interop.adopt(like)
    if where is None:
        raise TypeError(f"like is a {type(like).__name__} in the host's memory; give an array on a device")
    if w.bits != CODE_BITS:
        raise PackError(f"the weight has codes of {w.bits} bits; kernels multiply those of {CODE_BITS}: dequantize it")
    k, _ = w.shape
    group = 0 if w.group >= k else w.group
    if group % CODES_KR:
        raise PackError(f"the weight has groups of {w.group} rows; kernels read multiples of {CODES_KR}: dequantize it")
    parts = (_words(w.codes), _columns(w.scales), _columns(w.offsets))
    words, scales, offsets = (_uploaded(where, x) for x in parts)
    return DeviceCoded(words, scales, offsets, w.shape, group)


def _columns(x: Any) -> Any:
    """The scales, or offsets, of each column, at least one."""
    return np.ascontiguousarray((x if len(x) else np.zeros((1, x.shape[1]), np.float32)).T)


def _words(codes: Any) -> Any:
    """The words of all columns."""
    k, n = codes.shape
    count = max(1, -(-k // (CODES_KR * TOGETHER))) * TOGETHER
    padded = np.zeros((count * CODES_KR, n), np.uint8)
    padded[:k] = codes
    words = np.zeros((count, n), np.uint32)
    for e, bit in enumerate(CODES_AT):
        words |= padded[e::CODES_KR].astype(np.uint32) << np.uint32(bit)
    return np.ascontiguousarray(words.T).view(np.int32)


def _uploaded(like: Foreign, x: Any) -> Foreign:
    """A copy on a device."""
    made, found = interop.empty_like(like, x.shape, {"int32": "s32", "float32": "f32"}[x.dtype.name])
    if hasattr(made, "copy_"):
        made.copy_(sys.modules["torch"].from_numpy(x.copy()))
    elif x.size:
        made.set(x)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """One kind of call.

    Attributes:
        shape: of the result.
        dtype: of the result.
        launches: kernels, and how far into A and C each begins, in elements.
        workspace: elements of 32 bits, and their type.
    """

    shape: tuple[int, ...]
    dtype: str
    launches: tuple[tuple[Launch, tuple[int, int]], ...]
    workspace: tuple[int, str]

    def run(self, a: Foreign, w: DeviceCoded, out: Foreign | None) -> Any:
        """Launch everything."""
        made, to = (out.source, out) if out is not None else interop.empty_like(a, self.shape, self.dtype)
        places = {name: interop.argument(x)[1] for name, x in w.parts.items()} if self.launches else {}
        scratch: Any = None
        if self.workspace[0]:
            scratch, work = interop.empty_like(a, (self.workspace[0],), self.workspace[1])
            places["work"] = interop.argument(work)[1]
        on = device_arrays.machine_of(a)
        for launch, moved in self.launches:
            for name, x, offset in zip("ac", (a, to), moved, strict=True):
                places[name] = device_arrays.shifted(interop.argument(x)[1], offset, x)
            launch.run(on, places, a.queue)
        del scratch  # its library frees it when the queue is done with it
        return made


_ready = Memory(matmul_gpu.MOST_KINDS)


def product(a: Any, w: DeviceCoded, out: Any = None, dtype: Any = None) -> Any:
    """A @ w, on the stream or queue of A.

    Args:
        a: (..., k) of f32, f16 or bf16, on the weight's device.
        w: a weight that `to_device` made.
        out: where the result goes, or None for a new array.
        dtype: of the result, before it is put in `out`: f32, f16 or bf16; if it is not said, out's or A's.

    Raises:
        TypeError: A, or `out`, is in the host's memory or of another type.
        ValueError: shapes do not fit, or the two are on several devices.
    """
    left, to = _adopted(a, w, out)
    wanted = matmul_gpu.named(dtype) if dtype is not None else left.dtype if to is None else to.dtype
    if wanted not in FLOATS:
        raise TypeError(f"products with a weight of four bits become {', '.join(FLOATS)}, not {wanted}")
    parts = (left, w.words, w.scales, w.offsets)
    if to is not None and (wanted != to.dtype or device_arrays.overlap(to, parts)):
        shape = device_arrays.shapes(left, w.codes)[0]
        return matmul_gpu.beside(to, wanted, shape, left, lambda made: product(a, w, made))
    where = wanted if to is None else to.kind
    key = (left.kind, w.words.kind, w.shape, w.group, where, config.current().deterministic)
    ready: _Ready | None = _ready.get(key)
    if ready is None:
        ready = _ready.keep(key, _prepare(left, w, to, wanted))
    return ready.run(left, w, to)


def _adopted(a: Any, w: DeviceCoded, out: Any) -> tuple[Foreign, Foreign | None]:
    """A, and the output, as a device's arrays.

    Raises:
        TypeError: one of them is in the host's memory or of another type.
        ValueError: they are on several devices.
    """
    left, to = (x if x is None or isinstance(x, interop.Foreign) else interop.adopt(x) for x in (a, out))
    for name, x, given in (("a", left, a), ("out", to, out)):
        if x is None and given is not None:
            raise TypeError(f"{name} is a {type(given).__name__} in the host's memory; copy it to the weight's device")
        if x is not None and x.dtype not in FLOATS:
            raise TypeError(f"{name} has elements of {x.dtype}; beside a weight of four bits they are of {FLOATS}")
    if left is None:
        raise TypeError("a is None; give an array on the weight's device")
    interop.same_device([x for x in (left, w.words, to) if x is not None])
    return left, to


def around(
    given: tuple[Any, DeviceCoded, Any], dtype: Any, epilogue: Callable[..., Any] | None,
    prologue_a: Callable[..., Any] | None, prologue_b: Callable[..., Any] | None,
) -> Any:  # fmt: skip
    """A @ w with a prologue and an epilogue: see `api.matmul`.

    Raises:
        TypeError: there is a prologue of the weight, or as for `product`.
        ValueError: as for `product`.
    """
    a, w, out = given
    if prologue_b is not None:
        raise TypeError("b is a weight of four bits; quantize what prologue_b makes of it")
    left, to = _adopted(a, w, out if epilogue is None else None)
    if prologue_a is not None:
        left = fused_matmul_gpu.before(prologue_a, left, "a", {"m": "m", "k": "n", "b": "b"})
    if epilogue is None:
        return product(left, w, to, dtype)
    to = None if out is None else interop.adopt(out)
    if to is None and out is not None:
        raise TypeError(f"out is a {type(out).__name__} in the host's memory; copy it to the weight's device")
    interop.same_device([x for x in (left, to) if x is not None])
    return fused_matmul_gpu.matmul((left, w.codes, to), dtype, epilogue, w.weight)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A product of a weight with arrays like the one that it was made with, resolved: call it with others of its kind.

    Attributes:
        weight: the weight.
        kinds: of A, and of C or None.
        ready: what runs.
    """

    weight: DeviceCoded
    kinds: tuple[tuple[Any, ...], tuple[Any, ...] | None]
    ready: _Ready

    def __call__(self, a: Any, out: Any = None) -> Any:
        """The product.

        Raises:
            TypeError: an operand is not on a device.
            ValueError: an operand is not like that of the plan.
        """
        left, to = _adopted(a, self.weight, out)
        if left.kind != self.kinds[0]:
            raise ValueError(f"a is {matmul_gpu.said(left.kind)}, the plan takes {matmul_gpu.said(self.kinds[0])}")
        if (to is None) != (self.kinds[1] is None) or (to is not None and to.kind != self.kinds[1]):
            raise ValueError("the plan was made for another out, or for none; give one like it, as it was made")
        if to is not None:
            device_arrays.check_out(to, self.ready.shape)
            device_arrays.check_apart(to, {"a": (left,), "the weight": tuple(self.weight.parts.values())})
        return self.ready.run(left, self.weight, to)


def plan(a: Any, w: DeviceCoded, out: Any = None) -> Plan:
    """A callable for arrays like these: see `api.plan`.

    Raises:
        TypeError: as for `product`.
        ValueError: as for `product`.
    """
    left, to = _adopted(a, w, out)
    return Plan(w, (left.kind, None if to is None else to.kind), _prepare(left, w, to, left.dtype))


def question(a: Any, w: DeviceCoded, out: Any, epilogue: Any) -> tuple[matmul_gpu.Posed, tuple[str, ...]]:
    """The problem that a call poses, and what is to be said of it."""
    left, to = _adopted(a, w, out)
    if epilogue is not None:
        return fused_matmul_gpu.question((left, w.codes, to), epilogue, w.weight)
    return _posed(left, w, to, left.dtype), ()


def _posed(a: Foreign, w: DeviceCoded, out: Foreign | None, c: str) -> matmul_gpu.Posed:
    """The problem of a product whose result is of type `c`."""
    shape, batch, size = device_arrays.shapes(a, w.codes)
    call = matmul_gpu.posed((a, w.codes, out or interop.empty_like(a, shape, c)[1]), batch, size)
    return fused_matmul_gpu.weighed(call, w.weight)


def _prepare(a: Foreign, w: DeviceCoded, out: Foreign | None, wanted: str) -> _Ready:
    """The launches of a kind of call."""
    shape, _, size = device_arrays.shapes(a, w.codes)
    if out is not None:
        device_arrays.check_out(out, shape)
    c = wanted if out is None else out.dtype
    if 0 in shape:
        return _Ready(shape, c, (), (0, "f32"))
    call = _posed(a, w, out, c)
    p = replace(call.problem, k=max(size[2], 1))
    found = gpu_dispatch.route(p, device_arrays.machine_of(a), call.vectors)
    values = call.values() | w.weight.numbers
    launches, workspace = matmul_gpu.bound(found, values, p)
    repeats = [(0, 0)] if call.walk.outer is None else [(int(x[0]), int(x[2])) for x in call.walk.outer]
    every = tuple((launch, moved) for moved in repeats for launch in launches)
    return _Ready(shape, c, every, workspace)
