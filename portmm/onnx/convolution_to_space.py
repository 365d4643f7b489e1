"""Convolutions whose channels become blocks of pixels, depth-to-space or pixel shuffle: a part of the store.

Owns `to_space`. Of b x b blocks the filters are b sets, one for each row of a block, with the channels of its pixels
one after the other. A set computes every b-th row of the result, where it lies; nothing is moved afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from portmm.fusion.depth_to_space import by_rows
from portmm.fusion.plan_windows import Filter
from portmm.onnx.arrays import channels_first
from portmm.onnx.operators import once
from portmm.ops.convolution import conv
from portmm.ops.convolution_options import Options, sizes
from portmm.ops.convolution_weights import pack_conv
from portmm.spec import elementwise as e

Array = np.ndarray[Any, Any]


def to_space(x: Any, filters: tuple[Array, Array | None], how: dict[str, Any], blocks: tuple[int, str]) -> Any:
    """Record a convolution of images, channels last, whose channels become blocks; its result is (n, h, b, w, b c).

    Args:
        x: the images, traced.
        filters: filters and bias, constants.
        how: options of `conv`.
        blocks: extent of a block, and the order of channels, "DCR" or "CRD".
    """
    (weight, bias), (b, order) = filters, blocks

    def packed() -> Any:
        return tuple(pack_conv(y, layout=how["layout"]) for y in by_rows(weight, b, order))

    rows = once(weight, f"rows of blocks {b} {order}", packed)
    size = sizes(tuple(x.shape), rows[0].shape, Options(**how))

    def alone(images: Any) -> Any:
        return np.stack([conv(images, y, **how) for y in rows], 2)

    shape = (x.shape[0], size.out[0], b, size.out[1], size.outputs)
    y = x.recorder.over_windows("conv", x, Filter(rows[0], size, rows), shape, alone)
    return y if bias is None else y + by_rows(bias, b, order).reshape((1, 1, b, 1, size.outputs))


def finished(y: Any, b: int, *, relu: bool) -> Any:
    """The image of blocks, with channels first, after a ReLU, if there is one."""
    n, h, _, w, outputs = y.shape
    y = e.relu(y) if relu else y
    return channels_first(y.reshape((n, h * b, w * b, outputs // b)))
