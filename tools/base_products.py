"""Products of the base set: their kinds, and the selection of a few kernels for each.

Owns the kinds of products, and the grid of sizes over which kernels are selected: those whose predicted times lose
least to the best candidate of each size.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np


class Kind(NamedTuple):
    """Products with tables of their own: types, the layouts of A and B, and what is fused with them.

    Attributes:
        dtype: types.
        a: layout of A.
        b: layout of B.
        group: of a B of four bits, the rows of a group, 0 for all.
        steps: of an epilogue of `linear`: its fields in `Dequantization`; of another, its name in `EPILOGUES`.
        source: the type of A before its rows are quantized.
        symmetric: a B of four bits has no offsets.
    """

    dtype: str
    a: str = "row"
    b: str = "row"
    group: int = 0
    steps: tuple[str, ...] = ()
    source: str = ""
    symmetric: bool = False


FLOATS = ("f32", "f16", "bf16")
GROUPS, BOTH = (32, 64, 128, 0), (False, True)
EPILOGUES = ("biased", "relu", "gelu", "silu")
"""A bias, and functions after one."""
KINDS = (
    Kind("f32"), Kind("f32", "row", "col"), Kind("f32", "col", "row"), Kind("f32", "row", "packed"),
    Kind("f64"),
    Kind("bf16"), Kind("bf16", "row", "packed"), Kind("f16"), Kind("f16", "row", "packed"),
    Kind("s8-s8-s32"), Kind("s8-s8-s32", "row", "packed"), Kind("u8-s8-s32", "row", "packed"),
)  # fmt: skip
FUSED = (
    *(Kind(f"{x}-u4-{x}", "row", "codes", g, (), "", y) for x in FLOATS for g in GROUPS for y in BOTH),
    *(
        Kind(f"s8-u4-{x}", "row", "codes", *y)
        for x in ("f32", "bf16")
        for y in product(GROUPS, (("dynamic",),), (x,), BOTH)
    ),
    *(Kind("s8-s8-f32", "row", "packed", 0, steps) for steps in (("",), ("bias",))),
    *(Kind("u8-s8-f32", "row", "packed", 0, steps) for steps in (("a_zero",), ("a_zero", "bias"))),
    *(Kind("s8-s8-f32", "row", "packed", 0, ("dynamic", *x), y) for x in ((), ("bias",)) for y in FLOATS),
    *(Kind("f32", "row", "packed", 0, (x,)) for x in EPILOGUES),
    *(Kind("f32", "row", "row", 0, (x,)) for x in EPILOGUES),
    *(Kind("bf16", "row", "packed", 0, (x,)) for x in ("biased", "gelu", "silu")),
)
"""Products of floats by weights of four bits, of `linear`, and with epilogues: they have fewer kernels."""
FEW = tuple(range(1, 9))
"""Rows of A with a kernel of their own, whose register tile has them all."""
MS = (*FEW, 12, 16, 32, 64, 128, 512, 2048)
NS = (63, 255, 1023, 4095)
KS = (63, 255, 1023, 4095)
"""The grid. Odd numbers of columns ask for kernels that serve any."""
WIDE = tuple(Kind(x) for x in FLOATS)
"""Kinds whose B is read as it lies, by rows: how, depends on their length."""
NS_OF_WIDE = (31, 63, 127, 255, 1023, 1024, 4095, 4096, 16383)
"""The columns of their grid: rows of a power of two lie in few sets of caches, and ask for panels that are packed."""
MS_OF_FUSED = (1, 4, 12, 32, 128, 512)
AXES_OF_FUSED = (255, 1023, 4095)
"""The grid of products with fused operations."""
MOST, MOST_WIDE, MOST_FUSED = (1, 4), (4, 6), (1, 2)
"""Kernels of a kind for each number of few rows, and for more."""
WORTH = 0.01
"""The least gain, relative and on average, for which another is added."""


def grid(target, kind):
    """The schedules of a kind, the number of one for each point of the grid, or -1, a problem, and the grid."""
    from portmm.errors import ScheduleError

    (ms, ns, ks), (most_few, most) = (MS, NS_OF_WIDE if kind in WIDE else NS, KS), MOST_WIDE if kind in WIDE else MOST
    if kind in FUSED:
        (ms, ns, ks), (most_few, most) = (MS_OF_FUSED, AXES_OF_FUSED, AXES_OF_FUSED), MOST_FUSED
    few = [x for x in ms if x in FEW] if kind not in FUSED else [1]
    try:
        p = problem(kind, target)
        points = zip((0, *ms), ms, strict=False)
        rows = [
            [times_of(target, replace(p, m=m, n=n, k=k), before, few) for n in ns for k in ks] for before, m in points
        ]
    except ScheduleError:
        return [], [], None, ()
    parts = [rows[i] for i in range(len(few))], [x for row in rows[len(few) :] for x in row]
    schedules, table = [], []
    for points, number in (*((x, most_few) for x in parts[0]), (parts[1], most)):
        own, best = portfolio(points, number)
        schedules += [s for s in own if s not in schedules]
        table += [schedules.index(own[i]) if i >= 0 else -1 for i in best]
    return schedules, table, p, (ms, ns, ks)


def problem(kind, target):
    """A problem of a kind on a machine."""
    from portmm.dispatch import cpu_kernels
    from portmm.spec.dequantization import Dequantization
    from portmm.spec.problem import Problem

    if kind.b == "codes":
        family = str(cpu_kernels.family_of_codes(target, kind.group, symmetric=kind.symmetric))
    else:
        family = cpu_kernels.family(summed(kind), target) if kind.b == "packed" else ""
    if kind.steps and kind.steps[0] in EPILOGUES:
        fused, _ = epilogue(kind.steps[0], kind.dtype)
    else:
        fused = Dequantization(**{x: True for x in kind.steps if x}).text if kind.steps else ""
    about = {"dtype": kind.dtype, "a": kind.a, "b": kind.b, "family": family}
    return Problem(64, 64, 64, **about, source=kind.source, fused=fused)


def summed(kind):
    """The types of a kind's products before an epilogue, as weights are packed for."""
    left, right, _ = kind.dtype.split("-") if "-" in kind.dtype else ("",) * 3
    return f"{left}-{right}-s32" if right == "s8" else kind.dtype


def times_of(target, p, before, few):
    """As `times`, of the schedules that serve an odd number of columns as well."""
    from portmm.schedule.cpu_candidate_sets import candidate_set

    every = times(target, p, before, few)
    if p.n % 2:
        return every
    odd = set(candidate_set(replace(p, n=p.n - 1), target).schedules)
    return {s: t for s, t in every.items() if s in odd}


def times(target, p, before, few):
    """Predicted time of the schedules of a problem that serve all rows from after `before`; few rows have their own."""
    from portmm.dispatch.schedule_choice import predicted
    from portmm.schedule.cpu_candidate_sets import candidate_set

    listed = candidate_set(p, target)
    seconds = predicted(p, listed, 1)
    serving = range(max(1, before + 1), p.m + 1)
    return {
        s: t
        for s, t in zip(listed.schedules, seconds, strict=True)
        if not s.atom.swap and "k" not in s.parallel.over and not s.b.once and not s.static
        and (p.m in few or (s.heights[0] < s.mr and s.heights[0] <= serving[0]))
    }  # fmt: skip


def portfolio(points, most):
    """The schedules that lose least together over some points, and which of them is best at each, -1 if none is."""
    index = {s: i for i, s in enumerate(dict.fromkeys(s for row in points for s in row))}
    if not index:
        return [], [-1] * len(points)
    matrix = np.full((len(points), len(index)), np.inf)
    for i, row in enumerate(points):
        for s, t in row.items():
            matrix[i, index[s]] = t
    least = np.minimum(matrix.min(axis=1, keepdims=True), 1e3)
    logs = np.log(np.minimum(matrix / least, 1e3))
    selected, best = [], np.full(len(logs), np.log(1e3))
    while len(selected) < most:
        after = np.minimum(best[:, None], logs).mean(axis=0)
        i = int(after.argmin())
        if selected and best.mean() - after[i] < WORTH:
            break
        selected.append(i)
        best = np.minimum(best, logs[:, i])
    own, which = list(index), logs[:, selected].argmin(axis=1)
    legal = np.isfinite(matrix[:, selected][np.arange(len(points)), which])
    return [own[i] for i in selected], np.where(legal, which, -1).tolist()


def grids(chip, kinds):
    """Kinds of products of a chip with their schedules and tables: for a process of its own."""
    from portmm.target.target import load_target

    return [(kind, *grid(load_target(chip), kind)) for kind in kinds]


def epilogue(name, dtype):
    """The text of an epilogue of products of floats, as of a problem, and its outline."""
    import portmm as pm
    from portmm.arrays.numpy_arrays import numpy_of
    from portmm.ops.epilogues import VALUES, fusible
    from portmm.ops.outlined_matmul import outline
    from portmm.trace.tracer import trace

    bias, of = np.ones(64, numpy_of(dtype)), {"relu": pm.relu, "gelu": pm.gelu, "silu": pm.silu}.get(name)

    def biased(acc, i):
        return acc + bias[i.n]

    def function(acc, i):
        return of(acc + bias[i.n])

    function = function if of else biased
    traced, *_ = trace(function, VALUES, by_value=False, rank=2)
    (outlined, _) = outline(function, 64)
    return fusible(traced, "f32", lambda: bias.dtype).text, outlined
