// The primitives that compute with numbers and are instructions: dot products of four bytes (dp4a) and halves.
#pragma once

namespace shim {

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

}  // namespace shim

inline int dot4_s8s8(int a, int b, int c) { return shim::dot4<signed char, signed char>(a, b, c); }
inline int dot4_u8s8(int a, int b, int c) { return shim::dot4<unsigned char, signed char>(a, b, c); }

inline float f32_of_f16(unsigned short x) {
  const unsigned sign = (x & 0x8000u) << 16, exponent = x >> 10 & 31, mantissa = x & 1023;
  if (exponent == 31) return __uint_as_float(mantissa ? 0x7fffffffu : sign | 0x7f800000u);
  if (exponent == 0) {  // subnormals count units of 2^-24
    const float size = float(mantissa) * 0x1p-24f;
    return sign ? -size : size;
  }
  return __uint_as_float(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
}

inline unsigned short f16_of_f32(float x) {
  if (x != x) return 0x7fff;
  const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size >= __float_as_uint(65520.0f)) return (unsigned short)(sign | 0x7c00u);  // from halfway to 2^16 up
  if (size >= __float_as_uint(0x1p-14f))
    return (unsigned short)(sign | (shim::rounded(size, 13) - ((127u - 15) << 10)));
  // A subnormal result counts units of 2^-24: 24 bits of mantissa, shifted down by as much as is missing.
  const unsigned drop = 126 - (size >> 23), mantissa = (size & 0x7fffffu) | 0x800000u;
  return (unsigned short)(sign | (drop > 24 ? 0u : shim::rounded(mantissa, int(drop))));
}
