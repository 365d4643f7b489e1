"""Matmul kernels that are generated for this machine: the public API of portmm.

The import does no work: nothing is detected, compiled or started before the
first call.
"""

import os
from typing import TYPE_CHECKING

from portmm.dispatch.config import config, get_num_threads, set_num_threads
from portmm.errors import (
    BuildError,
    BundleError,
    CheckpointError,
    ConvolutionError,
    DatabaseError,
    DeviceError,
    NoCompilerError,
    NoDeviceError,
    PackError,
    PortmmError,
    ScheduleError,
    TargetError,
    TraceError,
)
from portmm.ops.matmul import matmul, plan
from portmm.ops.prepack import pack
from portmm.version import VERSION

if TYPE_CHECKING:
    from portmm.comparison import compare
    from portmm.dispatch.cpu_kernels import forget
    from portmm.dispatch.threadpools import register_threadpoolctl
    from portmm.explanation.convolution import explain_conv
    from portmm.explanation.product import explain
    from portmm.explanation.record import Explanation
    from portmm.fusion.fuse import fuse
    from portmm.ops.attention import attention
    from portmm.ops.bundle_weights import bundled_layers
    from portmm.ops.bundles import use_bundle
    from portmm.ops.checkpoint_layers import pack_checkpoint
    from portmm.ops.convolution import conv
    from portmm.ops.convolution_gradients import conv_filter_gradient, conv_input_gradient, conv_transpose
    from portmm.ops.convolution_weights import pack_conv
    from portmm.ops.einsum import einsum
    from portmm.ops.grouped_matmul import grouped_matmul
    from portmm.ops.launch import launch
    from portmm.ops.linear import linear
    from portmm.ops.packed_files import load_packed, save_packed
    from portmm.ops.warmup import warmup
    from portmm.spec.elementwise import (
        cast,
        clip,
        dropout,
        elu,
        erf,
        exp,
        expm1,
        fast_gelu,
        gelu,
        gelu_tanh,
        hard_sigmoid,
        hard_swish,
        layer_norm,
        leaky_relu,
        log,
        log_softmax,
        logsumexp,
        max,
        maximum,
        mean,
        minimum,
        quantize_rows,
        relu,
        relu6,
        rms_norm,
        rsqrt,
        sigmoid,
        silu,
        softmax,
        softplus,
        sqrt,
        square,
        sum,
        tanh,
        where,
    )
    from portmm.tuning import tune
    from portmm.weights.checkpoints import from_awq, from_gguf, from_gptq, from_int4
    from portmm.weights.fp4 import from_fp4, quantize_fp4
    from portmm.weights.gguf import dequantize_gguf, open_gguf
    from portmm.weights.model_files import open_checkpoint
    from portmm.weights.quantized import Quantized, dequantize, load_quantized, quantize, save_quantized

__version__ = VERSION

__all__ = [
    "BuildError", "BundleError", "CheckpointError", "ConvolutionError", "DatabaseError", "DeviceError", "Explanation",
    "NoCompilerError", "NoDeviceError", "PackError", "PortmmError", "Quantized", "ScheduleError", "TargetError",
    "TraceError", "__version__", "attention", "bundled_layers", "cast", "clip", "compare", "config", "conv",
    "conv_filter_gradient", "conv_input_gradient", "conv_transpose", "dequantize", "dequantize_gguf", "dropout",
    "einsum", "elu", "erf", "exp", "explain", "explain_conv", "expm1", "fast_gelu", "forget", "from_awq", "from_fp4",
    "from_gguf", "from_gptq", "from_int4", "fuse", "gelu", "gelu_tanh", "get_num_threads", "grouped_matmul",
    "hard_sigmoid", "hard_swish", "launch", "layer_norm", "leaky_relu", "linear", "load_packed", "load_quantized",
    "log", "log_softmax", "logsumexp", "matmul", "max", "maximum", "mean", "minimum", "open_checkpoint", "open_gguf",
    "pack", "pack_checkpoint", "pack_conv", "plan", "quantize", "quantize_fp4", "quantize_rows",
    "register_threadpoolctl", "relu", "relu6", "rms_norm", "rsqrt", "save_packed", "save_quantized", "set_num_threads",
    "sigmoid", "silu", "softmax", "softplus", "sqrt", "square", "sum", "tanh", "tune", "use_bundle", "warmup", "where",
]  # fmt: skip

_LAZY = {
    "attention": "ops.attention",
    "compare": "comparison",
    "conv": "ops.convolution",
    "explain_conv": "explanation.convolution",
    **dict.fromkeys(("conv_filter_gradient", "conv_input_gradient", "conv_transpose"), "ops.convolution_gradients"),
    "pack_conv": "ops.convolution_weights",
    "explain": "explanation.product",
    "Explanation": "explanation.record",
    **dict.fromkeys(("Quantized", "dequantize", "load_quantized", "quantize", "save_quantized"), "weights.quantized"),
    **dict.fromkeys(("from_fp4", "quantize_fp4"), "weights.fp4"),
    **dict.fromkeys(("from_awq", "from_gguf", "from_gptq", "from_int4"), "weights.checkpoints"),
    **dict.fromkeys(("load_packed", "save_packed"), "ops.packed_files"),
    "einsum": "ops.einsum",
    "grouped_matmul": "ops.grouped_matmul",
    **dict.fromkeys(("dequantize_gguf", "open_gguf"), "weights.gguf"),
    "launch": "ops.launch",
    "open_checkpoint": "weights.model_files",
    "pack_checkpoint": "ops.checkpoint_layers",
    "linear": "ops.linear",
    "forget": "dispatch.cpu_kernels",
    "register_threadpoolctl": "dispatch.threadpools",
    "fuse": "fusion.fuse",
    "tune": "tuning",
    "bundled_layers": "ops.bundle_weights",
    "use_bundle": "ops.bundles",
    "warmup": "ops.warmup",
}
"""Modules of the names that are imported at their first use, since a matmul from the cache does not need them; others
are functions of elements."""


_PACKAGES = ("array_api", "dask", "jax", "onnx", "torch")
"""Packages for other libraries, which need no import of their own: `pm.dask.matmul`."""


if os.path.isdir(f"{__path__[0]}/base"):  # noqa: PTH112 - faster
    # A wheel with kernels: the modules of its first calls would be half of their 2 ms. They load nothing else.
    import portmm.host.amx_permission
    import portmm.ops.outlined_rows
    import portmm.spec.elementwise
    from portmm.fusion.fuse import fuse
    from portmm.ops.attention import attention
    from portmm.ops.linear import linear
if os.environ.get("PORTMM_BUNDLE"):
    import portmm.ops.bundles  # noqa: F401 - loaded, as three above


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _PACKAGES:
        return import_module(f"portmm.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'portmm' has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(f"portmm.{_LAZY.get(name, 'spec.elementwise')}"), name))


def __dir__() -> list[str]:
    return sorted(__all__)
