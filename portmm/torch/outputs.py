"""Outputs of a compiled graph, as tensors.

Owns `with_outputs`: outputs have the strides and share the memory that PyTorch's do, whose callers may change one of
them in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from portmm.arrays.interop import as_tensor
from portmm.fusion.partition import LEAVES
from portmm.trace.placeholders import Array

if TYPE_CHECKING:
    from portmm.torch.translation import Translator


def with_outputs(
    run: Callable[[Any], Any], graph: torch.fx.Graph, results: list[Any], translator: Translator
) -> Callable[[Any], Any]:
    """A function of arrays that returns the outputs of a graph, as tensors.

    Args:
        run: the program of the arrays among the results.
        graph: of PyTorch's operators.
        results: placeholders of arrays, constants, numbers and None.
        translator: of the graph.
    """
    outputs = next(iter(graph.find_nodes(op="output"))).args[0]
    layouts = translator.layouts()
    places = [i for i, x in enumerate(results) if isinstance(x, Array)]
    plain = not any(np.dtype(results[i].dtype).name == "bfloat16" for i in places)
    shared = [{i: translator.layout(outputs[i]) for i in x} for x in _in_one_memory(outputs, results)]
    together: set[int] = {i for x in shared for i in x}
    clones = _in_others_memory(graph, outputs, results) - together
    copied = [(i, *translator.layout(outputs[i])) for i in clones]
    laid_out = [(i, *at) for i, at in enumerate(layouts) if at and i in {*places} - together - clones]
    from_numpy = torch.from_numpy

    def tensor(x: np.ndarray[Any, Any]) -> Any:
        x = x if isinstance(x, np.ndarray) and x.flags.writeable else np.array(x)
        return from_numpy(x) if plain else as_tensor(x)

    if len(places) == len(results) and not (laid_out or shared or copied):
        return lambda arrays: tuple([tensor(x) for x in run(arrays)])
    others = [None if isinstance(x, Array) else x for x in results]

    def program(arrays: Any) -> Any:
        values: list[Any] = others.copy()
        for i, x in zip(places, run(arrays), strict=True):
            values[i] = tensor(x)
        for i, stride, offset in copied:
            values[i] = _placed(values[i], values[i].new_empty(_end(values[i], stride, offset)), stride, offset)
        for i, stride, offset in laid_out:
            values[i] = _at(values[i], stride, offset)
        for views in shared:
            size = max(_end(values[i], *at) for i, at in views.items())
            whole = values[min(views)].new_empty(size)
            for i, at in views.items():
                values[i] = _placed(values[i], whole, *at)
        return tuple(values)

    return program


def _in_one_memory(outputs: Any, results: list[Any]) -> list[list[int]]:
    """Positions of outputs that kernels compute and that are views of each other's memory, several at a time."""
    places: dict[Any, list[int]] = {}
    for i, (node, x) in enumerate(zip(outputs, results, strict=True)):
        if isinstance(x, Array):
            places.setdefault((memory_of(node), x.dtype), []).append(i)
    return [x for x in places.values() if len(x) > 1]


def _in_others_memory(graph: torch.fx.Graph, outputs: Any, results: list[Any]) -> set[int]:
    """Positions of outputs that lie in the memory of an input, a constant or another output, but must not: clones."""
    inputs = {memory_of(x) for x in graph.find_nodes(op="placeholder")}
    known: dict[Any, Any] = {}
    clones = set()
    for i, (node, x) in enumerate(zip(outputs, results, strict=True)):
        if not isinstance(x, (Array, torch.Tensor)):
            continue
        memory, root = memory_of(node), x.node.origin if isinstance(x, Array) else None
        if root is None or root.kind in LEAVES:
            apart = memory not in inputs
        else:
            apart = known.setdefault(root, memory) != memory
        if apart:
            clones.add(i)
    return clones


def _at(x: torch.Tensor, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor with these strides and this offset, by which PyTorch finds a view in the memory of another output."""
    sizes = zip(x.shape, x.stride(), stride, strict=True)
    if x.storage_offset() == offset and all(n == 1 or s == t for n, s, t in sizes):
        return x
    return _placed(x, x.new_empty(_end(x, stride, offset)), stride, offset)


def _end(x: torch.Tensor, stride: tuple[int, ...], offset: int) -> int:
    """Elements of a memory up to the last of a tensor."""
    last = sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True)) if x.numel() else 0
    return offset + last + 1


def _placed(x: torch.Tensor, whole: torch.Tensor, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A view of a memory with the values of a tensor, which are copied there."""
    # Elements of an expanded axis are one: the first of each is copied.
    first = tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)
    whole.as_strided(x[first].shape, stride, offset).copy_(x[first])
    return whole.as_strided(x.shape, stride, offset)


def memory_of(node: Any) -> Any:
    """The memory of a node's tensor; of another value, the node."""
    value = node.meta.get("val")
    try:
        return value.untyped_storage()._cdata  # noqa: SLF001 - as PyTorch compares storages
    except (AttributeError, NotImplementedError):
        return node
