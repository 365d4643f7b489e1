"""Operands, calls, peers and checks of each family of cases that `gpu_cases` lists.

A family takes arrays of `gpu_arrays` and peers of `gpu_peers`, and gives a `Work`. Checks are against float64, on
the device itself; a bound holds for normal random data, and is some six standard deviations of rounding errors wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from gpu_arrays import drawn

import portmm as pm
from portmm import device_arrays, foreign, grid_dispatch, on_device
from portmm.dtype import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

ROTATED = 2.5
"""Times L2 that operands fill together, so that none is found there when its turn comes again."""
MOST_SETS = 64
ROWS_CHECKED = 2048
"""Rows that are checked at once, in float64."""
GROUP = 128
"""Rows of a weight of four bits that share a scale."""
INPUT_EPS = {"tf32": 2.0**-11, "e4m3": 2.0**-10, "e5m2": 2.0**-10, "codes": 2.0**-8}
"""Round-off of operands on their way to the units; of fp8, of the sums that Hopper's units keep."""


class RefusedError(Exception):
    """The feature that a case measures is not there."""


@dataclass
class Work:
    """A case, ready to run.

    Attributes:
        sets: operands, once for each rotation.
        ours: portmm's call, of one of them.
        peers: others' calls, by name.
        share: the error of a result of the first set, over what it may be.
        bytes: read and written at least.
        flops: operations.
        choice: the schedule, and its predicted seconds.
    """

    sets: list
    ours: Callable
    peers: dict
    share: Callable
    bytes: float
    flops: float
    choice: dict = field(default_factory=dict)


def made(on, peers, case, l2):
    """A case, ready to run.

    Raises:
        RefusedError: portmm has no such feature.
    """
    if case.dtype not in BY_NAME:
        raise RefusedError(f"portmm has no elements of {case.dtype}")
    return FAMILIES[case.kind](on, peers, case, l2)


def turns_of(bytes_, l2):
    """Sets of operands that together are larger than L2."""
    return max(2, min(MOST_SETS, math.ceil(ROTATED * l2 / max(bytes_, 1))))


def operand(on, case, seed):
    """B of a product, as it lies."""
    if case.b == "row":
        return on.random((case.k, case.n), case.dtype, seed)
    return on.random((case.n, case.k), case.dtype, seed).T


def share_of(on, found, a, b, *, eps=0.0, exact=False, end=None):
    """The largest error of a product over its bound: `end` gives what follows the sums of rows, and its slope."""
    worst, y = 0.0, on.wide(b)
    across = (y * y).sum(0) ** 0.5
    out_eps = 2.0 * max(BY_NAME[name_of(found)].eps, 2.0**-22)
    for first in range(0, a.shape[0], ROWS_CHECKED):
        rows = slice(first, first + ROWS_CHECKED)
        x = on.wide(a[rows])
        down, k = (x * x).sum(1) ** 0.5, x.shape[1]
        rounding = 0.0 if exact else 4 * math.sqrt(k) * 2.0**-24 + 8 * eps / math.sqrt(k)
        want, bound = x @ y, rounding * down[:, None] * across
        if end:
            want, slope = end(want, rows)
            bound = bound * slope
        error, bound = abs(on.wide(found[rows]) - want), bound + out_eps * abs(want) + 1e-30
        part = float((error / bound).max())
        worst = math.inf if math.isnan(part) else max(worst, part)
    return worst


def name_of(x):
    """Portmm's name of an array's type."""
    return foreign.adopt(x).dtype


def chosen(a, b):
    """What computes a product of two arrays, and its predicted seconds."""
    left, right, _ = on_device.adopted(a, b)
    call = on_device.question((left, right, None))
    choice = grid_dispatch.route(call.problem, device_arrays.machine_of(left), call.vectors).choice
    return {"schedule": str(choice.schedule), "predicted": choice.cost.seconds}


def _pairs(on, case, l2, more=lambda _seed: ()):
    """Sets of A, B and what else there is, and their bytes."""
    size = BY_NAME[case.dtype].bytes
    bytes_ = (case.m * case.k + case.k * case.n) * size
    return [
        (on.random((case.m, case.k), case.dtype, 2 * i), operand(on, case, 2 * i + 1), *more(i))
        for i in range(turns_of(bytes_, l2))
    ], bytes_


def dense(on, peers, case, l2):
    """A product as it is."""
    sets, bytes_ = _pairs(on, case, l2)
    narrow = case.dtype in ("e4m3", "e5m2")
    result = 2 if narrow else BY_NAME[case.dtype].bytes
    ours = (lambda x: pm.matmul(x[0], x[1], dtype="bfloat16")) if narrow else (lambda x: pm.matmul(x[0], x[1]))

    def share(found, x):
        return share_of(on, found, x[0], x[1], eps=INPUT_EPS.get(case.dtype, 0.0), exact=case.dtype == "s8")

    return Work(sets, ours, peers.dense(case, sets), share, bytes_ + result * case.m * case.n, flops(case),
                chosen(*sets[0]))  # fmt: skip


def flops(case):
    return 2.0 * case.m * case.n * case.k


def tf32(on, peers, case, l2):
    """A product of float32 by units that round its operands to tf32, on request."""
    try:
        with pm.config(tf32=True):
            pass
    except TypeError as error:
        raise RefusedError(f"pm.config has no tf32: {error}") from error
    sets, bytes_ = _pairs(on, case, l2)

    def ours(x):
        with pm.config(tf32=True):
            return pm.matmul(x[0], x[1])

    def share(found, x):
        return share_of(on, found, x[0], x[1], eps=INPUT_EPS["tf32"])

    with pm.config(tf32=True):
        choice = chosen(*sets[0])
    return Work(sets, ours, peers.tf32(case, sets), share, bytes_ + 4 * case.m * case.n, flops(case), choice)


def int8(on, peers, case, l2):
    """Integers, and scales of rows and columns."""

    def scales(seed):
        rng = np.random.default_rng(seed)
        return [on.array(rng.uniform(0.5, 1.5, n).astype(np.float32) * 1e-3, "f32") for n in (case.m, case.n)]

    sets, bytes_ = _pairs(on, case, l2, scales)
    kind = np.dtype(device_arrays.arrays.numpy_of("bf16"))

    def ours(x):
        a, b, rows, columns = x
        return pm.matmul(a, b, epilogue=lambda acc, i: pm.cast(acc * rows[i.m] * columns[i.n], kind))

    def share(found, x):
        down, across = on.wide(x[2]), on.wide(x[3])
        end = lambda want, rows: (want * down[rows][:, None] * across, 0.0)  # noqa: E731
        return share_of(on, found, x[0], x[1], exact=True, end=end)

    return Work(sets, ours, peers.int8(case, sets), share, bytes_ + 2 * case.m * case.n, flops(case))


def epilogue(on, peers, case, l2):
    """A product, two arrays of its size that are added, and GELU."""
    sets, bytes_ = _pairs(
        on, case, l2, lambda seed: [on.random((case.m, case.n), case.dtype, 100 + 2 * seed + i) for i in range(2)]
    )

    def ours(x):
        a, b, d, e = x
        return pm.matmul(a, b, epilogue=lambda acc, i: pm.fast_gelu(acc + d[i.m, i.n] + e[i.m, i.n]))

    def share(found, x):
        def end(want, rows):
            total = want + on.wide(x[2][rows]) + on.wide(x[3][rows])
            inner = math.sqrt(2 / math.pi) * (total + 0.044715 * total**3)
            return 0.5 * total * (1 + on.xp.tanh(inner)), 1.2

        return share_of(on, found, x[0], x[1], eps=2.0**-14, end=end)

    bytes_ += 3 * 2 * case.m * case.n
    return Work(sets, ours, peers.epilogue(case, sets), share, bytes_, flops(case))


@cache
def _quantized(n, k):
    """A weight of four bits, and its values."""
    weight = pm.quantize(drawn((k, n), "f32", 7), group=GROUP)
    return weight, pm.dequantize(weight)


def codes(on, peers, case, l2):
    """A weight of four bits, beside the same one in bf16."""
    weight, values = _quantized(case.n, case.k)
    held = case.k * case.n / 2 + 8 * case.n * math.ceil(case.k / GROUP)
    rows = [on.random((case.m, case.k), case.dtype, i) for i in range(turns_of(held, l2))]
    plain = [on.array(values, case.dtype) for _ in range(turns_of(2 * case.k * case.n, l2))]
    sets = [(a, plain[i % len(plain)], pm.pack(weight, like=a)) for i, a in enumerate(rows)]

    def share(found, x):
        return share_of(on, found, x[0], on.array(values, "f32"), eps=INPUT_EPS["codes"])

    bytes_ = held + 2 * case.m * (case.n + case.k)
    return Work(sets, lambda x: pm.matmul(x[0], x[2]), peers.codes(case, sets), share, bytes_, flops(case))


def attention(on, peers, case, l2):
    """Heads of attention: m queries and keys, n heads of all items, k wide."""
    heads = math.gcd(case.n, 32)
    shape = (case.n // heads, heads, case.m, case.k)
    size = 3 * BY_NAME[case.dtype].bytes * math.prod(shape)
    sets = [tuple(on.random(shape, case.dtype, 3 * i + j) for j in range(3)) for i in range(turns_of(size, l2))]
    causal = "causal" in case.more

    def share(found, x):
        worst = 0.0
        for item, head, first in ((0, 0, 0), (-1, -1, max(0, case.m - 256)), (0, -1, case.m // 2)):
            q, k, v = (on.wide(y[item, head]) for y in x)
            rows = slice(first, first + 256)
            weights = on.xp.exp(q[rows] @ k.T / math.sqrt(case.k))
            if causal:
                at = np.arange(case.m)
                weights = weights * on.wide(on.array((at[rows][:, None] >= at).astype(np.float32), "f32"))
            weights = weights / weights.sum(1)[:, None]
            want, bound = weights @ v, 2.0**-7 * (weights @ abs(v))
            error = abs(on.wide(found[item, head][rows]) - want)
            part = float((error / (bound + 2.0**-7 * abs(want) + 1e-30)).max())
            worst = math.inf if math.isnan(part) else max(worst, part)
        return worst

    work = 4.0 * case.n * case.m * case.m * case.k * (0.5 if causal else 1)
    ours = lambda x: pm.attention(*x, causal=causal)  # noqa: E731
    return Work(sets, ours, peers.attention(case, sets), share, size * 4 / 3, work)


def grouped(on, peers, case, l2):
    """Runs of rows, of unequal lengths, each with a weight of its own."""
    groups = int(case.more)
    rng = np.random.default_rng(5)
    ends = np.sort(rng.integers(0, case.m + 1, groups))
    ends[-1] = case.m
    there = on.array(ends, "s32")
    bytes_ = BY_NAME[case.dtype].bytes * (case.m * case.k + groups * case.k * case.n)
    sets = [
        (on.random((case.m, case.k), case.dtype, 2 * i), on.random((groups, case.k, case.n), case.dtype, 2 * i + 1),
         there)
        for i in range(turns_of(bytes_, l2))
    ]  # fmt: skip

    def share(found, x):
        worst, first = 0.0, 0
        for i, end in enumerate(int(y) for y in ends):
            if end > first:
                worst = max(worst, share_of(on, found[first:end], x[0][first:end], x[1][i]))
            first = end
        return worst

    ours = lambda x: pm.grouped_matmul(x[0], x[1], x[2])  # noqa: E731
    return Work(sets, ours, peers.grouped(case, sets), share, bytes_ + 2 * case.m * case.n, flops(case))


FAMILIES = {
    "dense": dense, "tf32": tf32, "int8": int8, "epilogue": epilogue, "codes": codes, "attention": attention,
    "grouped": grouped,
}  # fmt: skip
