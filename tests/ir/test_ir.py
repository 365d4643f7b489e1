"""The loop language: index expressions, walking, and that printed C means what the interpreter says."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_of import transposed
from machines import TINY
from operands import case
from runs import execute, interpret

from portmm.codegen.c_kernel import source
from portmm.codegen.c_like import address, index
from portmm.codegen.lower import lower
from portmm.ir import nodes
from portmm.ir.index import (
    OPERATORS,
    Index,
    Ptr,
    ceil_div,
    const,
    maximum,
    meaning,
    minimum,
    parsed,
    round_up,
    spelled,
    var,
)
from portmm.ir.interpreter import evaluate
from portmm.ir.nodes import Call, For, Function, If, Kernel, Let, Move, Param, Switch, Verb
from portmm.schedule.candidates import candidates
from portmm.spec.dtype import F32
from portmm.spec.problem import Problem

NAMES = ("x", "y", "z")


@st.composite
def expressions(draw, depth=4):
    """Index expressions that never divide by zero or take the quotient of a negative number."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.one_of(st.integers(0, 9).map(const), st.sampled_from(NAMES).map(var)))
    op = draw(st.sampled_from(["+", "-", "*", "/", "%", "<", "==", "min", "max"]))
    left, right = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
    if op in ("<", "=="):  # Python would chain comparisons
        left, right = (maximum(x, 0) if x.op in ("<", "==") else x for x in (left, right))
    if op in ("/", "%"):
        left, right = maximum(left, 0), maximum(right, 1)
        return left // right if op == "/" else left % right
    if op in ("min", "max"):
        return minimum(left, right) if op == "min" else maximum(left, right)
    return {"+": left + right, "-": left - right, "*": left * right, "<": left.lt(right), "==": left.eq(right)}[op]


@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(expressions(), st.tuples(*[st.integers(0, 20)] * 3))
def test_printed_expressions_mean_what_they_are(x, values):
    """C's precedence and Python's agree on these operators, / aside, so the text can be evaluated here."""
    ints = dict(zip(NAMES, values, strict=True))
    text = re.sub(r"(?<!/)/(?!/)", "//", index(x))
    assert eval(text, {"min_": min, "max_": max}, ints) == evaluate(x, ints)  # noqa: S307 - our own text


@pytest.mark.rest("takes long for what it finds")
@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(expressions(), expressions(), st.tuples(*[st.integers(0, 20)] * 3))
def test_folding_keeps_the_value(x, y, values):
    ints = dict(zip(NAMES, values, strict=True))
    for op, folded in [("+", x + y), ("-", x - y), ("*", x * y), ("<", x.lt(y)), ("min", minimum(x, y))]:
        assert evaluate(folded, ints) == OPERATORS[op](evaluate(x, ints), evaluate(y, ints))


def test_neutral_elements_fold_away():
    x = var("x")
    for same in (x + 0, 0 + x, x - 0, x * 1, 1 * x, x // 1, minimum(x, x), maximum(x, x)):
        assert same == x
    assert x * 0 == 0 * x == const(0)
    assert ceil_div(7, 2) == const(4)
    assert round_up(const(7), 4) == const(8)


def test_addresses():
    assert address(Ptr("a")) == "a"
    assert address(Ptr("a") + var("x") * 2) == "a + x * 2"
    assert address(Ptr("a", var("x") - 1)) == "a + x - 1"


def copying(body, params=()):
    """A kernel around a body that sees the argument block."""
    isa = TINY.isas[0]
    entry = Function("entry", "entry", params, body)
    return Kernel("portmm_test_f32_f32_f32_1x1x1_tiny", isa, isa.atoms[0], entry, const(64))


def test_names_are_scoped_as_in_c():
    """A loop inside a loop may use the outer variable's name without touching it."""
    i = var("i")
    inner = For("i", const(0), const(3), const(1), (Move(Ptr("c"), Ptr("a")),))
    shadow = If(const(1), (Let("t", const(5)), Move(Ptr("c", var("t")), Ptr("a"))))
    kernel = copying(
        (
            For(
                "i",
                const(0),
                const(4),
                const(1),
                (Let("t", i + 1), inner, shadow, Move(Ptr("c", var("t")), Ptr("a", i))),
            ),
        )
    )
    k = case(Problem(1, 8, 8))
    meant = interpret(kernel, k)
    np.testing.assert_array_equal(meant[1:6], [*k.a[:4], k.a[0]])
    np.testing.assert_array_equal(execute(kernel, k), meant)


def test_registers_and_scratch_must_be_written_first():
    k = case(Problem(1, 2, 2))
    with pytest.raises(KeyError):
        interpret(copying((Verb("store", "r", p=Ptr("c")),)), k)
    c = interpret(copying((Move(Ptr("c"), Ptr("work")),)), k)
    assert np.isnan(c[0])


def test_a_switch_has_a_body_for_each_value():
    k = case(Problem(1, 2, 2))
    with pytest.raises(KeyError):
        interpret(copying((Switch(const(3), ((1, ()), (2, ()))),)), k)


def test_calls_bind_every_parameter():
    k = case(Problem(1, 2, 2))
    f = Function("f", "inner", (Param("n"), Param("p", "f32")), ())
    with pytest.raises(ValueError, match="shorter"):
        interpret(copying((Call(f, (const(1),)),)), k)


def test_walking_reaches_everything_once():
    for s in candidates(Problem(9, 8, 7), TINY):
        kernel = lower(s, TINY.isas[0])
        functions = nodes.functions(kernel)
        assert functions[-1] == kernel.entry
        assert len({f.name for f in functions}) == len(functions)
        done = set()
        for f in functions:  # callees first
            for x in nodes.walk(f.body):
                if isinstance(x, Call | nodes.Parallel):
                    assert x.function.name in done
            done.add(f.name)


def test_unread_names_are_not_printed():
    read, unread = Let("read", var("m")), Let("unread", var("n") + 1)
    text = source(copying((read, unread, Let("also", var("unread")), Move(Ptr("c", var("read")), None))))
    assert "read = m" in text
    assert "unread" not in text
    assert "long n =" not in text
    assert "min_" not in text


def test_swapping_is_an_involution():
    assert all(nodes.SWAPPED[nodes.SWAPPED[name]] == name for name in nodes.SWAPPED)
    assert set(nodes.FIELDS) | set(nodes.OPERANDS) == set(nodes.SWAPPED)
    p = Problem(3, 4, 5, a="col", b="any")
    assert replace(p.transposed().transposed(), b=p.b) == p


def test_constants_are_of_the_type():
    assert Index("const", (3,)) == const(3)
    assert F32.eps == 2.0**-24
    np.testing.assert_array_equal(transposed(np.eye(4)), np.eye(4))


def test_expressions_are_spelled_and_read_back():
    m, k = var("m"), var("k")
    for x in (const(7), m, ceil_div(m, 16) * round_up(k, 4) + 3, minimum(m - 5, maximum(k, 2)) % 7, m.lt(k) ^ m.eq(4)):
        assert parsed(spelled(x)) == x
        assert meaning(parsed(spelled(x)))({"m": 35, "k": 18}) == meaning(x)({"m": 35, "k": 18})
    for text in ("", "+ m", "m k"):
        with pytest.raises(ValueError, match="expression"):
            parsed(text)
