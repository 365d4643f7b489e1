"""Explanation of a convolution: the transforms of its images, as written and simplified, and the program.

Owns `explain_conv`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import atom_of
from portmm.dispatch import config
from portmm.dispatch.cpu_kernels import family, isa_of
from portmm.dispatch.view_routes import schedule_of
from portmm.errors import ConvolutionError
from portmm.ops.convolution_options import Options, hashable, layout_of, sizes
from portmm.ops.convolution_weights import is_depthwise
from portmm.ops.depthwise import parts
from portmm.schedule.direct_convolution import direct
from portmm.spec.convolution import planes, windows
from portmm.spec.dtype import BY_NAME, UNCONVERTED
from portmm.spec.layout import Layout
from portmm.spec.layouts import Views
from portmm.spec.problem import Problem
from portmm.util.text import number

if TYPE_CHECKING:
    from collections.abc import Sequence


def explain_conv(
    x: Sequence[int], w: Sequence[int], *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    layout: str = "NHWC", dtype: str = "f32",
) -> str:  # fmt: skip
    """The transforms of a convolution's windows before and after simplification, and the program that reads them.

    Args:
        x: shape of dense images.
        w: shape of filters, (outputs, channels of a group, *kernel).
        stride: as in `conv`, like the options that follow.
        padding: zeros around the images.
        dilation: distance of taps.
        groups: of channels.
        layout: of the images.
        dtype: portmm's name of the type of images and filters, as "f32" or "bf16".

    Raises:
        ConvolutionError: shapes or options do not fit together, or the type is unknown.
    """
    if dtype not in BY_NAME:
        raise ConvolutionError(f"dtype is {dtype!r}; pass one of {', '.join(BY_NAME)}")
    options = Options(hashable(stride), hashable(padding), hashable(dilation), groups, layout)
    size = sizes(tuple(x), tuple(w), options)
    last, images = layout_of(layout)[1], x[0]
    strides = [int(s) for s in Layout(tuple(x)).stride]
    strides = strides if last else [strides[0], *strides[2:], strides[1]]
    view = windows(size, strides) if last else planes(size, strides[1:])
    lines = [str(size), f"{'A, (image pixel, tap channel)' if last else 'B, (channel tap, pixel)'}, is a view:"]
    extents = view.shape
    lines.append(f"  memory    {_named(extents)}, strides {_named(view.stride)}")
    for transform in view.transforms:
        extents = transform.extents(extents)
        lines.append(f"  {type(transform).__name__.lower():9} {_named(extents)}")
    lines.append(f"offset of (i0, i1): {view.form}")
    for y in view.conditions:
        bounds = (f"{y.least} <= " if y.least is not None else "", f" < {y.end}" if y.end is not None else "")
        lines.append(f"in no padding if {bounds[0]}{y.index}{bounds[1]}")
    if is_depthwise(tuple(w), groups, dtype):
        of = "channels" if last else "pixels"
        lines.append(f"depthwise: a kernel over rows of {of}, the sum of {number(size.taps, 'tap')}")
        cut = parts(size)
        padded = sum(not y.inside for y in cut)
        inside = "the interior" if padded else "all of the result"
        lines += [f"  {inside} reads the images in place"] * cut[0].inside
        lines += [f"  {number(padded, 'part')} of the result: from strips, copied with padding"] * bool(padded)
        return "\n".join(lines)
    target, threads = config.target(), config.get_num_threads()
    if last:
        p = Problem(
            images * size.pixels, size.outputs, size.depth, dtype, a="any", b="packed", family=family(dtype, target)
        )
        s, _ = schedule_of(p, Views(), target, threads)
        blocks = direct(size, strides, s, target) if dtype in UNCONVERTED else None
        if blocks is not None:
            loops = "blocks of k around panels" if blocks.k_outer else "panels around blocks of k"
            where = f"a strip of {blocks.strip_size} elements" if blocks.copies else "in place"
            lines.append(f"direct: register tiles of {s.mr} pixels of a row by {s.nr}, read {where}, {loops}")
            runs, of_block = number(blocks.runs, "run"), number(blocks.of_block, "run")
            lines.append(f"  {runs} of {blocks.run}, blocks of {of_block}, k of {blocks.kc}")
            return "\n".join(lines)
        s, _ = schedule_of(p, Views(a=view), target, threads)
    else:
        p = Problem(size.outputs, size.pixels, size.depth, dtype, images, a="row", b="any")
        s, _ = schedule_of(p, Views(b=view), target, threads)
    lines.append(f"packed by runs: {s.name(atom_of(isa_of(s, target), s.dtype, s.atom.lanes))}, {s}")
    return "\n".join(lines)


def _named(values: Sequence[Any]) -> str:
    """Extents or strides, with names."""
    return f"({', '.join(map(str, values))})"
