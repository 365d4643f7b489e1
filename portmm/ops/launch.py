"""Launch of user-written kernels on arrays.

Owns `launch`, the last step of a user's block program: a `Kernel` is compiled, once, and runs
on arrays of any strides, without copies.
"""

from __future__ import annotations

import math
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
from portmm.util.array_subclasses import refuse_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.arrays.operand import Operand
    from portmm.ir.nodes import Kernel
    from portmm.spec import epilogue


Array = np.ndarray[Any, Any]


def launch(kernel: Kernel | GridKernel | BlockProgram, a: Any, b: Any = None, c: Any = None, *others: Any) -> Any:
    """Run a kernel: C[m, n] of A[m, k] and B[k, n], or of a batch of each; or a block program over rows or columns.

    Nothing restricts what a kernel does. Threads are those of
    `config` and `set_num_threads`. A kernel of a device (`GridKernel`) takes arrays on one, and is launched on the
    stream or queue of `a`.

    Args:
        kernel: a kernel, made for this machine's instructions, or a record, which is lowered for where arrays are.
        a: (m, k) or (batch, m, k), of the type that the kernel reads, with any strides. Of a record, a and all others
            are its operands in order, each of which is broadcast along the labels that it does not have.
        b: (k, n) or (batch, k, n), likewise.
        c: (m, n) or (batch, m, n), written.
        others: further operands of a record.

    Returns:
        `c`; of a record, the last array.

    Raises:
        TargetError: this machine lacks instructions.
        TypeError: an array is of another type than the kernel's.
        ValueError: shapes do not match, or `c` cannot be written.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    if isinstance(kernel, BlockProgram):
        arrays = (a, *others) if b is c is None else (a, b, *others) if c is None else (a, b, c, *others)
        _block_program(kernel, arrays)
        return arrays[-1]
    if isinstance(kernel, GridKernel):
        _on_device(kernel, a, b, c)
        return c
    from portmm.dispatch import cpu_kernels, cpu_routes
    from portmm.runtime.cpu import runtime

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
    """The sizes and strides of a product, by name, from the shapes and strides of A, B and C.

    Raises:
        ValueError: shapes do not match.
    """
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
    _check_readable(name, x)


def _check_readable(name: str, x: Array) -> None:
    """Check that kernels read an array as it is.

    Raises:
        TypeError: its class has arithmetic of its own, or masks.
        ValueError: it is not aligned, or of another byte order.
    """
    refuse_class(x, name, matrix=False)
    if not numpy_arrays.addressable(x, x.dtype.newbyteorder("=")):
        raise ValueError(f"{name} is not aligned to its elements, or of another byte order; copy it first")


def _block_program(program: BlockProgram, arrays: tuple[Any, ...]) -> None:
    """Run a block program, on the host or, asynchronously, on the stream or queue of the first array.

    Raises:
        TypeError: an array is of another type than its operand, or elsewhere than the first.
        ValueError: shapes do not match, an array cannot be written or shares memory with another one in part, or
            elements along n are not neighbours in memory.
    """
    from portmm.arrays import interop, operand

    there = interop.adopt_all({f"x{i}_all": x for i, x in enumerate(arrays)}) if on_device(arrays[0]) else {}
    views = [operand.standin(x) for x in there.values()] or list(arrays)
    (batch, m, n), strides = _broadcast(program, views)
    if not there:
        written = {x for x, _ in program.fused.results}
        if fixed := [i for i, x in enumerate(views) if i in written and not x.flags.writeable]:
            raise ValueError(f"array {fixed[0]} is read-only; pass a writeable array")
        _check_overlap(views, strides, written)
        from portmm.dispatch import cpu_routes
        from portmm.runtime.cpu import runtime

        host_matmul.begin()
        route = cpu_routes.rows_route(program, (m, n, batch), config.target(), config.get_num_threads())
        table = np.array([(runtime().address(x), *s, 0) for x, s in zip(views, strides, strict=True)], np.int64)
        if m and batch:
            runtime().execute(route, m, n, 1, batch, *(0,) * 12, None, table, None)
        return
    from portmm.dispatch.grid_rows import launches
    from portmm.dispatch.machine import machine_of
    from portmm.ops.kernel_call import start

    operands = list(there.values())
    for i, _ in program.fused.results:
        operand.check_out(operands[i], operands[i].shape)
    on, aligned = machine_of(operands[0]), [math.gcd(x.at, operand.WIDEST) for x in operands]
    every, work = launches(program, (m, n, batch), strides, aligned, on)
    addresses = {name: operand.address(x) for name, x in there.items()}
    start(on, tuple((x, ()) for x in every), addresses, operands[0], (work, "f32"))


def _check_overlap(views: list[Any], strides: list[tuple[int, ...]], written: set[int]) -> None:
    """Check that what is written is another array in whole, or shares no memory with it.

    Raises:
        ValueError: it shares a part.
    """
    for i in written:
        for j, x in enumerate(views):
            same = x.ctypes.data == views[i].ctypes.data and strides[i] == strides[j]
            if i != j and not same and np.may_share_memory(x, views[i]):
                raise ValueError(f"array {i} is written and shares memory with array {j} in part: pass a copy")


def _check_operand(i: int, x: epilogue.Operand, view: Any) -> None:
    """Check that a block program can read an array.

    Raises:
        TypeError: it is of another type than its operand, or of a class that is refused.
        ValueError: it has too many dimensions, or is not addressable.
    """
    if not isinstance(view, np.ndarray) or numpy_arrays.name_of(view.dtype) != x.dtype:
        actual = view.dtype if isinstance(view, np.ndarray) else f"a {type(view).__name__}"
        raise TypeError(f"array {i} is of {actual}; the operand is an array of {x.dtype}, on the first one's device")
    if view.ndim > 3:
        raise ValueError(f"array {i} has shape {view.shape}; a block program takes (batch, m, n)")
    _check_readable(f"array {i}", view)


def _broadcast(program: BlockProgram, views: list[Any]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The extents of a batch, rows and columns, and the strides of each operand along them, in elements.

    Raises:
        TypeError: an array is of another type than its operand.
        ValueError: shapes do not match, or elements along n are not neighbours in memory.
    """
    if len(views) != len(program.operands):
        raise ValueError(f"{len(views)} arrays for {len(program.operands)} operands: pass one for each, in order")
    for i, (x, view) in enumerate(zip(program.operands, views, strict=True)):
        _check_operand(i, x, view)
    shape, strides = np.broadcast_shapes((1, 1, 1), *(x.shape for x in views)), []
    if program.loop == "m" and not shape[1]:
        raise ValueError(f"arrays of {shape} have no rows to reduce")
    for i, (x, view) in enumerate(zip(program.operands, views, strict=True)):
        whole = tuple(extent if axis in x.axes else 1 for axis, extent in zip("bmn", shape, strict=True))
        if (1,) * (3 - view.ndim) + view.shape != whole:
            raise ValueError(f"array {i} is {view.shape}, operand {x} of {shape} takes {whole}")
        steps = np.broadcast_to(view, whole).strides
        strides.append(tuple(s // view.itemsize if axis in x.axes else 0 for axis, s in zip("bmn", steps, strict=True)))
        if x.dense and "n" in x.axes and shape[2] > 1 and view.size and strides[-1][2] != 1:
            raise ValueError(f"elements of array {i} are {strides[-1][2]} apart along n: pass a contiguous one")
    return shape, strides


def _on_device(kernel: GridKernel, *arrays: Any) -> None:
    """Launch a kernel of a device on the stream or queue of `a`, asynchronously.

    The kernel's parameters are named a, b and c, m, n, k and batch, and strides are: a_m, a_k, a_batch, b_k,
    b_n, b_batch, c_m, c_n, c_batch; it has those that it needs, in any order.

    Raises:
        TypeError: an array is of another type than the kernel's, or in the host's memory, or the kernel has
            other parameters.
        ValueError: shapes do not match, or `c` cannot be written.
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
