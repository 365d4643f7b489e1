"""ONNX models as records: nodes, constants, inputs and outputs.

Owns `read`, from a file, bytes or a `ModelProto` to a `Model`, and `clean`, the rewrites of a graph by onnxoptimizer.
The only module that reads protocol buffers.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from portmm.errors import PortmmError
from portmm.onnx import external_data

Array = np.ndarray[Any, Any]

PASSES = (
    "eliminate_nop_cast", "eliminate_nop_dropout", "eliminate_nop_flatten", "extract_constant_to_initializer",
    "eliminate_consecutive_idempotent_ops", "eliminate_nop_pad", "eliminate_nop_concat", "eliminate_nop_split",
    "eliminate_nop_transpose", "fuse_add_bias_into_conv", "fuse_bn_into_conv", "fuse_consecutive_transposes",
    "fuse_consecutive_squeezes", "fuse_consecutive_unsqueezes", "fuse_pad_into_conv", "eliminate_identity",
    "eliminate_common_subexpression", "eliminate_duplicate_initializer", "eliminate_deadend",
    "eliminate_nop_with_unit",
)  # fmt: skip
"""Passes of onnxoptimizer that leave results as they are, but for roundings of folded scales."""
CHANGES = frozenset(("Conv", "ConvTranspose", "BatchNormalization"))
"""Operators whose constants the passes change: they see all others by name and shape alone."""
WHOLE = frozenset((*range(1, 8), *range(9, 14), 16))
"""Numbers of element types that take whole bytes, as NumPy's."""
SMALL = 1 << 12
"""Bytes up to which a constant is part of what the passes see."""


class OnnxError(PortmmError):
    """Error of a model: it cannot be read, or its inputs do not match."""


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or an output of a model, as in ONNX Runtime.

    Attributes:
        name: its name.
        type: as "tensor(float)".
        shape: integers, names of dynamic axes, or None for an axis without a name.
    """

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operator of a graph.

    Attributes:
        op: its type.
        domain: "" for ONNX's own.
        version: of the operator set.
        name: its label in reports.
        inputs: names, "" for those that are left out.
        outputs: names, "" for those that are left out.
        attributes: by name: numbers, texts, arrays, lists of these, or graphs.
        captured: names of outer values that its graphs read.
        proto: its bytes, but for constants.
    """

    op: str
    domain: str
    version: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    captured: tuple[str, ...] = ()
    proto: bytes = b""

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute, or its default."""
        return self.attributes.get(name, default)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A graph of operators.

    Attributes:
        name: of the graph.
        nodes: in an order in which they can run.
        constants: arrays by name.
        inputs: without those that are constants.
        outputs: its results.
    """

    name: str
    nodes: tuple[Node, ...]
    constants: dict[str, Array]
    inputs: tuple[NodeArg, ...]
    outputs: tuple[NodeArg, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model.

    Attributes:
        graph: its graph.
        versions: operator sets by domain.
        producer: the program that wrote it.
        notes: remarks on its cleaning.
    """

    graph: Graph
    versions: dict[str, int]
    producer: str
    notes: tuple[str, ...] = field(default=())


def onnx_module() -> Any:
    """The package onnx.

    Raises:
        OnnxError: it is missing.
    """
    try:
        import onnx
    except ImportError as error:
        raise OnnxError("ONNX models need the package onnx: python3 -m pip install 'portmm[onnx]'") from error
    return onnx


def read(source: Any, *, optimize: bool = True) -> Model:
    """The model in a file, in bytes, or of a `ModelProto`.

    Raises:
        OnnxError: the package onnx is missing, or the model cannot be read.
    """
    onnx = onnx_module()
    proto, notes = _proto(onnx, source), []
    folder = str(Path(source).absolute().parent) if isinstance(source, (str, os.PathLike)) else ""
    if proto.functions:
        from onnx import inliner

        proto = inliner.inline_local_functions(proto)
    if missing := undefined(proto.graph):
        raise OnnxError(f"nothing before its use computes {', '.join(map(repr, missing[:3]))}; the model is damaged")
    try:
        if optimize:
            proto, note = clean(proto, folder)
            notes += [note] if note else []
        versions = {("" if x.domain == "ai.onnx" else x.domain): x.version for x in proto.opset_import}
        graph = _graph(proto.graph, Context(versions, folder))
    except onnx.checker.ValidationError as error:
        raise OnnxError(f"constants of the model in another file cannot be read: {error}") from error
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise OnnxError(
            f"the model is damaged: an attribute, a constant or a type cannot be read: {error!r}"
        ) from error
    return Model(graph, versions, f"{proto.producer_name} {proto.producer_version}".strip(), tuple(notes))


def _proto(onnx: Any, source: Any) -> Any:
    """The protocol buffer of a model."""
    if isinstance(source, onnx.ModelProto):
        return source
    raw = isinstance(source, (bytes, bytearray, memoryview))
    if not raw and not isinstance(source, (str, os.PathLike)):
        raise OnnxError(f"a model is a path, bytes or a ModelProto, not {type(source).__name__}")
    try:
        if raw:
            return onnx.load_model_from_string(bytes(source))
        return onnx.load(os.fspath(source), load_external_data=False)
    except FileNotFoundError as error:
        raise OnnxError(f"there is no model at {os.fspath(source)}") from error
    except Exception as error:  # protobuf has errors of its own, by implementation
        raise OnnxError(f"{'the source' if raw else os.fspath(source)} is no ONNX model: {error}") from error


def undefined(graph: Any) -> list[str]:
    """Names in a protocol buffer of a graph that are read, and that nothing before their use computes."""
    sparse = [x.values for x in graph.sparse_initializer]
    known = {x.name for x in (*graph.input, *graph.initializer, *sparse)}
    missing: dict[str, None] = {}
    for node in graph.node:
        graphs = [g for x in node.attribute for g in (*([x.g] if x.HasField("g") else []), *x.graphs)]
        names = (*node.input, *(x for g in graphs for x in undefined(g)))
        missing |= dict.fromkeys(x for x in names if x and x not in known)
        known.update(node.output)
    return list(missing | dict.fromkeys(x.name for x in graph.output if x.name not in known))


def clean(proto: Any, folder: str = "") -> tuple[Any, str]:
    """A model after the passes of onnxoptimizer, or the same with a note on the reason why they did not run."""
    try:
        import onnxoptimizer  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return proto, "onnxoptimizer is not installed: the graph is as it was written"
    seen = type(proto)()
    seen.CopyFrom(_without_arrays(proto))
    read = {x for n in proto.graph.node if n.op_type in CHANGES for x in n.input}
    norms = any(n.op_type == "BatchNormalization" for n in proto.graph.node)
    aside: dict[str, Any] = {}
    produced = {x.name for x in proto.graph.input}
    onnx = onnx_module()
    for x in proto.graph.initializer:
        elsewhere = external_data.is_external(x)
        if elsewhere and norms and x.name in read:
            onnx.external_data_helper.load_external_data_for_tensor(x, folder)
            x.ClearField("external_data")
            x.data_location, elsewhere = x.DEFAULT, False
        if not elsewhere and (x.name in read or x.ByteSize() <= SMALL or x.name in produced):
            seen.graph.initializer.append(x)
        else:
            aside[x.name] = x
            seen.graph.input.append(onnx.helper.make_tensor_value_info(x.name, x.data_type, list(x.dims)))
    wanted = [x.name for x in proto.graph.output]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            onnx.checker.check_model(seen)  # of a model that is not valid, the passes may read beyond what there is
            result = onnxoptimizer.optimize(seen, list(PASSES))
    except Exception as error:  # noqa: BLE001 - of C++, of any kind: the graph that came in is right, too
        return proto, f"onnxoptimizer did not run: {error}"
    if [x.name for x in result.graph.output] != wanted:
        return proto, "onnxoptimizer renamed results: the graph is as it was written"
    kept = [x for x in result.graph.input if x.name not in aside]
    del result.graph.input[:]
    result.graph.input.extend(kept)
    for x in aside.values():
        result.graph.initializer.append(x)
    return result, ""


def _without_arrays(proto: Any) -> Any:
    """A copy of a model without its constants."""
    copy = type(proto)()
    for descriptor, value in proto.ListFields():
        if descriptor.name != "graph":
            _set(copy, descriptor.name, value)
    for descriptor, value in proto.graph.ListFields():
        if descriptor.name != "initializer":
            _set(copy.graph, descriptor.name, value)
    return copy


def _set(message: Any, name: str, value: Any) -> None:
    """Set a field of a protocol buffer."""
    if hasattr(value, "CopyFrom"):
        getattr(message, name).CopyFrom(value)
    elif isinstance(value, (str, int, float, bytes, bool)):
        setattr(message, name, value)
    else:
        getattr(message, name).extend(value)


class Context(NamedTuple):
    """Operator sets and the folder, with which all graphs of a model are read.

    Attributes:
        versions: operator sets by domain.
        folder: of the model's file, "" if it has none.
    """

    versions: dict[str, int]
    folder: str


def _graph(proto: Any, at: Context) -> Graph:
    """The record of a graph."""
    constants = {x.name: array_of(x, at.folder) for x in proto.initializer}
    constants |= {x.values.name: _dense(x) for x in proto.sparse_initializer}
    labels: set[str] = set()
    nodes = tuple(_node(x, i, at, labels) for i, x in enumerate(proto.node))
    inputs = tuple(_argument(x) for x in proto.input if x.name not in constants)
    return Graph(proto.name, nodes, constants, inputs, tuple(map(_argument, proto.output)))


def _node(proto: Any, index: int, at: Context, labels: set[str]) -> Node:
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    label = proto.name or f"{proto.op_type}_{index}"
    label = label if label not in labels else f"{label}_{index}"
    labels.add(label)
    attributes = {x.name: _attribute(x, at) for x in proto.attribute}
    captured = dict.fromkeys(y for x in attributes.values() for g in _graphs(x) for y in free_names(g))
    return Node(
        proto.op_type, domain, at.versions.get(domain, 1), label, tuple(proto.input), tuple(proto.output), attributes,
        tuple(captured), b"" if proto.op_type == "Constant" else proto.SerializeToString(),
    )  # fmt: skip


def _graphs(x: Any) -> list[Graph]:
    return [y for y in (x if isinstance(x, list) else [x]) if isinstance(y, Graph)]


def free_names(graph: Graph) -> list[str]:
    """Names of values that a graph reads of the outer graph."""
    known = {x.name for x in graph.inputs} | set(graph.constants)
    free: dict[str, None] = {}
    for node in graph.nodes:
        free |= dict.fromkeys(x for x in (*node.inputs, *node.captured) if x and x not in known)
        known.update(node.outputs)
    free |= dict.fromkeys(x.name for x in graph.outputs if x.name not in known)
    return list(free)


def _attribute(proto: Any, at: Context) -> Any:
    """The value of an attribute."""
    onnx = onnx_module()
    kinds = onnx.AttributeProto
    value = onnx.helper.get_attribute_value(proto)
    convert: dict[int, Callable[[Any], Any]] = {
        kinds.STRING: lambda x: x.decode(),
        kinds.STRINGS: lambda xs: [x.decode() for x in xs],
        kinds.TENSOR: array_of,
        kinds.SPARSE_TENSOR: _dense,
        kinds.GRAPH: lambda x: _graph(x, at),
        kinds.GRAPHS: lambda xs: [_graph(x, at) for x in xs],
        kinds.INTS: list,
        kinds.FLOATS: list,
    }
    return convert.get(proto.type, lambda x: x)(value)


def array_of(proto: Any, folder: str = "") -> Array:
    """The array of a tensor, whose elements may be in another file of a folder."""
    onnx = onnx_module()
    if external_data.is_external(proto) and proto.data_type in WHOLE and sys.byteorder == "little":
        array = external_data.mapped(proto, folder, np.dtype(numpy_type(proto.data_type)))
        if array is not None:
            return array
    return np.asarray(onnx.numpy_helper.to_array(proto, folder))


def _dense(proto: Any) -> Array:
    """The array of a sparse tensor."""
    values, indices, shape = array_of(proto.values), array_of(proto.indices), tuple(proto.dims)
    array = np.zeros(shape, values.dtype)
    if indices.ndim == 1:
        array.reshape(-1)[indices] = values
    else:
        array[tuple(indices.T)] = values
    return array


@cache
def type_names() -> dict[int, str]:
    """Numbers of element types -> their names in ONNX Runtime."""
    kinds = onnx_module().TensorProto.DataType
    others = {"DOUBLE": "double", "FLOAT": "float"}
    return {number: others.get(name, name.lower()) for name, number in kinds.items()}


def numpy_type(number: int) -> Any:
    """NumPy's type of an element type of ONNX."""
    return onnx_module().helper.tensor_dtype_to_np_dtype(number)


def _argument(proto: Any) -> NodeArg:
    kind = proto.type.WhichOneof("value")
    if kind != "tensor_type":
        return NodeArg(proto.name, f"{(kind or 'unknown').removesuffix('_type')}(?)", [])
    tensor = proto.type.tensor_type
    shape = [x.dim_value if x.HasField("dim_value") else x.dim_param or None for x in tensor.shape.dim]
    return NodeArg(proto.name, f"tensor({type_names()[tensor.elem_type]})", shape)
