"""Kernels of expressions over rows and down columns, from their texts: by the block program of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.codegen.lower import lower_program
from portmm.ir.block_program import program_of
from portmm.schedule.rows import columns_schedule, core_schedule, kept_in
from portmm.spec.epilogue import parse

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.nodes import Kernel
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

NORMAL = "f32.bmn f32.n f32.n bf16.bmn | load 0; load 1; sub 0 1; load 2; mul 2 3 | 3 4"
"""Expressions of a group norm: its elements, in a narrow type."""


def lower_rows(isa: Isa, real: Atom, text: str) -> Kernel:
    """The kernel of a host, in lanes of `real`."""
    program = program_of(parse(text), "L1")
    kernel: Kernel = lower_program(program, core_schedule(program, isa, real), isa, real)[0]
    return kernel


def lower_grid_rows(isa: Isa, text: str, s: Schedule) -> GridKernel:
    """The kernel of a device over rows."""
    kernel: GridKernel = lower_program(program_of(parse(text), kept_in(s)), s, isa)[0]
    return kernel


def lower_grid_columns(isa: Isa, text: str, threads: int, *, sliced: bool) -> tuple[GridKernel, ...]:
    """The kernels of a device that reduce columns: two where they are `sliced`."""
    return lower_program(program_of(parse(text)), columns_schedule(threads, sliced=sliced), isa)
