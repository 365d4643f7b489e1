"""The table of operators, and their application to arrays or to traced arrays.

Owns `OPERATORS`, which the modules of operators fill in, `operator`, which adds a row, and `apply`. A function of an
operator takes its `Node` and its inputs, None for those that are left out. It is written in operations that `fuse`
records, so that kernels compute it; of arrays NumPy computes the same. One that is `computed` is never recorded: NumPy
runs it between kernels. Operators without a row are computed by ONNX's reference evaluator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from portmm.errors import TraceError
from portmm.onnx.external_data import released
from portmm.onnx.model import Node, OnnxError, onnx_module
from portmm.trace.placeholders import Placeholder
from portmm.trace.recorder import run

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"


class UnsupportedError(Exception):
    """Raised by the function of an operator for attributes or types that the reference evaluator computes instead."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A row of the table.

    Attributes:
        function: of a node and its inputs.
        host: indices of inputs whose values decide on shapes: they must be known while the graph is traced.
        computed: NumPy runs it between kernels.
        alone: the shapes of its results depend on data, or its values are no arrays: it runs between programs.
    """

    function: Callable[..., Any]
    host: tuple[int, ...] = ()
    computed: bool = False
    alone: bool = False


OPERATORS: dict[tuple[str, str], Operator] = {}
"""Domain and type -> operator."""


def operator(
    *names: str,
    domains: tuple[str, ...] = ("",),
    host: tuple[int, ...] = (),
    computed: bool = False,
    alone: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that adds a function to the table under some names."""

    def added(function: Callable[..., Any]) -> Callable[..., Any]:
        for domain in domains:
            for name in names:
                OPERATORS[domain, name] = Operator(function, host, computed, alone)
        return function

    return added


CONTROL = ("If", "Loop", "Scan")
"""Operators that run graphs of their own."""
ALONE = frozenset(
    (
        "If", "Loop", "Scan", "NonZero", "Unique", "NonMaxSuppression", "Compress",
        "SequenceAt", "SequenceConstruct", "SequenceEmpty",
        "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "SplitToSequence", "ConcatFromSequence",
        "Optional", "OptionalGetElement", "OptionalHasElement", "StringNormalizer", "StringConcat", "StringSplit",
        "RegexFullMatch", "TfIdfVectorizer", "LabelEncoder", "ImageDecoder", "RandomNormal", "RandomNormalLike",
        "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli",
    )
)  # fmt: skip
"""Operators of the reference evaluator that run between programs."""
HOST = {
    "Resize": (1, 2, 3), "Upsample": (1,), "BlackmanWindow": (0,), "HammingWindow": (0,), "HannWindow": (0,),
    "MelWeightMatrix": (0, 1, 2, 3, 4), "DFT": (1, 2), "STFT": (1, 3), "AffineGrid": (1,), "MaxUnpool": (2,),
    "CenterCropPad": (1,), "Col2Im": (1, 2),
}  # fmt: skip
"""Inputs of operators of the reference evaluator that decide on shapes."""


def find(node: Node) -> Operator:
    """The operator of a node."""
    row = OPERATORS.get((node.domain, node.op))
    if row is None:
        alone = node.op in ALONE
        row = Operator(reference, HOST.get(node.op, ()), computed=not alone, alone=alone)
    return row


def is_traced(*values: Any) -> bool:
    """Test whether one of some values is a traced array."""
    return any(isinstance(x, Placeholder) for x in values)


_once: dict[tuple[int, str], tuple[Any, Any]] = {}
"""(identity of a constant, use) -> a reference to it, and what was computed of it."""


def once(constant: Any, use: str, make: Callable[[], Any]) -> Any:
    """The object that a use makes of a constant, once."""
    known = _once.get((id(constant), use))
    if known is None or known[0]() is not constant:
        for old in [k for k, (ref, _) in tuple(_once.items()) if ref() is None]:
            _once.pop(old, None)
        known = _once[id(constant), use] = weakref.ref(constant), make()
        released(constant)
    return known[1]


def apply(node: Node, inputs: list[Any], recorder: Any) -> tuple[Any, ...]:
    """The results of a node: recorded if an input is traced, and computed otherwise."""
    row = find(node)
    if recorder is None or not is_traced(*inputs):
        return results(computed(node, row.function, inputs))
    recorder.label = node.name
    if not row.computed:
        try:
            return results(run(lambda: row.function(node, *inputs)))
        except (TraceError, UnsupportedError, TypeError, ValueError) as error:
            recorder.blocked.append((node.name, f"{node.op}: {error or 'it has no kernel'}"))
    return recorder.computed(node, row.function, inputs)


def computed(node: Node, function: Callable[..., Any], inputs: Any) -> Any:
    """The results of a node by NumPy."""
    try:
        return function(node, *inputs)
    except UnsupportedError:
        return reference(node, *inputs)


def results(value: Any) -> tuple[Any, ...]:
    """The results of a function as a tuple; scalars of NumPy are arrays without dimensions."""
    values = value if isinstance(value, tuple) else (value,)
    return tuple(np.asarray(x) if isinstance(x, np.generic) else x for x in values)


def check(node: Node) -> None:
    """Test that an operator is offered.

    Raises:
        OnnxError: it is not.
    """
    if (node.domain, node.op) in OPERATORS or node.op in CONTROL:
        if node.op == "Scan" and node.version < SCAN:
            raise OnnxError(f"{node.name}: Scan of operator set {node.version}; convert the model to {SCAN} or later")
        return
    try:
        _evaluator(node)
    except Exception as error:  # of the reference evaluator, which has no type for this
        where = f" of domain {node.domain}" if node.domain else ""
        raise OnnxError(f"{node.name}: operator {node.op}{where} is not supported; replace it in the model") from error


SCAN = 9
"""The operator set from which Scan has no batch."""
_evaluators: dict[int, tuple[Any, Any]] = {}


def reference(node: Node, *inputs: Any) -> tuple[Any, ...]:
    """The results of a node by ONNX's reference evaluator."""
    feeds = {name: x for name, x in zip(node.inputs, inputs, strict=False) if name and x is not None}
    results: list[Any] = _evaluator(node).run(None, feeds)
    return tuple(results)


def _evaluator(node: Node) -> Any:
    """The reference evaluator of a node."""
    known = _evaluators.get(id(node))
    if known is None or known[0] is not node:
        proto = onnx_module().NodeProto.FromString(node.proto)
        from onnx.reference import ReferenceEvaluator

        if len(_evaluators) >= MOST_EVALUATORS:
            _evaluators.clear()
        versions = {node.domain: node.version} | ({"": FUNCTIONS} if node.domain else {})
        known = _evaluators[id(node)] = node, ReferenceEvaluator(proto, opsets=versions)
    return known[1]


MOST_EVALUATORS = 4096
FUNCTIONS = 21
"""The operator set that functions of other domains are written in."""
