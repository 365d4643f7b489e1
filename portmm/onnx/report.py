"""Reports on a loaded model: what computes each of its operators, how long, and in how much memory."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from portmm.util import text

MOST_REPEATS = 100


@dataclass(frozen=True, slots=True)
class Row:
    """One step.

    Attributes:
        kind: "product", "rows", "copy", "attention", "linear" or "numpy".
        what: its operators, as the model names them.
        detail: its problem or shape.
        seconds: of its fastest run; 0 if it was not timed.
        flop: multiplications and additions of a product or convolution.
    """

    kind: str
    what: str
    detail: str
    seconds: float = 0.0
    flop: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A report for one kind of inputs.

    Attributes:
        rows: steps, in the order in which they run.
        operators: type of operator -> number of nodes.
        numpy: type of operator -> number of nodes that NumPy computes.
        reasons: (node, why it is not fused).
        scratch: bytes between kernels, reused from step to step.
        constants: bytes of constants.
        seconds: of a run without the clock; 0 if it was not timed.
    """

    rows: tuple[Row, ...]
    operators: dict[str, int]
    numpy: dict[str, int]
    reasons: tuple[tuple[str, str], ...]
    scratch: int
    constants: int
    seconds: float = 0.0

    def __str__(self) -> str:
        kinds = Counter(x.kind for x in self.rows)
        lines = [
            f"{sum(self.operators.values())} operators in {text.number(len(self.rows), 'step')}: "
            + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
        ]
        if self.numpy:
            lines.append("by NumPy: " + ", ".join(f"{op} ({n})" for op, n in self.numpy.items()))
        lines.append(f"{text.size(self.scratch)} between kernels, {text.size(self.constants)} of constants")
        return "\n".join(lines)


def report_of(executor: Any, values: dict[str, Any], *, seconds: float = 0.0) -> Report:
    """The report of a session for inputs of this kind; with `seconds`, timed for as long as that."""
    whole = _shortest(lambda: executor.run(dict(values)), seconds) if seconds else 0.0
    rows: list[Row] = []
    reasons: list[tuple[str, str]] = []
    numpy: Counter[str] = Counter()
    scratch = 0
    env = dict(values)
    for part in executor.parts:
        before = dict(env)
        with np.errstate(all="ignore"):
            executor.run_part(part, env)
        if part.alone:
            node = part.nodes[0]
            rows.append(Row("numpy", f"{node.op} {node.name}", ""))
            numpy[node.op] += 1
            continue
        steps, program = _rows(executor, part, before, seconds)
        rows += steps
        if program is None or program.run is None:
            numpy.update(n.op for n in part.nodes)
            continue
        ops = {n.name: n.op for n in part.nodes}
        numpy.update(ops.get(x, k.what) for k in program.kernels if k.kind == "numpy" for x in k.lines)
        reasons += program.reasons
        scratch = max(scratch, program.scratch)
    operators = Counter(n.op for part in executor.parts for n in part.nodes)
    constants = sum(x.nbytes for x in executor.constants.values())
    return Report(
        tuple(rows), dict(operators.most_common()), dict(numpy.most_common()), tuple(reasons), scratch, constants, whole
    )


def _rows(executor: Any, part: Any, values: dict[str, Any], seconds: float) -> tuple[list[Row], Any]:
    """The steps of a part, timed if `seconds` are passed, and its program."""
    best: dict[int, float] = {}
    now = [0.0]

    def clock(count: int) -> None:
        seconds = time.perf_counter() - now[0]
        best[count - 1] = min(best.get(count - 1, seconds), seconds)
        now[0] = time.perf_counter()

    program = executor.compiled(part, values, clock if seconds else None)
    if program.run is None or not program.kernels:
        return [Row("numpy", n.op, n.name) for n in part.nodes] if program.run is None else [], program
    if seconds:
        arrays = [values[x] for x in part.arrays]
        until = time.perf_counter() + seconds
        with np.errstate(all="ignore"):
            for i in range(MOST_REPEATS):
                if i and time.perf_counter() > until:
                    break
                now[0] = time.perf_counter()
                program.run(arrays)
    rows = [
        Row(k.kind, ", ".join(k.lines), k.detail or k.what, best.get(i, 0.0), k.flop)
        for i, k in enumerate(program.kernels)
    ]
    return rows, program


def _shortest(function: Any, seconds: float) -> float:
    """The shortest time of a function, called again for some seconds."""
    function()
    best, until = float("inf"), time.perf_counter() + seconds
    for _ in range(MOST_REPEATS):
        begin = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - begin)
        if time.perf_counter() > until:
            break
    return best
