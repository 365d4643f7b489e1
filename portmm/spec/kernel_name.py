"""Names of kernels, as a grammar that is written and parsed.

Owns the grammar `portmm_<op>_<acc>_<a>_<b>_<MR>x<NR>x<KR>_<isa>`. The name
identifies the micro-kernel family of a kernel; two kernels of one family differ
in blocking, which their header lines state.
"""

from __future__ import annotations

import re

from portmm.util.records import dataclass

_GRAMMAR = re.compile(
    r"portmm_(?P<op>[a-z]+)_(?P<acc>[a-z]+\d+)_(?P<a>[a-z]+\d+)_(?P<b>[a-z]+\d+)"
    r"_(?P<mr>\d+)x(?P<nr>\d+)x(?P<kr>\d+)_(?P<isa>[a-z][a-z0-9_]*)"
)


@dataclass(frozen=True, slots=True)
class KernelName:
    """The parts of a kernel's name.

    Attributes:
        op: the block program: "gemm", "dot".
        acc: accumulator type.
        a: left element type.
        b: right element type.
        mr: rows of the register tile.
        nr: columns of the register tile.
        kr: adjacent elements of k in a fragment.
        isa: name of the instruction set.
    """

    op: str
    acc: str
    a: str
    b: str
    mr: int
    nr: int
    kr: int
    isa: str

    def __str__(self) -> str:
        return f"portmm_{self.op}_{self.acc}_{self.a}_{self.b}_{self.mr}x{self.nr}x{self.kr}_{self.isa}"


def parse(name: str) -> KernelName:
    """The parts of a kernel's name.

    Raises:
        ValueError: `name` does not follow the grammar.
    """
    match = _GRAMMAR.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a kernel name; expected e.g. portmm_gemm_f32_f32_f32_14x32x1_avx512")
    parts = match.groupdict()
    return KernelName(**{k: int(v) if k in ("mr", "nr", "kr") else v for k, v in parts.items()})  # type: ignore[arg-type]
