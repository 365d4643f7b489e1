"""Launch of user-written kernels on arrays on a device.

Owns `launch` of a `GridKernel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.arrays import device_array, device_operands, interop
from portmm.dispatch import gpu as gpu_dispatch
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.arrays.device_array import DeviceArray
    from portmm.ir.grid_kernel import GridKernel

MOST_KERNELS = 256
"""Kernels remembered before the memo is emptied."""
_loaded = Memory(MOST_KERNELS)


def launch(kernel: GridKernel, a: Any, b: Any, c: Any) -> Any:
    """Launch a kernel on the stream or queue of `a`, asynchronously: see `launch.launch`.

    The kernel's parameters are named a, b and c, m, n, k and batch, and strides are: a_m, a_k, a_batch, b_k,
    b_n, b_batch, c_m, c_n, c_batch; it has those that it needs, in any order.

    Raises:
        TypeError: an array is of another type than the kernel's, or in the host's memory, or the kernel has
            other parameters.
        ValueError: shapes do not match, or `c` cannot be written.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    pointers = {name: _adopted(name, x, kernel) for name, x in (("a", a), ("b", b), ("c", c))}
    device_array.same_device(list(pointers.values()))
    left = pointers["a"]
    values = _values(*pointers.values())
    for x in kernel.arguments:
        if x.name not in (pointers if x.kind == "pointer" else values):
            raise TypeError(f"{kernel.name} has a parameter {x.name!r}; there are a, b, c, {', '.join(values)}")
        if x.kind == "pointer" and pointers[x.name].dtype != x.dtype:
            raise TypeError(f"{x.name} is of {pointers[x.name].dtype}; this kernel takes {x.dtype}")
    on = device_operands.machine_of(left)
    function = _loaded.get((kernel, on.key)) or _loaded.keep((kernel, on.key), on.load(kernel))
    addresses = {name: device_array.argument(x)[1] for name, x in pointers.items()}
    gpu_dispatch.bind(kernel, function, values).run(on, addresses, left.queue)
    return c


def _adopted(name: str, x: Any, kernel: GridKernel) -> DeviceArray:
    """An array on a device.

    Raises:
        TypeError: it is in the host's memory.
    """
    array = interop.adopt(x)
    if array is None:
        raise TypeError(f"{name} is a {type(x).__name__}; {kernel.name} is for arrays on a device: copy it there first")
    return array


def _values(a: DeviceArray, b: DeviceArray, c: DeviceArray) -> dict[str, int]:
    """The sizes and strides of a product.

    Raises:
        ValueError: shapes do not match, or C is read-only.
    """
    if min(len(x.shape) for x in (a, b, c)) < 2:
        raise ValueError(f"a {a.shape}, b {b.shape} and c {c.shape} are not all matrices")
    (*lead, m, k), n = a.shape, b.shape[-1]
    if b.shape != (*lead, k, n) or c.shape != (*lead, m, n) or len(lead) > 1:
        raise ValueError(f"a {a.shape}, b {b.shape} and c {c.shape} do not fit: pass (m, k), (k, n) and (m, n)")
    device_operands.check_out(c, c.shape)
    values = {"m": m, "n": n, "k": k, "batch": lead[0] if lead else 1}
    for names, x in (("a_batch a_m a_k", a), ("b_batch b_k b_n", b), ("c_batch c_m c_n", c)):
        values |= dict(zip(names.split(), (0, *device_operands.elements(x))[-3:], strict=True))
    return values
