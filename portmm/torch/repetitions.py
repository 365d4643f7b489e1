"""Common subexpressions of a graph of PyTorch's operators.

Owns `merge`. PyTorch's own function for this imports Inductor, which takes as long as all of portmm's compilation.
"""

from __future__ import annotations

import operator
from typing import Any

import torch


def merge(graph: torch.fx.Graph) -> None:
    """Compute the same operator of the same operands once, in place.

    Results that share memory with an output stay apart, as they are for a caller who changes one of them.
    """
    outputs = {_memory(x) for node in graph.nodes if node.op == "output" for x in node.all_input_nodes}
    known: dict[Any, Any] = {}
    for node in [*graph.nodes]:
        key = _key(node)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is not node and _memory(node) not in outputs:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _memory(node: Any) -> Any:
    """The memory of a node's tensor; of another value, the node."""
    value = node.meta.get("val")
    try:
        return value.untyped_storage()._cdata  # noqa: SLF001 - as PyTorch compares storages
    except (AttributeError, NotImplementedError):
        return node


def _key(node: Any) -> Any:
    """A key that equal operators of equal operands have; None for one that is not a function of its operands."""
    if node.op != "call_function" or not _is_function(node.target):
        return None
    key = node.target, _frozen(node.args), _frozen(node.kwargs)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _is_function(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - the class of PyTorch's operators
        return target is operator.getitem
    seeded = torch.Tag.nondeterministic_seeded in target.tags
    return not (seeded or target._schema.is_mutable or "empty" in str(target))  # noqa: SLF001


def _frozen(x: Any) -> Any:
    """Nested operands as a hashable value; numbers with their types and signs."""
    if isinstance(x, dict):
        return tuple([(name, _frozen(y)) for name, y in sorted(x.items())])
    if isinstance(x, (list, tuple)):
        return tuple(map(_frozen, x))
    if isinstance(x, slice):
        return "slice", _frozen((x.start, x.stop, x.step))
    return (type(x), repr(x)) if isinstance(x, (bool, int, float, complex)) else x
