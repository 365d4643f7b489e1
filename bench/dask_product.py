"""A product in chunks on a local cluster of Dask's: portmm and NumPy on the same workers, in turns.

The workers have one thread each, and the chunks of both operands before the time is taken; the result stays with them.
One round of each is not counted.

    python bench/dask_product.py --size 16384 --chunk 4096 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

import portmm.dask as pd

if TYPE_CHECKING:
    from collections.abc import Callable

METHODS: dict[str, Callable[..., da.Array]] = {"portmm": pd.matmul, "numpy": da.matmul}


def seconds(method: str, x: da.Array, y: da.Array) -> float:
    """Seconds of one product."""
    start = time.perf_counter()
    result = METHODS[method](x, y).persist()
    wait(result)
    took = time.perf_counter() - start
    row, column = x[:1].compute(), y[:, :1].compute()
    np.testing.assert_allclose(result[:1, :1].compute(), row.astype(np.float64) @ column, rtol=1e-3)
    return took


def main() -> None:
    """Print the seconds of each round and the median of the ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    cluster = LocalCluster(
        n_workers=options.workers, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit=0
    )
    with cluster, Client(cluster):
        shape, chunks = (options.size,) * 2, (options.chunk,) * 2
        x, y = (
            da.random.default_rng(seed).random(shape, np.float32, chunks=chunks).astype(options.dtype).persist()
            for seed in (0, 1)
        )
        wait([x, y])
        rounds = [{m: seconds(m, x, y) for m in METHODS} for _ in range(options.rounds + 1)][1:]
    ratio = statistics.median(r["numpy"] / r["portmm"] for r in rounds)
    print(json.dumps({**vars(options), "rounds": rounds, "ratio": ratio}))


if __name__ == "__main__":
    main()
