"""Files of packed weights.

Owns the format in which packed weights are stored: a safetensors file, one tensor of panels for each weight,
and metadata with shapes and families. Nothing in a file is executed; a file is mapped into memory, and
weights are used from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import PackError
from portmm.ops import int4_panels, prepack
from portmm.weights.safetensors import LINE, read, write

if TYPE_CHECKING:
    import os

FORMAT, VERSION = "portmm.ops.prepack", "2"
_ONE = "weight"
"""Name of a weight that was saved by itself."""


def save_packed(weights: Any, path: str | os.PathLike[str]) -> None:
    """Write packed weights to a file, in the safetensors format.

    Args:
        weights: a result of `pack`, or several by name.
        path: the file; replaced atomically when it is complete.

    Raises:
        TypeError: an object is not a packed weight.
        OSError: the file cannot be written.
    """
    save_with(weights, {}, path)


def save_with(weights: Any, arrays: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write packed weights as `save_packed` does, and arrays by other names beside them."""
    many: Mapping[str, Any] = weights if isinstance(weights, dict) else {_ONE: weights}
    for name, w in many.items():
        if not isinstance(w, int4_panels.PackedInt4) and not prepack.is_packed(w):
            raise TypeError(f"{name} is {type(w).__name__}; save results of pack")
    about = {name: {"shape": list(w.shape), "family": w.family} for name, w in many.items()}
    metadata = {"format": FORMAT, "version": VERSION, "weights": json.dumps(about), "one": str(many is not weights)}
    write(path, {name: _padded(w.owner) for name, w in many.items()} | dict(arrays), metadata)


def _padded(panels: Any) -> Any:
    """Panels padded to whole cache lines, so that every weight of a file starts on one and is used in place."""
    padding = -panels.nbytes % LINE // panels.itemsize
    return np.pad(panels, (0, padding)) if padding else panels


def load_packed(path: str | os.PathLike[str], *, mmap: bool = True) -> Any:
    """Read a file of `save_packed`.

    Args:
        path: the file.
        mmap: map the panels from the file; else read them now.

    Returns:
        A packed weight, or a dict of them by name.

    Raises:
        PackError: the file is of another format, or is damaged.
        OSError: it cannot be read.
    """
    return load_with(path, mmap=mmap)[0]


def load_with(path: str | os.PathLike[str], *, mmap: bool = True) -> tuple[Any, dict[str, Any]]:
    """The weights of a file as `load_packed` returns them, and all its arrays by name."""
    tensors, metadata = read(path, mmap=mmap)
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise PackError(f"{path} has no packed weights of version {VERSION}: its format is {metadata.get('format')!r}")
    try:
        about = json.loads(metadata["weights"])
        weights = {name: _restored(tensors[name], entry["shape"], entry["family"]) for name, entry in about.items()}
        one = metadata["one"] == "True"
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise PackError(f"{path} does not describe its weights: {error!r}") from error
    if one and list(weights) != [_ONE]:
        raise PackError(f"{path} lacks the one weight that it declares")
    return (weights[_ONE] if one else weights), tensors


def _restored(owner: Any, shape: Any, family: Any) -> Any:
    if not isinstance(family, str) or not isinstance(shape, list) or not all(type(n) is int for n in shape):
        raise PackError(f"shape {shape!r} and family {family!r} describe no weight")
    if family.startswith("u4"):
        return int4_panels.restore(owner, tuple(shape), family)
    return prepack.restore(owner, tuple(shape), family.partition("x")[0], family)
