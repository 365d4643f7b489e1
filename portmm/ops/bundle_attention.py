"""Attention in bundles: the kernels for its sizes on machines that are not here.

Owns `add_attention`. The kernel of a call serves other sizes too, within the limits of the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.errors import BundleError
from portmm.ops.attention import attention
from portmm.ops.attention_groups import rows_of
from portmm.ops.attention_launch import question as question_of
from portmm.ops.bundle_jobs import AttentionCall
from portmm.ops.bundle_runs import attention_text
from portmm.ops.recorded_kernels import launches_of
from portmm.schedule.cpu_attention import packs_values
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.ops.bundle_build import Maker
    from portmm.ops.bundle_shapes import AttentionShape
    from portmm.target.target import Target


def add_attention(
    maker: Maker, shapes: Sequence[AttentionShape], machines: Sequence[Target], counts: Sequence[int]
) -> None:
    """Add the kernels of attention of some sizes on machines.

    Raises:
        ScheduleError: a machine has no unit for a type.
        BundleError: NumPy has a type of a shape only with a package that is not here.
    """
    for target in machines:
        maker.add_machine(target)
        for threads in counts:
            for shape in shapes:
                for queries in shape.queries:
                    launch = _launch(shape, queries, target, threads)
                    maker.attentions.append(_call(maker, launch, shape, queries, (target, threads)))
        for shape in shapes:
            for queries in shape.queries:
                _add_groups(maker, shape, queries, (target, counts[0]))


def _add_groups(maker: Maker, x: AttentionShape, queries: int, on: tuple[Target, int]) -> None:
    """Add the kernel of calls that take queries of heads that share keys as rows of one: see `attention_groups`."""
    shared = x.heads != x.kv_heads and x.dtype != "f32" and not x.window
    rows = rows_of((x.heads, x.kv_heads), queries, x.keys, causal=x.causal) if shared else 0
    if rows:
        heads = replace(x, heads=x.kv_heads, causal=False)
        launch = _launch(heads, rows, *on)
        if launch.route.kernel.kernel.atom.tiled:
            _call(maker, launch, heads, rows, on)


def _launch(x: AttentionShape, queries: int, target: Target, threads: int) -> Any:
    """Launch of a call on a machine, without tiles where rows are no whole steps of tiles: bundles pad none."""
    with launches_of(target) as recorder, config.config(threads=threads):
        recorder.launches = []
        _run(x, queries)
        (launch,) = recorder.launches
    kernel, run = launch.route.kernel.kernel, launch.numbers[15]
    if kernel.atom.tiled and not run and x.d % kernel.atom.k:
        return _launch(x, queries, target.limited_to(kernel.isa.base.name), threads)
    return launch


def _run(x: AttentionShape, queries: int) -> None:
    try:
        dtype = numpy_arrays.numpy_of(x.dtype)
    except TypeError as error:
        raise BundleError(f"attention of {x.dtype}: {error}") from error
    q, k, v = (
        np.empty((x.items, heads, rows, columns), dtype)
        for heads, rows, columns in ((x.heads, queries, x.d), (x.kv_heads, x.keys, x.d), (x.kv_heads, x.keys, x.dv))
    )
    attention(q, k, v, causal=x.causal, window=x.keys if x.window else None, return_lse=x.lse)


def _call(maker: Maker, launch: Any, x: AttentionShape, queries: int, on: tuple[Target, int]) -> AttentionCall:
    kernel, (target, threads) = launch.route.kernel.kernel, on
    atom, isa = kernel.atom, kernel.isa
    step, run = launch.numbers[10], launch.numbers[15]
    width = 2 * atom.n  # the columns of a register tile of the second product
    masks = bool(isa.spelling(atom, "load_mask", x.dtype))
    packs = packs_values(isa, atom, x.dtype, x.dv, width)
    units = (atom.k if atom.k_pack > 1 and not run else 1, 1 if run or packs or masks else width)
    align = atom.k_pack * BY_NAME[x.dtype].bytes if not run else BY_NAME[x.dtype].bytes
    workspace = kernel.workspace * BY_NAME[atom.acc].bytes
    wanted = "" if x.window or x.lse else question_of(target.name, x.dtype, queries, (x.d, x.dv), causal=x.causal)
    question = maker.add_source(kernel, target.arch)
    if wanted:
        maker.add_kernel(kernel, target.arch, wanted, str(int(run > 0)), str(atom.k_pack), str(atom.k), str(step))
    maker.runs[question, attention_text(isa.name, x, queries, (step, run), workspace)] = None
    least = atom.m if atom.tiled else 1
    return AttentionCall(target.name, threads, x, queries, question, workspace, step, run, least, units, align)
