"""Products and attention among the operators of PyTorch, as operations on traced arrays.

Rows of A keep the dimensions that PyTorch flattens for a product, so that what follows is fused with it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from portmm.ops.attention import attention
from portmm.ops.linear import linear
from portmm.spec import elementwise as ew
from portmm.spec.epilogue import acc, argument
from portmm.spec.expr import real
from portmm.spec.expr_functions import fma
from portmm.torch.aten import HANDLERS, Unsupported, reshape, row, row_weights
from portmm.torch.weights import packed
from portmm.trace.closures import traced_through
from portmm.trace.placeholders import Array

QUANTIZED = "portmm.quantized_linear.default"
"""The name of the operator of quantized layers."""
LEAST_SCORES = 1 << 18
"""Scores from which attention is one kernel; fewer take less time in three kernels of one call."""


def _flattened(x: Any) -> Any:
    """An array of which another is a reshape, if that moves no column."""
    if isinstance(x, Array) and x.node.kind == "view" and x.node.name == "reshape":
        base = x.node.inputs[0]
        if len(base.shape) >= 2 and base.shape[-1] == x.shape[-1]:
            return Array(x.recorder, base)
    return None


def product(t: Any, x: Any, y: Any) -> Any:
    """The product of matrices; rows keep the dimensions that were flattened for it, so that what follows is fused."""
    a = t.array(x)
    for z in (a, y):
        if str(z.dtype).removeprefix("torch.") not in ("float32", "float16", "bfloat16"):
            raise Unsupported(f"products of {z.dtype}")
    base = _flattened(a)
    left = a if base is None else base
    value = left @ t.weight(y, a.dtype)
    return value if base is None else reshape(t, value, (*a.shape[:-1], value.shape[-1]))


@row("mm")
def _mm(t: Any, x: Any, y: Any, *_: Any) -> Any:
    return product(t, x, y)


@row("addmm")
def _addmm(t: Any, c: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    value = product(t, x, y)
    other = t.operand(c)
    inner = value.node.inputs[0] if value.node.kind == "view" and value.node.name == "reshape" else None
    by_column = isinstance(other, Array) and other.ndim == 1
    total: Any = Array(value.recorder, inner) if inner is not None and by_column else value
    total = total if alpha == 1 else total * alpha
    total = total + (other if beta == 1 else other * beta)
    return total if total.shape == value.shape else reshape(t, total, value.shape)


@row("bmm")
def _bmm(t: Any, x: Any, y: Any) -> Any:
    a, b = t.array(x), t.array(y)
    first, second = _unbatched(a), _unbatched(b)
    if first is None or second is None or first.shape[:-2] != second.shape[:-2]:
        return a @ b
    value = first @ second
    return reshape(t, value, (*a.shape[:-1], b.shape[-1]))


def _unbatched(x: Array) -> Any:
    """The array whose leading dimensions were flattened to the batch of another."""
    if x.node.kind == "view" and x.node.name == "reshape":
        base = x.node.inputs[0]
        if base.shape[-2:] == x.shape[-2:]:
            return Array(x.recorder, base)
    return None


@row("baddbmm")
def _baddbmm(t: Any, c: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    value = _bmm(t, x, y)
    value = value if alpha == 1 else value * alpha
    return value + t.operand(c) * beta if beta else value


# -- attention -------------------------------------------------------------------------


@row("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
def _flash(
    t: Any, q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *, attn_mask: Any = None,
    scale: Any = None, **_: Any,
) -> Any:  # fmt: skip
    reads_sums = any(n.args[1] == 1 and n.users for n in t.now.users)
    if dropout or reads_sums:
        raise Unsupported("dropout in attention" if dropout else "attention whose gradients are computed")
    q, k, v = (t.operand(x) for x in (q, k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    mask = None if attn_mask is None else t.operand(attn_mask)
    grouped = q.shape[1] != k.shape[1]
    if causal or grouped or math.prod(q.shape[:-1]) * k.shape[-2] >= LEAST_SCORES:
        return [_one_kernel(t, (q, k, v), mask, factor, causal=causal), None]
    scores = (q @ k.swapaxes(-1, -2)) * factor
    return [row_weights(scores if mask is None else scores + mask) @ v, None]


def _one_kernel(t: Any, operands: tuple[Any, ...], mask: Any, factor: float, *, causal: bool) -> Any:
    q, k, v = operands
    wanted = (*q.shape[:2], q.shape[2], k.shape[2])

    def plain(q: Any, k: Any, v: Any, *masks: Any) -> Any:
        @traced_through
        def score(s: Any, i: Any) -> Any:
            return s * factor + masks[0][i.b, i.h, i.q, i.kv]

        if masks:
            masks = (np.broadcast_to(masks[0], wanted),)
        return attention(q, k, v, scale=None if masks else factor, score=score if masks else None, causal=causal,
                         offset=0 if causal else None)  # fmt: skip

    inputs = tuple([x.node for x in (q, k, v, *(() if mask is None else (mask,)))])
    shape = (*q.shape[:-1], v.shape[-1])
    node = t.recorder.add("call", shape, q.dtype, inputs, plain, "attention")
    return Array(t.recorder, node)


# -- quantized layers ------------------------------------------------------------------


def _gelu(acc: Any, _: Any) -> Any:
    return ew.gelu(acc)


def _gelu_tanh(acc: Any, _: Any) -> Any:
    return ew.gelu_tanh(acc)


def _relu(acc: Any, _: Any) -> Any:
    return ew.relu(acc)


def _silu(acc: Any, _: Any) -> Any:
    return ew.silu(acc)


_ACTIVATIONS = {
    ("aten.gelu.default", ""): _gelu, ("aten.gelu.default", "none"): _gelu,
    ("aten.gelu.default", "tanh"): _gelu_tanh, ("aten.relu.default", ""): _relu, ("aten.silu.default", ""): _silu,
}  # fmt: skip
"""Operators after a layer, with the way in which they approximate, that its kernel computes."""


def _quantized(t: Any, x: Any, codes: Any, scales: Any, offsets: Any, bias: Any, kind: str, group: int) -> Any:
    if any(isinstance(y, Array) for y in (codes, scales, offsets)):
        raise Unsupported("a weight that is no parameter")
    siblings = _siblings(t, t.now)
    layers = [(codes, scales, offsets, bias), *(own for _, own in siblings)]
    weight, scales, bias = _packed(t, layers, kind, group)
    a, alone = t.operand(x), len(layers) == 1
    base = _flattened(a)
    rows = a if base is None else base
    plain = rows.dtype == np.float32 and (bias is None or bias.dtype is torch.float32)
    in_steps = kind == "int8-dynamic" and rows.ndim > 1 and plain
    whole = kind.endswith("dynamic") and rows.ndim > 1 and not in_steps
    user = _activation(t.now) if alone and whole else None
    if in_steps:
        value: Any = _by_codes(t, rows, weight, scales, bias)
    else:
        value = _multiplied(t, rows, weight, scales, bias, kind, user)
    value = value if base is None else reshape(t, value, (*a.shape[:-1], value.shape[-1]))
    if user is not None:
        t.ready[user] = value
    if alone:
        return value
    widths = [y[0].shape[0] for y in layers]
    ends = np.cumsum(widths).tolist()
    views = [columns(value, end - n, end) for n, end in zip(widths, ends, strict=True)]
    t.ready.update(zip([node for node, _ in siblings], views[1:], strict=True))
    return views[0]


def _packed(t: Any, layers: list[tuple[Any, ...]], kind: str, group: int) -> tuple[Any, Any, Any]:
    """The weight of some layers side by side, packed, and their scales and bias."""
    codes, scales, offsets, bias = (_joined(t, parts) for parts in zip(*layers, strict=True))
    tensors = [y for y in (codes, scales, offsets) if y is not None]
    weight = t.constants.panels(tensors, lambda: packed(codes, scales, offsets, kind, group, t.now.meta["val"].dtype))
    return weight, scales, bias


def _multiplied(t: Any, rows: Any, weight: Any, scales: Any, bias: Any, kind: str, user: Any) -> Any:
    """The rows times a packed weight, with the activation of the operator `user`, if there is one."""
    if kind.endswith("dynamic"):
        epilogue = None if user is None else _ACTIVATIONS[_named(user)]
        return _dynamic(t, rows, weight, scales if kind == "int8-dynamic" else None, bias, epilogue)
    value = rows @ Array(t.recorder, t.recorder.fixed_leaf(weight, "a weight"))
    return value if bias is None else value + t.operand(bias)


def columns(x: Array, first: int, last: int) -> Any:
    """Some columns of an array."""
    return x.recorder.viewed("[]", lambda y: y[..., first:last], x)


def _siblings(t: Any, node: Any) -> list[tuple[Any, Any]]:
    """Layers of the same kind after this one and of the same rows, with their tensors: one product computes all."""
    own = [t.values.get(y) for y in node.args[1:5]]
    siblings = []
    for user in node.args[0].users if isinstance(node.args[0], torch.fx.Node) else ():
        if user is node or user.target is not node.target or user in t.ready or user in t.values:
            continue
        if any(y is not None and y not in t.values for y in user.args[1:5]):  # computed after this layer
            continue
        tensors = tuple(t.values.get(y) for y in user.args[1:5])
        alike = [type(y) for y in tensors] == [type(y) for y in own] and user.args[5:] == node.args[5:]
        fixed = all(y is None or isinstance(y, torch.Tensor) for y in tensors)
        if alike and fixed and user.args[0] is node.args[0]:
            siblings.append((user, tensors))
    return siblings


def _joined(t: Any, parts: tuple[Any, ...]) -> Any:
    """Tensors of several layers as one, along the outputs."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    return t.constants.panels(list(parts), lambda: t.constants.computed(torch.cat, (list(parts),), {}, list(parts)))


def _named(node: Any) -> tuple[str, str]:
    return str(node.target), str(node.kwargs.get("approximate", ""))


def _activation(node: Any) -> Any:
    """The only operator that reads the result of a layer, if a kernel computes it with the layer."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    known = user is not None and user.op == "call_function" and len(user.args) == 1 and _named(user) in _ACTIVATIONS
    return user if known else None


def _by_codes(t: Any, x: Array, weight: Any, scales: Any, bias: Any) -> Array:
    """A linear layer whose rows of activations are rounded to int8, in steps that are fused with those around them."""
    codes, steps = ew.quantize_rows(x)
    by_column = scales.detach().numpy()
    added = None if bias is None else t.constants.array(bias)
    fixed = (scales,) if bias is None else (scales, bias)
    operands = tuple([t.recorder.node_of(y) for y in (steps, *map(t.array, fixed))])
    value = real(acc("s32")) * argument(1, "f32")
    template = fma(argument(0, "f32"), value, 0.0 if bias is None else argument(2, "f32"))

    def plain(rows: Any, _: Any, step: Any, *__: Any) -> Any:
        return linear(rows, weight, added, x_scale=step[..., 0], w_scale=by_column)

    panels = t.recorder.fixed_leaf(weight, "a weight")
    return Array(t.recorder, t.recorder.scaled(codes.node, panels, operands, template, plain))


def _dynamic(t: Any, x: Array, weight: Any, scales: Any, bias: Any, epilogue: Any) -> Array:
    """A linear layer whose rows of activations are rounded to int8."""
    steps = {} if scales is None else {"w_scale": t.constants.array(scales)}
    added, dtype = None if bias is None else t.constants.array(bias), x.dtype

    def plain(rows: Any, out: Any = None) -> Any:
        return linear(rows, weight, added, dynamic=True, dtype=dtype, epilogue=epilogue, out=out, **steps)

    plain.takes_out = True  # type: ignore[attr-defined]
    node = t.recorder.add("call", (*x.shape[:-1], weight.shape[1]), dtype, (x.node,), plain, "linear")
    return Array(t.recorder, node)


HANDLERS[QUANTIZED] = _quantized
HANDLERS["portmm.matmul.default"] = product
