"""Explanation of a convolution: the transforms of its images, as written and simplified, and the program.

Owns `explain_conv`, and `ConvolutionExplanation`, the record that it returns, with its printed form and its picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from portmm.arrays.grid_call import settings
from portmm.arrays.operand import WIDEST, result_type
from portmm.codegen.lower import atom_of, lower_grid
from portmm.dispatch import config, device_routes
from portmm.dispatch.cpu_kernels import family, group_unit, isa_of
from portmm.dispatch.view_routes import in_place, schedule_of, stacked
from portmm.errors import ConvolutionError
from portmm.explanation.product import explained, target_called
from portmm.explanation.record import Explanation
from portmm.ops.convolution_groups import channels_to_units, grouped_panels, groups_in_tiles, in_tiles
from portmm.ops.convolution_options import Options, hashable, layout_of, sizes
from portmm.ops.convolution_weights import is_depthwise, whole_groups
from portmm.ops.depthwise import parts
from portmm.schedule.candidates import PACKED_VECTORS
from portmm.schedule.grouped_convolution import Panels, grouped
from portmm.schedule.program import device_of
from portmm.schedule.tile_convolution import Tiled
from portmm.spec.convolution import Convolution, planes, windows
from portmm.spec.dtype import BY_NAME, accumulator, types
from portmm.spec.layout import Layout
from portmm.spec.layouts import Views
from portmm.spec.problem import Problem
from portmm.spec.problem import family as family_called
from portmm.util.svg import document
from portmm.util.text import number

if TYPE_CHECKING:
    from portmm.schedule.direct_convolution import Direct
    from portmm.schedule.schedule import Schedule
    from portmm.target.target import Target


LINE, PAD, GAP, LETTER, TOP = 18, 10, 22, 7.3, 66
STYLE = (
    ".k{fill:#eef4fb;stroke:#31688e}.r{fill:#f1f8ec;stroke:#35794a}.t{font:bold 13px sans-serif}.o{font:12px monospace}"
)


@dataclass(frozen=True, slots=True)
class ConvolutionExplanation:
    """An explanation of a convolution.

    Attributes:
        title: its sizes in words.
        matrix: the operand of the product that is a view of the images.
        transforms: memory, and the transforms of it, with the extents after each.
        simplified: their composition: the offset of an element, and when it is in no padding.
        program: what reads the view.
        product: on a device, the explanation of its product, with kernels and source.
    """

    title: str
    matrix: str
    transforms: tuple[str, ...]
    simplified: tuple[str, ...]
    program: tuple[str, ...]
    product: Explanation | None = None

    def __str__(self) -> str:
        transforms = (f"  {line}" for line in self.transforms)
        return "\n".join((self.title, f"{self.matrix}, is a view:", *transforms, *self.simplified, *self.program))

    def __contains__(self, words: str) -> bool:
        return words in str(self)

    def svg(self) -> str:
        """The picture of the transforms before and after simplification, and of the program, as SVG."""
        return drawn(self.title, self.matrix, self.transforms, [self.simplified, self.program])


def _multiplies(dtype: str) -> bool:
    """Whether images and filters may both be of a type."""
    try:
        return bool(accumulator(dtype, dtype))
    except ValueError:
        return False


def _shape(x: Any) -> tuple[int, ...]:
    """A shape, that of an array or a sequence of extents."""
    return tuple(int(n) for n in getattr(x, "shape", x))


def explain_conv(
    x: Any, w: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    layout: str = "NHWC", dtype: str = "f32", target: str | Target | None = None,
) -> ConvolutionExplanation:  # fmt: skip
    """The transforms of a convolution's windows before and after simplification, and the program that reads them.

    Args:
        x: shape of dense images, or an array of that shape.
        w: shape of filters, (outputs, channels of a group, *kernel), or an array.
        stride: as in `conv`, like the options that follow.
        padding: zeros around the images.
        dilation: distance of taps.
        groups: of channels.
        layout: of the images.
        dtype: portmm's name of the type of images and filters, as "f32" or "bf16".
        target: a chip, a device, an ISA or a .toml file, here or not; None for the current target.

    Raises:
        ConvolutionError: shapes or options do not fit together, or the type is unknown.
        TargetError: there is no target of that name.
        ScheduleError: the target has no schedule for it.
    """
    if not _multiplies(dtype):
        raise ConvolutionError(f"dtype is {dtype!r}; pass one of {', '.join(filter(_multiplies, BY_NAME))}")
    x, w = _shape(x), _shape(w)
    options = Options(hashable(stride), hashable(padding), hashable(dilation), groups, layout)
    size, machine = sizes(x, w, options), target_called(target)
    last = layout_of(layout)[1]
    strides = [int(s) for s in Layout(x).stride]
    strides = strides if last else [strides[0], *strides[2:], strides[1]]
    view = windows(size, strides) if last else planes(size, strides[1:])
    extents = view.shape
    lines = [f"memory    {_named(extents)}, strides {_named(view.stride)}"]
    for transform in view.transforms:
        extents = transform.extents(extents)
        lines.append(f"{type(transform).__name__.lower():9} {_named(extents)}")
    after = [f"offset of (i0, i1): {view.form}"]
    for y in view.conditions:
        bounds = (f"{y.least} <= " if y.least is not None else "", f" < {y.end}" if y.end is not None else "")
        after.append(f"in no padding if {bounds[0]}{y.index}{bounds[1]}")
    product = None
    if machine.device is not None:
        product = _on_device(size, x[0], view, machine, last=last, dtype=dtype)
        program = _transfers(product, size, last=last)
    elif is_depthwise(tuple(w), groups, dtype):
        program = _depthwise(size, last=last)
    elif vectors := in_tiles(tuple(w), groups, types(dtype)[:2], machine, last=last):
        threads = config.get_num_threads() if target is None else machine.cores
        program = _stacked(size, x[0], strides, vectors, (machine, threads), dtype)
    elif (panels := grouped_panels(tuple(w), groups, types(dtype)[:2], machine, last=last)) is not None:
        program = _grouped(size, strides, (types(dtype)[0], panels), machine)
    else:
        threads = config.get_num_threads() if target is None else machine.cores
        together = groups_in_tiles(tuple(w), groups, types(dtype)[:2], machine, last=last)
        size = whole_groups(size, max(1, together))
        program = [f"{together} groups together, with zeros between their filters"] if together > 1 else []
        filler = channels_to_units(tuple(w), types(dtype)[:2], machine) if last and together < 2 else 0
        if filler:
            size = replace(size, filler=filler)
            program = [f"{filler} of {size.channels + filler} channels are zeros, in filters and strips of images"]
        program += _on_cores(size, x[0], (view, strides), (machine, threads), last=last, dtype=dtype)
    matrix = "A, (image pixel, tap channel)" if last else "B, (channel tap, pixel)"
    return ConvolutionExplanation(str(size), matrix, tuple(lines), tuple(after), tuple(program), product)


def _depthwise(size: Convolution, *, last: bool) -> list[str]:
    """The program of filters of single channels."""
    of, cut = "channels" if last else "pixels", parts(size)
    padded = sum(not y.inside for y in cut)
    inside = "the interior" if padded else "all of the result"
    lines = [f"depthwise: a kernel over rows of {of}, the sum of {number(size.taps, 'tap')}"]
    lines += [f"  {inside} reads the images in place"] * cut[0].inside
    return lines + [f"  {number(padded, 'part')} of the result: from strips, copied with padding"] * bool(padded)


def _grouped(size: Convolution, strides: Sequence[int], of: tuple[str, Panels], target: Target) -> list[str]:
    """The program of groups of few channels, of a type of images and filters in panels."""
    image, panels = of
    isa, atom = group_unit(image, panels.dtype, target, panels.channels)
    x = grouped(size, strides, panels, isa, target)
    lanes = f"{number(panels.together, 'group')} in a vector of {atom.n} outputs"
    if panels.together == 1:
        lanes = f"{number(panels.of_window, 'vector')} of {atom.n} outputs a group"
    height = -(-x.out[1] // -(-x.out[1] // x.height))
    return [
        f"grouped: {lanes}, register tiles of {height} pixels of a row by {number(x.vectors, 'vector')}",
        f"  strips of {number(x.rows, 'row')} of the result, {x.most * x.of_window} elements, with padding",
    ]


def _stacked(  # noqa: PLR0917 - what a kernel is made for
    size: Convolution, images: int, strides: Sequence[int], vectors: int, on: tuple[Target, int], dtype: str
) -> list[str]:
    """The program of groups on tile units, whose panels are of some vectors."""
    (target, threads), usual = on, family_called(family(dtype, on[0]))
    panels = str(replace(usual, nr=usual.nr // PACKED_VECTORS * vectors))
    m, n = images * size.pixels, size.groups * size.outputs
    p = Problem(m, n, size.depth, dtype, a="any", b="packed", family=panels)
    plan = stacked(p, size, tuple(strides), target, threads)
    return [f"{size.groups} groups in one kernel, whose panels follow each other", *_in_place(*plan)]


def _on_cores(
    size: Convolution, images: int, of_images: tuple[Layout, Sequence[int]], on: tuple[Target, int],
    *, last: bool, dtype: str,
) -> list[str]:  # fmt: skip
    """The program on cores: direct, or packed windows."""
    (view, strides), (target, threads) = of_images, on
    if last:
        panels = family(dtype, target, size.outputs)
        p = Problem(images * size.pixels, size.outputs, size.depth, dtype, a="any", b="packed", family=panels)
        if (plan := in_place(p, size, tuple(strides), target, threads)) is not None:
            return _in_place(*plan)
        s, _ = schedule_of(p, Views(a=windows(size, strides) if size.filler else view), target, threads)
    else:
        p = Problem(size.outputs, size.pixels, size.depth, dtype, images, a="row", b="any")
        s, _ = schedule_of(p, Views(b=view), target, threads)
    return [f"packed by runs: {s.name(atom_of(isa_of(s, target), s.dtype, s.atom.lanes))}, {s}"]


def _in_place(s: Schedule, blocks: Direct | Tiled) -> list[str]:
    """The program of a direct convolution."""
    kr = s.atom.kr
    where = f"a strip of {blocks.strip_size * kr} elements" if blocks.copies else "in place"
    if isinstance(blocks, Tiled):
        pixels = f"{blocks.tall} pixels of {'two rows' if blocks.paired else 'a row'}"
        loops = "rows around panels" if blocks.by_rows else "panels around rows"
        runs = number(blocks.kernel[0] * blocks.runs_of_row, "run")
        return [f"direct: tiles of {pixels} by {s.nr}, read {where}, {loops}", f"  {runs} of {blocks.run * kr}"]
    loops = "blocks of k around panels" if blocks.k_outer else "panels around blocks of k"
    runs, of_block = number(blocks.runs, "run"), number(blocks.of_block, "run")
    return [
        f"direct: register tiles of {s.mr} pixels of a row by {s.nr}, read {where}, {loops}",
        f"  {runs} of {blocks.run * kr}, blocks of {of_block}, k of {blocks.kc * kr}",
    ]


def _on_device(size: Convolution, images: int, view: Layout, target: Target, *, last: bool, dtype: str) -> Explanation:
    """The explanation of the product of one group on a device, of dense and aligned arrays."""
    from portmm.dispatch.machine import source

    width, k = WIDEST // BY_NAME[dtype].bytes, size.depth
    how = settings(dtype, dtype, result_type(dtype, dtype), "")
    if last:
        m, n, items, layouts = images * size.pixels, size.outputs, 1, ("row", "col")
        aligned = math.gcd(width, size.channels)
        vectors = (int(view.vector(1, aligned & -aligned)), math.gcd(k, width), math.gcd(n, width))
    else:
        m, n, items, layouts = size.outputs, size.pixels, images, ("row", "row")
        vectors = (math.gcd(k, width), 1, math.gcd(n, width))
    p = Problem(m, n, k, batch=items, a=layouts[0], b=layouts[1], c="row", tf32=config.rounds(how["dtype"]), **how)
    if size.pointwise and size.groups == 1:
        return explained(p, target)
    views = Views(view, padding=size.padding) if last else Views(b=view, padding=size.padding)
    choice = device_routes.of_views(p, target, vectors, views)
    kernels = lower_grid(choice.schedule, isa_of(choice.schedule, target), views)
    language = device_of(target).language
    return Explanation(choice, kernels, language, "\n".join(source(x, language) for x in kernels))


def _transfers(product: Explanation, size: Convolution, *, last: bool) -> list[str]:
    """The program on a device, in words."""
    s, names = product.schedule, ", ".join(x.name for x in product.kernels)
    if size.pointwise and size.groups == 1:
        return [f"windows are single pixels: a product of matrices, {names}", f"  {s}"]
    groups = f"for each of {size.groups} groups, " if size.groups > 1 else ""
    to = "registers" if s.program == "direct" else "shared memory"
    return [f"{groups}transfers to {to} read {'A' if last else 'B'} through the view: {names}", f"  {s}"]


def _named(values: Sequence[Any]) -> str:
    """Extents or strides, with names."""
    return f"({', '.join(map(str, values))})"


def drawn(title: str, matrix: str, transforms: tuple[str, ...], others: list[tuple[str, ...]]) -> str:
    """The picture of a convolution.

    Args:
        title: above it.
        matrix: what the transforms result in.
        transforms: memory, and each transform.
        others: lines of boxes: the simplified transforms, and the program.
    """
    parts = [f'<text x="{PAD}" y="26" class="t">{escape(title)}</text>']
    left = _column("as written", matrix, [(y,) for y in transforms], (PAD, "k"), parts)
    right = _column("simplified", "", others, (left[0] + 3 * GAP, "r"), parts)
    y = TOP + PAD + LINE // 2
    parts.append(f'<path d="M{left[0]},{y} H{left[0] + 3 * GAP - 4}" class="a"/>')
    return document(right[0] + PAD, max(left[1], right[1]) + PAD, STYLE, parts, arrows=True)


def _column(
    title: str, last: str, boxes: list[tuple[str, ...]], at: tuple[int, str], parts: list[str]
) -> tuple[int, int]:
    """Boxes below each other, with arrows and a line below the last; the right and the lower edge of them."""
    (left, kind), y = at, TOP
    width = int(max(len(line) for lines in boxes for line in (*lines, last, title)) * LETTER) + 2 * PAD
    parts.append(f'<text x="{left}" y="{TOP - 12}" class="t">{title}</text>')
    for i, lines in enumerate(boxes):
        height = LINE * len(lines) + 2 * PAD - 4
        if i:
            parts.append(f'<path d="M{left + width // 2},{y - GAP} V{y - 4}" class="a"/>')
        parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>')
        for j, line in enumerate(lines):
            parts.append(f'<text x="{left + PAD}" y="{y + PAD + 11 + j * LINE}" class="o">{escape(line)}</text>')
        y += height + GAP
    if last:
        parts.append(f'<text x="{left}" y="{y - GAP + LINE}" class="o">{escape(last)}</text>')
    return left + width, y - GAP + LINE * bool(last)
