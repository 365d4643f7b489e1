"""Copies of images for convolutions: adjacent channels, and windows that instructions read whole.

Owns `adjacent`, and `whole_steps`, which adds channels and taps of zeros to filters of few channels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.numpy_arrays import name_of
from portmm.dispatch import config
from portmm.dispatch.cpu_kernels import packing_unit
from portmm.errors import ScheduleError
from portmm.onnx.operators import once
from portmm.spec.dtype import spell

if TYPE_CHECKING:
    from portmm.onnx.windows import Windows

Ints = tuple[int, ...]


def whole_steps(weight: Any, w: Windows, images: str) -> tuple[int, int]:
    """Channels, and taps along the last axis, of zeros to be added to a filter of few channels.

    Instructions multiply several neighbours of a sum at once; tiles, a row of theirs, which is copied as a vector where
    the channels of a row of taps fill it.

    Args:
        weight: (outputs, channels, *kernel).
        w: the windows.
        images: portmm's name of the elements of images.
    """
    sums = "s32" if images in ("s8", "u8") else images
    try:
        _, atom = packing_unit(spell(images, name_of(weight.dtype), sums), config.target())
    except ScheduleError:
        return 0, 0
    channels, taps = weight.shape[1], w.kernel[-1]
    more = -channels % atom.k_pack
    of_step = atom.k // math.gcd(atom.k, channels + more)
    fits = atom.tiled and channels <= FEW_CHANNELS and w.dilations[-1] == 1 < taps
    return more, -taps % of_step if fits and of_step <= MOST_TAPS * taps else 0


def widened(weight: Any, w: Windows, more: int, taps: int) -> tuple[Any, Windows]:
    """A filter with further channels and taps of zeros, once, and its windows of images that have their padding."""
    grown = ((0, 0), (0, more), *((0, 0),) * (weight.ndim - 3), (0, taps))
    none = (0,) * len(w.kernel)
    filled = once(weight, f"with {more} channels and {taps} taps", lambda: np.pad(weight, grown))
    return filled, w._replace(kernel=(*w.kernel[:-1], w.kernel[-1] + taps), begin=none, end=none)


def edges(w: Windows, taps: int) -> tuple[Ints, Ints]:
    """Padding of images before and after each axis, for windows with so many further taps."""
    return w.begin, (*w.end[:-1], w.end[-1] + taps)


def adjacent(x: Any, more: int = 0, padding: tuple[Ints, Ints] | None = None, value: int = 0) -> Any:
    """Images with adjacent channels: copied if these are apart, which takes less than to read them tap by tap.

    With `more` they are copied with as many further channels, and with so many pixels at their edges, of one value.
    """
    looks, node = [], x.node
    while node.kind == "view":
        looks.append(node.plain)
        node = node.inputs[0]
    like = np.empty(node.shape, node.dtype)
    for look in reversed(looks):
        like = look(like)
    if not more and padding is None and (not looks or like.strides[-1] == like.itemsize):
        return x
    begin, end = padding or ((0,) * (x.ndim - 2),) * 2
    where = (slice(None), *(slice(b, b + n) for b, n in zip(begin, x.shape[1:-1], strict=True)))
    grown = (b + n + z for b, n, z in zip(begin, x.shape[1:-1], end, strict=True))
    shape = (x.shape[0], *grown, x.shape[-1] + more)

    def copied(y: Any) -> Any:
        if y.shape[-1] > FEW_CHANNELS and not more and padding is None:
            return np.ascontiguousarray(y)
        result = np.full(shape, value, y.dtype) if more or padding else np.empty(shape, y.dtype)
        for c in range(y.shape[-1]):  # one copy of all elements takes three times as long
            result[..., c][where] = y[..., c]
        return result

    return x.recorder.wrap(x.recorder.call("copy", copied, (x.node,), "", shape=shape, dtype=x.dtype, own=True))


FEW_CHANNELS = 8
"""Channels up to which they are copied one by one."""
MOST_TAPS = 4
"""Taps of a row of a tile, over those of a filter, up to which zeros are multiplied."""
