"""Dask: products of arrays in chunks, on one machine or many.

The names of this package import Dask at their first use.
"""

from typing import TYPE_CHECKING

from portmm.util.optional_packages import attribute

if TYPE_CHECKING:
    from portmm.dask.products import einsum, linear, matmul

__all__ = ["einsum", "linear", "matmul"]


def __getattr__(name: str) -> object:
    return globals().setdefault(name, attribute("dask", name, dict.fromkeys(__all__, "products"), "dask.array", "Dask"))


def __dir__() -> list[str]:
    return sorted(__all__)
