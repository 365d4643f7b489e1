"""Launch of user-written kernels on arrays.

Owns `launch`, the last step of a user's block program: a `Kernel` is compiled, once, and runs
on arrays of any strides, without copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.arrays.libraries import on_device
from portmm.dispatch import config
from portmm.errors import TargetError
from portmm.host.detect import missing
from portmm.ir.grid_kernel import GridKernel
from portmm.ops import host_matmul
from portmm.spec.dtype import BY_NAME, base

if TYPE_CHECKING:
    from portmm.ir.nodes import Kernel


def launch(kernel: Kernel | GridKernel, a: Any, b: Any, c: Any) -> Any:
    """Run a kernel: C[m, n] of A[m, k] and B[k, n], or of a batch of each.

    Nothing restricts what a kernel does. Threads are those of
    `config` and `set_num_threads`. A kernel of a device (`GridKernel`) takes arrays on one, and is launched on the
    stream or queue of `a`.

    Args:
        kernel: a block program, made for this machine's instructions.
        a: (m, k) or (batch, m, k), of the type that the kernel reads, with any strides.
        b: (k, n) or (batch, k, n), likewise.
        c: (m, n) or (batch, m, n), written.

    Returns:
        `c`.

    Raises:
        TargetError: this machine lacks instructions.
        TypeError: an array is of another type than the kernel's.
        ValueError: shapes do not match, or `c` cannot be written.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    if isinstance(kernel, GridKernel):
        from portmm.ops import launch_gpu

        return launch_gpu.launch(kernel, a, b, c)
    from portmm.dispatch import cpu_kernels, cpu_routes
    from portmm.runtime.cpu import runtime

    if lacking := missing(kernel.isa):
        raise TargetError(f"{kernel.name} is for {kernel.isa.title}; this machine lacks {', '.join(lacking)}")
    for name, x in (("a", a), ("b", b), ("c", c)):
        _check(name, x, kernel)
    (*lead, m, k), n = a.shape, b.shape[-1]
    if b.shape != (*lead, k, n) or c.shape != (*lead, m, n) or len(lead) > 1:
        raise ValueError(f"a {a.shape}, b {b.shape} and c {c.shape} do not fit: pass (m, k), (k, n) and (m, n)")
    if not c.flags.writeable:
        raise ValueError("c is read-only; pass a writeable array")
    host_matmul.begin()
    fields = {"m": m, "n": n, "k": k, "batch": lead[0] if lead else 1, "workers": config.get_num_threads()}
    numbers: list[Any] = [fields[x] for x in ("m", "n", "k", "batch")]
    for names, x in (("a_m a_k a_batch", a), ("b_k b_n b_batch", b), ("c_m c_n c_batch", c)):
        steps = [s // x.itemsize for s in x.strides]
        strides = [*steps[-2:], steps[0] if lead else 0]
        fields |= dict(zip(names.split(), strides, strict=True))
        numbers += [x, *strides]
    word = "-".join(base(kernel.type_of(x)) for x in "abc")
    runtime().execute(cpu_routes.route_of(kernel, cpu_kernels.loaded(kernel), fields, word), *numbers)
    return c


def _check(name: str, x: Any, kernel: Kernel) -> None:
    """Check that a kernel can read an array."""
    if on_device(x):
        raise TypeError(f"{name} is on a device; this kernel is for arrays in the host's memory")
    wanted = base(kernel.type_of(name))
    if not isinstance(x, np.ndarray) or numpy_arrays.name_of(x.dtype) != wanted or x.ndim < 2:
        actual = f"an array of {x.dtype}, shape {x.shape}" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
        raise TypeError(f"{name} is {actual}; this kernel takes matrices of {BY_NAME[wanted].numpy}")
    if not numpy_arrays.addressable(x, x.dtype.newbyteorder("=")):
        raise ValueError(f"{name} is not aligned to its elements, or of another byte order; copy it first")
