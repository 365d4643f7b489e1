"""A thousand mutants of graphs: what differs in floats is never accepted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import graphs_of as g
import numpy as np
import pytest
from test_equivalence import SEED, Floats, Unchecked

import portmm as pm
from portmm.errors import PortmmError, ScheduleError
from portmm.ir.block_program import BlockProgram
from portmm.spec.elementwise import exp
from portmm.spec.epilogue import contraction, extent, index
from portmm.spec.expr import Expr, const, node, ordered
from portmm.spec.expr_functions import select, substituted
from portmm.spec.function_patterns import function_of
from portmm.verification.equivalence import check, evaluate, reduced

BASES = {
    "product": (g.product, g.one_product, 160),
    "lora": (g.lora, g.lora_kernel, 160),
    "norm": (g.rms_linear, g.rms_kernel, 160),
    "gated": (g.gated, g.gated_kernel, 160),
    "split": (g.whole_k, g.split_k, 160),
    "flash": (g.attention, g.flash, 100),
    "split keys": (g.runs_of_keys, g.split_keys, 60),
    "causal": (lambda: g.attention(causal=True), lambda: g.flash(causal=True), 100),
}
OTHER = {
    "add": "sub", "sub": "add", "mul": "add", "div": "mul", "le": "lt", "lt": "le", "max": "min", "min": "max",
    "sqrt": "neg", "neg": "abs",
}  # fmt: skip


def test_there_are_a_thousand():
    assert sum(n for *_, n in BASES.values()) >= 1000


def outside(x, seen=None):
    """Expressions, without the expansions of functions."""
    seen = {} if seen is None else seen
    if id(x) not in seen:
        seen[id(x)] = x
        named = function_of(x)
        for y in (named[1],) if named else x.inner:
            outside(y, seen)
    return list(seen.values())


def misread(x):  # noqa: PLR0911 - one for each kind
    """Mutants of one expression: operands swapped, another initial value, a factor moved out of an exponential."""
    named = function_of(x)
    if named is not None and named[0] == "exp" and named[1].op in ("mul", "sub"):
        y, z = named[1].args
        return [exp(y) * z, exp(z) * y] if named[1].op == "mul" else [exp(y) - z, exp(y) / z, exp(y)]
    if x.op in ("sub", "div", "lt", "le"):
        return [node(x.op, x.args[::-1], x.dtype)]
    if x.op == "select":
        return [node(x.op, (x.args[0], *x.args[:0:-1]), x.dtype)]
    if x.op == "contract":
        label, y, z = x.args
        tail = select(index(label) < extent(label) - 1, y, 0.0)
        return [x + 1.0, contraction(y, const(1.0), label), contraction(y * y, z, label), contraction(tail, z, label)]
    if x.op == "reduce":
        return [pm.maximum(x, 0.0) if x.args[0] == "max" else x + 1.0, x.args[1]]
    if x.op == "index":
        return [x + 1, x - 1]
    if (
        x.op in ("mul", "add", "div")
        and isinstance(x.args[0], Expr)
        and x.args[0].op in {"mul", "add", "sub", "div"} - {x.op}
    ):
        y = x.args[0]
        return [y.args[0], node(y.op, (node(x.op, (y.args[0], x.args[1]), "f32"), y.args[1]), "f32")]
    return []


def changed(x, labels, rng):  # noqa: PLR0911 - one for each kind
    """An expression with another operator, constant or label; None if it has none."""
    other = misread(x) if rng.random() < 0.5 else []
    if other:
        return other[int(rng.integers(len(other)))]
    if x.op == "const" and x.dtype == "f32" and np.isfinite(x.args[0]):
        return const(x.args[0] * 2 + 1)
    if x.op == "const" and x.dtype == "s32":
        return const(x.args[0] + int(rng.choice([-1, 1])), "s32")
    if x.op in ("index", "extent"):
        return node(x.op, (str(rng.choice(labels)),), "s32")
    if x.op in ("reduce", "fold"):
        return node(x.op, ("add" if x.args[0] == "max" else "max", *x.args[1:]), x.dtype)
    if x.op == "contract":
        return node(x.op, (str(rng.choice(labels)), *x.args[1:]), x.dtype)
    if x.op == "load":
        return node(x.op, (x.args[0] ^ 1,), x.dtype)
    if x.op in OTHER:
        args = x.args[:1] if OTHER[x.op] in ("neg", "abs", "sqrt") else x.args
        return node(OTHER[x.op], args, x.dtype)
    return None


def with_program(graph, i, change):
    """A graph with a changed step; checks of records do not stop it."""
    step = graph.steps[i]
    p = step.program
    fields = {"grid": p.grid, "loop": p.loop, "operands": p.operands, "passes": p.passes} | change
    try:
        program = BlockProgram(**fields)
    except PortmmError:
        program = Unchecked(**fields)
    steps = (*graph.steps[:i], step._replace(program=program), *graph.steps[i + 1 :])
    return replace(graph, steps=steps)


def mutant(graph, rng):  # noqa: PLR0911 - one for each kind
    """A graph with one label, map, operator or constant changed."""
    i = int(rng.integers(len(graph.steps)))
    p = graph.steps[i].program
    labels = sorted({x for y in p.operands for x in y.axes})
    kind = rng.choice(["label", "map", "value", "value", "value", "rescale", "loop"])
    if kind == "label":
        j = int(rng.integers(len(p.operands)))
        axes = list(p.operands[j].axes)
        if rng.random() < 0.5 and len(axes) > 1:
            a, b = rng.choice(len(axes), 2, replace=False)
            axes[a], axes[b] = axes[b], axes[a]
        else:
            axes[rng.integers(len(axes))] = str(rng.choice(labels))
        operands = [replace(x, axes="".join(axes)) if k == j else x for k, x in enumerate(p.operands)]
        return with_program(graph, i, {"operands": tuple(operands)})
    if kind == "map":
        at = list(graph.steps[i].operands)
        j = int(rng.integers(len(at)))
        n = len(graph.labels(at[j]))
        order = rng.permutation(n)
        dims = at[j].dims or tuple((k,) for k in range(n))
        at[j] = at[j]._replace(dims=tuple(dims[k] for k in order))
        return replace(
            graph, steps=(*graph.steps[:i], graph.steps[i]._replace(operands=tuple(at)), *graph.steps[i + 1 :])
        )
    if kind == "loop":
        return with_program(graph, i, {"loop": str(rng.choice(labels))})
    operators = [x for one in p.passes for x in one]
    if kind == "rescale":
        some = [x for x in operators if getattr(x, "rescaled", None) is not None]
        if not some:
            return None
        one = some[int(rng.integers(len(some)))]
        passes = tuple(tuple(x._replace(rescaled=None) if x is one else x for x in y) for y in p.passes)
        return with_program(graph, i, {"passes": passes})
    every = [x for root in operators for x in outside(root.value)]
    target = every[int(rng.integers(len(every)))]
    new = changed(target, labels, rng)
    if new is None or new is target:
        return None
    done: dict[Expr, Expr] = {}

    def with_value(x):
        parts = {"value": substituted(x.value, lambda y: new if y is target else None, done)}
        if getattr(x, "rescaled", None) is not None:
            parts["rescaled"] = substituted(x.rescaled, lambda y: new if y is target else None, done)
        return x._replace(**parts)

    return with_program(graph, i, {"passes": tuple(tuple(map(with_value, one)) for one in p.passes)})


def same_in_floats(reference, candidate):
    """Whether two graphs agree in float64, on several draws of inputs."""
    extents = reduced(reference, candidate)
    for draw in range(2):
        rng = np.random.default_rng(draw)
        inputs = [rng.normal(size=[extents[x] for x in reference.tensors[i].axes]) for i in reference.inputs]
        try:
            with np.errstate(all="ignore"):
                one, other = (evaluate(x, inputs, Floats(), extents) for x in (reference, candidate))
        except (PortmmError, ValueError, IndexError, KeyError):
            return False
        if not np.allclose(one[0], other[0], rtol=1e-4, atol=1e-6):
            return False
    return True


@pytest.mark.parametrize("name", BASES)
def test_no_mutant_that_differs_is_accepted(name):
    make, make_one, count = BASES[name]
    reference, candidate = make(), make_one()
    rng, seen = np.random.default_rng(sum(map(ord, name))), Counter()
    while sum(seen.values()) < count:
        try:
            other = mutant(candidate, rng)
        except ScheduleError:  # a graph that reads what it has yet to write, or is ill-typed
            continue
        if other is None:
            continue
        verdict = check(reference, other, seed=SEED)
        if verdict:
            assert same_in_floats(reference, other), f"accepted, and different: {other}"
        seen["accepted" if verdict else "rejected"] += 1
    assert seen["rejected"] > count * 0.6, seen


def test_what_the_expansions_have_is_no_target():
    """Mutants are of what a program says, and constants inside of an exponential are no programs of their own."""
    (value,) = {x.value for one in g.flash().steps[0].program.passes for x in one if getattr(x, "operand", None) == 3}
    assert len(outside(value)) < len(ordered((value,)))
