"""Operations of expressions: the type of each one's result, and its meaning in NumPy.

Owns `OPS`, the table of operations: that of expressions, of traced arrays, and of what interpreters and printers know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


def _f32(x: Any) -> Any:
    return np.asarray(x, np.float32)


def _fused(a: Array, b: Array, c: Array) -> Any:
    return _f32(a.astype(np.float64) * b + c)


def _power(x: Array) -> Any:
    return _f32(np.exp2(np.asarray(x, np.float64)))


def _whole(x: Array) -> Array:
    """Conversion to s32 towards zero; the least integer where a value does not fit, as on x86."""
    fits = (x >= -(2.0**31)) & (x < 2.0**31)
    return np.where(fits, np.trunc(np.where(fits, x, 0)), -(2.0**31)).astype(np.int32)


class Operation(NamedTuple):
    """An operation of expressions.

    Attributes:
        result: the type of its result; "same": of its operands, "second": of its second.
        plain: its meaning in NumPy.
        ufuncs: names of NumPy's functions that are this operation.
    """

    result: str
    plain: Callable[..., Any]
    ufuncs: tuple[str, ...] = ()


OPS: dict[str, Operation] = {
    "add": Operation("same", np.add, ("add",)),
    "sub": Operation("same", np.subtract, ("subtract",)),
    "mul": Operation("same", np.multiply, ("multiply",)),
    "div": Operation("f32", np.divide, ("divide", "true_divide")),
    "neg": Operation("same", np.negative, ("negative",)),
    "abs": Operation("same", np.abs, ("absolute", "fabs")),
    "min": Operation("same", np.minimum, ("minimum",)),
    "max": Operation("same", np.maximum, ("maximum",)),
    "greater": Operation("f32", lambda x, y: np.where(x > y, x, y)),
    "fma": Operation("f32", _fused),
    "sqrt": Operation("f32", np.sqrt, ("sqrt",)),
    "exp2": Operation("f32", _power),
    "lt": Operation("mask", np.less, ("less",)),
    "le": Operation("mask", np.less_equal, ("less_equal",)),
    "eq": Operation("mask", np.equal, ("equal",)),
    "ne": Operation("mask", np.not_equal, ("not_equal",)),
    "and": Operation("same", np.bitwise_and, ("bitwise_and", "logical_and")),
    "or": Operation("same", np.bitwise_or, ("bitwise_or", "logical_or")),
    "xor": Operation("same", np.bitwise_xor),
    "not": Operation("same", np.invert, ("invert", "logical_not")),
    "shl": Operation("s32", np.left_shift),
    "shr": Operation("s32", np.right_shift),
    "select": Operation("second", np.where),
    "bits": Operation("s32", lambda x: _f32(x).view(np.int32)),
    "from_bits": Operation("f32", lambda x: np.asarray(x, np.int32).view(np.float32)),
    "float": Operation("f32", _f32),
    "int": Operation("s32", _whole),
}
"""Operations by name.

min and max of a NaN are NaN. "exp2", 2**x within two units of the last place, 0 for subnormal numbers or not, is
one of devices alone. Shifts are by a literal, to the right with the sign. "bits" and "from_bits" reinterpret
the same 32 bits as the other type; "float" and "int" convert, "int" towards zero.
"""
NUMPY = {"f32": np.float32, "s32": np.int32, "mask": np.bool_}
"""The type of expressions -> NumPy's."""
