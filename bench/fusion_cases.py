"""Cases of bench/fusion.py: their shapes, their operands, and what is right.

Entries of activations are uniform in [-1, 1), those of weights in that times sqrt(3 / k),
so that sums are near 1, and no function of them is far from where it bends. What is right
is computed in float64. An error of a sum in float32 may be as in `portmm.comparison.data`;
besides, results and values between may be rounded to the case's type a few times, and
roundings of the operands of a second product walk randomly through its sums.
"""

import math
from dataclasses import dataclass, fields

import numpy as np

from portmm.arrays.numpy_arrays import numpy_of
from portmm.comparison.data import POOL, TOLERANCE
from portmm.spec.dtype import BY_NAME

DTYPES = ("f32", "bf16")
GROUPS = ("epilogue", "overhead", "blocks", "attention")
EPILOGUES = ("gelu", "residual", "add2-fastgelu", "requantise")
WEIGHTS = ("w", "up", "down", "a", "b")
VARIANTS = ("bare", "bias", "bias+residual", "bias+gelu")
"""Variants of a case of the group "overhead", timed for portmm alone."""
SCALE = 48.0
"""The factor of results before they are rounded to int8."""
EPS = 1e-6
"""Of RMSNorm."""
BERT = ((128, 768, 768), (128, 3072, 768), (128, 768, 3072))
VIT = ((197, 3072, 768), (197, 768, 3072))
LLAMA = tuple((m, n, k) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)) for m in (1, 16, 128))
MODELS = {"bert": BERT, "vit": VIT, "llama": LLAMA}
ROUNDINGS, WALK = 4, 8
"""Roundings to the case's type of a value, and deviations of a random walk, that are allowed."""
SLACK = 64
"""Roundings in float32 beside those of sums: functions are approximated."""
CHUNK = 1024
QUERIES = 64
"""Queries of each head whose results are judged."""


@dataclass(frozen=True, slots=True)
class Case:
    """A case's computation; of attention m are queries, n keys and k the length of a head.

    Attributes:
        name: tells it from others.
        group: one of GROUPS.
        kind: one of EPILOGUES, "overhead", "mlp", "lora", "rmsnorm", "qkv", "attention".
        dtype: type of operands and results.
        m: rows.
        n: columns of the (first) weight.
        k: its rows.
        parts: columns of each of several weights that make n.
        rank: of LoRA.
        heads: heads of queries.
        kv_heads: heads of keys and values.
        causal: a query sees no later keys.
    """

    name: str
    group: str
    kind: str
    dtype: str
    m: int
    n: int
    k: int
    parts: tuple[int, ...] = ()
    rank: int = 0
    heads: int = 0
    kv_heads: int = 0
    causal: bool = False

    @property
    def flops(self):
        """Operations of the products; masked ones are not counted."""
        if self.kind == "attention":
            return 4 * self.heads * self.m * self.n * self.k // (2 if self.causal else 1)
        once = 2 * self.m * self.n * self.k
        return once * (3 if self.kind == "mlp" else 1) + 2 * self.m * self.rank * (self.n + self.k)


def case_of(kept):
    """A case from its JSON form."""
    known = {f.name for f in fields(Case)}
    return Case(**{k: tuple(v) if isinstance(v, list) else v for k, v in kept.items() if k in known})


def _both(name, *rest, **more):
    """A case in each type."""
    group, kind, *size = rest
    return [Case(f"{name}-{dtype}", group, kind, dtype, *size, **more) for dtype in DTYPES]


def _epilogues():
    for model, shapes in MODELS.items():
        for kind in EPILOGUES:
            for m, n, k in shapes:
                yield from _both(f"{kind}-{model}-{m}x{n}x{k}", "epilogue", kind, m, n, k)


def _overheads():
    for m, n, k in ((512, 512, 512), *BERT, *VIT, *((m, 4096, 4096) for m in (1, 16, 128))):
        yield from _both(f"overhead-{m}x{n}x{k}", "overhead", "overhead", m, n, k)


def _blocks():
    yield from _both("mlp-8x4096x4096", "blocks", "mlp", 8, 4096, 4096)
    for m in (1, 16, 128):
        yield from _both(f"mlp-llama-m{m}", "blocks", "mlp", m, 14336, 4096)
    for m in (16, 128):
        yield from _both(f"lora-m{m}", "blocks", "lora", m, 4096, 4096, rank=16)
    for m in (2, 16, 128):
        yield from _both(f"rmsnorm-m{m}", "blocks", "rmsnorm", m, 6144, 4096)
    yield from _both("qkv-bert-m128", "blocks", "qkv", 128, 2304, 768, parts=(768, 768, 768))
    for m in (1, 16):
        yield from _both(f"qkv-llama-m{m}", "blocks", "qkv", m, 6144, 4096, parts=(4096, 1024, 1024))


def _attentions(lengths):
    for s in lengths:
        for heads, d in ((12, 64), (8, 128)):
            for causal in (False, True):
                form = {"heads": heads, "kv_heads": heads, "causal": causal}
                name = f"attention-{heads}x{s}x{d}{'-causal' if causal else ''}"
                yield from _both(name, "attention", "attention", s, s, d, **form)


def cases(groups=GROUPS):
    """Every case of some groups; those that take longest are the last of each."""
    decode = _both("decode-32of8x4096x128", "attention", "attention", 1, 4096, 128, heads=32, kv_heads=8)
    every = [*_epilogues(), *_overheads(), *_blocks(), *_attentions((128, 512, 2048)), *decode, *_attentions((8192,))]
    return [case for case in every if case.group in groups]


def smoke_cases(groups=GROUPS):
    """A small case of every kind, some in bfloat16 too."""
    found = [Case(f"{kind}-small-f32", "epilogue", kind, "f32", 9, 80, 48) for kind in EPILOGUES]
    found += [Case("gelu-small-bf16", "epilogue", "gelu", "bf16", 9, 80, 48)]
    found += [Case("overhead-small-f32", "overhead", "overhead", "f32", 9, 80, 48)]
    found += [Case("mlp-small-f32", "blocks", "mlp", "f32", 9, 80, 48)]
    found += [Case("lora-small-f32", "blocks", "lora", "f32", 9, 80, 48, rank=4)]
    found += [Case("rmsnorm-small-f32", "blocks", "rmsnorm", "f32", 9, 80, 48)]
    found += [Case("qkv-small-f32", "blocks", "qkv", "f32", 9, 80, 48, parts=(48, 16, 16))]
    form = {"heads": 4, "kv_heads": 2, "causal": True}
    found += [Case("attention-small-f32", "attention", "attention", "f32", 40, 40, 32, **form)]
    return [case for case in found if case.group in groups]


# -- operands ---------------------------------------------------------------------


def shapes_of(case):
    """Name of each operand -> its shape, and the rows of a weight whose entries are scaled, 0 for none."""
    m, n, k, r = case.m, case.n, case.k, case.rank
    if case.kind == "attention":
        kv = (1, case.kv_heads, n, k)
        return {"q": ((1, case.heads, m, k), 1), "k": (kv, 1), "v": (kv, 1)}
    found = {"x": ((m, k), 0), "w": ((k, n), k)}
    more = {
        "gelu": ("bias",), "residual": ("bias", "residual"), "add2-fastgelu": ("residual", "residual2"),
        "requantise": ("bias",), "overhead": ("bias", "residual"), "mlp": ("up", "down"), "lora": ("a", "b"),
        "rmsnorm": ("gain",), "qkv": (),
    }[case.kind]  # fmt: skip
    others = {
        "bias": ((n,), 0), "residual": ((m, n), 0), "residual2": ((m, n), 0), "up": ((k, n), k),
        "down": ((n, k), n), "a": ((k, r), k), "b": ((r, n), r), "gain": ((k,), 0),
    }  # fmt: skip
    return found | {name: others[name] for name in more}


def operands(case):
    """Random operands, always the same; values repeat, because fresh ones would take longer than timing them."""
    rng, dtype = np.random.default_rng(0), numpy_of(case.dtype)
    pool = rng.random(POOL, np.float32) * 2 - 1
    made = {}
    for i, (name, (shape, rows)) in enumerate(shapes_of(case).items()):
        values = np.roll(pool, i * 123_457) * np.float32(math.sqrt(3 / rows) if rows else 1)
        made[name] = np.resize((abs(values) + 0.5 if name == "gain" else values).astype(dtype), shape)
    return made


# -- what is right ----------------------------------------------------------------


def _product(x, w):
    """In float64, by columns: a large weight would not fit twice."""
    return np.concatenate([x @ w[:, i : i + CHUNK].astype(np.float64) for i in range(0, w.shape[1], CHUNK)], axis=1)


def _most(w):
    return float(max(abs(float(w.max())), abs(float(w.min()))))


def _erf(x):
    """The error function, as `math` has it; there is none in NumPy."""
    return np.fromiter(map(math.erf, x.ravel()), np.float64, x.size).reshape(x.shape)


def _silu(x):
    return x / (1 + np.exp(-x))


def _gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _f64(d, name):
    return d[name].astype(np.float64)


def _sum_error(k, x, w):
    """Of sums of k products in float32."""
    return TOLERANCE * k * BY_NAME["f32"].eps * x * _most(w)


def _walk(values, rows):
    """The size of a random walk: one step for each value, as long as it, times an entry of a weight of so many rows."""
    return np.sqrt((values**2).sum(-1, keepdims=True) / rows)


def right(case, d, variant=""):
    """A case's exact result, the error bound, and the queries that it covers (None: all rows)."""
    v, u = BY_NAME[case.dtype].eps, BY_NAME["f32"].eps
    if case.kind == "attention":
        return _attention(case, d, v, u)
    x = _f64(d, "x")
    if case.kind == "rmsnorm":
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * _f64(d, "gain")
    sums = _product(x, d["w"])
    error, walk, most = _sum_error(case.k, np.abs(x).max(), d["w"]), 0.0, np.abs(sums)
    kind = _VARIANT_KINDS.get(variant, case.kind)
    add = [name for name in ("bias", "residual", "residual2") if name in d and (not variant or name in variant)]
    total = sums + sum(_f64(d, name) for name in add) if add else sums
    most = most + sum(np.abs(_f64(d, name)) for name in add) if add else most
    if kind == "gelu":
        want = 0.5 * total * (1 + _erf(total * math.sqrt(0.5)))
    elif kind == "add2-fastgelu":
        want = _gelu_tanh(total)
    elif kind == "requantise":
        want, error, most = np.clip(np.maximum(total, 0) * SCALE, -128, 127), error * SCALE, most * SCALE
    elif kind == "mlp":
        hidden = _silu(sums) * _product(x, d["up"])
        want = _product(hidden, d["down"])
        error = 2 * error + _sum_error(case.n, np.abs(hidden).max(), d["down"])
        walk, most = _walk(hidden, case.n), np.abs(want)
    elif kind == "lora":
        low = _product(x, d["a"])
        want = sums + _product(low, d["b"])
        error, walk, most = 4 * error, _walk(low, case.rank), most + np.abs(want)
    else:
        want = total
        walk = _walk(x, case.k) if kind == "rmsnorm" else 0.0
    bound = 2 * error + (ROUNDINGS * v + SLACK * u) * most + WALK * v * walk + (0.5 if kind == "requantise" else 0)
    return want, np.broadcast_to(bound, want.shape), None


_VARIANT_KINDS = {"bare": "qkv", "bias": "residual", "bias+residual": "residual", "bias+gelu": "gelu"}


def _attention(case, d, v, u):
    """Of some queries."""
    rows = np.unique(np.linspace(0, case.m - 1, min(case.m, QUERIES)).astype(int))
    q, k, values = d["q"][:, :, rows].astype(np.float64), _f64(d, "k"), _f64(d, "v")
    wants, bounds = [], []
    for h in range(case.heads):
        at = h * case.kv_heads // case.heads
        scores = q[0, h] @ k[0, at].T / math.sqrt(case.k)
        if case.causal:
            scores[np.arange(case.n) > rows[:, None] + case.n - case.m] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        want = p @ values[0, at]
        walk = np.sqrt(p**2 @ values[0, at] ** 2)
        wants.append(want)
        scored = TOLERANCE * math.sqrt(case.k) * u * 3 + SLACK * u
        bounds.append(scored * (1 + np.abs(want)) + 2 * WALK * v * walk + ROUNDINGS * v * np.abs(want))
    return np.stack(wants)[None], np.stack(bounds)[None], rows


def worst(result, want, bound, rows=None):
    """The largest error as a share of what is allowed: more than 1 is wrong, infinity where something is not finite."""
    if not np.isfinite(result).all():
        return math.inf
    got = result.astype(np.float64)
    got = got if rows is None else got[..., rows, :]
    if got.shape != want.shape:
        return math.inf
    return float((np.abs(got - want) / bound).max(initial=0.0))
