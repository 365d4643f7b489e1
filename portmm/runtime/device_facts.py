"""Device facts that schedules and messages need.

Owns the record that `cuda.facts` and `opencl.facts` return.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """A device as its driver describes it; facts that a driver does not report are 0 or "".

    Attributes:
        language: of its kernels, "cuda" or "opencl".
        name: as the driver spells it.
        vendor: likewise.
        kind: "gpu", "cpu" or "accelerator".
        processors: multiprocessors, or compute units.
        warp: threads in a warp, or the preferred multiple of work-group sizes.
        block_threads: the most threads of a block, or of a work-group.
        shared_bytes: shared, or local, memory that every kernel may declare for a block.
        registers: of 32 bits, of one multiprocessor.
        l2_bytes: the cache that all multiprocessors share.
        memory_bytes: the device's memory.
        clock_ghz: the highest clock.
        bandwidth_gbs: of the memory, in 10**9 bytes a second.
        architecture: the target of CUDA code, as "80" or "90a"; "" for OpenCL.
        extensions: of OpenCL, in order.
        driver: its version; for CUDA, the newest toolkit whose code it loads.
        shared_most: most shared memory of a block with opt-in at its launch; `shared_bytes` or more.
    """

    language: str
    name: str
    vendor: str
    kind: str
    processors: int
    warp: int
    block_threads: int
    shared_bytes: int
    registers: int
    l2_bytes: int
    memory_bytes: int
    clock_ghz: float
    bandwidth_gbs: float
    architecture: str
    extensions: tuple[str, ...]
    driver: str
    shared_most: int = 0
