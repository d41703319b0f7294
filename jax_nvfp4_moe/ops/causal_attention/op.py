"""attention: causal attention of new tokens to keys and values of all positions so far."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.ops.causal_attention.cpu import ATTENTION_AMX, ATTENTION_AVX512, ATTENTION_CPU
from jax_nvfp4_moe.ops.causal_attention.cuda import ATTENTION_CUDA, LATENT_ATTENTION_CUDA
from jax_nvfp4_moe.ops.causal_attention.meaning import attend, attend_to_latents
from jax_nvfp4_moe.ops.checks import check_axes, check_integers, check_shapes
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.positions import PADDING, narrow_positions
from jax_nvfp4_moe.ops.running import run
from jax_nvfp4_moe.scheme import Target


@public_op
def attention(
    q: Float[Array, "b t n d"],
    k: Float[Array, "b m s d"],
    v: Float[Array, "b m s dv"] | None,
    positions: Int[Array, "b t"],
    *,
    value_width: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Float[Array, " n"] | None = None,
    k_scale: Float[Array, " m"] | None = None,
    v_scale: Float[Array, " m"] | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "b t n dv"]:
    """Attend causally: the query at position p sees the keys at positions 0 to p.

    Queries have tokens before heads, ``[b, t, n, d]``. Keys and values have heads before tokens,
    ``[b, m, s, d]``, as a cache stores them. Keys in the order of queries, ``[b, s, m, d]``, need
    ``k.swapaxes(1, 2)``.

    ``y[h] = softmax(scale * q[h] @ k[h // g].T) @ v[h // g]`` for each query head h, where
    ``g = n / m`` query heads share one key head. The softmax is computed in float32.

    Keys and values may be in FP8 (E4M3), as an FP8 cache has them. Each key head then has two
    scales, and the equation is ``y[h] = v_scale[h // g] * softmax(scale * k_scale[h // g] * q[h] @
    k[h // g].T) @ v[h // g]``. Plain XLA rounds each product of a number and its scale to the dtype
    of `q`. The CUDA kernel for FP8 multiplies float32 scores and results by the scales, which is
    more accurate.

    Args:
      q: queries ``[b, t, n, d]`` of t tokens in each of b rows; bfloat16, float16 or float32. b and
        t may be 0.
      k: keys ``[b, m, s, d]``, those of position i at index i. The array may be a cache with room
        behind the last token: no query sees what lies there, but it must be finite. In the dtype of
        `q`, or float8_e4m3fn.
      v: values ``[b, m, s, dv]``, in the same order and dtype. None if the values are the first
        `value_width` channels of the keys, as in latent attention. A kernel then reads each key
        once for both.
      positions: position of each query, integers ``[b, t]``, ascending in each row; ``[1, t]`` if
        all rows have the same. Any integer dtype, with the same meaning. A query at position 2**30
        or after it is padding; its result is finite and otherwise undefined. A query below position
        0 sees no key, and its result is zero.
      value_width: number of channels of a value if `v` is None, at most d; None otherwise.
      scale: factor of the scores; ``d ** -0.5`` if None.
      window: number of keys that a query sees, of which its own position is the last; None for
        all.
      chunk: a query sees only keys of its own chunk of so many positions; None for all.
      sinks: one further score for each query head, ``[n]``, whose value is zero; None for none.
      k_scale: positive scale of the keys of each head, float32 ``[m]``, if keys and values are
        float8_e4m3fn; None (default) otherwise.
      v_scale: scale of the values of each head, likewise.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      ``[b, t, n, dv]`` in the dtype of `q`. Without `v`, dv is `value_width`. Gradients flow to
      `q`, `k`, `v` and `sinks`. On a CPU, plain XLA computes them. On an NVIDIA GPU, cuDNN does
      if `v` is given, in 16 bits and without `sinks` or `chunk`, for at least 256 tokens with as
      many keys, where token i is at position i or is padding, outside of `jax.shard_map`. Such a
      call has no forward-mode derivative: `jax.jvp` raises TypeError.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: a shape or dtype does not fit the others, `window` or `chunk` is below 1, or keys
        and values in float8_e4m3fn have no scales. Also if there are fewer keys than queries, and
        the number of heads of `k` could be that of the keys: the axes are probably exchanged. Also
        if `positions` is known outside of a trace and a query has no key at its own position.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> q = jax.random.normal(jax.random.key(0), (1, 3, 4, 16))  # 3 tokens, 4 heads
      >>> k = jax.random.normal(jax.random.key(1), (1, 8, 2, 16))  # room for 8 tokens, 2 heads
      >>> k = v = k.swapaxes(1, 2)  # heads before tokens
      >>> nvfp4.ops.attention(q, k, v, jnp.arange(3)[None]).shape
      (1, 3, 4, 16)
      >>> nvfp4.ops.attention(q, k, None, jnp.arange(3)[None], value_width=12).shape
      (1, 3, 4, 12)
      >>> k = v = k.astype(jnp.float8_e4m3fn)
      >>> scales = {"k_scale": jnp.ones(2), "v_scale": jnp.ones(2)}
      >>> nvfp4.ops.attention(q, k, v, jnp.arange(3)[None], **scales).shape
      (1, 3, 4, 16)
    """
    _check(q, k, v, positions, sinks, window, chunk, value_width, k_scale, v_scale)
    options = {
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "window": window,
        "chunk": chunk,
    }
    if v is not None:
        op, entries, width = "attention", (k, v), v.shape[3]
    else:
        op, entries, width = "latent_attention", (k,), value_width
        options["value_width"] = width
    operands = q, *entries, jnp.broadcast_to(narrow_positions(positions), q.shape[:2]), sinks
    if k_scale is not None:
        operands += (k_scale, v_scale)
    scales = "" if k_scale is None else ", -, -"
    # The loop over the blocks that a query sees has no reverse mode either.
    # The queries of a row may be sharded too. Each device then has all keys of the row.
    rows = f"b t, {'b, ' * len(entries)}b t, -{scales} -> b t"
    return run(
        op,
        operands,
        rows,
        target=target,
        backend=backend,
        options=options,
        dtype=q.dtype.name,
        sizes={"key width": q.shape[3], "value width": width},
        cache_dtype=None if k_scale is None else k.dtype.name,
    )


def _check(q, k, v, positions, sinks, window, chunk, value_width, k_scale, v_scale):
    """Raise a ValueError that names the argument which does not fit."""
    check_axes("q", q, "b, t, n, d")
    b, t, n, d = q.shape
    _check_keys(q, k, v, value_width, k_scale is not None or v_scale is not None)
    known = all(isinstance(size, int) for size in (t, *k.shape))  # an exported size may be a symbol
    if known and k.shape[2] < t <= k.shape[1]:
        raise ValueError(
            f"k: expected [b, m, s, d], with the keys of at least the {t} tokens of q; got "
            f"{k.shape[2]} keys of {k.shape[1]} heads. {_EXCHANGED}"
        )
    if k.shape[3] != d or n % k.shape[1]:
        raise ValueError(
            f"k: expected heads of width {d}, in a number that divides the {n} query heads; got "
            f"shape {k.shape}"
        )
    check_integers("positions", positions, (b, t), (1, t))
    _check_known(positions, k.shape[2])
    check_shapes({"sinks": (sinks, (n,))})
    check_scales(k_scale, v_scale, k)
    for name, size in (("window", window), ("chunk", chunk)):
        if size is not None and size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")


def _check_keys(q, k, v, value_width, scaled):
    """Raise a ValueError where keys or values do not fit the rows of `q`, or each other.

    `scaled` says whether they have scales. They are then in FP8.
    """
    if (v is None) != (value_width is not None):
        raise ValueError(
            "value_width: expected a number of channels if v is None, and None otherwise; got "
            f"{value_width} and {'no v' if v is None else 'v'}"
        )
    if value_width is not None and not 1 <= value_width <= q.shape[3]:
        raise ValueError(
            f"value_width: expected 1 to {q.shape[3]}, the width of the keys; got {value_width}"
        )
    if scaled and v is None:
        raise ValueError(
            "k_scale, v_scale: expected None, because the values are a part of the keys; got an "
            "array"
        )
    dtype = "float8_e4m3fn" if scaled else q.dtype.name
    for name, x in (("k", k), ("v", k if v is None else v)):
        if x.ndim != 4 or x.dtype.name != dtype or x.shape[:3] != (q.shape[0], *k.shape[1:3]):
            raise ValueError(
                f"{name}: expected {dtype} [{q.shape[0]}, m, s, width], keys and values "
                f"with the same m and s; got {x.dtype.name} {x.shape}, and keys {k.shape}"
                + _EXPLAINED[scaled]
            )


_EXCHANGED = "If k and v are [b, s, m, d], pass k.swapaxes(1, 2) and v.swapaxes(1, 2)"


def _check_known(positions, s):
    """Raise a ValueError where a query that is known outside of a trace has no key of its own."""
    if isinstance(positions, Tracer) or not isinstance(s, int):
        return
    if not getattr(positions, "is_fully_addressable", True):  # other processes have a part
        return
    known = np.asarray(positions)
    beyond = known[(known >= s) & (known < PADDING)]
    if beyond.size:
        raise ValueError(
            f"positions: expected numbers below {s}, the number of keys in k [b, m, s, d], or "
            f"{PADDING} and more for padding; got {beyond[0]}. {_EXCHANGED}"
        )


# What a dtype of keys and values depends on, by whether they have scales.
_EXPLAINED = {
    True: ". With k_scale and v_scale, keys and values are float8_e4m3fn",
    False: ". Keys and values in float8_e4m3fn need k_scale and v_scale",
}


def check_scales(k_scale, v_scale, keys):
    """Raise a ValueError unless both scales are None, or float32 with one for each key head.

    Args:
      k_scale: scales of the keys, or None.
      v_scale: scales of the values, or None.
      keys: keys ``[b, m, s, d]``.
    """
    if k_scale is None and v_scale is None:
        return
    heads = (keys.shape[1],)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None or scale.shape != heads or scale.dtype.name != "float32":
            got = "None" if scale is None else f"{scale.dtype.name} {scale.shape}"
            raise ValueError(
                f"{name}: expected float32 {heads}, k_scale and v_scale with one scale for each "
                f"key head or both None; got {got}"
            )


BACKENDS = (
    ATTENTION_CUDA,
    LATENT_ATTENTION_CUDA,
    ATTENTION_AMX,
    ATTENTION_AVX512,
    ATTENTION_CPU,
)
MEANINGS = {"attention": attend, "latent_attention": attend_to_latents}
