"""The shim that runs CUDA sources on the CPU: kernels that are right, and broken ones that it must catch."""

from __future__ import annotations

import subprocess
import sys

import cuda_shim
import numpy as np
import pytest
from cuda_shim import ORDERS, ShimError, kernel
from places import HELPERS

pytestmark = pytest.mark.rest("of the shim itself")

SGEMM = """
extern "C" __global__ void __launch_bounds__(256) sgemm(int n, const float *__restrict__ a,
                                                         const float *__restrict__ b, float *__restrict__ c)
{
  __shared__ __align__(16) float a_tile[16 * 64];
  __shared__ __align__(16) float b_tile[16][64];
  const int t = threadIdx.x, x = t % 16, y = t / 16;
  const int m0 = blockIdx.y * 64, n0 = blockIdx.x * 64;
  float acc[4][4] = {};
  for (int k0 = 0; k0 < n; k0 += 16) {
    for (int i = t; i < 1024; i += 256) {
      a_tile[i % 16 * 64 + i / 16] = a[(long)(m0 + i / 16) * n + k0 + i % 16];
      b_tile[i / 64][i % 64] = b[(long)(k0 + i / 64) * n + n0 + i % 64];
    }
    __syncthreads();  // filled
    for (int k = 0; k < 16; k++) {
      __align__(16) float a_part[4];
      __align__(16) float b_part[4];
      *(uint4 *)a_part = *(const uint4 *)(a_tile + k * 64 + 4 * y);
      *(uint4 *)b_part = *(const uint4 *)&b_tile[k][4 * x];
      #pragma unroll
      for (int i = 0; i < 4; i++)
        #pragma unroll
        for (int j = 0; j < 4; j++) acc[i][j] = fmaf(a_part[i], b_part[j], acc[i][j]);
    }
    __syncthreads();  // used
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) c[(long)(m0 + 4 * y + i) * n + n0 + 4 * x + j] = acc[i][j];
}
"""

ASYNC = """
extern "C" __global__ void __launch_bounds__(64) async_sums(int rows, long step, const float *x, float *sums)
{
  __shared__ __align__(16) float stage[2][256];
  const int t = threadIdx.x;
  float acc = 0.0f;
  copy_async_16(&stage[0][4 * t], x + 4 * t, 16);
  copy_async_commit();
  for (int i = 0; i < rows; i++) {
    if (i + 1 < rows) copy_async_16(&stage[(i + 1) % 2][4 * t], x + (i + 1) * step + 4 * t, 16);
    copy_async_commit();
    copy_async_wait_1();
    __syncthreads();  // filled
    for (int j = 0; j < 4; j++) acc += stage[i % 2][t + 64 * j];
    __syncthreads();  // used
  }
  sums[t] = acc;
}
"""

REDUCE = """
extern "C" __global__ void row_sums(const float *x, float *down, int *all)
{
  const int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  float sum = x[row * 32 + lane];
  int count = (int)sum;
  for (int delta = 16; delta > 0; delta /= 2) sum += shuffle_down_f32(sum, delta);
  for (int mask = 16; mask > 0; mask /= 2) count += shuffle_xor_s32(count, mask);
  float other = shuffle_xor_f32(sum, 31);
  if (lane == 0) down[row] = sum;
  if (lane == 31 && other == sum + 1) down[row] = 0;
  all[row * 32 + lane] = count;
}
"""


def broken(source, *changes):
    """A source with some of its text replaced."""
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return source


def product(source, n=64, seeds=ORDERS):
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-4, 5, (n, n)).astype(np.float32) for _ in range(2))
    c = np.zeros((n, n), np.float32)
    made = cuda_shim.compile(source, "sgemm")
    made.launch_in_orders((n // 64, n // 64, 1), 256, [("int", n), a, b, c], seeds)
    return c, a @ b


def async_sums(source, rows=5):
    x = np.random.default_rng(0).integers(-9, 10, (rows, 256)).astype(np.float32)
    sums = np.zeros(64, np.float32)
    made = cuda_shim.compile(source, "async_sums")
    made.launch_in_orders((1, 1, 1), 64, [("int", rows), ("long", 256), x, sums])
    return sums, x.reshape(rows, 4, 64).sum((0, 1))


# -- right ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 128])
def test_a_product(n):
    got, want = product(SGEMM, n, (0, 1, 2, 3))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_asynchronous_copies(rows):
    got, want = async_sums(ASYNC, rows)
    np.testing.assert_array_equal(got, want)


def test_shuffles():
    x = np.random.default_rng(1).integers(-9, 10, (8, 32)).astype(np.float32)
    down, both = np.zeros(8, np.float32), np.zeros((8, 32), np.int32)
    made = cuda_shim.compile(REDUCE, "row_sums")
    made.launch_in_orders((2, 1, 1), 128, [x, down, both])
    np.testing.assert_array_equal(down, x.sum(1))
    np.testing.assert_array_equal(both, np.repeat(x.sum(1).astype(np.int32)[:, None], 32, 1))


def test_lanes_beyond_the_last_keep_their_value():
    x = np.zeros(32, np.float32)
    kernel("x[t] = shuffle_down_f32((float)t, 3);").launch((1, 1, 1), 32, [x])
    np.testing.assert_array_equal(x, [*range(3, 32), 29, 30, 31])


def test_dynamic_shared_memory():
    x = np.arange(64, dtype=np.float32)
    made = kernel(
        "float *s = (float *)bytes; s[t] = x[t]; __syncthreads(); x[t] = s[63 - t];", shared="SHARED_BYTES(bytes);"
    )
    made.launch((1, 1, 1), 64, [x], shared=256)
    np.testing.assert_array_equal(x, np.arange(64)[::-1])
    with pytest.raises(ShimError, match="touches 4 bytes at byte 128 of dynamic shared memory, which has 128"):
        made.launch((1, 1, 1), 64, [x], shared=128)


def test_a_warp_orders_its_memory():
    body = "s[t] = x[t]; __syncwarp(); x[t] = s[t ^ 1];"
    x = np.arange(64, dtype=np.float32)
    kernel(body, shared="__shared__ float s[64];").launch_in_orders((1, 1, 1), 64, [x])
    np.testing.assert_array_equal(x, np.arange(64) ^ 1)


def test_blocks_find_poison_in_shared_memory():
    x = np.zeros(64, np.float32)
    body = "float old = s[t]; __syncthreads(); s[t] = 1.0f; x[blockIdx.x * 32 + t] = old;"
    kernel(body, shared="__shared__ float s[32];").launch((2, 1, 1), 32, [x])
    assert np.isnan(x).all()


def test_contexts_of_the_c_library_do_as_well():
    x = np.zeros(32, np.float32)
    source = (
        'extern "C" __global__ void k(float *x) { __syncthreads(); x[threadIdx.x] = shuffle_xor_f32(threadIdx.x, 1); }'
    )
    cuda_shim.compile(source, "k", ("-DSHIM_UCONTEXT",)).launch((1, 1, 1), 32, [x])
    np.testing.assert_array_equal(x, np.arange(32) ^ 1)


def test_fused_multiply_adds_are_the_same_without_the_instruction(monkeypatch):
    rng = np.random.default_rng(4)
    a, b, c = (rng.standard_normal((64, 64)).astype(np.float32) for _ in range(3))
    results = []
    for flags in (cuda_shim._host_flags(), ()):
        monkeypatch.setattr(cuda_shim, "_host_flags", lambda flags=flags: flags)
        made = cuda_shim.compile.__wrapped__(SGEMM, "sgemm")
        made.launch((1, 1, 1), 256, [("int", 64), a, b, c])
        results.append(c.tobytes())
    assert results[0] == results[1]


# -- broken --------------------------------------------------------------------------


@pytest.mark.parametrize("barrier", ["filled", "used"])
def test_a_missing_barrier_is_a_race(barrier):
    source = broken(SGEMM, (f"__syncthreads();  // {barrier}", ""))
    with pytest.raises(ShimError, match=r"race in shared memory: thread \d+ (reads|writes) byte \d+ .* on line \d+"):
        product(source, 128)


def test_a_race_is_seen_in_every_order():
    body = "s[t] = x[t]; x[t] = s[t ^ 32];"
    made = kernel(body, shared="__shared__ float s[64];")
    for seed in range(5):
        with pytest.raises(ShimError, match="race in shared memory"):
            made.launch((1, 1, 1), 64, [np.zeros(64, np.float32)], seed)


@pytest.mark.parametrize(
    "body",
    [
        "s[0] = t;",
        "float y = s[t % 2]; s[t] = y;",
        "if (t < 32) s[t % 2] = 1; ",
        "s[t] = 1; __syncwarp(); x[t] = s[(t + 32) % 64];",
        "s[t] = t; x[t] = s[t ^ 1] + shuffle_xor_f32(1, 1);",
    ],
)
def test_races(body):
    with pytest.raises(ShimError, match="race in shared memory"):
        kernel(body, shared="__shared__ float s[64];").launch((1, 1, 1), 64, [np.zeros(64, np.float32)])


def test_bytes_beside_one_another_are_no_race():
    made = kernel("s[t] = t; __syncthreads(); x[t] = s[63 - t];", shared="__shared__ unsigned char s[64];")
    x = np.zeros(64, np.float32)
    made.launch_in_orders((1, 1, 1), 64, [x])
    np.testing.assert_array_equal(x, np.arange(64)[::-1])


def test_a_wait_for_too_few_copies():
    with pytest.raises(ShimError, match=r"reads byte \d+ .* which a copy_async still fills"):
        async_sums(broken(ASYNC, ("copy_async_wait_1", "copy_async_wait_2")))
    with pytest.raises(ShimError, match="which a copy_async still fills"):
        async_sums(broken(ASYNC, ("copy_async_wait_1();", "")))


def test_a_copy_over_what_is_still_read():
    with pytest.raises(ShimError, match=r"which a copy_async still fills, .* on line 14"):
        async_sums(broken(ASYNC, ("__syncthreads();  // used", "")))


def test_a_copy_that_nobody_else_waited_for():
    with pytest.raises(ShimError, match=r"which a copy_async still fills|with no barrier"):
        async_sums(broken(ASYNC, ("__syncthreads();  // filled", "")))


def test_copies_fill_up_with_zeros():
    body = "copy_async_16(s, x + 3, 4); copy_async_8(s + 4, x, 8); copy_async_4(s + 6, x, 0); copy_async_commit();"
    body += "copy_async_wait_0(); for (int i = 0; i < 7; i++) y[i] = s[i];"
    arguments, shared = "const float *x, float *y", "__shared__ __align__(16) float s[8];"
    x, y = np.arange(1, 5, dtype=np.float32), np.zeros(7, np.float32)
    kernel(body.replace("x + 3", "x"), arguments, shared).launch_in_orders((1, 1, 1), 1, [x, y])
    np.testing.assert_array_equal(y, [1, 0, 0, 0, 1, 2, 0])
    with pytest.raises(ShimError, match="copy_async_16 on line 2: the global address is misaligned"):
        kernel(body, arguments, shared).launch_in_orders((1, 1, 1), 1, [x, y])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("copy_async_4(x, x, 4);", "copy_async_4 on line 2: writes no shared memory"),
        ("copy_async_4(s, s + 1, 4);", "copy_async_4 on line 2: reads shared memory"),
        ("copy_async_8(s + 1, x, 4);", "copy_async_8 on line 2: the shared address is misaligned"),
        ("copy_async_8(s, x, 12);", "copy_async_8 on line 2: cannot read 12 bytes"),
        ("copy_async_16(s, x + 32, 16);", "out of bounds: thread 0 touches .*, 0 bytes after argument 0, on line 2"),
        (
            "copy_async_16(s + 32, x, 16);",
            "touches 16 bytes at byte 128 of static shared memory, which has 128, .* on line 2",
        ),
    ],
)
def test_wrong_copies(body, message):
    made = kernel(body, shared="__shared__ __align__(16) float s[32];")
    with pytest.raises(ShimError, match=message):
        made.launch_in_orders((1, 1, 1), 1, [np.zeros(32, np.float32)])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (t < 32) __syncthreads();", "thread 0 waits in __syncthreads on line 2, and thread 32 has ended"),
        (
            "if (t < 32) __syncthreads();\nelse __syncthreads();",
            "thread 0 waits in __syncthreads on line 2, and .* on line 3",
        ),
        (
            "if (t % 32 < 16) x[t] = shuffle_xor_f32(1, 1);",
            "thread 0 waits in shuffle_xor_f32 on line 2, .* 16 has ended",
        ),
        (
            "if (t < 16) return;\nx[t] = shuffle_down_f32(1, 1);",
            "waits in shuffle_down_f32 on line 3, and thread 0 has ended",
        ),
        (
            "if (t % 2) x[t] = shuffle_xor_f32(1, 1);\nelse x[t] = shuffle_down_f32(1, 1);",
            "lanes of a warp are at different calls: .* shuffle_down_f32 on line 3, .* shuffle_xor_f32 on line 2",
        ),
        (
            "if (t % 2) x[t] = shuffle_xor_f32(1, 1);\nelse __syncthreads();",
            "thread 1 waits in shuffle_xor_f32 on line 2, and thread 0 in __syncthreads on line 3",
        ),
        ("x[t] = shuffle_xor_f32(1, 32);", "32 is not a number from 0 to 31"),
        ("__syncwarp(1);", "the mask 0x1 leaves lanes out"),
    ],
)
def test_threads_that_do_not_meet(body, message):
    with pytest.raises(ShimError, match=message):
        kernel(body).launch((1, 1, 1), 64, [np.zeros(64, np.float32)])


def test_a_shuffle_in_part_of_a_warp():
    with pytest.raises(ShimError, match="shuffle_xor_s32 on line 2: warp 1 has 16 lanes"):
        kernel("x[t] = shuffle_xor_s32(1, 1);").launch((1, 1, 1), 48, [np.zeros(64, np.float32)])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "*(uint4 *)x = *(const uint4 *)(x + 4 * t + 1);",
            r"misaligned: thread 0 takes .* a multiple of 16, on line 2",
        ),
        ("*(float2 *)(s + 1) = make_float2(1, 2);", "misaligned: .* a multiple of 8, on line 2"),
        ("x[64 + t] = 1;", "out of bounds: thread 0 touches .*, 0 bytes after argument 0, on line 2"),
        ("x[t - 1025] = 1;", r"out of bounds: thread \d+ touches .* bytes before argument 0, on line 2"),
        ("s[t + 1] = 1;", r"out of bounds: thread 63 takes element 64 of 'float \[64\]' on line 2"),
        ("*(s + 64 + t) = 1;", "touches 4 bytes at byte 256 of static shared memory, which has 256"),
        ("float r[4]; for (int i = 0; i <= t; i++) r[i] = i; x[t] = r[t];", r"element 4 of 'float \[4\]' on line 2"),
        ("x[t] = 5 / (int)x[t];", "thread 0 divides by zero on line 2"),
        ("x[t] = 1 << (32 + t);", "thread 0 shifts by 32 on line 2"),
    ],
)
def test_accesses_that_a_device_would_not_forgive(body, message):
    made = kernel(body, shared="__shared__ __align__(16) float s[64];")
    with pytest.raises(ShimError, match=message):
        made.launch_in_orders((1, 1, 1), 64, [np.zeros(64, np.float32)])


def test_a_write_before_the_beginning():
    made = kernel("x[t - 1] = 1;")
    with pytest.raises(ShimError, match=r"touches .*, 4 bytes before argument 0"):
        made.launch_in_orders((1, 1, 1), 32, [np.zeros(32, np.float32)], seeds=(0, 1))


def test_a_write_into_the_slack_behind_an_array():
    with pytest.raises(ShimError, match="argument 0 was written beyond its end"):
        kernel("x[t] = 1;").launch_in_orders((1, 1, 1), 32, [np.zeros(31, np.float32)])


def test_results_that_depend_on_the_order_of_blocks():
    with pytest.raises(ShimError, match=r"argument 0 depends on the order of threads \(seed 1\)"):
        kernel("x[0] = blockIdx.x;").launch_in_orders((2, 1, 1), 1, [np.zeros(1, np.float32)])


def test_a_stack_overrun_is_an_error():
    body = "volatile char big[200000]; for (int i = 0; i < 200000; i += 64) big[199999 - i] = 1; x[t] = big[7];"
    with pytest.raises(ShimError, match="thread 0 needs more than 131072 bytes of stack"):
        kernel(body).launch((1, 1, 1), 1, [np.zeros(1, np.float32)])


def test_limits():
    x = np.zeros(4096, np.float32)
    with pytest.raises(ShimError, match="a block has 1 to 1024 threads, not 1025"):
        kernel("x[t] = 1;").launch((1, 1, 1), 1025, [x])
    with pytest.raises(ShimError, match="at most 49152 bytes of static shared memory, not 49156"):
        kernel("s[t] = 1;", shared="__shared__ float s[12289];").launch((1, 1, 1), 32, [x])
    with pytest.raises(ShimError, match="at most 232448 bytes of shared memory, not 232452"):
        kernel("s[0] = 1;", shared="__shared__ float s[1];").launch((1, 1, 1), 1, [x], shared=227 << 10)
    kernel("s[t] = 1; x[t] = 1;", shared="__shared__ float s[12288];").launch((1, 1, 1), 1024, [x])
    assert x.sum() == 1024


def test_arguments_have_types():
    x = np.zeros(4, np.float32)
    made = kernel("x[0] = n + s;", "float *x, int n, float s, long k")
    made.launch((1, 1, 1), 1, [x, ("int", 2), ("float", 0.5), ("long", 1 << 40)])
    assert x[0] == 2.5
    with pytest.raises(ShimError, match="takes 4 arguments, not 1"):
        made.launch((1, 1, 1), 1, [x])
    with pytest.raises(ShimError, match="argument 3 is a long, not a int"):
        made.launch((1, 1, 1), 1, [x, ("int", 2), ("float", 0.5), ("int", 1)])


def test_a_launch_may_follow_a_failed_one():
    made = kernel("if (x[t] > 0) __syncthreads(); x[t] = 1;")
    x = np.zeros(32, np.float32)
    made.launch((1, 1, 1), 32, [x])
    x[5] = 0
    with pytest.raises(ShimError, match="and thread 5 has ended"):
        made.launch((1, 1, 1), 32, [x])
    made.launch((1, 1, 1), 32, [np.zeros(32, np.float32)])


def test_what_does_not_compile_says_so():
    with pytest.raises(ShimError, match="surprise"):
        kernel("surprise(x);")
    with pytest.raises(ShimError, match="undefined reference"):
        cuda_shim.compile('extern "C" void gone(); extern "C" __global__ void k(float *) { gone(); }', "k")


def test_signals_are_the_process_s_own_again():
    code = (
        "import faulthandler, ctypes, numpy as np, cuda_shim\n"
        "faulthandler.enable()\n"
        """k = cuda_shim.compile('extern "C" __global__ void k(float *x) { x[1 << 28] = 1; }', 'k')\n"""
        "try:\n    k.launch((1, 1, 1), 1, [np.zeros(1, np.float32)])\n"
        "except cuda_shim.ShimError as e:\n    print('caught', flush=True)\n"
        "ctypes.string_at(8)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=HELPERS, capture_output=True, text=True, check=False)
    assert "caught" in done.stdout
    assert done.returncode < 0
    assert "Segmentation fault" in done.stderr
