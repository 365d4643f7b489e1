"""Fused matmul: products with prologues and an epilogue.

Owns the call: the epilogue is part of the product's kernel, unless `product_kernel` finds a reason against that,
or no kernel can be built; then it is a kernel over the rows of the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import libraries, numpy_arrays
from portmm.arrays.numpy_fallback import fall_back
from portmm.errors import BuildError, ScheduleError, TraceError
from portmm.ops import call_fastpath, host_matmul
from portmm.ops.epilogues import NAMES, NOT_F64, VALUES
from portmm.ops.product_kernel import HostProduct, ProductKernel, operand_b
from portmm.ops.rowwise import over_rows
from portmm.spec.row_classes import row_class
from portmm.trace.bind import UserFunction
from portmm.trace.closures import resolve
from portmm.util.array_subclasses import in_class_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.trace.bind import Bound
    from portmm.trace.tracer import Traced

Array = np.ndarray[Any, Any]
_OF_A, _OF_B = {"m": "m", "k": "n", "b": "b"}, {"k": "m", "n": "n", "b": "b"}
"""Axes of a prologue's indices -> axes of rows."""


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
    if not libraries.on_host(a, b, out):
        from portmm.arrays.interop import elsewhere

        options = {"out": out, "dtype": dtype, "epilogue": epilogue, "prologue_a": prologue_a, "prologue_b": prologue_b}
        if there := elsewhere(matmul, _on_device, (a, b), options, "matmul_"):
            return there[0]
    left = numpy_arrays.as_operand(a, "a")
    right = operand_b(b)
    if prologue_a is not None:
        left = _before(prologue_a, left, "a", _OF_A)
    if prologue_b is not None:
        if not isinstance(right, np.ndarray):
            raise TypeError("b is packed; apply prologue_b to the original weight, or pack its result")
        right = _before(prologue_b, right, "b", _OF_B)
    if epilogue is None:
        result = host_matmul.product(left, right, out, dtype=dtype)
        return in_class_of(result, a, b) if out is None else result
    if left.ndim < 2 or len(right.shape) < 2:
        raise ValueError(f"an epilogue takes matrices; got {left.shape} by {right.shape}: add a dimension of 1")
    result = _multiply(left, right, out, dtype, epilogue)
    if out is not None or type(a) is type(b) is np.ndarray:  # a call less for the usual ones
        return result
    return in_class_of(result, a, b)


def _on_device(  # noqa: PLR0917 - as `matmul`
    a: Any, b: Any, out: Any, dtype: Any, epilogue: Any, prologue_a: Any, prologue_b: Any
) -> Any:
    """The same for operands on a device."""
    from portmm.ops import grid_product

    x = grid_product.adopted(a, b, out)
    x = replace(x, b=replace(x.b, queue=x.a.queue))  # one queue for all, that of A
    if prologue_a is not None:
        x = replace(x, a=_before(prologue_a, x.a, "a", _OF_A))
    if prologue_b is not None:
        if x.weight is not None:
            raise TypeError("b is an int4 weight; quantize the result of prologue_b")
        x = replace(x, b=_before(prologue_b, x.b, "b", _OF_B))
    return grid_product.multiply(x, dtype, epilogue)


def _before(function: Callable[..., Any], x: Any, name: str, names: dict[str, str]) -> Any:
    """An operand after its prologue.

    Raises:
        ValueError: it is no matrix.
        TraceError: the prologue returns a tuple.
    """
    if len(x.shape) < 2:
        raise ValueError(f"{name} has shape {x.shape}; a prologue takes matrices")
    results, several = over_rows(function, (x,), names)
    if several:
        raise TraceError(f"a prologue returns one value, not a tuple of {len(results)}")
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(np.broadcast_to(results[0], x.shape))
    strides = [s if n > 1 else 0 for n, s in zip(results[0].shape, results[0].strides, strict=True)]
    return replace(results[0], shape=x.shape, strides=tuple(strides))


def kernel_of(
    user_function: UserFunction, left: Array, right: Any, other_keys: tuple[Any, ...], make: Callable[[Traced], Any]
) -> ProductKernel | ScheduleError:
    """The kernel for calls of a kind, that of the class of M if it supports this M, or the reason why there is none.

    Raises:
        BuildError: it cannot be compiled.
    """
    rank = 2 if left.ndim == len(right.shape) == 2 else 3
    if rank == 2:
        m, k = left.shape
        ready: ProductKernel | ScheduleError = user_function.ready((row_class(m)[1], k, other_keys), make, VALUES, 2)
        if isinstance(ready, ProductKernel) and ready.rows[0] <= m <= ready.rows[1]:
            return ready.at(m)
    return user_function.ready((left.shape, other_keys), make, VALUES, rank)  # type: ignore[no-any-return]


def _begun(call: HostProduct, traced: Traced) -> ProductKernel | ScheduleError:
    """The kernel of a product, after the run time is loaded."""
    host_matmul.begin()
    return call.ready(traced)


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
    first = out.dtype.newbyteorder("=") if dtype is None and isinstance(out, np.ndarray) else None
    if first == np.float64:
        first = None  # results in float32 are converted
    user_function = UserFunction(epilogue)
    panels = getattr(right, "owner", right)
    b_kind = (right.strides, right.dtype, right.flags.aligned) if panels is right else right.family
    other_keys = (left.strides, left.dtype, left.flags.aligned, right.shape, b_kind, dtype, first)
    call = HostProduct(left, right, dtype, first)
    try:
        ready = kernel_of(user_function, left, right, other_keys, lambda traced: _begun(call, traced))
    except BuildError as error:
        fall_back(error)
        return _split(call, epilogue, out)
    if not isinstance(ready, ProductKernel):
        return _split(call, epilogue, out)
    results = [np.empty(s, t) for s, t in ready.results]
    if out is not None and _writable(out, results[0], (left, panels), ready.bound, user_function.closure):
        results[0] = out
    run(ready, call, user_function.closure, results)
    if seen is not None and user_function.lasting and ready.direct and (out is None or out is results[0]):
        call_fastpath.keep(seen, ready, 2 + (out is not None), arguments)
    return results[0] if out is None and not ready.several else fit(results, out, several=ready.several)


def run(ready: ProductKernel, call: HostProduct, closure: dict[Any, Any], results: list[Array]) -> None:
    """Run the kernel of a call, which writes dense results."""
    ready.run(ready.size[0], *call.read(ready), results[0], ready.bound.fill(closure, [], results[1:]))


def _split(call: HostProduct, epilogue: Callable[..., Any], out: Any) -> Any:
    """The product first, then the epilogue over its rows."""
    sums = call.sums()
    if sums == "f64":
        raise TypeError(NOT_F64)
    product = host_matmul.product(call.left, call.right, dtype=np.int32 if sums == "s32" else np.float32)
    product = product.astype(np.float32, copy=False)  # as in one kernel
    results, several = over_rows(epilogue, (product,), NAMES, dtype=call.types()[2], first=call.first)
    return fit(list(results), out, several=several)


def _writable(out: Any, like: Array, inputs: tuple[Array, ...], bound: Bound, captured: dict[Any, Any]) -> bool:
    """Whether kernels can write the first result to `out`: inputs overlap it only element by element."""
    numpy_arrays.check_out(out, like.shape, like.dtype)
    if out.dtype != like.dtype or not (out.flags.aligned and out.flags.c_contiguous):
        return False
    if any(np.may_share_memory(out, x) for x in inputs):
        return False
    layout = (out.__array_interface__["data"], out.shape, out.strides, tuple("bmn"[-out.ndim :]))
    for source in bound.traced.sources:
        x = resolve(source.key, captured)
        if np.may_share_memory(out, x) and (x.__array_interface__["data"], x.shape, x.strides, source.view) != layout:
            return False
    return True


def fit(results: list[Array], out: Any, *, several: bool) -> Any:
    """The results of a call, the first copied to `out` if it is not that."""
    if out is not None and results[0] is not out:
        numpy_arrays.check_out(out, results[0].shape, results[0].dtype)
        np.copyto(out, results[0], casting="same_kind")
        results[0] = out
    return tuple(results) if several else results[0]
