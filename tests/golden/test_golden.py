"""Emitted sources, as last looked at by a person; `pytest --update-golden` writes them anew.

The schedules are written out here, so that no change of the choice touches
these files: only a change of the emitted text does.
"""

from __future__ import annotations

import pytest
from machines import ISAS
from places import GOLDEN
from rows_lowered import lower_rows

from portmm.codegen.c_kernel import source
from portmm.codegen.lower import lower, lower_grid, lower_int4_repack, lower_pack
from portmm.dispatch.machine import source as device_source
from portmm.schedule.parts import ALL, Tile
from portmm.schedule.text import of_flat
from portmm.spec import elementwise
from portmm.spec.dequantization import Dequantization
from portmm.spec.epilogue import C, Fused, Operand, acc, load, number
from portmm.spec.expr import apply
from portmm.spec.problem import Family
from portmm.target.target import load_isa


def tiles(mr, nr, kc, mc, nc, least=0):  # noqa: PLR0917 - a tile is two numbers
    return Tile("registers", mr, nr, 1, least), Tile("L1", mr, nr, kc), Tile("L2", mc, nr, kc), Tile("L3", mc, nc, kc)


def blocked(name):
    """Small heights keep the file short."""
    nr = 2 * load_isa(name).atom("f32").n
    s = of_flat("gemm", name, "f32", tiles(2, nr, 320, 8, 4 * nr, 1), pack_a=True, pack_b=True, ahead=True)
    return lower(s, load_isa(name))


def thin():
    s = of_flat("gemm", "avx2", "f32", tiles(1, 16, ALL, ALL, ALL), panels=2, b="packed")
    return lower(s, load_isa("avx2"))


def split():
    """A stream of which threads share out k, and that asks for rows ahead."""
    s = of_flat("gemm", "avx2", "f32", tiles(1, 16, 8, ALL, ALL), over="k", prefetch=4)
    return lower(s, load_isa("avx2"))


def once():
    """All of B packed first."""
    s = of_flat("gemm", "avx2", "f32", tiles(2, 16, 320, 8, 64), pack_a=True, pack_b=True, once=True)
    return lower(s, load_isa("avx2"))


def dot():
    levels = tuple(Tile(x, ALL, 2, ALL) for x in ("L1", "L2", "L3"))
    s = of_flat("dot", "avx2", "f32", (Tile("registers", 1, 2, 8), *levels), b="col")
    return lower(s, load_isa("avx2"))


def static():
    s = of_flat("gemm", "avx512", "f32", tiles(4, 16, ALL, ALL, ALL), over="batch", static=(4, 16, 8))
    return lower(s, load_isa("avx512"))


def on_tiles():
    """A weight packed for VNNI."""
    blocks = tiles(32, 32, 64, 64, 64, 1)
    s = of_flat("tiles", "amx_int8", "u8-s8-s32", blocks, pack_a=True, b="packed", kr=4)
    return lower(s, load_isa("amx_int8"))


def two_rows():
    """A tile of one pair of rows, and one with a row left over."""
    packed = {"pack_a": True, "pack_b": True, "fused": Dequantization(bias=True).text}
    s = of_flat("gemm", "neon_smmla", "u8-s8-f32", tiles(3, 8, 8, 9, 16, 2), kr=8, **packed)
    return lower(s, load_isa("neon_smmla"))


def fused():
    """A bias, a residual of another type and relu, and a second result."""
    x, operands = acc(), (Operand("f32", "n"), Operand("bf16", "bmn"), Operand("s8", "bmn"))
    y = apply("max", x + load(0, "f32"), 0.0)
    text = str(Fused(operands, ((C, y + load(1, "bf16")), (2, y * number(0)))))
    s = of_flat("gemm", "avx512", "f32", tiles(2, 32, 64, 8, 64, 1), pack_a=True, b="packed", fused=text)
    return lower(s, load_isa("avx512"))


def softmax(name):
    x = load(0, "f32")
    e = elementwise.exp(x - elementwise.max(x))
    isa, operands = load_isa(name), (Operand("f32", "bmn"), Operand("f32", "bmn"))
    return lower_rows(isa, isa.atom("f32"), str(Fused(operands, ((1, e / elementwise.sum(e)),))))


KERNELS = {
    **{f"blocked_{name}": lambda name=name: blocked(name) for name in ISAS},
    "thin_avx2": thin,
    "split_avx2": split,
    "once_avx2": once,
    "dot_avx2": dot,
    "pack_sse2": lambda: lower_pack(load_isa("sse2"), "f32", 8, "col"),
    "fold_avx2": lambda: lower_int4_repack(load_isa("avx2"), Family("u4", 16, 8, group=32)),
    "static_avx512": static,
    "tiles_amx_int8": on_tiles,
    "two_rows_neon_smmla": two_rows,
    "fused_avx512": fused,
    "softmax_avx2": lambda: softmax("avx2"),
    "softmax_sve256": lambda: softmax("sve256"),
}


def on_device(word, depth, isa="simt", **more):
    """Threads of 2 x 4 sums, a block of two warps."""
    levels = Tile("registers", 2, 4, 1), Tile("warp", 8, 16, 1), Tile("shared", 8, 32, depth), Tile("L2", 64, ALL, ALL)
    return lower_grid(of_flat("simt", isa, word, levels, **{"stages": 2, "cell": (2, 4)} | more), load_isa(isa))


def direct():
    """Two rows and two columns a thread, that read where operands lie, and a bias."""
    levels = Tile("registers", 2, 2, 1), Tile("warp", 2, 32, 1), Tile("shared", 4, 32, 1), Tile("L2", 32, ALL, ALL)
    text = str(Fused((Operand("f32", "n"),), ((C, apply("max", acc() + load(0, "f32"), 0.0)),)))
    s = of_flat("direct", "simt", "f32", levels, b="any", stages=1, fused=text, cell=(2, 1))
    return lower_grid(s, load_isa("simt"))


DEVICES = {
    "copied_f32.cu": lambda: on_device("f32", 8, copies=True, stages=3, vectors=(2, 4, 4), resident=4)[0],
    "woven_s8.cu": lambda: on_device("s8-s8-s32", 8, "simt_dot4", kr=4, vectors=(4, 4, 4))[0],
    "simt_bf16.cl": lambda: on_device("bf16", 8, b="col", vectors=(1, 4, 2))[0],
    "slices_f16.cl": lambda: on_device("f16", 8, split=4)[1],
    "direct_f32.cl": lambda: direct()[0],
}
TEXTS = {f"{name}.c": lambda make=make: source(make()) for name, make in KERNELS.items()} | {
    name: lambda make=make, name=name: device_source(make(), "cuda" if name.endswith(".cu") else "opencl")
    for name, make in DEVICES.items()
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_the_one_looked_at(name, request):
    text, path = TEXTS[name](), GOLDEN / name
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert path.is_file(), "no such file; write it with --update-golden"
    assert text == path.read_text()


def test_every_file_is_of_a_kernel():
    assert {path.name for path in GOLDEN.glob("*.c*")} == set(TEXTS)


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_meant_to_be_read(name):
    lines = TEXTS[name]().splitlines()
    assert all(line.startswith("/* ") and line.endswith(" */") for line in lines[:3])
    assert not any(line != line.rstrip() or "\t" in line for line in lines)
    assert TEXTS[name]() == "\n".join(lines) + "\n"
