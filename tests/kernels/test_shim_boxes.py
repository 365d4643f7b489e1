"""Boxes of tensors in the shim: what they hold, maps that are wrong, stores, and fences between."""

from __future__ import annotations

import cuda_shim
import numpy as np
import pytest
from cuda_shim import ORDERS, ShimError, kernel, shim_map
from test_shim import broken
from test_shim_barriers import refused

pytestmark = pytest.mark.rest("of the shim itself")

# -- boxes --------------------------------------------------------------------------------------------

MOVE = """
extern "C" __global__ void move(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to,
                                int bytes, int x, int y, int z)
{
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  unsigned long *bar = (unsigned long *)(shared_bytes + 32768);
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    tma_prefetch(&from);
    mbarrier_expect(bar, bytes);
    tma_load(shared_bytes, &from, bar, x, y, z);
    mbarrier_wait(bar, 0);
    tma_store(&to, shared_bytes, 0, 0, 0);
    tma_store_commit();
    tma_store_read_0();
  }
}
"""


@pytest.mark.parametrize(
    ("dtype", "box", "swizzle"),
    [
        (np.float32, (32, 8, 1), 128), (np.uint16, (64, 16, 1), 128), (np.uint16, (32, 8, 2), 64),
        (np.uint8, (32, 8, 1), 32), (np.float32, (16, 3, 2), 0), (np.uint8, (128, 64, 1), 128),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [(0, 0, 0), (-3, -2, 0), (30, 5, 1)])
def test_boxes_are_zero_outside_and_clipped(dtype, box, swizzle, at):
    x = np.random.default_rng(6).integers(1, 200, (3, 9, 48)).astype(dtype)
    y = np.zeros(box[::-1], dtype)
    size = x.itemsize
    steps = (48 * size, 9 * 48 * size)
    first = shim_map(size, x.ctypes.data, (41, 9, 3), steps, box, swizzle)
    second = shim_map(size, y.ctypes.data, (box[0] - 1, *box[1:]), (box[0] * size, y[0].nbytes), box, swizzle)
    given = [("map", first, x), ("map", second, y), ("int", y.nbytes), *(("int", i) for i in at)]
    cuda_shim.compile(MOVE, "move").launch_in_orders((1, 1, 1), 32, given, shared=32768 + 8)
    want = np.zeros_like(y)
    for i in np.ndindex(y.shape):
        j = tuple(a + b for a, b in zip(i, at[::-1], strict=True))
        if i[2] < box[0] - 1 and all(0 <= a < b for a, b in zip(j, (3, 9, 41), strict=True)):
            want[i] = x[j]
    np.testing.assert_array_equal(y, want)


def test_a_swizzle_moves_pieces_of_16_bytes():
    x = np.arange(16 * 32, dtype=np.uint32).reshape(16, 32)
    y = np.zeros_like(x)
    body = """unsigned long *bar = (unsigned long *)(s + 2048);
if (t == 0) { mbarrier_init(bar, 1); mbarrier_init_fence(); mbarrier_expect(bar, 2048);
tma_load(s, &map, bar, 0, 0, 0); }
__syncthreads(); mbarrier_wait(bar, 0);
for (int i = t; i < 512; i += 32) y[i] = ((unsigned *)s)[i];"""
    made = kernel(body, "const __grid_constant__ TensorMap map, unsigned *y", "SHARED_BYTES(s);")
    for swizzle, box in ((128, 32), (64, 16), (32, 8)):
        given = (
            "map",
            shim_map(4, x.ctypes.data, (box, 512 // box, 1), (4 * box, 2048), (box, 512 // box, 1), swizzle),
            x,
        )
        made.launch_in_orders((1, 1, 1), 32, [given, y], shared=2056)
        # Manual: of an address, bits 4 to 6 (5, 4) are changed by bits 7 to 9 (8, 7).
        address = np.arange(0, 2048, 4)
        moved = address ^ (address >> 7 & (swizzle // 16 - 1)) << 4
        np.testing.assert_array_equal(y.ravel(), moved // 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype_bytes": 3}, "elements have 1, 2, 4 or 8 bytes, not 3"),
        ({"address": 8}, "the address 0x8 is no multiple of 16"),
        ({"sizes": (32, 0, 1)}, r"sizes are from 1 to 2\*\*32, not \(32, 0, 1\)"),
        ({"strides": (120, 128)}, r"strides are multiples of 16 below 2\*\*40, not \(120, 128\)"),
        ({"strides": (128, 1 << 40)}, "strides are multiples of 16"),
        ({"box": (32, 257, 1)}, "a box has 1 to 256 elements along each dimension"),
        ({"box": (7, 8, 1), "swizzle": 0}, "a row of a box is a multiple of 16 bytes, not 28"),
        ({"swizzle": 16}, "a swizzle is of 0, 32, 64 or 128 bytes, not 16"),
        ({"swizzle": 64}, "a row of a box has at most the 64 bytes of the swizzle, not 128"),
    ],
)
def test_maps_that_the_driver_refuses(change, message):
    good = {
        "dtype_bytes": 4, "address": 4096, "sizes": (32, 9, 1), "strides": (128, 1152), "box": (32, 8, 1),
        "swizzle": 128,
    }  # fmt: skip
    assert len(shim_map(**good)) == 128
    with pytest.raises(ValueError, match=message):
        shim_map(**good | change)


def moved(source, swizzle=128, *, shared=32768 + 8, change=np.copy):
    x, y = np.ones((16, 32), np.float32), np.zeros((16, 32), np.float32)
    words = np.frombuffer(shim_map(4, x.ctypes.data, (32, 16, 1), (128, 2048), (32, 16, 1), swizzle), np.uint64).copy()
    change(words)
    second = shim_map(4, y.ctypes.data, (32, 16, 1), (128, 2048), (32, 16, 1), swizzle)
    given = [("map", words.tobytes(), x), ("map", second, y), ("int", 2048), *[("int", 0)] * 3]
    cuda_shim.compile(source, "move").launch_in_orders((1, 1, 1), 32, given, shared=shared)
    return y


def put(at, value):
    return lambda words: words.__setitem__(at, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(14, 0), "tma_prefetch on line 10: the TensorMap has no TensorMap"),
        (put(9, 64), "the TensorMap has rows of a box that are longer than the swizzle"),
        (put(9, 16), "rows of a box are shorter than the swizzle"),
        (put(6, 8), "the TensorMap has a stride that is no multiple of 16"),
    ],
)
def test_maps_are_checked_where_they_are_used(change, message):
    with pytest.raises(ShimError, match=message):
        moved(MOVE, change=change)


def test_a_map_beyond_its_array():
    with pytest.raises(ShimError, match=r"out of bounds: thread 0 touches .*, 0 bytes after argument 0, on line 12"):
        moved(broken(MOVE, ("&from, bar, x", "&from, bar, 0, 16, 0); (void)(x")), change=put(3, 64))


STORE_BROKEN = {
    "a swizzled box off its place": (
        [("shared_bytes, &from", "shared_bytes + 128, &from")],
        "tma_load on line 12: the shared address is no multiple of 1024, after which the swizzle repeats",
    ),
    "no wait for the load": (
        [("mbarrier_wait(bar, 0);", "")],
        "thread 0 stores byte 0 of dynamic shared memory, which a tma_load still fills",
    ),
    "no fence": (
        [("mbarrier_wait(bar, 0);", "mbarrier_wait(bar, 0); shared_bytes[5] = 1;")],
        "thread 0 stores byte 5 of dynamic shared memory, which thread 0 wrote with no fence_async_shared between",
    ),
    "no wait for the read": (
        [("tma_store_read_0();", "")],
        "thread 0 ends while the tma_store on line 14 may still read shared memory: tma_store_read comes first",
    ),
    "a wait for one store too few": (
        [("tma_store_read_0();", "tma_store_read_1();")],
        "thread 0 ends while the tma_store on line 14 may still read shared memory",
    ),
    "no commit": (
        [("tma_store_commit();", "")],
        "the tma_store on line 14 may still read shared memory, and tma_store_commit did not follow",
    ),
    "a write before it was read": (
        [("tma_store_read_0();", "shared_bytes[7] = 1; tma_store_read_0();")],
        "writes byte 7 of dynamic shared memory, which a tma_store may still read: tma_store_read comes first",
    ),
    "an end before the load": (
        [("mbarrier_wait(bar, 0);", "return;")],
        "the kernel ends while the tma_load on line 12 is in flight",
    ),
}


@pytest.mark.parametrize("name", STORE_BROKEN)
def test_broken_moves(name):
    changes, message = STORE_BROKEN[name]
    with pytest.raises(ShimError, match=message):
        moved(broken(MOVE, *changes))


def test_a_fence_makes_writes_known():
    source = broken(
        MOVE, ("mbarrier_wait(bar, 0);", "mbarrier_wait(bar, 0); shared_bytes[4] = 2; fence_async_shared();")
    )
    assert moved(source).view(np.uint8).ravel()[4] == 2


def test_a_thread_stores_what_others_wrote():
    body = """float *s = (float *)bytes;
for (int i = t; i < 512; i += 64) s[i] = i;
fence_async_shared();  // written
__syncthreads();  // together
if (t == 0) { tma_store(&map, s, 0, 0, 0); tma_store_commit(); tma_store_read_0(); }
__syncthreads();
s[t] = 0;"""
    y = np.zeros(512, np.float32)

    def run(*changes, seeds=ORDERS):
        given = ("map", shim_map(4, y.ctypes.data, (32, 16, 1), (128, 2048), (32, 16, 1)), y)
        made = kernel(broken(body, *changes), "const __grid_constant__ TensorMap map", "SHARED_BYTES(bytes);")
        made.launch_in_orders((1, 1, 1), 64, [given], seeds, 2048)

    run()
    np.testing.assert_array_equal(y, np.arange(512))
    for change, message in (
        (
            ("fence_async_shared();  // written", ""),
            "stores byte 0 .*, which thread 0 wrote with no fence_async_shared",
        ),
        (("__syncthreads();  // together", ""), "thread 0 stores byte .*, which thread .* wrote with no barrier"),
        (
            ("__syncthreads();\ns[t] = 0;", "s[t] = 0;"),
            "thread .* writes byte .*, which (a tma_store may|thread 0 read)",
        ),
    ):
        refused(lambda seeds, change=change: run(change, seeds=seeds), message)


# -- asynchronous copies, beside mbarriers -----------------------------------------------------------


def test_copies_of_threads_need_a_fence_too():
    body = """copy_async_16(s + 4 * t, x + 4 * t, 16); copy_async_commit();
copy_async_wait_0();  // come
fence_async_shared();  // known
__syncthreads();
if (t == 0) { tma_store(&map, s, 0, 0, 0); tma_store_commit(); tma_store_wait_0(); }"""
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)

    def run(*changes):
        given = ("map", shim_map(4, y.ctypes.data, (32, 4, 1), (128, 512), (32, 4, 1)), y)
        text, shared = (
            "const __grid_constant__ TensorMap map, const float *x",
            "__shared__ __align__(128) float s[128];",
        )
        kernel(broken(body, *changes), text, shared).launch_in_orders((1, 1, 1), 32, [given, x])

    run()
    np.testing.assert_array_equal(y, x)
    with pytest.raises(ShimError, match="which a copy_async still fills"):
        run(("copy_async_wait_0();  // come", ""))
    with pytest.raises(ShimError, match="with no fence_async_shared between"):
        run(("fence_async_shared();  // known", ""))
