"""Kernel of attention on the host: its form and its operands, for calls of one kind.

Owns the selection of the form: vectors along queries or along keys, KV splits, blocks of keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.ops import host_matmul
from portmm.ops.attention_launch import (
    FEW,
    FORK,
    KEYS_OF_FEW,
    AttentionKernel,
    fields_of,
    run_of_few,
    strides,
    whole_steps,
)
from portmm.ops.attention_shapes import score_expression
from portmm.runtime.cpu import runtime
from portmm.spec.epilogue import index
from portmm.spec.expr import Expr
from portmm.spec.expr_functions import substituted
from portmm.spec.row_classes import last_of_class
from portmm.trace.bind import Bound
from portmm.trace.recorder import described

if TYPE_CHECKING:
    from portmm.ops.attention_shapes import Shape
    from portmm.schedule.schedule import Schedule
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target
    from portmm.trace.tracer import Traced

Array = np.ndarray[Any, Any]
_TRANSPOSED = {"m": "n", "n": "m"}


def make_kernel(traced: Traced, shape: Shape, flags: tuple[bool, ...], result: Array) -> AttentionKernel:
    """The kernel for calls of a kind.

    Args:
        traced: the score.
        shape: of the operands.
        flags: causal; no window; logarithms are returned; all keys are read; positions are the default.
        result: an array like the result.

    Raises:
        TraceError: the score is several values.
        ScheduleError: no unit of the target computes it.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    from portmm.dispatch import cpu_kernels, cpu_routes
    from portmm.schedule.cpu_attention import attention_schedule, work

    fused, target, dtype = score_expression(traced), config.target(), numpy_arrays.name_of(shape.dtype)
    host_matmul.begin()
    host_matmul.register_types((shape.dtype,) * 3)
    runtime()  # raises before a kernel is lowered in vain
    isa, atom, lanes = cpu_kernels.attention_unit(dtype, fused, target, last_of_class(shape.m))
    few = shape.m <= FEW // atom.k_pack
    function = traced if few else _transposed(traced)
    unit = lanes if few else atom
    schedule = attention_schedule(isa, unit)
    if not few and packs_values(isa, atom, dtype, shape.dv, schedule.parallel.cell[1]):
        schedule = attention_schedule(isa, atom, packs=True)
    causal, no_window, with_lse, all_keys, no_starts = flags
    bounds = Bounds(causal, not no_window)
    form = Form(score_expression(function), dtype, dtype, bounds, not all_keys, not no_starts, with_lse)
    program = of_attention(form, "n" if few else "m")
    step, run = _blocks(shape, schedule, target, few=few)
    macs = work(shape.items * shape.heads, shape.m, shape.n, shape.d + shape.dv).counts["multiply-adds"]
    workers = config.get_num_threads() if macs > FORK else 1
    q, k, v = shape.operands
    if few:
        q = np.ascontiguousarray(q)
    elif atom.k_pack > 1:
        q, k, _ = whole_steps(q, k, atom.k_pack, atom.k)
    fields = fields_of(shape, q.shape[-1], step, run, workers)
    route = cpu_routes.program_route(program, schedule, isa, unit, fields)
    rows = [strides(x) for x in (q, k, v, result)]
    rows += [(shape.heads * shape.m, 1, 0, shape.m)] if with_lse else []
    rows += [(1,)] * ((not all_keys) + (not no_starts))
    size = (shape.m, shape.n) if few else (shape.n, shape.m)
    bound = Bound(function, (*size, shape.items, shape.heads), [], rows)
    return AttentionKernel(route, bound, step, run, atom.k_pack, atom.k, len(traced.numbers))


def packs_values(isa: Isa, atom: Atom, dtype: str, dv: int, columns: int) -> bool:
    """Whether V is packed: `columns` of a register tile cannot be read where they are in rows of `dv` elements."""
    masks = bool(isa.spelling(atom, "load_mask", dtype))
    return atom.k_pack > 1 or atom.tiled or not (masks or not dv % columns)


def _blocks(shape: Shape, s: Schedule, target: Target, *, few: bool) -> tuple[int, int]:
    """Keys of a block, and of a KV split, 0 without splits."""
    from portmm.schedule.cpu_attention import keys_of

    if not few:
        return keys_of(s, target, max(shape.d, shape.dv)), 0
    return KEYS_OF_FEW, run_of_few(shape)


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
