"""Element types.

Owns the names, sizes and C spellings of element types. Imports nothing of
portmm. A type that is not listed here does not exist for the generator.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: portmm's short name, as used in kernel names and target files.
        numpy: the NumPy name.
        bytes: size of one element.
        c: the C spelling.
        eps: unit round-off of the accumulator, for error bounds.
    """

    name: str
    numpy: str
    bytes: int
    c: str
    eps: float


F32 = DType("f32", "float32", 4, "float", 2.0**-24)
F64 = DType("f64", "float64", 8, "double", 2.0**-53)

ALL: tuple[DType, ...] = (F32, F64)
BY_NAME: dict[str, DType] = {t.name: t for t in ALL}
BY_NUMPY: dict[str, DType] = {t.numpy: t for t in ALL}
