"""Mutants of functions and of their rewritten forms: what NumPy computes otherwise, the verifier never accepts.

The judge of each is not the verifier's: the mutated text of a function run by NumPy in float64, and terms computed by
an einsum of their own.
"""

from __future__ import annotations

import ast
import math
import random
from collections import Counter
from string import ascii_letters

import numpy as np
import pytest
from traced_terms import labelled_of

import portmm as pm
from portmm.errors import PortmmError
from portmm.fusion.term_kernels import one_kernels
from portmm.fusion.term_rewrites import alternatives, joined_extents, rebuilt, replaced, subterms
from portmm.fusion.terms import Term, dot, elementwise_term, graph_of, literal, reduced
from portmm.verification.equivalence import check
from portmm.verification.stability import judge

NEAR = 1 << 20
FUNCTIONS = {
    "attention": ("q k v", """
s = q @ k.swapaxes(-1, -2) * np.float32(0.125)
e = np.exp(s - s.max(-1, keepdims=True))
r = (e / e.sum(-1, keepdims=True)) @ v""", ((2, 4, 4),) * 3),
    "qk norm": ("q k v", """
a = q / np.sqrt((q * q).mean(-1, keepdims=True) + np.float32(1.0))
b = v / np.sqrt((v * v).mean(-1, keepdims=True) + np.float32(1.0))
e = np.exp(a @ k.swapaxes(-1, -2) * np.float32(0.5))
r = (e / e.sum(-1, keepdims=True)) @ b""", ((4, 4),) * 3),
    "lora": ("x w a b", "r = x @ w + (x @ a) @ b", ((4, 4),) * 4),
    "rms linear": ("x g w", """
n = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1.0)) * g
r = n @ w""", ((4, 4), (4,), (4, 4))),
    "gated": ("x w u", "r = pm.silu(x @ w) * (x @ u)", ((4, 4),) * 3),
    "mlp": ("x a b", "r = np.exp(x @ a) @ b", ((4, 4),) * 3),
    "chain": ("x a b c", "r = x @ (a @ (b @ c)) * np.float32(0.5)", ((4, 4),) * 4),
    "layer norm": ("x g h", """
m = x.mean(-1, keepdims=True)
d = x - m
r = d / np.sqrt((d * d).mean(-1, keepdims=True) + np.float32(1.0)) * g + h""", ((4, 4), (4,), (4,))),
    "residual": ("h a t", """
n = a / np.sqrt((a * a).mean(-1, keepdims=True) + np.float32(1.0))
s = h + t * (n - h)
r = s / np.sqrt((s * s).mean(-1, keepdims=True) + np.float32(1.0))""", ((4, 4), (4, 4), (4,))),
    "masked": ("q k v", """
s = q @ k.swapaxes(-1, -2)
e = np.exp(np.maximum(s, np.float32(-2.0)) - np.abs(s).max(-1, keepdims=True))
r = e @ v / e.sum(-1, keepdims=True)""", ((4, 4),) * 3),
}  # fmt: skip
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
METHODS, CALLS = ("sum", "max", "mean"), ("exp", "sqrt", "abs", "tanh", "square")
OF_TERMS = {"add": "sub", "sub": "add", "mul": "div", "div": "mul", "sqrt": "abs", "abs": "neg", "neg": "abs",
            "exp": "sqrt", "max": "min", "min": "max", "silu": "sigmoid", "sigmoid": "tanh"}  # fmt: skip


def function_of(names, body):
    """A function of its text."""
    space = {"np": np, "pm": pm}
    lines = "\n".join(f"    {x}" for x in body.strip().splitlines())
    exec(f"def function({', '.join(names.split())}):\n{lines}\n    return r\n", space)  # noqa: S102 - the texts above
    return space["function"]


class Change(ast.NodeTransformer):
    """Changes one operator, constant, name or function of a text: the one of a number."""

    def __init__(self, number, source, names):
        self.left, self.source, self.names, self.what = number, source, names, ""

    def visit(self, node):  # noqa: PLR0911 - one for each kind
        node = self.generic_visit(node)
        kind = type(node)
        loaded = kind is ast.Name and isinstance(node.ctx, ast.Load) and node.id not in ("np", "pm")
        number = kind is ast.Constant and type(node.value) in (int, float)
        called = kind is ast.Attribute and node.attr in (*METHODS, *CALLS)
        if self.what or not (kind is ast.BinOp or loaded or number or called):
            return node
        self.left -= 1
        if self.left >= 0:
            return node
        self.what = kind.__name__
        if kind is ast.BinOp and (isinstance(node.op, ast.MatMult) or self.source.random() < 0.3):
            return ast.BinOp(node.right, node.op, node.left)
        if kind is ast.BinOp:
            return ast.BinOp(
                node.left, self.source.choice([x for x in OPERATORS if type(node.op) is not x])(), node.right
            )
        if loaded:
            return ast.Name(self.source.choice([x for x in self.names if x != node.id]), ast.Load())
        if number:
            return ast.Constant(node.value * 2 if type(node.value) is float else self.source.choice([0, -2]))
        every = METHODS if node.attr in METHODS else CALLS
        return ast.Attribute(node.value, self.source.choice([x for x in every if x != node.attr]), ast.Load())


def mutated(names, body, source):
    """A text with one change, or None."""
    tree = ast.parse(body)
    known = [*names.split(), *(x.targets[0].id for x in tree.body)][:-1]
    change = Change(source.randrange(40), source, known)
    tree = ast.fix_missing_locations(change.visit(tree))
    return ast.unparse(tree) if change.what else None


def accepted(reference, candidate):
    """Whether a program is accepted: it is equivalent over fields, and finite where the reference is."""
    return bool(check(reference, candidate)) and judge(reference, candidate).stable


def drawn(shapes, seed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(x) + seed % 2 * 2).astype(dtype) for x in shapes]


def alike(one, other, shapes):
    """Whether two functions agree by NumPy in float64, on draws around 0 and around 2."""
    for seed in range(4):
        with np.errstate(all="ignore"):
            a, b = (np.asarray(f(*drawn(shapes, seed))) for f in (one, other))
        if a.shape != b.shape or not np.allclose(a, b, rtol=1e-7, atol=1e-9, equal_nan=True):
            return False
    return True


def read_by(labelled, shapes):
    """The elements of each input of terms: of which argument, in which order."""
    numbered = [np.arange(math.prod(shape)).reshape(shape) for shape in shapes]
    return [(leaf, x.tolist()) for (leaf, _), x in zip(labelled.leaves, labelled.read(numbered), strict=True)]


def hunt_functions(name, count, seed):
    """Numbers of mutants of a function's text by what became of them."""
    names, body, shapes = FUNCTIONS[name]
    base, source, seen = function_of(names, body), random.Random(seed), Counter()  # noqa: S311
    reference = labelled_of(base, drawn(shapes, 0, np.float32))
    graph = graph_of(reference.results, reference.axes, reference.inputs)
    texts = {body}
    for _ in range(count * 8):
        text = mutated(names, body, source)
        if seen.total() >= count or text in texts or text is None:
            continue
        texts.add(text)
        other = function_of(names, text)
        try:
            with np.errstate(all="ignore"):
                other(*drawn(shapes, 0))
            labelled = labelled_of(other, drawn(shapes, 0, np.float32))
            candidate = graph_of(labelled.results, labelled.axes, labelled.inputs)
        except (PortmmError, ValueError, TypeError, IndexError, AttributeError, NameError):
            continue  # no program
        if read_by(labelled, shapes) != read_by(reference, shapes):
            continue  # inputs of graphs are views of arguments, and these are others
        verdict = accepted(graph, candidate)
        same = alike(base, other, shapes)
        assert same or not verdict, f"accepted, and different: {text}"
        seen["accepted" if verdict else "same, and rejected" if same else "rejected"] += 1
    return seen


def value(x, arrays, extents, known):
    """A term in float64, with a dimension for each of its labels: products are sums of all products of elements."""
    if x not in known:
        of = [value(y, arrays, extents, known) for y in x.args]
        known[x] = computed(x, of, arrays, extents)
    return known[x]


def spread(array, labels, to):
    """An array with its dimensions in the order of labels, with extent 1 for those that it lacks."""
    array = np.transpose(array, [labels.index(y) for y in to if y in labels])
    return array.reshape([array.shape[[z for z in to if z in labels].index(y)] if y in labels else 1 for y in to])


def computed(x, of, arrays, extents):  # noqa: PLR0911 - one for each kind
    if x.op == "input":
        return arrays[x.data]
    if x.op == "const":
        return np.float64(x.data)
    if x.op in ("sum", "most"):
        if x.data not in x.args[0].labels:
            raise ValueError(x)
        return getattr(of[0], "sum" if x.op == "sum" else "max")(x.args[0].labels.index(x.data))
    if x.op == "dot":
        letters = dict(zip(dict.fromkeys(x.args[0].labels + x.args[1].labels), ascii_letters, strict=False))
        a, b, c = ("".join(letters[z] for z in y) for y in (x.args[0].labels, x.args[1].labels, x.labels))
        return np.einsum(f"{a},{b}->{c}", *of)
    if x.op == "concat":
        label, *parts = x.data
        each = zip(of, x.args, parts, strict=True)
        return np.concatenate(
            [spread(a, y.labels, x.labels.replace(label, z)) for a, y, z in each], x.labels.index(label)
        )
    if x.op == "attention":
        h = x.data
        q, k, v = x.args
        s = h.scale * value(dot(h.elements, q, k), None, extents, {q: of[0], k: of[1]})
        labels = dot(h.elements, q, k).labels
        e = np.exp(s - s.max(labels.index(h.keys), keepdims=True))
        w = e / e.sum(labels.index(h.keys), keepdims=True)
        weights = Term("weights", (), labels, 0)
        product = dot(h.keys, weights, v)
        return spread(value(product, None, extents, {weights: w, v: of[2]}), product.labels, x.labels)
    a = [y if z.op == "const" else spread(y, z.labels, x.labels) for y, z in zip(of, x.args, strict=True)]
    plain = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
             "sqrt": np.sqrt, "abs": np.abs, "max": np.maximum, "min": np.minimum, "exp": np.exp, "tanh": np.tanh,
             "sigmoid": lambda y: 1 / (1 + np.exp(-y)), "silu": lambda y: y / (1 + np.exp(-y))}  # fmt: skip
    return plain[x.op](*a)


def results(roots, axes, inputs, seed):
    """Terms on random arrays, whose labels have different extents."""
    labels = sorted({y for x in inputs for y in x if y != "1"})
    extents = joined_extents(roots, {y: 2 + i % 4 for i, y in enumerate(labels)})
    arrays = drawn([[extents[y] for y in x] for x in inputs], seed)
    with np.errstate(all="ignore"):
        ends = [(x, value(x, arrays, extents, {})) for x in roots]
    return [spread(y, x.labels, z.replace("1", "")) for (x, y), z in zip(ends, axes, strict=True)]


def changed(x, labels, source):
    """A term with another operator, literal, label or order of operands, or None."""
    if x.op == "const":
        return literal(x.data * 2 + 0.5)
    if x.op in ("sum", "most") and source.random() < 0.5:
        return reduced("most" if x.op == "sum" else "sum", x.data, *x.args)
    if x.op in ("sum", "most", "dot"):
        label = source.choice(labels)
        return dot(label, *x.args) if x.op == "dot" else reduced(x.op, label, *x.args)
    if x.op == "attention":
        return rebuilt(Term("attention", x.args, x.labels, x.data._replace(scale=x.data.scale * 2)), x.args[::-1])
    if x.op in ("sub", "div") and source.random() < 0.5:
        return elementwise_term(x.op, *x.args[::-1])
    return elementwise_term(OF_TERMS[x.op], *x.args) if x.op in OF_TERMS else None


def forms_of(labelled, most=40):
    """Forms by some rewrites."""
    forms = [labelled.results]
    for roots in forms:
        forms += [x for _, x in alternatives(roots) if x not in forms][: most - len(forms)]
    return forms


def hunt_forms(name, count, seed):
    """Numbers of mutants of rewritten forms, as graphs and as one kernel, by what became of them."""
    names, body, shapes = FUNCTIONS[name]
    labelled = labelled_of(function_of(names, body), drawn(shapes, 0, np.float32))
    reference = graph_of(labelled.results, labelled.axes, labelled.inputs)
    labels = sorted({y for x in labelled.inputs for y in x if y != "1"})
    source, seen, forms, known = random.Random(seed), Counter(), forms_of(labelled), set()  # noqa: S311
    want = [results(labelled.results, labelled.axes, labelled.inputs, i) for i in range(4)]
    for _ in range(count * 8):
        roots = source.choice(forms)
        old = source.choice(subterms(roots))
        try:
            new = changed(old, labels, source)
            mutant = None if new is None or new is old else replaced(roots, old, new)
            if seen.total() >= count or mutant is None or mutant in known:
                continue
            known.add(mutant)
            graphs = [graph_of(mutant, labelled.axes, labelled.inputs)]
            graphs += [x.graph for x in one_kernels(mutant, labelled.axes, labelled.inputs, labelled.extents, NEAR)]
            got = [results(mutant, labelled.axes, labelled.inputs, i) for i in range(4)]
        except (PortmmError, ValueError, KeyError, IndexError):
            continue  # no program
        same = all(
            x.shape == y.shape and np.allclose(x, y, rtol=1e-7, atol=1e-9, equal_nan=True)
            for one, other in zip(want, got, strict=True) for x, y in zip(one, other, strict=True)
        )  # fmt: skip
        for graph in graphs:
            verdict = accepted(reference, graph)
            assert same or not verdict, f"accepted, and different: {mutant}"
            seen["accepted" if verdict else "same, and rejected" if same else "rejected"] += 1
    return seen


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forms_have_the_meaning_of_einsum(name):
    """The judge of mutants computes each form as it computes the function, so that it can tell a mutant."""
    names, body, shapes = FUNCTIONS[name]
    function = function_of(names, body)
    labelled = labelled_of(function, drawn(shapes, 0, np.float32))
    first = results(labelled.results, labelled.axes, labelled.inputs, 0)
    for roots in forms_of(labelled, 12):
        for x, y in zip(first, results(roots, labelled.axes, labelled.inputs, 0), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9)
    assert math.prod(first[0].shape) > 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mutants_of_functions(name):
    seen = hunt_functions(name, 30, 1)
    assert seen["rejected"] >= 2, seen


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mutants_of_forms(name):
    seen = hunt_forms(name, 20, 1)
    assert seen["rejected"] >= 1, seen
