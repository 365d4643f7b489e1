"""Look for cliffs: narrow types that run far below what float32 says they should.

    python bench/cliff.py [--json] [--isa avx2 --isa sse2] [--types bf16] [--rows 1] [--seconds 0.004]

For every instruction set that this machine runs, narrow type (f16 where there is an
instruction that converts it), layout of B and class of M, at N = K = 1024 on one
thread, portmm's rate must reach half of its rate with float32 under the same
conditions, or 80 % of what the measured bandwidth of memory allows, whichever is
lower. The worst come first; the exit status is 1 if one falls short, or is wrong.
`--json` keeps all of it as bench/results/CHIP-cliff.json.

Each instruction set has a process of its own that is held to it by PORTMM_TARGET:
inside a `pm.config` block every call asks anew for its kernel, which takes longer
than many of these products.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from portmm.comparison import Case
from portmm.comparison.case import BLOCK
from portmm.comparison.limit import chip
from portmm.comparison.peers import Setup, find
from portmm.comparison.process import Worker, WorkerError
from portmm.host.calibrate import probe
from portmm.host.detect import host

RESULTS = Path(__file__).parent / "results"
SIZE = 1024
ROWS = (1, 8, 64, 512)
LAYOUTS = ("row", "col", "packed")
REFERENCE = "f32"
# Types, and the layouts of B in which a user has them: scales and codes come with packed weights.
TYPES = {
    "bf16": LAYOUTS,
    "f16": LAYOUTS,
    "s8-s8-s32": LAYOUTS,
    "u8-s8-s32": LAYOUTS,
    "u8-s8-f32": ("packed",),
    "f32-s8-f32": ("packed",),
    "f32-u4-f32": ("packed",),
    "bf16-u4-bf16": ("packed",),
    "s8-s8-f32": ("packed",),
    "s8-u4-f32": ("packed",),
}
GIVEN = {"s8-s8-f32": "f32-s8-f32", "s8-u4-f32": "f32-u4-f32"}
"""Types that are multiplied -> those of the operands, whose rows are rounded to 8 bits in the call."""
# Sets that have no instruction to convert f16, and do it by arithmetic on its bits.
WITHOUT_F16 = ("sse2", "scalar")
OF_F32, OF_BANDWIDTH = 0.5, 0.8
SECONDS = 0.004
# A cell that falls short is measured again, beside float32, this often: neighbours disturb.
AGAIN = 3
PATIENCE = 60.0


@dataclass(frozen=True)
class Cell:
    """One product.

    Attributes:
        isa: instruction set that portmm was held to.
        dtype: word of its types.
        layout: how B lies: "row", "col" or "packed".
        m: rows.
        rate: GOP/s; 0 if it is wrong or did not run.
        f32: GFLOP/s of float32 under the same conditions.
        due: GOP/s that it must reach.
        fault: why it did not run.
    """

    isa: str
    dtype: str
    layout: str
    m: int
    rate: float = 0.0
    f32: float = 0.0
    due: float = 0.0
    fault: str = ""

    @property
    def share(self):
        """Rate over what is due; less than one is a cliff."""
        return self.rate / self.due if self.due else 0.0


def case_of(dtype, layout, m):
    """The product of a cell."""
    side = "row" if layout == "packed" else layout
    block = BLOCK if "-u4-" in dtype else 0
    given, dynamic, packed = GIVEN.get(dtype, dtype), dtype in GIVEN, layout == "packed"
    name = f"{dtype}-{layout}-m{m}"
    return Case(name, "cliff", m, SIZE, SIZE, b=side, packed=packed, dtype=given, block=block, dynamic=dynamic)


def due(case, f32, bandwidth):
    """GOP/s that a case must reach, from float32's GFLOP/s and memory's GB/s."""
    return min(OF_F32 * f32, OF_BANDWIDTH * bandwidth * case.flops / case.bytes)


@dataclass
class Bench:
    """Times cases in a worker process that is held to an instruction set."""

    contender: object
    setup: Setup
    seconds: float
    worker: Worker | None = None

    def open(self):
        """Start the process if there is none."""
        if self.worker is None:
            self.worker = Worker(self.contender, self.setup)
            hello = self.worker.hear(PATIENCE)
            if hello["state"] != "ok":
                raise WorkerError(hello["state"], hello["reason"])
        return self.worker

    def close(self):
        """End the process."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def rate(self, case):
        """GOP/s of a case, and why there is none."""
        try:
            worker = self.open()
            ready = worker.ask({"do": "prepare", "case": asdict(case), "seed": 0}, PATIENCE)
            if ready["state"] != "ok":
                return 0.0, f"{ready['state']}: {ready['reason']}"
            seconds = worker.ask({"do": "time", "seconds": self.seconds}, PATIENCE)["seconds"]
        except WorkerError as error:
            self.close()
            return 0.0, f"{error.state}: {error}"
        return case.flops / seconds / 1e9, ""


def measured(rate: Callable, cell: Cell, f32: float, bandwidth: float) -> Cell:
    """A cell with its rate; measured again with float32 where it falls short."""
    case, reference = (case_of(x, cell.layout, cell.m) for x in (cell.dtype, REFERENCE))
    best = None
    for again in range(AGAIN):
        base = rate(reference)[0] if again else f32
        found, fault = rate(case)
        made = Cell(cell.isa, cell.dtype, cell.layout, cell.m, found, base, due(case, base, bandwidth), fault)
        if best is None or made.share > best.share:
            best = made
        if fault or best.share >= 1:
            break
    return best


def survey(rate, isa, bandwidth, types=tuple(TYPES), rows=ROWS):
    """All cells of one instruction set; `rate` times a case."""
    for layout in LAYOUTS:
        for m in rows:
            wanted = [x for x in types if layout in TYPES[x] and not (x == "f16" and isa in WITHOUT_F16)]
            f32 = rate(case_of(REFERENCE, layout, m))[0] if wanted else 0.0
            for dtype in wanted:
                yield measured(rate, Cell(isa, dtype, layout, m), f32, bandwidth)


def table(cells):
    """The cells as text, the worst first."""
    head = ("isa", "types", "B", "M", "GOP/s", "f32", "due", "rate/due", "")
    rows = [
        (c.isa, c.dtype, c.layout, str(c.m), f"{c.rate:.4g}", f"{c.f32:.4g}", f"{c.due:.4g}", f"{c.share:.2f}", c.fault)
        for c in sorted(cells, key=lambda c: c.share)
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows))


def keep(cells, bandwidth):
    """Store the cells under the chip's name."""
    path = RESULTS / f"{host().name}-cliff.json"
    rows = [{**asdict(c), "share": c.share} for c in sorted(cells, key=lambda c: c.share)]
    text = json.dumps({"chip": chip(), "bandwidth": bandwidth, "size": SIZE, "cliff": rows}, indent=1)
    path.write_text(text + "\n")
    return path


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [isa.name for isa in host().isas]
    parser.add_argument("--isa", action="append", choices=names, help="only these instruction sets")
    parser.add_argument("--types", action="append", choices=list(TYPES), help="only these types")
    parser.add_argument("--rows", action="append", type=int, help="only these M")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of timing for each cell")
    parser.add_argument("--json", action="store_true", help="keep the figures in bench/results")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    bandwidth = probe(host())["memory"]
    cells = []
    for isa in options.isa or names:
        (contender,) = find(["portmm"])
        bench = Bench(contender, Setup(threads=1, target=isa), options.seconds)
        try:
            for cell in survey(bench.rate, isa, bandwidth, options.types or tuple(TYPES), options.rows or ROWS):
                cells.append(cell)
                print(f"\r{len(cells)} cells, {time.monotonic() - start:.0f} s, {isa}   ", end="", file=sys.stderr)
        finally:
            bench.close()
    print(file=sys.stderr)
    print(table(cells))
    short = [cell for cell in cells if cell.share < 1]
    print(f"\n{len(cells)} cells, {len(short)} cliffs; memory {bandwidth:.0f} GB/s; {time.monotonic() - start:.0f} s")
    if options.json:
        print(f"wrote {keep(cells, bandwidth)}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
