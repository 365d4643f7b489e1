"""Einsum in NumPy's notation: `einsum`.

Owns the public function. Products are those of `matmul` on views, as `einsum_plan` finds them; diagonals, sums of one
operand, and products without sums are NumPy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import libraries
from portmm.arrays.numpy_arrays import check_out, name_of, put
from portmm.ops.einsum_plan import LETTERS, Form, Labels, Plan, Step, View, planned
from portmm.ops.matmul import matmul
from portmm.ops.prepack import is_packed, is_quantized
from portmm.spec.dtype import EXTENSION_TYPES
from portmm.util.array_subclasses import refuse_class
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


Array = np.ndarray[Any, Any]
_plans = Memory(512)


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: Any = None,
    dtype: DTypeLike | None = None,
    optimize: bool | str | Sequence[Any] = True,
) -> Any:
    """The sum of products that labels of axes describe, like `numpy.einsum`.

    Two operands at a time are multiplied, in an order of few operations: that of opt_einsum where it is installed,
    else NumPy's. A product with a sum is `matmul` of views of the operands; a copy is made only where labels
    that must be one axis are none in memory. Everything else is computed by NumPy.

    Args:
        subscripts: labels of the operands' axes and of the result's, as in "...ij,jk->...ik"; or the first operand,
            then its labels as a list of integers and `Ellipsis`, and so on.
        operands: arrays in the host's memory, or tensors.
        out: the array of the result; may overlap an operand.
        dtype: type of the result and of the sums, as in `matmul`.
        optimize: True, an algorithm that finds the order ("greedy", "optimal"), False for from left to right, or the
            order itself, pairs of operands that leave the list as in `numpy.einsum_path`.

    Returns:
        The result, C-contiguous where kernels can write it so; a view of the operand where there is one without sums;
        `out` if passed. Its type is NumPy's, but for products that `matmul` gives another, as int32 of two of int8.

    Raises:
        ValueError: subscripts do not fit the operands, or an order is invalid.
        TypeError: `dtype` or `out` cannot hold the result; operands are on a device.
    """
    if not isinstance(subscripts, str):
        subscripts, operands = _from_lists((subscripts, *operands))
    if where := libraries.place_of(*operands, out):
        from portmm.arrays.interop import elsewhere

        options = {"out": out, "dtype": dtype, "optimize": optimize}
        return elsewhere(where, einsum, _on_device, (subscripts, *operands), options)
    for i, x in enumerate(operands):
        refuse_class(x, f"operand {i}", matrix=False)
        if is_packed(x) or is_quantized(x):
            raise TypeError(f"operand {i} of einsum is a packed weight, which matmul and linear take; pass an array")
    arrays = [np.asarray(x) for x in operands]
    kind = None if dtype is None else np.dtype(dtype)
    if len(arrays) == 1:
        return _of_one(subscripts, arrays[0], out, kind)
    target = None if out is None else check_out(out, np.shape(out), np.dtype(bool))
    form = None if target is None else Form(target.shape, target.strides, target.dtype)
    forms = tuple([Form(x.shape, x.strides, x.dtype) for x in arrays])
    order: Any = optimize
    if not isinstance(optimize, (bool, str)):
        order = tuple([tuple(x) for x in optimize if not isinstance(x, str)])
    key = subscripts, forms, form, kind, order
    plan = _plans.get(key) or _plans.keep(key, planned(*key))
    if target is not None:
        check_out(target, plan.shape, plan.dtype)
    return _computed(plan, arrays, target)


def _on_device(*_: Any, **__: Any) -> Any:
    raise TypeError("einsum takes arrays in the host's memory; on a device, use matmul of transposed views")


def _from_lists(values: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Subscripts and operands of a call with lists of integers."""

    def term(labels: Any) -> str:
        try:
            return "".join("..." if x is Ellipsis else LETTERS[range(len(LETTERS))[x]] for x in labels)
        except (TypeError, IndexError) as error:
            raise TypeError(
                f"labels of einsum are {labels!r}; pass subscripts first, or after each operand a list of integers "
                f"below {len(LETTERS)} and Ellipsis"
            ) from error

    pairs = len(values) // 2
    inputs = ",".join(term(x) for x in values[1 : 2 * pairs : 2])
    return f"{inputs}->{term(values[-1])}" if len(values) % 2 else inputs, values[: 2 * pairs : 2]


def _of_one(subscripts: str, x: Array, out: Array | None, dtype: np.dtype[Any] | None) -> Any:
    """The output of one operand, in `out` if there is one."""
    if name_of(x.dtype) not in EXTENSION_TYPES:
        more: dict[str, Any] = {} if dtype is None else {"dtype": dtype, "casting": "same_kind"}
        return np.einsum(subscripts, x, out=out, **more)
    result = np.asarray(np.einsum(subscripts, x.astype(wide(x.dtype))), dtype=dtype or x.dtype)
    if out is None:
        return result[()]
    put(check_out(out, result.shape, result.dtype), result)
    return out


def _computed(plan: Plan, arrays: list[Array], out: Array | None) -> Any:
    """The output, in `out` if there is one."""
    operands = [_single(x, *about) for x, about in zip(arrays, plan.singles, strict=True)]
    for step in plan.steps:
        x, y = operands[step.first], operands[step.second]
        for i in sorted((step.first, step.second), reverse=True):
            del operands[i]
        if step.a is None or step.b is None:
            operands.append(_by_numpy(step, x, y))
            continue
        a, b, dtype = _viewed(x, step.a), _viewed(y, step.b), step.dtype if step.wider else None
        if step.into is not None:
            result = np.empty(plan.shape, plan.dtype) if out is None else out
            place = _viewed(result.squeeze(), step.into)
            if np.may_share_memory(place, result):  # not a copy, which it is without elements
                matmul(a, b, out=place, dtype=dtype)
                return result[()] if out is None else out
        operands.append(matmul(a, b, dtype=dtype).reshape(step.shape))
    result = operands[0].transpose(plan.order).reshape(plan.shape)
    if out is None:
        return result[()]
    put(out, result)
    return out


def _viewed(x: Array, view: View) -> Array:
    return x.transpose(view.axes).reshape(view.shape)


def _single(x: Array, labels: Labels, once: Labels, sums: np.dtype[Any]) -> Array:
    """An operand of which each label is there once."""
    if labels == once:
        return x
    long = [i for i, n in zip(labels, x.shape, strict=True) if n != 1]
    x = x.squeeze()
    every = list(dict.fromkeys(long))
    if len(every) < len(long):
        numbers = {label: i for i, label in enumerate(every)}
        x = np.einsum(x, [numbers[i] for i in long], list(range(len(every))))
    axes = tuple([j for j, i in enumerate(every) if i not in once])
    if axes:
        x = x.sum(axes, dtype=wide(sums)).astype(sums, copy=False)
    left = [i for i in every if i in once]
    return x.transpose([left.index(i) for i in once])


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type that NumPy computes with for a type: float32 for narrow floats."""
    return np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype


def _by_numpy(step: Step, x: Array, y: Array) -> Array:
    """The product of two operands by NumPy."""
    of_sums = wide(step.dtype)
    x, y = x.astype(of_sums, copy=False), y.astype(of_sums, copy=False)
    numbers: dict[int, int] = {}
    for i in (*step.labels[0], *step.labels[1]):
        numbers.setdefault(i, len(numbers))
    left, right, result = ([numbers[i] for i in z] for z in (*step.labels, step.result))
    product = np.einsum(x, left, y, right, result, optimize=len(result) < len(numbers))
    return np.asarray(product, dtype=step.dtype)
