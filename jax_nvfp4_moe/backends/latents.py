"""`prepare_latents` in jnp: the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_nvfp4_moe.backends.cache import append
from jax_nvfp4_moe.numerics.norms import normalize
from jax_nvfp4_moe.numerics.rope import Rope, pair_halves, rotate


@dataclasses.dataclass(frozen=True)
class LatentOptions:
    """Static options of `ops.prepare_latents`, which describes them."""

    rope: Rope | None
    eps: float
    interleaved: bool


def rotate_key(x, positions, rope: Rope | None, interleaved: bool):
    """Rotate heads ``[b, t, n, e]``, whose pairs of channels may be adjacent."""
    if rope is None:
        return x
    return rotate(pair_halves(x) if interleaved else x, positions, rope)


@functools.partial(jax.jit, inline=True, static_argnames=("options",))
def prepare_latents(down, positions, cache, q_weight, kv_weight, *, options: LatentOptions):
    """Compute `ops.prepare_latents`; `q_weight` may be None."""
    first, rank = down.shape[2] - cache.shape[3], kv_weight.shape[0]
    q, latent, key = jnp.split(down, [first, first + rank], axis=-1)
    if q_weight is not None:
        q = normalize(q, q_weight, options.eps)
    latent = normalize(latent, kv_weight, options.eps)[:, :, None]
    key = rotate_key(key[:, :, None], positions, options.rope, options.interleaved)
    new = jnp.concatenate([latent, key], axis=-1)
    written, _ = append({"latent": cache}, positions, latent=new)
    return q, written["latent"]
