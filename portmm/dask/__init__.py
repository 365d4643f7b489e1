"""Dask: products of arrays in chunks, on one machine or many.

The names of this package import Dask at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from portmm.errors import PortmmError

if TYPE_CHECKING:
    from portmm.dask.products import einsum, linear, matmul

__all__ = ["einsum", "linear", "matmul"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'portmm.dask' has no attribute {name!r}")
    try:
        import_module("dask.array")
    except ImportError as error:
        raise PortmmError(f"portmm.dask.{name} needs Dask: {error}; `pip install 'portmm[dask]'`") from error
    return globals().setdefault(name, getattr(import_module("portmm.dask.products"), name))


def __dir__() -> list[str]:
    return sorted(__all__)
