"""First calls of fused functions over rows, by the base set: a function is outlined, and not traced.

Owns `results`, of a function that is a single one of portmm's over rows of an array, as softmax: its steps are those of
`outlined_matmul`, and the base set has their traced expressions. What traces and plans a fused function are a hundred
modules, twenty times what a first call takes. Whatever is not known here, and every later call, is traced as ever.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.build import kernel_store
from portmm.dispatch import base_kernels
from portmm.errors import BuildError
from portmm.ops.outlined_matmul import OUTLINE, Steps
from portmm.runtime.cpu import runtime
from portmm.spec.problem import AXES

Array = np.ndarray[Any, Any]


def results(function: Any, args: tuple[Any, ...]) -> Any:
    """Results of a function of arrays, by a kernel of the base set; None if it is to be traced.

    Args:
        function: as it was passed to `fuse`.
        args: of the call.

    Raises:
        BundleError: the base set is damaged.
    """
    if type(function) is not types.FunctionType or not args or {type(x) for x in args} != {np.ndarray}:
        return None
    x = args[0]
    if not (x.ndim and x.size and x.dtype == np.float32 and x.flags.c_contiguous and x.flags.aligned):
        return None
    try:
        return _results(function, x, args[1:]) if base_kernels.active() else None
    except BuildError:  # it is raised again
        return None


def _results(function: types.FunctionType, x: Array, vectors: tuple[Array, ...]) -> Any:
    """The same, of an array of floats in C's order."""
    base, outlined = kernel_store.base() if base_kernels.run_time() else None, outline(function, x.shape[-1], vectors)
    if base is None or outlined is None or (text := base.answer(f"{OUTLINE}{outlined[0]}")) is None:
        return None
    *lead, n = x.shape
    m, kinds = x.size // n, [kind.split(".") for kind in text[0].partition(" |")[0].split()]
    before = [x, *outlined[1]]
    route = base_kernels.rows_route(text[0], (m, n, 1), len(kinds))
    if route is None or [y for _, y in kinds[: len(before)]] != ["mn", *["n"] * len(outlined[1])]:
        return None
    after = [np.empty((*lead, n if "n" in y else 1), numpy_arrays.numpy_of(word)) for word, y in kinds[len(before) :]]
    table = np.array([row(y, n) for _, y in kinds], np.int64)
    runtime().execute(route, m, n, 1, 1, *(0,) * 12, None, table, np.full(1, n, np.float32), *before, *after)
    return tuple(after) if len(after) > 1 else after[0]


def outline(function: types.FunctionType, n: int, vectors: tuple[Array, ...]) -> tuple[str, list[Array]] | None:
    """The steps of a function of rows of n elements and of vectors along them, and these; None if it does more.

    Args:
        function: one of portmm's, or one that calls it.
        n: columns.
        vectors: arguments after the first.
    """
    steps = Steps(n)
    values = (steps.add("row"), *map(steps.standin, vectors))
    own = steps.standin(function)
    try:
        if own:
            own(*values)
        elif function.__code__.co_argcount != len(values) or steps.result(function, values) is None:
            return None
    except TypeError:  # of a vector that kernels do not read in place
        return None
    return "; ".join(steps.texts), steps.operands


def row(axes: str, n: int) -> tuple[int, ...]:
    """The row of an operand in the table of a call, without its address: see `trace.bind.located`."""
    strides = {"mn": (n, 1), "n": (0, 1), "m": (1, 0)}[axes]
    return (0, 0, *strides, *(0,) * (len(AXES) - 3))
