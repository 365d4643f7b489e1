"""How portmm and NumPy compute the cases of bench/fusion.py.

An adapter opens a library and returns a `Library`; its `prepare` gives name of a method ->
a function that makes ready and returns what is timed: see `fusion_worker`. Weights are packed
untimed. Every call makes a new result, as those of other libraries do.
"""

import math
from importlib import metadata, util
from itertools import accumulate, pairwise

import numpy as np
from fusion_cases import EPS, SCALE, WEIGHTS

import portmm as pm
from portmm.arrays.numpy_arrays import numpy_of
from portmm.comparison.peers import Library, MissingError, UnsupportedError

MOST_SCORES = 1 << 29
"""Bytes of a matrix of scores, past which attention in several steps is not tried."""
NAMES = {"m": "m", "n": "n", "b": "b"}


def cut(y, parts):
    """The columns of y that belong to each of several weights."""
    edges = [0, *accumulate(parts)]
    return [y[:, i:j] for i, j in pairwise(edges)]


# -- portmm -----------------------------------------------------------------------


def _opened(setup, prepare):
    if util.find_spec("portmm.spec.elementwise") is None:
        raise MissingError("this portmm fuses nothing")
    pm.set_num_threads(setup.threads)
    return Library(f"portmm {metadata.version('portmm')}", prepare, dtypes=None)


def open_fused(setup):
    """portmm, with everything in as few kernels as it makes of it."""
    return _opened(setup, lambda case, d: _FUSED[case.group](case, d))


def open_unfused(setup):
    """portmm, a product at a time and then what becomes of it, by its kernels over rows or by NumPy."""
    return _opened(setup, _unfused)


def after(case, d):
    """An epilogue: a function of the sums of a product."""
    from portmm.spec import elementwise as v

    bias, r, r2 = (d.get(name) for name in ("bias", "residual", "residual2"))
    return {
        "gelu": lambda acc, i: v.gelu(acc + bias[i.n]),
        "residual": lambda acc, i: acc + bias[i.n] + r[i.m, i.n],
        "add2-fastgelu": lambda acc, i: v.fast_gelu(acc + r[i.m, i.n] + r2[i.m, i.n]),
        "requantise": lambda acc, i: v.cast(v.relu(acc + bias[i.n]) * SCALE, np.int8),
    }[case.kind]


def _epilogue(case, d):
    x, w, epilogue = d["x"], pm.pack(d["w"]), after(case, d)
    return {"epilogue": lambda: lambda: pm.matmul(x, w, epilogue=epilogue)}


def _overhead(case, d):
    from portmm.spec import elementwise as v

    x, w, bias, r = d["x"], pm.pack(d["w"]), d["bias"], d["residual"]
    out = np.empty((case.m, case.n), x.dtype)
    ends = {
        "bias": lambda acc, i: acc + bias[i.n],
        "bias+residual": lambda acc, i: acc + bias[i.n] + r[i.m, i.n],
        "bias+gelu": lambda acc, i: v.gelu(acc + bias[i.n]),
    }
    made = {name: lambda f=f: lambda: pm.matmul(x, w, out=out, epilogue=f) for name, f in ends.items()}
    return {"bare": lambda: lambda: pm.matmul(x, w, out=out)} | made


def _block(case, d):
    by_hand, fused = {"mlp": _mlp, "lora": _lora, "rmsnorm": _rmsnorm, "qkv": _qkv}[case.kind](case, d)
    if hasattr(pm, "fuse"):

        def make():
            function, x = pm.fuse(fused), d["x"]
            return lambda: function(x)

        return {"fuse": make} | by_hand
    return by_hand


def _mlp(_case, d):
    from portmm.spec import elementwise as v

    x, gate, up, down = d["x"], *(pm.pack(d[name]) for name in ("w", "up", "down"))

    def fused(x):
        return pm.matmul(v.silu(pm.matmul(x, gate)) * pm.matmul(x, up), down)

    def by_hand():
        g = pm.matmul(x, gate, epilogue=lambda acc, _i: v.silu(acc))
        return pm.matmul(pm.matmul(x, up, epilogue=lambda acc, i: acc * g[i.m, i.n]), down)

    return {"by hand": lambda: by_hand}, fused


def _lora(_case, d):
    x, w, a, b = d["x"], *(pm.pack(d[name]) for name in ("w", "a", "b"))

    def fused(x):
        return pm.matmul(x, w) + pm.matmul(pm.matmul(x, a), b)

    def by_hand():
        low = pm.matmul(pm.matmul(x, a), b)
        return pm.matmul(x, w, epilogue=lambda acc, i: acc + low[i.m, i.n])

    return {"by hand": lambda: by_hand}, fused


def _rmsnorm(_case, d):
    from portmm.spec import elementwise as v

    x, gain, w = d["x"], d["gain"], pm.pack(d["w"])

    def fused(x):
        return pm.matmul(v.cast(v.rms_norm(x, gain, EPS), x.dtype), w)

    def by_hand():
        return pm.matmul(x, w, prologue_a=lambda a, i: v.rms_norm(a, gain[i.k], EPS))

    return {"by hand": lambda: by_hand}, fused


def _qkv(case, d):
    x, w = d["x"], pm.pack(d["w"])
    several = [pm.pack(np.ascontiguousarray(part)) for part in cut(d["w"], case.parts)]

    def fused(x):
        return tuple(pm.matmul(x, part) for part in several)

    return {"one product": lambda: lambda: cut(pm.matmul(x, w), case.parts)}, fused


def _attention(case, d):
    if not hasattr(pm, "attention"):
        raise UnsupportedError("this portmm has no attention")
    q, k, v = d["q"], d["k"], d["v"]
    return {"attention": lambda: lambda: pm.attention(q, k, v, causal=case.causal)}


_FUSED = {"epilogue": _epilogue, "overhead": _overhead, "blocks": _block, "attention": _attention}


def _rows(function, *arrays, dtype=None):
    """A kernel over rows."""
    from portmm.ops.rowwise import over_rows

    return over_rows(function, arrays, NAMES, dtype=dtype)[0][0]


def _unfused(case, d):
    held = d | {name: pm.pack(d[name]) for name in WEIGHTS if name in d}
    found = {}
    if case.dtype == "f32":
        found = {f"{name}, NumPy": make for name, make in by_numpy(case, held, pm.matmul).items()}
    if case.kind == "attention":
        return found or {"three steps": lambda: _scored(case, d)}
    if case.kind == "qkv":
        several = [pm.pack(np.ascontiguousarray(part)) for part in cut(d["w"], case.parts)]
        x = d["x"]
        return found | {"products": lambda: lambda: [pm.matmul(x, part) for part in several]}
    return found | {"rows": lambda: _by_rows(case, held)}


def _by_rows(case, d):
    """Products, and kernels over rows between them."""
    from portmm.spec import elementwise as v

    x, w, up, down, a, b, gain = (d.get(name) for name in ("x", *WEIGHTS, "gain"))
    end, narrow = after(case, d) if case.group == "epilogue" else None, numpy_of(case.dtype)

    def mlp():
        hidden = _rows(lambda g, u, _i: v.silu(g) * u, pm.matmul(x, w), pm.matmul(x, up))
        return pm.matmul(hidden, down)

    def lora():
        return _rows(lambda y, z, _i: y + z, pm.matmul(x, w), pm.matmul(pm.matmul(x, a), b))

    def rmsnorm():
        return pm.matmul(_rows(lambda y, i: v.rms_norm(y, gain[i.n], EPS), x), w)

    def ended():
        return _rows(end, pm.matmul(x, w, dtype=np.float32), dtype=narrow)

    return {"mlp": mlp, "lora": lora, "rmsnorm": rmsnorm}.get(case.kind, ended)


def _scored(case, d):
    """Attention by two products and a softmax between."""
    from portmm.spec import elementwise as v

    _fits(case)
    q, k, values = grouped(case, d)
    keys, shift, factor = k.swapaxes(-1, -2), case.n - case.m, 1 / math.sqrt(case.k)
    if case.causal:
        function = lambda s, i: v.softmax(v.where(i.n <= i.m + shift, s * factor, -np.inf))  # noqa: E731
    else:
        function = lambda s, _i: v.softmax(s * factor)  # noqa: E731
    return lambda: pm.matmul(_rows(function, pm.matmul(q, keys)), values).reshape(d["q"].shape)


# -- NumPy ------------------------------------------------------------------------


def open_numpy(_setup):
    """NumPy, in float32."""
    return Library(f"numpy {np.__version__}", _numpy, dtypes=None)


def _numpy(case, d):
    if case.dtype != "f32" or case.kind == "gelu":
        raise UnsupportedError("NumPy has no error function" if case.dtype == "f32" else "NumPy has no bfloat16")
    return by_numpy(case, d, np.matmul)


def _fits(case):
    if 4 * case.heads * case.m * case.n > MOST_SCORES:
        raise UnsupportedError("too many scores to keep")


def grouped(case, d):
    """Queries, keys and values, heads that share keys side by side in one matrix of queries."""
    if case.heads == case.kv_heads:
        return d["q"], d["k"], d["v"]
    if case.m == 1:
        return d["q"].reshape(1, case.kv_heads, -1, case.k), d["k"], d["v"]
    return d["q"], *(np.repeat(d[name], case.heads // case.kv_heads, axis=1) for name in "kv")


def by_numpy(case, d, multiply):
    """Ways of a case in float32: some product, and NumPy for the rest."""
    if case.kind == "attention":
        _fits(case)
        return {"three steps": lambda: _numpy_attention(case, d, multiply)}
    x, w, up, down, a, b = (d.get(name) for name in ("x", *WEIGHTS))
    bias, r, r2, gain = (d.get(name) for name in ("bias", "residual", "residual2", "gain"))
    ways = {
        "residual": lambda: _added(multiply(x, w), bias, r),
        "add2-fastgelu": lambda: _fast_gelu(_added(multiply(x, w), r, r2)),
        "requantise": lambda: _codes(_added(multiply(x, w), bias)),
        "mlp": lambda: multiply(_silu(multiply(x, w)) * multiply(x, up), down),
        "lora": lambda: _added(multiply(x, w), multiply(multiply(x, a), b)),
        "rmsnorm": lambda: multiply(x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * gain, w),
        "qkv": lambda: cut(multiply(x, w), case.parts),
    }
    return {"products": lambda: ways[case.kind]} if case.kind in ways else {}


def _added(y, *others):
    for other in others:
        y += other
    return y


def _silu(y):
    return y / (1 + np.exp(-y))


def _fast_gelu(y):
    return 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * (y * y * y))))


def _codes(y):
    np.maximum(y, 0, out=y)
    y *= np.float32(SCALE)
    return np.clip(np.rint(y, out=y), -128, 127, out=y).astype(np.int8)


def _numpy_attention(case, d, multiply):
    q, k, v = grouped(case, d)
    keys, factor = k.swapaxes(-1, -2), np.float32(1 / math.sqrt(case.k))
    hidden = np.arange(case.n) > np.arange(case.m)[:, None] + case.n - case.m if case.causal else None

    def call():
        scores = multiply(q, keys)
        scores *= factor
        if hidden is not None:
            np.putmask(scores, np.broadcast_to(hidden, scores.shape), -np.inf)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return multiply(scores, v).reshape(d["q"].shape)

    return call
