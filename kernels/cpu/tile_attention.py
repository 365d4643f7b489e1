"""Flash attention on tile units (AMX): the loops of `attention` around other products.

    s[key][query] = K . Q^T            K is the left operand, in place: a row of a tile is a key
    o[column][query] += V^T . weights  V, transposed once, is the left operand; weights, in units of two keys, the right

So weights become an operand by the same interleaving of rows as for vectors, and nothing in a block is transposed
but the result, after all keys. Tiles always have all their rows: keys that do not fill a tile are copied to a buffer
where rows behind them may be read, whose scores are unused, and weights behind them are zeros.

Where the result is of float32 and the operands of bfloat16, weights are cut into parts of as many bits as these have
(see `tile_int4`), and V is multiplied by all parts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, minimum, round_up, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import TILES, Call, Configure, For, Function, If, Let, LetPtr, Move, Param, Verb
from portmm.kernels.cpu.attention import Attention
from portmm.kernels.cpu.attention import build as build_loops
from portmm.kernels.cpu.attention_geometry import FIELDS, D, M
from portmm.kernels.cpu.online_softmax import rescale_strips
from portmm.kernels.cpu.packing import transpose
from portmm.kernels.cpu.tile_microkernel import Grid, strip_kernel
from portmm.kernels.cpu.tile_packing import pack_lines
from portmm.spec.dtype import parts

if TYPE_CHECKING:
    from portmm.ir.attention_program import Form
    from portmm.ir.index import Index
    from portmm.ir.nodes import Kernel, Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

GRID = Grid(2, 2)


def build(form: Form, s: Schedule, isa: Isa, atom: Atom) -> Kernel:
    """Kernel for a kind of attention, with products by `atom` and sums in as many lanes."""
    return build_loops(form, s, isa, atom, TiledAttention)


class TiledAttention(Attention):
    """Loops of one kernel, where they differ from those around vectors."""

    __slots__ = ()

    @property
    def types(self) -> dict[str, str]:
        """Types of the buffers that do not hold sums."""
        return super().types | {"units": self.atom.right, "rest": self.atom.left}

    def sizes(self) -> dict[str, Index]:
        """Number of elements of each buffer of a worker's scratch, by name."""
        sums, sizes = self.across * self.g.queries, super().sizes()
        sizes |= {"transposed": round_up(sums, 64), "rest": round_up(self.depth * self.g.mr, 64)}
        if self.parts > 1:
            sizes["units"] *= self.parts
        return sizes | {"near": round_up(var(FIELDS["step"]) // self.kr * self.across, 64)}

    @property
    def parts(self) -> int:
        """Number of parts of a weight: of bfloat16, whose bits are the upper ones of a float."""
        return parts(self.form.to, self.form.dtype) if self.form.dtype == "bf16" else 1

    @property
    def o_size(self) -> Index:
        """Number of elements of `o`."""
        return self.across * self.g.queries

    @property
    def summed(self) -> str:
        """Name of the buffer of sums, by rows of queries."""
        return "transposed"

    def ready(self) -> tuple[Stmt, ...]:
        """Configuration of this thread's tiles."""
        return (
            *self.where_values(),
            Configure((const(self.atom.m),) * TILES),
        )

    def done(self) -> tuple[Stmt, ...]:
        """Release of the tiles: unused ones need not be saved at a context switch."""
        return (Configure(()),)

    @property
    def alone(self) -> Index:
        """Whether one task reads a head of V: it packs each block of its keys itself, which then stays in L2."""
        return M.lt(self.g.queries + 1) * var("group").eq(1)

    def packs(self) -> tuple[Stmt, ...]:
        """Packing of all of V, where several tasks read it."""
        group = Let("group", var(FIELDS["group"]))
        return (group, If(self.alone.eq(0), super().packs()))

    def where_values(self) -> tuple[Stmt, ...]:
        """The place of packed V: of the head, or of a block of keys."""
        own, panels, few = var("own"), ceil_div(var("dv"), self.g.pv_n), var("heads") // var("group")
        for x in list(self.sizes().values())[:-1]:
            own += x
        head = (var("item") * few + var("other")) * panels * self.panel
        near = var("step") // self.kr * self.g.pv_n
        places = {"alone": self.alone, "v_panel": var("alone") * (near - self.panel) + self.panel}
        return (*(Let(x, y) for x, y in places.items()), Let("v_head", head), Let("v_near", own))

    def near_values(self) -> Stmt:
        """Packing of V for a block of keys."""
        g, i = self.g, var("i")
        here = ("b", var("item")), ("h", var("other")), ("m", var("key")), ("n", i * g.pv_n)
        body = (
            Let("columns", minimum(var("dv") - i * g.pv_n, g.pv_n)),
            Let("seen", var("keys")),
            LetPtr("to", Ptr("work", var("v_near") + i * var("v_panel")), self.atom.right),
            self.pack_values(self.place("v", *here)),
        )
        return For("i", const(0), ceil_div(var("dv"), g.pv_n), const(1), body)

    def pack_values(self, source: Ptr) -> Stmt:
        """Packing of some columns of V, transposed: to[step][column][units of a step]."""
        pack = replace(pack_lines(self.isa, self.atom, self.move_atom, "col", self.form.dtype), name="pack_values")
        strides = (var(f"{self.at['v']}_n"), var(f"{self.at['v']}_m"))
        return Call(pack, (var("seen"), var("columns"), const(self.g.pv_n), source, *strides, Ptr("to")))

    @property
    def rows_of_s(self) -> tuple[Index, Index]:
        """Strides of s, from one key to the next, and from one query to the next: s[strip][key][query]."""
        return const(self.atom.n), var("step")

    def scores(self) -> tuple[Stmt, ...]:
        """First product: s[key][query] = K . Q^T."""
        g, c, r, k, n = self.g, var("c"), var("r"), self.atom.deep, self.atom.n
        f, strip = strip_kernel("scores", self.atom, GRID), self.depth * n
        key_m, left = var(f"{self.at['k']}_m"), var("keys") % g.mr
        whole = var("keys") - left
        here = self.place("k", ("b", var("item")), ("h", var("other")), ("m", var("key") + r))

        def panels(keys: Ptr, row: Index, step: Index) -> For:
            to = Ptr("s", r * n + c * (var("step") * n))
            args = (self.depth, keys, row, step, Ptr("panels", c * strip), strip, to, var("step") * n, const(0))
            return For("c", const(0), var("count"), const(GRID.columns), (Call(f, args),))

        full = For("r", const(0), whole, const(g.mr), (panels(here, key_m // self.kr, const(k)),))
        copy = replace(pack_lines(self.isa, self.atom, self.move_atom, "row", self.form.dtype), name="copy_keys")
        copied = Call(copy, (D, left, const(g.mr), here, key_m, const(1), Ptr("rest")))
        some = For("r", whole, var("keys"), const(g.mr), (copied, panels(Ptr("rest"), const(k), const(k * g.mr))))
        return (full, some)

    def rescaled(self) -> Stmt:
        """Rescaling of earlier sums to a new maximum."""
        columns = round_up(var("rows"), self.real.n)
        return Call(rescale_strips(self.real), (self.across, columns, Ptr("o"), Ptr("change")))

    def units(self) -> tuple[Stmt, ...]:
        """Weights interleaved in units of two keys, padded with zeros to a step of k."""
        n, p, j, e = self.atom.n, var("p"), var("j"), var("e")
        strip, whole = j * var("step"), round_up(var("keys"), self.atom.k)
        fill = For("e", var("keys") * n, whole * n, const(1), (Move(Ptr("s", strip + e), None),))
        interleave = self.interleave(strip + p * (n * self.kr), n, strip // self.kr + p * n)
        every: Stmt = For("p", const(0), whole // self.kr, const(1), interleave, 4)
        if self.parts > 1:
            cut = interleave_parts(self.isa, self.real, self.parts, self.types["units"])
            every = Call(cut, (whole // self.kr, self.part, Ptr("s", strip), Ptr("units", strip // self.kr)))
        return (For("j", const(0), var("rows"), const(n), (fill, every)),)

    @property
    def part(self) -> Index:
        """Number of units of a part of all weights."""
        return super().sizes()["units"]

    def values(self) -> tuple[Stmt, ...]:
        """Second product: o[column][query] += V^T . weights."""
        g, i, c, k, n = self.g, var("i"), var("c"), self.atom.deep, self.atom.n
        f, strip = strip_kernel("values", self.atom, GRID), var("step") // self.kr * n
        panels, at = ceil_div(var("dv"), g.pv_n), var("v_head") + var("key") // self.kr * g.pv_n
        left = Ptr("work", var("v_at") + i * var("v_panel"))
        units = round_up(var("keys"), self.atom.k) // self.kr
        to = Ptr("o", i * (g.pv_n * n) + c * (self.across * n))
        calls = []
        for q in range(self.parts):
            right = Ptr("units", self.part * q + c * strip)
            args = (units, left, const(k), const(k * g.pv_n), right, strip, to, self.across * n)
            calls.append(Call(f, (*args, const(1) if q else var("first").lt(var("key")))))
        inner = For("c", const(0), var("count"), const(GRID.columns), tuple(calls))
        place = Let("v_at", var("alone") * (var("v_near") - at) + at)
        return (If(var("alone"), (self.near_values(),)), place, For("i", const(0), panels, const(1), (inner,)))

    def finish(self) -> tuple[Stmt, ...]:
        """Transposition of the sums, then the results."""
        return (
            Call(transpose_strips(self.real), (self.across, var("rows"), Ptr("o"), Ptr("transposed"))),
            *super().finish(),
        )


def interleave_parts(isa: Isa, real: Atom, count: int, narrow: str) -> Function:
    """Function to[part][pair][lane] = parts of two rows of s, the upper bits first, side by side; parts are `apart`."""
    words, n, of = isa.vector("s32", real.n), real.n, real.name
    assert words is not None  # noqa: S101 - tile units have vectors beside them
    body: list[Stmt] = [
        Verb("load_c", f"{x}0", p=Ptr("s", var("p") * (2 * n) + e * n), of=of) for e, x in enumerate("xy")
    ]
    for q in range(count):
        for x in "xy":
            body.append(Map("bits", f"bits_{x}", (f"{x}{q}",), "s32", "f32", of))
            body.append(Map("and", f"upper_{x}", (f"bits_{x}", "upper"), "s32", "s32", of))
            if q < count - 1:
                body.append(Map("from_bits", f"part_{x}", (f"upper_{x}",), "f32", "s32", of))
                body.append(Map("sub", f"{x}{q + 1}", (f"{x}{q}", f"part_{x}"), "f32", "f32", of))
        body += [
            Map("shr", "lower", ("bits_x", "half"), "s32", "s32", of),  # with copies of the sign above
            Map("and", "lower", ("lower", "below"), "s32", "s32", of),
            Map("or", "pair", ("lower", "upper_y"), "s32", "s32", of),
            Verb("store", "pair", p=Ptr("words", var("apart") * q + var("p") * n), of=words.name),
        ]
    numbers = {"upper": -(1 << 16), "below": (1 << 16) - 1, "half": 16}
    literals = (Map("literal", name, (x,), "s32", "s32", of) for name, x in numbers.items())
    pairs = For("p", const(0), var("pairs"), const(1), tuple(body), 2)
    params = (Param("pairs"), Param("apart"), Param("s", "f32", readonly=True), Param("to", narrow))
    comment = f"to[{count}][pairs][{n}] = pairs of rows of s, in parts of fewer bits"
    return Function("cut", "inner", params, (LetPtr("words", Ptr("to"), "s32"), *literals, pairs), comment, of=of)


def transpose_strips(real: Atom) -> Function:
    """Function to[j][i] = from[j / lanes][i][j % lanes], for all i and, at least, all j."""
    i, j, n, rows = var("i"), var("j"), real.n, var("rows")
    shuffles, rows_out = transpose(n)
    load = tuple(Verb("load_c", f"t0_{e}", p=Ptr("from", j * rows + (i + e) * n), of=real.name) for e in range(n))
    store = tuple(Verb("store", x, p=Ptr("to", (j + e) * rows + i), of=real.name) for e, x in enumerate(rows_out))
    inner = For("i", const(0), rows, const(n), (*load, *shuffles, *store))
    params = (Param("rows"), Param("columns"), Param("from", "f32", readonly=True), Param("to", "f32"))
    loop = For("j", const(0), var("columns"), const(n), (inner,))
    return Function("turn", "inner", params, (loop,), f"to[j][i] = from[j / {n}][i][j % {n}]", of=real.name)
