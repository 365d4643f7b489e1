"""OpenVINO, as a model of one layer.

Owns one contender.

A weight that the case packs is a constant of the model, which OpenVINO prepacks when it
compiles it. Inputs and outputs are the case's arrays, so that nothing is copied. Its
kernels for products with epilogues are those of a oneDNN of its own, which reads
ONEDNN_MAX_CPU_ISA. A case of float32 is computed in float32, one of bfloat16 in bfloat16.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.numpy_arrays import numpy_of
from portmm.comparison import fused, native
from portmm.comparison.case import BLOCK
from portmm.comparison.data import INPUTS, ZERO
from portmm.comparison.peers import Library, MissingError, Run, UnsupportedError, repeat

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.comparison.case import Case
    from portmm.comparison.data import Arrays
    from portmm.comparison.environment import Setup

OFFERED = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}
"""Types of activations -> the plugin's word for a processor's support of them."""


def open_openvino(setup: Setup) -> Library:
    """Open OpenVINO and its plugin for processors."""
    try:
        ov: Any = import_module("openvino")
        opset: Any = import_module("openvino.opset13")
    except ImportError as error:
        raise MissingError(str(error)) from error
    core = ov.Core()
    offered = set(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        activations, _, results = case.types
        native.only(activations == results and not case.whole, f"no layer of {case.dtype}")
        native.only(OFFERED.get(activations) in offered, f"no {activations} on this processor")
        native.only(case.packed or case.types[1] == activations, "quantised weights only as constants")
        operands = (data.a, data.b, data.c)
        native.only(all(x.flags.c_contiguous for x in operands), "only operands by rows")
        model, inputs, kept = _model(ov, opset, case, data)
        options = {
            "INFERENCE_PRECISION_HINT": activations,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": setup.threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": (case.block or BLOCK) if case.dynamic else 0,
        }
        try:
            request = core.compile_model(model, "CPU", options).create_infer_request()
        except RuntimeError as error:
            raise UnsupportedError(str(error).strip().rpartition("\n")[2][:200]) from error
        for i, array in enumerate(inputs):
            request.set_input_tensor(i, _shared(ov, array, activations))
        request.set_output_tensor(_shared(ov, data.c, results))
        return {"model": repeat(lambda: (request.infer(), kept))}

    return Library(f"openvino {ov.__version__.partition('-')[0]}", prepare, dtypes=None, precision=INPUTS, fused=True)


def _shared(ov: Any, array: Any, dtype: str) -> Any:
    """A tensor over an array's memory; OpenVINO does not know NumPy's bfloat16."""
    if dtype != "bf16":
        return ov.Tensor(array, shared_memory=True)
    return ov.Tensor(array.view(np.uint16), ov.Shape(array.shape), ov.Type.bf16)


def _model(ov: Any, opset: Any, case: Case, data: Arrays) -> tuple[Any, list[Any], list[Any]]:
    """Model of the layer, the arrays of its inputs in their order, and those of its constants."""
    dtype = getattr(ov.Type, case.types[0])
    inputs: list[Any] = []
    parameters: list[Any] = []
    kept: list[Any] = []

    def called_with(array: Any) -> Any:
        inputs.append(array)
        parameters.append(opset.parameter(list(array.shape), dtype))
        return parameters[-1]

    def constant(array: Any, shape: tuple[int, ...] = ()) -> Any:
        kept.append(array)
        if shape:
            return ov.op.Constant(ov.Tensor(array, ov.Shape(shape), ov.Type.u4))
        return ov.op.Constant(_shared(ov, array, "bf16" if array.dtype.name == "bfloat16" else ""))

    x = called_with(data.a)
    if case.packed:
        y = opset.matmul(x, _weight(opset, case, data, constant, dtype), False, True)
    else:
        y = opset.matmul(x, called_with(data.b), False, False)
    functions = {
        "relu": opset.relu,
        "gelu": lambda y: opset.gelu(y, "erf"),
        "gelu_tanh": lambda y: opset.gelu(y, "tanh"),
        "silu": lambda y: opset.multiply(y, opset.sigmoid(y)),
    }
    for word in fused.steps(case.fused):
        if word == "bias":
            y = opset.add(y, constant(data.bias.reshape(1, -1)))
        elif word == "residual":
            y = opset.add(y, called_with(data.residual))
        else:
            y = functions[word](y)
    return ov.Model([opset.result(y)], parameters, "layer"), inputs, kept


def _weight(opset: Any, case: Case, data: Arrays, constant: Callable[..., Any], dtype: Any) -> Any:
    """Weight (n, k): a constant, or the dequantization of one."""
    transposed = np.ascontiguousarray(data.b.T)
    if not (case.block or case.scaled):
        return constant(transposed)
    real = numpy_of(case.types[0])
    if case.scaled:
        return opset.multiply(opset.convert(constant(transposed), dtype), constant(data.columns[:, None].astype(real)))
    native.only(case.k % case.block == 0, "only whole blocks")
    shape = (case.n, case.k // case.block, case.block)
    pairs = transposed[:, 0::2] | transposed[:, 1::2] << 4
    codes = constant(np.ascontiguousarray(pairs.reshape(-1)), shape)
    zero = opset.convert(constant(np.full((1, 1, 1), ZERO, np.uint8)), dtype)
    scales = constant(np.ascontiguousarray(data.columns.T)[..., None].astype(real))
    weights = opset.multiply(opset.subtract(opset.convert(codes, dtype), zero), scales)
    return opset.reshape(weights, np.array((case.n, case.k)), special_zero=False)
