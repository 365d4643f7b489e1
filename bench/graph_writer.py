"""Writers of models in ONNX's format: graphs node by node, constants in the model or in a file beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper

if TYPE_CHECKING:
    from pathlib import Path

OPSET = 17
LEAST = 128
"""Bytes of an array that goes to a file: operators whose shapes depend on numbers have these in the model."""


class Writer:
    """A graph that is being written."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[Any] = []
        self.arrays: list[Any] = []
        self.rng = np.random.default_rng(seed)
        self.count = 0

    def op(self, kind: str, *inputs: str, outputs: int = 1, name: str = "", **attributes: Any) -> Any:
        """Add a node, and return the names of its results."""
        self.count += 1
        label = f"{name or kind}_{self.count}"
        names = [f"{label}:{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, label, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, name: str = "") -> str:
        """Add an array, and return its name."""
        self.count += 1
        label = name or f"constant_{self.count}"
        self.arrays.append(numpy_helper.from_array(np.array(value, order="C"), label))
        return label

    def random(self, *shape: int, scale: float | None = None) -> Any:
        """Normal values, by default with variances that keep those of products."""
        factor = 1 / math.sqrt(shape[0] if len(shape) < 3 else math.prod(shape[1:])) if scale is None else scale
        return (self.rng.standard_normal(shape) * factor).astype(np.float32)

    def model(self, name: str, inputs: list[Any], outputs: list[Any]) -> Any:
        """The model."""
        graph = helper.make_graph(self.nodes, name, inputs, outputs, self.arrays)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="portmm.bench")
        made.ir_version = 8
        return made


class FileWriter(Writer):
    """A graph whose float arrays go to a file as they are made: for models beyond the 2 GiB of one message.

    Args:
        path: of the model; the arrays' file has `.data` behind it.
        seed: of random values.
    """

    def __init__(self, path: Path, seed: int = 0) -> None:
        super().__init__(seed)
        self.path, self.data = path, path.with_name(f"{path.name}.data")
        self.data.write_bytes(b"")

    def constant(self, value: Any, name: str = "") -> str:
        """Add an array, and return its name."""
        value = np.array(value, order="C")
        if value.nbytes < LEAST or value.dtype != np.float32:
            return super().constant(value, name)
        self.count += 1
        label = name or f"constant_{self.count}"
        with self.data.open("ab") as file:
            begin = file.tell()
            file.write(value.tobytes())
        tensor = TensorProto(name=label, dims=value.shape, data_type=TensorProto.FLOAT, raw_data=b"")
        external_data_helper.set_external_data(tensor, self.data.name, begin, value.nbytes)
        tensor.ClearField("raw_data")
        self.arrays.append(tensor)
        return label

    def save(self, name: str, inputs: list[Any], outputs: list[Any]) -> None:
        """Write the model."""
        onnx.save(self.model(name, inputs, outputs), self.path)


def gelu(w: Writer, x: str) -> str:
    """GELU by the error function, as exporters write it."""
    erf = w.op("Erf", w.op("Div", x, w.constant(np.float32(math.sqrt(2)))))
    return w.op("Mul", w.op("Mul", x, w.op("Add", erf, w.constant(np.float32(1)))), w.constant(np.float32(0.5)))
