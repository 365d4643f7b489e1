"""Kernels of tensor cores with one thing wrong, made from right ones: the shim must see it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import cuda_shim
import grid_cases
import pytest
from cuda_shim import ShimError
from grid_cases import call, in_shim, kernels_of
from test_grid_broken import _plain, changed, impatient, without
from test_mma import BY_K, MATRIX, ROWS, TURING, posed, schedules

from portmm.dispatch.machine import source
from portmm.ir.nodes import Mac
from portmm.ir.thread_nodes import Barrier, CopyCommit, CopyWait, Do

pytestmark = pytest.mark.rest("of the shim itself")

SIZE = (40, 40, 200)


def loads(change):
    """Change where fragments are loaded from."""
    return lambda x: (change(x),) if isinstance(x, Do) and x.name.startswith("ldmatrix") else (x,)


def straight(x):
    """Without the exchange of pieces."""
    to, src = x.args
    return replace(x, args=(to, replace(src, offset=_plain(src.offset))))


def transposed(x):
    return replace(x, name=x.name.replace("_x", "_trans_x"))


def sides(x):
    """The atom's operands exchanged."""
    return (replace(x, a=x.b, b=x.a),) if isinstance(x, Mac) else (x,)


def one(layouts=BY_K, target=MATRIX, **wanted):
    found = schedules("f16", layouts, (8, 8, 8), target, 16)
    return next(s for s in found if all(getattr(s, x) == y for x, y in wanted.items()) and s.threads > 64)


def outcome(s, change, target):
    """The shim's complaint about a changed kernel, or that its result is wrong, or an empty string."""
    (kernel,) = kernels_of(s, target)
    kernel = replace(kernel, body=changed(kernel.body, change))
    k = grid_cases.case(posed("f16", (s.a.layout, s.b.layout, "row"), s.vectors, SIZE), s.vectors)
    code = cuda_shim.compile(source(kernel, "cuda"), kernel.name)
    try:
        found = in_shim(call([kernel], s, k), [code])
    except ShimError as error:
        return str(error)
    try:
        k.check(found[0])
    except AssertionError:
        return "wrong"
    return ""


COPIES, FETCHED, LINES = one(stages=3), one(target=TURING), one(ROWS, stages=4)
CASES = {
    "copies without the first barrier": (COPIES, partial(without, Barrier, 0), "a copy_async still fills|race"),
    "copies without a barrier between steps": (COPIES, partial(without, Barrier, 1), "a copy_async still fills|race"),
    "results over tiles that others read": (FETCHED, partial(without, Barrier, 1), "race"),
    "results moved before all are there": (COPIES, partial(without, Barrier, 2), "race"),
    "one group of copies too few": (COPIES, lambda: impatient, "a copy_async still fills"),
    "no wait for copies": (COPIES, partial(without, CopyWait), "a copy_async still fills"),
    "groups are not closed": (LINES, partial(without, CopyCommit), "a copy_async still fills"),
    "fetched tiles are used without a barrier": (FETCHED, partial(without, Barrier, 0), "race"),
    "pieces are not exchanged": (COPIES, lambda: loads(straight), "wrong"),
    "fragments are transposed": (COPIES, lambda: loads(transposed), "wrong"),
    "operands change sides": (COPIES, lambda: sides, "wrong|out of bounds"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_shim_catches(name):
    s, change, said = CASES[name]
    found = outcome(s, change(), MATRIX if s.a.asynchronous else TURING)
    assert any(x in found for x in said.split("|")), found


@pytest.mark.parametrize("s", [COPIES, FETCHED, LINES], ids=["copies", "fetched", "lines"])
def test_what_is_whole_passes(s):
    assert outcome(s, lambda x: (x,), MATRIX if s.a.asynchronous else TURING) == ""
