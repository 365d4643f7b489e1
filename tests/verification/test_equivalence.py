"""Graphs that must be accepted, and graphs that must be rejected, by random tests over finite fields."""

from __future__ import annotations

import graphs_of as g
import numpy as np
import pytest

from portmm.ir.block_meaning import Reals
from portmm.ir.block_program import BlockProgram
from portmm.ir.graph_reader import from_json
from portmm.ir.mugraph import to_json
from portmm.verification.bounds import BITS
from portmm.verification.equivalence import check, evaluate, reduced

SEED = 11


class Unchecked(BlockProgram):
    """A record that a search could not make: without a check of what is rescaled."""

    def __post_init__(self):
        pass


def other_part():
    """LoRA by concatenation, in which a part of the joined label is taken for the other one, which is as long here."""
    data = to_json(g.concatenated_lora())
    (label, parts) = data["joined"][0]
    binding = next(x for y in data["steps"] for x in y["operands"] if x[2] is not None and x[2][2] == parts[0])
    binding[2] = (*binding[2][:2], parts[1])
    assert label == "c"
    return from_json(data)


SAME = {
    "a product": (g.product, g.one_product),
    "LoRA, concatenated": (g.lora, g.concatenated_lora),
    "LoRA, one kernel": (g.lora, g.lora_kernel),
    "norm after a product": (g.rms_linear, g.rms_kernel),
    "gated MLP": (g.gated, g.gated_kernel),
    "online softmax": (g.attention, g.flash),
    "online softmax without a maximum before": (lambda: g.attention(stable=False), g.flash),
    "causal": (lambda: g.attention(causal=True), lambda: g.flash(causal=True)),
    "grouped heads": (g.grouped, g.grouped_kernel),
    "split k": (g.whole_k, g.split_k),
    "whole k": (g.split_k, g.whole_k),
    "association": (lambda: g.chain(True), lambda: g.chain(False)),
    "QKNorm": (g.qk_norm, g.qk_norm),
}
DIFFERENT = {
    "QKNorm, as published": (g.qk_norm, g.published_qk_norm, {"b": 3, "m": 8, "d": 4, "n": 5, "e": 3}),
    "no rescale": (g.attention, lambda: g.flash(rescaled=False, program=Unchecked), None),
    "a sum that k is left in": (g.product, g.misplaced_sum, None),
    "a dropped tail": (g.attention, lambda: g.flash(tail=False), None),
    "a strict mask": (lambda: g.attention(causal=True, strict=True), lambda: g.flash(causal=True), None),
    "no mask": (lambda: g.attention(causal=True), g.flash, None),
    "a mean of other rows": (g.rms_linear, lambda: g.rms_kernel(1 / 32), None),
    "a sum in the place of squares": (g.rms_linear, lambda: g.rms_kernel(squared=False), None),
    "gates swapped": (g.gated, lambda: g.gated_kernel(swap=True), None),
    "another scale": (g.attention, lambda: g.flash(scale=0.5), None),
    "heads in another order": (g.grouped, lambda: g.grouped_kernel((1, 0)), None),
}


@pytest.mark.parametrize("name", SAME)
def test_accepted(name):
    reference, candidate = (make() for make in SAME[name])
    verdict = check(reference, candidate, seed=SEED)
    assert verdict, verdict
    assert verdict.bits >= BITS
    assert all(n >= 3 for _, n in verdict.extents)  # two tiles, of which the last is shorter


@pytest.mark.parametrize("name", DIFFERENT)
def test_rejected(name):
    one, other, extents = DIFFERENT[name]
    verdict = check(one(), other(), seed=SEED, extents=extents)
    assert not verdict
    assert "differs" in verdict.reason, verdict


def test_a_label_of_another_extent_elsewhere_is_told():
    """Where both labels are as long, as at extents of a caller's."""
    verdict = check(g.lora(), other_part(), seed=SEED, extents={"c": 8, "k": 4, "m": 5, "n": 3, "r": 4})
    assert "bound to" in verdict.reason, verdict
    small = reduced(g.lora(), other_part())
    assert len({small[x] for x in "kmnr"}) == 4


def test_the_extent_of_another_label_is_told():
    """A mask that takes the columns of values for the keys."""
    data = to_json(g.flash(causal=True))
    values = data["steps"][0]["values"]
    (place,) = [x for x in values if x[0] == "extent" and x[2] == ["n"]]
    place[2] = ["e"]
    assert not check(g.attention(causal=True), from_json(data), seed=SEED)


def test_a_seed_gives_the_same_verdict():
    one, other = check(g.attention(), g.flash(), seed=3), check(g.attention(), g.flash(), seed=3)
    assert one == other
    assert len(set(one.primes)) == one.tests
    assert check(g.attention(), g.flash()).seed != check(g.attention(), g.flash()).seed


@pytest.mark.parametrize(
    "make", [g.flash, g.concatenated_lora, g.grouped_kernel, g.qk_norm, lambda: g.flash(causal=True)]
)
def test_graphs_are_read_again(make):
    graph = make()
    assert from_json(to_json(graph)) == graph
    assert "kernel(" in str(graph)


class Floats(Reals):
    """float64, in which an element that is not written is NaN."""

    def __init__(self):
        super().__init__(np.float64)

    def empty(self, shape, _):
        return np.full(shape, np.nan)


@pytest.mark.parametrize("name", [x for x in SAME if x != "LoRA, concatenated"])
def test_what_is_accepted_is_the_same_in_floats(name):
    """A second opinion, tile by tile in float64."""
    reference, candidate = (make() for make in SAME[name])
    extents, rng = reduced(reference, candidate), np.random.default_rng(0)
    inputs = [rng.normal(size=[extents[x] for x in reference.tensors[i].axes]) for i in reference.inputs]
    one, other = (evaluate(x, inputs, Floats(), extents) for x in (reference, candidate))
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5, atol=1e-6)
