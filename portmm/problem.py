"""What is computed.

Owns `Problem`, the description of one matrix product, free of any machine.
Imports `dtype`, `errors`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from portmm.dtype import BY_NAME, DType
from portmm.errors import ScheduleError

LAYOUTS_A = ("row", "col", "any")
LAYOUTS_B = ("row", "col", "any", "packed")
LAYOUTS_C = ("row", "col")


@dataclass(frozen=True, slots=True)
class Problem:
    """C[batch, m, n] = A[batch, m, k] . B[batch, k, n].

    Attributes:
        m: rows of A and C.
        n: columns of B and C.
        k: the summed dimension.
        dtype: name of the element type of A, B and C.
        batch: number of independent products that share one call.
        a: layout of A: "row" (k contiguous), "col" (m contiguous) or "any".
        b: layout of B: "row" (n contiguous), "col" (k contiguous), "any",
            or "packed" (panels made by `portmm.pack`).
        c: layout of C: "row" (n contiguous) or "col" (m contiguous).
        family: for a packed B, the micro-kernel family that fixes its layout.
        deterministic: every element of C is one chain of multiply-adds in the
            order of k, whatever m, the thread count or the blocking.
        static: m, n and k (and dense strides) are compiled in as constants.
    """

    m: int
    n: int
    k: int
    dtype: str = "f32"
    batch: int = 1
    a: str = "row"
    b: str = "row"
    c: str = "row"
    family: str = ""
    deterministic: bool = False
    static: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in BY_NAME:
            raise ValueError(f"dtype {self.dtype!r} is unknown; use one of {', '.join(BY_NAME)}")
        for name, value, allowed in (("a", self.a, LAYOUTS_A), ("b", self.b, LAYOUTS_B), ("c", self.c, LAYOUTS_C)):
            if value not in allowed:
                raise ValueError(f"layout of {name} is {value!r}; use one of {', '.join(allowed)}")
        if min(self.m, self.n, self.k, self.batch) < 0:
            raise ValueError(f"negative dimension in {self.m}x{self.n}x{self.k}, batch {self.batch}")

    @property
    def element(self) -> DType:
        """The element type."""
        return BY_NAME[self.dtype]

    @property
    def flops(self) -> int:
        """Multiplications plus additions: 2 * batch * m * n * k."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Compulsory traffic: A, B and C once each, in bytes."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * self.element.bytes

    def transposed(self) -> Problem:
        """The same product written as C^T = B^T . A^T.

        Raises:
            ScheduleError: B is packed, and there is no packed A for it to become.
        """
        if self.b == "packed":
            raise ScheduleError(f"{self}: a packed B cannot change sides; give C by rows, or unpack B")
        flip = {"row": "col", "col": "row", "any": "any"}
        return replace(self, m=self.n, n=self.m, a=flip[self.b], b=flip[self.a], c=flip[self.c])

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch != 1 else ""
        marks = [f"A {self.a}", f"B {self.b}", f"C {self.c}"]
        marks += ["deterministic"] if self.deterministic else []
        marks += ["static"] if self.static else []
        return f"{batch}{self.m} x {self.n} x {self.k} {self.dtype} ({', '.join(marks)})"
