"""PyTorch: the backend of `torch.compile`, operators, and quantized layers.

`torch.compile(model, backend="portmm")` needs no import. The names of this package import PyTorch at their first use.
"""

from typing import TYPE_CHECKING

from portmm.util.optional_packages import attribute

if TYPE_CHECKING:
    from portmm.torch.backend import compile_graph, reports
    from portmm.torch.operators import attention, conv, linear, matmul
    from portmm.torch.quantization import QuantizedAttention, QuantizedConv, QuantizedLinear, quantize_

__all__ = [
    "QuantizedAttention", "QuantizedConv", "QuantizedLinear", "attention", "compile_graph", "conv", "linear", "matmul",
    "quantize_", "reports",
]  # fmt: skip

_MODULES = {
    **dict.fromkeys(("compile_graph", "reports"), "backend"),
    **dict.fromkeys(("attention", "conv", "linear", "matmul"), "operators"),
    **dict.fromkeys(("QuantizedAttention", "QuantizedConv", "QuantizedLinear", "quantize_"), "quantization"),
}


def __getattr__(name: str) -> object:
    return globals().setdefault(name, attribute("torch", name, _MODULES, "torch", "PyTorch"))


def __dir__() -> list[str]:
    return sorted(__all__)
