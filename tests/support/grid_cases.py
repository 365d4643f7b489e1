"""Kernels of devices in tests: a tiny machine, operands of every alignment, and two ways to run without a GPU.

In the shim every operand lies beside a guard page, and threads run in several orders; under OpenCL on this
machine's processor the same kernels are another language's. Either way results begin as poison.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import cuda_shim
import fused_cases
import numpy as np
import opencl_cpu
import passed
from cuda_shim import ORDERS, ShimError
from operands import Case, expected, lay, poison

from portmm.codegen.lower import lower_grid
from portmm.dispatch.machine import bind, source
from portmm.ir.interpreter import numpy_type
from portmm.spec.dtype import BY_NAME, accumulator, spell
from portmm.spec.epilogue import PRODUCT
from portmm.target.target import load_target

MACHINE = load_target(str(Path(__file__).with_name("targets") / "tiny_device.toml"))
OLDER = replace(MACHINE, device=replace(MACHINE.device, architecture="75"))
"""Without asynchronous copies."""


# -- problems ---------------------------------------------------------------------


def rounded(size, layouts, vectors):
    """A size m, n, k made so large that what lies side by side is whole vectors."""
    m, n, k = size
    a, b, c = layouts
    a_vector, b_vector, c_vector = vectors

    def up(x, *steps):
        step = max(steps)
        return -(-x // step) * step

    m = up(m, a_vector if a == "col" else 1)
    n = up(n, b_vector if b == "row" else 1, c_vector if c == "row" else 1)
    return m, n, up(k, a_vector if a == "row" else 1, b_vector if b == "col" else 1)


def laid(x, layout, vector, lead):
    """Values with no more alignment than `vector` elements have, `lead` vectors of poison before them."""
    held = x if x.size else np.full([max(1, n) for n in x.shape], poison(x.dtype), x.dtype)
    line = held.shape[2 if layout == "row" else 1]
    gap = 3 * vector + (-line % vector if layout != "any" else 0)
    base = replace(lay(held, layout, gap), shape=x.shape)
    before = np.full(lead * vector, poison(x.dtype), x.dtype)
    return replace(base, flat=np.concatenate([before, base.flat]), offset=base.offset + before.size)


def blank(p, vector, lead=0):
    """Memory for C, unset."""
    dtype = numpy_type(p.types[2])
    unset = poison(dtype) + 1 if dtype.kind in "iu" else np.nan
    return laid(np.full((p.batch, p.m, p.n), unset, dtype), p.c, vector, lead)


def drawn(rng, dtype, shape):
    """Values of an operand; integers as large as they can be."""
    kind = numpy_type(dtype)
    if kind.kind in "iu":
        return rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, shape, endpoint=True).astype(kind)
    return rng.standard_normal(shape).astype(kind)


def case(p, vectors, seed=0, shared=""):
    """Operands for a problem, aligned to vectors and no better; `shared` names one that serves the whole batch."""
    rng = np.random.default_rng(seed)
    x = drawn(rng, p.types[0], (1 if shared == "a" else p.batch, p.m, p.k))
    y = drawn(rng, p.types[1], (1 if shared == "b" else p.batch, p.k, p.n))
    return case_of(p, vectors, x, y, seed, shared)


def case_of(p, vectors, x, y, seed=0, shared=""):  # noqa: PLR0917 - one call
    """The same of given values."""
    rng, lead = np.random.default_rng(seed), seed % 2
    a, b, c = laid(x, p.a, vectors[0], lead), laid(y, p.b, vectors[1], lead), blank(p, vectors[2], lead)
    fields = {"m": p.m, "n": p.n, "k": p.k, "batch": p.batch}
    fields |= {"a_m": a.row, "a_k": a.col, "a_batch": 0 if shared == "a" else a.item}
    fields |= {"b_k": b.row, "b_n": b.col, "b_batch": 0 if shared == "b" else b.item}
    fields |= {"c_m": c.row, "c_n": c.col, "c_batch": c.item}
    want, bound, _ = expected(p, x, y, rng, floats=p.acc != "s32")
    return Case(p, fields, a.flat, a.offset, b.flat, b.offset, c, want, bound)


def fused_case(p, fused, vectors, seed=0, *, special=False):
    """Operands for a product that ends in expressions."""
    a, b, _ = p.types
    base = case(replace(p, fused="", dtype=spell(a, b, accumulator(a, b))), vectors, seed)
    c = blank(p, vectors[2], seed % 2)
    base = replace(base, problem=p, c=c, fields=base.fields | {"c_m": c.row, "c_n": c.col, "c_batch": c.item})
    rng = np.random.default_rng(seed + 1)
    return fused_cases.fusing(fused, base, (base.want, base.bound), rng, special)


# -- calls ------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """The arguments of kernels.

    Attributes:
        launches: each with its numbers, and names for addresses, in order.
        kernels: what is launched.
        memory: name of a pointer -> an array, and the element that it points at.
        results: the pointers whose arrays are looked at, C first.
    """

    launches: tuple
    kernels: tuple
    memory: dict
    results: tuple


def call(kernels, s, k):
    """A call of a schedule's kernels on the operands of a case."""
    p, values = k.problem, dict(k.fields)
    memory = {"a": (k.a, k.a_offset), "b": (k.b, k.b_offset), "c": (k.fresh(), k.c.offset)}
    for i, x in enumerate(k.operands):
        memory[f"x{i}_all"] = (x.flat, x.offset)
        values |= {f"x{i}_{axis}": step for axis, step in zip(PRODUCT, x.steps, strict=True)}
    values |= {f"number_{i}": float(x) for i, x in enumerate(k.numbers)}
    first, items = values, p.m * p.n
    if s.parallel.split > 1:
        held = numpy_type(accumulator(*p.types[:2]))
        unset = np.nan if held.kind == "f" else poison(held)
        tiles = p.batch * -(-p.m // s.block.m) * -(-p.n // s.block.n)
        each = tiles * s.block.m * s.block.n if s.parallel.fixup else p.batch * items
        memory["work"] = (np.full(s.parallel.split * each, unset, held), 0)
        memory["counters"] = (np.zeros(tiles, np.int32), 0)
        first = values if s.parallel.fixup else values | {"c_m": p.n, "c_batch": items}
    names = {name: name for name in memory}
    numbers = (first | names, values | names | {"work_batch": items})
    launches = tuple(bind(x, None, v) for x, v in zip(kernels, numbers, strict=False))
    results = ("c", *(f"x{i}_all" for i in range(len(k.operands))))
    return Call(launches, tuple(kernels), memory, results)


def in_shim(c, codes, seeds=ORDERS):
    """The arrays after a call in the shim, by name; every order of threads gives the same bits.

    Raises:
        ShimError: a GPU would not have done it, or threads depend on their order.
    """
    found = {}
    for i, seed in enumerate(seeds):
        copies = {name: cuda_shim.Laid.beside(x, end=i % 2 == 0) for name, (x, _) in c.memory.items()}
        arrays = {name: x.array[c.memory[name][1] :] for name, x in copies.items()}
        for kernel, launch, code in zip(c.kernels, c.launches, codes, strict=True):
            code.launch((*launch.grid, 1), launch.threads, _given(launch, arrays), seed, launch.shared, kernel.cluster)
        for name, x in copies.items():
            x.check(name)
            if name in ("a", "b", "counters"):
                assert x.array.tobytes() == c.memory[name][0].tobytes(), f"{name} was written to"
            before = found.setdefault(name, x.array.copy())
            if before.tobytes() != x.array.tobytes():
                raise ShimError(f"{name} depends on the order of threads (seed {seed})")
    return [found[name] for name in c.results]


def _given(launch, arrays):
    """The arguments of a launch, on arrays by name."""
    names = dict(launch.open)
    return [
        arrays[value]
        if kind == "pointer"
        else (kind, _map(value, arrays[names[i]]))
        if kind == "map"
        else (kind, value)
        for i, (kind, value) in enumerate(launch.arguments)
    ]


def _map(x, array):
    """A tensor map, as the shim has it."""
    size = BY_NAME[x.dtype].bytes
    return cuda_shim.shim_map(size, array.ctypes.data, x.sizes, x.strides, x.box, x.swizzle, x.rounds)


def on_opencl(c, codes):
    """The results after a call under OpenCL on the processor."""
    context, queue = opencl_cpu.opencl_device()
    import pyopencl as cl

    from portmm.runtime import opencl

    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffers = {name: cl.Buffer(context, flags, hostbuf=x) for name, (x, _) in c.memory.items()}
    for launch, code in zip(c.launches, codes, strict=True):
        given = [
            (kind, (buffers[value], c.memory[value][1]) if kind == "pointer" else value)
            for kind, value in launch.arguments
        ]
        opencl.launch(code, launch.grid, (launch.threads, 1), given, queue)
    found = []
    for name in c.results:
        found.append(np.empty_like(c.memory[name][0]))
        cl.enqueue_copy(queue, found[-1], buffers[name])
    return found


# -- kernels ----------------------------------------------------------------------


def kernels_of(s, target=MACHINE):
    """The kernels of a schedule."""
    return lower_grid(s, target.isa(s.isa))


def compiled(kernels, language):
    """Kernels for the shim ("cuda") or the processor ("opencl")."""
    if language == "cuda":
        return [cuda_shim.compile(source(x, language), x.name) for x in kernels]
    context, _ = opencl_cpu.opencl_device()
    from portmm.runtime import opencl

    return [opencl.load(opencl.compile_opencl(source(x, language), x.name, context), x.name) for x in kernels]


def run(s, kernels, language, k, seeds=ORDERS):
    """C, then the operands of fused expressions, as kernels leave them."""
    c = call(kernels, s, k)
    codes = compiled(kernels, language)
    return in_shim(c, codes, seeds) if language == "cuda" else on_opencl(c, codes)


def same_as_before(c, language, *parts):
    """The kernels of a call are compiled from a text and called as they were when they passed."""
    tools = (opencl_cpu.version() if language == "opencl" else cuda_shim.version(), passed.processor())
    texts = (source(x, language) for x in c.kernels)
    memory = (x for name, (array, at) in sorted(c.memory.items()) for x in (name, array, at))
    return passed.unchanged(*tools, *texts, *c.launches, *memory, *parts)


def check_run(s, kernels, language, k, what, seeds=ORDERS):  # noqa: PLR0917 - one call
    """Kernels leave what they should, or did so before; `k` may end in fused expressions."""
    fused = isinstance(k, fused_cases.Fusing)
    base, more = (k.case, k.parts()) if fused else (k, ())
    if not same_as_before(call(kernels, s, base), language, seeds, *base.parts(), *more):
        found = run(s, kernels, language, base, seeds)
        k.check(found if fused else found[0], what)
