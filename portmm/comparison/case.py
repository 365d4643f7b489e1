"""One case of a comparison.

Owns `Case`.
"""

from __future__ import annotations

from dataclasses import dataclass

from portmm.comparison import fused
from portmm.spec.dequantization import Dequantization
from portmm.spec.dtype import BY_NAME, size, spell, types
from portmm.spec.problem import Problem

BLOCK = 128
"""Rows of k that share a scale, in weights of four bits."""

LAYOUTS = ("row", "col")
PLAIN = ("f32", "f64")
"""Types that every library multiplies."""


@dataclass(frozen=True, slots=True)
class Case:
    """A product to time: C[batch, m, n] = A[batch, m, k] . B[batch, k, n].

    Attributes:
        name: unique name, for people and for files.
        group: the group of the case; geometric means are per group.
        m: rows of A and C.
        n: columns of B and C.
        k: the summed dimension.
        batch: number of independent products in one call.
        a: "row" (k contiguous) or "col" (m contiguous).
        b: "row" (n contiguous) or "col" (k contiguous).
        c: "row" (n contiguous) or "col" (m contiguous).
        packed: B is a weight that may be prepared beforehand, untimed.
        dtype: portmm's word for the element types: "f32", "u8-s8-s32". Integers with
            a result in floats are quantised values with scales, by row of A and by column of B.
        block: rows of k that share a scale of a weight of four bits.
        dynamic: activations may be rounded to 8 bits, row by row, in the call.
        fused: epilogue of the product in the same call, words of `comparison.fused`
            in their order, joined by "+": "bias+gelu".
        count: number of times that a run of the user's model computes it.

    Raises:
        ValueError: `fused` has unknown words, or follows sums of integers, a batch, or a
            column-major result.
    """

    name: str
    group: str
    m: int
    n: int
    k: int
    batch: int = 1
    a: str = "row"
    b: str = "row"
    c: str = "row"
    packed: bool = False
    dtype: str = "f32"
    block: int = 0
    dynamic: bool = False
    fused: str = ""
    count: int = 1

    def __post_init__(self) -> None:
        """Check the epilogue."""
        if fused.steps(self.fused) and (self.types[2] == "s32" or self.batch > 1 or self.c != "row"):
            raise ValueError(f"{self.name}: {self.fused!r} follows one product of floats by rows, or of scaled codes")

    @property
    def problem(self) -> Problem:
        """The case as a `Problem`; a packed B counts as row-major, rounded activations have the type they round to."""
        fused = Dequantization().text if self.scaled or self.dynamic else ""
        word = spell("s8", *self.types[1:]) if self.dynamic else self.dtype
        return Problem(self.m, self.n, self.k, word, self.batch, a=self.a, b=self.b, c=self.c, fused=fused)

    @property
    def types(self) -> tuple[str, str, str]:
        """Names of the element types of A, B and C."""
        return types(self.dtype)

    @property
    def narrow(self) -> bool:
        """Whether the types are others than one plain float."""
        return self.dtype not in PLAIN

    @property
    def kinds(self) -> frozenset[str]:
        """Features beyond a plain product of plain floats: "narrow", "fused", "packed"."""
        features = {"narrow": self.narrow, "fused": bool(self.fused), "packed": self.packed}
        return frozenset(name for name, holds in features.items() if holds)

    @property
    def whole(self) -> bool:
        """Whether A and B are integers, so that sums are exact."""
        return not any(BY_NAME[x].eps for x in self.types[:2])

    @property
    def scaled(self) -> bool:
        """Whether B is quantised with a scale for each column, and A, if it has integers too, with one for each row."""
        return self.types[1] == "s8" and self.types[2] != "s32"

    @property
    def bytes(self) -> int:
        """Compulsory traffic: A, B and C once each, the scales of blocks of B, bias and residual."""
        a, b, c = (size(x) for x in self.types)
        scales = size("f32") * self.n * -(-self.k // self.block) if self.block else 0
        words = fused.steps(self.fused)
        results = self.m * self.n * c * (2 if "residual" in words else 1)
        bias = self.n * c if "bias" in words else 0
        return int(self.batch * (self.m * self.k * a + self.k * self.n * b + results + scales) + bias)

    @property
    def flops(self) -> int:
        """Multiplications plus additions of the product, without its epilogue."""
        return self.problem.flops

    @property
    def shape(self) -> str:
        """`MxNxK` with batch, layouts, narrow types and epilogue, for display."""
        batch = f"{self.batch} x " if self.batch > 1 else ""
        marks = "".join("t" if x == "col" else "n" for x in (self.a, self.b, self.c))
        layout = "" if marks == "nnn" else f" {marks[:2]}{'' if self.c == 'row' else ', C col'}"
        kind = f" {self.dtype}" if self.narrow else ""
        kind += ", A in 8 bits" if self.dynamic else ""
        kind += f" {self.fused}" if self.fused else ""
        return f"{batch}{self.m}x{self.n}x{self.k}{layout}{' packed' if self.packed else ''}{kind}"
