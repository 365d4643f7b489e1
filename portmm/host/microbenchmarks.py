"""Microbenchmarks of an atom, as kernels of the loop IR.

Owns two kernels that use an atom's own instructions: `peak` reaches its multiply-add
rate, `stream` its load bandwidth. `host.gauge` builds and times them.

Both take the argument block of every kernel: m is the number of repetitions,
k the steps of one. No compiler may shorten the loops: every accumulator has
operands of its own, loaded again in every step, because a product that does not
change would be computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Index, Ptr, const, var
from portmm.ir.nodes import Configure, For, Function, Kernel, Stmt, Verb
from portmm.kernels.cpu.tile_microkernel import Grid
from portmm.schedule.cpu_blocking import tallest
from portmm.spec.kernel_name import KernelName

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

STREAM_LOADS = 12
"""Loads of one step of a stream, each with its own accumulator: two multiply-adds a
cycle with a latency of four keep eight chains busy; twelve leave registers free
of sixteen."""

TILE_STEPS = 4
"""Steps of a panel of tiles, which are read repeatedly: 4 KiB each, a fraction of any L1."""

_ONE = const(1)


@dataclass(frozen=True, slots=True)
class Probe:
    """A microbenchmark, and the work of one of its steps.

    Attributes:
        kernel: the loops.
        a: elements, or units, of A that a step reads; a stream reads them only in its first step.
        b: elements, or units, of B that a step reads.
        c: elements of C, independent of the number of steps.
        flops: multiplications plus additions of a step.
    """

    kernel: Kernel
    a: int
    b: int
    c: int
    flops: int


def peak(isa: Isa, atom: Atom) -> Probe:
    """Microbenchmark of outer products in registers, with the largest nearly square tile that fits.

    With 6 x 2 accumulators or more a step loads fewer fragments than it
    multiplies, so that two load ports keep up with two multipliers.
    """
    if atom.tiled:
        return _peak_of_tiles(isa, atom)
    cols = 2 if tallest(isa, atom, 2 * atom.n) >= 2 * atom.m else 1
    rows = max(1, tallest(isa, atom, cols * atom.n) // atom.m)
    units = atom.k // atom.k_pack
    a_size, b_size, c_size = atom.m * units, units * atom.n, atom.m * atom.n
    step = var("i")
    body: list[Stmt] = [_load("load_b", f"b{j}", "b", step * (cols * b_size) + j * b_size) for j in range(cols)]
    for r in range(rows):
        body.append(_load("load_a", f"a{r}", "a", step * (rows * a_size) + r * a_size, units))
        body += [Verb("mac", f"c{r}_{j}", f"a{r}", f"b{j}") for j in range(cols)]
    sums = [f"c{r}_{j}" for r in range(rows) for j in range(cols)]
    entry = _repeat((), tuple(body), sums, atom, "Outer products of panels that stay in L1")
    return Probe(
        _kernel("peak", isa, atom, (rows * atom.m, cols * atom.n), entry),
        rows * a_size,
        cols * b_size,
        rows * cols * c_size,
        2 * rows * cols * atom.m * atom.n * atom.k,
    )


def _peak_of_tiles(isa: Isa, atom: Atom) -> Probe:
    """Microbenchmark of outer products of 2 by 2 contiguous tiles."""
    grid = Grid(2, 2)
    a_size, b_size, c_size = atom.m * atom.deep, atom.deep * atom.n, atom.m * atom.n
    step, a_stride, n_stride = var("i") % TILE_STEPS, const(atom.deep), const(atom.n)
    body = [Verb("load_a", str(grid.a(r)), p=Ptr("a", (step * 2 + r) * a_size), step=a_stride) for r in range(2)]
    body += [Verb("load_b", str(grid.b(v)), p=Ptr("b", (step * 2 + v) * b_size), step=n_stride) for v in range(2)]
    tiles = [(r, v) for r in range(2) for v in range(2)]
    body += [Verb("mac", str(grid.c(*x)), str(grid.a(x[0])), str(grid.b(x[1]))) for x in tiles]
    loop = For("i", const(0), var("k"), _ONE, tuple(body))
    sums = [(str(grid.c(*x)), Ptr("c", const(i * c_size))) for i, x in enumerate(tiles)]
    entry = Function(
        "entry",
        "entry",
        (),
        (
            Configure((const(atom.m),) * 8),
            *(Verb("load_c", d, p=p, step=n_stride) for d, p in sums),
            For("again", const(0), var("m"), _ONE, (loop,)),
            *(Verb("store", d, p=p, step=n_stride) for d, p in sums),
            Configure(()),
        ),
        "Outer products of tiles that stay in L1",
    )
    kernel = _kernel("peak", isa, atom, (2 * atom.m, 2 * atom.n), entry)
    return Probe(kernel, 2 * a_size, 2 * b_size, 4 * c_size, 8 * atom.m * atom.n * atom.k)


def stream(isa: Isa, atom: Atom) -> Probe:
    """Microbenchmark that loads all of B in order, and accumulates it, so that every load is needed."""
    units = atom.k // atom.k_pack
    size, c_size = units * atom.n, atom.m * atom.n
    names = [f"c{j}" for j in range(STREAM_LOADS)]
    body: list[Stmt] = []
    for j, name in enumerate(names):
        body.append(_load("load_b", f"b{j}", "b", var("i") * (STREAM_LOADS * size) + j * size))
        body.append(Verb("mac", name, "a0", f"b{j}"))
    first = (_load("load_a", "a0", "a", const(0), units),)
    entry = _repeat(first, tuple(body), names, atom, "Reads of B from end to end")
    return Probe(
        _kernel("stream", isa, atom, (atom.m, STREAM_LOADS * atom.n), entry),
        atom.m * units,
        STREAM_LOADS * size,
        STREAM_LOADS * c_size,
        2 * STREAM_LOADS * atom.m * atom.n * atom.k,
    )


def _load(verb: str, register: str, operand: str, offset: Index, step: int = 0) -> Verb:
    return Verb(verb, register, p=Ptr(operand, offset), step=const(step))


def _repeat(first: tuple[Stmt, ...], body: tuple[Stmt, ...], sums: list[str], atom: Atom, comment: str) -> Function:
    """Entry of m repetitions of k steps, between loads and stores of the accumulators."""
    loop = For("i", const(0), var("k"), _ONE, body)
    size, stride = atom.m * atom.n, atom.n
    before = tuple(_load("load_c", name, "c", const(i * size), stride) for i, name in enumerate(sums))
    after = tuple(_load("store", name, "c", const(i * size), stride) for i, name in enumerate(sums))
    again = For("again", const(0), var("m"), _ONE, (loop,))
    return Function("entry", "entry", (), (*first, *before, again, *after), comment)


def _kernel(op: str, isa: Isa, atom: Atom, tile: tuple[int, int], entry: Function) -> Kernel:
    name = KernelName(op, atom.acc, atom.a, atom.b, *tile, atom.k_pack, isa.name)
    header = (f"{name}, measures {isa.title}", "made again by: portmm probe")
    return Kernel(str(name), isa, atom, entry, const(0), header)
