"""The registry of block programs."""

from __future__ import annotations

from portmm.schedule import (
    cpu_attention,
    cpu_gemm,
    cpu_tile_candidates,
    gpu_attention,
    gpu_gemv,
    gpu_mma,
    gpu_mma_attention,
    gpu_simt,
    gpu_w4a16,
    gpu_wgmma,
    rows,
)
from portmm.schedule.cpu_cost import Work
from portmm.schedule.cpu_footprint import footprint
from portmm.schedule.program import Program

PROGRAMS = {
    "gemm": Program("cpu.gemm", cpu_gemm.candidates, footprint, Work.of),
    "dot": Program("cpu.dot", cpu_gemm.dots, footprint, Work.of),
    "tiles": Program("cpu.tile_gemm", cpu_tile_candidates.candidates, footprint, Work.of),
    "simt": gpu_simt.SIMT,
    "direct": gpu_simt.NAIVE,
    "stream": gpu_gemv.PROGRAM,
    "mma": gpu_mma.PROGRAM,
    "wgmma": gpu_wgmma.PROGRAM,
    "coded": gpu_w4a16.SLICED,
    "dequant": gpu_w4a16.DEQUANTIZED,
    "attention": cpu_attention.PROGRAM,
    "mma_attention": gpu_mma_attention.PROGRAM,
    "simt_attention": gpu_attention.PROGRAM,
    "rows": rows.PROGRAM,
    "columns": rows.PROGRAM,
}
"""Block programs by name, products before others, those of CPUs first, and in the order of preference. A new one is a
row here, and a module of `kernels/`."""
