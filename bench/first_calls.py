"""Time of the first calls of shapes beyond that of the products themselves, on one thread.

    python bench/first_calls.py

Prints, in microseconds, what a new shape takes whose kernel is in the process, and what another M of a class takes
over a repeated one, by kind of call; and in seconds what M = 1 ... 512 at K = N = 768 take with an empty cache, and
with all kernels in it. Operands are views of one buffer, so that no page is touched first in a call that counts.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import portmm as pm
from portmm.dispatch import config
from portmm.ops import host_matmul
from portmm.runtime import route_cache
from portmm.spec.row_classes import row_class

REPEATS = 9
K, N = 64, 96
HEAD = 8
"""Elements of a head: with more of them a call of attention takes a hundred times as long as what is measured."""
CLASSES = (208, 288, 384, 480, 640, 896)
"""Last M of the classes that are looked at."""
OF_CLASS = 7
"""Values of M of each, beyond the two that are called first."""
SHAPES = 100
buffer = np.ones(1 << 20, np.float32)
codes = np.ones(1 << 16, np.int8)
bias = np.ones(N, np.float32)
result = np.ones(1 << 20, np.float32)
SWEEP = """
import sys, time
import numpy as np, portmm as pm
pm.set_num_threads(1)
a, b, c = (np.ones((m, 768), np.float32) for m in (512, 768, 512))
def seconds(m):
    start, used = time.perf_counter(), time.thread_time()
    pm.matmul(a[:m], b, out=c[:m])
    return time.perf_counter() - start, time.thread_time() - used
over = []
for m in range(1, 513):
    if m > 1:
        seconds(m - 1)  # what lies in the caches is as for the calls that it is compared with
    first = seconds(m)
    over.append(np.subtract(first, np.median([seconds(m) for _ in range(3)], axis=0)))
print(*np.sum(over, axis=0))
"""


def matrix(m, n, of=buffer):
    """A matrix in the memory of others."""
    return of[: m * n].reshape(m, n)


def relu(acc, i):
    """An epilogue that reads a vector."""
    return np.maximum(acc + bias[i.n], 0)


def kinds():
    """Calls by M, of each kind that has classes."""
    weight, packed = pm.pack(np.ones((K, N), np.int8)), pm.pack(matrix(K, N))
    return {
        "matmul": lambda m: pm.matmul(matrix(m, K), matrix(K, N), matrix(m, N, result)),
        "packed": lambda m: pm.matmul(matrix(m, K), packed, matrix(m, N, result)),
        "linear": lambda m: pm.linear(matrix(m, K, codes), weight, x_scale=0.5, out=matrix(m, N, result)),
        "linear with an epilogue": lambda m: pm.linear(matrix(m, K, codes), weight, x_scale=0.5, epilogue=relu),
        "epilogue": lambda m: pm.matmul(matrix(m, K), matrix(K, N), matrix(m, N, result), epilogue=relu),
        "batch": lambda m: pm.matmul(matrix(2 * m, K).reshape(2, m, K), matrix(K, N)),
        "stacks": lambda m: pm.matmul(matrix(2 * m, K).reshape(2, m, K), matrix(2 * K, N).reshape(2, K, N)),
        "attention": lambda m: pm.attention(*[matrix(m, HEAD).reshape(1, 1, m, HEAD)] * 3),
        "attention of one query": lambda m: pm.attention(
            matrix(1, K).reshape(1, 1, 1, K), *[matrix(m, K).reshape(1, 1, m, K)] * 2
        ),
    }


def seconds(call, *args):
    """How long one call takes."""
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def second_shapes(kind):
    """Microseconds of the first call of another M of a class, over a repeated call: the median over shapes."""
    call, over = kinds()[kind], []
    for last in CLASSES:
        call(last)
        call(row_class(last)[0])  # what is done once per process is done by now
        for m in range(last - 1, last - 1 - OF_CLASS, -1):
            first = seconds(call, m)
            over.append(first - statistics.median(seconds(call, m) for _ in range(REPEATS)))
    return statistics.median(over) * 1e6


def new_shapes():
    """Microseconds that finding the kernel of a new shape takes, where it is in the process: the median."""
    took = []

    def resolve(*about):
        start = time.perf_counter()
        found = host_matmul._resolve(*about)  # noqa: SLF001 - what the run time calls
        took.append(time.perf_counter() - start)
        return found

    draw = np.random.default_rng(0)
    shapes = [(int(draw.integers(33, 128)), *map(int, draw.integers(1, 16, 2) * 16)) for _ in range(SHAPES)]
    pm.matmul(matrix(2, 2), matrix(2, 2))
    runtime = host_matmul._state["runtime"]  # noqa: SLF001 - the resolver's place
    for more in (0, 1, 2):
        took.clear()
        book = route_cache.of_target(config.target_name())
        if book is not None:
            book.lines.clear()  # of earlier runs
        runtime.set_resolver(resolve, True)
        try:
            for m, n, k in shapes:
                pm.matmul(matrix(m, k + more), matrix(k + more, n), matrix(m, n, result))
        finally:
            runtime.set_resolver(host_matmul._resolve, True)  # noqa: SLF001 - as it was
    return statistics.median(took) * 1e6


def sweeps():
    """Seconds of a sweep beyond its products: with an empty cache, and of the calling thread alone with a full one.

    With a full cache nothing waits, and what else a machine does would be most of the time on the clock.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        env = {**os.environ, "PORTMM_CACHE": folder}
        run = [sys.executable, "-c", SWEEP]
        both = [subprocess.run(run, capture_output=True, text=True, check=True, env=env).stdout.split() for _ in "12"]
    return float(both[0][0]), float(both[1][1])


def main():
    """Print all of it."""
    pm.set_num_threads(1)
    print(f"a new shape, its kernel in the process: {new_shapes():.0f} us")
    for kind in kinds():
        print(f"another M of a class over a repeated one, {kind}: {second_shapes(kind):.1f} us")
    cold, warm = sweeps()
    print(f"M = 1 ... 512 at K = N = 768 beyond the products: {cold:.2f} s, {warm:.3f} s with all kernels in the cache")


if __name__ == "__main__":
    main()
