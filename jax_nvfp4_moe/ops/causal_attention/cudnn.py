"""The backward pass of attention on NVIDIA GPUs, by cuDNN's fused attention.

The kernels of ffi/cuda/attention have no backward pass. Plain XLA writes the scores of 512 queries
and all keys to memory; cuDNN keeps them in registers. It takes tokens that see each other from the
first on, as training has them. Whether the positions are such is known only on the device, which
therefore chooses between cuDNN and plain XLA.
"""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_nvfp4_moe.backends.record import HALVES
from jax_nvfp4_moe.numerics.varying import inside_shard_map
from jax_nvfp4_moe.ops.causal_attention.meaning import attend
from jax_nvfp4_moe.ops.derivative import with_derivative_of
from jax_nvfp4_moe.ops.positions import PADDING

Implementation = Literal["cudnn", "xla"]
# On an H200, cuDNN takes 0.36 ms for one row of 256 tokens, and plain XLA 0.26 ms. Four rows of
# 1024 tokens take 0.9 and 3.6 ms.
_FEWEST_TOKENS = 256


def attend_with_cudnn(q, k, v, positions, *others, implementation: Implementation = "cudnn", **how):
    """Compute `meaning.attend`, with a backward pass by cuDNN where it takes the call.

    cuDNN takes bfloat16 and float16, without sinks and chunks, with as many keys as tokens, values
    no wider than keys, and what `jax.nn.dot_product_attention` says that it takes on this device.
    Inside `jax.shard_map`, where it has no types for values that vary, and for all other calls, the
    backward pass is that of `attend`.

    Args:
      q, k, v, positions: as for `attend`.
      others: the other arrays of `attend`: sinks, and scales of keys and values.
      implementation: how `jax.nn.dot_product_attention` runs; "xla" for a test on any device.
      how: the options of `attend`.
    """
    is_plain = all(one is None for one in (*others, how["chunk"])) and how["scale"] > 0
    if is_plain and _takes((q, k, v), how["window"], implementation):
        return _attend(how["scale"], how["window"], implementation, q, k, v, positions)
    return attend(q, k, v, positions, *others, **how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(scale, window, implementation, q, k, v, positions):
    del implementation
    return attend(q, k, v, positions, None, scale=scale, window=window, chunk=None)


def _forward(scale, window, implementation, q, k, v, positions):
    y = _attend(scale, window, implementation, q, k, v, positions)
    return y, (q, k, v, positions)


def _backward(scale, window, implementation, kept, gradient):
    choose = functools.partial(_choose_gradients, implementation=implementation)
    rows = "b, b, b, b, b -> b, b, b"
    run = with_derivative_of(_plain_gradients, choose, rows, scale=scale, window=window)
    return (*run(*kept, gradient), None)


_attend.defvjp(_forward, _backward)


def _plain_gradients(q, k, v, positions, gradient, *, scale, window):
    """Return the gradients to queries, keys and values in plain XLA."""

    def run(q, k, v):
        return attend(q, k, v, positions, None, scale=scale, window=window, chunk=None)

    return jax.vjp(run, q, k, v)[1](gradient)


def _choose_gradients(q, k, v, positions, gradient, *, scale, window, implementation):
    """Return the gradients by cuDNN if token i is at position i or is padding, for all i."""
    is_token = positions < PADDING
    in_order = positions == jnp.arange(positions.shape[1], dtype=jnp.int32)[None]

    def fused(q, k, v, positions, gradient):
        del positions
        # The result for padding is undefined. To cuDNN it is that of a token.
        gradient = jnp.where(is_token[..., None, None], gradient, jnp.zeros_like(gradient))
        return _fused_gradients(q, k, v, gradient, scale, window, implementation)

    plain = functools.partial(_plain_gradients, scale=scale, window=window)
    fits = jnp.all(in_order | ~is_token)
    return lax.cond(fits, fused, plain, q, k, v, positions, gradient)


def _fused_gradients(q, k, v, gradient, scale, window, implementation):
    """Return the gradients of causal attention of tokens 0 to t - 1 to each other."""
    t, width = q.shape[1], v.shape[3]
    wider = (0, k.shape[3] - width)
    odd = (0, t % 2)  # It takes even numbers of tokens. No token sees one that is added behind it.

    def run(q, k, v):
        q = jnp.pad(q, [(0, 0), odd, (0, 0), (0, 0)])
        k = jnp.pad(k, [(0, 0), (0, 0), odd, (0, 0)])
        v = jnp.pad(v, [(0, 0), (0, 0), odd, wider])  # and values as wide as keys
        y = jax.nn.dot_product_attention(
            q,
            k.swapaxes(1, 2),
            v.swapaxes(1, 2),
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=implementation,
        )
        return y[:, :t, :, :width]

    # JAX's function promotes dtypes, which a user may have forbidden for a program.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.vjp(run, q, k, v)[1](gradient)


def _takes(operands: Sequence[Array], window: int | None, implementation: Implementation) -> bool:
    """Return whether `_fused_gradients` takes queries, keys and values."""
    q, k, v = operands
    sizes = {size for one in operands for size in one.shape}
    if not all(isinstance(size, int) for size in sizes) or 0 in sizes:
        return False
    t, s, d, width = q.shape[1], k.shape[2], k.shape[3], v.shape[3]
    if q.dtype.name not in HALVES or t != s or t < _FEWEST_TOKENS or width > d:
        return False
    if inside_shard_map():
        return False
    shapes = tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in operands)
    return _library_takes(shapes, window, implementation)


@functools.lru_cache(maxsize=256)
def _library_takes(shapes, window: int | None, implementation: Implementation) -> bool:
    """Return whether JAX traces `_fused_gradients` on this device."""
    q, _, v = shapes
    gradient = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
    options = {"scale": 1.0, "window": window, "implementation": implementation}
    try:
        jax.eval_shape(functools.partial(_fused_gradients, **options), *shapes, gradient)
    # No cuDNN, an old one, an old device, or sizes without a kernel: each has its own error.
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return True
