"""Products of warpgroups and clusters in the shim: layouts of operands, pipelines that are right, and broken ones."""

from __future__ import annotations

import cuda_shim
import numpy as np
import pytest
from cuda_shim import ORDERS, ShimError, kernel, shim_map
from test_shim import broken
from test_shim_barriers import refused
from test_shim_matrix import U16, bf16, codes

pytestmark = pytest.mark.rest("of the shim itself")

SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}


# -- layouts: an image of shared memory, made of the manual's canonical layouts -----------------------------


def swizzled(address, swizzle):
    """Bits 4 to 6 (5, 4) change by bits 7 to 9 (8, 7)."""
    return address ^ ((address >> 7 & (swizzle // 16 - 1)) << 4) if swizzle else address


def place(row, k, size, swizzle, stride, leading):  # noqa: PLR0917 - a layout
    """The byte of an element of a matrix whose rows lie along k."""
    at = k * size
    if not swizzle:
        return row % 8 * 16 + row // 8 * stride + at // 16 * leading + at % 16
    return swizzled(row % 8 * swizzle + row // 8 * stride + at, swizzle)


def place_turned(x, k, size, swizzle, stride, leading):  # noqa: PLR0917 - a layout
    """The byte of an element of a matrix whose rows lie along m or n: x along the row."""
    if not swizzle:
        return x // 8 * stride + k % 8 * 16 + k // 8 * leading + x % 8 * size
    per = swizzle // size
    return swizzled(x // per * leading + x % per * size + k % 8 * swizzle + k // 8 * stride, swizzle)


def image(x, lies, swizzle):
    """Bytes of a matrix (m or n, k) as an operand, and what its descriptor says of them."""
    size, (rows, depth) = x.itemsize, x.shape
    if lies == "k":
        stride, leading = (8 * swizzle, 0) if swizzle else (depth * size * 8, 128)
        at = [[place(r, k, size, swizzle, stride, leading) for k in range(depth)] for r in range(rows)]
    else:
        per = swizzle // size if swizzle else 8
        # A strip of rows along k, and strips behind one another; without a swizzle groups of 8 x 8.
        leading, stride = (depth * swizzle, 8 * swizzle) if swizzle else (128 * -(-rows // per), 128)
        at = [[place_turned(r, k, size, swizzle, stride, leading) for k in range(depth)] for r in range(rows)]
    at = np.array(at)
    out = np.zeros(-(-(at.max() + size) // 1024) * 1024, np.uint8)
    for i in np.ndindex(x.shape):
        out[at[i] : at[i] + size] = np.frombuffer(x[i].tobytes(), np.uint8)
    return out, SWIZZLES[swizzle] << 62 | (stride >> 4) << 32 | (leading >> 4) << 16


def of_d(n):
    """Rows and columns of the accumulators of 128 threads."""
    thread, r = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    return thread // 32 * 16 + thread % 32 // 4 + 8 * (r // 2 % 2), r // 4 * 8 + thread % 4 * 2 + r % 2


def stored(x, word):
    return {"bf16": bf16, "f16": lambda y: y.astype(np.float16).view(U16), "tf32": np.float32}[word](x)


def operands(words, n, depth):
    rng = np.random.default_rng(n)
    found = []
    for word, rows in zip(words, (64, n), strict=True):
        if word in ("s8", "u8"):
            x = rng.integers(*((0, 256) if word == "u8" else (-128, 128)), (rows, depth))
            found += [x.astype(np.uint8 if word == "u8" else np.int8), x]
            continue
        x = rng.integers(-8, 9, (rows, depth)).astype(np.float32) / 4
        raw = codes(x, word) if word.startswith("e") else stored(x, word)
        found += [raw, x]
    return found


def multiplied(name, words, n, k, lies, swizzle, *, steps=1, keep=True, seeds=(1,)):  # noqa: PLR0917 - a case
    """One or several products after one another; a step along k moves the start address by 32 bytes."""
    raw_a, a, raw_b, b = operands(words, n, k * steps)
    kind, held = ("int", np.int32) if "8s8" in name else ("float", np.float32)
    images = [image(raw_a, lies[0].replace("m", "mn"), swizzle), image(raw_b, lies[1].replace("n", "mn"), swizzle)]
    at_b = images[0][0].size
    memory = np.concatenate([x for x, _ in images])
    d = np.random.default_rng(7).integers(-9, 10, (128, n // 2)).astype(held)
    before = d.copy()
    body = f"""{kind} r[{n // 2}];
for (int i = 0; i < {n // 2}; i++) r[i] = d[t * {n // 2} + i];
for (int i = t; i < bytes; i += 128) s[i] = x[i];
fence_async_shared();
__syncthreads();
wgmma_fence();
for (int i = 0; i < {steps}; i++) {{
  const unsigned long a = high_a | (shared_address(s) + 32 * i) >> 4;
  const unsigned long b = high_b | (shared_address(s + {at_b}) + 32 * i) >> 4;
  {name}(r, a, b, {int(keep)} | i);
}}
wgmma_commit();
wgmma_wait_0();
for (int i = 0; i < {n // 2}; i++) d[t * {n // 2} + i] = r[i];"""
    arguments = f"int bytes, const unsigned char *x, {kind} *d, long high_a, long high_b"
    made = kernel(body, arguments, "SHARED_BYTES(s);")
    highs = [("long", y - (1 << 64) if y >> 63 else y) for _, y in images]
    made.launch_in_orders((1, 1, 1), 128, [("int", memory.size), memory, d, *highs], seeds, shared=memory.size)
    rows, columns = of_d(n)
    want = (a @ b.T).astype(held)[rows, columns]
    np.testing.assert_array_equal(d, want + before if keep else want)


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("lies", ["kk", "kn", "mk", "mn"])
def test_layouts(lies, swizzle):
    multiplied(f"wgmma_m64n64k16_bf16_{lies}", ("bf16", "bf16"), 64, 16, lies, swizzle)


@pytest.mark.parametrize(
    ("word", "words", "n", "k"),
    [
        ("bf16", ("bf16", "bf16"), 256, 16), ("f16", ("f16", "f16"), 8, 16), ("tf32", ("tf32", "tf32"), 24, 8),
        ("e4m3", ("e4m3", "e4m3"), 40, 32), ("e5m2", ("e5m2", "e5m2"), 16, 32), ("e4m3e5m2", ("e4m3", "e5m2"), 32, 32),
        ("e5m2e4m3", ("e5m2", "e4m3"), 8, 32), ("s8s8", ("s8", "s8"), 48, 32), ("u8s8", ("u8", "s8"), 256, 32),
    ],
)  # fmt: skip
def test_types(word, words, n, k):
    multiplied(f"wgmma_m64n{n}k{k}_{word}_kk", words, n, k, "kk", 128, steps=4, keep=n == 8, seeds=ORDERS[:1])


@pytest.mark.parametrize("lies", ["k", "n"])
def test_a_from_registers(lies):
    a, b = (np.random.default_rng(i).integers(-8, 9, (64, 16)).astype(np.float32) for i in range(2))
    memory, high = image(bf16(b), lies.replace("n", "mn"), 128)
    thread, e = np.meshgrid(np.arange(128), np.arange(8), indexing="ij")
    rows, ks = thread // 32 * 16 + thread % 32 // 4 + 8 * (e // 2 % 2), thread % 4 * 2 + e % 2 + e // 4 * 8
    registers = np.ascontiguousarray(bf16(a)[rows, ks]).view(np.uint32)
    d = np.zeros((128, 32), np.float32)
    body = f"""float r[32]; unsigned y[4];
for (int i = 0; i < 4; i++) y[i] = x[4 * t + i];
for (int i = t; i < {memory.size}; i += 128) s[i] = memory[i];
fence_async_shared();
__syncthreads();
wgmma_fence();  // registers
wgmma_rs_m64n64k16_bf16_{lies}(r, y, high | shared_address(s) >> 4, 0);
wgmma_commit();
wgmma_wait_0();
for (int i = 0; i < 32; i++) d[t * 32 + i] = r[i];"""
    arguments = "const unsigned *x, const unsigned char *memory, float *d, long high"
    kernel(body, arguments, "SHARED_BYTES(s);").launch(
        (1, 1, 1), 128, [registers, memory, d, ("long", high)], shared=memory.size
    )
    rows, columns = of_d(64)
    np.testing.assert_array_equal(d, (a @ b.T)[rows, columns])


# -- a pipeline ---------------------------------------------------------------------------------------------

GEMM = """
extern "C" __global__ void __launch_bounds__(384) gemm(const __grid_constant__ TensorMap a_map,
    const __grid_constant__ TensorMap b_map, float *c, int n, int steps)
{
  SHARED_BYTES(bytes);
  unsigned long *full = (unsigned long *)(bytes + 3 * 24576), *empty = full + 3;
  const int t = threadIdx.x, group = t / 128, m0 = blockIdx.y * 128, n0 = blockIdx.x * 64;
  if (t == 0) {
    for (int i = 0; i < 3; i++) {
      mbarrier_init(full + i, 1);
      mbarrier_init(empty + i, 2);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (group == 2) {
    registers_down_40();
    if (t == 256) {
      for (int i = 0; i < steps; i++) {
        const int stage = i % 3;
        unsigned char *const tile = bytes + stage * 24576;
        mbarrier_wait(empty + stage, (i / 3 + 1) % 2);  // room
        mbarrier_expect(full + stage, 24576);
        tma_load(tile, &a_map, full + stage, 64 * i, m0, 0);
        tma_load(tile + 16384, &b_map, full + stage, 64 * i, n0, 0);
      }
    }
  } else {
    registers_up_232();
    float d[32];
    for (int i = 0; i < 32; i++) d[i] = 0;
    for (int i = 0; i < steps; i++) {
      const int stage = i % 3;
      mbarrier_wait(full + stage, i / 3 % 2);  // data
      const unsigned tile = shared_address(bytes + stage * 24576);
      const unsigned long high = 1ul << 62 | 64ul << 32 | 1ul << 16;
      const unsigned long a = high | (tile + group * 8192) >> 4, b = high | (tile + 16384) >> 4;
      wgmma_fence();
      #pragma unroll
      for (int k = 0; k < 4; k++) wgmma_m64n64k16_bf16_kk(d, a + 2 * k, b + 2 * k, 1);
      wgmma_commit();
      wgmma_wait_1();  // last
      if (i > 0 && t % 128 == 0) mbarrier_arrive(empty + (i - 1) % 3);  // free
    }
    wgmma_wait_0();  // all
    const int row = m0 + group * 64 + t % 128 / 32 * 16 + t % 32 / 4;
    for (int i = 0; i < 32; i++) c[(row + i / 2 % 2 * 8) * n + n0 + i / 4 * 8 + t % 4 * 2 + i % 2] = d[i];
  }
}
"""


def gemm(source, steps=5, grid=(1, 1), seeds=ORDERS, cluster=1):
    rng = np.random.default_rng(8)
    m, n, k = 128 * grid[1], 64 * grid[0], 64 * steps
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((m, k), (n, k)))
    c, raw = np.zeros((m, n), np.float32), [bf16(x) for x in (a, b)]
    maps = [
        ("map", shim_map(2, x.ctypes.data, (k, x.shape[0], 1), (2 * k, x.nbytes), (64, rows, 1), 128), x)
        for x, rows in zip(raw, (128, 64), strict=True)
    ]
    made = cuda_shim.compile(source, "gemm")
    made.launch_in_orders(
        (*grid, 1), 384, [*maps, c, ("int", n), ("int", steps)], seeds, shared=3 * 24576 + 48, cluster=cluster
    )
    return c, a @ b.T


@pytest.mark.parametrize(("steps", "grid"), [(1, (1, 1)), (7, (2, 1))])
def test_a_pipeline(steps, grid):
    got, want = gemm(GEMM, steps, grid)
    np.testing.assert_array_equal(got, want)


BROKEN = {
    "no wait for data": (
        [("mbarrier_wait(full + stage, i / 3 % 2);  // data", "")],
        r"thread \d+ multiplies byte \d+ of dynamic shared memory, which a tma_load (still fills|filled)",
    ),
    "no wait for room": (
        [("mbarrier_wait(empty + stage, (i / 3 + 1) % 2);", "if (i % 3 == 0) mbarrier_wait(empty, (i / 3 + 1) % 2);")],
        r"race in shared memory: thread 256 loads into byte \d+ .*, which a wgmma",
    ),
    "room given too early": (
        [("wgmma_wait_1();  // last", "")],
        r"loads into byte \d+ of dynamic shared memory, which a wgmma may still read: wgmma_wait comes first",
    ),
    "room of the product in flight": (
        [("if (i > 0 && t % 128 == 0) mbarrier_arrive(empty + (i - 1) % 3);  // free",
          "if (t % 128 == 0) mbarrier_arrive(empty + i % 3);")],
        r"loads into byte \d+ of dynamic shared memory, which a wgmma (may still read|read)",
    ),
    "one group does not free": (
        [("(empty + i, 2)", "(empty + i, 1)"), ("if (i > 0 && t % 128 == 0)", "if (i > 0 && t == 0)")],
        r"loads into byte \d+ of dynamic shared memory, which a wgmma",
    ),
    "no wait for the last": (
        [("wgmma_wait_0();  // all", "")],
        "thread .* reads an accumulator of a wgmma before wgmma_wait",
    ),
    "accumulators written too early": (
        [("wgmma_wait_1();  // last", "d[3] = 0; wgmma_wait_1();")],
        "thread .* writes an accumulator of a wgmma before wgmma_wait",
    ),
    "no fence": (
        [("wgmma_fence();", "")],
        "wgmma_m64n64k16_bf16_kk on line 40: no wgmma_fence since thread .* could touch the accumulators",
    ),
    "no commit": (
        [("wgmma_commit();", "")],
        "reads an accumulator of a wgmma before wgmma_wait|loads into byte .*, which a wgmma",
    ),
    "a part of a warpgroup": (
        [("for (int k = 0; k < 4; k++) wgmma", "for (int k = 0; k < 4; k++) if (t % 128 < 64) wgmma")],
        "thread .* waits in wgmma_m64n64k16_bf16_kk on line 40|lanes of a warpgroup are at different calls",
    ),
    "a descriptor in the middle": (
        [("(tile + 16384) >> 4", "(tile + 16384 + 256) >> 4")],
        "the descriptor of B starts in the middle of a pattern of 1024 bytes",
    ),
    "a base offset": (
        [("1ul << 62 |", "1ul << 62 | 1ul << 49 |")],
        "the descriptor of A has a base offset",
    ),
    "another descriptor in a warp": (
        [("(tile + 16384) >> 4", "(tile + 16384 + t % 128 / 127 * 32) >> 4")],
        "threads .* and .* have other descriptors",
    ),
    "beyond shared memory": (
        [("64ul << 32", "16383ul << 32")],
        "thread .* multiplies what lies at 0x.*, which is beyond shared memory",
    ),
    "registers of a part": (
        [("registers_down_40();", "if (t == 256) registers_down_40();")],
        "deadlock|thread 256 waits in registers_down_40",
    ),
    "an end while products are in flight": (
        [("wgmma_wait_0();  // all", "return;")],
        "thread .* ends while the wgmma on line 40 is in flight: wgmma_wait comes first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pipeline(name):
    changes, message = BROKEN[name]
    refused(lambda seeds: gemm(broken(GEMM, *changes), seeds=seeds), message)


def test_another_swizzle_gives_other_numbers():
    for change in (("1ul << 62", "2ul << 62"), ("64ul << 32", "32ul << 32")):
        try:
            got, want = gemm(broken(GEMM, change), seeds=(0,))
        except ShimError:
            continue
        assert (got != want).any()


# -- ordinary writes before products ---------------------------------------------------------------------------

WRITTEN = """float r[4]; r[0] = 0;
for (int i = t; i < 1280; i += 128) ((unsigned *)s)[i] = i % 32;
fence_async_shared();  // known
__syncthreads();  // together
wgmma_fence();
const unsigned long high = 8ul << 32 | 64ul << 16;
wgmma_m64n8k16_bf16_kk(r, high | shared_address(s) >> 4, high | shared_address(s + 4096) >> 4, 0);
wgmma_commit();
wgmma_wait_0();
x[t] = r[0];"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("fence_async_shared();  // known", ""), "which thread .* wrote with no fence_async_shared between"),
        (("__syncthreads();  // together", ""), "thread .* multiplies byte .*, which thread .* wrote with no barrier"),
        (("wgmma_wait_0();", "s[9] = 0; wgmma_wait_0();"), "writes byte 9 .*, which a wgmma may still read"),
        (("s + 4096) >> 4", "x) >> 4"), "shared_address on line 8: the address is not in shared memory"),
    ],
)
def test_ordinary_writes_and_products(change, message):
    def run(body, seeds=ORDERS):
        made = kernel(body, shared="SHARED_BYTES(s);")
        made.launch_in_orders((1, 1, 1), 128, [np.zeros(128, np.float32)], seeds, shared=8192)

    run(WRITTEN)
    refused(lambda seeds: run(broken(WRITTEN, change), seeds), message)


def test_a_warpgroup_is_whole():
    with pytest.raises(ShimError, match="wgmma_fence on line 2: warpgroup 1 has 64 lanes"):
        kernel("wgmma_fence();").launch((1, 1, 1), 192, [np.zeros(1, np.float32)], seed=1)


# -- clusters ---------------------------------------------------------------------------------------------------

PAIR = broken(
    GEMM,
    ("__launch_bounds__(384)", "__launch_bounds__(384) __cluster_dims__(2, 1, 1)"),
    ("mbarrier_init(empty + i, 2)", "mbarrier_init(empty + i, 4)"),
    ("  __syncthreads();", "  cluster_sync();  // made"),
    ("tma_load(tile, &a_map, full + stage, 64 * i, m0, 0);",
     "tma_load_multicast(tile + cluster_rank() * 8192, &a_map, full + stage, 64 * i, m0 + cluster_rank() * 64, 0, 3);"),
    ("if (i > 0 && t % 128 == 0) mbarrier_arrive(empty + (i - 1) % 3);  // free",
     "if (i > 0 && t % 128 < 2) mbarrier_arrive_at(empty + (i - 1) % 3, t % 128);  // free"),
    ("i % 2] = d[i];\n  }\n", "i % 2] = d[i];\n  }\n  cluster_sync();  // over\n"),
)  # fmt: skip


def pair(source, seeds=ORDERS, cluster=2, grid=(4, 1), steps=5):
    rng = np.random.default_rng(8)
    m, n, k = 128 * grid[1], 64 * grid[0], 64 * steps
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((m, k), (n, k)))
    c, raw = np.zeros((m, n), np.float32), [bf16(x) for x in (a, b)]
    maps = [
        ("map", shim_map(2, x.ctypes.data, (k, x.shape[0], 1), (2 * k, x.nbytes), (64, 64, 1), 128), x) for x in raw
    ]
    cuda_shim.compile(source, "gemm").launch_in_orders(
        (*grid, 1), 384, [*maps, c, ("int", n), ("int", steps)], seeds, shared=3 * 24576 + 48, cluster=cluster
    )
    return c, a @ b.T


def test_a_pair_of_blocks_shares_loads():
    got, want = pair(PAIR)
    np.testing.assert_array_equal(got, want)


PAIR_BROKEN = {
    "only the own block frees": (
        [
            (
                "mbarrier_arrive_at(empty + (i - 1) % 3, t % 128)",
                "mbarrier_arrive_at(empty + (i - 1) % 3, cluster_rank())",
            )
        ],
        r"loads into another block's byte \d+ of dynamic shared memory, which",
    ),
    "no barrier of the cluster at first": (
        [("cluster_sync();  // made", "__syncthreads();")],
        "holds no mbarrier: mbarrier_init comes first|with no barrier between",
    ),
    "no barrier of the cluster at last": (
        [("cluster_sync();  // over", "")],
        r"mbarrier_arrive_at on line 43: block \d of the cluster has ended",
    ),
    "a block that is not there": ([("0, 3);", "0, 7);")], "tma_load_multicast on line 24: the cluster has no block 2"),
    "no blocks": ([("0, 3);", "0, 0);")], "0 is no mask of blocks"),
    "only one block gets it": (
        [("0, 3);", "0, 1 << cluster_rank());")],
        "deadlock: .* lacks 0 arrivals and 8192 bytes .* of the cluster",
    ),
    "an arrival at a block that is not there": (
        [("% 3, t % 128)", "% 3, 2 + t % 128)")],
        r"mbarrier_arrive_at on line 43: the cluster has no block \d",
    ),
}


@pytest.mark.parametrize("name", PAIR_BROKEN)
def test_a_broken_pair(name):
    changes, message = PAIR_BROKEN[name]
    refused(lambda seeds: pair(broken(PAIR, *changes), seeds=seeds), message)


def test_clusters_have_limits():
    x = np.zeros(4, np.float32)
    made = kernel("cluster_sync();")
    made.launch((4, 1, 1), 32, [x], cluster=4)
    with pytest.raises(ShimError, match="3 blocks along x are no whole clusters of 2"):
        made.launch((3, 1, 1), 32, [x], cluster=2)
    with pytest.raises(ShimError, match="a cluster has 1 to 8 blocks, not 9"):
        made.launch((9, 1, 1), 32, [x], cluster=9)
    with pytest.raises(ShimError, match=r"thread 0 waits in cluster_sync on line 2 .*; thread 1 has ended"):
        kernel("if (t == 0) cluster_sync();").launch((2, 1, 1), 32, [x], cluster=2)
