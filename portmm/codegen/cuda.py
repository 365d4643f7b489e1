"""CUDA C++ source of kernels, without headers, for NVRTC.

Owns the dialect of CUDA, and where kernels wait for the grid before theirs in programmatic dependent launch
(`waiting`). Instructions that C++ does not have are small functions of
inline PTX, in between `#ifdef __CUDACC__`: an emulator defines its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.codegen.gpu_kernel import Dialect, declared
from portmm.codegen.gpu_kernel import source as _source
from portmm.ir.index import Ptr
from portmm.ir.nodes import BLOCKS, Let, LetPtr, Scratch, walk
from portmm.ir.thread_nodes import Barrier, Clear, Do, Get, Shared
from portmm.target.isa import Primitive

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.nodes import Stmt

WAIT, TRIGGER = "griddepcontrol_wait", "griddepcontrol_launch_dependents"
"""Functions that wait until the grids before have ended and their writes are visible, and that let the next begin."""
HINTS = "tma_prefetch"
"""Beginning of the names of primitives that neither read nor write what they are given."""
_UNSEEN = (*BLOCKS, Let, LetPtr, Scratch, Shared, Barrier, Clear)
"""Statements that do not access global memory themselves."""


def _copy(size: int) -> Primitive:
    """The asynchronous copy cp.async (PTX ISA): bytes that are not read are zeros. 16 bytes bypass L1."""
    how = "cg" if size == 16 else "ca"
    return Primitive(
        f"copy_async_{size}",
        f"""\
void copy_async_{size}(void *to, const void *src, int bytes) {{
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.{how}.shared.global [%0], [%1], {size}, %2;" :: "r"(at), "l"(src), "r"(bytes) : "memory");
}}""",
        "",
        hardware=True,
    )


def _wait(pending: int) -> Primitive:
    text = f'void copy_async_wait_{pending}() {{ asm volatile("cp.async.wait_group {pending};" ::: "memory"); }}'
    return Primitive(f"copy_async_wait_{pending}", text, "", hardware=True)


def _grid(name: str) -> Primitive:
    """An instruction of PTX from sm_90 on; elsewhere grids begin when those before have ended."""
    words = name.replace("_", ".", 1)
    return Primitive(
        name, f'void {name}() {{\n#if __CUDA_ARCH__ >= 900\n  asm volatile("{words};" ::: "memory");\n#endif\n}}', ""
    )


_FUNCTIONS = (
    *map(_grid, (WAIT, TRIGGER)),
    *(_copy(size) for size in (4, 8, 16)),
    *(_wait(pending) for pending in range(8)),
    Primitive(
        "copy_async_commit",
        'void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }',
        "",
        hardware=True,
    ),
    Primitive("memory_fence", "void memory_fence() { __threadfence(); }", "", hardware=True),
    Primitive("atomic_ticket", "int atomic_ticket(int *counter) { return atomicAdd(counter, 1); }", "", hardware=True),
    Primitive(
        "shuffle_xor_f32",
        "float shuffle_xor_f32(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }",
        "",
        hardware=True,
    ),
)


def _signature(kernel: GridKernel) -> str:
    parameters = [
        declared(DIALECT, a, f"__restrict__ {a.name}" if a.alone and a.kind == "pointer" else "")
        for a in kernel.arguments
    ]
    bounds = f"{kernel.threads}, {kernel.occupancy}" if kernel.occupancy else str(kernel.threads)
    cluster = f"__cluster_dims__({kernel.cluster}, 1, 1) " if kernel.cluster > 1 else ""
    head = f'extern "C" __global__ void {cluster}__launch_bounds__({bounds}) {kernel.name}(\n    '
    return head + ",\n    ".join(parameters) + ")"


# An emulator defines shared memory and tensor maps itself.
_DYNAMIC = """\
#ifdef __CUDACC__
#define SHARED_BYTES(name) extern __shared__ __align__(1024) unsigned char name[]
#endif"""
_MAP = """\
#ifdef __CUDACC__
struct __align__(64) TensorMap {
  unsigned long words[16];
};
#endif"""


DIALECT = Dialect(
    name="cuda",
    prelude="",
    inline="static __device__ __forceinline__",
    spaces={"global": "", "shared": "", "private": ""},
    shared="__shared__ __align__(16) {type} {name}[{elements}];",
    private="__align__(16) {type} {name}[{elements}];",
    moved={1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"},
    barrier="__syncthreads();",
    unroll="#pragma unroll",
    places={"thread": "(int)threadIdx.x", "block": "(int)blockIdx.x", "slice": "(int)blockIdx.y"},
    signature=_signature,
    opening=lambda _: [],
    primitive=lambda x: x.cuda,
    dynamic=_DYNAMIC,
    map=_MAP,
    guard=("#ifdef __CUDACC__", "#endif"),
    functions=_FUNCTIONS,
    copy="copy_async_{bytes}({to}, {src}, ({there}) ? {bytes} : 0);",
    commit="copy_async_commit();",
    wait="copy_async_wait_{pending}();",
    exchange="shuffle_xor_f32({x}, {mask})",
)


def waiting(kernel: GridKernel) -> GridKernel:
    """A kernel that may be launched while the grid before it still runs, if it overlaps: see docs/devices.md.

    All threads wait before the first statement that may access global memory, or end a block. Then
    they let the next grid begin: its blocks come when all of this one have come, and there is room.
    """
    if not kernel.overlaps:
        return kernel
    outside = {x.name for x in kernel.arguments if x.kind in ("pointer", "map")}
    outside |= {x.name for x in walk(kernel.body) if isinstance(x, LetPtr)}
    at = next((i for i, x in enumerate(kernel.body) if not all(_within(y, outside) for y in walk((x,)))), 0)
    return replace(kernel, body=(*kernel.body[:at], Do(WAIT), Do(TRIGGER), *kernel.body[at:]))


def _within(x: Stmt, outside: set[str]) -> bool:
    """Whether a statement itself leaves global memory alone, and its thread goes on: pointers may be computed."""
    if isinstance(x, Do | Get):
        name = x.name if isinstance(x, Do) else x.primitive
        return name.startswith(HINTS) or not any(isinstance(y, Ptr) and y.name in outside for y in x.args)
    return isinstance(x, _UNSEEN)


def source(kernel: GridKernel) -> str:
    """The CUDA C++ of a kernel."""
    return _source(waiting(kernel), DIALECT)
