"""Arguments of a fused function.

Owns `arguments`, the kind of a call by its arguments, and `placeholder`, which replaces them while the function is
traced.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from portmm.arrays.interop import lay
from portmm.arrays.libraries import on_device
from portmm.trace.captures import Captures, Place, is_weight
from portmm.trace.closures import is_float, is_plain
from portmm.util.array_subclasses import refuse_class

Array = np.ndarray[Any, Any]


def arguments(values: Any, key: list[Any], leaves: list[Any], kept: list[Any]) -> None:
    """Append the cache key of some arguments, the values that vary per call (leaves), and objects named by identity."""
    for x in values:
        if type(x) is np.ndarray:
            key.append((x.shape, x.strides, x.dtype, x.flags.aligned))
            leaves.append(x)
        elif isinstance(x, (tuple, list)):
            key.append((type(x), len(x)))
            arguments(x, key, leaves, kept)
        elif isinstance(x, dict):
            key.append(tuple(x))
            arguments(x.values(), key, leaves, kept)
        elif isinstance(x, float) and is_float(x):
            key.append(type(x))
            leaves.append(float(x))
        elif isinstance(x, np.ndarray):
            refuse_class(x, "an argument", matrix=False)
            key.append((x.shape, x.strides, x.dtype, x.flags.aligned))
            leaves.append(np.asarray(x))
        elif is_weight(x):
            key.append((id(x), x.shape))
            leaves.append(x)
            kept.append(x)
        elif isinstance(x, type) or is_plain(x):
            key.append((type(x), x))
        elif on_device(x):
            key.append(lay(x))
            leaves.append(x)
        else:
            key.append(id(x))
            kept.append(x)


def placeholder(captures: Captures, x: Any, name: str) -> Any:
    """The traced replacement of an argument, whose kind is in the key of the call: see `arguments`."""
    at = Place("", name)
    if isinstance(x, np.ndarray) or on_device(x):
        return captures.recorder.array(x, at)
    if is_weight(x):
        return captures.recorder.weight(x, at)
    if isinstance(x, (tuple, list)):
        items = [placeholder(captures, y, f"{name}[{i}]") for i, y in enumerate(x)]
        return type(x)(items) if type(x) in (tuple, list) else type(x)(*items)
    if isinstance(x, dict):
        return {k: placeholder(captures, y, f"{name}[{k!r}]") for k, y in x.items()}
    if isinstance(x, float) and is_float(x):
        number = captures.recorder.number(x, at)
        return x if captures.by_value else number
    constant = isinstance(x, type) or is_plain(x)
    return x if constant else captures.wrapped(x, Place(captures.guards.constant(x), name))
