"""Kernel of attention on the host: its form and its operands, for calls of one kind.

Owns the selection of the form: vectors along queries or along keys, KV splits, blocks of keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.numpy_arrays import name_of
from portmm.dispatch import config
from portmm.errors import ScheduleError
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.ops.attention_launch import KEYS_OF_FEW, AttentionKernel, begin, prepared, strides
from portmm.ops.attention_scores import score_expression
from portmm.spec.epilogue import index
from portmm.spec.expr_functions import substituted
from portmm.spec.row_classes import last_of_class
from portmm.trace.bind import Bound
from portmm.trace.recorder import described

if TYPE_CHECKING:
    from portmm.ops.attention_shapes import Shape
    from portmm.spec.expr import Expr
    from portmm.trace.tracer import Traced

Array = np.ndarray[Any, Any]
_TRANSPOSED = {"m": "n", "n": "m"}


def make_kernel(
    traced: Traced, shape: Shape, flags: tuple[bool, ...], result: Array, *, factors: bool = False
) -> AttentionKernel:  # fmt: skip
    """The kernel for calls of a kind.

    Args:
        traced: the score.
        shape: of the operands.
        flags: causal; no window; logarithms are returned; all keys are read; positions are the default.
        result: an array like the result.
        factors: the score may be two values, see `Form`.

    Raises:
        TraceError: the score is more values.
        ScheduleError: no unit of the target computes it.
    """
    from portmm.dispatch import cpu_kernels, cpu_routes
    from portmm.schedule.cpu_attention import attention_schedule, few_queries, keys_of, packs_values

    target, dtype, to = config.target(), shape.element, name_of(result.dtype)
    fused = score_expression(traced, factors=factors)
    begin(shape)
    isa, atom, lanes = cpu_kernels.attention_unit(dtype, fused, target, last_of_class(shape.m))
    if to != dtype and not (atom.tiled and dtype == "bf16"):
        raise ScheduleError("tile units alone have exact weights of results of float32, of operands of bfloat16")
    few = shape.m <= few_queries(isa, atom, dtype) and len(fused.results) == 1
    function = traced if few else _transposed(traced)
    unit = lanes if few else atom
    schedule = attention_schedule(isa, unit)
    if not few and packs_values(isa, atom, dtype, shape.dv, schedule.parallel.cell[1]):
        schedule = attention_schedule(isa, atom, packs=True)
    step = KEYS_OF_FEW if few else keys_of(schedule, target, max(shape.d, shape.dv))
    causal, no_window, with_lse, all_keys, no_starts = flags
    bounds = Bounds(causal, not no_window)
    score = score_expression(function, factors=factors)
    form = Form(score, dtype, to, bounds, not all_keys, not no_starts, with_lse)
    program = of_attention(form, "n" if few else "m")

    def bound_of(*operands: Array) -> Bound:
        rows = [strides(x) for x in (*operands, result)]
        rows += [(shape.heads * shape.m, 1, 0, shape.m)] if with_lse else []
        rows += [(1,)] * ((not all_keys) + (not no_starts))
        size = (shape.m, shape.n) if few else (shape.n, shape.m)
        return Bound(function, (*size, shape.items, shape.heads), [], rows)

    route_of = partial(cpu_routes.program_route, program, schedule, isa, unit)
    how = (few, atom.k_pack, atom.k, step)
    return prepared(how, shape, config.get_num_threads, route_of, bound_of, factors=len(traced.numbers))


def _transposed(traced: Traced) -> Traced:
    """The traced function with rows and columns exchanged."""

    def change(x: Expr) -> Expr | None:
        return index(_TRANSPOSED.get(x.args[0], x.args[0])) if x.op == "index" else None

    done: dict[Expr, Expr] = {}
    results = tuple((substituted(x, change, done), None) for x, _ in traced.results)
    views = [tuple(_TRANSPOSED.get(x, x) if isinstance(x, str) else x for x in s.view) for s in traced.sources]
    sources = tuple(replace(s, view=view) for s, view in zip(traced.sources, views, strict=True))
    operands = tuple(described(s.array, s.view) for s in sources)
    return replace(traced, results=results, sources=sources, operands=operands)
