"""Rewrite of a graph before it is split into kernels: group norm of images with channels last.

Owns `match_group_norm`, a rule over means and variances along pixels and the channels of a group: elements less their
mean, over the root of their variance and a constant, are one kernel, with what follows. The rule compares expressions,
axes and shapes of nodes, not their names. Kernels are made for the constant: `needs_constants` tells that captured
numbers should be traced again as constants, which guards compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from portmm.arrays.numpy_arrays import merged
from portmm.fusion.graph import CALLED, Array, Graph, Node
from portmm.fusion.partition import live_nodes, users_of
from portmm.fusion.plan_windows import Norm
from portmm.spec.epilogue import argument
from portmm.spec.expr import apply
from portmm.trace.buffers import Place, looked

FIRST, SECOND = argument(0, "f32"), argument(1, "f32")
SUM, LESS, OVER, TIMES = (apply(x, FIRST, SECOND) for x in ("add", "sub", "div", "mul"))
ROOT, SQUARE = apply("sqrt", FIRST), apply("mul", FIRST, FIRST)
INVERSE, OVER_ROOT = apply("div", 1.0, FIRST), apply("div", 1.0, ROOT)
PAIR, LEAST = 2, 3
"""Operands of a quotient or product, and dimensions of images with pixels."""


def match_group_norm(graph: Graph, outputs: list[Node]) -> None:
    """Replace normalizations of groups of channels, which are then reshaped as the images are, by one node each."""
    for x, images, form in [*_matches(graph, outputs)]:
        if isinstance(form.eps, float):
            x.kind, x.inputs, x.plain, x.name = "norm", (images,), form.plain, "group norm"
            graph.windows[x] = form
    live = frozenset(live_nodes(graph, outputs))
    gone = {(x.where, f"{x.name}: {CALLED}") for x in graph.along if x not in live}
    graph.blocked[:] = [x for x in graph.blocked if x not in gone]


def needs_constants(graph: Graph, outputs: list[Node], arguments: int) -> bool:
    """Whether group norms are matched if all numbers, none of which the first leaves (arguments) are, are constants.

    No other number may be among them: a program for each value of a number that varies takes longer than steps saved.
    """
    numbers = {x for x in graph.nodes if x.kind == "number"}
    if not graph.along or not numbers or graph.device_arrays or any(x.leaf < arguments for x in numbers):
        return False
    return numbers <= {form.eps for _, _, form in _matches(graph, outputs)}


def _matches(graph: Graph, outputs: list[Node]) -> Iterator[tuple[Node, Node, Norm]]:
    """Views of group norms in the shape of their images, with these, and groups and constants (which may be nodes)."""
    for x, after in users_of(live_nodes(graph, outputs)).items():
        match = _normalized(x, graph) if x.kind == "map" and len(x.inputs) == PAIR and x not in outputs else None
        if match is not None and len(after) == 1:
            view, (images, form) = after[0], match
            if view.kind == "view" and view.name == "reshape" and view.shape == images.shape:
                yield view, images, form


def _normalized(x: Node, graph: Graph) -> tuple[Node, Norm] | None:
    """The images, the number of groups and the constant of a group norm; None if a node is none."""
    centred, scale = x.inputs
    if x.template is TIMES and centred.template is not LESS:
        centred, scale = scale, centred
    root = _variance_of(scale, inverse=x.template is TIMES) if _is(x, TIMES, OVER) else None
    if root is None or centred.template is not LESS:
        return None
    (grouped, mean), (variance, eps) = centred.inputs, root
    if _reduced(mean, "mean", graph) is not grouped or not _is_variance(variance, grouped, centred, graph):
        return None
    if grouped.kind != "view" or grouped.name != "reshape" or len(grouped.inputs[0].shape) < LEAST:
        return None
    images = grouped.inputs[0]
    fits = (images.shape[0], math.prod(images.shape[1:-1]), images.shape[-1]) == (
        grouped.shape[0], math.prod(grouped.shape[1:-2]), math.prod(grouped.shape[-2:]),
    )  # fmt: skip
    fits = fits and images.dtype == x.dtype == np.float32 and _are_even(images, graph)
    return (images, Norm(grouped.shape[-2], eps)) if fits else None


def _are_even(images: Node, graph: Graph) -> bool:
    """Whether pixels are at equal distances in memory; other images have no kernel."""
    return len(merged(images.shape[1:-1], [_laid(images, graph).strides[1:-1]])) <= 1


def _laid(x: Node, graph: Graph) -> Array:
    """An array of the shape and strides that a node has in a program."""
    if x.kind == "view":
        viewed = looked(Place("", 0, _laid(x.inputs[0], graph), ""), x.plain)
        return np.empty(x.shape, x.dtype) if viewed is None else viewed.like
    value = graph.fixed.get(x, graph.leaves[x.leaf] if x.leaf >= 0 else None)
    return value if isinstance(value, np.ndarray) else np.empty(x.shape, x.dtype)


def _variance_of(x: Node, *, inverse: bool) -> tuple[Node, Any] | None:
    """The variance and the constant, or the node of a captured number, whose root, or its inverse, a node is."""
    if inverse and x.template is INVERSE:
        x, inverse = x.inputs[0], False
    if x.template is not (OVER_ROOT if inverse else ROOT) or x.inputs[0].template is None:
        return None
    total, added = x.inputs[0], x.inputs[0].template
    if added is SUM:
        numbers, others = ([y for y in total.inputs if (y.kind == "number") is z] for z in (True, False))
        return (others[0], numbers[0]) if len(numbers) == len(others) == 1 else None
    constants = [y.args[0] for y in added.args if getattr(y, "op", "") == "const"] if added.op == "add" else []
    return (total.inputs[0], float(constants[0])) if constants and any(y is FIRST for y in added.args) else None


def _reduced(x: Node, name: str, graph: Graph) -> Node | None:
    """The operand of a mean or variance along pixels and the last of two axes of channels; None of another node."""
    known, axes, keeps = graph.along.get(x, ("", None, False))
    if known != name or not keeps or not isinstance(axes, tuple):
        return None
    of, rank = x.inputs[0], len(x.inputs[0].shape)
    wanted = [*range(1, rank - 2), rank - 1]
    return of if rank > LEAST and sorted(i % rank for i in axes) == wanted else None


def _is_variance(x: Node, grouped: Node, centred: Node, graph: Graph) -> bool:
    """Whether a node is the variance of elements, or the mean of squares of what is left of them."""
    if _reduced(x, "var", graph) is grouped:
        return True
    squares = _reduced(x, "mean", graph)
    if squares is None or not _is(squares, SQUARE, TIMES):
        return False
    return all(_same(y, centred) for y in squares.inputs)


def _is(x: Node, *templates: Any) -> bool:
    """Whether a node computes one of some expressions of its operands."""
    return any(x.template is y for y in templates)


def _same(x: Node, y: Node) -> bool:
    """Whether two nodes compute the same of the same operands."""
    return x is y or (x.template is y.template is LESS and x.inputs == y.inputs)
