"""Subclasses of ndarray.

Owns their treatment: which are refused, and which class a product of others has. Imports nothing of portmm.
Functions read operands as plain arrays; only `matmul` returns other classes, as `numpy.matmul` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def refuse_class(x: Any, name: str, matrix: bool = True) -> None:
    """Refusal of arrays whose class gives arithmetic another meaning, which reading them as plain ones would lose.

    Args:
        x: anything.
        name: the argument's.
        matrix: an np.matrix is welcome.

    Raises:
        TypeError: `x` is a masked array, of a class that overrides ufuncs, or an unwelcome np.matrix.
    """
    if type(x) is np.ndarray or not isinstance(x, np.ndarray):
        return
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, and portmm knows no masks: give a plain one (filled(0)), or use numpy.ma.dot"
        )
    if type(x).__array_ufunc__ is not np.ndarray.__array_ufunc__:
        raise TypeError(
            f"{name} is of class {type(x).__name__}, which has arithmetic of its own: give numpy.asarray({name})"
        )
    if not matrix and isinstance(x, np.matrix):
        raise TypeError(f"{name} is an np.matrix, whose operators mean something else: give numpy.asarray({name})")


def in_class_of(result: Any, *operands: Any) -> Any:
    """A product in the class that `numpy.matmul` gives it: that of the operand of the highest __array_priority__.

    Of operands of one priority, the first whose class is not ndarray itself decides.
    """
    for x in operands:  # every call comes by, and most have no such operand
        if type(x) is not np.ndarray and isinstance(x, np.ndarray):
            break
    else:
        return result
    given = [x for x in operands if isinstance(x, np.ndarray)]
    most = max(float(x.__array_priority__) for x in given)
    owner = next((x for x in given if type(x) is not np.ndarray and x.__array_priority__ == most), None)
    if owner is None:
        return result
    if isinstance(result, tuple):
        return tuple([owner.__array_wrap__(np.asarray(x)) for x in result])
    return owner.__array_wrap__(np.asarray(result))
