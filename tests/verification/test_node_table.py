"""Tables of nodes as expressions: sums of many products are one, and those that something else uses are not."""

from __future__ import annotations

import numpy as np
import pytest

from portmm.verification.batches import evaluate_all
from portmm.verification.equivalence import fields
from portmm.verification.node_table import CHAIN, OPERATIONS, replayed
from portmm.verification.symbolic import element
from portmm.verification.values import Residues

COUNT = 2 * CHAIN


def table(count):
    """A table of 0.0, two elements for each product, and the sums of 1 to `count` products."""
    rows = [("real", 0, 0, 0)] + [("element", 0, i, 0) for i in range(2 * count)]
    for i in range(count):
        rows.append(("fma", 1 + 2 * i, 2 + 2 * i, len(rows) - 1 if i else 0))
    return np.array([(OPERATIONS.index(x), *of) for x, *of in rows], np.uint32)


@pytest.mark.parametrize("wanted", [[COUNT], [COUNT, COUNT // 2], [COUNT, COUNT - 1, 1]])
def test_sums_of_many_products(wanted):
    nodes = [2 * COUNT + i for i in wanted]
    known = replayed(table(COUNT), nodes, frozenset())
    every = [known[i] for i in nodes]
    lengths = [(b - a) for a, b in zip([0, *sorted(wanted)], sorted(wanted), strict=False)]
    assert [x.op for x in every] == ["chain" if n >= CHAIN else "fma" for n in reversed(lengths)]
    numbers = Residues(fields(5, 4))
    x = numbers.drawn((2 * COUNT, 1), "input 0")
    row = type(x).of(y[:, 0] for y in x.parts())
    leaves = {element(0, i): (row, i) for i in range(2 * COUNT)}
    got = evaluate_all(every, leaves, numbers)
    for at, count in enumerate(wanted):
        for test, p in enumerate(numbers.field.p.tolist()):
            v = x.p[:, 0, test].tolist()
            assert got.p[at, test] == sum(v[2 * i] * v[2 * i + 1] for i in range(count)) % p


def test_sums_of_few_products_are_as_they_are():
    known = replayed(table(CHAIN - 1), [2 * CHAIN + CHAIN - 3], frozenset())
    assert {x.op for x in known.values()} == {"const", "element", "fma"}
