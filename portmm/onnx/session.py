"""Sessions: a model that is loaded, and runs.

Owns `load`, and `Session`, which has the methods of ONNX Runtime's `InferenceSession` that programs use, a report of
what computes each operator, and the timing of each kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.pages import adjoining
from portmm.onnx import (  # noqa: F401 - they fill in the table of operators
    elementwise_operators,
    product_operators,
    quantized_operators,
    reduction_operators,
    shape_operators,
    window_operators,
)
from portmm.onnx.executor import Executor
from portmm.onnx.model import NodeArg, OnnxError, read
from portmm.onnx.precision import checked
from portmm.onnx.product_operators import FLOATS, packed
from portmm.onnx.report import Report, report_of
from portmm.util.user_warnings import warn

if TYPE_CHECKING:
    from portmm.onnx.model import Node


PROVIDER = "PortmmExecutionProvider"
_NUMPY = {
    "float": "float32", "double": "float64", "string": "object", "bool": "bool",
    **{x: x for x in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16")},
}  # fmt: skip
"""Element types -> NumPy's names."""

__all__ = ["NodeArg", "Session", "load"]


def load(
    source: Any, sess_options: Any = None, providers: Sequence[Any] | None = None, provider_options: Any = None, *,
    optimize: bool = True, progress: bool | None = None, precision: str = "f32",
) -> Session:  # fmt: skip
    """Load a model in ONNX's format.

    Constant matrices of products are packed. The first run with inputs of each kind (shapes and types) selects kernels,
    and compiles those that the cache lacks.

    Args:
        source: a path, bytes, or an `onnx.ModelProto`.
        sess_options: of ONNX Runtime; ignored: threads are `portmm.set_num_threads`'.
        providers: of ONNX Runtime; there is one here, and a warning names those that are ignored.
        provider_options: ignored, as they are of providers.
        optimize: clean the graph by onnxoptimizer first.
        progress: show a bar while constants are packed; by default on a terminal.
        precision: in which products and convolutions of float32 values multiply: "f32", "bf16" or "f16". Their operands
            are rounded, weights once; sums and all other operators are in float32. A model that has values of these
            types itself is left as it is.

    Returns:
        A session: `session.run(inputs)` or, as in ONNX Runtime, `session.run(names, inputs)`.

    Raises:
        OnnxError: the package onnx is missing, or this is no model, or one with an operator that is not
            supported, or there is no such precision.
    """
    del sess_options, provider_options
    return Session(source, providers, optimize=optimize, progress=progress, precision=precision)


class Session:
    """A loaded model. See `load`."""

    def __init__(
        self,
        source: Any,
        providers: Sequence[Any] | None = None,
        *,
        optimize: bool = True,
        progress: bool | None = None,
        precision: str = "f32",
    ) -> None:
        others = [x[0] if isinstance(x, tuple) else x for x in providers or ()]
        others = [x for x in others if x not in (PROVIDER, "CPUExecutionProvider")]
        if others:
            warn(f"portmm.onnx runs on the CPU: {', '.join(map(str, others))} cannot be used")
        self.model = read(source, optimize=optimize)
        self.executor = Executor(self.model.graph, precision=checked(precision))
        pack_constants(self.executor, progress=progress)

    def get_inputs(self) -> list[NodeArg]:
        """The inputs, with names, types and shapes."""
        return list(self.model.graph.inputs)

    def get_outputs(self) -> list[NodeArg]:
        """The results, with names, types and shapes."""
        return list(self.model.graph.outputs)

    def get_providers(self) -> list[str]:
        """Names of execution providers: the one that is portmm."""
        return [PROVIDER]

    def run(self, output_names: Any, inputs: Mapping[str, Any] | None = None, run_options: Any = None) -> list[Any]:
        """The results for some inputs.

        Args:
            output_names: names of the results to return, or None for all; or the inputs, as the only argument.
            inputs: arrays by name, or in the order of `get_inputs` in a list.
            run_options: of ONNX Runtime; ignored.

        Returns:
            Arrays, in the order of the names.

        Raises:
            OnnxError: an input is missing, is unknown, or has another type or shape than the model says.
        """
        del run_options
        if inputs is None:
            output_names, inputs = None, output_names
        values = self.checked(inputs)
        results = self.executor.run(values)
        if output_names is None:
            return results
        by_name = dict(zip(self.executor.outputs, results, strict=True))
        missing = [x for x in output_names if x not in by_name]
        if missing:
            raise OnnxError(f"the model has no output {missing[0]!r}; it has {', '.join(by_name)}")
        return [by_name[x] for x in output_names]

    def checked(self, inputs: Any) -> dict[str, Any]:
        """The inputs of a call by name, as arrays."""
        wanted = self.model.graph.inputs
        if not hasattr(inputs, "items"):
            inputs = dict(zip((x.name for x in wanted), inputs, strict=True))
        values: dict[str, Any] = {}
        for x in wanted:
            if x.name not in inputs:
                raise OnnxError(f"input {x.name!r} is missing; the model takes {', '.join(y.name for y in wanted)}")
            values[x.name] = _input(x, inputs[x.name])
        if len(inputs) > len(values):
            extra = next(x for x in inputs if x not in values and x not in self.executor.constants)
            raise OnnxError(f"the model has no input {extra!r}; it takes {', '.join(y.name for y in wanted)}")
        return values

    def report(self, inputs: Any) -> Report:
        """A report for inputs of this kind: steps, operators that NumPy computes, and memory."""
        return report_of(self.executor, self.checked(inputs))

    def profile(self, inputs: Any, *, seconds: float = 0.5) -> Report:
        """The report, with the time of each kernel: the shortest of several runs, one kernel after the other."""
        return report_of(self.executor, self.checked(inputs), seconds=seconds)


def _input(x: NodeArg, value: Any) -> Any:
    """An input as a dense array, checked against the model's declaration."""
    if not x.type.startswith("tensor("):
        return value
    array = value if type(value) is np.ndarray else np.asarray(value)
    dtype = _NUMPY.get(x.type[7:-1])
    if dtype is not None and array.dtype.name != dtype and not (dtype == "object" and array.dtype.kind in "OUS"):
        raise OnnxError(f"input {x.name!r} is {array.dtype}; the model takes {dtype}: pass x.astype(np.{dtype})")
    fixed = [n for n in x.shape if isinstance(n, int)]
    if fixed or x.shape:
        same = array.ndim == len(x.shape) and all(
            not isinstance(n, int) or n == m for n, m in zip(x.shape, array.shape, strict=True)
        )
        if not same:
            wanted = ", ".join("?" if n is None else str(n) for n in x.shape)
            raise OnnxError(f"input {x.name!r} has shape {array.shape}; the model takes ({wanted})")
    if array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative:
        return array
    return np.require(array, array.dtype.newbyteorder("="), ("C", "A")).reshape(array.shape)


def pack_constants(executor: Executor, *, progress: bool | None = None) -> None:
    """Pack the constant matrices of products, which the first run would pack otherwise."""
    work = [(n, weight) for part in executor.parts for n in part.nodes if (weight := _weight(n, executor)) is not None]
    if progress is False or not work:
        bar: Any = nullcontext(lambda *_: None)
    else:
        from portmm.util.console import progress as shown

        bar = shown("packing")
    with bar as step, adjoining(executor.memory):
        for i, (node, weight) in enumerate(work):
            step(i, len(work), node.name)
            packed(weight, transposed=bool(node.op == "Gemm" and node.attribute("transB", 0)))


def _weight(node: Node, executor: Executor) -> Any:
    """The constant matrix of a product, or None."""
    if node.op not in ("MatMul", "Gemm") or node.inputs[0] in executor.constants:
        return None
    weight = executor.constants.get(node.inputs[1])
    usable = weight is not None and weight.ndim == 2 and weight.dtype.name in FLOATS and 0 not in weight.shape
    return weight if usable else None
