"""Outlines of epilogues: of functions that do no more than the stand-ins know, and of no others."""

from __future__ import annotations

import numpy as np
import pytest

import portmm as pm
from portmm.ops.epilogues import VALUES, fusible
from portmm.ops.outlined_matmul import outline
from portmm.trace.tracer import trace

N = 24
BIAS = np.arange(N, dtype=np.float32)
OTHER = np.ones(N, np.float32)
LONG, EVERY_OTHER, WIDE = np.ones(N + 1, np.float32), np.ones(2 * N, np.float32)[::2], np.ones((3, N), np.float32)
SWAPPED = BIAS.astype(BIAS.dtype.newbyteorder())
FACTOR, NOTHING = 2.0, None
n = 3
LOG: list[object] = []
gelu = pm.gelu


def biased(acc, i):
    return acc + BIAS[i.n]


def statements(acc, i):
    bias = BIAS[i.n]
    y = acc + bias
    return pm.relu(y)


def from_a_closure():
    bias, of = BIAS, pm.silu
    return lambda acc, i: of(acc + bias[i.n])


def caught(acc, i):
    try:
        return acc + LOG[0]
    except (NameError, IndexError):
        return acc + BIAS[i.n]


def finished(acc, i):
    try:
        return acc * FACTOR
    finally:
        return acc + BIAS[i.n]  # noqa: B012, SIM107 - hides the error


def with_a_default(acc, i, bias=BIAS):
    return acc + bias[i.n]


def logged(acc, i):
    LOG.append(acc)
    return acc + BIAS[i.n]


def generated(acc, i):
    yield acc + BIAS[i.n]


def patched(acc, i):
    return pm.softplus(acc + BIAS[i.n])


def marked(acc, i):
    return acc + BIAS[i.n]


marked.by = FACTOR

ADDED = "acc; load 0 f32; add 0 1"
OUTLINED = {
    "bias": (biased, ADDED),
    "without an index": (lambda acc: acc + BIAS, ADDED),
    "reversed": (lambda acc, i: BIAS[i.n] + acc, "acc; load 0 f32; add 1 0"),
    "relu": (lambda acc, i: pm.relu(acc + BIAS[i.n]), f"{ADDED}; relu 2"),
    "statements": (statements, "load"),
    "a function by its own name": (lambda acc, i: gelu(acc + BIAS[i.n]), f"{ADDED}; gelu 2"),
    "from a closure": (from_a_closure(), f"{ADDED}; silu 2"),
    "two operands": (lambda acc, i: acc + BIAS[i.n] + OTHER[i.n], f"{ADDED}; load 1 f32; add 2 3"),
    "one operand twice": (lambda acc, i: acc + BIAS[i.n] + BIAS[i.n], f"{ADDED}; load 0 f32; add 2 3"),
}
TRACED = {
    "a number": lambda acc, _: acc + FACTOR,
    "a literal": lambda acc, _: acc + 1.0,
    "another operator": lambda acc, i: acc * BIAS[i.n],
    "a value twice": lambda acc, i: (acc + BIAS[i.n]) * (acc + OTHER[i.n]),
    "a step that is not used": lambda acc, i: (acc + OTHER[i.n], acc + BIAS[i.n])[0],
    "two results": lambda acc, i: (acc + BIAS[i.n], acc),
    "by rows": lambda acc, i: acc + BIAS[i.m],
    "by an integer": lambda acc, _: acc + BIAS[0],
    "by an index and nothing": lambda acc, i: acc + BIAS[i.n, None],
    "longer": lambda acc, i: acc + LONG[i.n],
    "with gaps": lambda acc, i: acc + EVERY_OTHER[i.n],
    "another order of bytes": lambda acc, i: acc + SWAPPED[i.n],
    "a matrix": lambda acc, i: acc + WIDE[i.m, i.n],
    "an index": lambda acc, i: acc + i.n,
    "a comparison": lambda acc, i: pm.where(acc > 0, acc, BIAS[i.n]),
    "an equality": lambda acc, _: acc if acc == BIAS else acc + BIAS,
    "a condition": lambda acc, i: acc + BIAS[i.n] if acc else acc,
    "a condition on a captured value": lambda acc, i: acc if NOTHING is None else acc + BIAS[i.n],
    "a name that an attribute has, too": lambda acc, i: acc + BIAS[i.n] + n,
    "an attribute of an array": lambda acc, i: acc + BIAS.T[i.n],
    "a method": lambda acc, i: acc.clip(0) + BIAS[i.n],
    "a builtin": lambda acc, i: abs(acc + BIAS[i.n]),
    "a class that is asked": lambda acc, i: acc + BIAS[i.n] if isinstance(acc, np.ndarray) else acc,
    "NumPy": lambda acc, i: np.maximum(acc + BIAS[i.n], 0),
    "an array of its own": lambda acc, i: acc + np.ones(N, np.float32)[i.n],
    "an error that is caught": caught,
    "an error that is dropped": finished,
    "a default": with_a_default,
    "an attribute of the function": marked,
    "more arguments": lambda acc, i, *_: acc + BIAS[i.n],
    "named arguments": lambda acc, i, **_: acc + BIAS[i.n],
    "an argument by name": lambda acc, *, i=BIAS: acc + i,
    "a function with an argument by name": lambda acc, i: pm.sum(acc + BIAS[i.n], axis=-1),
    "a list that grows": logged,
    "a generator": generated,
    "a function of the user's in the place of portmm's": patched,
    "a function of the user's": lambda acc, i: pm.relu(biased(acc, i)),
}


@pytest.mark.parametrize(("function", "text"), OUTLINED.values(), ids=OUTLINED)
def test_an_outline_has_the_steps_and_the_operands(function, text):
    texts, operands = outline(function, N)
    if text == "load":
        assert texts.split("; ") == ["acc", "load 0 f32", "add 0 1", "relu 2"]
    else:
        assert texts == text
    assert operands[0] is BIAS
    assert len(operands) == 1 + ("load 1" in texts)


@pytest.mark.parametrize("function", TRACED.values(), ids=TRACED)
def test_other_functions_have_no_outline(function, monkeypatch):
    monkeypatch.setattr(pm, "softplus", lambda x: x + x, raising=False)
    assert outline(function, N) is None
    assert not LOG


def test_functions_of_one_outline_are_traced_alike():
    """An outline leads to the expressions of another function that has it."""
    known: dict[str, str] = {}
    bias = np.ones(N, np.float32)
    for function in (
        biased,
        lambda acc, _: acc + OTHER,
        lambda acc, _: bias + acc,
        lambda acc, i: BIAS[i.n] + acc,
        lambda acc, i: pm.relu(acc + BIAS[i.n]),
        lambda acc, i: pm.relu(OTHER[i.n] + acc),
        statements,
        lambda acc: pm.relu(acc + bias),
        from_a_closure(),
        lambda acc, i: pm.silu(acc + bias[i.n]),
    ):
        traced, *_ = trace(function, VALUES, by_value=False, rank=2)
        text = fusible(traced, "f32", lambda: np.dtype(np.float32)).text
        assert known.setdefault(outline(function, N)[0], text) == text
    assert len(known) == 5
