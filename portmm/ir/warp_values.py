"""Meaning of what the lanes of a warp do together: products of fragments, and loads of matrices.

Owns the matrices that registers of all lanes make up, by the rows of a `Fragment`, and nothing of any instruction set.
Products are exact for integers, which wrap around; of floats they are summed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.fragment import Fragment

    Array = np.ndarray[Any, Any]

ROW_BYTES = 16
"""Bytes of a row of a matrix that is loaded from shared memory."""
PAIR = np.dtype(np.uint16)
"""Elements of such a matrix, of 16 bits whatever it holds."""


@cache
def places(fragment: Fragment) -> list[tuple[list[int], list[int]]]:
    """For each lane, the rows and the columns of its elements."""
    every = [[fragment.place(lane, i) for i in range(fragment.elements)] for lane in range(fragment.lanes)]
    return [([row for row, _ in x], [column for _, column in x]) for x in every]


def matrix(fragment: Fragment, lanes: Sequence[Array]) -> Array:
    """The matrix whose elements lanes hold.

    Raises:
        ValueError: lanes hold different values of one element.
    """
    whole = np.zeros((fragment.rows, fragment.columns), lanes[0].dtype)
    for at, elements in zip(places(fragment), lanes, strict=True):
        whole[at] = elements
    for at, elements in zip(places(fragment), lanes, strict=True):
        if whole[at].tobytes() != elements.tobytes():
            raise ValueError("lanes hold different values of an element that several of them have")
    return whole


def multiplied(atom: Atom, lanes: Sequence[tuple[Array, Array]]) -> Array:
    """The product of the fragments of all lanes, each with its elements of the left and of the right operand."""
    left, right = (matrix(x, y) for x, y in zip(fragments(atom)[:2], zip(*lanes, strict=True), strict=True))
    wide = np.int64 if left.dtype.kind in "iu" else np.float64
    return left.astype(wide) @ right.astype(wide)


def fragments(atom: Atom) -> tuple[Fragment, Fragment, Fragment]:
    """Fragments of the left operand, of the right one and of sums.

    Raises:
        ValueError: the atom has none.
    """
    left, right, sums = atom.a_fragment, atom.b_fragment, atom.acc_fragment
    if left is None or right is None or sums is None:
        raise ValueError(f"{atom.name} lacks fragments, by which alone its products have a meaning")
    return left, right, sums


def loaded(fragment: Fragment, rows: Sequence[tuple[Array, int]]) -> Array:
    """Matrices, one below the other, whose row i is at the address of lane i."""
    taken = [array[at:].view(np.uint8)[:ROW_BYTES].view(PAIR) for array, at in rows[: fragment.rows]]
    return np.stack(taken)


def _round(x: Array) -> None:
    """Round a word, the bits of a float, to the ten bits after the point of tf32; ties away from zero."""
    x[:] = (x + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def _load(to: Array, src: Array) -> None:
    to[:] = src
    _round(to)


_PRIMITIVES: dict[str, Callable[..., None]] = {"tf32_round": _round, "tf32_load": _load}


def primitive(name: str) -> Callable[..., None]:
    """The meaning of a primitive of words.

    Raises:
        NotImplementedError: it has none.
    """
    if name not in _PRIMITIVES:
        raise NotImplementedError(f"{name} has no meaning in NumPy; run its kernel through an emulator of its language")
    return _PRIMITIVES[name]
