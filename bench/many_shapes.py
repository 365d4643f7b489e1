"""The memory of a process that sees thousands of shapes.

    python bench/many_shapes.py [COUNT]

Each shape is new, and its call is one of those that remember something: a product, a batch of them, a product with an
epilogue, a fused function of three kernels with scratch memory between them, one with NumPy in between, a function over
rows, int8 with scales, attention. Operands are views of one buffer. Prints the memory of the process beyond operands
and results as shapes go by, and fails if it ever passes `LIMIT`.
"""

import re
import sys
from pathlib import Path

import numpy as np

import portmm as pm

COUNT = 10_000
LIMIT = 256
"""MiB, the interpreter, NumPy and portmm included."""
REPORTS = 20
LONGEST = 8192
"""Rows of the largest operand."""

buffer = np.ones(LONGEST * 4096, np.float32)
codes = np.ones(LONGEST * 256, np.int8)


def matrix(*shape, of=buffer):
    """An array of this shape, in the memory of others."""
    return of[: int(np.prod(shape))].reshape(shape)


@pm.fuse
def mlp(x, w, v):
    """Two products, the first's results in scratch memory."""
    return np.maximum(x @ w, 0) @ v


@pm.fuse
def sorted_between(x, w, v):
    """The same with NumPy in between."""
    return np.sort(x @ w, axis=-1) @ v


def calls(i, draw):
    """One call of a new shape."""
    m, n, k = (int(x) for x in draw.integers(1, 257, 3))
    rows = int(draw.integers(1, LONGEST))
    ways = (
        lambda: pm.matmul(matrix(m, k), matrix(k, n)),
        lambda: pm.matmul(matrix(3, m, k), matrix(3, k, n)),
        lambda: pm.matmul(matrix(m, 64), matrix(64, n), epilogue=lambda acc, _: pm.relu(acc)),
        lambda: mlp(matrix(rows, 64), matrix(64, 4096), matrix(4096, 16)),
        lambda: sorted_between(matrix(m, 64), matrix(64, 256), matrix(256, n)),
        lambda: pm.softmax(matrix(rows, n)),
        lambda: pm.linear(matrix(m, 256, of=codes), weight, x_scale=0.5),
        lambda: pm.attention(matrix(1, 2, m, 64), matrix(1, 2, n, 64), matrix(1, 2, n, 64)),
    )
    ways[i % len(ways)]()


def resident(field):
    """MiB that /proc says of this process."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def main():
    """Call all shapes."""
    global weight  # noqa: PLW0603 - an operand as the others are
    count = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT
    weight = pm.pack(np.ones((256, 96), np.int8))
    operands = (buffer.nbytes + codes.nbytes + weight.nbytes) / 2**20
    draw, worst = np.random.default_rng(0), 0.0
    for i in range(count):
        calls(i, draw)
        if (i + 1) % max(1, count // REPORTS) == 0:
            beyond = resident("VmRSS") - operands
            worst = max(worst, beyond)
            print(f"{i + 1:6} shapes: {beyond:6.1f} MiB beyond {operands:.0f} of operands", flush=True)
    print(f"at most {worst:.1f} MiB, {resident('VmHWM') - operands:.1f} within a call, results included")
    return worst > LIMIT


if __name__ == "__main__":
    sys.exit(main())
