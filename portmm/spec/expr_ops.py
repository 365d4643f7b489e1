"""Operations of expressions: the type of each one's result, and its meaning in NumPy.

Owns `OPS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]


def _f32(x: Any) -> Any:
    return np.asarray(x, np.float32)


def _fused(a: Array, b: Array, c: Array) -> Any:
    return _f32(a.astype(np.float64) * b + c)


def _whole(x: Array) -> Array:
    """Conversion to s32 towards zero; the least integer where a value does not fit, as on x86."""
    fits = (x >= -(2.0**31)) & (x < 2.0**31)
    return np.where(fits, np.trunc(np.where(fits, x, 0)), -(2.0**31)).astype(np.int32)


OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add": ("same", np.add),
    "sub": ("same", np.subtract),
    "mul": ("same", np.multiply),
    "div": ("f32", np.divide),
    "neg": ("same", np.negative),
    "abs": ("same", np.abs),
    "min": ("same", np.minimum),
    "max": ("same", np.maximum),
    "greater": ("f32", lambda x, y: np.where(x > y, x, y)),
    "fma": ("f32", _fused),
    "sqrt": ("f32", np.sqrt),
    "lt": ("mask", np.less),
    "le": ("mask", np.less_equal),
    "eq": ("mask", np.equal),
    "ne": ("mask", np.not_equal),
    "and": ("same", np.bitwise_and),
    "or": ("same", np.bitwise_or),
    "xor": ("same", np.bitwise_xor),
    "not": ("same", np.invert),
    "shl": ("s32", np.left_shift),
    "shr": ("s32", np.right_shift),
    "select": ("second", np.where),
    "bits": ("s32", lambda x: _f32(x).view(np.int32)),
    "from_bits": ("f32", lambda x: np.asarray(x, np.int32).view(np.float32)),
    "float": ("f32", _f32),
    "int": ("s32", _whole),
}
"""Operation -> the type of its result ("same": of its operands; "second": of its second), and its meaning.

min and max of a NaN are NaN. Shifts are by a literal, to the right with the sign. "bits" and "from_bits" reinterpret
the same 32 bits as the other type; "float" and "int" convert, "int" towards zero.
"""
NUMPY = {"f32": np.float32, "s32": np.int32, "mask": np.bool_}
"""The type of expressions -> NumPy's."""
