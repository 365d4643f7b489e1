"""JAX: products, linear layers and attention on processors, with jit, vmap and gradients.

The names of this package import JAX at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from portmm.errors import PortmmError

if TYPE_CHECKING:
    from portmm.jax.operators import attention, linear, matmul

__all__ = ["attention", "linear", "matmul"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'portmm.jax' has no attribute {name!r}")
    try:
        import_module("jax")
    except ImportError as error:
        raise PortmmError(f"portmm.jax.{name} needs JAX: {error}; `pip install 'portmm[jax]'`") from error
    return globals().setdefault(name, getattr(import_module("portmm.jax.operators"), name))


def __dir__() -> list[str]:
    return sorted(__all__)
