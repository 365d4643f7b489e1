"""Slice-K: distribution of k and columns over the threads of a block (see `gemv`).

Owns `Work`, the sizes of one gemv kernel, and loops that are omitted where they have one iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.product import Product
from portmm.schedule import gpu_gemv
from portmm.spec.layouts import operand

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.layout import Layout

ONE_ROUND = 8
"""Maximum number of threads with the same columns whose sums are added in one round."""


@dataclass(frozen=True, slots=True)
class Work(Product):
    """Sizes and addresses of one kernel."""

    @property
    def along_k(self) -> bool:
        """Whether B is contiguous along k."""
        return gpu_gemv.along_k(self.s)

    @property
    def codes(self) -> bool:
        """Whether B is a weight of int4 values."""
        return self.s.b.layout == "codes"

    @property
    def units(self) -> tuple[str, str]:
        """Types that are read of A and of B."""
        a, b, _ = self.s.types
        return (self.atom.acc, self.atom.acc) if self.s.atom.kr > 1 else (a, "s32" if self.codes else b)

    @property
    def width(self) -> int:
        """Number of units of a piece."""
        return gpu_gemv.width(self.s)

    @property
    def depth(self) -> int:
        """Number of pieces that a thread loads before it uses the first."""
        return self.s.tiles[0].k // self.width

    @property
    def slice_threads(self) -> int:
        """Number of threads of a block with the same columns."""
        return gpu_gemv.k_threads(self.s)

    @property
    def across(self) -> int:
        """Number of threads of a block with different columns."""
        return self.s.block.n // self.s.nr

    @property
    def hop(self) -> int:
        """Stride in units between pieces of a thread."""
        return self.slice_threads * self.width

    @property
    def chunk(self) -> int:
        """Number of units of A that a thread loads at once."""
        return min(self.s.a.vector // self.s.atom.kr, self.width) if self.s.a.layout == "row" else 1

    @property
    def operands(self) -> tuple[Layout, Layout]:
        """Layouts of A (m, k) and B (n, k)."""
        return operand("a", self.s.a.layout), operand("b", self.s.b.layout, "nk")

    @property
    def outputs(self) -> int:
        """Number of elements of C of a block."""
        return self.s.mr * self.s.block.n

    @property
    def parts(self) -> int:
        """Number of sums of each output after the first round."""
        return 1 if self.slice_threads <= ONE_ROUND else 1 << (self.slice_threads.bit_length() // 2)

    def spot(self, output: Index, share: Index) -> Ptr:
        """Address of one thread's sum of an output."""
        far, near = gpu_gemv.partial_sum_strides(self.s)
        return Ptr("sums", output * far + share * near)


def each(name: str, count: int, *body: Stmt) -> tuple[Stmt, ...]:
    """Unrolled loop; with one iteration, its body: see `of`."""
    return body if count == 1 else (unrolled(name, count, *body),)


def of(name: str, count: int) -> Index:
    """Index of a loop by `each`."""
    return const(0) if count == 1 else var(name)
