"""Pipelines of warpgroups with one thing wrong, made from right ones: the shim must see it."""

from __future__ import annotations

from dataclasses import replace

import cuda_shim
import grid_cases
import pytest
from cuda_shim import ShimError
from grid_cases import call, in_shim, kernels_of
from test_grid_broken import changed
from test_wgmma import BY_K, COOPERATIVE, HOPPER, posed, schedule

from portmm.dispatch.machine import source
from portmm.ir.index import const
from portmm.ir.thread_nodes import Do, Get
from portmm.schedule.text import varied

pytestmark = pytest.mark.rest("of the shim itself")

SIZE = (130, 70, 400)
SENT = schedule("bf16", BY_K, 64, 64)
LONG = schedule("bf16", BY_K, 64, 192)
TURNS = schedule("bf16", BY_K, 64, 32, 2, pingpong=True)
PAIR = varied(COOPERATIVE, cluster=2)


def without(name, which=0):
    """A kernel that lacks a call, the `which`-th of its kind; all of them if that is None."""
    seen = []

    def change(x):
        if not (isinstance(x, Do) and x.name == name):
            return (x,)
        seen.append(x)
        return () if which in (None, len(seen) - 1) else (x,)

    return change


def other(name, at, value, which=0):
    """A kernel whose call is given something else."""
    seen = []

    def change(x):
        if not (isinstance(x, Do | Get) and getattr(x, "primitive", getattr(x, "name", "")) == name):
            return (x,)
        seen.append(x)
        if len(seen) - 1 != which:
            return (x,)
        args = list(x.args)
        args[at] = value(args[at])
        return (replace(x, args=tuple(args)),)

    return change


def later(x):
    return const(1) - x


CASES = {
    "full is not waited for": (COOPERATIVE, without("mbarrier_wait", 1)),
    "empty is not waited for": (COOPERATIVE, without("mbarrier_wait", 0)),
    "the other phase of full": (COOPERATIVE, other("mbarrier_wait", 1, later, 1)),
    "the other phase of empty": (COOPERATIVE, other("mbarrier_wait", 1, later, 0)),
    "nobody gives stages back": (COOPERATIVE, without("mbarrier_arrive", None)),
    "fewer bytes than land": (COOPERATIVE, other("mbarrier_expect", 1, lambda x: x - 16)),
    "no fence before products": (COOPERATIVE, without("wgmma_fence", None)),
    "products are not committed": (COOPERATIVE, without("wgmma_commit", None)),
    "a stage is given back too soon": (COOPERATIVE, without("wgmma_wait_1", None)),
    "sums are read too soon": (COOPERATIVE, without("wgmma_wait_0", None)),
    "eight lines that are nearer": (COOPERATIVE, other("matrix_descriptor", 2, lambda x: x // 2)),
    "barriers that others may not see": (COOPERATIVE, without("mbarrier_init_fence")),
    "results that the copy engine may not see": (SENT, without("fence_async_shared", None)),
    "results are sent before all are there": (SENT, without("block_barrier_sync", None)),
    "a buffer is filled before it is read": (LONG, without("tma_store_read_1", None)),
    "a block ends before its results are read": (SENT, without("tma_store_read_0", None)),
    "no turns": (TURNS, other("mbarrier_wait", 1, later, 2)),
    "blocks of a cluster do not wait for each other": (PAIR, without("cluster_sync", None)),
    "stages are given back to one block": (PAIR, other("mbarrier_arrive_at", 1, lambda _: const(0))),
}


def outcome(s, change):
    """The shim's complaint about a changed kernel, or that its result is wrong, or an empty string."""
    (kernel,) = kernels_of(s, HOPPER)
    kernel = replace(kernel, body=changed(kernel.body, change))
    p = posed(s.dtype, BY_K, SIZE)
    k = grid_cases.case(p, (*s.vectors[:2], 8), 0)
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


@pytest.mark.parametrize("name", CASES)
def test_the_shim_catches(name):
    s, change = CASES[name]
    assert outcome(s, change), "nothing was noticed"


@pytest.mark.parametrize(
    "s", [COOPERATIVE, SENT, LONG, TURNS, PAIR], ids=["cooperative", "sent", "long", "turns", "pair"]
)
def test_what_is_whole_passes(s):
    assert outcome(s, lambda x: (x,)) == ""
