"""Int4 weights on devices.

Owns `DeviceInt4`, a quantized weight in a device's memory, and its products. One layout
serves few rows and many: for each column, words of eight int4 values along k (`dtype.CODES_AT`), zero-padded to a
multiple of four words, so that a thread's 16 bytes are 32 values; and for each column the scales, and the offsets, of
its groups. Words are dequantized in registers, or on their way to shared memory (`kernels/gpu/w4a16*.py`).
Sums are f32; results have A's type, or that of `out`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from portmm.arrays import device_array, device_operands, interop
from portmm.dispatch import config
from portmm.dispatch import gpu as gpu_dispatch
from portmm.errors import PackError
from portmm.ops import fused_matmul_gpu, matmul_gpu
from portmm.ops.fused_matmul_gpu import Weight
from portmm.spec.dtype import CODE_BITS, CODES_KR
from portmm.spec.problem import Family
from portmm.util.memo import Memory
from portmm.weights.kinds import WeightKind
from portmm.weights.quantized import QuantizedMatrix, int4_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.arrays.device_array import DeviceArray
    from portmm.dispatch.gpu import Launch
    from portmm.weights.quantized import Quantized

TOGETHER = 4
"""Words of a vector load."""
FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True, eq=False)
class DeviceInt4(QuantizedMatrix):
    """An int4 weight on a device: w[k, n] ~= scale * code + offset. Built by `to_device`.

    Attributes:
        words: (n, words) of s32.
        scales: (n, groups) of f32.
        offsets: (n, groups) of f32.
        shape: the weight's (k, n).
        group: rows of k that share a scale, a multiple of 8; 0 for all.
    """

    weight_kind: ClassVar[WeightKind] = WeightKind.DEVICE_INT4
    words: DeviceArray
    scales: DeviceArray
    offsets: DeviceArray
    shape: tuple[int, int]
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 4 * (self.words.size + self.scales.size + self.offsets.size)

    @property
    def vector(self) -> int:
        """Values of a vector access, all of one group."""
        return next(x for x in (32, 16, 8) if self.group % x == 0)

    @property
    def codes(self) -> DeviceArray:
        """The weight as an array of u4, k times n, by shape and strides."""
        return replace(self.words, shape=self.shape, strides=(1, self.words.shape[1] * CODES_KR), dtype="u4")

    @property
    def parts(self) -> dict[str, DeviceArray]:
        """Pointer parameters of kernels -> their arrays."""
        return {"b": self.words, "scales": self.scales, "offsets": self.offsets}

    @property
    def weight(self) -> Weight:
        """The weight as kernels describe it."""
        numbers = {"words": self.words.shape[1], "groups": self.scales.shape[1]}
        layout = str(Family("u4", 1, CODES_KR, group=self.group))
        return Weight(layout, self.vector, numbers, self.parts, lambda a: product(a, self, dtype="float32"))

    def __rmatmul__(self, a: Any) -> Any:
        return product(a, self)


def to_device(w: Quantized, like: Any) -> DeviceInt4:
    """A copy of a quantized weight on the device of an array, in an array of the same library.

    Raises:
        TypeError: `like` is in the host's memory.
        PackError: the weight has another number of bits, or its groups are not multiples of 8 rows.
    """
    where = like if isinstance(like, device_array.DeviceArray) else interop.adopt(like)
    if where is None:
        raise TypeError(f"like is a {type(like).__name__} in the host's memory; pass an array on a device")
    if w.bits != CODE_BITS:
        raise PackError(f"the weight has codes of {w.bits} bits; kernels multiply those of {CODE_BITS}: dequantize it")
    k, _ = w.shape
    group = 0 if w.group >= k else w.group
    if group % CODES_KR:
        raise PackError(f"the weight has groups of {w.group} rows; kernels read multiples of {CODES_KR}: dequantize it")
    parts = (_words(w.codes), _columns(w.scales), _columns(w.offsets))
    words, scales, offsets = (_uploaded(where, x) for x in parts)
    return DeviceInt4(words, scales, offsets, w.shape, group)


def _columns(x: Any) -> Any:
    """The scales, or offsets, transposed; at least one for each column."""
    return np.ascontiguousarray((x if len(x) else np.zeros((1, x.shape[1]), np.float32)).T)


def _words(codes: Any) -> Any:
    """The packed words of all columns."""
    some = codes if len(codes) else np.zeros((1, codes.shape[1]), np.uint8)
    return np.ascontiguousarray(int4_words(some, CODES_KR * TOGETHER).T).view(np.int32)


def _uploaded(like: DeviceArray, x: Any) -> DeviceArray:
    """A copy on a device."""
    array, described = interop.empty_like(like, x.shape, {"int32": "s32", "float32": "f32"}[x.dtype.name])
    if hasattr(array, "copy_"):
        array.copy_(sys.modules["torch"].from_numpy(x.copy()))
    elif x.size:
        array.set(x)
    return described


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """The kernels of one kind of call.

    Attributes:
        shape: of the result.
        dtype: of the result.
        launches: kernels, with offsets into A and C, in elements.
        workspace: elements of 32 bits, and their type.
    """

    shape: tuple[int, ...]
    dtype: str
    launches: tuple[tuple[Launch, tuple[int, int]], ...]
    workspace: tuple[int, str]

    def run(self, a: DeviceArray, w: DeviceInt4, out: DeviceArray | None) -> Any:
        """Launch the kernels and return the result."""
        result, described = (out.source, out) if out is not None else interop.empty_like(a, self.shape, self.dtype)
        pointers = {name: device_array.argument(x)[1] for name, x in w.parts.items()} if self.launches else {}
        scratch: Any = None
        if self.workspace[0]:
            scratch, work = interop.empty_like(a, (self.workspace[0],), self.workspace[1])
            pointers["work"] = device_array.argument(work)[1]
        on = device_operands.machine_of(a)
        for launch, moved in self.launches:
            for name, x, offset in zip("ac", (a, described), moved, strict=True):
                pointers[name] = device_operands.shifted(device_array.argument(x)[1], offset, x)
            launch.run(on, pointers, a.queue)
        del scratch  # its library frees it when the queue is done with it
        return result


_ready = Memory(matmul_gpu.MOST_KINDS)


def product(a: Any, w: DeviceInt4, out: Any = None, dtype: Any = None) -> Any:
    """A @ w, on the stream or queue of A.

    Args:
        a: (..., k) of f32, f16 or bf16, on the weight's device.
        w: a result of `to_device`.
        out: the array of the result, or None for a new array.
        dtype: of the result, before it is put in `out`: f32, f16 or bf16; by default out's or A's.

    Raises:
        TypeError: A, or `out`, is in the host's memory or of another type.
        ValueError: shapes do not match, or the two are on several devices.
    """
    left, to = _adopted(a, w, out)
    requested = matmul_gpu.named(dtype) if dtype is not None else left.dtype if to is None else to.dtype
    if requested not in FLOATS:
        raise TypeError(f"products with an int4 weight are of {', '.join(FLOATS)}, not {requested}")
    parts = (left, w.words, w.scales, w.offsets)
    if to is not None and (requested != to.dtype or device_operands.overlap(to, parts)):
        shape = device_operands.shapes(left, w.codes)[0]
        return matmul_gpu.via_temporary(to, requested, shape, left, lambda temporary: product(a, w, temporary))
    where = requested if to is None else to.kind
    key = (left.kind, w.words.kind, w.shape, w.group, where, config.current().deterministic)
    ready: _Ready | None = _ready.get(key)
    if ready is None:
        ready = _ready.keep(key, _prepare(left, w, to, requested))
    return ready.run(left, w, to)


def _adopted(a: Any, w: DeviceInt4, out: Any) -> tuple[DeviceArray, DeviceArray | None]:
    """A, and the output, adopted.

    Raises:
        TypeError: one of them is in the host's memory or of another type.
        ValueError: they are on several devices.
    """
    left, to = (x if x is None or isinstance(x, device_array.DeviceArray) else interop.adopt(x) for x in (a, out))
    for name, x, original in (("a", left, a), ("out", to, out)):
        if x is None and original is not None:
            raise TypeError(
                f"{name} is a {type(original).__name__} in the host's memory; copy it to the weight's device"
            )
        if x is not None and x.dtype not in FLOATS:
            raise TypeError(f"{name} has elements of {x.dtype}; with an int4 weight they are of {FLOATS}")
    if left is None:
        raise TypeError("a is None; pass an array on the weight's device")
    device_array.same_device([x for x in (left, w.words, to) if x is not None])
    return left, to


def fused_matmul(
    operands: tuple[Any, DeviceInt4, Any], dtype: Any, epilogue: Callable[..., Any] | None,
    prologue_a: Callable[..., Any] | None, prologue_b: Callable[..., Any] | None,
) -> Any:  # fmt: skip
    """A @ w with a prologue and an epilogue: see `matmul.matmul`.

    Raises:
        TypeError: there is a prologue of the weight, or as for `product`.
        ValueError: as for `product`.
    """
    a, w, out = operands
    if prologue_b is not None:
        raise TypeError("b is an int4 weight; quantize the result of prologue_b")
    left, to = _adopted(a, w, out if epilogue is None else None)
    if prologue_a is not None:
        left = fused_matmul_gpu.before(prologue_a, left, "a", {"m": "m", "k": "n", "b": "b"})
    if epilogue is None:
        return product(left, w, to, dtype)
    to = None if out is None else interop.adopt(out)
    if to is None and out is not None:
        raise TypeError(f"out is a {type(out).__name__} in the host's memory; copy it to the weight's device")
    device_array.same_device([x for x in (left, to) if x is not None])
    return fused_matmul_gpu.matmul((left, w.codes, to), dtype, epilogue, w.weight)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A product of a weight, resolved for arrays of one kind.

    Attributes:
        weight: the weight.
        kinds: of A, and of C or None.
        ready: the kernels.
    """

    weight: DeviceInt4
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
            raise ValueError(
                f"a is {matmul_gpu.described(left.kind)}, the plan takes {matmul_gpu.described(self.kinds[0])}"
            )
        if (to is None) != (self.kinds[1] is None) or (to is not None and to.kind != self.kinds[1]):
            raise ValueError("the plan was made for another out, or for none; pass one of the same layout")
        if to is not None:
            device_operands.check_out(to, self.ready.shape)
            device_operands.check_apart(to, {"a": (left,), "the weight": tuple(self.weight.parts.values())})
        return self.ready.run(left, self.weight, to)


def plan(a: Any, w: DeviceInt4, out: Any = None) -> Plan:
    """A callable for arrays of these kinds: see `matmul.plan`.

    Raises:
        TypeError: as for `product`.
        ValueError: as for `product`.
    """
    left, to = _adopted(a, w, out)
    return Plan(w, (left.kind, None if to is None else to.kind), _prepare(left, w, to, left.dtype))


def question(a: Any, w: DeviceInt4, out: Any, epilogue: Any) -> tuple[matmul_gpu.DeviceProblem, tuple[str, ...]]:
    """The problem of a call, and notes for `explain`."""
    left, to = _adopted(a, w, out)
    if epilogue is not None:
        return fused_matmul_gpu.question((left, w.codes, to), epilogue, w.weight)
    return _problem(left, w, to, left.dtype), ()


def _problem(a: DeviceArray, w: DeviceInt4, out: DeviceArray | None, c: str) -> matmul_gpu.DeviceProblem:
    """The problem of a product whose result is of type `c`."""
    shape, batch, size = device_operands.shapes(a, w.codes)
    call = matmul_gpu.device_problem((a, w.codes, out or interop.empty_like(a, shape, c)[1]), batch, size)
    return fused_matmul_gpu.weighed(call, w.weight)


def _prepare(a: DeviceArray, w: DeviceInt4, out: DeviceArray | None, requested: str) -> _Ready:
    """The launches of a kind of call."""
    shape, _, size = device_operands.shapes(a, w.codes)
    if out is not None:
        device_operands.check_out(out, shape)
    c = requested if out is None else out.dtype
    if 0 in shape:
        return _Ready(shape, c, (), (0, "f32"))
    call = _problem(a, w, out, c)
    p = replace(call.problem, k=max(size[2], 1))
    route = gpu_dispatch.route(p, device_operands.machine_of(a), call.vectors)
    values = call.values() | w.weight.numbers
    launches, workspace = matmul_gpu.bound(route, values, p)
    repeats = [(0, 0)] if call.walk.outer is None else [(int(x[0]), int(x[2])) for x in call.walk.outer]
    every = tuple((launch, moved) for moved in repeats for launch in launches)
    return _Ready(shape, c, every, workspace)
