"""PyTorch: the backend of `torch.compile`, operators, and quantized layers.

`torch.compile(model, backend="portmm")` needs no import. The names of this package import PyTorch at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from portmm.errors import PortmmError

if TYPE_CHECKING:
    from portmm.torch.backend import compile_graph, reports

__all__ = ["compile_graph", "reports"]

_MODULES = {"compile_graph": "backend", "reports": "backend"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'portmm.torch' has no attribute {name!r}")
    try:
        import_module("torch")
    except ImportError as error:
        raise PortmmError(f"portmm.torch.{name} needs PyTorch: {error}; `pip install 'portmm[torch]'`") from error
    return globals().setdefault(name, getattr(import_module(f"portmm.torch.{_MODULES[name]}"), name))


def __dir__() -> list[str]:
    return sorted(__all__)
