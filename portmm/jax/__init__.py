"""JAX: products, linear layers and attention on processors, with jit, vmap and gradients.

The names of this package import JAX at their first use.
"""

from typing import TYPE_CHECKING

from portmm.util.optional_packages import attribute

if TYPE_CHECKING:
    from portmm.jax.operators import attention, linear, matmul

__all__ = ["attention", "linear", "matmul"]


def __getattr__(name: str) -> object:
    return globals().setdefault(name, attribute("jax", name, dict.fromkeys(__all__, "operators"), "jax", "JAX"))


def __dir__() -> list[str]:
    return sorted(__all__)
