"""Functions of arrays as terms whose dimensions are labelled, as in an einsum.

Owns `Term`, `term_of`, the terms of a traced graph, and `graph_of`, the µGraph of terms. Equal terms are one object.
Which dimensions are one follows from the graph: those of a broadcast, and of what a product sums.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from portmm.errors import TraceError
from portmm.ir.attention_program import Form, of_attention
from portmm.ir.mugraph import Binding, Builder, MuGraph, Step, to_json
from portmm.spec import vector_math
from portmm.spec.epilogue import C, Fused, Operand, acc, argument, load
from portmm.spec.expr import Expr, apply, const, ordered
from portmm.verification.functions import NAMES, function_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portmm.fusion.graph import Graph, Node

OPERATORS = ("add", "sub", "mul", "div", "neg", "sqrt", "abs", "max", "min", "select", "lt", "le", "eq", "ne")
"""Operations that terms have by themselves."""
TYPES = ("float32", "bfloat16")
"""Types of arrays of terms, which are equivalent over the reals."""
MIXED = "mixed"
"""Type of terms of arrays of several types: what is computed of them is float32."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


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


class Labelled(NamedTuple):
    """The terms of a graph.

    Attributes:
        results: a term for each result of the graph.
        axes: the label of each dimension of each result; "1" for one of extent 1.
        leaves: for each input, the number of an argument and its views.
        extents: of labels.
        dtype: the name of the type of all arrays, or `MIXED`.
        types: names of the types of all inputs, then of all results, where they are mixed.
    """

    results: tuple[Term, ...]
    axes: tuple[str, ...]
    leaves: tuple[tuple[int, tuple[Callable[[Any], Any], ...]], ...]
    extents: dict[str, int]
    dtype: str = "float32"
    types: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Labels of the dimensions of each input."""
        axes: dict[int, str] = {}
        stack = list(self.results)
        while stack:
            x = stack.pop()
            if x.op == "input":
                axes[x.data] = x.labels
            stack += x.args
        return tuple(axes.get(i, "") for i in range(len(self.leaves)))

    def structure(self) -> str:
        """The text of what is computed, without sizes; float32 is not named."""
        graph = graph_of(self.results, self.axes, self.inputs)
        types = " ".join(self.types) or self.dtype.replace("float32", "")
        return json.dumps(to_json(graph), sort_keys=True) + types


class _Labels:
    """Classes of dimensions that are one."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.sizes: list[int] = []

    def new(self, size: int) -> int:
        """A dimension; -1 if it has extent 1."""
        if size == 1:
            return -1
        self.parents.append(len(self.parents))
        self.sizes.append(size)
        return len(self.parents) - 1

    def root(self, x: int) -> int:
        """The dimension that stands for its class."""
        while self.parents[x] != x:
            x = self.parents[x]
        return x

    def join(self, x: int, y: int) -> int:
        """Make two dimensions one."""
        if x < 0 or y < 0:
            return max(x, y)
        a, b = self.root(x), self.root(y)
        self.parents[max(a, b)] = min(a, b)
        return min(a, b)


def term_of(graph: Graph, outputs: list[Node]) -> Labelled:
    """The terms of the results of a graph.

    Raises:
        UnlabelledError: an operation has no term.
    """
    return _Reader(graph).read(outputs)


class _Reader:
    """A reader of a graph: dimensions first, then terms."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.labels = graph, _Labels()
        self.dtype = ""
        self.types: dict[Node, str] = {}
        self.dims: dict[Node, list[int]] = {}
        self.leaves: list[tuple[int, tuple[Callable[[Any], Any], ...]]] = []
        self.inputs: dict[Node, int] = {}
        self.terms: dict[Node, Term] = {}
        self.names: dict[int, str] = {}

    def read(self, outputs: list[Node]) -> Labelled:
        """The terms of some results."""
        every = _needed(outputs)
        for x in every:
            self.dims[x] = self.dimensions(x)
        for x in every:
            self.terms[x] = self.term(x)
        axes = tuple("".join(self.letter(i) for i in self.dims[x]) for x in outputs)
        if any(len(set(x.replace("1", ""))) < len(x.replace("1", "")) for x in axes):
            raise UnlabelledError("two dimensions of a result are one, as in x @ x")
        extents = {name: self.labels.sizes[root] for root, name in self.names.items()}
        results = tuple(self.terms[x] for x in outputs)
        dtype, types = self.dtype or "float32", ()
        if len({*self.types.values()}) > 1:
            if bad := next((x for x in every if x.rounds), None):
                raise UnlabelledError(f"{bad.name} ({bad.where}) rounds to {bad.dtype}")
            leaves = (self.types.get(x, "") for x in self.inputs)
            dtype, types = MIXED, (*leaves, *(np.dtype(x.dtype).name for x in outputs))
        return Labelled(results, axes, tuple(self.leaves), extents, dtype, types)

    def letter(self, i: int) -> str:
        """The label of a dimension."""
        if i < 0:
            return "1"
        root = self.labels.root(i)
        if root not in self.names:
            if len(self.names) == len(_LETTERS):
                raise UnlabelledError("more than 26 dimensions")
            self.names[root] = _LETTERS[len(self.names)]
        return self.names[root]

    def dimensions(self, x: Node) -> list[int]:
        """The dimensions of a node."""
        if x.kind in ("array", "number") or (x.kind == "view" and _leaf(x) is not None):
            if x.dtype is not None and not self.real(x):
                raise UnlabelledError(f"{x.name} is of {x.dtype}")
            return [self.labels.new(n) for n in x.shape]
        inner = [self.dims[y] for y in x.inputs]
        if x.kind == "map" and self.real(x):
            return self.broadcast(inner, len(x.shape))
        if x.kind == "reduce":
            return [*inner[0][:-1], -1]
        if x.kind == "matmul" and self.real(x) and x.inputs[1].kind != "weight":
            a, b = inner
            self.labels.join(a[-1], b[-2])
            return [*self.broadcast([a[:-2], b[:-2]], len(x.shape) - 2), a[-2], b[-1]]
        if x.kind == "view":
            return viewed(x, inner[0])
        raise UnlabelledError(f"{x.name} ({x.where}) is no operation of terms")

    def real(self, x: Node) -> bool:
        """Whether a node is of a type of real numbers."""
        name = np.dtype(x.dtype).name
        self.types[x], self.dtype = name, self.dtype or name
        return name in TYPES

    def broadcast(self, every: list[list[int]], count: int) -> list[int]:
        """The dimensions of operands that are broadcast."""
        dims = [-1] * count
        for y in every:
            for i in range(1, len(y) + 1):
                dims[-i] = self.labels.join(dims[-i], y[-i])
        return dims

    def term(self, x: Node) -> Term:
        """The term of a node."""
        labels = "".join(self.letter(i) for i in self.dims[x]).replace("1", "")
        if len(set(labels)) < len(labels):
            raise UnlabelledError(f"two dimensions of {x.name} ({x.where}) are one")
        if x.kind == "view" and _leaf(x) is None:
            return self.terms[x.inputs[0]]
        if x.kind in ("array", "number", "view"):
            self.leaves.append(_leaf(x) or (x.leaf, ()))
            self.inputs[x] = len(self.leaves) - 1
            return Term("input", (), labels, len(self.leaves) - 1)
        inner = [self.terms[y] for y in x.inputs]
        if x.kind == "map":
            assert x.template is not None  # noqa: S101 - of a map
            return _spelled(x.template, inner)
        if x.kind == "reduce":
            last = self.dims[x.inputs[0]][-1]
            if last < 0:
                return inner[0]
            return reduced("most" if x.of("reduce") and "max" in _kinds(x) else "sum", self.letter(last), inner[0])
        last = self.dims[x.inputs[0]][-1]
        if last < 0:
            raise UnlabelledError(f"{x.name} ({x.where}) is a product along a dimension of extent 1")
        return dot(self.letter(last), *inner)


def viewed(x: Node, dims: list[int]) -> list[int]:
    """The dimensions of a transposition, or of a reshape that adds or removes dimensions of extent 1.

    Raises:
        UnlabelledError: it is something else.
    """
    like = np.empty(x.inputs[0].shape, np.int8)
    looked = x.plain(like)
    steps = {s: d for s, d, n in zip(like.strides, dims, x.inputs[0].shape, strict=True) if n > 1}
    got = [-1 if n == 1 else steps.get(s, -2) for s, n in zip(looked.strides, looked.shape, strict=True)]
    sizes = [n for n in looked.shape if n > 1]
    if -2 in got or sorted(sizes) != sorted(n for n in like.shape if n > 1):
        raise UnlabelledError(f"{x.name} ({x.where}) changes dimensions inside of the function")
    return got


def _kinds(x: Node) -> set[Any]:
    return {x.template.args[0]} if x.template is not None else set()


def _leaf(x: Node) -> tuple[int, tuple[Callable[[Any], Any], ...]] | None:
    """The argument that a view is of, and the functions of the view; None if it is of something else."""
    functions: list[Callable[[Any], Any]] = []
    while x.kind == "view":
        functions.append(x.plain)
        x = x.inputs[0]
    return (x.leaf, tuple(reversed(functions))) if x.kind == "array" else None


def _needed(outputs: list[Node]) -> list[Node]:
    """Nodes that outputs depend on, operands first; those under a view of an argument are not needed."""
    seen: dict[Node, None] = {}

    def visit(x: Node) -> None:
        if x not in seen:
            for y in () if x.kind == "view" and _leaf(x) is not None else x.inputs:
                visit(y)
            seen[x] = None

    for x in outputs:
        visit(x)
    return list(seen)


def spelled(x: Expr) -> None:
    """Check that an expression is one of terms.

    Raises:
        UnlabelledError: it is not.
    """
    count = 1 + max((y.args[0] for y in ordered((x,)) if y.op == "given"), default=-1)
    _spelled(x, [Term("input", (), "", i) for i in range(count)])


def _spelled(x: Expr, args: Sequence[Term]) -> Term:
    """The term of an expression of operands."""
    if x.op == "given":
        operand: Term = args[x.args[0]]
        return operand
    if x.op == "const" and x.dtype == "f32":
        return literal(x.args[0])
    named = function_of(x)
    if named is not None:
        return elementwise_term(named[0], _spelled(named[1], args))
    if x.op == "fma":
        a, b, c = (_spelled(y, args) for y in x.inner)
        return elementwise_term("add", elementwise_term("mul", a, b), c)
    if x.op not in OPERATORS or not x.inner:
        raise UnlabelledError(f"{x.op} is no operation of terms")
    return elementwise_term(x.op, *(_spelled(y, args) for y in x.inner))


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
            number: int = numbers[x.data]
            return number
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
