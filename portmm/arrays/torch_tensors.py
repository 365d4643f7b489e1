"""Tensors of PyTorch.

Owns the reading of their addresses, strides, types and streams, and the allocation of new ones; for tensors in the
host's memory, views of them as NumPy's arrays, and `through`, a call of a function of such arrays.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.libraries import library_of
from portmm.arrays.numpy_arrays import name_of, numpy_of
from portmm.arrays.operand import Operand, type_name
from portmm.spec.dtype import BY_NAME, BY_NUMPY, EXTENSION_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable


def from_torch(x: Any) -> Operand | None:
    """The description of a tensor of PyTorch's; None if it is in the host's memory.

    Raises:
        TypeError: it requires gradients, or its layout or element type is unknown to portmm.
    """
    if not x.is_cuda:
        return None
    torch = _checked(x)
    size = x.element_size()
    return Operand(
        source=x,
        language="cuda",
        device=("cuda", int(x.device.index)),
        pointer=int(x.data_ptr()),
        shape=tuple(x.shape),
        strides=tuple(s * size for s in x.stride()),
        dtype=type_name(str(x.dtype).removeprefix("torch."), "a tensor"),
        queue=int(torch.cuda.current_stream(x.device).cuda_stream),
        readonly=False,
    )


def _checked(x: Any) -> Any:
    """PyTorch, if portmm can read a tensor of it.

    Raises:
        TypeError: it requires gradients, or its layout is unknown to portmm.
    """
    torch = sys.modules["torch"]
    if getattr(x, "requires_grad", False) and torch.is_grad_enabled():
        raise TypeError(
            "a tensor requires gradients, which portmm does not compute; detach() it, or use torch.no_grad()"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"a tensor has layout {x.layout}; portmm takes strided ones: use to_dense()")
    if x.is_neg():
        raise TypeError("a tensor is a view that changes signs when it is read; use resolve_neg()")
    return torch


def torch_empty(x: Operand, shape: tuple[int, ...], dtype: str) -> Any:
    """A new tensor on the device of an array."""
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=getattr(torch, BY_NAME[dtype].numpy), device=x.source.device)


# -- in the host's memory --------------------------------------------------------------


def through(function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """The results, as tensors, of a function of NumPy's arrays that is called with tensors in the host's memory.

    Raises:
        TypeError: a tensor requires gradients, or its layout or element type is unknown to portmm.
    """
    tensors: dict[int, Any] = {}

    def read(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)([read(y) for y in x])
        library = library_of(x)
        if library == "torch" and not x.is_cuda:
            view = as_numpy(x)
            tensors[id(view)] = x, view
            return view
        return numpy_of(BY_NUMPY[str(x)[6:]].name) if not library and str(x).startswith("torch.") else x

    def written(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple([written(y) for y in x])
        if id(x) in tensors:  # an `out`
            return tensors[id(x)][0]
        return _tensor(x) if isinstance(x, (np.ndarray, np.generic)) else x

    return written(function(*map(read, operands), **{name: read(x) for name, x in options.items()}))


def as_numpy(x: Any) -> np.ndarray[Any, Any]:
    """A view of a tensor as an array of NumPy's.

    Raises:
        TypeError: it requires gradients, or its layout or element type has none.
    """
    torch, bare = _checked(x), x.detach()
    known = BY_NUMPY.get(str(x.dtype).removeprefix("torch."))
    if known is None or known.name not in EXTENSION_TYPES:
        array: np.ndarray[Any, Any] = bare.numpy()
        return array
    bits = torch.int16 if known.bytes > 1 else torch.uint8
    return np.asarray(bare.view(bits).numpy()).view(numpy_of(known.name))


def _tensor(x: Any) -> Any:
    """A tensor over the memory of an array of NumPy's."""
    torch, array = sys.modules["torch"], np.asarray(x)
    name = name_of(array.dtype)
    if name not in EXTENSION_TYPES:
        return torch.from_numpy(array)
    bits = np.int16 if array.itemsize > 1 else np.uint8
    return torch.from_numpy(array.view(bits)).view(getattr(torch, BY_NAME[name].numpy))
