"""Element types.

Owns the names, sizes and C spellings of element types, of the *units* in which
some instructions read them, and of the triples (A, B, C) of products. The
generator supports no other types.
"""

from __future__ import annotations

from functools import cache
from math import ceil, log2

from portmm.util.records import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """An element type, or a unit of `pack` adjacent elements along k.

    Attributes:
        name: portmm's short name, as used in kernel names and target files.
        numpy: the NumPy name; for a unit, that of its elements.
        bytes: size of one element, or of one unit.
        c: the C spelling. Types that C does not have are integers of their size.
        eps: unit round-off, for error bounds; 0 for integers.
        pack: elements in a unit.
        base: name of the type of a unit's elements.
    """

    name: str
    numpy: str
    bytes: int
    c: str
    eps: float
    pack: int = 1
    base: str = ""


F32 = DType("f32", "float32", 4, "float", 2.0**-24)
F64 = DType("f64", "float64", 8, "double", 2.0**-53)
BF16 = DType("bf16", "bfloat16", 2, "unsigned short", 2.0**-8)
F16 = DType("f16", "float16", 2, "unsigned short", 2.0**-11)
E4M3 = DType("e4m3", "float8_e4m3fn", 1, "unsigned char", 2.0**-4)
E5M2 = DType("e5m2", "float8_e5m2", 1, "unsigned char", 2.0**-3)
"""Floats of eight bits: of four bits of exponent, up to 448 and without infinities; of five, up to 57344."""
S8 = DType("s8", "int8", 1, "signed char", 0.0)
U8 = DType("u8", "uint8", 1, "unsigned char", 0.0)
S16 = DType("s16", "int16", 2, "short", 0.0)
S32 = DType("s32", "int32", 4, "int", 0.0)

U4 = DType("u4", "uint8", 1, "unsigned char", 0.0)
"""Int4 values: half a byte each in memory, where they are in words only; in registers a byte, 0 to 15."""

_PLAIN = (F32, F64, BF16, F16, S8, U8, S16, S32)
_FP8 = (E4M3, E5M2)
_C_OF_BYTES = {2: "short", 4: "int", 8: "long"}

UNCONVERTED = ("f32", "f64")
"""Types of operands and results whose sums need no conversion, and no atom that multiplies units or tiles."""


def _unit(t: DType, pack: int) -> DType:
    size = t.bytes * pack
    return DType(f"{t.name}x{pack}", t.numpy, size, _C_OF_BYTES[size], t.eps, pack, t.name)


B32 = DType("b32", "uint32", 4, "unsigned", 0.0)
B64 = DType("b64", "uint64", 8, "unsigned long", 0.0)
"""Untyped bits, interpreted by instructions: fragments of matrices, barriers."""

_UNITS = tuple(_unit(t, pack) for t in (*_PLAIN, U4) for pack in (2, 4, 8) if 2 <= t.bytes * pack <= 8 and t.bytes < 4)

CODE_BITS = 4
CODES_KR = 8
"""Int4 values of one column in a word of 32 bits, an s32."""
USUAL_GROUP = 128
"""Rows of an int4 weight that share a scale, by default."""
ZERO_CODE = 8
"""The int4 value of zero in a weight without zero points; zero points are near it."""
E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
"""Floats of four bits, of two bits of exponent and one of mantissa, doubled: whole numbers, by their bits."""
ZERO_E2M1 = 12
"""Zero point of doubled e2m1 values that are stored as unsigned integers."""
CODES_AT = (0, 8, 16, 24, 4, 12, 20, 28)
"""Bit offset of each int4 value in a word: those of four neighbours along k are the lower, or the upper, halves of
the four bytes, so that a mask yields operands of instructions for units of four bytes."""

BY_NAME: dict[str, DType] = {t.name: t for t in (*_PLAIN, *_FP8, U4, B32, B64, *_UNITS)}
BY_NUMPY: dict[str, DType] = {t.numpy: t for t in (*_PLAIN, *_FP8)}

_INTEGERS = frozenset(t.name for t in (*_PLAIN, U4) if not t.eps)
FP8 = frozenset(t.name for t in _FP8)
EXTENSION_TYPES = frozenset(("bf16", *FP8))
"""Types of ml_dtypes, which NumPy does not have."""
_SIDES = frozenset(("f32", "bf16", "f16", *FP8))


def unit(name: str, pack: int) -> str:
    """The unit of `pack` elements of a type; the type itself for one."""
    return f"{name}x{pack}" if pack > 1 else name


def base(name: str) -> str:
    """The type of a unit's elements; the type itself if it is none."""
    return BY_NAME[name].base or name


def size(name: str) -> float:
    """Bytes of an element in memory: 0.5 for int4."""
    return 0.5 if name == "u4" else float(BY_NAME[name].bytes)


def spell(a: str, b: str, c: str) -> str:
    """The types of A, B and C as one string: "f32" if all are that float, else "u8-s8-s32"."""
    return a if a == b == c and a not in _INTEGERS else f"{a}-{b}-{c}"


@cache
def types(word: str) -> tuple[str, str, str]:
    """The types of A, B and C from the string of `spell`; "s8" alone means products in s32.

    Raises:
        ValueError: a type is unknown, or the three cannot make a product.
    """
    parts = word.split("-")
    unknown = [x for x in parts if x not in BY_NAME]
    if unknown or len(parts) not in (1, 3):
        known = ", ".join(t.name for t in (*_PLAIN, *_FP8))
        raise ValueError(f"dtype {word!r} is unknown; use one of {known}, or three of them as in u8-s8-s32")
    if len(parts) == 1:
        parts *= 3
        parts[2] = natural(parts[0], parts[1]) if parts[0] in _INTEGERS else parts[0]
    a, b, c = parts
    accumulator(a, b)
    return a, b, c


def parts(of: str, narrow: str) -> int:
    """Number of floats of a `narrow` type that sum up to any float `of` another, each with some of its bits."""
    wide = BY_NAME[of].eps
    return ceil(log2(wide) / log2(BY_NAME[narrow].eps)) if wide else 1


def accumulator(a: str, b: str) -> str:
    """The accumulator type of products of `a` and `b`.

    Integers are summed exactly in s32, modulo 2**32, int4 values within a group; the narrow
    floats, and floats times integers, in f32.

    Raises:
        ValueError: this pair of types is not supported.
    """
    if a == b == "f64":
        return "f64"
    if (a in ("s8", "u8") and b == "s8") or (a == "s8" and b == "u4"):
        return "s32"
    if a in _SIDES and (b in _SIDES or b in ("s8", "u8", "u4")):
        return "f32"
    if b in _SIDES and a in ("s8", "u8"):
        return "f32"
    raise ValueError(f"{a} times {b} is not supported; integers are s8 or u8 on the left and s8 on the right")


def dequantized_types(word: str) -> str:
    """The types of a product after int4 values are dequantized."""
    a, b, c = types(word)
    return spell(a, "f32", c) if b == "u4" and a in _SIDES else word


def natural(a: str, b: str) -> str:
    """The default type of a product's result: that of NumPy's promotion, s32 for integers.

    For two floats of eight bits it is bf16, where NumPy would return one of them: products soon overflow these.
    """
    acc = accumulator(a, b)
    if a in FP8 and b in FP8:
        return "bf16"
    return a if a == b and a in _SIDES else acc


def word_of(text: str) -> str:
    """The types of A, B and C, as of `spell`, from three types, or from that of A and B by portmm's or NumPy's name.

    Raises:
        ValueError: a type is unknown, or they make no product.
    """
    short = BY_NUMPY[text].name if text in BY_NUMPY else text
    a, b, c = types(short)
    return spell(a, b, c if "-" in short else natural(a, b))
