"""Kinds of arrays on a device: what of an array the kernels of a call depend on, read in a microsecond.

Owns `kind`, the key of an array and its address, by which repeated calls find what they launch, `kinds`, `stream_of`
and `NewArray`. Nothing is described for messages here: for an array that has no kind, `interop.adopt` says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from portmm.arrays.libraries import library_of
from portmm.arrays.numpy_arrays import contiguous, numpy_of
from portmm.spec.dtype import BY_NAME
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.arrays.operand import Operand

Kind = tuple[Any, ...]
LOW_BITS = 15
"""Bits of an address that vector accesses depend on."""
MOST_CLASSES = 64


def kind(x: Any) -> tuple[Kind, int] | None:
    """The properties of a CuPy array or a tensor that kernels depend on, and its address; None for other objects.

    None, too, for a tensor that kernels do not read as it is, as one that requires gradients.
    """
    reader = _readers.get(type(x))
    if reader is None:
        reader = _readers.keep(type(x), _OF_LIBRARY.get(library_of(x), _unknown))
    known: tuple[Kind, int] | None = reader(x)
    return known


def kinds(arrays: tuple[Any, ...]) -> tuple[tuple[Kind, ...], list[int]] | None:
    """The kinds of arrays, and their addresses; None where one has no kind."""
    every, addresses, of_class = [], [], _readers
    for x in arrays:
        reader = of_class.get(type(x))
        known = kind(x) if reader is None else reader(x)
        if known is None:
            return None
        every.append(known[0])
        addresses.append(known[1])
    return tuple(every), addresses


def _unknown(_x: Any) -> None:
    return None


def _of_tensor(x: Any) -> tuple[Kind, int] | None:
    torch = sys.modules["torch"]
    if not x.is_cuda or (x.requires_grad and torch.is_grad_enabled()) or x.layout is not torch.strided or x.is_neg():
        return None
    at = x.data_ptr()
    return (x.dtype, x.shape, x.stride(), x.device, at & LOW_BITS), at


def _of_cupy(x: Any) -> tuple[Kind, int]:
    at = x.data.ptr
    return (x.dtype, x.shape, x.strides, x.device.id, at & LOW_BITS), at


_OF_LIBRARY: dict[str, Callable[[Any], Any]] = {"torch": _of_tensor, "cupy": _of_cupy}
_readers = Memory(MOST_CLASSES)


def streams_of(library: Any) -> Callable[[int], int]:
    """The function from a device to the handle of the current stream of a library, CuPy or PyTorch."""
    if library.__name__ == "cupy":
        return lambda device: int(library.cuda.get_current_stream(device).ptr)
    # PyTorch's compiled code calls this; the public function makes objects, in several microseconds.
    raw: Callable[[int], int] | None = getattr(getattr(library, "_C", None), "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: int(library.cuda.current_stream(device).cuda_stream))


def stream_of(library: Any, device: int) -> int:
    """The handle of the current stream of a library on a device."""
    return streams_of(library)(device)


class NewArray:
    """C-contiguous arrays of one shape and type, of the library of an operand and on its device.

    Args:
        like: the operand.
        shape: of the arrays.
        dtype: portmm's name of their elements' type.
    """

    __slots__ = ("device", "dtype", "library", "shape", "strides")

    def __init__(self, like: Operand, shape: tuple[int, ...], dtype: str) -> None:
        self.library, self.shape = library_of(like.source), shape
        self.strides = contiguous(shape, 1)
        of_torch = self.library == "torch"
        self.dtype = getattr(sys.modules["torch"], BY_NAME[dtype].numpy) if of_torch else numpy_of(dtype)
        self.device = like.source.device if of_torch else like.device[1]

    def __call__(self) -> tuple[Any, int]:
        """A new array, uninitialised, and its address."""
        if self.library == "torch":
            x = sys.modules["torch"].empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
            return x, x.data_ptr()
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(self.device):
            x = cupy.empty(self.shape, dtype=self.dtype)
        return x, x.data.ptr
