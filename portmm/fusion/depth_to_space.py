"""Rewrite of a graph before it is split into kernels: depth-to-space as a part of a convolution's store.

Owns `match_depth_to_space`, a rule over a convolution with channels last, element-wise operations, and views that make
blocks of pixels of its channels; and `by_rows`, filters of such blocks. The rule compares shapes and strides of views,
not their names: reshape, transpose and reshape, or the same in other words, in either order of channels.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from portmm.fusion.graph import Graph, Node
from portmm.fusion.partition import live_nodes, users_of
from portmm.fusion.plan_windows import Filter
from portmm.ops.convolution_weights import PackedConv, pack_conv, unpack_conv

Array = np.ndarray[Any, Any]
RANK = 4
"""Dimensions of images."""


def by_rows(x: Array, b: int, order: str) -> Array:
    """Filters, or a bias, of blocks of b x b pixels: (row of a block, its pixels and channels, ...).

    Args:
        x: an item for each channel before they become blocks.
        b: extent of a block.
        order: "DCR", pixels of a block are outer channels, or "CRD", inner ones.
    """
    channels = len(x) // b**2
    if order == "DCR":
        return x.reshape(b, b * channels, *x.shape[1:])
    split = x.reshape(channels, b, b, *x.shape[1:])
    return np.moveaxis(split, 0, 2).reshape(b, b * channels, *x.shape[1:])


def match_depth_to_space(graph: Graph, outputs: list[Node]) -> None:
    """Give convolutions whose channels become blocks of pixels, and nothing else, filters for each row of a block."""
    for x in [x for x in graph.nodes if x.kind == "conv"]:
        users = users_of(live_nodes(graph, outputs))
        match = _Blocks.of(x, graph, users, outputs) if x in users else None
        if match is not None:
            match.replace(graph)


class _Region(NamedTuple):
    """Element-wise operations on a node.

    Attributes:
        nodes: the node itself first, unless nothing of it is computed here, and the operations, in order.
        last: the one that is read elsewhere.
    """

    nodes: list[Node]
    last: Node


class _Blocks(NamedTuple):
    """A convolution whose channels become blocks.

    Attributes:
        conv: its node.
        before: operations on its result.
        view: the last of the views.
        after: operations on these.
        block: the extent of a block.
        order: of channels: see `by_rows`.
    """

    conv: Node
    before: _Region
    view: Node
    after: _Region
    block: int
    order: str

    @classmethod
    def of(cls, x: Node, graph: Graph, users: dict[Node, list[Node]], outputs: list[Node]) -> _Blocks | None:
        """The blocks that a convolution's channels become, or None."""
        about: Filter = graph.windows[x]
        if about.rows or len(about.size.spatial) != RANK - 2 or {x.dtype.name, x.inputs[0].dtype.name} != {"float32"}:
            return None
        read = frozenset(outputs)
        before = _region(x, users, read, x.shape[-1])
        if before.last in read or (blocks := _views(before.last, about, users, read)) is None:
            return None
        view, block, order = blocks
        return cls(x, before, view, _region(view, users, read, 1), block, order)

    def replace(self, graph: Graph) -> None:
        """Compute rows of blocks, (n, h, row of a block, w, pixel and channel), and view them as the image."""
        x, b, about = self.conv, self.block, graph.windows[self.conv]
        n, (h, w), plain = x.inputs[0].shape[0], about.size.out, x.plain
        filters = _rows(about.weight, b, self.order)
        size = replace(about.size, outputs=about.size.outputs // b)
        old, shape, order = x.shape, (n, h, b, w, size.outputs), self.order
        split = (n, h, w, b, b, -1) if order == "DCR" else (n, h, w, -1, b, b)
        axes = (0, 1, 3, 2, 4, 5) if order == "DCR" else (0, 1, 4, 2, 5, 3)
        x.plain = lambda *xs: plain(*xs).reshape(split).transpose(axes).reshape(shape)
        graph.windows[x] = Filter(filters[0], size, filters)
        for y in self.before.nodes:
            inputs = [z if z.size == 1 or z.shape == old else self.vector(z, graph, y) for z in y.inputs]
            y.inputs = y.inputs if y is x else tuple(inputs)
        moved = [y for y in self.after.nodes if y is not self.view]
        for y in moved:
            y.inputs = tuple(self.before.last if z is self.view else z for z in y.inputs)
        for y in (*self.before.nodes, *moved):
            y.shape = shape
        whole, last = (n, h * b, w * b, size.outputs // b), self.before.last
        if moved:
            end = self.after.last
            last = Node(
                "map", shape, end.dtype, end.inputs, end.plain, end.name, end.line, len(graph.nodes), end.template
            )
            graph.nodes.insert(graph.nodes.index(end), last)
        end = self.after.last
        end.kind, end.inputs, end.name, end.template, end.shape = "view", (last,), "reshape", None, whole
        end.plain = lambda y: y.reshape(whole)

    def vector(self, x: Node, graph: Graph, before: Node) -> Node:
        """A node of an array with an element for each channel, as rows of blocks, in front of another node."""
        b, shape = self.block, (self.block, 1, x.size // self.block)
        for like, looked in (((b, b, x.size // b**2), _in_blocks(b, self.order)), (shape, lambda y: y.reshape(shape))):
            x = Node("view", like, x.dtype, (x,), looked, "reshape", x.line, len(graph.nodes))
            graph.nodes.insert(graph.nodes.index(before), x)
        return x


def _in_blocks(b: int, order: str) -> Callable[[Array], Array]:
    """The view of a vector with an element for each channel as (row of a block, pixel, channel)."""
    if order == "DCR":
        return lambda y: y.reshape(b, b, -1)
    return lambda y: y.reshape(-1, b, b).transpose(1, 2, 0)


def _region(x: Node, users: dict[Node, list[Node]], outputs: frozenset[Node], channels: int) -> _Region:
    """The operations on a node, of numbers and vectors of channels, if one alone is read elsewhere; else the node."""
    nodes = [x]
    for y in users:
        others = [z for z in y.inputs if z not in nodes]
        fits = y.kind == "map" and y.shape == x.shape and not (y.rounds or y.of("index")) and y.dtype == x.dtype
        alone = all(z.size in (1, channels) and z.size == math.prod(z.shape[-1:]) for z in others)
        if fits and alone and len(others) < len(y.inputs):
            nodes.append(y)
    while len(nodes) > 1:
        ends = [y for y in nodes if y in outputs or any(z not in nodes for z in users[y])]
        if len(ends) == 1:
            return _Region(nodes, ends[0])
        nodes.pop()
    return _Region(nodes, x)


def _views(
    x: Node, about: Filter, users: dict[Node, list[Node]], outputs: frozenset[Node]
) -> tuple[Node, int, str] | None:
    """The last view of those that make blocks of pixels of a node, the extent of a block, and the order of channels."""
    n, (h, w), channels = x.size // (about.size.pixels * x.shape[-1]), about.size.out, x.shape[-1]
    like, at = np.empty(x.shape, np.uint8), x
    while True:
        after = users[at]
        if len(after) != 1 or after[0].kind != "view" or at in outputs:
            return None
        (view,), b = after, after[0].shape[1] // h if len(after[0].shape) == RANK else 1
        if b > 1 and view.shape == (n, h * b, w * b, channels // b**2):
            order = _order(like, (n, h, b, w, b, channels // b**2))
            return (view, b, order) if order else None
        like, at = view.plain(like), view


def _order(x: Array, shape: tuple[int, ...]) -> str:
    """The order of channels of images (n, h, w, channel) that were viewed as blocks of a shape; "" of other views."""
    _, h, b, w, _, c = shape
    row = w * b * b * c
    known = {"DCR": (h * row, row, b * c, b * b * c, c, 1), "CRD": (h * row, row, b, b * b * c, 1, b * b)}
    if x.shape != shape:
        return ""
    fits = [
        k for k, strides in known.items()
        if all(got == want for got, want, extent in zip(x.strides, strides, shape, strict=True) if extent > 1)
    ]  # fmt: skip
    return fits[0] if fits else ""


_known: dict[tuple[int, int, str], tuple[PackedConv, ...]] = {}


def _rows(filters: PackedConv, b: int, order: str) -> tuple[PackedConv, ...]:
    """Packed filters of each row of a block, made once of those of a convolution."""
    owner = filters.weight[0].owner
    key = (id(owner), b, order)
    if key not in _known:
        every = by_rows(unpack_conv(filters), b, order)
        _known[key] = tuple(pack_conv(y, layout=filters.layout) for y in every)
        forget: Callable[..., Any] = _known.pop
        weakref.finalize(owner, forget, key, None).atexit = False
    return _known[key]
