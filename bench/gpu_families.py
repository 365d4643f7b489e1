"""Operands, calls, peers and checks of each family of cases that `gpu_cases` lists.

A family takes arrays of `gpu_arrays` and peers of `gpu_peers`, and gives a `Work`. Checks are against float64, on
the device itself; a bound holds for normal random data, and is some six standard deviations of rounding errors wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from gpu_arrays import drawn

import portmm as pm
from portmm.arrays import interop, numpy_arrays
from portmm.dispatch import device_routes
from portmm.dispatch.machine import machine_of
from portmm.ops import grid_product
from portmm.spec.dtype import BY_NAME

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
    return FAMILIES[case.kind](on, _Careful(peers), case, l2)


class _Careful:
    """Peers of which one that fails is missing, and ends nothing else."""

    def __init__(self, peers):
        self.peers = peers

    def __getattr__(self, name):
        asked = getattr(self.peers, name)

        def given(case, sets):
            try:
                return asked(case, sets)
            except Exception as error:  # noqa: BLE001 - whatever another library raises
                self.peers.missing[name] = f"{type(error).__name__}: {str(error)[:300]}"
                return {}

        return given


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
    return interop.adopt(x).dtype


def chosen(a, b):
    """The function that multiplies two arrays, and its predicted seconds."""
    product = grid_product.adopted(a, b)
    call, _ = grid_product.question(product)
    choice = device_routes.route(call.problem, machine_of(product.a), call.vectors).choice
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
    kind = np.dtype(numpy_arrays.numpy_of("bf16"))

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


_PARTS = ("words", "scales", "offsets")


def _packed(on, weight, like, count):
    """A weight on the device, so many times: packed once, as that takes the host seconds, and copied there."""
    first = pm.pack(weight, like=like)
    copies = [{name: interop.adopt(on.copy(getattr(first, name).source)) for name in _PARTS} for _ in range(count - 1)]
    return [first, *(replace(first, **x) for x in copies)]


def codes(on, peers, case, l2):
    """A weight of four bits, beside the same one in bf16."""
    weight, values = _quantized(case.n, case.k)
    held = case.k * case.n / 2 + 8 * case.n * math.ceil(case.k / GROUP)
    rows = [on.random((case.m, case.k), case.dtype, i) for i in range(turns_of(held, l2))]
    plain = [on.array(values, case.dtype) for _ in range(turns_of(2 * case.k * case.n, l2))]
    there = _packed(on, weight, rows[0], len(rows))
    sets = [(a, plain[i % len(plain)], w) for i, (a, w) in enumerate(zip(rows, there, strict=True))]

    def share(found, x):
        return share_of(on, found, x[0], on.array(values, "f32"), eps=INPUT_EPS["codes"])

    bytes_ = held + 2 * case.m * (case.n + case.k)
    return Work(sets, lambda x: pm.matmul(x[0], x[2]), peers.codes(case, sets), share, bytes_, flops(case))


def words_of(case):
    """Keys, and heads that share them, of a case: "keys=4096 group=4"."""
    return {name: int(x) for name, _, x in (word.partition("=") for word in case.more.split()) if x}


def attention(on, peers, case, l2):
    """Heads of attention: m queries and as many keys unless `more` says otherwise, n heads of all items, k wide."""
    heads, said = math.gcd(case.n, 32), words_of(case)
    keys, group = said.get("keys", case.m), said.get("group", 1)
    shapes = [(case.n // heads, heads, case.m, case.k), *[(case.n // heads, heads // group, keys, case.k)] * 2]
    size = BY_NAME[case.dtype].bytes * sum(map(math.prod, shapes))
    sets = [
        tuple(on.random(shape, case.dtype, 3 * i + j) for j, shape in enumerate(shapes))
        for i in range(turns_of(size, l2))
    ]
    causal = "causal" in case.more

    def share(found, x):
        worst = 0.0
        for item, head, first in ((0, 0, 0), (-1, -1, max(0, case.m - 256)), (0, -1, case.m // 2)):
            q, k, v = (on.wide(x[i][item, head if i == 0 else head // group]) for i in range(3))
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

    work = 4.0 * case.n * case.m * keys * case.k * (0.5 if causal else 1)
    ours = lambda x: pm.attention(*x, causal=causal)  # noqa: E731
    bytes_ = size + BY_NAME[case.dtype].bytes * math.prod(shapes[0])
    return Work(sets, ours, peers.attention(case, sets), share, bytes_, work)


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


ENDS = {"": lambda x: x, "relu": pm.relu, "gelu": pm.fast_gelu}
"""Activations after a bias; GELU by tanh, as in cublasLt."""


def bias(on, peers, case, l2):
    """A product, a bias of its columns, and maybe an activation: what cublasLt has epilogues for."""
    sets, bytes_ = _pairs(on, case, l2, lambda seed: [on.random((case.n,), case.dtype, 100 + seed)])
    last = ENDS[case.more]

    def ours(x):
        a, b, added = x
        return pm.matmul(a, b, epilogue=lambda acc, i: last(acc + added[i.n]))

    def share(found, x):
        added = on.wide(x[2])

        def end(want, _rows):
            total = want + added
            if case.more == "gelu":
                inner = math.sqrt(2 / math.pi) * (total + 0.044715 * total**3)
                total = 0.5 * total * (1 + on.xp.tanh(inner))
            return (total + abs(total)) / 2 if case.more == "relu" else total, 1.2

        return share_of(on, found, x[0], x[1], eps=2.0**-14, end=end)

    size = BY_NAME[case.dtype].bytes
    bytes_ += size * (case.m * case.n + case.n)
    return Work(sets, ours, peers.bias(case, sets), share, bytes_, flops(case))


def _softmax(xp, x):
    e = xp.exp(x - xp.max(x, -1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _layer_norm(xp, x):
    centred = x - xp.mean(x, -1, keepdims=True)
    return centred / xp.sqrt(xp.mean(centred * centred, -1, keepdims=True) + 1e-5)


ROWS = {"softmax": _softmax, "layer_norm": _layer_norm}


def rows(on, peers, case, l2):
    """A function over rows of an array, fused: m rows of n elements."""
    size = BY_NAME[case.dtype].bytes * case.m * case.n
    sets = [(on.random((case.m, case.n), case.dtype, i),) for i in range(turns_of(size, l2))]
    function = ROWS[case.more]
    fused = pm.fuse(lambda x: function(np, x))

    def share(found, x):
        # On the host: PyTorch spells the functions' arguments in another way.
        some = slice(0, min(case.m, ROWS_CHECKED))
        given, got = (np.asarray(on.host(y[some]), np.float64) for y in (x[0], found))
        want = function(np, given)
        error = abs(got - want) / ((2.0 * BY_NAME[case.dtype].eps + 2.0**-18) * (abs(want) + abs(want).mean()))
        worst = float(error.max())
        return math.inf if math.isnan(worst) else worst

    return Work(sets, lambda x: fused(x[0]), peers.rows(case, sets), share, 2 * size, 5.0 * case.m * case.n)


def conv(on, peers, case, l2):
    """A convolution with a bias and ReLU: images of m by m pixels and k channels, n filters; channels are last."""
    said = words_of(case)
    count, taps, stride = said.get("images", 1), said.get("taps", 1), said.get("stride", 1)
    padding, across = taps // 2, (case.m - 1) // stride + 1
    size = BY_NAME[case.dtype].bytes
    bytes_ = size * (count * case.m**2 * case.k + taps * taps * case.k * case.n + count * across**2 * case.n)

    def drawn_set(seed):
        x = on.random((count, case.m, case.m, case.k), case.dtype, seed)
        w = on.random((case.n, case.k, taps, taps), case.dtype, seed + 1)
        return x, w, on.random((case.n,), case.dtype, seed + 2), pm.pack_conv(w)

    sets = [drawn_set(3 * i) for i in range(turns_of(bytes_, l2))]

    def ours(x):
        images, _, added, packed = x
        return pm.conv(
            images, packed, padding=padding, stride=stride, epilogue=lambda acc, i: pm.relu(acc + added[i.n])
        )

    def share(found, x):
        # Of the last image, on the host.
        image, filters, added = (np.asarray(on.host(y), np.float64) for y in (x[0][-1], x[1], x[2]))
        image = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(image, (taps, taps), (0, 1))[::stride, ::stride]
        rows, matrix = windows.reshape(across * across, -1), filters.reshape(case.n, -1).T
        want = np.maximum(rows @ matrix + added, 0)
        scale = (rows * rows).sum(1)[:, None] ** 0.5 * (matrix * matrix).sum(0) ** 0.5
        bound = 4 * math.sqrt(rows.shape[1]) * 2.0**-24 * scale + 2.0 * BY_NAME[case.dtype].eps * want + 1e-30
        worst = float((abs(np.asarray(on.host(found[-1]), np.float64).reshape(want.shape) - want) / bound).max())
        return math.inf if math.isnan(worst) else worst

    work = 2.0 * count * across**2 * taps * taps * case.k * case.n
    return Work(sets, ours, peers.conv(case, sets), share, bytes_, work)


FAMILIES = {
    "dense": dense, "tf32": tf32, "int8": int8, "epilogue": epilogue, "codes": codes, "attention": attention,
    "grouped": grouped, "bias": bias, "rows": rows, "conv": conv,
}  # fmt: skip
