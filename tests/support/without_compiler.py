"""Each public operation once; results, warnings and times go to a file. For test_without_compiler.py.

Arguments: the file, "usual" or how the compiler fails, and a folder with weights that were saved before.
"""

from __future__ import annotations

import pickle
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import cover
import ml_dtypes
import numpy as np

import portmm as pm
from portmm.build import compiler

OPERATIONS = {}


def operation(function):
    OPERATIONS[function.__name__] = function
    return function


@operation
def matmul(x):
    return [pm.matmul(x.a, x.b), pm.matmul(x.batch, x.b, out=np.empty((3, 5, 40), np.float32)), pm.matmul(x.u8, x.s8)]


@operation
def matmul_typed(x):
    return [pm.matmul(x.a, x.b, dtype=np.float64), pm.matmul(x.bf, x.bf.T), pm.matmul(x.a.astype(np.float64), x.b)]


@operation
def matmul_packed(x):
    out = np.empty((5, 40), np.float32)
    return [pm.matmul(x.a, pm.pack(x.b)), pm.matmul(x.u8, pm.pack(x.s8)), pm.matmul(x.a, pm.pack(x.b), out=out), out]


@operation
def matmul_quantized(x):
    q = pm.quantize(x.b, group=32)
    return [pm.matmul(x.a, q), pm.matmul(x.a, pm.pack(q)), pm.matmul(x.batch, pm.pack(q)), pm.dequantize(q)]


@operation
def convolution(x):
    image, filters = x.batch.reshape(3, 5, -1, 4), np.ascontiguousarray(x.b.ravel()[:96].reshape(8, 4, 3, 1))
    packed = pm.pack_conv(filters)
    return [pm.conv(image, filters, padding=1), pm.conv(image, packed, epilogue=lambda s, i: pm.relu(s) + i.n)]


@operation
def matmul_epilogue(x):
    bias = x.b[0]
    return [
        pm.matmul(x.a, x.b, epilogue=lambda s, i: pm.maximum(s + bias[i.n], 0)),
        pm.matmul(x.a, pm.pack(x.b), epilogue=lambda s: s * 2),
        pm.matmul(x.a, x.b, prologue_a=lambda a: a * 2),
    ]


@operation
def pack(x):
    whole = np.tile(x.s8, (1, 8))  # 320 columns: panels are full, and what lies beside a last one does not matter
    every = [pm.pack(x.b), pm.pack(x.s8), pm.pack(x.u8.T, activations=np.float32), pm.pack(np.stack([x.b, x.b + 1]))]
    every += [pm.pack(x.b.astype(ml_dtypes.bfloat16)), pm.pack(x.s8[:7, :3]), pm.pack(x.b.T)]
    full = [
        pm.pack(y) for y in (whole, whole[:, ::-1], whole[:61], whole.astype(np.float32), np.stack([whole, -whole]))
    ]
    full += [pm.pack(whole, activations=np.uint8), pm.pack(whole.astype(ml_dtypes.bfloat16)[:63])]
    return [y for w in (*every, *full) for y in (np.asarray(w), w.family)] + [np.array(w.owner) for w in full]


@operation
def fold(x):
    w = pm.pack(pm.quantize(x.b, group=32))
    return [np.array(w.owner), w.family]


@operation
def pickled(x):
    found = pickle.loads(pickle.dumps(pm.pack(x.b)))  # noqa: S301 - its own
    return [pm.matmul(x.a, found)]


@operation
def load_packed(x):
    found = pm.load_packed(x.folder / "weights")
    return [pm.matmul(x.a, found["f32"]), pm.linear(x.u8, found["s8"]), pm.matmul(x.a, found["u4"])]


@operation
def save_packed(x):
    place = x.folder / f"saved{x.how}"
    pm.save_packed(pm.pack(x.b), place)
    return [np.frombuffer(place.read_bytes(), np.uint8)]


@operation
def linear(x):
    scales, zeros = np.linspace(0.5, 1.5, 40, dtype=np.float32), np.arange(40, dtype=np.int32) - 7
    rows = np.linspace(0.1, 0.9, 5, dtype=np.float32)
    some = {"x_scale": rows, "w_scale": scales}
    return [
        pm.linear(x.u8, x.s8),
        pm.linear(x.u8, pm.pack(x.s8, activations=np.uint8), x.b[0], **some, x_zero=3, w_zero=zeros),
        pm.linear(x.i8, x.s8, x.b[1], x_zero=np.arange(5), w_zero=2),
        pm.linear(x.i8, x.s8, out_scale=30.0, out_zero=5, **some),
        pm.linear(x.u8, x.s8, x.b[0], out_scale=30.0, out_zero=5, dtype=np.uint8),
        pm.linear(x.i8, x.s8, dtype=np.float16, w_scale=0.01),
        pm.linear(x.batch.astype(np.int8), x.s8, out=np.empty((3, 5, 40), np.float32)),
    ]


@operation
def linear_dynamic(x):
    spoilt = x.a.copy()
    spoilt[1], spoilt[2, 3] = 0, np.inf
    w = pm.pack(x.s8, activations=np.int8)
    return [pm.linear(y, w, x.b[0], dynamic=True, w_scale=0.1) for y in (x.a, spoilt)]


@operation
def linear_floats(x):
    q = pm.quantize(x.b, group=32)
    return [pm.linear(x.a, x.s8, w_scale=0.5), pm.linear(x.a, q, x.b[0]), pm.linear(x.i8, pm.pack(q), x_scale=0.25)]


@operation
def linear_epilogue(x):
    return [pm.linear(x.u8, x.s8, x_scale=0.5, epilogue=lambda s, i: pm.maximum(s, i.n))]


@operation
def plan(x):
    made, packed = pm.plan(x.a, x.b), pm.plan(x.a, pm.pack(x.b))
    out = np.empty((5, 40), np.float32)
    packed(x.a, out=out)
    return [made(x.a, x.b), packed(x.a), out, pm.plan(x.u8, x.s8)(x.u8, x.s8), pm.plan(x.a[0], x.b)(x.a[0], x.b)]


@operation
def attention(x):
    q = x.batch.reshape(1, 3, 5, 64)
    return [pm.attention(q, q, q, causal=True), *pm.attention(q, q, q, return_lse=True)]


@operation
def grouped_matmul(x):
    b, ends = np.stack([x.b, x.b + 1, x.b - 1]), np.array([2, 2, 4])
    bias = x.b[:3]
    return [
        pm.grouped_matmul(x.a, b, ends),
        pm.grouped_matmul(x.a, pm.pack(b), ends),
        pm.grouped_matmul(x.a, [pm.quantize(y, group=32) for y in b], ends),
        pm.grouped_matmul(x.a, b, ends, epilogue=lambda s, i: s + bias[i.b, i.n] + i.m),
    ]


@operation
def fuse(x):
    packed = pm.pack(x.b)

    @pm.fuse
    def layer(a, b):
        y = np.maximum(a @ b, 0)
        return y - y.max(axis=-1, keepdims=True), a @ packed

    return [*layer(x.a, x.b), *layer(x.a, x.b + 1)]


def operands(how, folder):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((5, 64), np.float32), rng.standard_normal((64, 40), np.float32)
    u8, i8, s8 = (rng.integers(low, high, size, dtype) for low, high, size, dtype in (
        (0, 256, (5, 64), np.uint8), (-128, 128, (5, 64), np.int8), (-128, 128, (64, 40), np.int8),
    ))  # fmt: skip
    batch = rng.integers(-9, 9, (3, 5, 64)).astype(np.float32)
    more = {"bf": a.astype(ml_dtypes.bfloat16), "batch": batch, "how": how, "folder": folder}
    return SimpleNamespace(a=a, b=b, u8=u8, i8=i8, s8=s8, **more)


def save(x):
    """Weights, for `load_packed`."""
    every = {"f32": pm.pack(x.b), "s8": pm.pack(x.s8, activations=np.uint8), "u4": pm.pack(pm.quantize(x.b, group=32))}
    pm.save_packed(every, x.folder / "weights")


def main():
    to, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if how == "hangs":
        compiler.COMPILE_SECONDS = 1.0
    if cover.TIER == "fast":
        compiler._BASE = cover.unoptimised(compiler._BASE)
    x, results, seconds = operands(how, folder), {}, {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "usual":
            save(x)
        for name, function in OPERATIONS.items():
            start = time.perf_counter()
            try:
                results[name] = function(x)
            except Exception:  # noqa: BLE001 - it is the test's to judge
                results[name] = traceback.format_exc()
            seconds[name] = time.perf_counter() - start
    Path(to).write_bytes(pickle.dumps((results, [str(w.message) for w in caught], seconds)))


if __name__ == "__main__":
    main()
