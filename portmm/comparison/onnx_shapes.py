"""Matrix products of an ONNX model.

Owns `from_onnx`; onnx and onnxruntime are imported when it is called. Shapes are
inferred; those that inference leaves unknown (operators that only a runtime knows, shapes that
depend on values) are read from one run of the model.

Only the model's main graph is read: the number of runs of a loop's body, or the branch that is taken,
is unknown before the model runs. Convolutions do not count as products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from portmm.comparison.case import Case
from portmm.comparison.shapes import case, merged, word

NAMES = {
    "FLOAT": "f32", "DOUBLE": "f64", "FLOAT16": "f16", "BFLOAT16": "bf16",
    "INT8": "s8", "UINT8": "u8", "INT32": "s32",
}  # fmt: skip
# Operator -> the inputs that are A and B.
OPERANDS = {
    "MatMul": (0, 1),
    "FusedMatMul": (0, 1),
    "Gemm": (0, 1),
    "MatMulInteger": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "DynamicQuantizeMatMul": (0, 1),
    "QLinearMatMul": (0, 3),
    "MatMulNBits": (0, 1),
}
CODES = 4
ROUNDED = 4
"""MatMulNBits' accuracy level of activations in 8 bits."""
ACTIVATIONS = {"Relu": "relu", "Gelu": "gelu", "FastGelu": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    type: str


@dataclass(slots=True)
class _Model:
    """A model with its inputs' dimensions set.

    Attributes:
        onnx: the package.
        proto: the model.
        path: where it came from.
        known: name -> the tensors whose shapes are known.
        constants: names of the initialisers, and of tensors that depend on nothing else.
    """

    onnx: Any
    proto: Any
    path: Path
    known: dict[str, _Tensor] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)

    @property
    def products(self) -> list[Any]:
        return [node for node in self.proto.graph.node if node.op_type in OPERANDS]

    def element(self, number: int) -> str:
        return NAMES.get(self.onnx.TensorProto.DataType.Name(number), "")


def from_onnx(path: str | Path, inputs: Mapping[str, int] | None = None) -> tuple[Case, ...]:
    """Products that a model computes in one run, each with its count.

    Initialisers, and tensors that depend on nothing else, are weights that may be packed.

    Args:
        path: the model.
        inputs: sizes of its inputs' dimensions that are left open: by the dimension's name, or
            INPUT.AXIS for one without a name.

    Raises:
        ImportError: onnx is not installed, or onnxruntime, which the model needs.
        OSError: the file cannot be read.
        ValueError: this is no model; dimensions are open, or unknown; or the model has no products.
    """
    onnx = _package("onnx", "reads models")
    path = Path(path)
    try:
        proto = onnx.load(str(path), load_external_data=False)
    except OSError:
        raise
    except Exception as error:  # protobuf has errors of its own, by implementation
        raise ValueError(f"{path} is no ONNX model: {error}") from error
    if proto.functions:
        proto = import_module("onnx.inliner").inline_local_functions(proto)
    _set_dimensions(proto, dict(inputs or {}), path)
    model = _Model(onnx, import_module("onnx.shape_inference").infer_shapes(proto, data_prop=True), path)
    _note_shapes(model)
    _note_constants(model)
    if _unknown(model):
        _run(model)
    products = [x for node in model.products if (x := _case(model, node))]
    if not products:
        raise ValueError(f"{path} has no products of matrices that portmm has types for")
    return merged(products)


def _package(name: str, does: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{name}, which {does}, is not installed: pip install {name}") from error


def _graph_inputs(graph: Any) -> list[Any]:
    """Inputs of the graph without its initialisers."""
    initial = {x.name for x in graph.initializer}
    return [x for x in graph.input if x.name not in initial]


def _set_dimensions(proto: Any, sizes: dict[str, int], path: Path) -> None:
    """Write sizes into the inputs."""
    open_: dict[str, None] = {}
    graph = proto.graph
    for value in _graph_inputs(graph):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value > 0:
                continue
            name = dim.dim_param or f"{value.name}.{axis}"
            open_[name] = None
            if name in sizes:
                dim.dim_value = sizes[name]
    for value in (*graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    strange = sorted(sizes.keys() - open_.keys())
    if strange:
        known = f"open are {', '.join(open_)}" if open_ else "all are fixed"
        raise ValueError(f"{path} has no open dimension {strange[0]!r}; {known}")
    left = [name for name in open_ if name not in sizes]
    if left:
        options = " ".join(f"--dim {name}=SIZE" for name in left)
        raise ValueError(f"{path} leaves {', '.join(left)} open; say {options}")


def _note_shapes(model: _Model) -> None:
    graph = model.proto.graph
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        dims = tensor.shape.dim
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            shape = tuple(dim.dim_value for dim in dims)
            model.known[value.name] = _Tensor(shape, model.element(tensor.elem_type))
    for value in graph.initializer:
        model.known[value.name] = _Tensor(tuple(value.dims), model.element(value.data_type))


def _note_constants(model: _Model) -> None:
    """Collect constants in one pass: nodes are in topological order."""
    model.constants |= {x.name for x in model.proto.graph.initializer}
    for node in model.proto.graph.node:
        needed = [name for name in node.input if name]
        if node.op_type == "Constant" or (needed and model.constants.issuperset(needed)):
            model.constants.update(node.output)


def _operands(node: Any) -> tuple[str, ...]:
    """Names of the tensors whose shapes determine a product."""
    a, b = (node.input[i] for i in OPERANDS[node.op_type])
    return (a,) if node.op_type == "MatMulNBits" else (a, b)


def _unknown(model: _Model) -> list[str]:
    names = dict.fromkeys(name for node in model.products for name in _operands(node))
    return [name for name in names if name not in model.known]


def _run(model: _Model) -> None:
    """Read the shapes of tensors that inference left unknown from one run."""
    runtime = _package("onnxruntime", "finds the shapes that a model does not tell")
    wanted = _unknown(model)
    proto = model.onnx.load(str(model.path))
    full = type(model.proto)()
    full.CopyFrom(model.proto)
    del full.graph.initializer[:]
    full.graph.initializer.extend(proto.graph.initializer)
    outputs = {x.name for x in full.graph.output}
    full.graph.output.extend(model.onnx.ValueInfoProto(name=name) for name in wanted if name not in outputs)
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = runtime.InferenceSession(full.SerializeToString(), options, providers=["CPUExecutionProvider"])
        values = session.run(wanted, {x.name: _input(model, x) for x in _graph_inputs(full.graph)})
    except Exception as error:  # the runtime has a class of its own for each kind of failure
        raise ValueError(
            f"the shapes of {wanted[0]!r} in {model.path} are unknown, and it does not run: {error}"
        ) from (error)
    kinds = {x.name: x.type for x in session.get_outputs()}
    for name, value in zip(wanted, values, strict=True):
        element = kinds[name].removeprefix("tensor(").removesuffix(")").upper()
        model.known[name] = _Tensor(tuple(value.shape), NAMES.get(element, ""))


def _input(model: _Model, value: Any) -> Any:
    """Values of an input: random floats, or ones, which are valid indices nearly everywhere."""
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value for dim in tensor.shape.dim)
    dtype = model.onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if dtype.kind == "f":
        return np.random.default_rng(0).random(shape).astype(dtype)
    return np.ones(shape, dtype)


def _case(model: _Model, node: Any) -> Case | None:
    """Product of a node, None if it is empty or of other types."""
    attributes = {x.name: model.onnx.helper.get_attribute_value(x) for x in node.attribute}
    names = _operands(node)
    a = model.known[names[0]]
    b = _weights(attributes) if node.op_type == "MatMulNBits" else model.known[names[1]]
    dtype = _types(node.op_type, a.type, b.type, attributes)
    transposed_a, transposed_b = bool(attributes.get("transA")), bool(attributes.get("transB"))
    m, n, k, batch = shape = _shape(a.shape, b.shape, transposed_a, transposed_b)
    if not dtype or 0 in shape:
        return None
    packed = batch == 1 and (node.op_type == "MatMulNBits" or names[1] in model.constants)
    more: dict[str, Any] = {}
    if node.op_type == "MatMulNBits" and attributes["bits"] == CODES:
        more["block"] = attributes["block_size"]
    if node.op_type == "DynamicQuantizeMatMul" or attributes.get("accuracy_level") == ROUNDED:
        more["dynamic"] = True
    if batch == 1 and not dtype.endswith("s32"):
        more["fused"] = _after(model, node, n)
    sizes = {"m": m, "n": n, "k": k, "batch": batch, "packed": packed}
    layouts = {"a": "col" if transposed_a else "row", "b": "col" if transposed_b else "row"}
    return case(group=model.path.stem, dtype=dtype, **sizes, **layouts, **more)


def _weights(attributes: dict[str, Any]) -> _Tensor:
    return _Tensor((attributes["K"], attributes["N"]), "u4" if attributes["bits"] == CODES else "s8")


def _types(operator: str, a: str, b: str, attributes: dict[str, Any]) -> str:
    """Word for the types of a product, empty if there is none."""
    if operator in ("MatMulInteger", "QLinearMatMul"):
        # Unsigned weights are signed ones with another zero point; results of 8 bits are rounded int32 sums.
        return word(a, "s8", "s32")
    if operator == "MatMulIntegerToFloat":
        return word(a, "s8", "f32")
    if operator == "DynamicQuantizeMatMul":
        return word(a, "s8", a)
    return word(a, b, a) if a == b or "bits" in attributes else ""


def _shape(a: Sequence[int], b: Sequence[int], transposed_a: bool, transposed_b: bool) -> tuple[int, int, int, int]:
    """M, N, K and batch of a product by NumPy's rules for matmul: a batch with one common B is one product."""
    left, right = (1, *a) if len(a) == 1 else tuple(a), (*b, 1) if len(b) == 1 else tuple(b)
    k, m = left[-2:] if transposed_a else left[:-3:-1]
    n = right[-2] if transposed_b else right[-1]
    batch = prod(np.broadcast_shapes(left[:-2], right[:-2]))
    if prod(right[:-2]) == 1 and not transposed_a:
        return m * batch, n, k, 1
    return m, n, k, batch


def _after(model: _Model, node: Any, n: int) -> str:
    """Epilogue of a product: nodes that follow it directly and work element by element, as "bias+relu"."""
    words = ["bias"] if node.op_type == "Gemm" and len(node.input) > 2 and _is_bias(model, node.input[2], n) else []
    name = node.output[0]
    for follower in _followers(model, name):
        other = [x for x in follower.input if x != name]
        if follower.op_type == "Add" and not words and other and _is_bias(model, other[0], n):
            words.append("bias")
        elif follower.op_type in ACTIVATIONS:
            words.append(ACTIVATIONS[follower.op_type])
            break
        else:
            break
        name = follower.output[0]
    return "+".join(words)


def _followers(model: _Model, name: str) -> Iterator[Any]:
    """Chain of nodes from the only user of a tensor to the only user of its result, and so on."""
    results = {x.name for x in model.proto.graph.output}
    while name not in results:
        users = [node for node in model.proto.graph.node if name in node.input]
        if len(users) != 1:
            return
        yield users[0]
        name = users[0].output[0]


def _is_bias(model: _Model, name: str, n: int) -> bool:
    tensor = model.known.get(name)
    return name in model.constants and tensor is not None and tensor.shape[-1:] == (n,) and prod(tensor.shape) == n
