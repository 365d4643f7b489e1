"""Blocks of a direct convolution: rows of a result, taps, and a strip of the images, on one chip.

Owns `Strip`, sizes of convolutions that read images in place, `Direct`, those that its kernel has as constants, and
`direct`, which selects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.spec.convolution import Convolution, Windows
from portmm.spec.dtype import BY_NAME
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.target.target import Target

STRIP = 0.4
"""Share of L2 that a strip may have; panels of filters stream through the rest."""
FILTERS = 0.5
"""Share of L2 up to which filters stay there from a block of rows to the next."""
PANEL = 0.75
"""Share of L1 that a block of a panel of filters may have, beside pixels."""
AGAIN = 8
"""Part of a strip whose rows the next block copies again, where they are copied element by element."""
PIXELS = 512
"""Pixels of a block: by then loading a panel to L1 is less than a twentieth of the work with it."""


@dataclass(frozen=True, slots=True)
class Strip(Windows):
    """Sizes of a convolution over two dimensions, channels last, with a strip of the images for some rows of a result.

    Elements of images and filters are units of neighbouring channels where an atom multiplies those.

    Attributes:
        channels: of a group.
        image: elements from an image to the next.
        steps: elements from a row of an image to the next, and from a pixel to the next.
        copies: a block's rows of an image are copied to a strip, with padding.
        row: elements from a row to the next, of the strip or in place.
        pixel: likewise of a pixel.
        run: elements of a run of k: the channels of a tap, or of all taps of a row, where these are contiguous.
        rows: of the result in a block, at most.
        few: channels of images that are no whole units, in elements, as `image` and `steps` are then; or 0. The strip
            has zeros behind them.
    """

    channels: int
    image: int
    steps: tuple[int, int]
    copies: bool
    row: int
    pixel: int
    run: int
    rows: int
    few: int

    @property
    def runs_of_row(self) -> int:
        """Runs of a row of taps."""
        return self.kernel[1] * self.channels // self.run

    @property
    def reached(self) -> int:
        """Rows of an image, with padding, that windows of a block reach."""
        return (self.rows - 1) * self.stride[0] + self.reach[0]


@dataclass(frozen=True, slots=True)
class Direct(Strip):
    """Sizes of a direct convolution, in whose strip rows have padding at their ends.

    Attributes:
        after: zeros that windows reach at the ends of rows.
        of_block: runs in a block of k.
        kc: elements of a block of k, where that is a part of a run.
        k_outer: blocks of k are the outer loop, panels the inner one: filters are read once for each block of rows.
        to: elements from a row of a result to the next, and from a pixel to the next, where pixels of neighbouring rows
            are otherwise apart than those of a row; the images of a result are items then.
    """

    after: int
    of_block: int
    kc: int
    k_outer: bool
    to: tuple[int, int] | None = None

    @property
    def runs(self) -> int:
        """Number of runs."""
        return self.kernel[0] * self.runs_of_row

    @property
    def whole(self) -> bool:
        """Whether all of k is one block."""
        return self.kc == self.run and self.of_block >= self.runs

    @property
    def strip_size(self) -> int:
        """Elements of a strip."""
        return min(self.spatial[0], self.reached) * self.row if self.copies else 0


def rows_of_few(out: int, reach: int, stride: int) -> int:
    """Rows of a result in a block, so that few of its strip are copied again: see `AGAIN`."""
    return min(out, AGAIN * -(-max(0, reach - stride) // stride))


def direct(
    x: Convolution, strides: Sequence[int], s: Schedule, target: Target, to: tuple[int, int] | None = None
) -> Direct | None:
    """Blocks of a direct convolution; None for one that needs another program.

    Args:
        x: the convolution.
        strides: of images (n, *spatial, c), in elements.
        s: a schedule for its panels and register tiles.
        target: the machine.
        to: elements from a row of a result to the next, and from a pixel to the next, or None: see `Direct`.
    """
    if len(strides) > 4 or strides[-1] != 1:
        return None
    kr, few = s.atom.kr, x.channels if x.filler else 0
    if kr > 1:
        padded = x.padding and any((*x.before, *x.after))
        whole = not (x.channels % kr or any(y % kr for y in strides[:-1]))
        if padded or not (whole or few):
            return None
        x = replace(x, channels=(x.channels + x.filler) // kr, filler=0)
        strides = strides if few else (*(y // kr for y in strides[:-1]), 1)
    flat = len(strides) == 3  # one dimension: images of one row
    windows = Windows.of(x, 2)
    spatial, out, kernel, stride, dilation, before = windows.sizes
    after, reach = ((0, *x.after) if flat else x.after), windows.reach
    straddles = kernel[0] > 1 and dilation[0] > spatial[0]
    if before[0] >= reach[0] or after[0] >= reach[0] or straddles or x.channels < 1:
        return None  # windows of zeros alone, the last ones with taps above and below the image
    row, pixel = (0, strides[1]) if flat else (strides[1], strides[2])
    image = strides[0]
    beyond = max(0, (out[1] - 1) * stride[1] - before[1] + reach[1] - spatial[1])
    together = dilation[1] == 1
    copies = bool(few or before[1] or beyond or (together and kernel[1] > 1 and pixel != x.channels))
    width = spatial[1] + before[1] + beyond
    steps = (width * x.channels, x.channels) if copies else (row, pixel)
    if steps[1] < 1 or (steps[0] < 1 and not flat):
        return None
    run = x.channels * kernel[1] if together and (kernel[1] == 1 or steps[1] == x.channels) else x.channels
    runs = kernel[0] * (x.channels * kernel[1] // run)
    size = BY_NAME[s.types[0]].bytes * kr
    levels = {y.name: y.bytes for y in target.levels}
    if not {"L1", "L2"} <= set(levels):
        return None
    most = max(1, int(PANEL * levels["L1"]) // (s.nr * size))
    parts = -(-run // most)
    kc = -(-run // parts)
    kc = run if parts == 1 else -(-kc // 8) * 8
    of_block = min(runs, max(1, most // run)) if runs == kernel[0] else 1
    budget = int(STRIP * levels["L2"]) // size
    rows = max(1, min(out[0], -(-PIXELS // out[1])))
    if few:
        rows = max(rows, rows_of_few(out[0], reach[0], stride[0]))
    k_outer = x.depth * x.outputs * size > FILTERS * levels["L2"]
    per_row = out[1] * kc * of_block * stride[1] if k_outer else max(steps[0], 1)
    while rows > 1 and (rows if k_outer else min(spatial[0], (rows - 1) * stride[0] + reach[0])) * per_row > budget:
        rows -= 1
    blocks = -(-out[0] // rows)
    rows = -(-out[0] // blocks)
    return Direct(
        *windows.sizes, x.channels, image, (row, pixel), copies, *steps, run, rows, few, beyond, of_block, kc, k_outer,
        to,
    )  # fmt: skip
