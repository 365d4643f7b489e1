"""Packed weights in files.

Owns the form in which packed and folded weights are kept: a file of
`tensorfile`'s, one tensor of panels for each weight, and words that say what
they are. Nothing in a file is executed; a file maps into memory, and weights
are used from there. Imports `ops.int4_panels`, `ops.prepack`, `weights.safetensors`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import PackError
from portmm.ops import int4_panels, prepack
from portmm.weights.safetensors import LINE, read, write

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

FORMAT, VERSION = "portmm.ops.prepack", "2"
_ONE = "weight"
"""Name of a weight that was saved by itself."""


def save_packed(weights: Any, path: str | os.PathLike[str]) -> None:
    """Write packed weights to a file, in the safetensors format.

    Args:
        weights: what `pack` returned, or several of them by name.
        path: where to; replaced at once when it is complete.

    Raises:
        TypeError: something is no packed weight.
        OSError: the file cannot be written.
    """
    many: Mapping[str, Any] = weights if isinstance(weights, dict) else {_ONE: weights}
    for name, w in many.items():
        if not isinstance(w, int4_panels.Folded) and not prepack.is_packed(w):
            raise TypeError(f"{name} is {type(w).__name__}; save what pack returns")
    about = {name: {"shape": list(w.shape), "family": w.family} for name, w in many.items()}
    words = {"format": FORMAT, "version": VERSION, "weights": json.dumps(about), "one": str(many is not weights)}
    write(path, {name: _whole_lines(w.owner) for name, w in many.items()}, words)


def _whole_lines(panels: Any) -> Any:
    """Panels padded to whole cache lines, so that every weight of a file starts on one and is used in place."""
    ragged = -panels.nbytes % LINE // panels.itemsize
    return np.pad(panels, (0, ragged)) if ragged else panels


def load_packed(path: str | os.PathLike[str], *, mmap: bool = True) -> Any:
    """Read what `save_packed` wrote.

    Args:
        path: the file.
        mmap: use the panels where they lie in the file; else read them now.

    Returns:
        A packed weight, or a dict of them by name.

    Raises:
        PackError: it is no such file, or is damaged.
        OSError: it cannot be read.
    """
    tensors, words = read(path, mmap=mmap)
    if words.get("format") != FORMAT or words.get("version") != VERSION:
        raise PackError(f"{path} holds no packed weights of version {VERSION}: its format is {words.get('format')!r}")
    try:
        about = json.loads(words["weights"])
        found = {name: _restored(tensors[name], entry["shape"], entry["family"]) for name, entry in about.items()}
        one = words["one"] == "True"
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise PackError(f"{path} does not say what its weights are: {error!r}") from error
    if one and list(found) != [_ONE]:
        raise PackError(f"{path} does not hold the one weight that it says it does")
    return found[_ONE] if one else found


def _restored(owner: Any, shape: Any, family: Any) -> Any:
    if not isinstance(family, str) or not isinstance(shape, list) or not all(type(n) is int for n in shape):
        raise PackError(f"shape {shape!r} and family {family!r} describe no weight")
    if family.startswith("u4"):
        return int4_panels.restore(owner, tuple(shape), family)
    return prepack.restore(owner, tuple(shape), family.partition("x")[0], family)
