"""`prepare_heads` in jnp: the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_nvfp4_moe.numerics.cache import append
from jax_nvfp4_moe.numerics.norms import normalize
from jax_nvfp4_moe.numerics.rope import Rope, rotate


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Static options of `ops.prepare_heads`, which describes them."""

    rope: Rope | None
    eps: float
    rotates_first: bool


def normalize_heads(qk, weights, num_heads: int, eps: float):
    """Return query heads and key heads ``[b, t, n + m, d]``, each normalized by itself.

    `weights` are those of query heads and of key heads, ``[d]`` each.
    """
    # The weight of queries or of keys for each head, which XLA fuses into the product.
    q_weight, k_weight = weights
    is_query = jnp.arange(qk.shape[-2])[:, None] < num_heads
    return normalize(qk, jnp.where(is_query, q_weight[None], k_weight[None]), eps)


@functools.partial(jax.jit, inline=True, static_argnames=("options",))
def prepare_heads(qkv, positions, keys, values, weights, *, options: HeadOptions):
    """Compute `ops.prepare_heads`; `weights` are those of both norms, or None."""
    (b, t, width), m, d = qkv.shape, keys.shape[1], keys.shape[3]
    heads = qkv.reshape(b, t, width // d, d)
    num_heads = heads.shape[2] - 2 * m
    qk, v = jnp.split(heads, [num_heads + m], axis=2)
    if weights is not None and not options.rotates_first:
        qk = normalize_heads(qk, weights, num_heads, options.eps)
    if options.rope is not None:
        qk = rotate(qk, positions, options.rope)
    if weights is not None and options.rotates_first:
        qk = normalize_heads(qk, weights, num_heads, options.eps)
    q, k = jnp.split(qk, [num_heads], axis=2)
    written, _ = append({"k": keys, "v": values}, positions, k=k, v=v)
    return q, written["k"], written["v"]
