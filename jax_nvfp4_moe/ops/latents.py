"""`prepare_latents`: from projected tokens to the latents of queries, and of keys in the cache."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.backends.record import CUDA, HALVES, Backend, Kernel
from jax_nvfp4_moe.numerics.norms import normalize
from jax_nvfp4_moe.numerics.rope import Rope, pair_halves, rotate
from jax_nvfp4_moe.ops.cache import append
from jax_nvfp4_moe.ops.checks import check_axes, check_integers
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.positions import narrow_positions
from jax_nvfp4_moe.ops.running import run
from jax_nvfp4_moe.scheme import Target


@public_op
def prepare_latents(
    down: Float[Array, "b t w"],
    positions: Int[Array, "b t"],
    cache: Float[Array, "b 1 s d"],
    *,
    kv_weight: Float[Array, " k"],
    q_weight: Float[Array, " r"] | None = None,
    eps: float = 1e-6,
    rope: Rope | None = None,
    interleaved: bool = False,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "b t r"], Float[Array, "b 1 s d"]]:
    """Normalize the latents of new tokens, rotate their shared key, and write both into a cache.

    ``down`` holds three parts side by side: the latent of the queries, the latent of keys and
    values, and the key that is rotated. Each latent is normalized by its own root mean square and
    multiplied by a weight.

    Args:
      down: projected tokens ``[b, t, r + k + e]``.
      positions: position of each token, integers ``[b, t]``, all different in a row. Tokens at
        positions below 0 and of s or more are not written.
      cache: latents and rotated keys ``[b, 1, s, k + e]``, with the dtype of `down`. If the caller
        donates the array, it is changed in place.
      kv_weight: weight of the norm of the latent of keys and values ``[k]``.
      q_weight: weight of the norm of the latent of queries ``[r]``. None (default) leaves the
        queries as they are.
      eps: added to the mean of the squares, 1e-6 by default.
      rope: parameters of the rotation, with ``e/2`` frequencies. None (default) rotates nothing.
      interleaved: whether the two channels of a rotated pair are adjacent in `down`. They are half
        of e apart in the cache. False (default) if they are half of e apart in `down` too.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      The latents of the queries ``[b, t, r]``, and the cache. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> cache = jnp.zeros((1, 1, 8, 12))  # 8 latent channels and 4 of the key
      >>> down = jnp.full((1, 1, 28), 3.0)
      >>> q, cache = nvfp4.ops.prepare_latents(
      ...     down, jnp.array([[5]]), cache, kv_weight=jnp.ones(8), q_weight=jnp.ones(16)
      ... )
      >>> q.shape, cache[0, 0, 4:7, 0].round(4).tolist(), cache[0, 0, 5, 8].item()
      ((1, 1, 16), [0.0, 1.0, 0.0], 3.0)
    """
    _check(down, positions, cache, kv_weight, q_weight, rope)
    options = LatentOptions(rope, eps, interleaved)
    rank, width = kv_weight.shape[0], cache.shape[3]
    return run(
        "prepare_latents",
        (down, narrow_positions(positions), cache, q_weight, kv_weight),
        "b, b, b, -, - -> b, b",
        target=target,
        backend=backend,
        options={"options": options},
        dtype=down.dtype.name,
        sizes={
            "query latent": down.shape[2] - width,
            "latent": rank,
            "rotated width": width - rank,
        },
    )


def _check(down, positions, cache, kv_weight, q_weight, rope):
    """Raise a ValueError that names the argument which does not fit."""
    check_axes("down", down, "b, t, r + k + e")
    b, t, width = down.shape
    if cache.ndim != 4 or cache.shape[:2] != (b, 1) or cache.dtype != down.dtype:
        raise ValueError(
            f"cache: expected {down.dtype.name} [{b}, 1, s, k + e], got {cache.dtype.name} "
            f"{cache.shape}"
        )
    if width <= cache.shape[3]:
        raise ValueError(
            f"down: expected more than the {cache.shape[3]} channels of the cache, got {width}"
        )
    if kv_weight.ndim != 1 or kv_weight.shape[0] >= cache.shape[3]:
        raise ValueError(
            f"kv_weight: expected [k], with k below the {cache.shape[3]} channels of the cache, "
            f"got {kv_weight.shape}"
        )
    first, rest = width - cache.shape[3], cache.shape[3] - kv_weight.shape[0]
    if q_weight is not None and q_weight.shape != (first,):
        raise ValueError(f"q_weight: expected {(first,)}, got {q_weight.shape}")
    check_integers("positions", positions, (b, t))
    if rope is not None and 2 * len(rope.frequencies) != rest:
        raise ValueError(
            f"rope: expected {rest // 2} frequencies for a key of {rest} channels, got "
            f"{len(rope.frequencies)}"
        )


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
def meaning(down, positions, cache, q_weight, kv_weight, *, options: LatentOptions):
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


def _lower(ffi_target, down, positions, cache, q_weight, kv_weight, *, options):
    """Lower `prepare_latents` to an FFI target.

    The kernel writes the new latents and keys into the memory of the cache.
    """
    (b, t, width), own = down.shape, cache.shape[3]
    outputs = (
        jax.ShapeDtypeStruct((b, t, width - own), down.dtype),
        cache,
    )
    call = kernel_call(ffi_target, outputs, input_output_aliases={2: 1})
    # The kernel reads both weights in the dtype of the tokens, or both in float32.
    given = [w for w in (q_weight, kv_weight) if w is not None]
    kept = all(weight.dtype == down.dtype for weight in given)
    weight_dtype = down.dtype if kept else jnp.float32
    rope = options.rope
    return call(
        down,
        positions,
        cache,
        jnp.zeros(0, weight_dtype) if q_weight is None else q_weight.astype(weight_dtype),
        kv_weight.astype(weight_dtype),
        jnp.asarray(() if rope is None else rope.frequencies, jnp.float32),
        eps=np.float32(options.eps),
        rotation_scale=np.float32(1 if rope is None else rope.scale),
        interleaved=options.interleaved,
    )


LATENTS_CUDA = Backend(
    "latents_cuda",
    {"prepare_latents": Kernel(_lower, "nvfp4_prepare_latents_cuda")},
    (CUDA,),
    dtypes=HALVES,
    limits={
        "query latent": "QUERY_LATENTS",
        "latent": "KEY_LATENTS",
        "rotated width": "ROTATED_KEY_WIDTHS",
    },
)


BACKENDS = (LATENTS_CUDA,)
MEANINGS = {"prepare_latents": meaning}
