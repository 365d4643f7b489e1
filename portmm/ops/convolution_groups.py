"""Filters of groups of channels: in panels of several groups, or as matrices of several groups for tile units.

A group of few channels fills no vector of outputs and no step of a tile. Vectors have several groups side by side
(`schedule.grouped_convolution`); tile units multiply bytes so much faster that they take matrices of several groups,
with zeros where channels and outputs are of different ones. Floats of groups that are no whole steps are left to
vectors: zero times an infinity of one group would be a NaN of another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch.cpu_kernels import group_unit, packing_unit
from portmm.errors import ScheduleError
from portmm.schedule.grouped_convolution import Panels, panels_of

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.target import Target

Array = np.ndarray[Any, Any]
MOST_TOGETHER = 16
"""Groups that tile units multiply together at most."""
FEW_BYTES = 8
"""Channels of bytes of a group up to which tile units multiply several groups together. Granite Rapids, 3 x 3, of one
kernel with a step for each group: of 4 and 8 channels 0.7 to 0.9 of the time, of 16 channels 1.2 to 1.5."""
LEAST_CHANNELS = {("bf16", "bf16"): 8, ("u8", "s8"): 4, ("s8", "s8"): 4}
"""Types of images and filters, and channels of a group from which tile units convolve all groups in one kernel. Granite
Rapids, bf16: of 8 to 48 channels 0.2 to 0.5 of the time of vectors, of 4 channels as much."""
OF_GROUPS = ("f32", "bf16", "f16", "s8")
"""Types of images and filters of groups of few channels, which are summed in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPanels:
    """Filters of groups of few channels.

    Attributes:
        owner: the panels, one after the other.
        panels: their layout.
    """

    owner: Array
    panels: Panels

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return int(self.owner.nbytes)

    @property
    def family(self) -> str:
        """The name of the layout."""
        return self.panels.family


def groups_in_tiles(w: tuple[int, ...], groups: int, dtypes: tuple[str, str], target: Target, *, last: bool) -> int:
    """The groups that tile units multiply together, so that a pixel's channels fill whole steps; 0 for other units.

    Args:
        w: shape of the filters.
        groups: of channels.
        dtypes: of images and of filters.
        target: the machine.
        last: channels are last.
    """
    if groups == 1 or not last or dtypes[1] not in {"bf16", "s8"} or 0 in w or math.prod(w[2:]) == 1:
        return 0
    if (atom := _unit_of(dtypes, target)) is None:
        return 0
    together = atom.k // math.gcd(atom.k, w[1])
    if together > 1 and (dtypes[1] == "bf16" or w[1] > FEW_BYTES):
        return 0
    return together if atom.tiled and together <= min(MOST_TOGETHER, groups) else 0


def channels_to_units(w: tuple[int, ...], dtypes: tuple[str, str], target: Target) -> int:
    """The channels of zeros behind those of a group that make them whole units of the machine's products.

    Windows of one tap have none: they are matrices, read in place.
    """
    atom = None if 0 in w or math.prod(w[2:]) == 1 else _unit_of(dtypes, target)
    return 0 if atom is None else -w[1] % atom.k_pack


def _unit_of(dtypes: tuple[str, str], target: Target) -> Atom | None:
    """The fastest unit for products of images and filters; None if there is none."""
    image, filters = map(numpy_arrays.numpy_of, dtypes)
    try:
        return packing_unit(numpy_arrays.word(numpy_arrays.types_of(image, filters)), target)[1]
    except ScheduleError:
        return None


def in_tiles(w: tuple[int, ...], groups: int, dtypes: tuple[str, str], target: Target, *, last: bool) -> int:
    """Vectors of a panel of filters where tile units convolve all groups in one kernel; 0: see `groups_in_tiles`."""
    if groups == 1 or not last or dtypes not in LEAST_CHANNELS or 0 in w or len(w) > 4 or w[0] == groups:
        return 0
    if groups_in_tiles(w, groups, dtypes, target, last=last) > 1:
        return 0
    atom = _unit_of(dtypes, target)
    if atom is None or not atom.tiled or w[1] % atom.k_pack or w[1] < LEAST_CHANNELS[dtypes]:
        return 0
    return 1 if (w[0] // groups - 1) // atom.n % 2 == 0 else 2


def joined(by_group: Array, together: int) -> Array:
    """Filters (group, output, channel, *kernel) of so many groups together, with zeros between them.

    Where groups are no whole number of these, the last ones have some of those before.
    """
    groups, outputs, channels, *kernel = by_group.shape
    wide = np.zeros((-(-groups // together), together * outputs, together * channels, *kernel), by_group.dtype)
    for matrix, first in enumerate(_firsts(groups, together)):
        for i in range(together):
            at = slice(i * outputs, (i + 1) * outputs), slice(i * channels, (i + 1) * channels)
            wide[matrix][at] = by_group[first + i]
    return wide


def separate(matrices: list[Array], sizes: tuple[int, int, int], together: int) -> list[Array]:
    """The matrix (tap channel, output) of each group, from those of several.

    Args:
        matrices: these.
        sizes: groups, and channels and outputs of each.
        together: groups of a matrix.
    """
    groups, channels, outputs = sizes
    firsts, each = _firsts(groups, together), []
    for group in range(groups):
        at = min(group // together, len(firsts) - 1)
        i = group - firsts[at]
        whole = matrices[at].reshape(-1, together, channels, together, outputs)
        each.append(np.ascontiguousarray(whole[:, i, :, i]).reshape(-1, outputs))
    return each


def _firsts(groups: int, together: int) -> list[int]:
    """The first group of each matrix; the last matrix may have groups of the one before."""
    return [min(x, groups - together) for x in range(0, groups, together)]


def grouped_panels(
    w: tuple[int, ...], groups: int, dtypes: tuple[str, str], target: Target, *, last: bool
) -> Panels | None:
    """The layout of panels of filters of few channels, for a machine; None for others: see `groups_in_tiles`."""
    image, dtype = dtypes
    if groups == 1 or not last or dtype not in OF_GROUPS or 0 in w:
        return None
    if groups_in_tiles(w, groups, dtypes, target, last=last):
        return None
    try:
        isa, atom = group_unit(image, dtype, target, w[1])
    except ScheduleError:
        return None
    if atom.k_pack == 1 and not isa.spelling(atom, "load_b", dtype, "f32"):
        return None
    return panels_of(groups, w[1], w[0] // groups, w[2:], isa, atom)


def pack_groups(filters: Array, x: Panels) -> GroupPanels:
    """Filters (group, output, channel, *kernel) in panels."""
    wide = np.zeros((x.windows, x.of_window * x.lanes, x.channels, math.prod(x.kernel)), np.float32)
    flat = filters.reshape(x.groups, x.outputs, x.channels, -1)
    for group in range(x.groups):
        window, first = group // x.together, group % x.together * x.outputs
        wide[window, first : first + x.outputs] = flat[group]
    every = wide.reshape(x.windows, x.of_window, x.lanes, x.depth, x.unit, *x.kernel).transpose(0, 1, 5, 3, 6, 2, 4)
    panels = numpy_arrays.aligned_empty(every.size, numpy_arrays.numpy_of(x.dtype))
    panels.reshape(every.shape)[...] = every
    panels.flags.writeable = False
    return GroupPanels(panels, x)


def unpack_groups(packed: GroupPanels) -> Array:
    """The filters (output, channel, *kernel) of panels, of two dimensions, in their type."""
    x = packed.panels
    shape = (x.windows, x.of_window, x.kernel[0], x.depth, x.kernel[1], x.lanes, x.unit)
    wide = packed.owner.reshape(shape).transpose(0, 1, 5, 3, 6, 2, 4)
    flat = wide.reshape(x.windows, x.of_window * x.lanes, x.channels, *x.kernel)[:, : x.together * x.outputs]
    return flat.reshape(x.windows * x.together * x.outputs, *flat.shape[2:])[: x.groups * x.outputs]
