"""Blocks of a convolution on tile units (AMX): rows of a result, pixels of a register tile, and a strip of the images.

Owns `Tiled`, the sizes that its kernel has as constants, and `tiled`, which selects them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from portmm.schedule.direct_convolution import FILTERS, PANEL, PIXELS, STRIP, Strip, rows_of_few
from portmm.spec.convolution import Convolution, Windows
from portmm.spec.dtype import BY_NAME
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.target import Target

STAYS = 0.6
"""Share of L2 up to which all filters stay there while rows of pixels pass."""
DEEPEST = 0.5
"""Share of L2 that a panel of filters may have, which all pixels of a block pass."""
LEAST_ROW = 9
"""Pixels of a row of a result from which a tile has enough rows. Granite Rapids, ResNet-50, of packed windows: rows of
14, 28 and 56 take 0.7, 0.6 and 0.4 of the time, rows of 7 1.2."""
OF_SINGLE = {1: 1 / 2, 2: 1 / 4}
"""Step between pixels, and the share of L2 that filters of single taps may have; of longer steps as of two. Granite
Rapids, ResNet-50 and a U-Net, of a product that packs A: with 512 KiB to 1 MiB of filters 0.7 to 0.87 of the time, of
other pixels than each 1.0 to 1.35, with more 1.0 to 1.75."""
ROW = 0.6
"""Share of L1 that a row of pixels may have, or two, past which all panels go; parts of longer ones do it singly."""
FEWEST = 5
"""The same where a panel of filters stays in L1."""
LEAST_STEP = 2
"""Part of the units of a tile's rows that a step of k has at least, or of a run if that is shorter."""
FEW_SUMS = 4
"""Tiles of A of a register tile where C has one tile of columns: a product waits for the one before of the same tile,
which takes as long as three of others."""
TOGETHER = 3
"""Tiles of columns of a register tile beside one tile of A, where a group has no more outputs: four loads for three
products, none of padding. Granite Rapids, bf16, groups of 48: 0.53 of the time of four tiles of A by one of columns."""
WIDEST = 2
"""Tiles of C along a panel, at most: with two tiles of A all of a step are loaded before they are multiplied."""


@dataclass(frozen=True, slots=True)
class Tiled(Strip):
    """Sizes of a convolution by tiles, in whose strip there is padding on all sides.

    Attributes:
        deep: units of a step of k, of equal steps of a run.
        tall: pixels of a register tile.
        paired: a register tile is of two rows of the result, with `tall` pixels of each.
        near: a panel of filters stays in L1 while tiles of pixels pass by, whose lines are of one row each.
        by_rows: rows of pixels stay in L1 while panels of filters pass by, which stay in L2.
        by_slices: register tiles of pixels do so, one by one.
        fill: value of padding.
        groups: of channels, whose panels follow each other; the strip has one part for each.
        outputs: of a group.
        across: tiles of A of a register tile.
        panels: of filters of a register tile.
    """

    deep: int
    tall: int
    paired: bool
    near: bool
    by_rows: bool
    by_slices: bool = False
    fill: int = 0
    groups: int = 1
    outputs: int = 0
    across: int = 2
    panels: int = 1

    @property
    def slices(self) -> int:
        """Register tiles of a row of the result, or of two; the last may begin within the one before."""
        return -(-self.out[1] // self.tall)

    @property
    def strip_size(self) -> int:
        """Units of a strip."""
        return self.groups * self.reached * self.row if self.copies else 0


def tiled(  # noqa: PLR0917 - what a kernel is made for
    x: Convolution, strides: Sequence[int], s: Schedule, atom: Atom, target: Target, groups: int = 1
) -> Tiled | None:
    """Blocks of a convolution on tile units; None for one that needs another program.

    Args:
        x: the convolution.
        strides: of images (n, *spatial, c), in elements.
        s: a schedule for its panels.
        atom: the tile unit.
        target: the machine.
        groups: those that the kernel computes.
    """
    kr, flat = s.atom.kr, len(strides) == 3  # one dimension: images of one row
    few = x.channels if x.filler else 0
    whole = not (x.channels % kr or any(y % kr for y in strides[:-1]))
    if len(strides) > 4 or strides[-1] != 1 or not (whole or few):
        return None
    if s.nr > WIDEST * atom.n or not {"L1", "L2"} <= {y.name for y in target.levels}:
        return None
    channels, (image, *inner) = (x.channels + x.filler) // kr, (y if few else y // kr for y in strides[:-1])
    windows = Windows.of(x, 2)
    spatial, out, kernel, stride, dilation, before = windows.sizes
    copies = any((*x.before, *x.after)) or few > 0 or (groups > 1 and math.prod(kernel) > 1)
    width = max(spatial[1] + before[1], (out[1] - 1) * stride[1] + windows.reach[1])
    own = (0, inner[0]) if flat else (inner[0], inner[1])
    row, pixel = (width * channels, channels) if copies else own
    together = kernel[1] == 1 or (dilation[1] == 1 and pixel == channels)
    run = channels * kernel[1] if together else channels
    deep = _step(run, atom.deep)
    if (groups == 1 and deep * LEAST_STEP < min(run, atom.deep)) or pixel < 1 or (row < 1 and not flat):
        return None
    panels = -(-x.outputs // s.nr) if 2 * atom.n < x.outputs <= TOGETHER * atom.n else 1
    paired = out[1] <= atom.m and panels == 1
    across = 1 if panels > 1 else FEW_SUMS if not paired and min(s.nr, x.outputs) <= atom.n else 2
    tall = out[1] if paired else -(-out[1] // -(-out[1] // (across * atom.m)))
    size = BY_NAME[s.types[0]].bytes * kr
    levels = {y.name: y.bytes for y in target.levels}
    depth = channels * math.prod(kernel)
    fits = depth * s.nr * size <= PANEL * levels["L1"]
    filters, single = depth * x.outputs * groups * size, math.prod(kernel) == 1
    by_rows = single or (not fits and filters <= STAYS * levels["L2"])
    near = fits and not by_rows and stride[1] * pixel >= deep
    other = out[1] < (FEWEST if fits else LEAST_ROW) or depth * s.nr * size > DEEPEST * levels["L2"]
    other = other or (single and filters > OF_SINGLE[min(stride[1], 2)] * levels["L2"])
    if other and groups == 1 and not (copies and (x.padding or few)):
        return None  # windows are packed instead, if their padding is zero
    rows = out[0] if filters > FILTERS * levels["L2"] else min(out[0], -(-PIXELS // out[1]))
    rows = max(rows, rows_of_few(out[0], windows.reach[0], stride[0])) if few else rows
    wide = max(row, 1) * (groups if copies else 1) * size
    while rows > 1 and ((rows - 1) * stride[0] + windows.reach[0]) * wide > STRIP * levels["L2"]:
        rows -= 1
    rows = -(-out[0] // -(-out[0] // rows))
    rows += paired and rows % 2 and rows < out[0]
    by_slices = by_rows and not paired and out[1] * stride[1] * pixel * size > ROW * levels["L1"]
    return Tiled(
        *windows.sizes, channels, image, own, copies, row, pixel, run, rows, few, deep, tall, paired, near, by_rows,
        by_slices, x.padding, groups, x.outputs, across, panels,
    )  # fmt: skip


def _step(run: int, most: int) -> int:
    """Units of the fewest equal steps of a run."""
    return next(run // y for y in range(-(-run // most), run + 1) if run % y == 0)
