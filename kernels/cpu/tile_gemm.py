"""Blocked GEMM on tile units (AMX): see `tile_loops`, and `tile_int4` for int4 weights in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.kernels.cpu.gemm import build as build_loops
from portmm.kernels.cpu.tile_int4 import Int4Tiles
from portmm.kernels.cpu.tile_loops import Tiles

if TYPE_CHECKING:
    from portmm.ir.nodes import Kernel
    from portmm.schedule.schedule import Schedule
    from portmm.spec.layout import Layout
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(s: Schedule, isa: Isa, atom: Atom, view: Layout | None = None) -> Kernel:
    """Kernel that computes C = A . B by schedule `s`, perhaps of a view of A: see `Blocks`."""
    in_place = s.b.layout == "codes" and not s.b.packed
    return build_loops(s, isa, atom, Int4Tiles if in_place else Tiles, view)
