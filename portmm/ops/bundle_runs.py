"""Runs of the kernels of a bundle that pack weights, or compute attention, by which its check compares them.

Owns the texts that say in a bundle how such a kernel is run, as "pack avx512 f32 f32x32 row", and the jobs that they
mean. Packed weights have to be equal, but for columns after the last, and attention is compared with float64. Sizes are
small: more than a panel, a block of keys, or a run of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays import numpy_fallback
from portmm.ir.index import Index, spelled
from portmm.ir.prefix import value
from portmm.ops.bundle_operands import HEAD, OPERAND, ROUNDING, Job, Result, encoded, laid, values_of
from portmm.ops.int4_panels import codes_of, panels_of, rows_of
from portmm.spec.dtype import types
from portmm.spec.problem import family
from portmm.spec.row_classes import last_of_class
from portmm.weights.quantized import Quantized

if TYPE_CHECKING:
    from portmm.ops.bundle_shapes import AttentionShape

Array = np.ndarray[Any, Any]
PACK, ATTENTION = "pack", "attention"
SCRATCH = 4096
"""Bytes of scratch of a kernel that packs."""
MOST_QUERIES = 37
"""Queries of a head, if the kernel is for as many."""
BEYOND = 29
"""Keys after a whole block, or a whole run, of them."""


class Form(NamedTuple):
    """A kernel of attention for a kind of calls.

    Attributes:
        queries: the number that it is for.
        d, dv: elements of heads of K, and of V.
        group: heads of Q for each of K.
        causal, window, lse: which keys are seen, and whether logarithms of sums are returned: 0 or 1.
        step, run: keys of a block, and of a KV split.
    """

    queries: int
    d: int
    dv: int
    group: int
    causal: int
    window: int
    lse: int
    step: int
    run: int


def packing_text(isa: str, dtype: str, packed: str, layout: str) -> str:
    """The text for a kernel that packs weights of products of types into a layout, from rows or columns."""
    return f"{PACK} {isa} {dtype} {packed} {layout}"


def attention_text(isa: str, x: AttentionShape, queries: int, blocks: tuple[int, int], workspace: Index) -> str:
    """The text for a kernel of attention.

    Args:
        isa: instruction set.
        x: the sizes that it was selected for.
        queries: of these the number of queries.
        blocks: keys of a block, and of a KV split.
        workspace: bytes of its scratch.
    """
    form = Form(queries, x.d, x.dv, x.heads // x.kv_heads, int(x.causal), int(x.window), int(x.lse), *blocks)
    return " ".join((ATTENTION, isa, x.dtype, *map(str, form), spelled(workspace)))


def isa_of(text: str) -> str:
    """The instruction set of a text."""
    return text.split()[1]


def job_of(text: str) -> Job:
    """The job that a text means.

    Raises:
        ValueError: it means none.
        LookupError: likewise.
    """
    kind, _, dtype, *words = text.split()
    if kind == PACK:
        packed, layout = words
        return _int4_packing(packed) if family(packed).dtype == "u4" else _packing(dtype, packed, layout)
    if kind != ATTENTION:
        raise ValueError(f"{kind} is no kind of kernels")
    most = len(Form._fields)
    return _attention(dtype, Form(*map(int, words[:most])), " ".join(words[most:]))


def _packing(dtype: str, packed: str, layout: str) -> Job:
    of, element = family(packed), types(dtype)[1]
    k, n = 5 * of.kr + 3, 2 * of.nr + 5
    b = np.random.default_rng(n).integers(0 if element == "u8" else -9, 10, (k, n))
    words = encoded(b, element)
    owner = np.zeros(of.units(k, n) * of.kr, words.dtype)
    numpy_fallback.pack(words, owner, of)
    memory, steps = laid(b, element, layout)
    head = HEAD.pack(1, n, k, 1, 2, 0, len(memory), owner.nbytes, SCRATCH, *(0,) * 3, *steps, n * k, 0, 0, 0, 0, 0)
    there = np.arange(-(-n // of.nr) * of.nr).reshape(-1, of.nr) < n
    units = np.broadcast_to(there[:, None, :, None], (len(there), -(-k // of.kr), of.nr, of.kr))
    sums = np.repeat(there, 4 // owner.itemsize, axis=1)[:, : None if of.sums else 0]
    where = np.concatenate((units.reshape(len(there), -1), sums), axis=1).ravel()
    return Job(head + memory, (Result(values_of(owner), element, exact=True, where=where),))


def _int4_packing(packed: str) -> Job:
    of = family(packed)
    k, n = 2 * (of.group or 40) + 11, 2 * of.nr + 5
    rng = np.random.default_rng(n)
    codes, scales = rng.integers(0, 16, (k, n), dtype=np.uint8), rng.random((int(of.groups(k)), n), np.float32)
    scales = scales.astype(np.float16).astype(np.float32)
    offsets = -8 * scales if of.symmetric else rng.random(scales.shape, np.float32)
    q = Quantized(codes, scales, offsets, 4, of.group or k)
    owner, rows, memory = panels_of(q, of), rows_of(q, of), codes_of(q, of).tobytes()
    head = HEAD.pack(
        1, n, k, 1, 2, 0, len(memory), owner.nbytes, SCRATCH, *(0,) * 3, n, 1, 0, 0, 0, 0, len(rows), 0
    )  # fmt: skip
    return Job(
        head + memory + b"".join(OPERAND.pack(x.nbytes, *(0,) * 5) + x.tobytes() for x in rows), (_bytes(owner),)
    )


def _bytes(owner: Array) -> Result:
    """A result that has to be equal in each byte."""
    return Result(owner.view(np.uint8), "u8", exact=True)


def _attention(dtype: str, x: Form, workspace: str) -> Job:
    items, kv_heads = 2, 2
    heads, m = kv_heads * x.group, min(x.queries, MOST_QUERIES)
    n = max(m, (x.run or x.step) + BEYOND)
    far = n // 2 if x.window else n
    rng = np.random.default_rng(n)
    shapes = (heads, m, x.d), (kv_heads, n, x.d), (kv_heads, n, x.dv)
    memory = [encoded(rng.standard_normal((items, *s)), dtype) for s in shapes]
    q, k, v = (values_of(y).astype(np.float64) for y in memory)
    scale = np.float32(1 / math.sqrt(x.d))
    expected, sums = _softmax(q, k, v, float(scale), causal=bool(x.causal), far=far)
    results = [Result(expected, dtype, least=ROUNDING[dtype])]
    results += [Result(sums, "f32", least=ROUNDING["f32"])] * x.lse
    batch, d = items * heads, x.d
    sizes = {
        "m": last_of_class(m), "n": last_of_class(n), "k": d, "batch": batch, "workers": 2, "a_m": heads,
        "a_k": x.group, "b_n": x.step, "c_n": x.dv, "c_batch": x.run,
    }  # fmt: skip
    steps = (heads, x.group, 0, far, x.step, 0, n - m, x.dv, x.run)
    head = HEAD.pack(m, n, d, batch, 2, 0, 0, 0, value(workspace, sizes), *steps, 3 + len(results), 1)
    tail = b"".join(_matrices(y.tobytes(), y.shape, result=False) for y in memory)
    tail += _matrices(bytes(results[0].nbytes), expected.shape, result=True)
    tail += _matrices(bytes(sums.size * 4), (*sums.shape, 1), result=True) if x.lse else b""
    return Job(head + tail + scale.tobytes(), (Result(np.zeros(0), "f32"), *results))


def _matrices(memory: bytes, shape: tuple[int, ...], *, result: bool) -> bytes:
    """An operand (items, heads, rows, columns)."""
    _, heads, rows, columns = shape
    return OPERAND.pack(len(memory), heads * rows * columns, columns, 1, rows * columns, int(result)) + memory


def _softmax(q: Array, k: Array, v: Array, scale: float, *, causal: bool, far: int) -> tuple[Array, Array]:
    """Attention, and the logarithms of the sums of exponentials; the last query is at the last key."""
    group, (m, n) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = scale * (q @ k.swapaxes(-1, -2))
    distance = np.arange(n - m, n)[:, None] - np.arange(n)
    scores[..., (abs(distance) >= far) | (causal & (distance < 0))] = -np.inf
    peaks = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - peaks)
    sums = weights.sum(axis=-1, keepdims=True)
    return weights / sums @ v, (peaks + np.log(sums))[..., 0]
