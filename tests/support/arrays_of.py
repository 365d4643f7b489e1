"""Arrays as they come in the wild: every kind of stride, order, byte order, alignment and place."""

from __future__ import annotations

import numpy as np
from runs import guarded


def _padded(x):
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _swapped(x, how):
    return how(x.swapaxes(-1, -2)).swapaxes(-1, -2) if x.ndim > 1 else how(x)


def _backwards(x):
    flip = (Ellipsis, *([slice(None, None, -1)] * min(x.ndim, 2)))
    return np.ascontiguousarray(x[flip])[flip]


def _every_third(x):
    wide = np.full((*x.shape[:-1], x.shape[-1] * 3), np.nan, x.dtype)
    wide[..., ::3] = x
    return wide[..., ::3]


def _misaligned(x):
    raw = np.empty(x.nbytes + 1, np.uint8)[1:]
    y = raw.view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def _read_only(x):
    y = x.copy()
    y.flags.writeable = False
    return y


LAYOUTS = {
    "C": np.ascontiguousarray,
    "F": lambda x: _swapped(x, np.ascontiguousarray),
    "C padded": _padded,
    "F padded": lambda x: _swapped(x, _padded),
    "backwards": _backwards,
    "every third": _every_third,
    "misaligned": _misaligned,
    "before a guard": lambda x: guarded(np.ascontiguousarray(x).ravel()).reshape(x.shape),
    "after a guard": lambda x: guarded(np.ascontiguousarray(x).ravel(), end=False).reshape(x.shape),
    "F before a guard": lambda x: _swapped(x, lambda y: guarded(np.ascontiguousarray(y).ravel()).reshape(y.shape)),
}
"""Layout -> an array of the same values laid out so; it can be written to."""

INPUTS = {
    **LAYOUTS,
    "read-only": _read_only,
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder("S")),
    "one row": lambda x: np.broadcast_to(x[..., :1, :] if x.ndim > 1 else x[:1], x.shape) if x.size else x,
    "one column": lambda x: np.broadcast_to(x[..., :1], x.shape) if x.size else x,
    "one item": lambda x: np.broadcast_to(x[:1], x.shape) if x.size else x,
}
"""The same, and what can only be read; those with zero strides repeat some of the values."""


def close(got, a, b, what=""):
    """`got` is a @ b within the error of any order of summation, NaN and Inf where IEEE has them."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(all="ignore"):
        want, size = np.matmul(x, y), np.matmul(np.abs(x), np.abs(y))
    assert got.shape == want.shape, what
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=str(what))
    infinite = np.isinf(want)
    np.testing.assert_array_equal(got[infinite].astype(np.float64), want[infinite], err_msg=str(what))
    off = np.abs(got[finite].astype(np.float64) - want[finite])
    allowed = 2 * (x.shape[-1] + 2) * np.finfo(got.dtype).eps * size[finite]
    assert (off <= allowed).all(), f"{what}: {(off > allowed).sum()} of {off.size} wrong"
