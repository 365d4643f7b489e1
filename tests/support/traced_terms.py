"""Terms of functions of arrays, as `fuse` with a search reads them."""

from __future__ import annotations

from portmm.fusion.fuse import FusedFunction
from portmm.fusion.term_reader import term_of
from portmm.trace.placeholders import Placeholder, rebuilt


def labelled_of(function, arrays):
    """The labelled terms of a function, traced on these arrays."""
    graph, result, _ = FusedFunction(function, strict=False).trace(tuple(arrays), {}, by_value=False)
    outputs = []
    rebuilt(result, lambda x: outputs.append(x.node) if isinstance(x, Placeholder) else None)
    return term_of(graph, outputs)
