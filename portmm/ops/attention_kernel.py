"""Kernel of attention on the host: its form, its operands and its launch, for calls of one kind.

Owns the selection of the form: vectors along queries or along keys, KV splits, blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.ops import host_matmul
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
FEW = 16
"""Queries of a head up to which vectors along queries are slower (kernels/cpu/flash_decoding.py): measured on Zen 4,
with 2048 keys; half as many for atoms that multiply units of two, which that program does not use."""
TASKS = 64
"""KV splits of few queries, all heads together: for that many threads."""
SHORTEST = 512
"""Least keys of a KV split: enough to be worth a task."""
KEYS_OF_FEW = 256
"""Keys of a block of few queries."""
FORK = 1e6
"""Multiply-adds from which threads pay: some 30 us."""


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """The kernel for one kind of call.

    Attributes:
        route: the kernel.
        bound: its operands.
        step: keys of a block.
        run: keys of a KV split, 0 without splits.
        kr: consecutive elements of a head in a unit of the atom.
        k_step: elements of a head that one step multiplies.
    """

    route: Any
    bound: Bound
    step: int
    run: int
    kr: int
    k_step: int

    def execute(
        self, shape: Shape, operands: tuple[Array, ...], captured: dict[Any, Any], results: list[Array], far: int
    ) -> None:
        """Run the kernel; operands differ from those it was made for only in addresses."""
        q, k, v = operands
        q, k, d = self.readable(q, k)
        sizes = shape.m, shape.n, d, shape.items * shape.heads, shape.heads, shape.group, shape.dv
        self.launch(sizes, far, *self.bound.fill(captured, [], [q, k, v, *results]))

    def readable(self, q: Array, k: Array) -> tuple[Array, Array, int]:
        """Queries and keys as the kernel reads them, and the elements of a head."""
        if self.run:
            return np.ascontiguousarray(q), k, q.shape[-1]
        return _whole_steps(q, k, self.kr, self.k_step) if self.kr > 1 else (q, k, q.shape[-1])

    def launch(self, sizes: tuple[int, ...], far: int, *table: Array) -> None:
        """Run the kernel.

        Args:
            sizes: queries, keys, elements of a head of Q, heads of all items, of one item, heads that share keys, and
                elements of a head of V.
            far: how near a key must be.
            table: that of the operands, the numbers of the score, and the operands.
        """
        m, n, d, batch, heads, group, dv = sizes
        runtime().execute(
            self.route, m, n, d, batch, 0, heads, group, 0,
            0, far, self.step, 0, 0, n - m, dv, self.run, None, *table,
        )  # fmt: skip


def _whole_steps(q: Array, k: Array, kr: int, k_step: int) -> tuple[Array, Array, int]:
    """Queries and keys padded with zeros to whole steps, and keys copied where they are misaligned."""
    size, remainder = k.itemsize, q.shape[-1] % k_step
    if remainder:
        padding = [(0, 0)] * (q.ndim - 1) + [(0, k_step - remainder)]
        q, k = (np.ascontiguousarray(np.pad(x, padding)) for x in (q, k))  # `np.pad` keeps the order of Fortran
    elif k.__array_interface__["data"][0] % (kr * size) or any([s % (kr * size) for s in k.strides[:-1]]):  # noqa: C419
        k = np.ascontiguousarray(k).copy()
    return q, k, q.shape[-1]


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
    if not few and _packs(shape, isa, atom, schedule):
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
        q, k, _ = _whole_steps(q, k, atom.k_pack, atom.k)
    # Scratch is that of the largest of the classes of both, for which the route may be kept.
    fields = {
        "m": last_of_class(shape.m), "n": last_of_class(shape.n), "k": q.shape[-1],
        "batch": shape.items * shape.heads, "workers": workers,
        "a_m": shape.heads, "a_k": shape.group, "b_n": step, "c_n": shape.dv, "c_batch": run,
    }  # fmt: skip
    route = cpu_routes.program_route(program, schedule, isa, unit, fields)
    rows = [_strides(x) for x in (q, k, v, result)]
    rows += [(shape.heads * shape.m, 1, 0, shape.m)] if with_lse else []
    rows += [(1,)] * ((not all_keys) + (not no_starts))
    size = (shape.m, shape.n) if few else (shape.n, shape.m)
    bound = Bound(function, (*size, shape.items, shape.heads), [], rows)
    return AttentionKernel(route, bound, step, run, atom.k_pack, atom.k)


def _packs(shape: Shape, isa: Isa, atom: Atom, s: Schedule) -> bool:
    """Whether V is packed: elements of its rows cannot be read where they are."""
    masks = bool(isa.spelling(atom, "load_mask", numpy_arrays.name_of(shape.dtype)))
    return atom.k_pack > 1 or atom.tiled or not (masks or not shape.dv % s.parallel.cell[1])


def _blocks(shape: Shape, s: Schedule, target: Target, *, few: bool) -> tuple[int, int]:
    """Keys of a block, and of a KV split, 0 without splits."""
    from portmm.schedule.cpu_attention import keys_of

    if not few:
        return keys_of(s, target, max(shape.d, shape.dv)), 0
    items = shape.items * shape.heads // shape.group
    return KEYS_OF_FEW, max(SHORTEST, -(-last_of_class(shape.n) // max(1, TASKS // items)))


def _strides(x: Array) -> tuple[int, ...]:
    """Strides along items, rows, columns and heads, in elements."""
    b, h, m, n = (s // x.itemsize for s in x.strides)
    return b, m, n, h


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
