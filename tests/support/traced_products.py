"""Operands of tests of what traced functions capture."""

import numpy as np


def rand(*shape):
    return np.random.default_rng(len(shape)).random(shape, np.float32)


X, W = rand(8, 16), rand(16, 24)
PRODUCT = X @ W
