"""Products of fragments in the shim: mma, ldmatrix, stmatrix and the numbers they take."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_shim import ShimError, kernel

pytestmark = pytest.mark.rest("of the shim itself")

U32, U16, U8 = np.uint32, np.uint16, np.uint8


# -- numbers, from what their formats mean ---------------------------------------------------------


def narrow_floats(exponent_bits, mantissa_bits, *, inf):
    """The values of all bytes of a format, with NaNs."""
    bias, values = 2 ** (exponent_bits - 1) - 1, []
    for x in range(256):
        e, m = x >> mantissa_bits & (2**exponent_bits - 1), x & (2**mantissa_bits - 1)
        size = m * 2.0 ** (1 - bias - mantissa_bits) if e == 0 else (1 + m / 2**mantissa_bits) * 2.0 ** (e - bias)
        if inf and e == 2**exponent_bits - 1:
            size = np.nan if m else np.inf
        if not inf and x & 127 == 127:
            size = np.nan
        values.append(-size if x & 128 else size)
    return np.array(values)


FP8 = {"e4m3": narrow_floats(4, 3, inf=False), "e5m2": narrow_floats(5, 2, inf=True)}


def bf16(x):
    """Floats whose low 16 bits are 0, as their high halves."""
    return (np.ascontiguousarray(x, np.float32).view(U32) >> 16).astype(U16)


@pytest.mark.parametrize("word", FP8)
def test_narrow_floats_become_floats(word):
    y = np.zeros(256, np.float32)
    kernel(f"y[t] = f32_of_{word}((unsigned char)t);", "float *y").launch((1, 1, 1), 256, [y])
    np.testing.assert_array_equal(y, FP8[word].astype(np.float32))
    np.testing.assert_array_equal(np.signbit(y), np.arange(256) >= 128)


@pytest.mark.parametrize("word", FP8)
def test_floats_become_narrow_floats(word):
    values = FP8[word]
    finite = np.sort(values[np.isfinite(values)])
    between = (finite[1:] + finite[:-1]) / 2
    rng = np.random.default_rng(0)
    x = np.concatenate([finite, between, between * 1.0001, between * 0.9999, rng.standard_normal(500) * 100])
    x = np.concatenate([x, [np.inf, -np.inf, np.nan, 1e9, -1e9, 1e-30, 448.1, 57345.0]]).astype(np.float32)
    x = np.concatenate([x, x[: -x.size % 32 or None]])
    y, plain = np.zeros(x.size, U16), np.zeros(x.size, U8)
    body = f"for (int i = t; i < n; i += 32) {{ y[i] = pack_{word}(x[i], -x[i]); z[i] = {word}_of_f32(x[i]); }}"
    arguments = "int n, const float *x, unsigned short *y, unsigned char *z"
    kernel(body, arguments).launch((1, 1, 1), 32, [("int", x.size), x, y, plain])
    np.testing.assert_array_equal(plain, y & 255)
    number = ~np.isnan(x)
    assert (y[~number] == 0x7F7F).all()
    np.testing.assert_array_equal((y >> 8)[number], (y & 255)[number] ^ 128)
    codes = np.argsort(values[:128][np.isfinite(values[:128])], kind="stable")  # sizes grow with codes
    sizes = values[codes]
    wide = np.minimum(np.abs(x[number].astype(np.float64)), sizes[-1])
    high = np.searchsorted(sizes, wide)
    low = np.maximum(high - 1, 0)
    up = (wide - sizes[low] > sizes[high] - wide) | ((wide - sizes[low] == sizes[high] - wide) & (high % 2 == 0))
    np.testing.assert_array_equal((y & 127)[number], np.where(up, high, low))


def test_pairs_of_halves_and_tf32():
    x = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    x[:4] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, -1 - 2**-11]
    b, h, f = (np.zeros(32, U32) for _ in range(3))
    body = "b[t] = pack_bf16(x[t], x[t + 32]); h[t] = pack_f16(x[t], x[t + 32]); f[t] = tf32_of_f32(x[t]);"
    arguments = "const float *x, unsigned *b, unsigned *h, unsigned *f"
    kernel(body, arguments).launch((1, 1, 1), 32, [x, b, h, f])
    halves = x.astype(np.float16).view(U16).astype(U32)
    np.testing.assert_array_equal(h, halves[:32] | halves[32:] << 16)
    bits = x.view(U32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(U32)
    np.testing.assert_array_equal(b, rounded[:32] | rounded[32:] << 16)
    np.testing.assert_array_equal(f, ((bits[:32] + 0x1000) & 0xFFFFE000).astype(U32))
    assert f[2:4].view(np.float32).tolist() == [1 + 2**-10, -1 - 2**-10]


def test_bytes_and_lanes_move():
    y = np.zeros(32, U32)
    kernel("y[t] = byte_perm(0x33221100, 0x77665544, 0x0426) + shuffle_idx_s32(t, 7);", "unsigned *y").launch(
        (1, 1, 1), 32, [y]
    )
    assert (y == 0x00442266 + 7).all()


# -- products ----------------------------------------------------------------------------------------


# Where the manual puts the elements of each shape: element i of a lane (g, t), as its tables say it.
def _a_16(i):
    """m16n8k16, 16-bit: A."""
    return lambda g, t: (g + 8 * (not (i < 2 or 4 <= i < 6)), t * 2 + (i & 1) + 8 * (i >= 4))


def _b_16(i):
    return lambda g, t: (t * 2 + (i & 1) + 8 * (i >= 2), g)


def _a_8(i):
    """m16n8k8, 16-bit."""
    return lambda g, t: (g + 8 * (i >= 2), t * 2 + (i & 1))


def _b_8(i):
    return lambda g, t: (t * 2 + i, g)


def _a_tf32(i):
    return lambda g, t: (g + 8 * (i in (1, 3)), t + 4 * (i >= 2))


def _b_tf32(i):
    return lambda g, t: (t + 4 * i, g)


def _a_32(i):
    """m16n8k32, bytes."""
    return lambda g, t: (g + 8 * (not (i < 4 or 8 <= i < 12)), t * 4 + (i & 3) + 16 * (i >= 8))


def _b_32(i):
    return lambda g, t: (t * 4 + (i & 3) + 16 * (i >= 4), g)


def _a_m8(i):
    return lambda g, t: (g, t * 4 + i)


def _b_m8(i):
    return lambda g, t: (t * 4 + i, g)


def _d(i):
    return lambda g, t: (g + 8 * (i >= 2), t * 2 + (i & 1))


SHAPES = {
    "m16n8k16": (16, 16, 8, 4, 2, _a_16, _b_16),
    "m16n8k8": (16, 8, 4, 2, 1, _a_8, _b_8),
    "tf32": (16, 8, 4, 4, 2, _a_tf32, _b_tf32),
    "m16n8k32": (16, 32, 16, 4, 2, _a_32, _b_32),
    "m8n8k16": (8, 16, 4, 1, 1, _a_m8, _b_m8),
}


def packed(x, place, count, dtype):
    """The registers of 32 lanes, from a matrix and the place of each element."""
    lanes = np.array([[x[place(i)(lane // 4, lane % 4)] for i in range(count)] for lane in range(32)], dtype)
    return np.ascontiguousarray(lanes).view(U32)


def operands(word, m, k):
    """Two matrices as they are stored, and as numbers."""
    rng = np.random.default_rng(3)
    if word.endswith("8s8"):
        a = rng.integers(*((0, 256) if word[0] == "u" else (-128, 128)), (m, k))
        b = rng.integers(-128, 128, (k, 8))
        return a.astype(U8 if word[0] == "u" else np.int8), b.astype(np.int8), a, b
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) / 4 for shape in ((m, k), (k, 8)))
    types = (word[:4], word[4:] or word) if word.startswith("e") else (word, word)
    stored = [
        x if t == "tf32" else x.astype(np.float16).view(U16) if t == "f16" else bf16(x) if t == "bf16" else codes(x, t)
        for x, t in zip((a, b), types, strict=True)
    ]
    return *stored, a, b


def codes(x, word):
    """The bytes of numbers that a format of eight bits has."""
    values = FP8[word].astype(np.float32)
    for i in np.ndindex(x.shape):
        if x[i] not in values:
            x[i] = 1
    return np.vectorize(lambda y: int(np.flatnonzero(values == y)[0]))(x).astype(U8)


NAMES = (
    "m16n8k16_bf16", "m16n8k16_f16", "m16n8k8_f16", "m16n8k8_tf32", "m16n8k32_e4m3", "m16n8k32_e5m2",
    "m16n8k32_e4m3e5m2", "m16n8k32_e5m2e4m3", "m16n8k32_s8s8", "m16n8k32_u8s8", "m8n8k16_s8s8", "m8n8k16_u8s8",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_products(name):
    shape, word = name.split("_")
    m, k, of_a, in_a, in_b, place_a, place_b = SHAPES["tf32" if word == "tf32" else shape]
    raw_a, raw_b, a, b = operands(word, m, k)
    registers_a = packed(raw_a, place_a, of_a, raw_a.dtype)
    registers_b = packed(raw_b, place_b, k // 4, raw_b.dtype)
    assert (registers_a.shape[1], registers_b.shape[1]) == (in_a, in_b)
    kind, held = ("int", np.int32) if "8s8" in word else ("float", np.float32)
    before = np.random.default_rng(4).integers(-9, 10, (m, 8)).astype(held)
    d = packed(before, _d, m // 4, held).view(held)
    body = f"""{kind} r[{m // 4}]; unsigned x[{in_a}], y[{in_b}];
for (int i = 0; i < {m // 4}; i++) r[i] = d[t * {m // 4} + i];
for (int i = 0; i < {in_a}; i++) x[i] = a[t * {in_a} + i];
for (int i = 0; i < {in_b}; i++) y[i] = b[t * {in_b} + i];
mma_{name}(r, x, y);
for (int i = 0; i < {m // 4}; i++) d[t * {m // 4} + i] = r[i];"""
    made = kernel(body, f"const unsigned *a, const unsigned *b, {kind} *d")
    made.launch_in_orders((1, 1, 1), 32, [registers_a, registers_b, d])
    want = packed((before + a @ b).astype(held), _d, m // 4, held).view(held)
    np.testing.assert_array_equal(d, want)


def test_sums_of_integers_wrap():
    d = np.full((32, 4), 2**31 - 1, np.int32)
    body = "unsigned x[4] = {~0u, ~0u, ~0u, ~0u}, y[2] = {~0u, ~0u}; int r[4];"
    body += "for (int i = 0; i < 4; i++) r[i] = d[4 * t + i]; mma_m16n8k32_s8s8(r, x, y);"
    body += "for (int i = 0; i < 4; i++) d[4 * t + i] = r[i];"
    kernel(body, "int *d").launch((1, 1, 1), 32, [d])
    assert (d == np.int32(-(2**31) + 31)).all()


# -- moves of 8x8 matrices -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("turned", ["", "trans_"])
def test_matrices_move(count, turned):
    x = np.random.default_rng(5).integers(0, 1 << 16, (count, 8, 8)).astype(U16)
    y, z = np.zeros((32, count), U32), np.zeros_like(x)
    body = f"""for (int i = t; i < {count * 64}; i += 32) s[i] = x[i];
__syncthreads();
unsigned r[{count}];
ldmatrix_{turned}x{count}(r, s + t % {8 * count} * 8);
for (int i = 0; i < {count}; i++) y[t * {count} + i] = r[i];
__syncthreads();
stmatrix_{turned}x{count}(s + t % {8 * count} * 8, r);
__syncthreads();
for (int i = t; i < {count * 64}; i += 32) z[i] = s[i];"""
    made = kernel(
        body,
        "const unsigned short *x, unsigned *y, unsigned short *z",
        f"__shared__ __align__(16) unsigned short s[{count * 64}];",
    )
    made.launch_in_orders((1, 1, 1), 32, [x, y, z])
    lanes = np.arange(32)
    for i in range(count):
        matrix = x[i].T if turned else x[i]
        pairs = np.ascontiguousarray(matrix).view(U32)
        np.testing.assert_array_equal(y[:, i], pairs[lanes // 4, lanes % 4])
    np.testing.assert_array_equal(z, x)


# -- broken --------------------------------------------------------------------------------------------


LOAD = "unsigned r[4]; ldmatrix_x4(r, s + 8 * t); x[t] = r[0];"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("s[t] = 1; unsigned r[4]; ldmatrix_x4(r, s + 8 * (t % 8));", "race in shared memory: thread .* on line 2"),
        ("unsigned r[4]; ldmatrix_x4(r, s + 1 + 8 * t);", "ldmatrix_x4 on line 2: the address of a row is misaligned"),
        ("unsigned r[4]; ldmatrix_x4(r, x);", "ldmatrix_x4 on line 2: a row is not in shared memory"),
        ("unsigned r[4]; ldmatrix_x4(r, s + 8 * t + 8);", "touches 16 bytes at byte 512 of static shared memory"),
        ("unsigned r[4] = {}; stmatrix_x4(s + 8 * (t % 8), r);", "race in shared memory: thread 8 writes"),
        (
            "unsigned r[4] = {}; stmatrix_x1(s + 8 * (t % 8), r); x[t] = s[(8 * t) % 64];",
            "race in shared memory: thread .* reads byte .*, which thread",
        ),
        (
            "if (t < 16) { unsigned r[1]; ldmatrix_x1(r, s); }",
            "thread 0 waits in ldmatrix_x1 on line 2, and thread 16 has ended",
        ),
        (
            "float d[4] = {}; unsigned a[4] = {}, b[2] = {}; if (t != 3) mma_m16n8k16_bf16(d, a, b);",
            "thread 0 waits in mma_m16n8k16_bf16 on line 2, and thread 3 has ended",
        ),
        (
            "mma_m16n8k16_bf16((float *)s, (unsigned *)s, (unsigned *)s);",
            "mma_m16n8k16_bf16 on line 2: takes registers, not shared memory",
        ),
        ("x[t] = shuffle_idx_s32(1, 32);", "shuffle_idx_s32 on line 2: 32 is not a number from 0 to 31"),
    ],
)
def test_broken(body, message):
    made = kernel(body, "float *x", "__shared__ __align__(16) unsigned short s[256];")
    with pytest.raises(ShimError, match=message):
        made.launch((1, 1, 1), 32, [np.zeros(32, np.float32)])


def test_part_of_a_warp():
    body = "float d[4] = {}; unsigned a[4] = {}, b[2] = {}; mma_m16n8k8_tf32(d, a, b);"
    with pytest.raises(ShimError, match="mma_m16n8k8_tf32 on line 2: warp 1 has 16 lanes"):
        kernel(body).launch((1, 1, 1), 48, [np.zeros(32, np.float32)])
