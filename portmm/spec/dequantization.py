"""Epilogue of a quantized product: zero points, scales and a bias, as an expression of its sums.

With quantized values a, b of a_scale[i] (a - za[i]) and b_scale[j] (b - zb[j]), and sums A[i] = sum_k a and
B[j] = sum_k b, the exact integer is (Jacob et al., CVPR 2018, section 2.3)

    t = sum_k a b  -  za[i] B[j]  -  zb[j] (A[i] - k za[i])

and C = a_scale[i] (b_scale[j] t) + bias[j], in f32, rounded to C's type: three roundings, and that one. The caller
passes a_zero = -za, a_sum = -(A - k za) and b_zero = zb; B follows each packed panel. The scale and zero point of a
quantized output are part of a_scale, b_scale and bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from portmm.spec.epilogue import Operand
    from portmm.spec.expr import Expr

IDENTITY = " | acc | C 0"
"""The epilogue that converts integer sums to elements of C."""
OPERANDS = {
    "a_scale": ("f32", "m"),
    "b_scale": ("f32", "n"),
    "bias": ("f32", "n"),
    "a_zero": ("s32", "m"),
    "a_sum": ("s32", "m"),
    "b_zero": ("s32", "n"),
}
"""All vectors along rows and columns, in the order in which an epilogue reads them: type and axis."""


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
    def axes(self) -> tuple[str, ...]:
        """The axis of each."""
        return tuple([OPERANDS[name][1] for name in self.names])

    @property
    def operands(self) -> tuple[Operand, ...]:
        """These vectors."""
        from portmm.spec.epilogue import Operand

        return tuple([Operand(*OPERANDS[name]) for name in self.names])

    def value(self) -> Expr:
        """The expression of an element, whose first operands are `operands`."""
        from portmm.spec.epilogue import parse

        ((_, value),) = parse(self.text).results
        return value

    @property
    def text(self) -> str:
        """The epilogue alone, as the string of a `Problem`, made without the time to load expressions."""
        steps: list[str] = []

        def step(*words: object) -> int:
            steps.append(" ".join(map(str, words)))
            return len(steps) - 1

        at = {name: f"load {i}" for i, name in enumerate(self.names)}
        exact = self.a_zero or self.b_zero
        scale = step("row_scale" if self.dynamic else at["a_scale"])
        total = step("acc s32" if exact else "acc")
        if self.a_zero:
            total = step("add", total, step("mul", step(at["a_zero"]), step("column_sum")))
        if self.b_zero:
            total = step("add", total, step("mul", step(at["a_sum"]), step(at["b_zero"])))
        total = step("float", total) if exact else total
        scaled = step("mul", total, step(at["b_scale"]))
        last = step("fma", scale, scaled, step(at["bias"] if self.bias else "const f32 0.0"))
        return f"{' '.join(['.'.join(OPERANDS[name]) for name in self.names])} | {'; '.join(steps)} | C {last}"


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
