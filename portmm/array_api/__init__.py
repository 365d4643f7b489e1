"""Array API: NumPy's namespace for functions that take one (`xp`), with products by portmm.

`matmul`, `tensordot`, and those of `linalg`, multiply float16, float32 and float64 by kernels of portmm; all else, and
their other types, is NumPy's, so that results have the types and shapes of the standard.
"""

from typing import Any

from portmm.array_api import linalg
from portmm.array_api.products import base, matmul, tensordot

__all__ = ["linalg", "matmul", "tensordot"]


def __getattr__(name: str) -> Any:
    return getattr(base(), name)


def __dir__() -> list[str]:
    return sorted({*dir(base()), *__all__})
