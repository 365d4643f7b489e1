"""Operands of the kernels that the check of a bundle runs, and what kernels compute of them, by NumPy.

Owns `job_of`, whatever B is and whatever is fused with the product. Elements of A and B are small integers, and scales
of four-bit values powers of two, so that sums are exact in every type. Epilogues are computed in float32, and compared
within the rounding of results.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays import numpy_fallback
from portmm.dispatch.stored_kernels import fields_of
from portmm.errors import ScheduleError
from portmm.ops.int4_panels import panels_of
from portmm.spec.epilogue import C, Fused, Operand, parse
from portmm.spec.expr import Expr
from portmm.spec.expr_ops import NUMPY, OPS
from portmm.spec.problem import AXES, Problem, family
from portmm.weights.quantized import Quantized

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule

Array = np.ndarray[Any, Any]
HEAD, OPERAND = struct.Struct("20l"), struct.Struct("6l")
PLAIN = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "s8": np.int8, "u8": np.uint8, "s32": np.int32}
POWERS = np.array([0.5, 1, 2], np.float32)
"""Scales, and numbers of expressions."""
ROUNDING = {"f32": 1e-5, "f16": 2e-3, "bf16": 1.6e-2}
"""Largest relative difference of results of an epilogue: two roundings to their type, and those of float32."""


class Result(NamedTuple):
    """A result of a kernel.

    Attributes:
        values: what it has to be, by the axes of the product; its memory has one element for each.
        dtype: type of the elements.
        columns: the memory is by columns.
        exact: values have to be equal.
        least: the difference that values near zero may have, by the largest value.
        where: which elements are compared; by default all.
    """

    values: Array
    dtype: str
    columns: bool = False
    exact: bool = False
    least: float = 1e-5
    where: Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return int(self.values.size * encoded(np.zeros(1, int), self.dtype).itemsize)

    def differing(self, memory: bytes) -> int:
        """The number of elements that differ in what a kernel wrote."""
        words = np.frombuffer(memory, encoded(np.zeros(1, int), self.dtype).dtype)
        wanted = self.values
        got = values_of(words).reshape(wanted.shape[::-1]).T if self.columns else values_of(words).reshape(wanted.shape)
        if self.where is not None:
            got, wanted = got[self.where], wanted[self.where]
        if self.exact:
            return int(np.sum(got != wanted))
        least = self.least * max(1.0, float(np.abs(wanted).max(initial=0)))
        least += self.dtype[0] in "su"  # a half may be rounded to either side
        return int(np.sum(~np.isclose(got.astype(float), wanted, rtol=ROUNDING.get(self.dtype, 0), atol=least)))


class Job(NamedTuple):
    """A run of a kernel.

    Attributes:
        data: the input of the driver, runtime/check.c.
        results: what it writes: C, then operands of the epilogue that are results.
    """

    data: bytes
    results: tuple[Result, ...]


def job_of(s: Schedule, workspace: Callable[[Mapping[str, int]], int], size: int, *, swap: bool) -> Job:
    """The run of a schedule's kernel.

    Args:
        s: the schedule.
        workspace: elements of its scratch, from fields of the argument block.
        size: bytes of such an element.
        swap: the kernel computes the transpose.

    Raises:
        ScheduleError: it reads operands for which there is no data here.
    """
    # A register tile of one height serves as many rows, others all from the least.
    rows, columns, k = s.mr if len(s.heights) == 1 else 2 * s.mr + 1, 2 * s.nr + 1, min(97, s.kc + 5)
    if s.b.layout == "codes":
        k = max(k, 2 * s.b.group + 5)
    m, n, k = s.static or ((columns, rows, k) if swap else (rows, columns, k))
    a_type, b_type, c_type = s.types
    a_layout, b_layout = ({"any": "row"}.get(x.layout, x.layout) for x in (s.a, s.b))
    if swap:
        flip = {"row": "col", "col": "row", "packed": "packed"}
        a_layout, b_layout = flip[b_layout], flip[a_layout]
        a_type, b_type = b_type, a_type
    rng = np.random.default_rng(m * n)
    a: Array = rng.integers(0 if a_type == "u8" else -1, 2, (m, k))
    left, a_steps = laid(a, s.a.source or a_type, a_layout)
    inner: dict[str, Array] = {}
    if s.a.source:
        a, inner["row_scale"] = numpy_fallback.quantized_rows(a)
    b, right, b_steps = _weight(s, (k, n), b_type, b_layout, rng)
    sums = a.astype(b.dtype) @ b
    packed = b_layout in ("packed", "codes")
    layouts, packed_as = (a_layout, b_layout, "col" if swap else "row"), s.family if packed else ""
    p = Problem(m, n, k, s.dtype, 1, *layouts, packed_as, source=s.a.source, fused=s.epilogue)
    scratch = workspace(fields_of(p, m, 2, swap=swap)) * size
    fused = parse(s.epilogue) if s.epilogue else None
    operands, numbers = _drawn(fused, (m, n), rng)
    inner |= {"acc": sums, "column_sum": b.sum(axis=0), "numbers": numbers}
    results = _results(fused, inner, operands, (m, n))
    exact = not fused and b_layout != "codes"
    first = Result(results.pop(C), c_type, swap, exact)
    every = (first, *(Result(x, operands[i][0].dtype) for i, x in sorted(results.items())))
    c_steps = (1, m) if swap else (n, 1)
    lengths = (len(left), len(right), first.nbytes, scratch)
    steps = (*a_steps, 0, *b_steps, 0, *c_steps, 0)
    head = HEAD.pack(m, n, k, 1, 2, *lengths, *steps, len(operands), len(numbers))
    tail = b"".join(_operand(x, y, i in results) for i, (x, y) in enumerate(operands))
    return Job(head + left + right + tail + numbers.tobytes(), every)


def _weight(s: Schedule, shape: tuple[int, int], dtype: str, layout: str, rng: Any) -> tuple[Array, bytes, Any]:
    """The values of B, its memory, and its strides."""
    k, n = shape
    if layout == "codes":
        of = family(s.family)
        groups = of.groups(k)
        scales = rng.choice(POWERS, (groups, n))
        offsets = -8 * scales if of.symmetric else -rng.integers(0, 16, (groups, n)).astype(np.float32)
        codes = rng.integers(0, 16, shape, dtype=np.uint8)
        q = Quantized(codes, scales, offsets, 4, of.group or k)
        which = np.arange(k) // q.group
        return codes * scales[which] + offsets[which].astype(float), panels_of(q, of).tobytes(), (of.nr, of.panel(k))
    b = rng.integers(0 if dtype == "u8" else -1, 2, shape)
    if layout != "packed":
        return b, *laid(b, dtype, layout)
    of = family(s.family)
    words = encoded(b, dtype)
    owner = np.zeros(-(-n // of.nr) * of.panel(k) * of.kr, words.dtype)
    numpy_fallback.pack(words, owner, of)
    return b, owner.tobytes(), (of.nr, of.panel(k))


def _drawn(fused: Fused | None, shape: tuple[int, int], rng: Any) -> tuple[list[tuple[Operand, Array]], Array]:
    """Values of the operands of an epilogue, and its numbers."""
    if fused is None:
        return [], np.empty(0, np.float32)
    operands = []
    for x in fused.operands:
        if x.dtype not in (*PLAIN, "bf16"):
            raise ScheduleError(f"operands of {x.dtype}")
        sizes = tuple(size if axis in x.axes else 1 for axis, size in zip("mn", shape, strict=True))
        values = rng.integers(-2, 3, sizes) if x.dtype in ("s8", "s32") else rng.choice(POWERS, sizes)
        operands.append((x, np.ceil(values).astype(int) if x.dtype == "u8" else values))
    return operands, rng.choice(POWERS, fused.numbers)


def _operand(x: Operand, values: Array, written: bool) -> bytes:
    """The driver's input for an operand: its size, its strides along a batch, rows, columns and heads, and memory."""
    step = 1 if x.dense or written else 2
    spread = np.zeros((*values.shape, step), int if values.dtype.kind == "i" else float)
    spread[..., 0] = values
    memory = encoded(spread, x.dtype).tobytes()
    steps = {"m": values.shape[1] * step, "n": step}
    return OPERAND.pack(len(memory), *(steps.get(y, 0) if y in x.axes else 0 for y in AXES), int(written)) + memory


def _results(
    fused: Fused | None, inner: Mapping[str, Array], operands: list[tuple[Operand, Array]], shape: tuple[int, int]
) -> dict[int, Array]:
    """Results of a product by the number of an operand, or `C`; `inner` has sums, and the numbers of a call."""
    if fused is None:
        return {C: inner["acc"]}
    rows, columns = (np.arange(size, dtype=np.int32) for size in shape)
    along, sizes = {"m": rows[:, None], "n": columns}, {"m": np.int32(shape[0]), "n": np.int32(shape[1])}
    leaves: dict[str, Callable[..., Any]] = {
        "acc": lambda _, x: inner["acc"].astype(NUMPY[x.dtype]),
        "column_sum": lambda _, x: inner["column_sum"].astype(NUMPY[x.dtype]),
        "row_scale": lambda *_: inner["row_scale"][:, None],
        "const": lambda value, x: NUMPY[x.dtype](value),
        "load": lambda i, x: operands[i][1].astype(NUMPY[x.dtype]),
        "number": lambda i, _: inner["numbers"][i],
        "index": lambda axis, _: along.get(axis, np.int32(0)),
        "extent": lambda axis, _: sizes.get(axis, np.int32(1)),
    }
    known: dict[Expr, Any] = {}
    with np.errstate(all="ignore"):
        for x in fused.steps:
            if x.op in leaves:
                known[x] = leaves[x.op]((*x.args, None)[0], x)
            else:
                known[x] = OPS[x.op].plain(*(known[y] if isinstance(y, Expr) else y for y in x.args))
    return {i: np.broadcast_to(known[x], operands[i][1].shape if i != C else shape) for i, x in fused.results}


def laid(x: Array, dtype: str, layout: str) -> tuple[bytes, tuple[int, int]]:
    """A matrix in a layout, with its strides."""
    words = encoded(x, dtype)
    rows, columns = x.shape
    return (words.tobytes(), (columns, 1)) if layout == "row" else (words.T.tobytes(), (1, rows))


def encoded(x: Array, dtype: str) -> Array:
    """Numbers as elements of a type; bfloat16, of which these are, as words of 16 bits."""
    if dtype == "bf16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(PLAIN[dtype])


def values_of(x: Array) -> Array:
    """Elements as numbers, of words of 16 bits as of bfloat16."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x
