"""Convolutions in NumPy: a sum over taps, in float64 or int64."""

from __future__ import annotations

import itertools

import numpy as np

LAYOUTS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}


def convolved(x, w, *, stride=1, padding=0, dilation=1, groups=1, layout="NHWC"):
    """The convolution of images (n, *spatial, c), or (n, c, *spatial), with filters (o, c, *kernel)."""
    last, count = layout.endswith("C"), len(layout) - 2
    stride, dilation = ((y,) * count if isinstance(y, int) else y for y in (stride, dilation))
    pads = [(y, y) if isinstance(y, int) else y for y in ((padding,) * count if isinstance(padding, int) else padding)]
    exact = np.int64 if x.dtype.kind in "iu" else np.float64
    x, w = (x if last else np.moveaxis(x, 1, -1)).astype(exact), w.astype(exact)
    x = np.pad(x, [(0, 0), *pads, (0, 0)])
    kernel = w.shape[2:]
    sizes = zip(x.shape[1:-1], kernel, stride, dilation, strict=True)
    out = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in sizes]
    total = np.zeros((len(x), *out, len(w)), exact)
    inputs, outputs = w.shape[1], len(w) // groups
    for tap in itertools.product(*map(range, kernel)):
        at = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in zip(tap, dilation, out, stride, strict=True)
        )
        for g in range(groups):
            to, of = slice(g * outputs, (g + 1) * outputs), slice(g * inputs, (g + 1) * inputs)
            total[..., to] += x[(slice(None), *at, of)] @ w[(to, slice(None), *tap)].T
    return total if last else np.moveaxis(total, -1, 1)
