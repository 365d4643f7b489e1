"""The manifest's cases of convolutions in the host's memory: kernels that read images in place, and of groups."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from fused_cases import epilogues
from manifest_case import Case, on_host

from portmm.codegen.lower import lower_direct, lower_grouped, lower_tiled, lower_view
from portmm.dispatch.cpu_kernels import family, group_unit, isa_of
from portmm.dispatch.view_routes import in_place, schedule_of
from portmm.errors import ScheduleError
from portmm.schedule.grouped_convolution import grouped, panels_of
from portmm.schedule.tile_convolution import Tiled
from portmm.spec.convolution import Convolution, windows
from portmm.spec.dtype import types
from portmm.spec.layouts import Views
from portmm.spec.problem import Problem
from portmm.target.target import load_target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.ir.nodes import Kernel
    from portmm.target.target import Target

CHIPS = ("granite-rapids", "zen4", "x86-64-v3", "neoverse-v2")
WORDS = ("f32", "bf16", "u8-s8-s32")
FUSED = ("f32", "bf16", "u8-s8-f32")
IMAGES = 2


def _conv(sizes: tuple[int, ...], spatial: tuple[int, ...], kernel: int, more: tuple[int, int, int]) -> Convolution:
    """A convolution of groups, channels and outputs; more is a stride, a dilation and padding."""
    every = ((x,) * len(spatial) for x in (kernel, *more, more[2]))
    return Convolution(*sizes, spatial, *every)


CONVOLUTIONS = {
    "3 by 3": _conv((1, 64, 64), (56, 56), 3, (1, 1, 1)),
    "large": _conv((1, 512, 512), (14, 14), 3, (1, 1, 1)),
    "small": _conv((1, 512, 512), (7, 7), 3, (1, 1, 1)),
    "strided": _conv((1, 32, 48), (57, 40), 3, (2, 1, 1)),
    "dilated": _conv((1, 64, 64), (28, 28), 3, (1, 2, 0)),
    "pointwise": _conv((1, 256, 128), (28, 28), 1, (2, 1, 0)),
    "of one dimension": _conv((1, 64, 96), (400,), 5, (1, 1, 2)),
    "groups of 4": _conv((32, 4, 4), (56, 56), 3, (1, 1, 1)),
    "groups of 16": _conv((8, 16, 32), (29, 30), 3, (2, 1, 1)),
    "groups of one dimension": _conv((12, 8, 8), (200,), 3, (1, 2, 1)),
}


def cases() -> Iterator[Case]:
    """All cases of convolutions."""
    plain = str(epilogues()["plain"])
    kinds = (*((word, "") for word in WORDS), *((word, plain) for word in FUSED))
    for chip, (word, fused), (name, x) in product(CHIPS, kinds, CONVOLUTIONS.items()):
        label = " fused" if fused else ""
        yield from on_host(f"{name} {chip} {word}{label}", _kernel, x, load_target(chip), word, fused)


def _kernel(x: Convolution, target: Target, word: str, fused: str) -> Kernel:
    """The kernel that is chosen for a convolution, channels last.

    Raises:
        ScheduleError: there is none.
    """
    image, filters, result = types(word)
    channels = x.groups * x.channels
    strides = (channels * x.spatial[0], channels, 1)
    if len(x.spatial) > 1:
        strides = (strides[0] * x.spatial[1], channels * x.spatial[1], channels, 1)
    if x.groups > 1:
        isa, atom = group_unit(image, filters, target, x.channels)
        panels = panels_of(x.groups, x.channels, x.outputs, x.kernel, isa, atom)
        if panels is None:
            raise ScheduleError("no panels of groups")
        return lower_grouped(isa, atom, grouped(x, strides, panels, isa, target), (image, result), fused)
    p = Problem(x.pixels, x.outputs, x.depth, word, IMAGES, "any", "packed", family=family(word, target), fused=fused)
    plan = in_place(p, x, strides, target, 1)
    if plan is None:
        views = Views(a=windows(x, strides))
        s, _ = schedule_of(p, views, target, 1)
        return lower_view(s, isa_of(s, target), *views)
    s, sizes = plan
    return (lower_tiled if isinstance(sizes, Tiled) else lower_direct)(s, isa_of(s, target), sizes)
