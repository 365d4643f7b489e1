"""portmm: matmul kernels generated for the machine you are on.

Importing does no work: nothing is detected, compiled or started before the
first call.
"""

from typing import TYPE_CHECKING

from portmm.api import matmul, plan
from portmm.errors import (
    BuildError,
    NoCompilerError,
    PackError,
    PortmmError,
    ScheduleError,
    TargetError,
)
from portmm.packed import pack
from portmm.settings import config, get_num_threads, set_num_threads
from portmm.version import VERSION

if TYPE_CHECKING:
    from portmm.explanation import Explanation, explain
    from portmm.formats import from_awq, from_gguf, from_gptq, from_int4
    from portmm.quantized import Quantized, dequantize, load_quantized, quantize, save_quantized
    from portmm.scaled import linear
    from portmm.stored import load_packed, save_packed

__version__ = VERSION

__all__ = [
    "BuildError",
    "Explanation",
    "NoCompilerError",
    "PackError",
    "PortmmError",
    "Quantized",
    "ScheduleError",
    "TargetError",
    "__version__",
    "config",
    "dequantize",
    "explain",
    "from_awq",
    "from_gguf",
    "from_gptq",
    "from_int4",
    "get_num_threads",
    "linear",
    "load_packed",
    "load_quantized",
    "matmul",
    "pack",
    "plan",
    "quantize",
    "save_packed",
    "save_quantized",
    "set_num_threads",
]

_LATER = {
    **dict.fromkeys(("Explanation", "explain"), "explanation"),
    **dict.fromkeys(("Quantized", "dequantize", "load_quantized", "quantize", "save_quantized"), "quantized"),
    **dict.fromkeys(("from_awq", "from_gguf", "from_gptq", "from_int4"), "formats"),
    **dict.fromkeys(("load_packed", "save_packed"), "stored"),
    "linear": "scaled",
}
"""Name -> module, of what a matmul from the cache does not need."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'portmm' has no attribute {name!r}")
    from importlib import import_module

    return globals().setdefault(name, getattr(import_module(f"portmm.{_LATER[name]}"), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
