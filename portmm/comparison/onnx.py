"""ONNX Runtime, as a graph of one layer.

Owns two contenders: the operators without further rounding (MatMul, Gemm, MatMulInteger,
MatMulNBits at its own accuracy) with epilogues, and those that round activations to 8 bits.

A weight that the case packs is a constant of the graph, which ONNX Runtime prepacks
when it loads it. Inputs and outputs are bound to the case's arrays, so that nothing
is copied. Its kernels select their instructions themselves and no variable
changes that: it takes no part where contenders are restricted to less than the machine has.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.comparison import fused, native
from portmm.comparison.case import BLOCK, PLAIN
from portmm.comparison.data import APPROXIMATE, INPUTS
from portmm.comparison.peers import Library, MissingError, Run, UnsupportedError, repeat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.comparison.case import Case
    from portmm.comparison.data import Arrays
    from portmm.comparison.environment import Setup

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
