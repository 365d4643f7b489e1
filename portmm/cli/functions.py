"""Functions and arrays that a command line names.

Owns `function_named` and `arrays_of`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import TraceError

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


def function_named(text: str) -> Callable[..., Any]:
    """The function that FILE.py:NAME or MODULE:NAME names.

    Raises:
        TraceError: there is none.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise TraceError(f"{text!r} names no function; write FILE.py:NAME or MODULE:NAME")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None:
                raise TraceError(f"{place} is no file of Python's")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        function: Callable[..., Any] = getattr(module, name)
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise TraceError(f"{text!r} names no function ({error}); write FILE.py:NAME or MODULE:NAME") from error
    return function


def arrays_of(shapes: Sequence[str]) -> list[Array]:
    """Normally distributed arrays of float32 of shapes such as 16x1024.

    Raises:
        TraceError: a text is no shape.
    """
    source = np.random.default_rng(0)
    try:
        sizes = [tuple(map(int, x.split("x"))) for x in shapes]
    except ValueError as error:
        raise TraceError(f"{' '.join(shapes)!r} are no shapes; write one for each argument, as 16x1024") from error
    return [source.standard_normal(x, dtype=np.float32) for x in sizes]
