"""Kernels and statements of the loop language that are no products."""

from __future__ import annotations

import numpy as np
from machines import small
from operands import Case, Extra, Laid, lay, panels_of, valid_of
from problems import coded, packed_families

from portmm.codegen.lower import lower_int4_repack, lower_pack
from portmm.ir.index import Ptr, const, var
from portmm.ir.interpreter import numpy_type, run
from portmm.ir.nodes import Call, Function, Kernel
from portmm.kernels.cpu.packing import transpose
from portmm.kernels.cpu.tile_packing import pack_parts
from portmm.schedule.candidates import PACKED_VECTORS, candidates
from portmm.spec.dtype import CODES_AT, CODES_KR, parts
from portmm.spec.problem import Family, Problem, family
from portmm.target.target import load_isa


def transposed(lines: np.ndarray) -> np.ndarray:
    """The packer's shuffles applied to the lines of a square block."""
    registers = {f"t0_{j}": line for j, line in enumerate(lines)}
    body, last = transpose(len(lines))
    for s in body:
        registers[s.d] = np.concatenate([registers[s.a], registers[s.b]])[list(s.pick)]
    return np.array([registers[name] for name in last])


def fp4_products(target):
    """Products with weights of floats of four bits on a machine, and schedules: all types, some groups and ways."""
    isa, found = target.isas[0], []
    for i, word in enumerate(("f32-u4-f32", "bf16-u4-bf16", "s8-u4-f32", "s8-u4-bf16", "f32-u4-f32")):
        if isa.atom(word):
            more = {"post": "scale"} if word.startswith("s8") else {}
            more |= {"source": "f32"} if word == "s8-u4-bf16" else {}
            p = coded((3 + 9 * i, 21, 45), word, 2 * isa.atom(word).n, (16, 32, 8, 0, 16)[i], e2m1=True, **more)
            if isa.atom(word).tiled and (word[:4] != "bf16" or p.group % isa.atom(word).k):
                continue  # of other groups, tiles multiply only what is repacked to their own elements
            ways = list(candidates(p, target))
            found += [(p, s) for s in ways[:: max(1, len(ways) // 4)]]
    return found


def folding(name, k, n, group, *, symmetric=False, half=False):
    """The kernel that folds codes on an instruction set, operands for it, and the panels due.

    Scales and offsets are the same numbers, those of A.
    """
    isa = load_isa(name)
    kept = Family("u4", isa.atom("f32").n * PACKED_VECTORS, CODES_KR, group=group, symmetric=symmetric, half=half)
    rng = np.random.default_rng(n)
    codes = rng.integers(0, 16, (k, n), np.uint8)
    heads = rng.standard_normal((kept.groups(k), n)).astype(np.float32)
    panels = -(-n // kept.nr)
    wide = np.zeros((-(-k // CODES_KR) * CODES_KR, panels * kept.nr), np.uint32)
    wide[:k, :n] = codes
    above = np.zeros((len(heads), panels * kept.nr), np.float16 if half else np.float32)
    above[:, :n] = heads
    heads = above.view(np.float32) if half else heads
    words = sum(wide[e::CODES_KR] << CODES_AT[e] for e in range(CODES_KR))
    long = group // CODES_KR or len(words)
    rows = [x for g, head in enumerate(above) for x in (*(head,) * kept.heads, *words[g * long : (g + 1) * long])]
    want = np.concatenate([x.view(np.int32).reshape(panels, -1) for x in rows], 1).ravel()
    fields = dict.fromkeys(["a_m", "a_k", "a_batch", "b_batch", "c_m", "c_n", "c_batch"], 0)
    fields |= {"m": 1, "n": n, "k": k, "batch": 1, "b_k": n, "b_n": 1}
    a = heads.ravel()
    c = Laid(np.full(want.size, -1, np.int32), 0, 0, 0, 0, (1, 1, 1))
    operands = (Extra(a, 0, (0, 0, 1)),) * kept.heads
    case = Case(Problem(1, n, k), fields, a, 0, codes.ravel(), 0, c, want, np.zeros(1), operands)
    return lower_int4_repack(isa, kept), case, want


def packing_of_all_bits(name, word, layout):
    """The kernel that packs a type of 16 bits, a weight of all bits, the panels due, and which elements count."""
    isa, kept = load_isa(name), family(packed_families(small(name), word)[-1])
    k, n = 512, 128
    b = np.arange(1 << 16, dtype=np.uint16).view(numpy_type(kept.dtype)).reshape(1, k, n)
    laid, want = lay(b, layout, 3), panels_of(b, kept).ravel().view(np.uint16)
    fields = dict.fromkeys(["a_m", "a_k", "a_batch", "c_m", "c_n"], 0)
    fields |= {"m": 1, "n": n, "k": k, "batch": 1, "b_k": laid.row, "b_n": laid.col, "b_batch": laid.item}
    fields["c_batch"] = want.size // kept.kr
    c = Laid(np.zeros(want.size, np.uint16), 0, 0, 0, 0, (1, 1, 1))
    none = np.zeros(1, np.float32)
    case = Case(Problem(1, n, k), fields, none, 0, laid.flat, laid.offset, c, want, np.zeros(1))
    return lower_pack(isa, word, kept.nr, layout), case, want, valid_of(kept, k, n)


def packed_parts(isa, a: np.ndarray, layout: str, storage: str) -> np.ndarray:
    """The parts of elements [row][part][k, to whole steps] as numbers, packed for the tiles of an instruction set."""
    (m, k), laid = a.shape, lay(a[np.newaxis], layout, 3)
    atom = next(x for x in isa.atoms if x.tiled)
    count, steps = parts(storage, atom.a), -(-k // atom.k)
    args = (var("k"), var("m"), var("m"), Ptr("a"), var("a_m"), var("a_k"), Ptr("c"))
    entry = Function("entry", "entry", (), (Call(pack_parts(isa, atom, layout, storage), args),), "Parts of A")
    kernel = Kernel("parts", isa, atom, entry, const(64), types=(("a", storage), ("c", atom.left)))
    c = np.full(steps * count * m * atom.k, 7, numpy_type(atom.a))
    fields = dict.fromkeys(["a_batch", "b_k", "b_n", "b_batch", "c_m", "c_n", "c_batch"], 0) | {"workers": 1}
    fields |= {"m": m, "n": 1, "k": k, "batch": 1, "a_m": laid.row, "a_k": laid.col}
    run(kernel, fields, {"a": (laid.flat, laid.offset), "c": (c, 0)})
    return c.astype(np.float64).reshape(steps, count, m, atom.k).transpose(2, 1, 0, 3).reshape(m, count, -1)
