"""What a machine is that runs a kernel over a grid of blocks of threads: a GPU, or what OpenCL makes look like one.

Owns the record of its limits, and what makes one well-formed. May import `target.toml_schema`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from portmm.target.toml_schema import require

LANGUAGES = ("cuda", "opencl")
STATIC_SHARED = 48 << 10
"""CUDA C++ Programming Guide: shared memory that a kernel may have without asking for more."""


@dataclass(frozen=True, slots=True)
class Device:
    """How many threads and how much memory a device has; 0 where no document says.

    Of a chip that is sold with several counts, the numbers are those of the part in the cloud.

    Attributes:
        language: "cuda" or "opencl": what its kernels are written in unless somebody asks for the other.
        processors: streaming multiprocessors, compute units, Xe-cores, shader cores.
        warp: threads that run in step: a warp, wavefront or sub-group.
        block_threads: most threads of a block (work-group).
        shared_bytes: most shared (local) memory of one block.
        architecture: what NVRTC compiles for, as in "90a"; empty for OpenCL.
        threads: most threads that a processor holds at once.
        registers: 32-bit registers of a processor.
        thread_registers: most 32-bit registers of one thread.
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


# A schedule cannot do without these.
_NEEDED = ("processors", "warp", "block_threads", "shared_bytes")
_PERHAPS = ("threads", "registers", "thread_registers", "processor_shared_bytes", "memory_gbs", "memory_bytes")


def check_device(device: Device, where: str) -> Device:
    """The device itself.

    Raises:
        TargetError: a field is out of range, or two of them contradict each other; `where` says in which file.
    """
    require(device.language in LANGUAGES, where, f"language {device.language!r} is unknown; use cuda or opencl")
    require(device.language == "cuda" or not device.architecture, where, "only a device for CUDA has an architecture")
    for name in _NEEDED:
        require(getattr(device, name) > 0, where, f"{name} must be positive, got {getattr(device, name)}")
    for name in _PERHAPS:
        require(getattr(device, name) >= 0, where, f"{name} must not be negative, got {getattr(device, name)}")
    in_step = device.block_threads % device.warp == 0
    require(in_step, where, f"block_threads {device.block_threads} is no multiple of warp {device.warp}")
    for part, whole in (
        ("block_threads", "threads"),
        ("shared_bytes", "processor_shared_bytes"),
        ("thread_registers", "registers"),
    ):
        most, has = getattr(device, whole), getattr(device, part)
        require(not most or has <= most, where, f"{part} {has} is more than {whole} {most}")
    return device
