"""Functions of arrays as terms whose dimensions are labelled, as in an einsum.

Owns `Term` and its operations, and `graph_of`, the µGraph of terms. Equal terms are one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from portmm.errors import TraceError
from portmm.ir.attention_program import Form, of_attention
from portmm.ir.mugraph import Binding, Builder, MuGraph, Step
from portmm.spec import vector_math
from portmm.spec.epilogue import C, Fused, Operand, acc, argument, load
from portmm.spec.expr import Expr, apply, const
from portmm.spec.function_patterns import NAMES, function_of

OPERATORS = ("add", "sub", "mul", "div", "neg", "sqrt", "abs", "max", "min", "select", "lt", "le", "eq", "ne")
"""Operations that terms have by themselves."""


class UnlabelledError(TraceError):
    """Error for a function whose dimensions have no labels: it is not searched."""


class Term:
    """A value; the same object for the same arguments.

    Attributes:
        op: "input", "const", "sum", "most" (a maximum along a label), "dot" (a product along a label), "attention",
            "concat", or an element-wise operation or function.
        args: its operands.
        labels: of its dimensions, in order.
        data: the number of an input, the value of a literal, a label, the scale of attention with its labels, or the
            label of a concatenation with those of its parts.
    """

    __slots__ = ("__weakref__", "args", "data", "labels", "op")
    op: str
    args: tuple[Term, ...]
    labels: str
    data: Any

    def __new__(cls, op: str, args: tuple[Term, ...], labels: str, data: Any = None) -> Term:  # noqa: PYI034
        """The term of an operation."""
        key = (op, *map(id, args), labels, data)
        known = _known.get(key)
        if known is None:
            known = super().__new__(cls)
            known.op, known.args, known.labels, known.data = op, args, labels, data
            _known[key] = known
        return known

    def __repr__(self) -> str:
        inner = ", ".join(map(repr, self.args))
        data = "" if self.data is None else f"[{self.data}]"
        return f"{self.op}{data}({inner})" if inner else f"{self.op}{data}"


_known: WeakValueDictionary[tuple[Any, ...], Term] = WeakValueDictionary()


def elementwise_term(op: str, *args: Term) -> Term:
    """An element-wise operation: its dimensions are those of the operand with most, then those of others."""
    first = max(args, key=lambda x: len(x.labels))
    labels = "".join(dict.fromkeys(first.labels + "".join(x.labels for x in args)))
    return Term(op, args, labels)


def dot(along: str, a: Term, b: Term) -> Term:
    """A product, summed along a label: dimensions of both operands first, then those of the left one."""
    both = "".join(x for x in a.labels if x in b.labels and x != along)
    left = "".join(x for x in a.labels if x not in b.labels)
    return Term("dot", (a, b), both + left + "".join(x for x in b.labels if x not in a.labels), along)


def literal(x: float) -> Term:
    """A literal."""
    return Term("const", (), "", float(np.float32(x)))


def reduced(op: str, along: str, x: Term) -> Term:
    """A sum or a maximum along a label."""
    return Term(op, (x,), x.labels.replace(along, ""), along)


JOINED = "αβγδεζηθικλμνξοπρστυφχψω"
"""Labels of concatenations."""


def concat(parts: str, *args: Term) -> Term:
    """Terms one after the other, each along its part: a label of one that follows from those of the parts."""
    first, *rest = args
    others = first.labels.replace(parts[0], "")
    if any({*x.labels} != {*others, y} for x, y in zip(rest, parts[1:], strict=True)):
        raise UnlabelledError(f"concatenation of {args} along {parts}: their other labels differ")
    label = JOINED[sum((i + 1) * ord(x) for i, x in enumerate(parts)) % len(JOINED)]
    return Term("concat", args, first.labels.replace(parts[0], label), label + parts)


def spelled(x: Expr, args: Sequence[Term]) -> Term:
    """The term of an expression of operands.

    Raises:
        UnlabelledError: an operation has none.
    """
    if x.op == "given":
        return args[x.args[0]]
    if x.op == "const" and x.dtype == "f32":
        return literal(x.args[0])
    named = function_of(x)
    if named is not None:
        return elementwise_term(named[0], spelled(named[1], args))
    if x.op == "fma":
        a, b, c = (spelled(y, args) for y in x.inner)
        return elementwise_term("add", elementwise_term("mul", a, b), c)
    if x.op not in OPERATORS or not x.inner:
        raise UnlabelledError(f"{x.op} is no operation of terms")
    return elementwise_term(x.op, *(spelled(y, args) for y in x.inner))


# Terms as a graph of kernels.


def graph_of(results: Sequence[Term], axes: Sequence[str], inputs: Sequence[str]) -> MuGraph:
    """The µGraph of terms, a step for each.

    Args:
        results: the terms.
        axes: labels of each result's dimensions.
        inputs: labels of each input's dimensions.
    """
    b = Builder()
    known: dict[Term, int] = {}
    numbers = [b.input(f"x{i}", x) for i, x in enumerate(inputs)]

    def tensor(x: Term) -> int:
        if x not in known:
            known[x] = build(x)
        return known[x]

    def build(x: Term) -> int:
        if x.op == "input":
            return numbers[x.data]
        if x.op == "sum":
            return b.sum(tensor(x.args[0]), x.data)
        if x.op == "most":
            return b.max(tensor(x.args[0]), x.data)
        if x.op == "dot":
            return b.matmul(tensor(x.args[0]), tensor(x.args[1]), x.data, x.labels)
        if x.op in ("attention", "concat"):
            return (_attention if x.op == "attention" else _concat)(
                b, x, [tensor(y) if y.op != "const" else -1 for y in x.args]
            )
        of = [y for y in x.args if y.op != "const"]
        positions = iter(range(len(of)))
        values = [const(y.data) if y.op == "const" else argument(next(positions), "f32") for y in x.args]
        return b.map(template_of(x.op, values), *[tensor(y) for y in of], axes=x.labels)

    ends = []
    for x, labels in zip(results, axes, strict=True):
        i, wanted = tensor(x), labels.replace("1", "")
        same = b.tensors[i].axes == wanted and x.op != "input"
        ends.append(i if same else b.map(argument(0, "f32"), i, axes=wanted))
    return b.graph(*ends)


def template_of(op: str, values: Sequence[Expr]) -> Expr:
    """The expression of an element-wise operation or function."""
    return getattr(vector_math, op)(*values) if op in NAMES else apply(op, *values)


class Heads(NamedTuple):
    """Labels of attention.

    Attributes:
        heads: of Q, K and V.
        groups: of Q alone.
        queries, keys, elements, columns: of a head.
        scale: of scores.
    """

    heads: str
    groups: str
    queries: str
    keys: str
    elements: str
    columns: str
    scale: float


VALUES = 2
"""Number of the factor of values among those of attention."""


def attention(q: Term, k: Term, v: Term, h: Heads, *factors: Term) -> Term:
    """Attention of queries, keys and values; with factors of queries and of keys, of scores, and of values."""
    return Term("attention", (q, k, v, *factors), h.heads + h.groups + h.queries + h.columns, h)


def _concat(b: Builder, x: Term, of: list[int]) -> int:
    """Steps of a concatenation: its parts have their other labels in the order of the first."""
    label, *parts = x.data
    wanted = [x.labels.replace(label, y) for y in parts]
    each = zip(of, wanted, strict=True)
    same = [i if b.tensors[i].axes == y else b.map(argument(0, "f32"), i, axes=y) for i, y in each]
    return b.concat(label, (x.labels.index(label),) * len(of), *same)


def _attention(b: Builder, x: Term, of: list[int]) -> int:
    """A step of attention: heads of keys serve groups of heads of queries, in equal blocks."""
    h: Heads = x.data
    score: Expr = acc() * h.scale if h.scale != 1 else acc()
    operands: list[Operand] = []
    heads = h.heads + h.groups
    values: list[Expr] = []
    wanted: list[tuple[str, ...]] = [(heads, h.queries, h.elements), (h.heads, h.keys, h.elements)]
    wanted += [(h.heads, h.keys, h.columns), (heads, h.queries, h.columns)]
    places = [*of[:3], to := b.tensor(f"attention{len(b.tensors)}", x.labels)]
    for i, label, term, number in zip(range(3), "mnn", x.args[3:], of[3:], strict=False):
        if term.labels:
            factor = load(len(operands), "f32")
            wanted.insert(len(operands), (h.heads, h.queries if label == "m" else h.keys))
            places.insert(len(operands), number)
            operands.append(Operand("f32", f"bh{label}"))
            if i == VALUES:
                values.append(factor)
            else:
                score *= factor
    program = of_attention(Form(Fused(tuple(operands), tuple((C, y) for y in (score, *values))), "f32", "f32"))
    at = []
    for i, groups in zip(places, wanted, strict=True):
        axes = b.tensors[i].axes
        at.append(Binding(i, ((), *(tuple(axes.index(y) for y in group) for group in groups))))
    b.steps.append(Step(program, tuple(at)))
    return to
