"""`prepare_heads`: from projected tokens to queries, and to keys and values in the cache."""

from collections.abc import Sequence

from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends import heads as reference
from jax_nvfp4_moe.backends.attention import narrow_positions
from jax_nvfp4_moe.backends.resolution import resolve
from jax_nvfp4_moe.numerics.arguments import check_arguments
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.causal_attention import check_scales
from jax_nvfp4_moe.ops.derivative import with_derivative_of
from jax_nvfp4_moe.scheme import Problem, Target

_FLOATS = ("bfloat16", "float16", "float32")


@check_arguments
def prepare_heads(
    qkv: Float[Array, "b t w"],
    positions: Int[Array, "b t"],
    keys: Float[Array, "b m s d"],
    values: Float[Array, "b m s d"],
    *,
    q_weight: Float[Array, " d"] | None = None,
    k_weight: Float[Array, " d"] | None = None,
    eps: float = 1e-6,
    rope: Rope | None = None,
    rotates_first: bool = False,
    gated: bool = False,
    k_scale: Float[Array, " m"] | None = None,
    v_scale: Float[Array, " m"] | None = None,
    multiply_by_reciprocal: bool = False,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "b t n d"], Float[Array, "b m s d"], Float[Array, "b m s d"]]:
    """Normalize and rotate query heads and key heads, and write keys and values into a cache.

    Each head of the queries and keys is normalized by its own root mean square and multiplied by a
    weight. Then its first channels are rotated by the angle of its position.

    A cache in FP8 (E4M3) holds ``e4m3(x / scale)`` for keys and values x. Each head has its own
    scales. `numerics.fp8.round_fp8` gives the same numbers.

    Args:
      qkv: projected tokens ``[b, t, (n + 2m) d]``: n query heads, m key heads and m value heads.
        With `gated`, ``[b, t, (2n + 2m) d]``.
      positions: position of each token, integers ``[b, t]``, all different in a row. Tokens at
        positions below 0 and of s or more are not written.
      keys: the keys in the cache ``[b, m, s, d]``, with the dtype of `qkv` or float8_e4m3fn. If the
        caller donates the array, it is changed in place.
      values: the values in the cache, likewise.
      q_weight: weight of the norm of query heads ``[d]``. None (default) normalizes no head.
      k_weight: weight of the norm of key heads ``[d]``, with the dtype of `q_weight`.
      eps: added to the mean of the squares, 1e-6 by default.
      rope: parameters of the rotation. None (default) rotates nothing.
      rotates_first: whether heads are rotated before they are normalized. False by default.
      gated: whether each query head in `qkv` is followed by d channels that this op does not read.
        They are the gates of `gate_heads`. False by default.
      k_scale: positive scale of the keys of each head, float32 ``[m]``, if the cache is
        float8_e4m3fn; None (default) otherwise.
      v_scale: scale of the values of each head, likewise.
      multiply_by_reciprocal: how keys and values are rounded to FP8; see `numerics.fp8.round_fp8`.
        False by default.
      target: the `Target` to lower for; None (default) for the current device.
      backend: name of a backend, or a sequence of names that are tried in that order. None
        (default) chooses the first backend that accepts the problem.

    Returns:
      The queries ``[b, t, n, d]``, the keys and the values. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call; the message lists every backend and its
        reason.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> cache = jnp.zeros((1, 2, 8, 4))  # 2 key heads of width 4, and room for 8 tokens
      >>> qkv = jnp.ones((1, 1, 32))  # one token; 4 query heads
      >>> q, keys, _ = nvfp4.ops.prepare_heads(qkv, jnp.array([[5]]), cache, cache)
      >>> q.shape, keys[0, 0, 4:7, 0].tolist()
      ((1, 1, 4, 4), [0.0, 1.0, 0.0])
    """
    options = reference.HeadOptions(rope, eps, rotates_first, gated, multiply_by_reciprocal)
    scaled = k_scale is not None or v_scale is not None
    _check(qkv, positions, keys, values, q_weight, k_weight, options, scaled)
    check_scales(k_scale, v_scale, keys)
    target = target or Target.current()
    width, rotated = keys.shape[3], 0 if rope is None else 2 * len(rope.frequencies)
    problem = Problem(
        "prepare_heads",
        None,
        target,
        qkv.dtype.name,
        head_widths=(width, rotated),
        cache_dtype=keys.dtype.name if scaled else None,
    )
    plan = resolve(problem, backend=backend)
    weights = None if q_weight is None else (q_weight, k_weight)
    operands = qkv, narrow_positions(positions), keys, values, weights
    rows = "b, b, b, b, - -> b, b, b"
    if scaled:
        operands += (k_scale, v_scale)
        rows = "b, b, b, b, -, -, - -> b, b, b"
    run = with_derivative_of(reference.prepare_heads, plan.lower, rows, options=options)
    return run(*operands)


def _check(qkv, positions, keys, values, q_weight, k_weight, options, scaled):
    """Raise a ValueError that names the argument which does not fit.

    `scaled` says whether the cache has scales. It is then in FP8.
    """
    if qkv.ndim != 3 or qkv.dtype.name not in _FLOATS:
        words = ", ".join(_FLOATS)
        raise ValueError(
            f"qkv: expected [b, t, (n + 2m) d] of one of {words}; got {qkv.dtype.name} {qkv.shape}"
        )
    b, t, width = qkv.shape
    dtype = "float8_e4m3fn" if scaled else qkv.dtype.name
    for name, x in (("keys", keys), ("values", values)):
        if x.ndim != 4 or x.shape != keys.shape or x.shape[0] != b or x.dtype.name != dtype:
            raise ValueError(
                f"{name}: expected {dtype} [{b}, m, s, d], keys and values of one shape; "
                f"got {x.dtype.name} {x.shape}, and keys {keys.shape}. A cache in float8_e4m3fn "
                "has k_scale and v_scale, and no other cache has"
            )
    m, d = keys.shape[1], keys.shape[3]
    factor, gates = (2 * d, " with their gates") if options.gated else (d, "")
    if width < 2 * m * d or (width - 2 * m * d) % factor:
        raise ValueError(
            f"qkv: expected a width that holds {m} key heads, {m} value heads and query heads"
            f"{gates} of width {d}; got {width}"
        )
    if positions.shape != (b, t) or positions.dtype.kind not in "iu":
        raise ValueError(
            f"positions: expected integers {(b, t)}, got {positions.dtype.name} {positions.shape}"
        )
    rope = options.rope
    if rope is not None and 2 * len(rope.frequencies) > d:
        raise ValueError(
            f"rope: expected at most {d // 2} frequencies for heads of width {d}, got "
            f"{len(rope.frequencies)}"
        )
    _check_weights(q_weight, k_weight, d)


def _check_weights(q_weight, k_weight, d):
    """Raise a ValueError unless both weights are None, or both have shape [d] and one dtype."""
    if q_weight is None and k_weight is None:
        return
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is None or weight.shape != (d,) or weight.dtype != q_weight.dtype:
            got = "None" if weight is None else f"{weight.dtype.name} {weight.shape}"
            raise ValueError(
                f"{name}: expected {(d,)}, q_weight and k_weight of one dtype or both None; got "
                f"{got}"
            )
