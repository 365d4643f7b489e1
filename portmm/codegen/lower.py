"""Lowering of schedules to loops.

Owns the step from `Schedule` to `Kernel`: it selects the block program and adds
the header.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from shlex import quote
from typing import TYPE_CHECKING, Any

from portmm.errors import ScheduleError
from portmm.ir.index import const
from portmm.ir.nodes import Kernel, Let
from portmm.schedule.candidates import PACKED_VECTORS
from portmm.schedule.gpu_w4a16 import PROGRAMS as MATRIX_PROGRAMS
from portmm.schedule.legality import inconsistent
from portmm.schedule.programs import PAGES, PROGRAMS
from portmm.schedule.text import spell
from portmm.spec.dtype import dequantized_types, types
from portmm.spec.epilogue import parse
from portmm.spec.shortened import shortened
from portmm.version import VERSION

if TYPE_CHECKING:
    from portmm.ir.attention_program import Form
    from portmm.ir.block_program import BlockProgram
    from portmm.ir.grid_kernel import GridKernel
    from portmm.schedule.direct_convolution import Direct
    from portmm.schedule.grouped_convolution import Grouped
    from portmm.schedule.schedule import Schedule
    from portmm.schedule.tile_convolution import Tiled
    from portmm.spec.layout import Layout
    from portmm.spec.layouts import Views
    from portmm.spec.problem import Family
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def atom_of(isa: Isa, dtype: str, lanes: int = 0) -> Atom:
    """The atom of an ISA for an element type, with `lanes` lanes or else the widest.

    Raises:
        ScheduleError: there is none.
    """
    atom = isa.atom(dtype, lanes)
    if atom is None:
        raise ScheduleError(f"{isa.name} has no atom for {dtype}")
    return atom


def _builder(name: str) -> Any:
    """A module of `kernels/`; only those that are used are imported, since the first call of a process waits."""
    return import_module(f"portmm.kernels.{name}")


def _built(s: Schedule, isa: Isa, atom: Atom, *more: Any) -> Any:
    """The kernel of a program, or its kernels."""
    return _builder(PROGRAMS[s.program].builder).build(s, isa, atom, *more)


def _check(s: Schedule, *, device: bool) -> None:
    """Check that a schedule is of a program of CPUs, or of devices."""
    known = [name for name, x in PROGRAMS.items() if x.device == device]
    if s.program in PAGES:
        raise ScheduleError(
            f"a schedule of {s.program!r} says how a block program is computed, not which: lower_program takes both"
        )
    if s.program not in known:
        where = "devices have" if device else "known are"
        raise ScheduleError(f"no block program called {s.program!r}; {where} {', '.join(known)}")


def lower(s: Schedule, isa: Isa) -> Kernel:
    """The kernel of a schedule.

    Raises:
        ScheduleError: the program is unknown or the ISA lacks the type.
    """
    _check(s, device=False)
    if inconsistent(s):
        raise ScheduleError(f"schedule {inconsistent(s)}: {spell(s)}")
    kernel: Kernel = _built(s, isa, atom_of(isa, s.dtype, s.atom.lanes))
    return replace(kernel, header=_header(kernel.name, isa, str(s), f"portmm emit --schedule {quote(spell(s))}"))


def lower_view(
    s: Schedule, isa: Isa, view: Layout | None = None, view_b: Layout | None = None, padding: int = 0
) -> Kernel:
    """The kernel of a schedule that packs A or B from a view of memory, as the windows of a convolution.

    Elements in padding are `padding`, a number of the operand's type.

    Raises:
        ScheduleError: the program is unknown, does not read such a view, or the ISA lacks the type.
    """
    _check(s, device=False)
    builder, atom = _builder(PROGRAMS[s.program].builder), atom_of(isa, s.dtype, s.atom.lanes)
    views = {name: x for name, x in (("view", view), ("view_b", view_b)) if x is not None}
    fill = {"padding": padding} if padding else {}
    kernel: Kernel = builder.build(s, isa, atom, **views, **fill)
    forms = (f"{name[5:].upper() or 'A'} at {x.form}" for name, x in views.items())
    return replace(kernel, header=_header(kernel.name, isa, f"{s}, {', '.join(forms)}", f"portmm.conv on {isa.title}"))


def lower_direct(s: Schedule, isa: Isa, sizes: Direct) -> Kernel:
    """The kernel of a direct convolution, by the panels and register tiles of a schedule.

    Raises:
        ScheduleError: the schedule converts images, or the ISA lacks the type.
    """
    kernel: Kernel = _builder("cpu.convolution").build(s, isa, atom_of(isa, s.dtype, s.atom.lanes), sizes)
    text = f"direct convolution, {sizes.rows} rows by {s.nr} columns, register tiles of {s.mr} by {s.nr}"
    return replace(kernel, header=_header(kernel.name, isa, text, f"portmm.conv on {isa.title}"))


def lower_tiled(s: Schedule, isa: Isa, sizes: Tiled) -> Kernel:
    """The kernel of a convolution on tile units, by the panels of a schedule.

    Raises:
        ScheduleError: the schedule is not of tiles, or the ISA lacks the type.
    """
    kernel: Kernel = _builder("cpu.tile_convolution").build(s, isa, atom_of(isa, s.dtype, s.atom.lanes), sizes)
    rows = f"{sizes.rows} rows by {s.nr} columns"
    text = f"direct convolution, {rows}, register tiles of {sizes.tall * (1 + sizes.paired)} by {s.nr}"
    return replace(kernel, header=_header(kernel.name, isa, text, f"portmm.conv on {isa.title}"))


def lower_grouped(isa: Isa, lanes: Atom, sizes: Grouped, types: tuple[str, str], text: str) -> Kernel:
    """The kernel of a convolution of groups of few channels: see `kernels.cpu.grouped_convolution`.

    Args:
        isa: the instruction set.
        lanes: its multiply-adds.
        sizes: of blocks.
        types: of images and of the result.
        text: the epilogue, or nothing.
    """
    fused = parse(text) if text else None
    kernel: Kernel = _builder("cpu.grouped_convolution").build(isa, lanes, sizes, types, fused)
    x = sizes.panels
    tiles = f"{x.together} in a vector, register tiles of {sizes.height} by {sizes.vectors} vectors"
    description = f"convolution of {x.groups} groups of {x.channels} by {x.outputs} channels, {tiles}"
    return replace(kernel, header=_header(kernel.name, isa, description, f"portmm.conv on {isa.title}"))


def lower_group_norm(  # noqa: PLR0917 - what a kernel is made for
    isa: Isa, lanes: Atom, text: str, group: int, eps: str, width: int
) -> Kernel:
    """The kernel of a group norm of images with channels last, and of expressions: see `kernels.blocks.group_norm`."""
    kernel: Kernel = _builder("blocks.group_norm").build(isa, lanes, parse(text), group, float(eps), width)
    description = f"group norm, {group} channels a group, {width} a task; {text}"
    return replace(kernel, header=_header(kernel.name, isa, description, f"portmm.fuse on {isa.title}"))


def lower_grid(s: Schedule, isa: Isa, views: Views | None = None) -> tuple[GridKernel, ...]:
    """The kernels of a schedule of a device, in order of execution, perhaps of views of A or B.

    Raises:
        ScheduleError: the program is unknown or the ISA lacks the type.
    """
    _check(s, device=True)
    atom, own = grid_atom(isa, s), s
    if s.fused:
        own = replace(s, epilogue=str(shortened(s.fused, s.types[2], device=True)))
    built = _built(own, isa, atom, *([] if views is None else [views]))
    kernels = [replace(built, occupancy=s.parallel.occupancy, overlaps=views is None and _overlaps(s))]
    kernels += [_builder("gpu.split_k").reduction(own, isa, atom)] if s.slices else []
    command, text = f"portmm emit --schedule {quote(spell(s))}", str(s)
    if views is not None:
        read = ((x, y) for x, y in (("A", views.a), ("B", views.b)) if y is not None)
        command, text = f"portmm.conv on {isa.title}", ", ".join([text, *(f"{x} at {y.form}" for x, y in read)])
    return tuple(replace(_specialised(x, s), header=_header(x.name, isa, text, command)) for x in kernels)


def _overlaps(s: Schedule) -> bool:
    """Whether grids of a schedule begin while those before them end: where each block has one tile of a product.

    Persistent blocks, convolutions and attention took as long or longer on an H200: see docs/devices.md.
    """
    return not (s.parallel.persistent or s.parallel.grouped or "attention" in s.program)


def _specialised(kernel: GridKernel, s: Schedule) -> GridKernel:
    """A kernel with the n and k of one problem as constants, if its schedule is static."""
    if s.static is None:
        return kernel
    known = dict(zip("nk", s.static[1:], strict=True))
    fixed = tuple(Let(a.name, const(known[a.name])) for a in kernel.arguments if a.name in known)
    left = tuple(a for a in kernel.arguments if a.name not in known)
    return replace(kernel, arguments=left, body=(*fixed, *kernel.body))


def grid_atom(isa: Isa, s: Schedule) -> Atom:
    """The atom of a schedule of a device.

    Raises:
        ScheduleError: the ISA lacks it.
    """
    if s.b.layout == "codes" and s.program in MATRIX_PROGRAMS:
        return next(t for t in isa.atoms if t.unit and t.a == t.b == s.types[0])
    alike = (t for t in isa.atoms if (s.atom.kr > 1 or t.unit) and (t.k_pack, t.a, t.b) == (s.atom.kr, *s.types[:2]))
    return next(alike, None) or atom_of(isa, dequantized_types(s.dtype))


def lower_pack(isa: Isa, dtype: str, nr: int, layout: str) -> Kernel:
    """The kernel that packs all of B into panels of width `nr`, for products of the types `dtype`."""
    kernel: Kernel = _builder("cpu.prepack").build(isa, atom_of(isa, dtype), nr, layout, types(dtype)[1])
    description = f"packs a {layout}-major B into panels of {nr} columns"
    return replace(kernel, header=_header(kernel.name, isa, description, f"portmm.pack on {isa.title}"))


def lower_int4_repack(isa: Isa, packed: Family) -> Kernel:
    """The kernel that repacks an int4 weight to a packed layout.

    Raises:
        ScheduleError: the ISA has no verb for it.
    """
    atom = isa.vector("s32", packed.nr // PACKED_VECTORS)
    if atom is None or not isa.spelling(atom, "load_rows", "u4", "s32"):
        raise ScheduleError(f"{isa.name} does not repack int4 values to words")
    description = f"folds codes of four bits into panels of {packed.nr} columns, groups of {packed.group or 'all'} rows"
    kernel: Kernel = _builder("cpu.int4_repack").build(isa, atom, packed)
    return replace(kernel, header=_header(kernel.name, isa, description, f"portmm.pack on {isa.title}"))


def lower_program(program: BlockProgram, s: Schedule, isa: Isa, atom: Atom | None = None) -> tuple[Any, ...]:
    """The kernels of a block program by a schedule, in order of execution: for a host, one.

    Args:
        program: the record.
        s: the schedule. Of a product, expressions of sums are those of the record, whatever its epilogue is.
        isa: the instruction set.
        atom: the lanes of expressions over rows and columns, by default a thread's, or products of attention.

    Raises:
        ScheduleError: the schedule is of another program, or the ISA lacks a type.
    """
    if s.program in ("rows", "columns", "block"):
        kernels, text, call = _built(s, isa, atom or _one(isa), program), str(program.fused), "fuse"
    elif "attention" in s.program and atom is not None:
        from portmm.ir.attention_program import attention_of

        form = attention_of(program).form
        kernels, text, call = _attention(form, s, isa, atom, program.loop), str(form.score), "attention"
    else:
        from portmm.ir.product_program import product_of

        product = product_of(program)
        if product.dtype != s.dtype:
            raise ScheduleError(f"the schedule multiplies {s.dtype}, the program {product.dtype}")
        s = replace(s, epilogue=product.epilogue)
        return lower_grid(s, isa) if s.on_device else (lower(s, isa),)
    return tuple(replace(x, header=_header(x.name, isa, text, f"portmm.{call} on {isa.title}")) for x in kernels)


def _attention(form: Form, s: Schedule, isa: Isa, atom: Atom, loop: str) -> tuple[Any, ...]:
    """The kernels of attention. Lanes of a host are queries, or, where keys are along n, keys: for few queries."""
    name = PROGRAMS[s.program].builder
    if s.program == "attention" and (loop == "n" or atom.tiled):
        name = "cpu.flash_decoding" if loop == "n" else "cpu.tile_attention"
    if len(form.score.results) > 1 and name not in ("cpu.tile_attention", "attention", "cpu.attention"):
        raise ScheduleError("kernels of few queries, and of devices, have no factors of values")
    split = s.parallel.over == "keys"
    join = (_builder("gpu.simt_attention").join(form, s, isa, atom),) if split else ()
    return (_builder(name).build(form, s, isa, atom), *join)


def lower_lines(isa: Isa, dtype: str, along: str) -> GridKernel:
    """The kernel of a device that copies an operand to a layout with contiguous k: see `kernels.gpu.transpose`."""
    kernel: GridKernel = _builder("gpu.transpose").build(isa, _one(isa), dtype, along)
    description = f"copies matrices of {dtype} that lie along {along}, k side by side, in aligned lines"
    return replace(kernel, header=_header(kernel.name, isa, description, f"portmm.matmul on {isa.title}"))


def lower_int4_floats(isa: Isa, dtype: str, group: int) -> GridKernel:
    """The kernel of a device that makes floats of an int4 weight: see `kernels.gpu.int4_floats`."""
    kernel: GridKernel = _builder("gpu.int4_floats").build(isa, _one(isa), dtype, group)
    description = f"makes {dtype} of int4 weights, k side by side, in aligned lines"
    return replace(kernel, header=_header(kernel.name, isa, description, f"portmm.matmul on {isa.title}"))


def _one(isa: Isa) -> Atom:
    """The atom of f32 of one thread."""
    real = isa.vector("f32", 1)
    if real is None:
        raise ScheduleError(f"{isa.name} has no threads of one element")
    return real


def _header(name: str, isa: Isa, description: str, command: str) -> tuple[str, ...]:
    return (f"{name}, made by portmm {VERSION} for {isa.title}", description, f"made again by: {command}")
