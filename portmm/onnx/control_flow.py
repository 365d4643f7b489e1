"""Operators that run graphs of their own: If, Loop and Scan."""

from __future__ import annotations

from typing import Any

import numpy as np

from portmm.onnx.model import Graph, Node, OnnxError, free_names


def run_node(executor: Any, node: Node, inputs: list[Any], outer: dict[str, Any]) -> tuple[Any, ...]:
    """The results of an operator with graphs, of its inputs and the values outer it that they read."""
    return {"If": _if, "Loop": _loop, "Scan": _scan}[node.op](executor, node, inputs, outer)


def _run(executor: Any, graph: Graph, inputs: list[Any], outer: dict[str, Any]) -> list[Any]:
    """The results of an inner graph."""
    inner = executor.inner(graph)
    values = {x: outer[x] for x in free_names(graph)}
    values.update(zip((x.name for x in graph.inputs), inputs, strict=True))
    return inner.run(values)


def _if(executor: Any, node: Node, inputs: list[Any], outer: dict[str, Any]) -> tuple[Any, ...]:
    branch = "then_branch" if bool(np.asarray(inputs[0]).reshape(())) else "else_branch"
    return tuple(_run(executor, node.attributes[branch], [], outer))


def _loop(executor: Any, node: Node, inputs: list[Any], outer: dict[str, Any]) -> tuple[Any, ...]:
    body: Graph = node.attributes["body"]
    most = None if inputs[0] is None else int(np.asarray(inputs[0]).reshape(()))
    going = True if inputs[1] is None else bool(np.asarray(inputs[1]).reshape(()))
    carried, scanned = list(inputs[2:]), []
    i = 0
    while going and (most is None or i < most):
        results = _run(executor, body, [np.asarray(i, np.int64), np.asarray(going), *carried], outer)
        going = bool(np.asarray(results[0]).reshape(()))
        carried = results[1 : 1 + len(carried)]
        scanned.append(results[1 + len(carried) :])
        i += 1
    outputs = len(body.outputs) - 1 - len(carried)
    if not scanned and outputs:
        raise OnnxError(f"{node.name}: a loop that runs no iteration has no shapes for its {outputs} scanned results")
    return (*carried, *(np.stack([x[j] for x in scanned]) for j in range(outputs)))


def _scan(executor: Any, node: Node, inputs: list[Any], outer: dict[str, Any]) -> tuple[Any, ...]:
    body: Graph = node.attributes["body"]
    if node.version < 9:
        raise OnnxError(f"{node.name}: Scan of operator set {node.version}; convert the model to 9 or later")
    count = int(node.attribute("num_scan_inputs"))
    states, scanned = list(inputs[: len(inputs) - count]), inputs[len(inputs) - count :]
    axes = node.attribute("scan_input_axes", [0] * count)
    back = node.attribute("scan_input_directions", [0] * count)
    length = scanned[0].shape[axes[0]]
    steps: list[list[Any]] = []
    for i in range(length):
        slices = [np.take(x, length - 1 - i if b else i, axis=a) for x, a, b in zip(scanned, axes, back, strict=True)]
        results = _run(executor, body, [*states, *slices], outer)
        states = results[: len(states)]
        steps.append(results[len(states) :])
    outputs = len(body.outputs) - len(states)
    out_axes = node.attribute("scan_output_axes", [0] * outputs)
    reverse = node.attribute("scan_output_directions", [0] * outputs)
    results = []
    for j in range(outputs):
        rows = [x[j] for x in steps]
        results.append(np.stack(rows[::-1] if reverse[j] else rows, axis=out_axes[j]))
    return (*states, *results)
