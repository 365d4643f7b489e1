"""Lowering of block programs: one path, with the loops of a host core or of a block of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portmm.ir.block_program import BlockProgram
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.nodes import Kernel
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(s: Schedule, isa: Isa, real: Atom, program: BlockProgram) -> tuple[Kernel | GridKernel, ...]:
    """Kernels of a block program, in order, computed in lanes of `real`."""
    if s.on_device:
        from portmm.kernels.blocks import threads

        return threads.build(s, isa, real, program)
    if s.program == "block":
        from portmm.kernels.blocks import tile_splits, tile_units, tiles

        if real.tiled:
            return (tile_units.build(s, isa, real, program),)
        return ((tile_splits if s.parallel.split > 1 else tiles).build(s, isa, real, program),)
    from portmm.kernels.blocks import core

    return (core.build(s, isa, real, program),)
