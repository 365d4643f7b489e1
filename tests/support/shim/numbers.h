// The primitives that compute with numbers and are instructions: dot products of four bytes (dp4a), narrow
// floats and moves of bytes. Kernels and the run time share it.
#pragma once

extern "C" float exp2f(float) noexcept;

namespace shim {

inline unsigned bits_of(float x) { return __builtin_bit_cast(unsigned, x); }
inline float float_of(unsigned x) { return __builtin_bit_cast(float, x); }

// Bits of x without the lowest `drop`, rounded to the nearest, from halfway to even. A carry out of the
// mantissa goes into the exponent, which is what rounding up to the next power of two means.
inline unsigned rounded(unsigned x, int drop) {
  const unsigned half = 1u << (drop - 1);
  return (x + (half - 1) + ((x >> drop) & 1)) >> drop;
}

template <class A, class B>
inline int dot4(int a, int b, int c) {
  unsigned sum = unsigned(c);
  for (int i = 0; i < 32; i += 8) sum += unsigned(int(A(a >> i)) * int(B(b >> i)));
  return int(sum);
}

// The size (without the sign) of a float as one of fewer bits, as if its exponent had no end: bits of
// exponent and mantissa that count up from zero, so that the caller may compare them to its largest.
inline unsigned narrowed(float x, int mantissa, int bias) {
  const unsigned size = bits_of(x) & 0x7fffffffu;
  const int drop = 23 - mantissa, exponent = int(size >> 23) - 127 + bias;
  if (exponent >= 1) return rounded(size, drop) - (unsigned(127 - bias) << mantissa);
  // A subnormal result counts units of its smallest: the mantissa is shifted down by as much as is missing.
  const int more = drop + 1 - exponent;
  return more > 24 ? 0u : rounded((size & 0x7fffffu) | 0x800000u, more);
}

// A float of fewer bits, which has no infinities and NaNs of its own that this need know.
inline float widened(unsigned size, int mantissa, int bias) {
  if (size >> mantissa == 0) return float(size) * float_of(unsigned(127 + 1 - bias - mantissa) << 23);
  return float_of((size << (23 - mantissa)) + (unsigned(127 - bias) << 23));
}

inline float with_sign(float size, bool negative) { return negative ? -size : size; }

// PTX ISA, "Alternate floating point data formats": e4m3 has no infinities, and one NaN of each sign.
inline float of_e4m3(unsigned x) {
  const unsigned size = x & 0x7f;
  return with_sign(size == 0x7f ? __builtin_nanf("") : widened(size, 3, 7), x & 0x80);
}

inline float of_e5m2(unsigned x) {
  const unsigned size = x & 0x7f;
  if (size >= 0x7c) return with_sign(size == 0x7c ? __builtin_inff() : __builtin_nanf(""), x & 0x80);
  return with_sign(widened(size, 2, 15), x & 0x80);
}

// cvt.rn.satfinite: what is too large becomes the largest number, NaN 0x7f.
inline unsigned satfinite(float x, int mantissa, int bias, unsigned most) {
  if (x != x) return 0x7f;
  const unsigned size = narrowed(x, mantissa, bias);
  return (size < most ? size : most) | (bits_of(x) >> 24 & 0x80);
}
inline unsigned to_e4m3(float x) { return satfinite(x, 3, 7, 0x7e); }
inline unsigned to_e5m2(float x) { return satfinite(x, 2, 15, 0x7b); }

inline float of_f16(unsigned x) {
  const unsigned sign = (x & 0x8000u) << 16, exponent = x >> 10 & 31, mantissa = x & 1023;
  if (exponent == 31) return float_of(mantissa ? 0x7fffffffu : sign | 0x7f800000u);
  return with_sign(widened(x & 0x7fff, 10, 15), sign);
}

inline unsigned to_f16(float x) {
  if (x != x) return 0x7fff;
  const unsigned size = narrowed(x, 10, 15);
  return (size < 0x7c00u ? size : 0x7c00u) | (bits_of(x) >> 16 & 0x8000u);
}

inline unsigned to_bf16(float x) { return x != x ? 0x7fff : rounded(bits_of(x), 16); }

}  // namespace shim

inline int dot4_s8s8(int a, int b, int c) { return shim::dot4<signed char, signed char>(a, b, c); }
inline int dot4_u8s8(int a, int b, int c) { return shim::dot4<unsigned char, signed char>(a, b, c); }

inline float f32_of_f16(unsigned short x) { return shim::of_f16(x); }
inline unsigned short f16_of_f32(float x) { return (unsigned short)shim::to_f16(x); }

inline unsigned pack_bf16(float low, float high) { return shim::to_bf16(high) << 16 | shim::to_bf16(low); }
inline unsigned pack_f16(float low, float high) { return shim::to_f16(high) << 16 | shim::to_f16(low); }
inline unsigned short pack_e4m3(float low, float high) {
  return (unsigned short)(shim::to_e4m3(high) << 8 | shim::to_e4m3(low));
}
inline unsigned short pack_e5m2(float low, float high) {
  return (unsigned short)(shim::to_e5m2(high) << 8 | shim::to_e5m2(low));
}

// cvt.rna.tf32.f32: to the nearest, from halfway away from zero; the low 13 bits are 0 here.
inline unsigned tf32_of_f32(float x) {
  return x != x ? 0x7fffe000u : (shim::bits_of(x) + 0x1000u) & ~0x1fffu;
}

namespace shim {

// A sum whose last bit tells whether it is inexact, so that rounding it once more rounds it once.
inline float odd_sum(double x, double y) {
  const double sum = x + y;
  float f = float(sum);
  if (double(f) == sum && sum - x == y && sum - y == x) return f;
  if (f != f || f - f != 0) return f;
  if (sum > 0 ? double(f) > sum : double(f) < sum) f = float_of(bits_of(f) - 1);
  return float_of(bits_of(f) | 1);
}

}  // namespace shim

inline unsigned fma2_f16(unsigned a, unsigned b, unsigned c) {
  unsigned result = 0;
  for (int i = 0; i < 32; i += 16)
    result |= shim::to_f16(shim::odd_sum(double(shim::of_f16(a >> i & 0xffff)) * double(shim::of_f16(b >> i & 0xffff)),
                                         double(shim::of_f16(c >> i & 0xffff)))) << i;
  return result;
}
inline unsigned fma2_bf16(unsigned a, unsigned b, unsigned c) {
  unsigned result = 0;
  for (int i = 0; i < 32; i += 16) {
    const auto of = [&](unsigned x) { return double(shim::float_of((x >> i & 0xffff) << 16)); };
    result |= shim::to_bf16(shim::odd_sum(of(a) * of(b), of(c))) << i;
  }
  return result;
}

inline float exp2_f32(float x) { return exp2f(x); }
inline float least_f32(float x, float y) { return y < x || y != y ? y : x; }
inline float most_f32(float x, float y) { return y > x || y != y ? y : x; }

// The low three bits of each of four nibbles choose a byte of b:a.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long both = (unsigned long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned nibble = selector >> 4 * i & 7;
    result |= unsigned(both >> 8 * nibble & 0xff) << 8 * i;
  }
  return result;
}

// What a source may bring as plain C: templates, so that its own function comes first.
template <class = void>
inline unsigned byte_perm(unsigned a, unsigned b, unsigned selector) {
  return __byte_perm(a, b, selector);
}
template <class = void>
inline float f32_of_e4m3(unsigned char x) {
  return shim::of_e4m3(x);
}
template <class = void>
inline float f32_of_e5m2(unsigned char x) {
  return shim::of_e5m2(x);
}
template <class = void>
inline unsigned char e4m3_of_f32(float x) {
  return (unsigned char)shim::to_e4m3(x);
}
template <class = void>
inline unsigned char e5m2_of_f32(float x) {
  return (unsigned char)shim::to_e5m2(x);
}
