"""Cases of the benchmarks of devices in order of importance, and the bars for their results.

Both are data: `gpu_families` makes the operands and calls of a case, `judged` compares rows with bars.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from portmm.comparison.report import geomean


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        section: what it belongs to.
        kind: the family that makes it, a name of `gpu_families.FAMILIES`.
        m: rows; of attention, queries; of a convolution, pixels of a row and of a column.
        n: columns; of attention, heads in all items; of a convolution, filters.
        k: what is summed over; of attention, the size of a head; of a convolution, channels.
        dtype: of the operands.
        b: how B lies, by "row" or by "col" as weights of `torch.nn.Linear` do.
        more: what else the family takes: "causal", a count of groups, a tag.
    """

    section: str
    kind: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    b: str = "col"
    more: str = ""

    @property
    def name(self):
        words = (self.section, f"{self.m}x{self.n}x{self.k}", self.dtype, self.b, self.more)
        return " ".join(x for x in words if x)

    def record(self):
        return asdict(self) | {"name": self.name}


LLAMA = {
    "8B QKV": (6144, 4096), "8B O": (4096, 4096), "8B gate/up": (28672, 4096), "8B down": (4096, 14336),
    "70B QKV": (10240, 8192), "70B O": (8192, 8192), "70B gate/up": (57344, 8192), "70B down": (8192, 28672),
}  # fmt: skip
"""N and K of the layers of Llama 3."""
HEADS = 32
"""Of attention, times items of the batch, at the shortest: longer sequences have fewer items."""


def _layers(section, kind, rows, names=LLAMA, dtype="bf16"):
    return [Case(section, kind, m, *LLAMA[name], dtype, "col", name) for m in rows for name in names]


def _squares():
    return [Case("squares", "dense", n, n, n, "bf16", b) for n in (4096, 8192) for b in ("col", "row")]


def _int8():
    sizes = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 28672, 4096), (4096, 4096, 14336), (64, 28672, 4096))
    return [Case("int8", "int8", *size, "s8") for size in sizes]


def _epilogue():
    sizes = ((3840, 4096, 4096), (4096, 3072, 768), (4096, 768, 3072), (8192, 8192, 2048), (512, 4096, 1024))
    return [Case("epilogue", "epilogue", *size, "bf16", "row") for size in sizes]


def _attention():
    sizes = [(s, max(HEADS, HEADS * 8192 // s), d) for d in (128, 64) for s in (1024, 4096, 16384)]
    return [Case("attention", "attention", *size, "bf16", "row", more) for size in sizes for more in ("causal", "")]


def _bias():
    sizes = ((4096, 4096, 4096), (8192, 8192, 2048), (4096, 3072, 768), (512, 4096, 1024))
    return [Case("bias", "bias", *size, "bf16", "col", more) for size in sizes for more in ("gelu", "relu", "")]


def _few_queries():
    sizes = ((1, 32), (1, 512), (8, 64))
    return [Case("few", "attention", m, n, 128, "bf16", "row", "keys=8192 group=4") for m, n in sizes]


def _rows():
    sizes = ((8192, 4096, "bf16"), (4096, 16384, "f32"), (64, 4096, "bf16"))
    return [
        Case("rows", "rows", m, n, 1, dtype, "row", more) for m, n, dtype in sizes for more in ("softmax", "layer_norm")
    ]


def _four_bits():
    rows = (1, 16, 64, 512, 4, 128, 8, 32, 256, 2)
    return [Case("w4a16", "codes", m, *LLAMA[name], "bf16", "row", name) for name in ("8B O", "8B down") for m in rows]


def _fp8():
    sizes = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 28672, 4096))
    return [Case("fp8", "dense", *size, "e4m3") for size in sizes]


def _tf32():
    return [Case("tf32", "tf32", n, n, n, "f32", b) for n in (4096, 8192) for b in ("col", "row")]


def _grouped():
    sizes = ((4096, 14336, 4096), (512, 14336, 4096), (4096, 4096, 14336))
    return [Case("grouped", "grouped", *size, "bf16", "row", "8") for size in sizes]


def _f32():
    sizes = ((4096,) * 3, (2048,) * 3, (512,) * 3, (1024, 4096, 1024), (256, 256, 16384), (1, 4096, 4096))
    return [Case("f32", "dense", *size, "f32", "row") for size in sizes]


def _conv():
    layers = (
        (56, 64, 64, "images=32 taps=3"), (64, 320, 320, "images=2 taps=3"), (14, 256, 256, "images=32 taps=3"),
        (56, 256, 64, "images=32"), (224, 64, 3, "images=32 taps=7 stride=2"), (32, 640, 640, "images=2 taps=3"),
        (28, 128, 128, "images=32 taps=3 stride=2"), (16, 1280, 1280, "images=2 taps=3"),
    )  # fmt: skip
    return [Case("conv", "conv", m, n, k, "bf16", "row", more) for m, n, k, more in layers]


SECTIONS = {
    "squares": _squares,
    "prefill": lambda: _layers("prefill", "dense", (4096, 8192)),
    "decode": lambda: _layers("decode", "dense", (1, 16, 64, 4)),
    "epilogue": _epilogue,
    "attention": _attention,
    "int8": _int8,
    "w4a16": _four_bits,
    "fp8": _fp8,
    "tf32": _tf32,
    "grouped": _grouped,
    "f32": _f32,
    "bias": _bias,
    "few": _few_queries,
    "rows": _rows,
    "conv": _conv,
}
"""In the order in which they are measured."""
MOST_THERE = 1 << 33
"""Multiply-adds of a product that OpenCL on a processor is timed with."""
GRAPHED = 256
"""Rows up to which products are also timed as graphs, whatever they take, without what the host does for each."""


def cases(names=()):
    """Those of some sections, by default of all."""
    return [case for name in names or SECTIONS for case in SECTIONS[name]()]


def for_processors():
    """The cases that OpenCL on a processor has time for."""
    return [case for case in _f32() if case.m * case.n * case.k <= MOST_THERE]


def tiny(names=()):
    """Every section's kinds and types at sizes that a check takes no time for, ragged ones too."""
    found = {}
    for case in cases(names):
        ends = case.more if case.kind in ("bias", "rows", "conv") else "causal" in case.more
        kind = (case.section, case.kind, case.dtype, case.b, ends, case.m > GRAPHED)
        if kind in found:
            continue
        small = {"m": 33 if case.m > GRAPHED else min(case.m, 4), "n": 48, "k": 96, "more": case.more}
        if case.kind == "attention":
            small = {"m": 40, "n": 2, "k": case.k, "more": case.more}
        if case.section == "few":
            small = {"m": 1, "n": 8, "k": case.k, "more": "keys=520 group=4"}
        if case.kind == "rows":
            small = {"m": 5, "n": 200, "k": 1, "more": case.more}
        if case.kind == "conv":
            small = {"m": 9, "n": 24, "k": min(case.k, 16), "more": case.more.replace("=32", "=2")}
        if case.kind == "codes":
            small |= {"k": 128}
        if case.kind == "grouped":
            small |= {"m": 40, "more": "3"}
        found[kind] = Case(case.section, case.kind, dtype=case.dtype, b=case.b, **small)
    return list(found.values())


# -- bars --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """The bars for results.

    Attributes:
        what: in words.
        sections: rows that count.
        least: of `figure`.
        by: "each" row, or the "mean" of ratios.
        figure: "ratio", the time of the best peer over portmm's, or "tflops".
        rows: from how many rows on, and up to how many.
        size: of the one product that counts.
    """

    what: str
    sections: tuple
    least: float
    by: str = "each"
    figure: str = "ratio"
    rows: tuple = (0, math.inf)
    size: tuple = ()


BARS = (
    Bar("bf16 squares and prefill layers, each", ("squares", "prefill"), 0.95),
    Bar("bf16 squares and prefill layers, geometric mean", ("squares", "prefill"), 1.0, "mean"),
    Bar("bf16 8192 cubed, TFLOP/s", ("squares",), 740.0, "best", "tflops", size=(8192, 8192, 8192)),
    Bar("decode layers of 1 to 64 rows, geometric mean", ("decode",), 1.1, "mean"),
    Bar("int8 with scales, each", ("int8",), 1.0),
    Bar("weights of four bits, up to 16 rows, each", ("w4a16",), 2.5, rows=(0, 16)),
    Bar("weights of four bits, up to 512 rows, each", ("w4a16",), 1.0, rows=(17, 512)),
    Bar("GEMM + Add + Add + FastGeLU, each", ("epilogue",), 1.2),
    Bar("attention, each", ("attention",), 0.9),
)


def figure(row, bar):
    """The number of a row that counts, None if it was not measured."""
    if bar.figure == "tflops":
        return row.get("tflops")
    return row.get("ratio_graph") or row.get("ratio")


def judged(rows, bars=BARS):
    """Each bar, what was reached, by which row, and whether it is met.

    Rows that should count and have no figure keep a bar from being met.
    """
    return [_judged(rows, bar) for bar in bars]


def _judged(rows, bar):
    due = [case for case in cases(bar.sections) if bar.rows[0] <= case.m <= bar.rows[1]]
    due = [case.name for case in due if not bar.size or (case.m, case.n, case.k) == bar.size]
    there = {row["name"]: figure(row, bar) for row in rows if row["name"] in due}
    found = {name: x for name, x in there.items() if x is not None}
    said = {"bar": bar.what, "least": bar.least, "measured": len(found), "of": len(due)}
    if not found:
        return said | {"reached": None, "state": "not measured"}
    name, reached = min(found.items(), key=lambda x: x[1])
    if bar.by == "mean":
        name, reached = "", geomean(list(found.values()))
    if bar.by == "best":
        name, reached = max(found.items(), key=lambda x: x[1])
    wrong = [row["name"] for row in rows if row["name"] in due and row.get("right") is False]
    whole = len(found) == len(due) and not wrong
    state = ("met" if whole else "met so far") if reached >= bar.least else "missed"
    return said | {"reached": reached, "at": name, "wrong": wrong, "state": state}
