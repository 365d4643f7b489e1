"""Quantized layers of a checkpoint, packed.

Owns `pack_checkpoint`, which goes through the layers one by one, and `PackedLayer`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import PackError
from portmm.ops.linear import linear
from portmm.ops.matmul import matmul
from portmm.ops.prepack import pack
from portmm.util.console import progress as progress_bar
from portmm.weights.checkpoints import GGUF_KINDS
from portmm.weights.gguf import Gguf, open_gguf
from portmm.weights.model_files import Checkpoint, open_checkpoint
from portmm.weights.quantized import Quantized, dequantize

if TYPE_CHECKING:
    import os


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """A packed weight, and what a product by it needs besides.

    Attributes:
        weight: a result of `pack`, (inputs, outputs).
        scales: of outputs, of int8 values.
        order: of inputs, where rows of the weight are in another one.
    """

    weight: Any
    scales: Any = None
    order: Any = None

    def __call__(self, x: Any, *, dynamic: bool | None = None) -> Any:
        """The product of rows and the weight.

        Args:
            x: (..., inputs), floats.
            dynamic: round rows of x to int8, each with a scale of its own; by default only for weights of int8, which
                need it.
        """
        rows = x if self.order is None else x[..., self.order]
        if self.scales is not None:
            return linear(rows, self.weight, w_scale=self.scales, dynamic=True)
        return linear(rows, self.weight, dynamic=True) if dynamic else matmul(rows, self.weight)


def pack_checkpoint(
    source: Checkpoint | Gguf | str | os.PathLike[str],
    *,
    filter: Callable[[str], bool] | None = None,  # noqa: A002 - as in `quantize_`
    progress: bool = False,
) -> dict[str, PackedLayer]:
    """The quantized layers of a model, packed one by one: memory is that of the result and of one layer.

    Values of 4 bits stay what they are. Those of 8 bits are int8 with a scale for each output where the file has no
    others, and else floats that are rounded to bfloat16. Of a GGUF file it takes matrices of types Q4_0 and Q4_1.

    Args:
        source: what `open_checkpoint` or `open_gguf` gave, or a path for one of these.
        filter: a function of a layer's name that is true for those to pack; all by default.
        progress: show a progress bar on standard error, if that is a terminal.

    Returns:
        Packed layers by name.

    Raises:
        PackError: a file is damaged, or a layer is in a form that is not read.
        OSError: a file cannot be read.
    """
    makers = quantized_layers(source if hasattr(source, "tensors") else opened(source))
    names = [n for n in makers if filter is None or filter(n)]
    packed: dict[str, PackedLayer] = {}
    with progress_bar("packing") if progress else nullcontext(lambda *_: None) as update:
        for i, name in enumerate(names):
            update(i, len(names), name)
            packed[name] = packed_layer(*makers[name]())
    return packed


def opened(path: Any) -> Any:
    """The model of a path: see `open_checkpoint` and `open_gguf`."""
    if str(path).endswith(".gguf"):
        return open_gguf(path)
    return open_checkpoint(path)


def quantized_layers(file: Any) -> dict[str, Callable[[], tuple[Quantized, Any]]]:
    """Makers of the quantized layers of a model, each with the order of its inputs or None."""
    return _gguf_layers(file) if isinstance(file, Gguf) else {n: x.quantized for n, x in file.layers.items()}


def _gguf_layers(file: Gguf) -> dict[str, Callable[[], tuple[Quantized, None]]]:
    """Makers of the matrices of four bits of a GGUF file."""
    return {
        name: lambda tensor=tensor: (tensor.quantized(), None)  # type: ignore[misc]
        for name, tensor in file.tensors.items()
        if tensor.kind in GGUF_KINDS and len(tensor.shape) == 2
    }


def packed_layer(q: Quantized, order: Any) -> PackedLayer:
    """A quantized layer, packed for the current target: see `pack_checkpoint`."""
    if q.bits == 4:
        try:
            return PackedLayer(pack(q), order=order)
        except PackError:  # groups that kernels do not have
            return PackedLayer(_bfloat16(q), order=order)
    if q.symmetric and q.groups == 1 and not (q.scales < 0).any():
        values = (q.codes ^ np.uint8(128)).view(np.int8)
        return PackedLayer(pack(values, activations=np.int8), q.scales[0], order)
    return PackedLayer(_bfloat16(q), order=order)


def _bfloat16(q: Quantized) -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise PackError(
            "a layer of 8 bits with groups becomes bfloat16, which NumPy lacks: pip install 'portmm[dtypes]'"
        ) from error
    return pack(dequantize(q, ml_dtypes.bfloat16), activations=np.float32)
