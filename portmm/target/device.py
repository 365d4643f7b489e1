"""Device that runs a kernel over a grid of blocks of threads: a GPU, or any device of OpenCL.

Owns the record of its limits, and its checks. Pure.
"""

from __future__ import annotations

from portmm.target.toml_schema import require
from portmm.util.records import dataclass

PARTS = 4
"""NVIDIA's processors since Volta have four parts with registers of their own, and a warp stays in one."""
RESERVED = 1024
"""Further bytes of shared memory of each block on a processor: CUDA C++ Programming Guide, "Shared Memory"."""
LANGUAGES = ("cuda", "opencl")
CUDA_WARP = 32
"""CUDA C++ Programming Guide: threads of a warp, on every device."""
STATIC_SHARED = 48 << 10
"""CUDA C++ Programming Guide: shared memory of a kernel that does not request more."""


@dataclass(frozen=True, slots=True)
class Device:
    """Limits of a device: its threads and its memory; 0 where they are not documented.

    For a chip that is sold with several counts, the numbers are those of the part in the cloud.

    Attributes:
        language: "cuda" or "opencl", the default language of its kernels.
        processors: streaming multiprocessors, compute units, Xe-cores, shader cores.
        warp: threads that run in lockstep: a warp, wavefront or sub-group.
        block_threads: maximum number of threads of a block (work-group).
        shared_bytes: maximum shared (local) memory of one block.
        architecture: architecture that NVRTC compiles for, as in "90a"; empty for OpenCL.
        threads: maximum number of threads that run on a processor at once.
        registers: 32-bit registers of a processor.
        thread_registers: maximum number of 32-bit registers of one thread.
        processor_shared_bytes: shared memory of all blocks on a processor.
        memory_gbs: bandwidth of its memory in GB/s.
        memory_bytes: capacity of its memory.
        lanes: threads of a block are lanes of one core's vectors, and have no memory of their own: a CPU.
    """

    language: str
    processors: int
    warp: int
    block_threads: int
    shared_bytes: int
    architecture: str = ""
    threads: int = 0
    registers: int = 0
    thread_registers: int = 0
    processor_shared_bytes: int = 0
    memory_gbs: float = 0.0
    memory_bytes: int = 0
    lanes: bool = False

    @property
    def bounded(self) -> bool:
        """Whether compilers are told how many blocks of a kernel must fit a processor: `__launch_bounds__`."""
        return self.language == "cuda"


# Limits that schedules need.
_NEEDED = ("processors", "warp", "block_threads", "shared_bytes")
_OPTIONAL = ("threads", "registers", "thread_registers", "processor_shared_bytes", "memory_gbs", "memory_bytes")


def check_device(device: Device, where: str) -> Device:
    """The device itself, after its checks.

    Raises:
        TargetError: a field is out of range, or two of them contradict each other; `where` names the file.
    """
    require(device.language in LANGUAGES, where, f"language {device.language!r} is unknown; use cuda or opencl")
    require(device.language == "cuda" or not device.architecture, where, "only a device for CUDA has an architecture")
    for name in _NEEDED:
        require(getattr(device, name) > 0, where, f"{name} must be positive, got {getattr(device, name)}")
    for name in _OPTIONAL:
        require(getattr(device, name) >= 0, where, f"{name} must not be negative, got {getattr(device, name)}")
    whole_warps = device.block_threads % device.warp == 0
    require(whole_warps, where, f"block_threads {device.block_threads} is no multiple of warp {device.warp}")
    for part, whole in (
        ("block_threads", "threads"),
        ("shared_bytes", "processor_shared_bytes"),
        ("thread_registers", "registers"),
    ):
        most, has = getattr(device, whole), getattr(device, part)
        require(not most or has <= most, where, f"{part} {has} is more than {whole} {most}")
    return device
