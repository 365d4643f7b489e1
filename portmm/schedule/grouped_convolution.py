"""Blocks of a convolution of groups of few channels: panels of groups, a strip of the images, register tiles.

Owns `Panels`, the layout of its filters, `Grouped`, the sizes that its kernel has as constants, and the functions that
select them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from portmm.spec.convolution import Convolution, Windows
from portmm.spec.dtype import BY_NAME
from portmm.spec.problem import Family
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

STRIP = 0.4
"""Share of L2 that a strip may have."""
PIXELS = 512
"""Pixels of a block of rows: by then its rows above and below, which the next block copies again, are few."""
TAPS = 3
"""Taps of a row that take a vector of channels from a register: filters of all of them are in registers, too."""
CHAINS = 8
"""Sums of a register tile below which further vectors of outputs are added: multiply-adds wait for each other else."""
MOST_VECTORS = 4
"""Vectors of the outputs of a group beyond which a product for each group loses little."""
FILLED = 0.7
"""Share of the lanes of vectors that outputs of a group have, below which single taps are faster as products."""
MOST_WRITTEN = 4096
"""Multiply-adds of a register tile that are written out, beyond which compilers take long."""


@dataclass(frozen=True, slots=True)
class Panels:
    """Layout of filters of groups: (panel, row of taps, unit of channels of a group, tap of a row, lane, channel).

    A panel is a vector of outputs: those of some whole groups, or a part of those of one. Units are as many channels as
    one step multiplies.

    Attributes:
        groups: of channels.
        channels: of a group.
        outputs: of a group.
        kernel: taps along two dimensions.
        lanes: of a vector.
        dtype: of the elements of panels.
        unit: channels of a unit.
    """

    groups: int
    channels: int
    outputs: int
    kernel: tuple[int, int]
    lanes: int
    dtype: str
    unit: int = 1

    @property
    def together(self) -> int:
        """Groups of a vector."""
        return max(1, min(self.lanes // self.outputs, self.lanes // self.depth))

    @property
    def depth(self) -> int:
        """Units of channels of a group."""
        return self.channels // self.unit

    @property
    def windows(self) -> int:
        """Shares of the channels that panels read: of some groups each."""
        return -(-self.groups // self.together)

    @property
    def of_window(self) -> int:
        """Panels of each of these."""
        return -(-self.together * self.outputs // self.lanes)

    @property
    def panel(self) -> int:
        """Units of a panel."""
        return math.prod(self.kernel) * self.depth * self.lanes

    @property
    def family(self) -> str:
        """Its name, as one of packed layouts."""
        return str(Family(self.dtype, self.lanes, self.unit))


@dataclass(frozen=True, slots=True)
class Grouped(Windows):
    """Sizes of a convolution of groups of few channels over two dimensions, channels last.

    Attributes:
        panels: the layout of filters.
        image: elements from an image to the next.
        steps: elements from a row of an image to the next, and from a pixel to the next.
        rows: of the result in a block, at most.
        most: shares of the channels in a strip, at most.
        height: pixels of a register tile, at most.
        vectors: of a register tile, of panels of the same groups.
        fill: value of padding, of bytes; where it is not zero a strip has rows of it, too.
    """

    panels: Panels
    image: int
    steps: tuple[int, int]
    rows: int
    most: int
    height: int
    vectors: int
    fill: int = 0

    @property
    def width(self) -> int:
        """Pixels of a row of a strip."""
        return (self.out[1] - 1) * self.stride[1] + self.reach[1]

    @property
    def pixel(self) -> int:
        """Units of a pixel of a strip, for one share of the channels: vectors where several groups share one."""
        x = self.panels
        return x.depth if x.together == 1 else x.lanes

    @property
    def of_window(self) -> int:
        """Units of a strip for one share of the channels."""
        reached = (self.rows - 1) * self.stride[0] + self.reach[0]
        high = reached if self.fill else min(self.spatial[0], reached)
        return -(-high * self.width * self.pixel // 64) * 64


def panels_of(  # noqa: PLR0917 - sizes of filters
    groups: int, channels: int, outputs: int, kernel: tuple[int, ...], isa: Isa, atom: Atom
) -> Panels | None:
    """The layout of filters for vectors of an instruction set; None where other programs are faster, or needed.

    Args:
        groups: of channels.
        channels: of a group.
        outputs: of a group.
        kernel: taps along each dimension.
        isa: the instruction set.
        atom: its multiply-adds.
    """
    if len(kernel) > 2 or min(groups - 1, outputs - 1, channels) < 1 or atom.m > 1 or channels % atom.k_pack:
        return None
    high, wide = (1, *kernel) if len(kernel) == 1 else kernel
    panels = Panels(groups, channels, outputs, (high, wide), atom.n, atom.b, atom.k_pack)
    if panels.together > 1 and not isa.shuffles:
        return None
    least = FILLED * panels.of_window * atom.n if high * wide == 1 else atom.n / 2
    if panels.together == 1 and not least < outputs <= MOST_VECTORS * atom.n:
        return None
    written = panels.depth if panels.together > 1 else 1
    return panels if written * wide * isa.registers <= MOST_WRITTEN else None


def grouped(x: Convolution, strides: Sequence[int], panels: Panels, isa: Isa, target: Target) -> Grouped:
    """Blocks of a convolution of groups.

    Args:
        x: the convolution, over one or two dimensions.
        strides: of images (n, *spatial, c), in elements, with contiguous channels.
        panels: the layout of filters.
        isa: the instruction set.
        target: the machine.
    """
    windows = Windows.of(x, 2)
    down, across = windows.out
    row = strides[-3] if len(x.spatial) > 1 else 0
    fits = {y: _height(y, panels, isa) for y in range(1, panels.of_window + 1) if panels.of_window % y == 0}
    vectors = max(y for y, height in fits.items() if y == 1 or across < min(CHAINS, height + 1))
    height = fits[vectors]
    known = {y.name: y.bytes for y in target.levels}
    fill = x.padding if any((*x.before, *x.after)) else 0
    budget = int(STRIP * known.get("L2", known["L1"])) // (BY_NAME[panels.dtype].bytes * panels.unit)

    def sizes(rows: int, most: int) -> Grouped:
        image, steps = strides[0], (row, strides[-2])
        return Grouped(*windows.sizes, panels, image, steps, rows, most, height, vectors, fill)

    rows = max(1, min(down, -(-PIXELS // across)))
    while rows > 1 and sizes(rows, 1).of_window > budget:
        rows -= 1
    rows = -(-down // -(-down // rows))
    return sizes(rows, max(1, min(panels.windows, budget // sizes(rows, 1).of_window)))


def _height(vectors: int, panels: Panels, isa: Isa) -> int:
    """Pixels of a register tile, beside filters of some taps and two temporaries."""
    return max(1, (isa.registers - 2) // vectors - min(TAPS, panels.kernel[1]))
