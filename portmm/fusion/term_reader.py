"""Terms of a traced graph.

Owns `Labelled` and `term_of`. Which dimensions are one follows from the graph: those of a broadcast, and of what a
product sums.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.fusion.terms import Term, UnlabelledError, dot, graph_of, reduced, spelled
from portmm.ir.mugraph import to_json

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node

TYPES = ("float32", "bfloat16")
"""Types of arrays of terms, which are equivalent over the reals."""
MIXED = "mixed"
"""Type of terms of arrays of several types: what is computed of them is float32."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


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

    def read(self, arrays: Sequence[Any]) -> list[Any]:
        """The inputs, as views of a call's arguments."""
        return [reduce(lambda x, view: view(x), views, arrays[leaf]) for leaf, views in self.leaves]

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
        if x.kind in ("array", "number") or (x.kind == "view" and leaf_of(x) is not None):
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
        if x.kind == "view" and leaf_of(x) is None:
            return self.terms[x.inputs[0]]
        if x.kind in ("array", "number", "view"):
            self.leaves.append(leaf_of(x) or (x.leaf, ()))
            self.inputs[x] = len(self.leaves) - 1
            return Term("input", (), labels, len(self.leaves) - 1)
        inner = [self.terms[y] for y in x.inputs]
        if x.kind == "map":
            assert x.template is not None  # noqa: S101 - of a map
            return spelled(x.template, inner)
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


def leaf_of(x: Node) -> tuple[int, tuple[Callable[[Any], Any], ...]] | None:
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
            for y in () if x.kind == "view" and leaf_of(x) is not None else x.inputs:
                visit(y)
            seen[x] = None

    for x in outputs:
        visit(x)
    return list(seen)
