"""`prepare_latents`: from projected tokens to the latents of queries, and of keys in the cache."""

from collections.abc import Sequence

from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends import latents as reference
from jax_nvfp4_moe.backends.attention import narrow_positions
from jax_nvfp4_moe.backends.resolution import resolve
from jax_nvfp4_moe.numerics.arguments import check_arguments
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.derivative import with_derivative_of
from jax_nvfp4_moe.scheme import Problem, Target

_FLOATS = ("bfloat16", "float16", "float32")


@check_arguments
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
      target: the `Target` to lower for; None (default) for the current device.
      backend: name of a backend, or a sequence of names that are tried in that order. None
        (default) chooses the first backend that accepts the problem.

    Returns:
      The latents of the queries ``[b, t, r]``, and the cache. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call; the message lists every backend and its
        reason.

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
    options = reference.LatentOptions(rope, eps, interleaved)
    rank, width = kv_weight.shape[0], cache.shape[3]
    problem = Problem(
        "prepare_latents",
        None,
        target or Target.current(),
        down.dtype.name,
        head_widths=(down.shape[2] - width, rank, width - rank),
    )
    plan = resolve(problem, backend=backend)
    operands = down, narrow_positions(positions), cache, q_weight, kv_weight
    rows = "b, b, b, -, - -> b, b"
    run = with_derivative_of(reference.prepare_latents, plan.lower, rows, options=options)
    return run(*operands)


def _check(down, positions, cache, kv_weight, q_weight, rope):
    """Raise a ValueError that names the argument which does not fit."""
    if down.ndim != 3 or down.dtype.name not in _FLOATS:
        raise ValueError(
            f"down: expected [b, t, r + k + e] of one of {', '.join(_FLOATS)}; got "
            f"{down.dtype.name} {down.shape}"
        )
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
    if positions.shape != (b, t) or positions.dtype.kind not in "iu":
        raise ValueError(
            f"positions: expected integers {(b, t)}, got {positions.dtype.name} {positions.shape}"
        )
    if rope is not None and 2 * len(rope.frequencies) != rest:
        raise ValueError(
            f"rope: expected {rest // 2} frequencies for a key of {rest} channels, got "
            f"{len(rope.frequencies)}"
        )
