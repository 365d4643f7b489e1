"""Fused expressions in tests: what they come to in float64, operands for them, and ways to run.

Errors are followed through every operation, to first order and more: what a result may
differ by is scaled to its expression. Where a comparison could go either way, a value
has no bound, and is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import problems
import runs
from operands import Case, Extra, Laid, lay, poison
from operands import case as case_of

from portmm.ir.interpreter import numpy_type
from portmm.spec.dtype import BY_NAME, spell
from portmm.spec.epilogue import (
    PRODUCT,
    C,
    Fused,
    Operand,
    acc,
    column_reduction,
    extent,
    index,
    load,
    number,
    reduction,
    varies,
)
from portmm.spec.expr import apply, const, ordered, real
from portmm.spec.expr_functions import bits, fma, from_bits, select, sqrt
from portmm.spec.expr_ops import OPS
from portmm.spec.problem import Problem

U = 2.0**-24
TINY = 2.0**-149
GREATEST = float(np.finfo(np.float32).max)


# -- meaning ----------------------------------------------------------------------


def meaning(root, leaf, columns):
    """The value of an expression, and how far a kernel's may be from it; infinite where it may be anything.

    `leaf` gives the value and error of loads, sums, indices and numbers; they broadcast to (batch, m, n).
    """
    done = {}
    with np.errstate(all="ignore"):
        for x in ordered((root,)):
            if x.op == "const":
                value = x.args[0]
                found = (np.float64(value) if x.dtype == "f32" else np.asarray(value, _KINDS[x.dtype])), np.float64(0)
            elif x.op == "reduce":
                found = _reduced(x.args[0], *done[x.args[1]], columns)
            elif x.op in OPS:
                found = _operation(x, [done[y] for y in x.args])
            else:
                found = leaf(x)
            done[x] = found if x.dtype != "f32" else _overflown(*found)
    return done[root]


_KINDS = {"s32": np.int32, "mask": np.bool_}


def _overflown(v, e):
    """Values that may exceed f32 are not compared; those that do are infinite."""
    near = (np.abs(v) > 0.99 * GREATEST) & np.isfinite(v)
    return v, np.where(near | np.isnan(e), np.inf, e)


def _rounded(v, e):
    return v, np.where(np.isfinite(v), e + 1.01 * U * (np.abs(v) + e) + TINY, e)


def _reduced(kind, v, e, columns):
    v, e = (np.broadcast_to(x, (*np.broadcast_shapes(np.shape(v), (1, 1, 1))[:2], columns)) for x in (v, e))
    if kind == "max":
        top = np.max(v, -1, keepdims=True, initial=-np.inf)
        return top, np.max(e, -1, keepdims=True, initial=0)
    size = np.abs(v).sum(-1, keepdims=True)
    return v.sum(-1, keepdims=True), e.sum(-1, keepdims=True) + 1.01 * columns * U * (size + e.sum(-1, keepdims=True))


def _operation(x, args):  # noqa: C901, PLR0911 - an operation each
    op, result = x.op, OPS[x.op][1]
    values, errors = [v for v, _ in args], [e for _, e in args]
    whole = sum(errors)
    unsure = np.where(whole > 0, np.inf, 0.0)
    kind = x.args[-1].dtype
    if op == "select":
        either = np.where(values[0], errors[1], errors[2])
        return np.where(*values), np.where(errors[0] > 0, np.inf, either)
    if kind != "f32" and op not in {"float", "from_bits"}:
        return result(*values), unsure
    if op in ("lt", "le", "eq", "ne"):
        a, b = values
        near = (np.abs(a - b) <= whole) | np.isinf(whole)
        return result(a, b), np.where(near & (whole > 0), np.inf, 0.0)
    if op == "float":
        return _rounded(values[0].astype(np.float64), unsure)
    if op == "from_bits":
        return result(values[0]).astype(np.float64), unsure
    if op in ("bits", "int"):
        return result(np.asarray(values[0], np.float32)), unsure
    v = result(*values) if op != "fma" else values[0] * values[1] + values[2]
    if op in ("neg", "abs"):
        return v, errors[0]
    if op in ("min", "max"):
        return v, np.maximum(*errors)
    if op in ("add", "sub"):
        return _rounded(v, whole)
    (a, ea), (b, eb) = (args[0], args[1]) if len(args) > 1 else (args[0], args[0])
    product = _times(np.abs(a), eb) + _times(np.abs(b), ea) + ea * eb
    if op == "mul":
        return _rounded(v, product)
    if op == "fma":  # the product may be rounded on its own
        return _rounded(v, product + 1.01 * U * (np.abs(a * b) + product) + TINY + errors[2])
    if op == "div":
        e = np.where(np.abs(b) > 2 * eb, (ea + np.abs(v) * eb) / (np.abs(b) - eb), np.inf)
        return _rounded(v, np.where(whole > 0, e, 0))
    low, high = np.sqrt(np.maximum(a - ea, 0)), np.sqrt(a + ea)
    e = np.where(ea > 0, np.where(a > ea, np.maximum(v - low, high - v), np.inf), 0)
    return _rounded(v, e)


def _times(a, e):
    return np.where(e == 0, 0, a * e)


def check(got, want, bound, dtype, what=""):
    """Elements of a result, as a type holds them, are within the bound."""
    want, bound = np.broadcast_to(want, got.shape), np.broadcast_to(bound, got.shape)
    with np.errstate(all="ignore"):
        got = got.astype(np.float64) if dtype != "s32" else got
        if dtype in ("s8", "u8"):
            info = np.iinfo(numpy_type(dtype))
            want = np.where(np.isnan(want), np.nan, np.clip(want, info.min, info.max))
            bound = np.where(np.isnan(want), np.inf, bound + 0.5001)
        elif dtype in ("f16", "bf16"):
            finite = np.isfinite(want)
            edge = (np.abs(want) > 65000 if dtype == "f16" else np.abs(want) > 3e38) & finite
            tiny = 2.0**-25 if dtype == "f16" else 2.0**-134
            bound = np.where(edge, np.inf, np.where(finite, bound + BY_NAME[dtype].eps * np.abs(want) + tiny, bound))
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        off = ~(same | (np.abs(got - want) <= bound) | np.isinf(bound))
    first = tuple(np.argwhere(off)[0]) if off.any() else ()
    assert not off.any(), (
        f"{what}: {off.sum()} of {off.size} wrong, first at {first}: {got[first]}, not {want[first]} +- {bound[first]}"
    )


# -- expressions ------------------------------------------------------------------


def every_operation():
    """Each operation of `expr_ops.OPS` on operands of each type that it takes, with literals on either side."""
    operands = (Operand("f32", "bmn"), Operand("f32", "n"), Operand("s32", "mn"), Operand("s32", "bm"))
    x, y, i, j = (load(at, o.dtype) for at, o in enumerate(operands))
    p, q = x < y, i < j
    reals = [
        x + y, x - y, 2.5 - x, x * y, x / y, 3.0 / y, -x, abs(x), apply("min", x, y), apply("max", x, y),
        apply("min", x, 0.5), apply("max", 1.0, y), fma(x, y, 2.0), fma(2.0, x, y), sqrt(abs(x)), sqrt(x),
        from_bits(bits(x) ^ (bits(y) & 0x7FFFFF)), apply("float", i), select(p, x, y), select(q, -0.0, x),
        select(p, x, np.inf), x * -0.0 + np.nan, index("n") * 1.0 + index("m") + index("b") * 0.5, real(extent("n")),
        number(1) * x - number(0),
    ]  # fmt: skip
    wholes = [
        i + j, i - j, 7 - i, i * j * 123456789, -i, abs(i), apply("min", i, j), apply("max", i, 3), i & j, i | 5,
        i ^ j, ~i, i << 28, (i * 99999999) >> 5, select(p, i, j), select(q, -(2**31), j), apply("int", x * 3.0),
        bits(x * 2.0), index("n") - index("m"), apply("int", select(p, x, 3e9)),
    ]  # fmt: skip
    masks = [
        p, x <= y, x == y, x != y, x > 0.0, i <= j, i == j, i != j, p & q, p | q, p ^ q, ~p, select(q, p, ~p), q & True,
        select(p, q, False),
    ]  # fmt: skip
    found = [(v, "f32") for v in reals] + [(v, "s32") for v in wholes] + [(v, "f32") for v in map(real, masks)]
    results = tuple(Operand(t, "bmn", dense=k % 7 > 0) for k, (_, t) in enumerate(found))
    return Fused((*operands, *results), tuple((4 + k, v) for k, (v, _) in enumerate(found)))


TYPES = ("f32", "bf16", "f16", "s8", "u8", "s32")


def every_type(dtypes=TYPES):
    """Operands of every type, dense and not, by every set of axes; results of every type, and a value for each row."""
    axes = ("bmn", "mn", "n", "bm", "m", "", "b", "bn")
    operands = [Operand(t, axes[(3 * k + i) % 8], i % 2 == 0) for k, t in enumerate(dtypes) for i in range(3)]
    values = [load(i, o.dtype) for i, o in enumerate(operands)]
    total = sum((v * (1.0 / (1 + i)) for i, v in enumerate(values)), 0.0)
    most = apply("max", values[0], values[1])
    results, roots = [], []
    for k, t in enumerate(dtypes):
        whole = t == "s32"
        one = next((v for v, o in zip(values, operands, strict=True) if o.dtype == "s32"), None)
        results += [Operand(t, "bmn", k % 2 > 0), Operand(t, "bm")]
        fixed = index("m") * 3 - index("b") if whole else reduction("add", most) * 0.25 + 1.0
        roots += [one * 3 + index("n") if whole else total * (k + 1.0), fixed]
    first = len(operands)
    return Fused((*operands, *results), tuple((first + i, v) for i, v in enumerate(roots)))


def by_rows():
    """Softmax, layer norm, sums of what varies along n only or not at all: passes that need each other."""
    operands = (Operand("f32", "bmn"), Operand("f32", "n"), Operand("f32", "mn", dense=False))
    x, w, y = (load(i, "f32") for i in range(3))
    top = reduction("max", x)
    width = real(extent("n"))
    e = fma(x - top, fma(x - top, fma(x - top, 0.01, 0.1), 0.5), 1.0) + abs(x - top)
    mean = reduction("add", y) / width
    centred = y - mean
    roots = [
        e / reduction("add", e), centred / sqrt(reduction("add", centred * centred) / width + 1e-5) * w, top,
        mean, reduction("max", w) + reduction("add", const(1.0) * w), reduction("add", select(x > 0.0, e, 0.0)),
        select(x > top - 1.0, centred, w), reduction("max", abs(x)) + reduction("add", e) + x,
    ]  # fmt: skip
    axes = ["bmn", "bmn", "bm", "bm", "bm", "bm", "bmn", "bmn"]
    results = tuple(Operand("f32", a) for a in axes)
    return Fused((*operands, *results), tuple((3 + i, v) for i, v in enumerate(roots)))


def columns():
    """Sums and maxima down columns, of values by every axis, and what becomes of them."""
    operands = (Operand("f32", "bmn"), Operand("bf16", "n"), Operand("f32", "bm"), Operand("s8", "mn", dense=False))
    x, w, y, z = (load(i, o.dtype) for i, o in enumerate(operands))
    roots = [
        column_reduction("add", x * y) * w,
        column_reduction("max", x + z),
        column_reduction("add", const(1.0) * w) + column_reduction("add", x) + index("n"),
    ]
    results = tuple(Operand(t, "bn") for t in ("f32", "f16", "f32"))
    return Fused((*operands, *results), tuple((4 + i, v) for i, v in enumerate(roots)))


def epilogues():
    """Epilogues of every kind: one result, several, operands of many kinds, places."""
    x = acc()
    bias, residual = load(0, "f32"), load(1, "f32")
    plain = Fused((Operand("f32", "n"), Operand("f32", "bmn")), ((C, apply("max", x + bias, 0.0) + residual),))
    kinds = (
        Operand("f32", "m"), Operand("bf16", "bmn", dense=False), Operand("s8", "mn"), Operand("f16", "n", dense=False),
        Operand("u8", "b"), Operand("f32", ""), Operand("bf16", "bmn"), Operand("f32", "bmn", dense=False),
        Operand("s8", "bmn"), Operand("f16", "bm"),
    )  # fmt: skip
    v = [load(i, o.dtype) for i, o in enumerate(kinds)]
    total = fma(x, v[0], v[1]) + v[2] * 0.125 - v[3] * number(1)
    many = Fused(
        kinds,
        (
            (C, total),
            (6, x * number(0) + v[5]),
            (7, abs(total) * 0.5),
            (8, total + v[4] * 0.01),
            (9, v[0] + index("m")),
        ),
    )
    whole = (Operand("s32", "n"), Operand("s32", "bmn"), Operand("s32", "bmn"))
    i, j = load(0, "s32"), load(1, "s32")
    kept = apply("eq", ((index("m") * 40503) ^ (index("n") * 977 + index("b"))) & 1, 1)
    places = Fused(whole, ((C, select(kept, x / sqrt(x * x + 1.0), real(i))), (2, i * 3 - j + index("n"))))
    return {"plain": plain, "many": many, "places": places}


# -- operands ---------------------------------------------------------------------


@dataclass(frozen=True)
class Fusing:
    """A case of a kernel with fused expressions, and what becomes of each of its results."""

    case: Case
    results: tuple[tuple[int, str, np.ndarray, np.ndarray], ...]
    written: dict[int, Laid]

    def parts(self) -> tuple[object, ...]:
        """What the judgement of results depends on, beside the operands."""
        return tuple(x for result in self.results for x in result)

    def check(self, found: list[np.ndarray], what: object = "") -> None:
        """All results, and nothing beside them was written; operands that are read are as they were."""
        for to, dtype, want, bound in self.results:
            laid = self.case.c if to == C else self.written[to]
            flat = found[0] if to == C else found[1 + to]
            check(flat[laid.places()], want, bound, dtype, f"{what} result {to}")
            rest = np.ones(flat.size, bool)
            rest[laid.places()] = False
            assert (flat[rest] == poison(flat.dtype)).all(), f"{what}: wrote beside result {to}"
        for i, x in enumerate(self.case.operands):
            if i not in self.written:
                assert found[1 + i].tobytes() == x.flat.tobytes(), f"{what}: wrote to operand {i}"


SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-42, 0.5, 2.5)


def draw(rng, dtype, shape, special):
    """Values of a type; some of them odd."""
    kind = numpy_type(dtype)
    if kind.kind in "iu":
        low, high = (-100, 100) if dtype == "s32" else (np.iinfo(kind).min, np.iinfo(kind).max)
        return rng.integers(low, high, shape, endpoint=True).astype(kind)
    x = rng.standard_normal(shape) * 2
    if special:
        x = np.where(rng.random(shape) < 0.2, rng.choice(SPECIAL, shape), x)
    with np.errstate(all="ignore"):
        return x.astype(kind)


def operand(rng, x, extents, special):
    """Memory for an operand that is read: its values, (b, m, n) with 1 where it does not vary, and where they lie."""
    shape = tuple(extents[axis] if axis in x.axes else 1 for axis in PRODUCT)
    values = draw(rng, x.dtype, shape, special)
    zero = "m" in x.axes and rng.random() < 0.2  # the same row again and again
    if zero:
        values[:] = values[:, :1]
    step = 1 if x.dense else int(rng.choice([2, -1, -3]))
    gap = int(rng.integers(0, 4))
    row = 0 if zero else (shape[2] * abs(step) + gap) * int(rng.choice([1, -1]))
    item = (shape[1] * abs(row) if not zero else shape[2] * abs(step)) + gap + abs(step)
    spans = [max(n - 1, 0) * abs(s) for n, s in zip(shape, (item, row, step), strict=True)]
    first = spans[1] * (row < 0) + spans[2] * (step < 0)
    flat = np.full(sum(spans) + 1, poison(values.dtype), values.dtype)
    q, i, j = np.ogrid[tuple(slice(n) for n in shape)]
    flat[first + q * item + i * row + j * step] = values
    steps = tuple(s if axis in x.axes else 0 for axis, s in zip(PRODUCT, (item, row, step), strict=True))
    return Extra(flat, first, steps), values


def result(x, extents, gap):
    """Memory for an operand that is written."""
    shape = tuple(extents[axis] if axis in x.axes else 1 for axis in PRODUCT)
    wide = 1 if x.dense else 3
    dtype = numpy_type(x.dtype)
    blank = np.full(shape, poison(dtype) + 1 if dtype.kind in "iu" else np.nan, dtype)
    row = shape[2] * wide + gap
    extent = max(shape[1] - 1, 0) * row + max(shape[2] - 1, 0) * wide + 1
    flat = np.full(max(shape[0] - 1, 0) * (extent + gap) + extent, poison(dtype), dtype)
    laid = Laid(flat, 0, extent + gap, row, wide, shape)
    flat[laid.places()] = blank
    steps = tuple(s if axis in x.axes else 0 for axis, s in zip(PRODUCT, (laid.item, row, wide), strict=True))
    return Extra(flat, 0, steps), laid


def fusing(fused, base, acc, rng, special):
    """Operands, and what results come to, around a case."""
    p = base.problem
    extents = {"b": p.batch, "m": p.m, "n": p.n}
    written = dict(fused.results)
    extras, laid, values = [], {}, {}
    for i, x in enumerate(fused.operands):
        if i in written:
            extra, laid[i] = result(x, extents, i % 3)
        else:
            extra, values[i] = operand(rng, x, extents, special)
        extras.append(extra)
    numbers = rng.standard_normal(max(1, fused.numbers)).astype(np.float32)
    places = dict(zip(PRODUCT, np.ogrid[: p.batch, : p.m, : p.n], strict=True))

    def leaf(x):
        none = np.float64(0)
        if x.op == "acc":
            return acc
        if x.op == "load":
            found = values[x.args[0]]
            return (found if x.dtype == "s32" else found.astype(np.float64)), none
        if x.op == "index":
            return places[x.args[0]].astype(np.int32), none
        if x.op == "extent":
            return np.full((1, 1, 1), p.n, np.int32), none
        return np.full((1, 1, 1), numbers[x.args[0]], np.float64), none

    due = []
    for to, x in fused.results:
        want, bound = meaning(x, leaf, p.n)
        due.append((to, p.types[2] if to == C else fused.operands[to].dtype, want, bound))
    case = replace(base, operands=tuple(extras), numbers=numbers)
    return Fusing(case, tuple(due), laid)


def rows_case(fused, size, batch=1, seed=0, *, special=False):
    """Operands for expressions over rows."""
    rng = np.random.default_rng(seed)
    (m, n), one = size, np.zeros(1, np.float32)
    steps = ("a_m", "a_k", "a_batch", "b_k", "b_n", "b_batch", "c_m", "c_n", "c_batch")
    fields = dict.fromkeys(steps, 0) | {"m": m, "n": n, "k": 1, "batch": batch}
    c = Laid(one.copy(), 0, 0, 0, 0, (1, 1, 1))
    base = Case(Problem(m, n, 1, batch=batch), fields, one, 0, one, 0, c, one, one)
    return fusing(fused, base, None, rng, special)


def gemm_case(p, fused, seed=0, *, special=False):
    """Operands for a product with an epilogue."""
    a, b, _ = p.types
    word = spell(a, b, "f32")
    plain = replace(p, dtype=word, **({"fused": ""} | problems.ended(word, {})))
    base = case_of(plain, seed, floats=True)
    unset = poison(numpy_type(p.types[2]))
    blank = np.full((p.batch, p.m, p.n), unset + 1 if unset.dtype.kind in "iu" else np.nan, numpy_type(p.types[2]))
    c = lay(blank, p.c, 3)
    fields = base.fields | {"c_m": c.row, "c_n": c.col, "c_batch": c.item}
    base = replace(base, problem=p, c=c, fields=fields)
    return fusing(fused, base, (base.want, base.bound), np.random.default_rng(seed + 1), special)


# -- running ----------------------------------------------------------------------


def interpreted(kernel, f, workers=1, shuffle=0):
    """C and the operands as the interpreter leaves them."""
    return runs.interpret_all(kernel, f.case, workers, shuffle)


def check_built(kernel, f, workers=1, what="", *, end=True):
    """The built kernel leaves what it should, or did so before."""
    if not runs.called_as_before(kernel, f.case, workers, end, *f.parts()):
        f.check(executed(kernel, f, workers, end=end), what)


def executed(kernel, f, workers=1, *, end=True):
    """C and the operands as the built kernel leaves them, each beside a guard page."""
    return runs.execute_all(kernel, f.case, workers, end=end)


def axes_of(roots, operands):
    """The axes along which expressions vary."""
    found = varies(ordered(tuple(roots)), operands)
    return [found[x] for x in roots]
