"""Maxima of tiles along the loop of a block program, and sums of exponentials that are relative to them.

Owns `maximum`, `rescale` and `decays`, statements of a lowering `t`, a `tiles.Tiles`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.ir.index import const, var
from portmm.ir.nodes import Call, If
from portmm.kernels.blocks.tile_maps import largest_function
from portmm.kernels.cpu.online_softmax import decay
from portmm.spec.expr import apply, node, ordered
from portmm.spec.expr import const as literal
from portmm.spec.vector_math import exp

if TYPE_CHECKING:
    from portmm.kernels.blocks.tile_maps import View
    from portmm.spec.expr import Expr

LOWEST = float(np.finfo(np.float32).min)
"""Start of a maximum that sums are relative to: -inf would leave a NaN of values that are -inf so far."""


def maximum(t: Any, x: Expr) -> tuple[View, View]:
    """The largest value of each column so far, and the factor by which a larger one changes sums of exponentials.

    Rows of a tile are taken one after the other, so that no lanes are combined.
    """
    (inner,), label = x.inner, "".join(t.own(x))
    tile, most, factor = t.value(inner), t.buffer("", label), t.buffer("", label)
    now, before = (node("element", (i,), "f32") for i in range(2))
    t.before.append(t.map_call(literal(LOWEST if x in t.rescaling else -math.inf), {}, ("", label), most))
    t.inside += [
        t.map_call(now, {now: most}, ("", label), factor),
        _larger(t, x, (tile, most), label),
        t.map_call(decay(before - now), {now: most, before: factor}, ("", label), factor),
    ]
    return most, factor


def _larger(t: Any, x: Expr, views: tuple[View, View], label: str) -> Call:
    """A call that adds a tile to maxima; a NaN need not be the largest where its exponential makes the sums NaN."""
    tile, most = views
    columns = t.vectors(label, tile, most)
    if columns == t.count(label) or tile.along(t.loop) == const(1):
        (inner,), now = x.inner, node("element", (0,), "f32")
        call: Call = t.map_call(apply("max", now, inner), {inner: tile, now: most}, (t.loop, label), most)
        return call
    function = largest_function(f"map_{t.maps}", t.real, "greater" if x in t.rescaling else "max")
    t.maps += 1
    return Call(function, (t.count(t.loop), columns, tile.at, tile.along(t.loop), most.at))


def rescale(t: Any, sums: View, factor: View) -> None:
    """Multiply sums of earlier blocks of the loop, before the product that is added to them."""
    columns = next((y for y, step in sums.strides.items() if step == const(1)), "")
    rows = next((y for y in sums.strides if y != columns), "")
    a, b = (node("element", (i,), "f32") for i in range(2))
    product = t.inside.pop()
    scaled = t.map_call(a * b, {a: sums, b: factor}, (rows, columns), sums)
    t.inside += [If(t.first.lt(var("loop_start")), (scaled,)), product]


def decays(x: Expr, rescaling: set[Expr | None]) -> dict[Expr, Expr]:
    """Exponentials of a value less a maximum of it, which need no guards against overflow -> the difference."""
    every = ordered((x,)) if rescaling else ()
    return {exp(y): y for y in every if y.op == "sub" and y.args[1] in rescaling and y.args[0] is y.args[1].inner[0]}
