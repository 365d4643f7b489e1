"""Epilogue of a quantized product: zero points, scales and a bias, as an expression of its sums.

With quantized values a, b of a_scale[i] (a - za[i]) and b_scale[j] (b - zb[j]), and sums A[i] = sum_k a and
B[j] = sum_k b, the exact integer is (Jacob et al., CVPR 2018, section 2.3)

    t = sum_k a b  -  za[i] B[j]  -  zb[j] (A[i] - k za[i])

and C = a_scale[i] (b_scale[j] t) + bias[j], in f32, rounded to C's type: three roundings, and that one. The caller
passes a_zero = -za, a_sum = -(A - k za) and b_zero = zb; B follows each packed panel. The scale and zero point of a
quantized output are part of a_scale, b_scale and bias.
"""

from __future__ import annotations

from typing import NamedTuple

from portmm.spec.epilogue import C, Fused, Operand, acc, column_sum, load, row_scale
from portmm.spec.expr import Expr, real
from portmm.spec.expr_functions import fma

IDENTITY = str(Fused((), ((C, acc()),)))
"""The epilogue that converts integer sums to elements of C."""
OPERANDS = {
    "a_scale": Operand("f32", "m"),
    "b_scale": Operand("f32", "n"),
    "bias": Operand("f32", "n"),
    "a_zero": Operand("s32", "m"),
    "a_sum": Operand("s32", "m"),
    "b_zero": Operand("s32", "n"),
}
"""All vectors along rows and columns, in the order in which an epilogue reads them."""


class Dequantization(NamedTuple):
    """The steps of such an epilogue.

    Attributes:
        a_zero: rows of A have zero points; B must be packed, with the sums of its columns.
        b_zero: columns of B have zero points.
        bias: a vector is added to each row.
        dynamic: the kernel quantizes the rows of A, and so has their scales.
    """

    a_zero: bool = False
    b_zero: bool = False
    bias: bool = False
    dynamic: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the vectors that it reads, keys of `OPERANDS`."""
        wanted = {
            "a_scale": not self.dynamic, "b_scale": True, "bias": self.bias,
            "a_zero": self.a_zero, "a_sum": self.b_zero, "b_zero": self.b_zero,
        }  # fmt: skip
        return tuple([name for name in OPERANDS if wanted[name]])

    @property
    def operands(self) -> tuple[Operand, ...]:
        """These vectors."""
        return tuple([OPERANDS[name] for name in self.names])

    def value(self) -> Expr:
        """The expression of an element, whose first operands are `operands`."""
        x = {name: load(i, OPERANDS[name].dtype) for i, name in enumerate(self.names)}
        total = acc("s32") if self.a_zero or self.b_zero else acc()
        if self.a_zero:
            total = total + x["a_zero"] * column_sum()
        if self.b_zero:
            total = total + x["a_sum"] * x["b_zero"]
        scale = row_scale() if self.dynamic else x["a_scale"]
        return fma(scale, real(total) * x["b_scale"], x["bias"] if self.bias else 0.0)

    @property
    def text(self) -> str:
        """The epilogue alone, as the string of a `Problem`."""
        return str(Fused(self.operands, ((C, self.value()),)))


def of_words(words: str, text: str, *, dynamic: bool) -> str:
    """The epilogue of a problem or a schedule as portmm 0.1 wrote it: words as "scale+bias", and expressions `text`.

    Raises:
        ValueError: there are no such words, or expressions follow more than scales of 1.
    """
    known = {"azero": "a_zero", "bzero": "b_zero", "bias": "bias"}
    first, *rest = words.split("+")
    if first != "scale" or not set(rest) <= set(known) or (rest and text):
        raise ValueError(f"post is {words!r}, which this version does not read: tune or emit the schedule again")
    return text or Dequantization(**{known[x]: True for x in rest}, dynamic=dynamic).text
