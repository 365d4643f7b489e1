"""Tables of NumPy's functions and methods, by their effect on an array that is being traced.

Owns those tables, and `rebuilt`, which maps a function over nested lists, tuples and dicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

STATIC: dict[Any, Callable[[Any], Any]] = {
    np.shape: lambda x: x.shape, np.ndim: lambda x: x.ndim, np.size: lambda x: x.size,
}  # fmt: skip
"""Functions of an array's layout, known while it is traced."""
VIEWS = frozenset(
    (
        "transpose", "swapaxes", "moveaxis", "rollaxis", "squeeze", "expand_dims", "broadcast_to", "split",
        "array_split", "hsplit", "vsplit", "atleast_2d", "flip", "matrix_transpose", "permute_dims", "unstack",
    )
)  # fmt: skip
COPIES = frozenset(("concatenate", "stack", "hstack", "vstack", "column_stack", "concat"))
"""Functions that move elements and compute nothing, by NumPy."""
STATIC_METHODS = frozenset(("itemsize", "nbytes"))
CHANGES = frozenset(("sort", "fill", "put", "partition", "resize", "itemset", "setfield", "setflags", "byteswap"))
LOOKS = frozenset(("item", "tolist", "tobytes", "tofile", "dump", "dumps", "data", "ctypes", "flat", "base", "flags"))
METHODS = {
    "sum": {"axis", "keepdims"}, "max": {"axis", "keepdims"}, "amax": {"axis", "keepdims"},
    "min": {"axis", "keepdims"}, "amin": {"axis", "keepdims"}, "mean": {"axis", "keepdims"},
    "var": {"axis", "keepdims"}, "std": {"axis", "keepdims"}, "reshape": {"order"}, "ravel": {"order"},
    "squeeze": {"axis"}, "astype": set(), "copy": set(),
}  # fmt: skip
"""Functions that are methods -> their options."""
SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
"""Operators of two arrays; each has a form that works in place."""


def rebuilt(x: Any, change: Callable[[Any], Any]) -> Any:
    """Nested lists, tuples and dicts with `change` applied to their leaves."""
    if type(x) in (list, tuple):
        return type(x)([rebuilt(y, change) for y in x])
    if type(x) is dict:
        return {k: rebuilt(y, change) for k, y in x.items()}
    return change(x)
