"""Windows over the spatial axes of images, of convolutions and pooling: `Windows`, and those of a node's attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from portmm.onnx.model import Node

Ints = tuple[int, ...]


class Windows(NamedTuple):
    """Windows over the spatial axes of an image.

    Attributes:
        kernel: extents of a window.
        strides: between windows.
        dilations: between elements of a window.
        begin: padding before each axis.
        end: padding after each axis.
        result: number of windows along each axis.
    """

    kernel: Ints
    strides: Ints
    dilations: Ints
    begin: Ints
    end: Ints
    result: Ints


def windows_of(node: Node, size: Ints, kernel: Ints) -> Windows:
    """The windows of a node's attributes over an image."""
    rank = len(size)
    strides = tuple(node.attribute("strides", (1,) * rank))
    dilations = tuple(node.attribute("dilations", (1,) * rank))
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    auto = node.attribute("auto_pad", "NOTSET")
    pads = tuple(node.attribute("pads", (0,) * (2 * rank)))
    begin, end = pads[:rank], pads[rank:]
    if auto.startswith("SAME"):
        total = [max((-(-n // s) - 1) * s + w - n, 0) for n, s, w in zip(size, strides, spans, strict=True)]
        less, more = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        begin, end = (less, more) if auto == "SAME_UPPER" else (more, less)
    elif auto == "VALID":
        begin = end = (0,) * rank
    result, grown = [], []
    for n, s, w, b, z in zip(size, strides, spans, begin, end, strict=True):
        count = (n + b + z - w) // s + 1
        if node.attribute("ceil_mode", 0):
            count = -(-(n + b + z - w) // s) + 1
            count -= (count - 1) * s >= n + b  # a window must begin inside the image or its padding before
        result.append(count)
        grown.append(max((count - 1) * s + w - n - b, z))
    return Windows(kernel, strides, dilations, begin, tuple(grown), tuple(result))
