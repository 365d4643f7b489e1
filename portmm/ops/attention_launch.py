"""Launch of attention kernels on the host, and the kernels of the base set, which need no selection.

Owns how operands are read, and scratch. Nothing that is imported here is slow to import: a first call of attention
without functions loads neither the tracer nor the generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.build import kernel_store
from portmm.dispatch import base_kernels, config, stored_kernels
from portmm.ir.prefix import value
from portmm.ops import host_matmul
from portmm.ops.prepack import register_bf16
from portmm.runtime.cpu import runtime
from portmm.spec.row_classes import last_of_class
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.ops.attention_shapes import Shape

Array = np.ndarray[Any, Any]
TASKS = 64
"""KV splits of few queries, all heads together: for that many threads."""
SHORTEST = 512
"""Least keys of a KV split: enough to be worth a task."""
KEYS_OF_FEW = 256
"""Keys of a block of few queries."""
ATTENTION = "attention "
"""The beginning of questions to the base set for the forms of attention kernels, and for their code; and to bundles for
both: see `question`."""
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
        factors: arguments of the score: none, or the factor of products.
    """

    route: Any
    bound: Any
    step: int
    run: int
    kr: int
    k_step: int
    factors: int

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
        return readable(q, k, self.run, self.kr, self.k_step)

    def launch(self, sizes: tuple[int, ...], far: int, *table: Array) -> None:
        """Run the kernel.

        Args:
            sizes: queries, keys, elements of a head of Q, heads of all items, of one item, heads that share keys, and
                elements of a head of V.
            far: how near a key must be.
            table: that of the operands, the numbers of the score, and the operands.
        """
        runtime().execute(self.route, *self.numbers(sizes, far), None, *table)

    def numbers(self, sizes: tuple[int, ...], far: int) -> tuple[int, ...]:
        """The 16 integers of a launch; arguments are as those of `launch`."""
        m, n, d, batch, heads, group, dv = sizes
        return (m, n, d, batch, 0, heads, group, 0, 0, far, self.step, 0, 0, n - m, dv, self.run)


def readable(q: Array, k: Array, run: int, kr: int, k_step: int) -> tuple[Array, Array, int]:
    """Queries and keys as a kernel reads them, and the elements of a head: see `AttentionKernel`.

    For units they are padded with zeros to whole steps, and keys are copied where they are misaligned.
    """
    if run:
        return np.ascontiguousarray(q), k, q.shape[-1]
    if kr == 1:
        return q, k, q.shape[-1]
    size, remainder = k.itemsize, q.shape[-1] % k_step
    if remainder:
        padding = [(0, 0)] * (q.ndim - 1) + [(0, k_step - remainder)]
        q, k = (np.ascontiguousarray(np.pad(x, padding)) for x in (q, k))  # `np.pad` keeps the order of Fortran
    elif k.__array_interface__["data"][0] % (kr * size) or any([s % (kr * size) for s in k.strides[:-1]]):  # noqa: C419
        k = np.ascontiguousarray(k).copy()
    return q, k, q.shape[-1]


def strides(x: Array) -> tuple[int, ...]:
    """Strides along items, rows, columns and heads, in elements."""
    b, h, m, n = (s // x.itemsize for s in x.strides)
    return b, m, n, h


def run_of_few(shape: Shape) -> int:
    """Keys of a KV split of few queries."""
    items = shape.items * shape.heads // shape.group
    return max(SHORTEST, -(-last_of_class(shape.n) // max(1, TASKS // items)))


def begin(shape: Shape) -> None:
    """Load the run time, before a kernel is lowered in vain, and let it know the type of the operands."""
    host_matmul.begin()
    runtime()
    if shape.element == "bf16":
        register_bf16()


def prepared(
    form: tuple[bool, int, int, int],
    shape: Shape,
    threads: Callable[[], int],
    route_of: Callable[[dict[str, int]], Any],
    bound_of: Callable[..., Any],
    *,
    factors: int = 1,
) -> AttentionKernel:
    """The kernel for calls of a kind.

    Args:
        form: whether vectors are along keys; consecutive elements of a head in a unit of the atom, elements that one
            step multiplies, and keys of a block.
        shape: of the operands.
        threads: the number that calls may take.
        route_of: the kernel, by the fields of the argument block that scratch depends on: the largest of the classes of
            both numbers of rows.
        bound_of: its operands, of Q and K as the kernel reads them, and V.
        factors: see `AttentionKernel`.
    """
    few, kr, k_step, step = form
    run = run_of_few(shape) if few else 0
    q, k, v = shape.operands
    q, k, d = readable(q, k, run, kr, k_step)
    batch = shape.items * shape.heads
    macs = batch * shape.m * shape.n * (shape.d + shape.dv)
    fields = {
        "m": last_of_class(shape.m), "n": last_of_class(shape.n), "k": d,
        "batch": batch, "workers": threads() if macs > FORK else 1,
        "a_m": shape.heads, "a_k": shape.group, "b_n": step, "c_n": shape.dv, "c_batch": run,
    }  # fmt: skip
    return AttentionKernel(route_of(fields), bound_of(q, k, v), step, run, kr, k_step, factors)


class Plain:
    """The operands of a kernel whose score is a factor: like `trace.bind.Bound`.

    Attributes:
        template: strides of the operands.
        numbers: the factor.
    """

    __slots__ = ("numbers", "template")

    def __init__(self, operands: tuple[Array, ...], factor: float) -> None:
        self.template = np.array([(0, *strides(x)) for x in operands], np.int64)
        self.numbers = np.array([factor], np.float32)

    def fill(self, _: dict[Any, Any], before: list[Array], after: list[Array]) -> tuple[Any, ...]:
        """The last arguments of `execute`."""
        return (self.template, self.numbers, *before, *after)


Form = tuple[bool, int, int, str]
"""A form of attention kernels: see `prepared`; keys of a block in prefix notation, by `d` elements of a head."""


def stored(dtype: str, queries: int, dv: int, *, causal: bool) -> tuple[Form, stored_kernels.Code] | None:
    """The form of an attention kernel without functions in the base set, and its code; None if there is none.

    Forms are words with colons between: the least number of queries, 1 if vectors are along keys, consecutive elements
    of a head in a unit of the atom, elements that one step multiplies, see `packs`, and keys of a block.

    Args:
        dtype: of the operands.
        queries: their number.
        dv: elements of a head of V.
        causal: whether the mask is causal.

    Raises:
        BundleError: the base set is damaged.
    """
    base, question = kernel_store.base(), f"{ATTENTION}{base_kernels.level()} {dtype}"
    forms = (base.answer(question) if base else None) or []
    i = sum([int(x.partition(":")[0]) <= queries for x in forms]) - 1  # their least numbers ascend
    if i < 0:
        return None
    _, few, kr, k_step, columns, step = forms[i].split(":")
    code = stored_kernels.answered(f"{question} {i} {int(packs(int(columns), dv))} {int(causal)}", last=True)
    return None if code is None else ((few == "1", int(kr), int(k_step), step), code)


def bundled(
    dtype: str, queries: int, widths: tuple[int, int], *, causal: bool
) -> tuple[Form, stored_kernels.Code] | None:
    """The form of an attention kernel without functions in a bundle, and its code; None if there is none.

    Args:
        dtype: of the operands.
        queries: their number.
        widths: elements of a head of Q, and of V.
        causal: whether the mask is causal.

    Raises:
        BundleError: a bundle is damaged.
    """
    for bundle in kernel_store.bundles():
        name = config.machine_of(bundle)
        fields = bundle.answer(question(name, dtype, queries, widths, causal=causal)) if name else None
        if fields is not None:
            with stored_kernels.read(bundle):
                *_, few, kr, k_step, step = fields
                return (few == "1", int(kr), int(k_step), step), stored_kernels.code_of(bundle, fields)
    return None


def question(machine: str, dtype: str, queries: int, widths: tuple[int, int], *, causal: bool) -> str:
    """The question to bundles for the code of attention, and its form, as `stored` has it.

    Args:
        machine: of the bundle.
        dtype: of the operands.
        queries: their number, of whose class the kernel is.
        widths: elements of a head of Q, and of V.
        causal: whether the mask is causal.
    """
    return f"{ATTENTION}{machine} {dtype} {last_of_class(queries)} {widths[0]} {widths[1]} {int(causal)}"


def packs(columns: int, dv: int) -> bool:
    """Whether V with heads of `dv` elements is packed: unless these are a multiple of `columns`; never if that is 0."""
    return bool(columns and dv % columns)


def basic_kernel(shape: Shape, factor: float | None, result: Array, *, causal: bool) -> AttentionKernel | None:
    """The kernel of the base set or a bundle for calls without functions, window and lengths; None if neither has one.

    Args:
        shape: of the operands.
        factor: of products.
        result: an array like the result.
        causal: whether the mask is causal.

    Raises:
        BundleError: the base set or a bundle is damaged.
    """
    if factor is None:
        return None
    known, based = None, base_kernels.active()
    if based:
        known = stored(shape.element, shape.m, shape.dv, causal=causal)
    elif not config.is_described():
        known = bundled(shape.element, shape.m, (shape.d, shape.dv), causal=causal)
    if known is None:
        return None
    begin(shape)
    (few, kr, k_step, step), code = known

    def route_of(fields: dict[str, int]) -> Any:
        return runtime().make_route(code.code, code.workspace(fields) * code.bytes, fields["workers"], "f32")

    def threads() -> int:
        return (config.limit() or base_kernels.cores()) if based else config.get_num_threads()

    form = (few, kr, k_step, value(step, {"d": max(shape.d, shape.dv)}))
    return prepared(form, shape, threads, route_of, lambda *x: Plain((*x, result), factor))
