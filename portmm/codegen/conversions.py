"""Conversions of single elements, in C.

Owns the conversions that C does not have: the narrow floats, which are integers
of their size there, saturation, and the shift between s8 and u8. C itself converts
pairs that are not in the table. Rounding is to nearest even, as in the vector
conversions of the target files.
"""

from __future__ import annotations

from portmm.spec.dtype import base

HELPERS = {
    "f32_of_bf16": """\
static inline float f32_of_bf16(unsigned short x) {
  union { unsigned u; float f; } v = {(unsigned)x << 16};
  return v.f;
}""",
    "bf16_of_f32": """\
static inline unsigned short bf16_of_f32(float x) {
  union { float f; unsigned u; } v = {x};
  if ((v.u & 0x7fffffff) > 0x7f800000) return (unsigned short)(v.u >> 16 | 0x40); /* NaN stays one */
  return (unsigned short)((v.u + 0x7fff + (v.u >> 16 & 1)) >> 16);
}""",
    "f32_of_f16": """\
static inline float f32_of_f16(unsigned short x) {
  const unsigned sign = (x & 0x8000u) << 16, rest = (x & 0x7fffu) << 13;
  union { unsigned u; float f; } v = {rest};
  if (rest >= 0x0f800000) v.u += 0x70000000; /* infinity, NaN */
  else v.f *= 0x1p112f; /* the exponents' biases differ by 112; subnormals become normal */
  v.u |= sign;
  return v.f;
}""",
    "f16_of_f32": """\
static inline unsigned short f16_of_f32(float x) {
  union { float f; unsigned u; } v = {x}, half = {0.5f};
  const unsigned sign = v.u >> 16 & 0x8000;
  v.u &= 0x7fffffff;
  if (v.u > 0x7f800000) return (unsigned short)(sign | 0x7e00 | (v.u >> 13 & 0x3ff)); /* NaN */
  if (v.u >= 0x477ff000) return (unsigned short)(sign | 0x7c00); /* rounds to infinity */
  if (v.u >= 0x38800000) return (unsigned short)(sign | (v.u - 0x38000000 + 0xfff + (v.u >> 13 & 1)) >> 13);
  v.f += half.f; /* subnormal: the sum's last bit weighs 2**-24 */
  return (unsigned short)(sign | (v.u - half.u));
}""",
    "s8_of_f32": """\
static inline signed char s8_of_f32(float x) {
  /* the sum's last bit weighs 1, so that adding rounds */
  union { float f; int i; } v = {(x > -128 ? x < 127 ? x : 127 : -128) + 0x1.8p23f};
  return (signed char)(v.i - 0x4b400000);
}""",
    "u8_of_f32": """\
static inline unsigned char u8_of_f32(float x) {
  union { float f; int i; } v = {(x > 0 ? x < 255 ? x : 255 : 0) + 0x1.8p23f};
  return (unsigned char)(v.i - 0x4b400000);
}""",
}
"""Name of a function -> its text, printed where it is called."""

_CONVERSIONS = {
    ("s8", "u8"): "(unsigned char)({x} + 128)",
    ("u8", "s8"): "(signed char)({x} - 128)",
    ("bf16", "f32"): "f32_of_bf16({x})",
    ("f32", "bf16"): "bf16_of_f32({x})",
    ("f16", "f32"): "f32_of_f16({x})",
    ("f32", "f16"): "f16_of_f32({x})",
    ("e4m3", "f32"): "f32_of_e4m3({x})",
    ("f32", "e4m3"): "e4m3_of_f32({x})",
    ("e5m2", "f32"): "f32_of_e5m2({x})",
    ("f32", "e5m2"): "e5m2_of_f32({x})",
    ("f32", "s8"): "s8_of_f32({x})",
    ("f32", "u8"): "u8_of_f32({x})",
}


def converted(x: str, memory: str, to: str) -> str:
    """The expression `x` of one type, converted to another."""
    return _CONVERSIONS.get((base(memory), base(to)), "{x}").replace("{x}", x)
