"""Launch of user-written kernels on arrays.

Owns `launch`, the last step of a user's block program: a `Kernel` is compiled, once, and runs
on arrays of any strides, without copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.arrays.libraries import on_device
from portmm.dispatch import config
from portmm.errors import TargetError
from portmm.host.detect import missing
from portmm.ir.block_program import BlockProgram
from portmm.ir.grid_kernel import GridKernel
from portmm.ops import host_matmul
from portmm.spec.dtype import BY_NAME, base

if TYPE_CHECKING:
    from portmm.arrays.operand import Operand
    from portmm.ir.nodes import Kernel


Array = np.ndarray[Any, Any]


def launch(kernel: Kernel | GridKernel | BlockProgram, a: Any, b: Any = None, c: Any = None, *others: Any) -> Any:
    """Run a kernel: C[m, n] of A[m, k] and B[k, n], or of a batch of each; or a block program.

    Nothing restricts what a kernel does. Threads are those of
    `config` and `set_num_threads`. A kernel of a device (`GridKernel`) takes arrays on one, and is launched on the
    stream or queue of `a`.

    Args:
        kernel: a kernel, made for this machine's instructions, or a record, which is lowered for where arrays are.
        a: (m, k) or (batch, m, k), of the type that the kernel reads, with any strides. Of a record, a and all others
            are its operands in order. Those of rows and columns are broadcast along the labels that they do not have;
            those of products and attention have a dimension for each label.
        b: (k, n) or (batch, k, n), likewise.
        c: (m, n) or (batch, m, n), written.
        others: further operands of a record.

    Returns:
        `c`; of a record, the last array.

    Raises:
        TargetError: this machine lacks instructions.
        TypeError: this is no kernel, or an array is of another type than the kernel's.
        ValueError: shapes do not match, or `c` cannot be written.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    if isinstance(kernel, BlockProgram):
        arrays = (a, *others) if b is c is None else (a, b, *others) if c is None else (a, b, c, *others)
        from portmm.ops.launch_blocks import launch_block

        launch_block(kernel, arrays)
        return arrays[-1]
    if isinstance(kernel, GridKernel):
        _on_device(kernel, a, b, c)
        return c
    from portmm.dispatch import cpu_kernels, cpu_routes
    from portmm.ir.nodes import Kernel
    from portmm.runtime.cpu import runtime

    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel is a {type(kernel).__name__}; pass a Kernel, a GridKernel or a BlockProgram")
    if lacking := missing(kernel.isa):
        raise TargetError(f"{kernel.name} is for {kernel.isa.title}; this machine lacks {', '.join(lacking)}")
    for name, x in (("a", a), ("b", b), ("c", c)):
        _check(name, x, kernel)
    if not c.flags.writeable:
        raise ValueError("c is read-only; pass a writeable array")
    fields = _fields(*[(x.shape, [s // x.itemsize for s in x.strides]) for x in (a, b, c)])
    host_matmul.begin()
    numbers: list[Any] = [fields[x] for x in ("m", "n", "k", "batch")]
    for names, x in (("a_m a_k a_batch", a), ("b_k b_n b_batch", b), ("c_m c_n c_batch", c)):
        numbers += [x, *(fields[name] for name in names.split())]
    fields["workers"] = config.get_num_threads()
    word = "-".join(base(kernel.type_of(x)) for x in "abc")
    runtime().execute(cpu_routes.route_of(kernel, cpu_kernels.loaded(kernel), fields, word), *numbers)
    return c


def _fields(*operands: tuple[tuple[int, ...], Sequence[int]]) -> dict[str, int]:
    """The sizes and strides of a product, by name, from the shapes and strides of A, B and C."""
    a, b, c = (shape for shape, _ in operands)
    if min(map(len, (a, b, c))) < 2:
        raise ValueError(f"a {a}, b {b} and c {c} are not all matrices")
    (*lead, m, k), n = a, b[-1]
    if b != (*lead, k, n) or c != (*lead, m, n) or len(lead) > 1:
        raise ValueError(f"a {a}, b {b} and c {c} do not fit: pass (m, k), (k, n) and (m, n)")
    fields = {"m": m, "n": n, "k": k, "batch": lead[0] if lead else 1}
    for names, (_, strides) in zip(("a_batch a_m a_k", "b_batch b_k b_n", "c_batch c_m c_n"), operands, strict=True):
        fields |= dict(zip(names.split(), (0, *strides)[-3:], strict=True))
    return fields


def _check(name: str, x: Any, kernel: Kernel) -> None:
    """Check that a kernel can read an array."""
    if on_device(x):
        raise TypeError(f"{name} is on a device; this kernel is for arrays in the host's memory")
    wanted = base(kernel.type_of(name))
    if not isinstance(x, np.ndarray) or numpy_arrays.name_of(x.dtype) != wanted or x.ndim < 2:
        actual = f"an array of {x.dtype}, shape {x.shape}" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
        raise TypeError(f"{name} is {actual}; this kernel takes matrices of {BY_NAME[wanted].numpy}")
    numpy_arrays.check_readable(name, x)


def _on_device(kernel: GridKernel, *arrays: Any) -> None:
    """Launch a kernel of a device on the stream or queue of `a`, asynchronously.

    The kernel's parameters are named a, b and c, m, n, k and batch, and strides are: a_m, a_k, a_batch, b_k,
    b_n, b_batch, c_m, c_n, c_batch; it has those that it needs, in any order.
    """
    from portmm.arrays import interop, operand
    from portmm.dispatch.machine import bind, machine_of

    operands: dict[str, Operand] = {}
    for name, array in zip("abc", arrays, strict=True):
        there = interop.adopt(array)
        if there is None:
            kind = type(array).__name__
            raise TypeError(f"{name} is a {kind}; {kernel.name} is for arrays on a device: copy it there first")
        operands[name] = there
    operand.same_device(list(operands.values()))
    values = _fields(*[(x.shape, operand.elements(x)) for x in operands.values()])
    operand.check_out(operands["c"], operands["c"].shape)
    for x in kernel.arguments:
        pointer = x.kind == "pointer"
        if x.name not in (operands if pointer else values):
            raise TypeError(f"{kernel.name} has a parameter {x.name!r}; there are a, b, c, {', '.join(values)}")
        if pointer and operands[x.name].dtype != x.dtype:
            raise TypeError(f"{x.name} is of {operands[x.name].dtype}; this kernel takes {x.dtype}")
    on = machine_of(operands["a"])
    ((_, function),) = on.loaded(kernel, lambda: (kernel,))
    addresses = {name: operand.address(x) for name, x in operands.items()}
    bind(kernel, function, values).run(on, addresses, operands["a"].queue)
