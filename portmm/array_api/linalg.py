"""Linear algebra of the array API: the products of portmm, and else NumPy's `linalg`."""

from typing import Any

from portmm.array_api.products import base, matmul, tensordot

__all__ = ["matmul", "tensordot"]


def __getattr__(name: str) -> Any:
    return getattr(base().linalg, name)


def __dir__() -> list[str]:
    return sorted({*dir(base().linalg), *__all__})
