"""What a device is: the facts that schedules and messages need.

Owns the record that `cuda.facts` and `opencl.facts` fill. Imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """A device, as its driver describes it; what a driver does not tell is 0 or "".

    Attributes:
        language: of its kernels, "cuda" or "opencl".
        name: as the driver spells it.
        vendor: likewise.
        kind: "gpu", "cpu" or "accelerator".
        processors: multiprocessors, or compute units.
        warp: threads in a warp, or the multiple that work-groups should be.
        block_threads: the most threads of a block, or of a work-group.
        shared_bytes: shared, or local, memory that every kernel may declare for a block.
        registers: of 32 bits, of one processor.
        l2_bytes: the cache that all processors share.
        memory_bytes: the device's memory.
        clock_ghz: the highest clock.
        bandwidth_gbs: of the memory, in 10**9 bytes a second.
        architecture: what CUDA code is compiled for, as "80" or "90a"; "" for OpenCL.
        extensions: of OpenCL, in order.
        driver: its version; of CUDA, the newest toolkit whose code it takes.
        shared_most: shared memory of a block that asks for it at its launch; `shared_bytes` or more.
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
