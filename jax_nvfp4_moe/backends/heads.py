"""`prepare_heads` and `gate_heads` in jnp: the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_nvfp4_moe.backends.cache import append
from jax_nvfp4_moe.numerics.fp8 import round_fp8
from jax_nvfp4_moe.numerics.norms import normalize
from jax_nvfp4_moe.numerics.rope import Rope, rotate


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Static options of `ops.prepare_heads`, which describes them."""

    rope: Rope | None
    eps: float
    rotates_first: bool
    gated: bool
    multiply_by_reciprocal: bool = False

    def count_queries(self, width: int, num_kv_heads: int, head_dim: int) -> int:
        """Return the number of query heads in projected tokens ``[..., width]``."""
        heads = width // head_dim - 2 * num_kv_heads
        return heads // 2 if self.gated else heads


def split_gates(projected, num_heads: int, head_dim: int):
    """Return the query heads of projected tokens, their gates, and the columns after both.

    Args:
      projected: ``[..., w]``. The channels of each query head are followed by those of its gate.
      num_heads: number of query heads n.
      head_dim: width d of a head.

    Returns:
      Queries and gates ``[..., n, d]`` each, and the other columns ``[..., w - 2 n d]``.
    """
    both, others = jnp.split(projected, [2 * num_heads * head_dim], axis=-1)
    both = both.reshape(*projected.shape[:-1], num_heads, 2, head_dim)
    return both[..., 0, :], both[..., 1, :], others


def normalize_heads(qk, weights, num_heads: int, eps: float):
    """Return query heads and key heads ``[b, t, n + m, d]``, each normalized by itself.

    `weights` are those of query heads and of key heads, ``[d]`` each.
    """
    return normalize(qk, _join_weights(weights, num_heads, qk.shape[-2]), eps)


def _join_weights(weights, num_heads, count):
    """Return the weight of each of `count` heads, of which `num_heads` are queries, ``[n + m, d]``.

    XLA fuses it into the product.
    """
    q_weight, k_weight = weights
    is_query = jnp.arange(count)[:, None] < num_heads
    return jnp.where(is_query, q_weight[None], k_weight[None])


def split_heads(qkv, positions, weights, num_kv_heads: int, head_dim: int, options: HeadOptions):
    """Return queries, keys and values, ``[b, t, heads, d]`` each, normalized and rotated.

    Args:
      qkv: projected tokens ``[b, t, w]``, as `ops.prepare_heads` takes them.
      positions: position of each token ``[b, t]``.
      weights: those of the norms of query heads and of key heads, or None.
      num_kv_heads: number of key heads m.
      head_dim: width d of a head.
      options: norms, rotation and gates.
    """
    (b, t, width), m, d = qkv.shape, num_kv_heads, head_dim
    n = options.count_queries(width, m, d)
    if options.gated:
        # Queries and keys are not neighbors here. To join them would be a copy.
        q, _, kv = split_gates(qkv, n, d)
        k, v = jnp.split(kv.reshape(b, t, 2 * m, d), 2, axis=2)
        q_weight, k_weight = weights or (None, None)
        q = _normalize_and_rotate(q, positions, q_weight, options)
        return q, _normalize_and_rotate(k, positions, k_weight, options), v
    qk, v = jnp.split(qkv.reshape(b, t, n + 2 * m, d), [n + m], axis=2)
    weight = None if weights is None else _join_weights(weights, n, n + m)
    qk = _normalize_and_rotate(qk, positions, weight, options)
    q, k = jnp.split(qk, [n], axis=2)
    return q, k, v


def _normalize_and_rotate(heads, positions, weight, options):
    """Return heads ``[b, t, n, d]``, normalized unless `weight` is None, and rotated."""
    if weight is not None and not options.rotates_first:
        heads = normalize(heads, weight, options.eps)
    if options.rope is not None:
        heads = rotate(heads, positions, options.rope)
    if weight is not None and options.rotates_first:
        heads = normalize(heads, weight, options.eps)
    return heads


@functools.partial(jax.jit, inline=True, static_argnames=("options",))
def prepare_heads(
    qkv, positions, keys, values, weights, k_scale=None, v_scale=None, *, options: HeadOptions
):
    """Compute `ops.prepare_heads`.

    `weights` are those of both norms, or None. `k_scale` and `v_scale` are those of a cache in FP8.
    """
    q, k, v = split_heads(qkv, positions, weights, keys.shape[1], keys.shape[3], options)
    if k_scale is not None and v_scale is not None:
        k, v = (
            round_fp8(
                x, scale[None, None, :, None], multiply_by_reciprocal=options.multiply_by_reciprocal
            )
            for x, scale in ((k, k_scale), (v, v_scale))
        )
    written, _ = append({"k": keys, "v": values}, positions, k=k, v=v)
    return q, written["k"], written["v"]


@functools.partial(jax.jit, inline=True)
def gate_heads(x, gates):
    """Multiply heads by their gates; `ops.gate_heads` describes the result."""
    n, d = x.shape[-2:]
    gate = gates[..., None] if gates.shape[-1] == n else split_gates(gates, n, d)[1]
    return (x.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)
