"""Barriers in the shim, in shared memory and named ones: pipelines that are right, and broken ones."""

from __future__ import annotations

import functools
import re

import cuda_shim
import numpy as np
import pytest
from cuda_shim import IN_ORDER, ORDERS, ShimError, kernel, shim_map
from test_shim import broken

pytestmark = pytest.mark.rest("of the shim itself")

# -- a pipeline of boxes: one warp loads, two warps add up columns ------------------------------------

SUMS = """
extern "C" __global__ void sums(const __grid_constant__ TensorMap x_map, float *y, int steps)
{
  SHARED_BYTES(bytes);
  unsigned long *full = (unsigned long *)(bytes + 8192), *empty = full + 2;
  const int t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < 2; i++) {
      mbarrier_init(full + i, 1);
      mbarrier_init(empty + i, 64);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // made
  if (t >= 64) {
    if (t == 64)
      for (int i = 0; i < steps; i++) {
        mbarrier_wait(empty + i % 2, (i / 2 + 1) % 2);  // used
        mbarrier_expect(full + i % 2, 4096);
        tma_load(bytes + i % 2 * 4096, &x_map, full + i % 2, 0, 32 * i, 0);
      }
  } else {
    float sum = 0;
    for (int i = 0; i < steps; i++) {
      const float *tile = (const float *)(bytes + i % 2 * 4096);
      mbarrier_wait(full + i % 2, i / 2 % 2);  // filled
      for (int j = t / 32; j < 32; j += 2) sum += tile[j * 32 + t % 32];
      mbarrier_arrive(empty + i % 2);  // read
    }
    y[t] = sum;
  }
}
"""


def refused(run, message):
    """Some order of threads is refused with a message; what others say may come of the same mistake."""
    said = []
    for seed in ORDERS:
        try:
            run((seed,))
        except ShimError as error:
            said.append(str(error))
    assert any(re.search(message, x) for x in said), said


def sums(source, steps=5, seeds=ORDERS):
    x = np.random.default_rng(0).integers(-9, 10, (32 * steps, 32)).astype(np.float32)
    y = np.zeros((2, 32), np.float32)
    given = ("map", shim_map(4, x.ctypes.data, (32, 32 * steps, 1), (128, 128), (32, 32, 1)), x)
    made = cuda_shim.compile(source, "sums")
    made.launch_in_orders((1, 1, 1), 96, [given, y, ("int", steps)], seeds, 8192 + 32)
    return y.sum(0), x.sum(0)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_pipeline(steps):
    got, want = sums(SUMS, steps)
    np.testing.assert_array_equal(got, want)


def test_one_lane_may_arrive_for_its_warp():
    source = broken(
        SUMS,
        ("mbarrier_init(empty + i, 64)", "mbarrier_init(empty + i, 2)"),
        ("mbarrier_arrive(empty + i % 2);  // read", "__syncwarp(); if (t % 32 == 0) mbarrier_arrive(empty + i % 2);"),
    )
    got, want = sums(source)
    np.testing.assert_array_equal(got, want)


BROKEN = {
    "no wait for data": (
        [("mbarrier_wait(full + i % 2, i / 2 % 2);  // filled", "")],
        r"race in shared memory: thread \d+ reads byte \d+ of dynamic shared memory, which a tma_load still fills",
    ),
    "the other parity of data": (
        [("mbarrier_wait(full + i % 2, i / 2 % 2)", "mbarrier_wait(full + i % 2, (i / 2 + 1) % 2)")],
        "which a tma_load still fills",
    ),
    "data of another stage": (
        [("mbarrier_wait(full + i % 2, i / 2 % 2)", "mbarrier_wait(full, i / 2 % 2)")],
        r"a tma_load still fills|a tma_load filled, with no wait for its mbarrier between|deadlock",
    ),
    "no wait for room": (
        [("mbarrier_wait(empty + i % 2, (i / 2 + 1) % 2);  // used", "")],
        "mbarrier_expect on line 19: more than 1 arrivals at the mbarrier at byte 8192",
    ),
    "the other parity of room": (
        [("mbarrier_wait(empty + i % 2, (i / 2 + 1) % 2)", "mbarrier_wait(empty + i % 2, i / 2 % 2)")],
        "mbarrier_wait on line 18 for parity 0 of the mbarrier at byte 8208 .*, whose phase 0 lacks 64 arrivals and 0",
    ),
    "an arrival too early": (
        [
            ("mbarrier_arrive(empty + i % 2);  // read", ""),
            (
                "for (int j = t / 32; j < 32; j += 2)",
                "mbarrier_arrive(empty + i % 2); for (int j = t / 32; j < 32; j += 2)",
            ),
        ],
        r"loads into byte \d+ of dynamic shared memory, which (thread|threads)",
    ),
    "no arrivals": (
        [("mbarrier_arrive(empty + i % 2);  // read", "")],
        "deadlock: thread .* lacks 64 arrivals and 0 bytes",
    ),
    "too many arrivals": (
        [("mbarrier_init(empty + i, 64)", "mbarrier_init(empty + i, 1)")],
        "deadlock: .* waits in mbarrier_wait on line 18 .*, whose phase 64 lacks 1 arrivals and 0 bytes",
    ),
    "one lane arrives, without its warp": (
        [
            ("mbarrier_init(empty + i, 64)", "mbarrier_init(empty + i, 2)"),
            ("mbarrier_arrive(empty + i % 2);  // read", "if (t % 32 == 0) mbarrier_arrive(empty + i % 2);"),
        ],
        r"loads into byte \d+ of dynamic shared memory, which thread",
    ),
    "fewer bytes than expected": (
        [("mbarrier_expect(full + i % 2, 4096)", "mbarrier_expect(full + i % 2, 8192)")],
        r"deadlock: .*whose phase 0 lacks 0 arrivals and 4096 bytes",
    ),
    "more bytes than expected": (
        [("mbarrier_expect(full + i % 2, 4096)", "mbarrier_expect(full + i % 2, 2048)")],
        "2048 bytes more than expected have come to the mbarrier at byte .* in phase 0, with the tma_load on line 20",
    ),
    "no bytes expected": (
        [("mbarrier_expect(full + i % 2, 4096)", "mbarrier_arrive(full + i % 2)")],
        "reads byte .* of dynamic shared memory, which a tma_load still fills",
    ),
    "no barrier after init": (
        [("__syncthreads();  // made", "")],
        "(thread 0 made the mbarrier at byte .*, with no barrier between|holds no mbarrier: mbarrier_init comes first)",
    ),
    "no init": (
        [("mbarrier_init(full + i, 1);", "")],
        "mbarrier_(wait|expect) on line .*: byte .* holds no mbarrier: mbarrier_init comes first",
    ),
    "no fence after init": (
        [("mbarrier_init_fence();", "")],
        "tma_load on line 20: no mbarrier_init_fence follows mbarrier_init of the mbarrier at byte 8192",
    ),
    "made twice": (
        [("mbarrier_init_fence();", "mbarrier_init(full, 1);")],
        "mbarrier_init on line 12: byte 8192 of dynamic shared memory holds an mbarrier already",
    ),
    "no parity": ([("i / 2 % 2);  // filled", "i / 2 % 2 + 2);")], "mbarrier_wait on line 26: 2 is no parity"),
    "a box off its place": (
        [("tma_load(bytes + i % 2 * 4096", "tma_load(bytes + i % 2 * 4096 + 64")],
        "tma_load on line 20: the shared address is no multiple of 128",
    ),
    "a box beyond the end": (
        [("tma_load(bytes + i % 2 * 4096", "tma_load(bytes + i % 2 * 4096 + 4224")],
        "thread 64 touches 4096 bytes at byte 4224|byte 8192 of .* belongs|which has 8224|belongs to an mbarrier",
    ),
    "a barrier off its place": (
        [("mbarrier_wait(empty + i % 2, (", "mbarrier_wait((unsigned long *)(bytes + 8196), (")],
        "mbarrier_wait on line 18: the address of an mbarrier is misaligned",
    ),
    "an ordinary access to a barrier": (
        [("y[t] = sum;", "y[t] = sum + *(int *)full;")],
        "thread .* reads byte 8192 of dynamic shared memory, which belongs to an mbarrier",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pipeline(name):
    changes, message = BROKEN[name]
    refused(lambda seeds: sums(broken(SUMS, *changes), seeds=seeds), message)


# -- named barriers ---------------------------------------------------------------------------------

NAMED = """if (t < 64) { s[t] = x[t]; block_barrier_arrive(1, 128); }
else { block_barrier_sync(1, 128); x[t] = s[127 - t]; }"""


@functools.cache
def _named(body):
    return kernel(body, "float *x", "__shared__ float s[128];")


def test_named_barriers_order_those_who_take_part():
    x = np.arange(128, dtype=np.float32)
    _named(NAMED).launch_in_orders((1, 1, 1), 128, [x])
    np.testing.assert_array_equal(x, [*range(64), *range(63, -1, -1)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("arrive(1, 128)", "arrive(1, 64)")], "barrier 1 waits for 64 threads in thread .*, and for 128 in"),
        (
            [("arrive(1, 128)", "arrive(2, 128)")],
            "deadlock: thread 64 waits in block_barrier_sync on line 3 for named barrier 1, to which 64 of 128 threads",
        ),
        ([("arrive(1, 128)", "arrive(1, 32)"), ("sync(1, 128)", "sync(1, 32)")], "race in shared memory"),
        ([("arrive(1, 128)", "arrive(1, 160)")], "160 threads are no whole warps of this block, which has 128 threads"),
        ([("arrive(1, 128)", "arrive(1, 100)")], "100 threads are no whole warps"),
        ([("arrive(1, 128)", "arrive(16, 128)")], "16 is no named barrier from 1 to 15"),
        ([("s[t] = x[t]; block_barrier_arrive(1, 128);", "block_barrier_arrive(1, 128); s[t] = x[t];")], "race in"),
        ([("if (t < 64)", "if (t % 2)"), ("arrive(1, 128)", "arrive(1, 64)"), ("sync(1, 128)", "sync(1, 64)")],
         "threads of a warp have come, not all|waits for|race"),
    ],
)  # fmt: skip
def test_named_barriers_with_wrong_counts(changes, message):
    made = _named(broken(NAMED, *changes))
    refused(lambda seeds: made.launch_in_orders((1, 1, 1), 128, [np.zeros(128, np.float32)], seeds), message)


# -- tickets ---


def test_a_ticket_counts_blocks():
    x = np.zeros(8, np.int32)
    body = "if (t == 0) { memory_fence(); x[1 + atomic_ticket(x)] = 1; }"
    kernel(body, "int *x").launch_in_orders((7, 1, 1), 32, [x])
    np.testing.assert_array_equal(x, [7, *[1] * 7])
    with pytest.raises(ShimError, match="atomic_ticket on line 2: the counter is not in global memory"):
        kernel("atomic_ticket(s);", "int *x", "__shared__ int s[1];").launch((1, 1, 1), 1, [x], IN_ORDER)
