"""Fused matmul: products with prologues and an epilogue.

Owns the call: the epilogue is part of the product's kernel, unless `product_kernel` finds a reason against that,
or no kernel can be built; then it is a kernel over the rows of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.arrays.numpy_fallback import fall_back
from portmm.errors import BuildError, ScheduleError
from portmm.ops import call_fastpath, host_matmul
from portmm.ops.epilogues import NAMES, VALUES, fused, rank_of
from portmm.ops.product_kernel import HostProduct, ProductKernel, first_type, operand_b
from portmm.spec.row_classes import row_class
from portmm.util.array_subclasses import in_class_of

if TYPE_CHECKING:
    from portmm.trace.bind import Bound, UserFunction
    from portmm.trace.tracer import Traced

Array = np.ndarray[Any, Any]


def matmul(  # noqa: PLR0917 - the operands, then the functions
    a: Any,
    b: Any,
    out: Any,
    dtype: Any,
    epilogue: Callable[..., Any] | None,
    prologue_a: Callable[..., Any] | None,
    prologue_b: Callable[..., Any] | None,
) -> Any:
    """The product with prologues and an epilogue: see `matmul.matmul`."""
    left = numpy_arrays.as_operand(a, "a")
    right = operand_b(b)
    if prologue_a is not None or prologue_b is not None:
        from portmm.ops.row_kernels import before
        from portmm.ops.rowwise import over_rows, spread
    if prologue_a is not None:
        left = before(over_rows, spread, prologue_a, left, "a")
    if prologue_b is not None:
        if not isinstance(right, np.ndarray):
            raise TypeError("b is packed; apply prologue_b to the original weight, or pack its result")
        right = before(over_rows, spread, prologue_b, right, "b")
    if epilogue is None:
        result = host_matmul.product(left, right, out, dtype=dtype)
        return in_class_of(result, a, b) if out is None else result
    rank_of(left.shape, right.shape)
    result = _multiply(left, right, out, dtype, epilogue)
    if out is not None or type(a) is type(b) is np.ndarray:  # a call less for the usual ones
        return result
    return in_class_of(result, a, b)


def kernel_of(
    user_function: UserFunction, left: Array, right: Any, other_keys: tuple[Any, ...], make: Callable[[Traced], Any]
) -> ProductKernel | ScheduleError:
    """The kernel for calls of a kind, that of the class of M if it supports this M, or the reason why there is none."""
    rank = rank_of(left.shape, right.shape)
    if rank == 2:
        m, k = left.shape
        ready: ProductKernel | ScheduleError = user_function.ready((row_class(m)[1], k, other_keys), make, VALUES, 2)
        if isinstance(ready, ProductKernel) and ready.rows[0] <= m <= ready.rows[1]:
            return ready.at(m)
    return user_function.ready((left.shape, other_keys), make, VALUES, rank)


def _multiply(left: Array, right: Any, out: Any, dtype: Any, epilogue: Callable[..., Any]) -> Any:
    """A product and its epilogue, in one kernel or in two."""
    arguments = (epilogue, left, right, out, dtype)
    dtype = None if dtype is None else np.dtype(dtype)
    seen = call_fastpath.see(epilogue, left, right, out, dtype)
    fast_path = None if seen is None else call_fastpath.known(seen, out)
    if seen is not None and fast_path is not None:
        if fast_path.repeats:  # a kind that the runtime tells from others, or has forgotten
            fast_path.hand_on(arguments, by_class=not fast_path.sizes[0])
        return fast_path(seen, out)
    return fused(HostCall(arguments, dtype, seen), epilogue)


class HostCall(HostProduct):
    """A call with an epilogue in the host's memory: see `epilogues.fused`.

    Args:
        arguments: the epilogue, A, B, out and the type of the result as the user passed it.
        dtype: that type, or None.
        seen: the kind of the call, or None.
    """

    def __init__(self, arguments: tuple[Any, ...], dtype: Any, seen: call_fastpath.Seen | None) -> None:
        self.arguments, self.seen = arguments, seen
        _, left, right, self.out, _ = arguments
        super().__init__(left, right, dtype, first_type(self.out, dtype))
        self.memory = (left, getattr(right, "owner", right))

    def ready(self, traced: Traced | None, *place: Any) -> Any:
        """The kernel for calls of this kind, after the run time is loaded."""
        host_matmul.begin()
        return super().ready(traced, *place)

    def kernel(self, function: UserFunction) -> ProductKernel | ScheduleError:
        """The kernel, or the reason why there is none."""
        left, right = self.left, self.right
        b_kind = (right.strides, right.dtype, right.flags.aligned) if self.array else right.family
        other_keys = (left.strides, left.dtype, left.flags.aligned, right.shape, b_kind, self.wanted, self.first)
        try:
            return kernel_of(function, left, right, other_keys, self.ready)
        except BuildError as error:
            fall_back(error)
            return ScheduleError(str(error))

    def run(self, kernel: ProductKernel, function: UserFunction) -> Any:
        """The results of the kernel, whose kind the fast path then knows."""
        out, results = self.out, [np.empty(s, t) for s, t in kernel.results]
        if out is not None and _writable(out, results[0], self.memory, kernel.bound, function.closure):
            results[0] = out
        run(kernel, self, function.closure, results)
        if self.seen is not None and function.lasting and kernel.direct and (out is None or out is results[0]):
            call_fastpath.keep(self.seen, kernel, 2 + (out is not None), self.arguments)
        return fit(results, out, several=kernel.several)

    def split(self, epilogue: Callable[..., Any]) -> Any:
        """The results of two kernels."""
        from portmm.ops.rowwise import over_rows

        dtype = np.int32 if self.sums() == "s32" else np.float32
        product = host_matmul.product(self.left, self.right, dtype=dtype).astype(np.float32, copy=False)
        results, several = over_rows(epilogue, (product,), NAMES, dtype=self.types()[2], first=self.first)
        return fit(list(results), self.out, several=several)


def run(ready: ProductKernel, call: HostProduct, closure: dict[Any, Any], results: list[Array]) -> None:
    """Run the kernel of a call, which writes dense results."""
    ready.run(ready.size[0], *call.read(ready), results[0], ready.bound.fill(closure, [], results[1:]))


def _writable(out: Any, like: Array, inputs: tuple[Array, ...], bound: Bound, captured: dict[Any, Any]) -> bool:
    """Whether kernels can write the first result to `out`: inputs overlap it only element by element."""
    numpy_arrays.check_out(out, like.shape, like.dtype)
    if out.dtype != like.dtype or not (out.flags.aligned and out.flags.c_contiguous):
        return False
    return not any(np.may_share_memory(out, x) for x in inputs) and bound.apart(out, (*"bmn"[-out.ndim :],), captured)


def fit(results: list[Array], out: Any, *, several: bool) -> Any:
    """The results of a call, the first copied to `out` if it is not that."""
    if out is not None and results[0] is not out:
        numpy_arrays.check_out(out, results[0].shape, results[0].dtype)
        np.copyto(out, results[0], casting="same_kind")
        results[0] = out
    return tuple(results) if several else results[0]
