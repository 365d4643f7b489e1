"""Equivalent programs: rewrites are sound, and functions are found as one kernel."""

from __future__ import annotations

import numpy as np
import pytest
from traced_terms import labelled_of

import portmm as pm
from portmm.fusion.term_arrays import compute
from portmm.fusion.term_kernels import one_kernels
from portmm.fusion.term_rewrites import RULES, alternatives, rebuilt, subterms
from portmm.fusion.terms import UnlabelledError, attention, dot, graph_of
from portmm.verification.equivalence import check

QUICKLY = True
SCALE = np.float32(0.125)
SEED = 7


def attend(q, k, v):
    s = q @ k.swapaxes(-1, -2) * SCALE
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


def qk_norm(q, k, v):
    def norm(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5))

    e = np.exp(norm(q) @ k.swapaxes(-1, -2))
    return (e / e.sum(-1, keepdims=True)) @ norm(v)


def normed(x, w):
    return (x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5))) @ w


CASES = {
    "chain": (lambda x, a, b: x @ (a @ b), [(4, 64), (64, 3), (3, 64)], "dot"),
    "lora": (lambda x, w, a, b: x @ w + (x @ a) @ b, [(4, 32), (32, 48), (32, 2), (2, 48)], "dot"),
    "norm": (normed, [(3, 32), (32, 24)], "div"),
    "attention": (attend, [(3, 5, 16), (3, 7, 16), (3, 7, 8)], "attention"),
    "grouped": (attend, [(2, 3, 5, 16), (2, 1, 7, 16), (2, 1, 7, 16)], "attention"),
    "one head of keys": (attend, [(4, 5, 16), (7, 16), (7, 16)], "attention"),
    "QKNorm": (qk_norm, [(2, 5, 16), (2, 7, 16), (2, 7, 16)], "attention"),
    "gated": (lambda x, w, u: pm.silu(x @ w) * (x @ u), [(3, 32), (32, 24), (32, 24)], "mul"),
    "distribution": (lambda x, a, b: x @ a + x @ b, [(3, 32), (32, 24), (32, 24)], "dot"),
    "rows": (lambda x, y: y - x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1)), [(3, 32), (3, 32)], "sub"),
    "two results": (lambda x, a: (x @ a, (x @ a).sum(-1)), [(3, 32), (32, 24)], "sum"),
}


def arrays_of(shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(x, dtype=np.float32) for x in shapes]


def reachable(roots, most):
    """Forms by rewrites, nearest first."""
    seen, queue = {roots: ()}, [roots]
    for form in queue:
        for name, other in alternatives(form):
            if other not in seen and len(seen) < most:
                seen[other] = (*seen[form], name)
                queue.append(other)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_every_form_is_equivalent(name):
    """In finite fields, and in floats as it is computed."""
    function, shapes, wanted = CASES[name]
    arrays = arrays_of(shapes)
    labelled = labelled_of(function, arrays)
    axes = labelled.inputs
    reference = graph_of(labelled.results, labelled.axes, axes)
    want = function(*[x.astype(np.float64) for x in arrays])
    want, forms, ops = want if isinstance(want, tuple) else (want,), reachable(labelled.results, 24), set()
    for form, path in forms.items():
        verdict = check(reference, graph_of(form, labelled.axes, axes), seed=SEED)
        assert verdict, (path, form, verdict)
        got = compute(form, labelled.axes, labelled.read(arrays), labelled.extents)
        for x, y in zip(got, want, strict=True):
            assert x.shape == y.shape
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * np.abs(y).max())
        ops |= {x.op for x in form}
    assert wanted in ops


def test_a_factor_stays_where_it_varies():
    """sum_k(a b) is not (sum_k a) b where k is in b."""
    labelled = labelled_of(lambda a, b: (a * b).sum(-1), arrays_of([(3, 5), (3, 5)]))
    assert list(alternatives(labelled.results)) == []
    labelled = labelled_of(lambda a, b: (a * b).sum(-1), arrays_of([(3, 5), (3, 1)]))
    assert [name for name, _ in alternatives(labelled.results)] == ["factor past a sum"]


def test_factors_of_attention_have_their_places():
    """Norms of queries and of values past both products; in another place, or dropped, they are other functions."""
    function, shapes, _ = CASES["QKNorm"]
    labelled = labelled_of(function, arrays_of(shapes))
    reference = graph_of(labelled.results, labelled.axes, labelled.inputs)
    forms = reachable(labelled.results, 24)
    (x, *_) = (x for roots in forms for x in subterms(roots) if x.op == "attention" and len(x.args) > 3)
    q, k, v, a, b, c = x.args
    assert a.labels
    assert c.labels
    for i, factors in enumerate([(a, b, c), (a, c, b), (b, b, c), (a, b, b), (a, c, c), (b, c, b)]):
        graph = graph_of((attention(q, k, v, x.data, *factors),), labelled.axes, labelled.inputs)
        assert bool(check(reference, graph, seed=SEED)) == (not i), factors


def test_rules_are_used():
    used = set()
    for function, shapes, _ in CASES.values():
        for path in reachable(labelled_of(function, arrays_of(shapes)).results, 40).values():
            used |= {*path}
    assert used >= {*RULES} - {"quotient"}


def test_equal_terms_are_one_object():
    labelled = labelled_of(CASES["chain"][0], arrays_of(CASES["chain"][1]))
    (root,) = labelled.results
    assert dot(root.data, *root.args) is root
    assert rebuilt(root, root.args) is root
    assert len(subterms((root, root))) == 5


def test_operations_without_terms_are_not_searched():
    for function in (lambda x: np.cumsum(x, -1), lambda x: (x + 1).reshape(4, 3)):
        with pytest.raises(UnlabelledError):
            labelled_of(function, arrays_of([(2, 6)]))
    fused = pm.fuse(lambda x: np.cumsum(x + 1, -1), search=1)
    x = arrays_of([(2, 6)])
    np.testing.assert_allclose(fused(*x), fused.__wrapped__(*x))
    assert "not searched" in fused.explain(*x).notes[-1]


ONE = {
    "lora": ("lora", 2), "norm": ("norm", 2), "gated": ("gated", 2), "attention": ("attention", 2),
    "QKNorm": ("QKNorm", 2), "grouped": ("grouped", 2), "chain": ("chain", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_functions_are_one_kernel(name):
    """Norm and product, LoRA, a gated MLP, QKNorm and attention: one pass along a loop, and one that stores."""
    case, passes = ONE[name]
    function, shapes, _ = CASES[case]
    labelled = labelled_of(function, arrays_of(shapes))
    axes = labelled.inputs
    reference = graph_of(labelled.results, labelled.axes, axes)
    every = [
        k
        for form in reachable(labelled.results, 40)
        for k in one_kernels(form, labelled.axes, axes, labelled.extents, 1 << 20)
    ]
    least = min(every, key=lambda k: k.passes)
    assert least.passes == passes
    assert len(least.graph.steps) == 1
    verdict = check(reference, least.graph, seed=SEED)
    assert verdict, verdict
    assert not [*one_kernels(labelled.results, labelled.axes, axes, labelled.extents, 1)]  # nothing fits one byte
