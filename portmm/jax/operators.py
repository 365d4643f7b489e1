"""Operators for JAX's arrays on processors: `matmul`, `linear` and `attention`, with gradients.

Owns their rules: they may be compiled (`jax.jit`), mapped over batches (`jax.vmap`) and differentiated in reverse, also
twice. Products of arrays are calls of plans by XLA itself (`handler`); packed weights and attention are callbacks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from portmm.arrays.numpy_arrays import as_operand, product_shape, types_of
from portmm.jax import handler
from portmm.ops.attention import attention as array_attention
from portmm.ops.attention_shapes import sizes_of
from portmm.ops.matmul import matmul as array_matmul
from portmm.ops.prepack import is_packed, is_quantized
from portmm.ops.result_dtype import numbers


def matmul(a: Any, b: Any) -> Any:
    """The product of two arrays of JAX's, like `jax.numpy.matmul`, by `portmm.matmul`.

    Args:
        a: (..., m, k) or (k,), of the types of `portmm.matmul`.
        b: (..., k, n) or (k,), likewise.

    Returns:
        The product, (..., m, n), of the type that `portmm.matmul` gives it.

    Raises:
        TypeError: the two types have no product.
        ValueError: shapes do not match.
    """
    x, y = jnp.asarray(a), jnp.asarray(b)
    for name, z in (("a", x), ("b", y)):
        as_operand(np.empty((1,) * z.ndim, z.dtype), name, matrix=False)
    product_shape(x.shape, y.shape)  # raises before anything is compiled
    left = x[None, :] if x.ndim == 1 else x
    right = y[:, None] if y.ndim == 1 else y
    # With as many axes each, mapped ones come before the same axes of both.
    rank = max(left.ndim, right.ndim)
    left, right = (z.reshape((1,) * (rank - z.ndim) + z.shape) for z in (left, right))
    floats = all(jnp.issubdtype(z.dtype, jnp.floating) for z in (x, y))
    product = _product(left, right, 0) if floats else _call(left, right, 0)
    product = product[..., 0, :] if x.ndim == 1 else product
    return product[..., 0] if y.ndim == 1 else product


def _call(a: Any, b: Any, transposed: int) -> Any:
    """The product of arrays of one rank, of which the last axes of those in `transposed` are exchanged."""
    m, n = (
        a.shape[-1 if transposed & handler.TRANSPOSED_A else -2],
        b.shape[-2 if transposed & handler.TRANSPOSED_B else -1],
    )
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n)
    result = jax.ShapeDtypeStruct(shape, types_of(np.dtype(a.dtype), np.dtype(b.dtype))[2])
    if handler.registered():
        call = jax.ffi.ffi_call(handler.TARGET, result, vmap_method="expand_dims")
        return call(a, b, transposed=np.int64(transposed))
    return jax.pure_callback(partial(_by_python, transposed), result, a, b, vmap_method="expand_dims")


def _by_python(transposed: int, a: Any, b: Any) -> Any:
    x, y = np.asarray(a), np.asarray(b)
    x = x.swapaxes(-1, -2) if transposed & handler.TRANSPOSED_A else x
    return array_matmul(x, y.swapaxes(-1, -2) if transposed & handler.TRANSPOSED_B else y)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(a: Any, b: Any, transposed: int) -> Any:
    return _call(a, b, transposed)


def _product_forward(a: Any, b: Any, transposed: int) -> Any:
    return _product(a, b, transposed), (a, b)  # itself, which may be differentiated again


def _product_backward(transposed: int, saved: Any, g: Any) -> Any:
    a, b = saved
    swapped_a, swapped_b = bool(transposed & handler.TRANSPOSED_A), bool(transposed & handler.TRANSPOSED_B)
    # Of C = A B: dA = G B^T and dB = A^T G, and their transposes where an operand is transposed.
    of_a = _product(b, g, _flags(swapped_b, True)) if swapped_a else _product(g, b, _flags(False, not swapped_b))
    of_b = _product(g, a, _flags(True, swapped_a)) if swapped_b else _product(a, g, _flags(not swapped_a, False))
    return _like(of_a, a), _like(of_b, b)


def _flags(a: bool, b: bool) -> int:
    return handler.TRANSPOSED_A * a | handler.TRANSPOSED_B * b


def _like(g: Any, x: Any) -> Any:
    """A gradient summed over the axes along which an operand was broadcast."""
    axes = tuple(i for i, (n, own) in enumerate(zip(g.shape, x.shape, strict=True)) if own == 1 != n)
    return g.sum(axes, keepdims=True).astype(x.dtype)


_product.defvjp(_product_forward, _product_backward)


def linear(x: Any, w: Any, bias: Any = None) -> Any:
    """A linear layer, x . w + bias.

    Args:
        x: (..., k), floats.
        w: (k, n): an array; or a weight from `pack` or `quantize`, which is a constant of the function, without a
            gradient.
        bias: (n,).

    Returns:
        The result, (..., n).

    Raises:
        TypeError: the types have no product.
        ValueError: shapes do not match.
    """
    if is_packed(w) or is_quantized(w):
        rows = jnp.asarray(x)
        product_shape(rows.shape, w.shape)  # raises here rather than in XLA's call
        result = _weighted(rows.reshape(-1, rows.shape[-1]), _Constant(w)).reshape(*rows.shape[:-1], w.shape[1])
    else:
        result = matmul(x, w)
    return result if bias is None else result + bias


class _Constant:
    """A weight as a constant of compiled functions: the same one is equal."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and other.weight is self.weight

    def __hash__(self) -> int:
        return id(self.weight)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _weighted(x: Any, w: _Constant) -> Any:
    dtype = types_of(np.dtype(x.dtype), np.dtype(w.weight.dtype))[2]
    result = jax.ShapeDtypeStruct((*x.shape[:-1], w.weight.shape[1]), dtype)
    return jax.pure_callback(
        lambda rows: np.asarray(array_matmul(np.asarray(rows), w.weight), dtype), result, x, vmap_method="expand_dims"
    )


def _weighted_backward(w: _Constant, x: Any, g: Any) -> Any:
    return (matmul(g, jnp.asarray(numbers(w.weight)).T.astype(g.dtype)).astype(x.dtype),)


_weighted.defvjp(lambda x, w: (_weighted(x, w), x), _weighted_backward)


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> Any:
    """Attention by one kernel, like `portmm.attention`; its gradient computes the scores again, as matrices.

    Args:
        q: queries, (..., heads, queries, d), of float32, bfloat16 or float16.
        k: keys, (..., heads of keys, keys, d).
        v: values, (..., heads of keys, keys, dv).
        causal: no query sees keys after its own position; the last query is at the last key.
        scale: the factor of products; by default 1 / sqrt(d).

    Returns:
        An array (..., heads, queries, dv).

    Raises:
        TypeError: types differ, or are not supported.
        ValueError: shapes do not match.
    """
    operands = [jnp.asarray(x) for x in (q, k, v)]
    sizes_of(*[(x.dtype.name, x.shape) for x in operands])  # raises here rather than in XLA's call
    return _attention(*operands, causal, scale)


def _attend(q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> Any:
    result = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)

    def run(*operands: Any) -> Any:
        x, y, z = (np.asarray(a) for a in operands)
        lead = np.broadcast_shapes(*(a.shape[:-3] for a in (x, y, z)))
        x, y, z = (np.broadcast_to(a, (*lead, *a.shape[-3:])) for a in (x, y, z))
        return array_attention(x, y, z, causal=causal, scale=scale)

    return jax.pure_callback(run, result, q, k, v, vmap_method="expand_dims")


_attention = partial(jax.custom_vjp, nondiff_argnums=(3, 4))(_attend)


def _attention_backward(causal: bool, scale: float | None, saved: Any, g: Any) -> Any:
    return jax.vjp(partial(_by_matrices, causal=causal, scale=scale), *saved)[1](g)


def _by_matrices(q: Any, k: Any, v: Any, *, causal: bool, scale: float | None) -> Any:
    """Attention with the matrix of scores in memory."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (jnp.repeat(x, group, axis=-3) for x in (k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = matmul(q, jnp.swapaxes(k, -1, -2)).astype(jnp.float32) * factor
    if causal:
        rows, columns = scores.shape[-2:]
        seen = jnp.arange(columns) <= jnp.arange(rows)[:, None] + (columns - rows)
        scores = jnp.where(seen, scores, -jnp.inf)
    return matmul(jax.nn.softmax(scores, axis=-1).astype(v.dtype), v).astype(q.dtype)


def _attention_forward(q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> Any:
    return _attention(q, k, v, causal, scale), (q, k, v)


_attention.defvjp(_attention_forward, _attention_backward)
