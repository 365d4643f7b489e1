"""Measure how fast weights are packed, beside a copy of as many bytes.

    python bench/packing.py [--json] [--quick] [--types f32 --types u4] [--layout row] [--threads 1] [--seconds 0.3]

A case is a weight, the type of the activations it is packed for, and a number of
threads. Its rate is the bytes that `pack` reads, the weight, plus those it writes,
the panels, over its time. Two copies of half as many bytes, which read and write
as much, are timed in turns with it: by `np.copyto`, one part of the buffer for each
thread, the first part by the caller, the others by waiting threads.

`pack` makes a new array, so that it also pays for pages that nobody has touched.
The copy to compare with does too: it goes to a new array each time, and allocators
that would hand out used pages again are told not to. The other copy goes to an
array that is there already. Each ratio is formed within a round, and the median over
rounds is reported; what falls short is measured again for longer, and that counts.
The exit status is 1 if a weight is packed at less than half of the rate of the
first copy; `--json` keeps all of it as bench/results/CHIP-packing.json.
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

import portmm as pm
from portmm.arrays.numpy_arrays import numpy_of
from portmm.comparison.limit import chip
from portmm.host.detect import host

RESULTS = Path(__file__).parent / "results"
SIZES = ((1024, 1024), (4096, 4096), (4096, 11008))
# Types of the weight, of the activations that it is packed for, and, for codes of four bits, rows of a group.
TYPES = (
    ("f32", "f32", 0), ("bf16", "bf16", 0), ("f16", "f16", 0), ("s8", "s8", 0),
    ("bf16", "f32", 0), ("f16", "f32", 0), ("s8", "f32", 0),
    ("u4", "f32", 32), ("u4", "f32", 128), ("u4", "f32", None),
)  # fmt: skip
DUE = 0.5
SECONDS = 0.3
LEAST_ROUNDS = 5
# A shortfall is measured again for so many times as long: neighbours disturb.
LONGER = 5
M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Cell:
    """One weight, packed.

    Attributes:
        dtype: type of the weight.
        activations: type that it is packed for.
        group: rows of a group of codes; None for all, 0 for a weight that has none.
        layout: how the weight lies, "row" or "col".
        k: its rows.
        n: its columns.
        threads: threads of `pack` and of the copies.
        bytes: read plus written.
        rate: GB/s, read plus written.
        fresh: GB/s of the copy into a new array.
        kept: GB/s of the copy into an array that is there.
        share: rate over that of the copy into a new array; the bar is DUE.
        share_kept: the same for the other copy.
    """

    dtype: str
    activations: str
    group: int | None
    layout: str
    k: int
    n: int
    threads: int
    bytes: int = 0
    rate: float = 0.0
    fresh: float = 0.0
    kept: float = 0.0
    share: float = 0.0
    share_kept: float = 0.0


def fresh_pages():
    """Have the C library give every large array back to the system, so that the next one is new."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)


def weight_of(cell: Cell):
    """A weight, and the bytes that packing it reads."""
    rng = np.random.default_rng(0)
    shape = (cell.k, cell.n)
    if cell.dtype == "u4":
        groups = -(-cell.k // (cell.group or cell.k))
        codes = rng.integers(0, 16, shape, np.uint8)
        scales, offsets = (rng.random((groups, cell.n), np.float32) for _ in range(2))
        q = pm.Quantized(codes, scales, offsets, 4, cell.group or cell.k)
        return q, codes.nbytes + scales.nbytes + offsets.nbytes
    whole = rng.integers(-128, 128, shape, np.int8).astype(numpy_of(cell.dtype))
    w = np.asfortranarray(whole) if cell.layout == "col" else whole
    return w, w.nbytes


class Copier:
    """Copies between arrays of bytes, an equal part by each thread."""

    def __init__(self, threads: int):
        self.threads = threads
        self.pool = ThreadPoolExecutor(max(1, threads - 1))

    def __call__(self, to, src):
        """Copy all of `src`."""
        edges = [len(src) * i // self.threads for i in range(self.threads + 1)]
        parts = [slice(*x) for x in pairwise(edges)]
        others = [self.pool.submit(np.copyto, to[x], src[x]) for x in parts[1:]]
        np.copyto(to[parts[0]], src[parts[0]])
        for x in others:
            x.result()

    def close(self):
        """End the threads."""
        self.pool.shutdown()


def seconds(run: Callable):
    """Of one run, not counting that its result is dropped."""
    start = time.perf_counter()
    result = run()
    took = time.perf_counter() - start
    del result
    return took


def measured(cell: Cell, budget: float) -> Cell:
    """A cell with its rates."""
    w, read = weight_of(cell)
    activations = None if cell.dtype == "u4" else numpy_of(cell.activations)
    pm.set_num_threads(cell.threads)
    moved = read + pm.pack(w, activations=activations).nbytes
    copy, src, there = Copier(cell.threads), np.ones(moved // 2, np.uint8), np.ones(moved // 2, np.uint8)

    def copied():
        to = np.empty(len(src), np.uint8)
        copy(to, src)
        return to

    ways = [lambda: pm.pack(w, activations=activations), copied, lambda: copy(there, src)]
    rounds = []
    end = time.monotonic() + budget
    while len(rounds) < (LEAST_ROUNDS if budget else 1) or time.monotonic() < end:
        first = len(rounds) % len(ways)
        order = [*range(first, len(ways)), *range(first)]
        took = {i: seconds(ways[i]) for i in order}
        rounds.append([took[i] for i in range(len(ways))])
    copy.close()
    rates = [moved / median(x) / 1e9 for x in zip(*rounds, strict=True)]
    shares = [median(x[i] / x[0] for x in rounds) for i in (1, 2)]
    known = (cell.dtype, cell.activations, cell.group, cell.layout, cell.k, cell.n, cell.threads)
    return Cell(*known, moved, *rates, *shares)


def cells(types, layouts, sizes, threads):
    """The weights to measure; codes lie by rows."""
    for dtype, activations, group in TYPES:
        for layout in layouts:
            if dtype in types and (dtype != "u4" or layout == "row"):
                yield from (
                    Cell(dtype, activations, group, layout, *size, count) for size in sizes for count in threads
                )


def survey(wanted, budget):
    """Cells with their rates; one that falls short is measured again, for longer."""
    for cell in wanted:
        found = measured(cell, budget)
        yield found if found.share >= DUE or not budget else measured(cell, LONGER * budget)


def table(found):
    """The cells as text, the worst first."""
    head = ("weight", "for", "group", "layout", "k x n", "threads", "GB/s", "fresh copy", "kept copy", "share", "kept")
    rows = [
        (c.dtype, c.activations, "all" if c.group is None else str(c.group or ""), c.layout, f"{c.k}x{c.n}",
         str(c.threads), *(f"{x:.3g}" for x in (c.rate, c.fresh, c.kept)), f"{c.share:.2f}", f"{c.share_kept:.2f}")
        for c in sorted(found, key=lambda c: c.share)
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows))


def keep(found):
    """Store the cells under the chip's name."""
    path = RESULTS / f"{host().name}-packing.json"
    rows = [asdict(c) for c in sorted(found, key=lambda c: c.share)]
    path.write_text(json.dumps({"chip": chip(), "packing": rows}, indent=1) + "\n")
    return path


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = list(dict.fromkeys(dtype for dtype, *_ in TYPES))
    parser.add_argument("--types", action="append", choices=known, help="only weights of these types")
    parser.add_argument("--layout", action="append", choices=("row", "col"), help="only these layouts")
    parser.add_argument("--size", action="append", metavar="KxN", help="only these sizes")
    parser.add_argument("--threads", action="append", type=int, help="only these numbers of threads")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of timing for each cell")
    parser.add_argument("--quick", action="store_true", help="one round of the smallest size, to see that it runs")
    parser.add_argument("--json", action="store_true", help="keep the figures in bench/results")
    options = parser.parse_args(arguments)
    fresh_pages()
    sizes = [tuple(map(int, x.split("x"))) for x in options.size or ()] or SIZES[: 1 if options.quick else None]
    threads = options.threads or sorted({1, host().cores})
    wanted = list(cells(options.types or known, options.layout or ("row", "col"), sizes, threads))
    found = []
    for cell in survey(wanted, 0.0 if options.quick else options.seconds):
        found.append(cell)
        print(f"\r{len(found)} of {len(wanted)} cells   ", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(table(found))
    short = [cell for cell in found if cell.share < DUE]
    print(f"\n{len(found)} cells, {len(short)} below {DUE} of a copy into a new array")
    if options.json:
        print(f"wrote {keep(found)}")
    return 1 if short and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
