"""Subclasses of ndarray.

Owns the list of classes that are refused, and the class of a product of the others.
Functions read operands as plain arrays; only `matmul` returns other classes, as `numpy.matmul` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def refuse_class(x: Any, name: str, matrix: bool = True) -> None:
    """Refuse arrays whose class redefines arithmetic, since reading them as plain arrays would lose that.

    Args:
        x: any object.
        name: name of the argument, for the message.
        matrix: whether an np.matrix is accepted.

    Raises:
        TypeError: `x` is a masked array, of a class that overrides ufuncs, or an np.matrix that is not accepted.
    """
    if type(x) is np.ndarray or not isinstance(x, np.ndarray):
        return
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, and portmm has no masks: pass a plain one (filled(0)), or use numpy.ma.dot"
        )
    if type(x).__array_ufunc__ is not np.ndarray.__array_ufunc__:
        raise TypeError(
            f"{name} is of class {type(x).__name__}, which has arithmetic of its own: pass numpy.asarray({name})"
        )
    if not matrix and isinstance(x, np.matrix):
        raise TypeError(f"{name} is an np.matrix, whose operators mean something else: pass numpy.asarray({name})")


def in_class_of(result: Any, *operands: Any) -> Any:
    """The product in the class that `numpy.matmul` returns: that of the operand of highest __array_priority__.

    Among operands of equal priority, the first whose class is not ndarray itself decides.
    """
    for x in operands:  # on the path of every call, and most have no such operand
        if type(x) is not np.ndarray and isinstance(x, np.ndarray):
            break
    else:
        return result
    arrays = [x for x in operands if isinstance(x, np.ndarray)]
    highest = max(float(x.__array_priority__) for x in arrays)
    owner = next((x for x in arrays if type(x) is not np.ndarray and x.__array_priority__ == highest), None)
    if owner is None:
        return result
    if isinstance(result, tuple):
        return tuple([owner.__array_wrap__(np.asarray(x)) for x in result])
    return owner.__array_wrap__(np.asarray(result))
