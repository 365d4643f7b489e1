"""Graphs of functions, operation by operation, and as one kernel."""

from __future__ import annotations

from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.ir.block_program import BlockProgram, TileGemm, TileReduce, TileTransfer
from portmm.ir.mugraph import Binding, Builder, MuGraph, Step, Tensor
from portmm.spec.elementwise import exp, silu
from portmm.spec.epilogue import C, Fused, Operand, acc, argument, contraction, extent, index, load, reduction
from portmm.spec.expr import const
from portmm.spec.expr_functions import select, sqrt

X, Y = argument(0, "f32"), argument(1, "f32")


def one(inputs, result, grid, loop, passes, program=BlockProgram):  # noqa: PLR0917 - fields of a record
    """A graph of one kernel: inputs as name -> labels, then the result's labels."""
    tensors = (*(Tensor(name, axes) for name, axes in inputs.items()), Tensor("y", result))
    operands = tuple(Operand("f32", x.axes.replace("1", "")) for x in tensors)
    n = len(inputs)
    steps = (Step(program(grid, loop, operands, passes), tuple(map(Binding, range(n + 1)))),)
    return MuGraph(tensors, steps, tuple(range(n)), (n,))


def loads(n):
    return [load(i, "f32") for i in range(n)]


def product(k="k"):
    b = Builder()
    return b.graph(b.matmul(b.input("a", f"m{k}"), b.input("b", f"{k}n"), k))


def one_product(grid="mn"):
    a, b = loads(2)
    s = contraction(a, b, "k")
    return one({"a": "mk", "b": "kn"}, "mn", grid, "k", ((TileGemm(s),), (TileTransfer(2, s),)))


def lora():
    """x @ w + (x @ a) @ b, operation by operation."""
    b = Builder()
    x, w, u, v = (b.input(*y) for y in (("x", "mk"), ("w", "kn"), ("a", "kr"), ("b", "rn")))
    return b.graph(b.map(X + Y, b.matmul(x, w, "k"), b.matmul(b.matmul(x, u, "k"), v, "r")))


def concatenated_lora():
    """[x, x @ a] @ [w; b]."""
    b = Builder()
    x, w, u, v = (b.input(*y) for y in (("x", "mk"), ("w", "kn"), ("a", "kr"), ("b", "rn")))
    left, right = b.concat("c", (1, 1), x, b.matmul(x, u, "k")), b.concat("c", (0, 0), w, v)
    return b.graph(b.matmul(left, right, "c"))


def lora_kernel():
    x, w, u, v = loads(4)
    s, t = contraction(x, w, "k"), contraction(x, u, "k")
    low = contraction(t, v, "r")
    passes = ((TileGemm(s), TileGemm(t)), (TileGemm(low), TileTransfer(4, s + low)))
    return one({"x": "mk", "w": "kn", "a": "kr", "b": "rn"}, "mn", "mn", "k", passes)


def rms_linear():
    """(x / sqrt(mean(x**2) + eps)) @ w."""
    b = Builder()
    x, w = b.input("x", "mk"), b.input("w", "kn")
    mean = b.map(X * const(1 / 64) + 1e-5, b.sum(x, "k", X * X))
    return b.graph(b.matmul(b.map(X / sqrt(Y), x, mean, axes="mk"), w, "k"))


def rms_kernel(scale=1 / 64, squared=True):
    x, w = loads(2)
    s, t = contraction(x, w, "k"), contraction(x * x if squared else x, const(1.0), "k")
    passes = ((TileGemm(s), TileGemm(t)), (TileTransfer(2, s / sqrt(t * const(scale) + 1e-5)),))
    return one({"x": "mk", "w": "kn"}, "mn", "mn", "k", passes)


def gated():
    b = Builder()
    x, w, u = b.input("x", "mk"), b.input("w", "kn"), b.input("u", "kn")
    return b.graph(b.map(silu(X) * Y, b.matmul(x, w, "k"), b.matmul(x, u, "k")))


def gated_kernel(swap=False):
    x, w, u = loads(3)
    s, t = contraction(x, w, "k"), contraction(x, u, "k")
    value = silu(t) * s if swap else silu(s) * t
    return one(
        {"x": "mk", "w": "kn", "u": "kn"}, "mn", "mn", "k", ((TileGemm(s), TileGemm(t)), (TileTransfer(3, value),))
    )


def softmax(b, s, along, stable=True):
    e = b.map(exp(X - Y), s, b.max(s, along)) if stable else b.map(exp(X), s)
    return e, b.sum(e, along)


def attention(causal=False, stable=True, scale=0.25, axes=("hmd", "hnd", "hne"), strict=False):
    """softmax(q @ k.T * scale) @ v."""
    b = Builder()
    q, k, v = (b.input(name, x) for name, x in zip("qkv", axes, strict=True))
    s = b.map(X * scale, b.matmul(q, k, "d", "hmn"))
    if causal:
        at = index("m") + (extent("n") - extent("m"))
        s = b.map(select((index("n") < at) if strict else index("n") <= at, X, float("-inf")), s)
    e, t = softmax(b, s, "n", stable)
    return b.graph(b.map(X / Y, b.matmul(e, v, "n", "hme"), t, axes="hme"))


def flash(causal=False, scale=0.25, rescaled=True, program=BlockProgram, tail=True):
    """Attention in one pass along the keys."""
    q, k, v = loads(3)
    dot = contraction(q, k, "d")
    s = dot * scale
    if causal:
        s = select(index("n") <= index("m") + (extent("n") - extent("m")), s, float("-inf"))
    if not tail:
        s = select(index("n") < extent("n") - 1, s, float("-inf"))
    top = reduction("max", s)
    w = exp(s - top)
    total, mixed = reduction("add", w), contraction(w, v, "n")
    r = top if rescaled else None
    passes = (
        (TileGemm(dot), TileReduce(top), TileReduce(total, r), TileGemm(mixed, r)),
        (TileTransfer(3, mixed / total),),
    )
    return one({"q": "hmd", "k": "hnd", "v": "hne"}, "hme", "hm", "n", passes, program)


def grouped(result="jgme"):
    """Attention whose heads g of a group share keys, by broadcasting."""
    b = Builder()
    q, k, v = b.input("q", "jgmd"), b.input("k", "jnd"), b.input("v", "jne")
    s = b.map(X * 0.25, b.matmul(q, k, "d", "jgmn"))
    e, t = softmax(b, s, "n")
    return b.graph(b.map(X / Y, b.matmul(e, v, "n", "jgme"), t, axes=result))


def grouped_kernel(order=(0, 1)):
    """pm.attention with fewer heads of keys: heads of queries are groups, in equal blocks."""
    program = of_attention(Form(Fused((), ((C, acc() * 0.25),)), "f32", "f32", Bounds()))
    tensors = (Tensor("q", "jgmd"), Tensor("k", "jnd"), Tensor("v", "jne"), Tensor("o", "jgme"))
    q, kv = Binding(0, ((), order, (2,), (3,))), [Binding(i, ((), (0,), (1,), (2,))) for i in (1, 2)]
    return MuGraph(tensors, (Step(program, (q, *kv, q._replace(tensor=3))),), (0, 1, 2), (3,))


def split_k():
    """A product as two halves of k, partial sums and their sum."""
    b = Builder()
    x, w = b.input("a", "msk"), b.input("b", "skn")
    parts = b.matmul(x, w, "k", "smn")
    return b.graph(b.sum(parts, "s"))


def whole_k():
    a, b = loads(2)
    tensors = (Tensor("a", "msk"), Tensor("b", "skn"), Tensor("y", "mn"))
    s = contraction(a, b, "k")
    program = BlockProgram("mn", "k", (Operand("f32", "mk"), Operand("f32", "kn"), Operand("f32", "mn")),
                           ((TileGemm(s),), (TileTransfer(2, s),)))  # fmt: skip
    at = (Binding(0, ((0,), (1, 2))), Binding(1, ((0, 1), (2,))), Binding(2))
    return MuGraph(tensors, (Step(program, at),), (0, 1), (2,))


def chain(first):
    """x @ a @ b, by either order."""
    b = Builder()
    x, u, v = b.input("x", "mk"), b.input("a", "kr"), b.input("b", "rn")
    return b.graph(b.matmul(b.matmul(x, u, "k"), v, "r") if first else b.matmul(x, b.matmul(u, v, "r"), "k"))


def qk_norm():
    """Mirage's benchmark: rows of Q and V normalized by their root mean square, exp without a maximum."""
    b = Builder()
    q, k, v = b.input("q", "bmd"), b.input("k", "bdn"), b.input("v", "bne")
    mq = b.map(X / sqrt(Y), q, b.map(X * const(1 / 64), b.sum(q, "d", X * X)), axes="bmd")
    mv = b.map(X / sqrt(Y), v, b.map(X * const(1 / 64), b.sum(v, "e", X * X)), axes="bne")
    e = b.map(exp(X), b.matmul(mq, k, "d", "bmn"))
    return b.graph(b.matmul(b.map(X / Y, e, b.sum(e, "n"), axes="bmn"), mv, "n", "bme"))


def published_qk_norm():
    """The first of the published graphs for it: each block sums its rows of Q over d before it multiplies a row of K.

    Its grid takes K along d and Q along m by the same index, so that the row of K is that of the block of m.
    """
    b = Builder()
    q, k, v = b.input("q", "bmd"), b.input("k", "bdn"), b.input("v", "bne")
    mq = b.map(X / sqrt(Y), q, b.map(X * const(1 / 64), b.sum(q, "d", X * X)), axes="bmd")
    mv = b.map(X / sqrt(Y), v, b.map(X * const(1 / 64), b.sum(v, "e", X * X)), axes="bne")
    r = b.sum(mq, "d")
    s = b.tensor("s", "bmn")
    r_, k_ = loads(2)
    rows = BlockProgram("bm", "n", (Operand("f32", "bm"), Operand("f32", "bMn"), Operand("f32", "bmn")),
                        ((TileTransfer(2, r_ * k_),),))  # fmt: skip
    b.steps.append(Step(rows, (Binding(r), Binding(k), Binding(s))))
    e = b.map(exp(X), s)
    return b.graph(b.matmul(b.map(X / Y, e, b.sum(e, "n"), axes="bmn"), mv, "n", "bme"))


def misplaced_sum():
    """sum_k(a b) as sum_k(a) b, with k in b too."""
    b = Builder()
    x, w = b.input("a", "mk"), b.input("b", "kn")
    return b.graph(b.sum(b.map(X * Y, b.sum(x, "k"), w, axes="mkn"), "k"))


def runs_of_keys(scale=0.25):
    """Attention whose keys are runs s of t keys each, operation by operation."""
    b = Builder()
    q, k, v = b.input("q", "hmd"), b.input("k", "hstd"), b.input("v", "hste")
    s = b.map(X * scale, b.matmul(q, k, "d", "hmst"))
    e = b.map(exp(X - Y), s, b.max(b.max(s, "t"), "s"))
    mixed, total = (b.sum(x, "s") for x in (b.matmul(e, v, "t", "hmse"), b.sum(e, "t")))
    return b.graph(b.map(X / Y, mixed, total, axes="hme"))


def split_keys(scale=0.25):
    """The same as two kernels: maxima and sums of each run, which is one pass, and what combines them."""
    q, k, v, *_ = loads(6)
    dot = contraction(q, k, "d")
    top = reduction("max", dot * scale)
    w = exp(dot * scale - top)
    total, mixed = reduction("add", w), contraction(w, v, "n")
    first = (TileGemm(dot), TileReduce(top), TileReduce(total, top), TileGemm(mixed, top))
    passes = (first, (TileTransfer(3, mixed), TileTransfer(4, total), TileTransfer(5, top)))
    axes = ("hmd", "hsnd", "hsne", "hsme", "hsm", "hsm")
    one = BlockProgram("hsm", "n", tuple(Operand("f32", x) for x in axes), passes)
    parts, sums, tops = loads(3)
    most = reduction("max", tops)
    by = exp(tops - most)
    value = contraction(by, parts, "n") / contraction(by, sums, "n")
    (a, b) = value.inner
    passes = ((TileReduce(most),), (TileGemm(a), TileGemm(b)), (TileTransfer(3, value),))
    axes = ("hnme", "hnm", "hnm", "hme")
    two = BlockProgram("hme", "n", tuple(Operand("f32", x) for x in axes), passes)
    named = {"q": "hmd", "k": "hstd", "v": "hste", "mixed": "hsme", "total": "hsm", "top": "hsm", "y": "hme"}
    steps = Step(one, tuple(map(Binding, range(6)))), Step(two, tuple(map(Binding, (3, 4, 5, 6))))
    return MuGraph(tuple(Tensor(*x) for x in named.items()), steps, (0, 1, 2), (6,))
