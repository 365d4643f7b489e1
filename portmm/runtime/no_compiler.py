"""The run time without a compiler: its types, and no kernels.

Owns `PLAIN`, which stands in for the run time where that cannot be built: packed weights can be made and read, and
plans made, which NumPy computes. Imports `errors`, `records`, NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import BuildError
from portmm.runtime.cffi_records import Kernel, Packed, Plan, Route, address, register_dtype

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Plain:
    """The part of `host.Runtime` that needs no machine code."""

    Packed, Kernel, Route, Plan = Packed, Kernel, Route, Plan
    register_dtype = staticmethod(register_dtype)
    address = staticmethod(address)

    @staticmethod
    def load(path: str | Path, symbol: str, file: str | Path = "") -> Any:
        """See `host.Runtime`: nothing can be loaded here."""
        del file
        raise BuildError(f"{symbol} of {path} cannot be loaded: there is no run time to call it")

    @staticmethod
    def describe(*_: Any) -> None:
        """See `host.Runtime`: nothing is told here."""

    @staticmethod
    def are_scales(vector: np.ndarray[Any, Any]) -> bool:
        """See `host.Runtime`."""
        return bool(((vector >= 0) & (vector < np.inf)).all())


class PlainPlan(Plan):
    """A plan that NumPy computes: the same checks, and `product(a, b)` for a kernel.

    Args:
        word: types of A, B and C, as routes have them.
        operands: shape and strides of A and C, of B too or a packed weight.
        product: the product of two arrays, of which the second is that of a packed weight's panels if it is bound.
    """

    __slots__ = ("_product",)

    def __init__(self, word: str, operands: tuple[Any, Any, Any], product: Callable[[Any, Any], Any]) -> None:
        route = Route(Kernel("", "", None), 0, 1, word)
        super().__init__(lambda *_: None, route, operands, (0,) * 13, None)
        self._product = product

    def run(self, a: Any, b: Any, out: Any, *, scalar: bool) -> Any:
        """See `Plan`."""
        np.copyto(out, self._product(a, b), casting="same_kind")
        return out[()] if scalar and out.ndim == 0 else out


PLAIN = Plain()
