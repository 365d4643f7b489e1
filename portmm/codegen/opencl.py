"""OpenCL C source of kernels, version 1.2.

Owns the dialect of OpenCL. A buffer cannot be passed with an offset: each pointer is two
parameters, the buffer and a number of elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.codegen.gpu_kernel import Dialect, declared, qualified
from portmm.codegen.gpu_kernel import source as _source

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import Argument, GridKernel


def _parameter(a: Argument) -> str:
    if a.kind != "pointer":
        return declared(DIALECT, a)
    buffer = f"{'restrict ' if a.alone else ''}{a.name}_buffer"
    return f"{declared(DIALECT, a, buffer)},\n    const long {a.name}_at"


def _signature(kernel: GridKernel) -> str:
    parameters = ",\n    ".join(_parameter(a) for a in kernel.arguments)
    head = f"__kernel __attribute__((reqd_work_group_size({kernel.threads}, 1, 1)))\nvoid {kernel.name}(\n    "
    return f"{head}{parameters})"


def _opening(kernel: GridKernel) -> list[str]:
    return [
        f"{qualified(DIALECT, 'global', a.dtype, readonly=a.readonly)}{a.name} = {a.name}_buffer + {a.name}_at;"
        for a in kernel.arguments
        if a.kind == "pointer"
    ]


DIALECT = Dialect(
    name="opencl",
    prelude="",
    inline="static inline",
    spaces={"global": "__global", "shared": "__local", "private": ""},
    shared="__local {type} {name}[{elements}] __attribute__((aligned(16)));",
    reserved={"half": "half_"},
    memory="__local uchar shared_bytes[{bytes}] __attribute__((aligned({align})));",
    private="{type} {name}[{elements}] __attribute__((aligned(16)));",
    # Vectors, because a compiler may assume that a uint does not alias two ushorts.
    moved={1: "uchar", 2: "uchar2", 4: "ushort2", 8: "uint2", 16: "uint4"},
    barrier="barrier(CLK_LOCAL_MEM_FENCE);",
    unroll="#pragma unroll",
    places={"thread": "(int)get_local_id(0)", "block": "(int)get_group_id(0)", "slice": "(int)get_group_id(1)"},
    signature=_signature,
    opening=_opening,
    primitive=lambda x: x.opencl,
    copy="*(__local {type} *)({to}) = ({there}) ? *(__global const {type} *)({src}) : ({type})(0);",
)


def source(kernel: GridKernel) -> str:
    """The OpenCL C of a kernel."""
    return _source(kernel, DIALECT)
