"""ONNX Runtime and OpenVINO, as models of one layer.

Owns three contenders: ONNX Runtime's operators without further rounding (MatMul, Gemm, MatMulInteger, MatMulNBits at
its own accuracy) with epilogues; those that round activations to 8 bits; and OpenVINO.

A weight that the case packs is a constant of the model, which the runtime prepacks when it loads it. Inputs and outputs
are the case's arrays, so that nothing is copied. ONNX Runtime's kernels select their instructions themselves and no
variable changes that: it takes no part where contenders are restricted to less than the machine has. OpenVINO's kernels
for products with epilogues are those of a oneDNN of its own, which reads ONEDNN_MAX_CPU_ISA; a case of float32 is
computed in float32, one of bfloat16 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from portmm.arrays.numpy_arrays import numpy_of
from portmm.comparison import fused, native
from portmm.comparison.case import BLOCK, PLAIN, Case
from portmm.comparison.data import APPROXIMATE, INPUTS, ZERO, Arrays
from portmm.comparison.peers import Library, MissingError, Run, Setup, UnsupportedError, repeat

OPSET, IR = 21, 10
CPU = "CPUExecutionProvider"
DOMAIN = "com.microsoft"
OWN_ACCURACY, EIGHT_BITS = 0, 4


@dataclass(frozen=True, slots=True)
class _Opened:
    runtime: Any
    onnx: Any
    options: Any


@dataclass(frozen=True, slots=True)
class _Graph:
    """Nodes, and the arrays that are bound or constant, by name."""

    nodes: Sequence[Any]
    inputs: dict[str, Any]
    constants: dict[str, Any]


def _open(setup: Setup) -> _Opened:
    if setup.isa:
        raise MissingError(f"ONNX Runtime cannot be held to {setup.isa}")
    try:
        runtime: Any = import_module("onnxruntime")
        onnx: Any = import_module("onnx")
    except ImportError as error:
        raise MissingError(str(error)) from error
    options = runtime.SessionOptions()
    options.intra_op_num_threads = setup.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return _Opened(runtime, onnx, options)


def open_onnxruntime(setup: Setup) -> Library:
    """Open ONNX Runtime: products of floats, of integers, scaled ones, and those with weights of four bits."""
    opened = _open(setup)

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        if not case.whole and (case.block or case.scaled):
            return {"MatMulNBits": _codes(opened, case, data, OWN_ACCURACY)}
        if case.dtype in PLAIN:
            return _floats(opened, case, data)
        native.only(case.whole, f"no product of {case.dtype}")
        return {"MatMulIntegerToFloat" if case.scaled else "MatMulInteger": _integers(opened, case, data)}

    name = f"onnxruntime {opened.runtime.__version__}"
    return Library(name, prepare, dtypes=None, precision=INPUTS, fused=True)


def open_8bit(setup: Setup) -> Library:
    """Open ONNX Runtime, with activations rounded to 8 bits where it may."""
    opened = _open(setup)

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        quantised = not case.whole and (case.block or case.scaled)
        native.only(bool(quantised), f"activations of {case.dtype} are not rounded to 8 bits")
        methods = {f"MatMulNBits, accuracy level {EIGHT_BITS}": _codes(opened, case, data, EIGHT_BITS)}
        if case.scaled:
            methods["DynamicQuantizeMatMul"] = _dynamic(opened, case, data)
        return methods

    name = f"onnxruntime {opened.runtime.__version__}, activations in 8 bits"
    return Library(name, prepare, dtypes=None, precision=APPROXIMATE)


def _floats(opened: _Opened, case: Case, data: Arrays) -> dict[str, Run]:
    make = opened.onnx.helper.make_node
    constants = {"b": data.b} if case.packed else {}
    inputs = {"a": data.a} | ({} if case.packed else {"b": data.b})
    methods = {"MatMul": _layer(opened, case, data, _Graph([make("MatMul", ["a", "b"], ["sums"])], inputs, constants))}
    if case.batch == 1 and case.fused.startswith("bias"):
        node = make("Gemm", ["a", "b", "bias"], ["biased"])
        methods["Gemm"] = _layer(opened, case, data, _Graph([node], inputs, constants | {"bias": data.bias}))
    return methods


def _layer(opened: _Opened, case: Case, data: Arrays, graph: _Graph) -> Run:
    """Session over a graph whose last result, "sums" or "biased", goes through the case's epilogue."""
    make, nodes, last = opened.onnx.helper.make_node, list(graph.nodes), graph.nodes[-1].output[0]
    inputs, constants = dict(graph.inputs), dict(graph.constants)
    for word in fused.steps(case.fused)[last == "biased" :]:
        if word == "bias":
            constants[word] = data.bias
        if word == "residual":
            inputs[word] = data.residual
        # An array that is added has the name of its step, so the result needs another one.
        before, last = last, f"after_{word}"
        if word in fused.ADDED:
            nodes.append(make("Add", [before, word], [last]))
        elif word == "silu":
            nodes += [make("Sigmoid", [before], ["gate"]), make("Mul", [before, "gate"], [last])]
        elif word == "relu":
            nodes.append(make("Relu", [before], [last]))
        else:
            nodes.append(make("Gelu", [before], [last], approximate="tanh" if word == "gelu_tanh" else "none"))
    nodes[-1].output[0] = "c"
    return _bound(opened, _Graph(nodes, inputs, constants), data)


def _integers(opened: _Opened, case: Case, data: Arrays) -> Run:
    make = opened.onnx.helper.make_node
    weight = {"b": data.b}
    inputs = {"a": data.a} | ({} if case.packed else weight)
    constants = weight if case.packed else {}
    if not case.scaled:
        return _layer(opened, case, data, _Graph([make("MatMulInteger", ["a", "b"], ["sums"])], inputs, constants))
    nodes = [
        make("MatMulIntegerToFloat", ["a", "b", "one", "columns"], ["columns_done"], domain=DOMAIN),
        make("Mul", ["columns_done", "rows"], ["sums"]),
    ]
    constants |= {"one": np.ones(1, np.float32), "columns": data.columns}
    return _layer(opened, case, data, _Graph(nodes, inputs | {"rows": data.rows[:, None]}, constants))


def _codes(opened: _Opened, case: Case, data: Arrays, accuracy: int) -> Run:
    """Product of floats by an int4 weight, or by an int8 one, which is then signed and in blocks too."""
    native.only(case.types[0] in ("f32", "f16"), f"no quantised weights with activations of {case.types[0]}")
    block = case.block or BLOCK
    native.only(case.k % block == 0, "only whole blocks")
    codes = np.ascontiguousarray(data.b.T).reshape(case.n, -1, block)
    if case.block:
        bits, codes, scales = 4, codes[..., 0::2] | codes[..., 1::2] << 4, np.ascontiguousarray(data.columns.T)
    else:
        bits, codes, scales = 8, codes.view(np.uint8) ^ 128, np.repeat(data.columns, case.k // block)
    numbers = {"K": case.k, "N": case.n, "bits": bits, "block_size": block, "accuracy_level": accuracy}
    node = opened.onnx.helper.make_node("MatMulNBits", ["a", "b", "scales"], ["sums"], domain=DOMAIN, **numbers)
    constants = {"b": codes, "scales": scales.reshape(-1).astype(data.a.dtype)}
    return _layer(opened, case, data, _Graph([node], {"a": data.a}, constants))


def _dynamic(opened: _Opened, case: Case, data: Arrays) -> Run:
    native.only(case.types[0] == "f32", "only activations of f32")
    node = opened.onnx.helper.make_node("DynamicQuantizeMatMul", ["a", "b", "columns"], ["c"], domain=DOMAIN)
    return _bound(opened, _Graph([node], {"a": data.a}, {"b": data.b, "columns": data.columns}), data)


def _bound(opened: _Opened, graph: _Graph, data: Arrays) -> Run:
    """Session over a graph, with its inputs and output bound to the arrays."""
    helper, arrays = opened.onnx.helper, opened.onnx.numpy_helper
    bound = graph.inputs | {"c": data.c}
    native.only(all(x.flags.c_contiguous for x in bound.values()), "only operands by rows")

    def described(name: str) -> Any:
        x = bound[name]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)

    constants = [arrays.from_array(np.ascontiguousarray(x), name) for name, x in graph.constants.items()]
    inputs = [described(x) for x in graph.inputs]
    proto = helper.make_graph(graph.nodes, "product", inputs, [described("c")], constants)
    sets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    text = helper.make_model(proto, opset_imports=sets, ir_version=IR).SerializeToString()
    try:
        session = opened.runtime.InferenceSession(text, opened.options, providers=[CPU])
    except Exception as error:  # its own classes, which have no base of their own
        raise UnsupportedError(str(error).partition("\n")[0][:200]) from error
    binding = session.io_binding()
    for name, x in graph.inputs.items():
        binding.bind_input(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
    binding.bind_output("c", "cpu", 0, data.c.dtype.type, data.c.shape, data.c.ctypes.data)
    kept = (graph, data)

    def call() -> tuple[Any, ...]:
        session.run_with_iobinding(binding)
        return kept

    return repeat(call)


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
