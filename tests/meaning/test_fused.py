"""Fused expressions in kernels, over rows and at the end of a product, against float64."""

from __future__ import annotations

import subprocess
from itertools import product

import fused_cases
import numpy as np
import problems
import pytest
from fused_cases import by_rows, check_built, epilogues, every_operation, every_type, gemm_case, interpreted, rows_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import EVERY_ISA, HERE, ISAS, require, runs_here, small
from rows_lowered import lower_rows

from portmm.codegen.lower import lower
from portmm.dispatch import config as of_portmm
from portmm.dispatch.cpu_kernels import build_kernel
from portmm.errors import ScheduleError
from portmm.runtime.cpu import runtime
from portmm.schedule.candidates import candidates
from portmm.spec import epilogue
from portmm.spec.epilogue import Fused, Operand, extent, index, load, number, parse, reduction, spelled
from portmm.spec.expr import apply, real
from portmm.spec.expr_functions import bits, fma, from_bits, select, sqrt
from portmm.target.target import load_isa

ROWS = {"every operation": every_operation, "every type": every_type, "by rows": by_rows}
WORDS = (
    "f32", "bf16", "bf16-bf16-f32", "f16", "f32-bf16-f32", "f32-s8-f32", "s8-s8-f32", "s8-s8-s8", "u8-s8-bf16",
    "f32-u4-f32", "bf16-u4-bf16",
)  # fmt: skip
fuzz = settings(
    derandomize=True, deadline=None, max_examples=30, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(autouse=True, scope="module")
def _three_threads():
    of_portmm.set_num_threads(3)
    runtime().set_num_threads(3)
    yield
    of_portmm.set_num_threads(0)


def over_rows(name, fused):
    isa = load_isa(name)
    return lower_rows(isa, isa.atom("f32"), str(fused))


def sizes(lanes):
    """Rows of one element, of none, of no row, ragged, whole vectors; and the items of a batch."""
    return [((1, 1), 1), ((3, 2 * lanes + 3), 2), ((2, lanes), 3), ((5, 7), 2), ((0, 5), 1), ((4, 0), 2), ((2, 3), 1)]


@pytest.mark.thin(2)
@pytest.mark.parametrize("make", ROWS)
@pytest.mark.parametrize("name", ISAS)
def test_rows_mean_their_expressions(name, make):
    fused = ROWS[make]()
    assert parse(str(fused)) is parse(str(fused))
    assert str(parse(str(fused))) == str(fused)
    assert parse(spelled(fused)) is fused
    assert spelled(epilogue._read_all(str(fused))) == str(fused)
    kernel = over_rows(name, fused)
    for i, (size, batch) in enumerate(sizes(kernel.atom.n)):
        f = rows_case(fused, size, batch, i, special=i % 2 > 0)
        f.check(interpreted(kernel, f, 1 + i % 3, shuffle=i), (size, batch))


@pytest.mark.calls
@pytest.mark.thin(2)
@pytest.mark.parametrize("make", ROWS)
@pytest.mark.parametrize("name", HERE)
def test_built_rows_mean_their_expressions(name, make):
    fused = ROWS[make]()
    kernel = over_rows(name, fused)
    for i, (size, batch) in enumerate([*sizes(kernel.atom.n), ((40, 33), 1)]):
        for special in (False, True):
            f = rows_case(fused, size, batch, i, special=special)
            check_built(kernel, f, 1 + i % 3, (size, batch), end=special)


# -- any expression ---------------------------------------------------------------

OPERANDS = (Operand("f32", "bmn"), Operand("f32", "n"), Operand("s32", "mn", dense=False), Operand("bf16", "bm"))


@st.composite
def expressions(draw):
    """Trees of all operations, with reductions inside of reductions."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x, y, i, z = (load(k, o.dtype) for k, o in enumerate(OPERANDS))
    reals, wholes, masks = [x, y, z, number(0), real(index("m"))], [i, index("n"), extent("n")], [x < y, i > 2]

    def of(kind):
        return kind[int(rng.integers(len(kind)))] if rng.random() < 0.6 else kind[-1]

    for _ in range(draw(st.integers(1, 25))):
        a, b, c, d, p, q = (of(x) for x in (reals, reals, wholes, wholes, masks, masks))
        k = float(np.float32(rng.standard_normal()))
        kinds = (
            (reals, (a + b, a - b, a * k, k - a, a * b, -a, a + k)),
            (reals, (a / (abs(b) + 1.0), abs(a), sqrt(abs(a)), fma(a, k, b), fma(a, b, k))),
            (reals, (apply("min", a, b), apply("max", a, k), apply("max", b, a))),
            (reals, (select(p, a, b), select(p, k, a), select(~p, a, 0.0))),
            (reals, (reduction("add", a), reduction("max", b))),
            (reals, (apply("float", c), from_bits(bits(a) & 0x7FFFFFFF), real(p))),
            (wholes, (c + d, c - 3, c * d, -c, abs(d), c & d, c ^ 5, ~c, c << 3, d >> 2)),
            (wholes, (select(p, c, d), apply("min", c, d), apply("max", c, 7), apply("int", a))),
            (masks, (a < b, a <= k, c == d, c != d, c <= d, apply("ne", a, a))),
            (masks, (p & q, p | q, p ^ q, ~p)),
        )
        to, found = kinds[rng.integers(len(kinds))]
        x = found[rng.integers(len(found))]
        if x.op != "const":
            to.append(x)
    roots = [reals[-1], real(masks[-1]), wholes[-1], of(reals)]
    along = fused_cases.axes_of(roots, OPERANDS)
    results = tuple(
        Operand("s32" if v.dtype == "s32" else "f32", "bmn" if "n" in axes else "bm")
        for v, axes in zip(roots, along, strict=True)
    )
    return Fused((*OPERANDS, *results), tuple((len(OPERANDS) + k, v) for k, v in enumerate(roots)))


@fuzz
@given(fused=expressions(), seed=st.integers(0, 1000), m=st.integers(1, 3), n=st.integers(0, 21), special=st.booleans())
def test_any_expression_over_rows(fused, seed, m, n, special):
    name = ISAS[seed % len(ISAS)]
    f = rows_case(fused, (m, n), 1 + seed % 2, seed, special=special)
    f.check(interpreted(over_rows(name, fused), f), (name, str(fused)))


@pytest.mark.calls
@settings(fuzz, max_examples=12)
@given(fused=expressions(), seed=st.integers(0, 1000), n=st.integers(1, 40), special=st.booleans())
def test_any_built_expression_over_rows(fused, seed, n, special):
    name = HERE[seed % len(HERE)]
    f = rows_case(fused, (2, n), 2, seed, special=special)
    check_built(over_rows(name, fused), f, 1 + seed % 2, (name, str(fused)))


# -- the end of a product ---------------------------------------------------------


def products(name, word, kind):
    """Products of an instruction set with an epilogue: ragged, thin, deep, packed or not."""
    target, fused = small(name), EPILOGUES[kind]
    lanes, seen = target.isas[0].atom(word).n, set()
    shapes = [(5, lanes + 1, 7), (1, 3 * lanes, lanes + 2), (2 * lanes + 1, 3, 2), (9, 2 * lanes + 3, 4 * lanes + 3)]
    layouts = [("row", "row", "row"), ("row", "packed", "row"), ("col", "col", "row"), ("any", "any", "row")]
    for i, size in enumerate(shapes):
        if "u4" in word:
            posed = [problems.coded(size, word, 2 * lanes, 8 * i, a=("row", "col")[i % 2], fused=str(fused))]
        else:
            more = {"dtype": word, "fused": str(fused), "batch": 1 + (i == 0)}
            posed = problems.pose(size, layouts[(i + len(kind)) % 4], target, **more)[-1:]
        for p in posed:
            for s in candidates(p, target):
                key = (problems.shape_of(s), p.m > s.mr)
                if key not in seen:
                    seen.add(key)
                    yield p, s


EPILOGUES = epilogues()
OWN = {("amx_bf16", "f32-u4-f32")}
"""Products by groups of whole steps alone: in test_int4_tiles.py."""
SERVED = [x for x in product(EVERY_ISA, WORDS) if load_isa(x[0]).atom(x[1]) and x not in OWN]


@pytest.mark.thin(4)
@pytest.mark.parametrize(("name", "word"), SERVED)
def test_products_end_in_expressions(name, word):
    for at, kind in enumerate(EPILOGUES):
        found = list(products(name, word, kind))
        assert found
        for i, (p, s) in enumerate(found[at % len(found) :: 3 + len(found) // 3]):
            f = gemm_case(p, EPILOGUES[kind], i, special=i % 2 > 0)
            f.check(interpreted(lower(s, small(name).isa(s.isa)), f, 1 + i % 3, shuffle=i), s)


@pytest.mark.calls
@pytest.mark.thin(3)
@pytest.mark.parametrize(("name", "word"), [x for x in SERVED if runs_here(x[0])])
def test_built_products_end_in_expressions(name, word):
    turn = SERVED.index((name, word))
    for at, kind in enumerate(EPILOGUES):
        if word != "f32" and at != turn % 3:
            continue
        found = list(products(name, word, kind))
        p, s = found[turn % len(found)]
        kernel = lower(s, small(name).isa(s.isa))
        for i in range(3):
            f = gemm_case(p, EPILOGUES[kind], i, special=i > 0)
            check_built(kernel, f, 1 + i, s, end=i % 2 > 0)


# -- what may go wrong ------------------------------------------------------------


def test_the_interpreter_guards_operands():
    fused = Fused((Operand("f32", "mn"), Operand("f32", "mn")), ((1, load(0, "f32") * 2.0),))
    f, kernel = rows_case(fused, (3, 5)), over_rows("scalar", fused)
    interpreted(kernel, f)
    for i in (0, 1):
        x = f.case.operands[i]
        short = list(f.case.operands)
        short[i] = type(x)(x.flat[:-1], x.offset, x.steps)
        with pytest.raises(IndexError):
            interpreted(kernel, type(f)(fused_cases.replace(f.case, operands=tuple(short)), f.results, f.written))


@pytest.mark.calls
@pytest.mark.parametrize("name", [x for x in ISAS if load_isa(x).arch in ("any", "x86_64") and runs_here(x)])
def test_a_square_root_calls_nothing(name):
    fused = Fused((Operand("f32", "mn"), Operand("f32", "mn")), ((1, sqrt(load(0, "f32"))),))
    built = build_kernel(over_rows(name, fused))
    done = subprocess.run([require("nm"), "-D", "-u", str(built.path)], capture_output=True, text=True, check=True)
    assert "sqrt" not in done.stdout


def test_passes_keep_numbers_only():
    """Masks and integers that passes share are computed again."""
    x, y = load(0, "f32"), load(1, "f32")
    h = (index("n") * 977) ^ (index("m") * 31)
    for _ in range(4):
        h = (h ^ ((h >> 3) & 0xFFFF)) * 48271
    total = reduction("add", select(h > 0, x, 0.0))
    fused = Fused((Operand("f32", "mn"),) * 3, ((2, select(h > 0, y, total)),))
    for name in HERE:
        f, kernel = rows_case(fused, (3, 37)), over_rows(name, fused)
        f.check(interpreted(kernel, f), name)
        check_built(kernel, f, 1, name)


def test_lanes_that_are_lacking_are_told():
    """A type that a machine cannot store is no crash of the compiler."""
    from portmm.dispatch.cpu_kernels import unit_for

    fused = Fused((Operand("f64", "mn"), Operand("f32", "mn")), ((1, real(load(0, "f32"))),))
    with pytest.raises(ScheduleError, match="f64"):
        unit_for(fused, small("avx2"))
