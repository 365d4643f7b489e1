"""Functions for `portmm bundle --functions`, which examples/layers.c calls: a feed-forward layer, and one of int8."""

import numpy as np

import portmm as pm


def weight(rows: int, columns: int) -> np.ndarray:
    """Numbers that layers.c computes as well."""
    i, j = np.arange(rows)[:, None], np.arange(columns)
    return ((7 * i + 3 * j) % 13 - 6).astype(np.float32) / 16


UP, DOWN = pm.pack(weight(64, 96)), pm.pack(weight(96, 64))
CODES = pm.pack((16 * weight(64, 48)).astype(np.int8))


@pm.fuse
def mlp(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """X + relu(x . UP + bias) . DOWN."""
    return x + np.maximum(x @ UP + bias, 0) @ DOWN


@pm.fuse
def quantized(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """X . CODES / 16 + bias, with the rows of x in 8 bits."""
    return pm.linear(x, CODES, w_scale=1 / 16, dynamic=True) + bias
