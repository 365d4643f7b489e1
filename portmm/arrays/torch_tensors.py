"""Tensors of PyTorch.

Owns the reading of their addresses, strides, types and streams, and the allocation of new ones.
"""

from __future__ import annotations

import sys
from typing import Any

from portmm.arrays.operand import Operand, type_name
from portmm.spec.dtype import BY_NAME


def from_torch(x: Any) -> Operand | None:
    """The description of a tensor of PyTorch's; None if it is in the host's memory.

    Raises:
        TypeError: it requires gradients, or its layout or element type is unknown to portmm.
    """
    if not x.is_cuda:
        return None
    torch = sys.modules["torch"]
    if getattr(x, "requires_grad", False) and torch.is_grad_enabled():
        raise TypeError(
            "a tensor requires gradients, which portmm does not compute; detach() it, or use torch.no_grad()"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"a tensor has layout {x.layout}; portmm takes strided ones: use to_dense()")
    if x.is_neg():
        raise TypeError("a tensor is a view that changes signs when it is read; use resolve_neg()")
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


def torch_empty(x: Operand, shape: tuple[int, ...], dtype: str) -> Any:
    """A new tensor on the device of an array."""
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=getattr(torch, BY_NAME[dtype].numpy), device=x.source.device)
