"""The registry of block programs."""

from __future__ import annotations

from importlib import import_module

from portmm.schedule import cpu_gemm, cpu_tiles, gpu_gemv, gpu_mma, gpu_simt, gpu_w4a16, gpu_wgmma, gpu_wgmma_int4
from portmm.schedule.cpu_blocking import footprint
from portmm.schedule.cpu_cost import work
from portmm.schedule.program import Program

PAGES = {
    "attention": "cpu_attention",
    "block": "block_tiles",
    "mma_attention": "gpu_mma_attention",
    "simt_attention": "gpu_attention",
    "wgmma_attention": "gpu_wgmma_attention",
    "rows": "rows",
    "columns": "rows",
}
"""Block programs that are no products -> the module of their page, which is imported when they are looked up."""


class Registry(dict[str, Program]):
    """Block programs by name; those that are iterated over are products."""

    def __missing__(self, name: str) -> Program:
        return import_module(f"portmm.schedule.{PAGES[name]}").PROGRAM


PROGRAMS = Registry(
    {
        "gemm": Program("cpu.gemm", cpu_gemm.candidates, footprint, work),
        "dot": Program("cpu.dot", cpu_gemm.dots, footprint, work),
        "tiles": Program("cpu.tile_int4", cpu_tiles.tiles, footprint, work),
        "simt": gpu_simt.SIMT,
        "direct": gpu_simt.NAIVE,
        "stream": gpu_gemv.PROGRAM,
        "mma": gpu_mma.PROGRAM,
        "wgmma": gpu_wgmma.PROGRAM,
        "coded": gpu_w4a16.SLICED,
        "dequant": gpu_w4a16.DEQUANTIZED,
        "wgmma_int4": gpu_wgmma_int4.PROGRAM,
    }
)
"""The registry, CPUs' products first. A new one is a row here, and a module of `kernels/`."""
