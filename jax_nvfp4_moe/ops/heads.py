"""`prepare_heads`: from projected tokens to queries, and to keys and values in the cache."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.backends.record import CPU, CUDA, HALVES, Backend, Kernel
from jax_nvfp4_moe.numerics.fp8 import round_fp8
from jax_nvfp4_moe.numerics.norms import normalize
from jax_nvfp4_moe.numerics.rope import Rope, rotate
from jax_nvfp4_moe.ops.cache import append
from jax_nvfp4_moe.ops.causal_attention.op import check_scales
from jax_nvfp4_moe.ops.checks import check_axes, check_integers
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.positions import narrow_positions
from jax_nvfp4_moe.ops.running import run
from jax_nvfp4_moe.scheme import Target


@public_op
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
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      The queries ``[b, t, n, d]``, the keys and the values. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> cache = jnp.zeros((1, 2, 8, 4))  # 2 key heads of width 4, and room for 8 tokens
      >>> qkv = jnp.ones((1, 1, 32))  # one token; 4 query heads
      >>> q, keys, _ = nvfp4.ops.prepare_heads(qkv, jnp.array([[5]]), cache, cache)
      >>> q.shape, keys[0, 0, 4:7, 0].tolist()
      ((1, 1, 4, 4), [0.0, 1.0, 0.0])
    """
    options = HeadOptions(rope, eps, rotates_first, gated, multiply_by_reciprocal)
    scaled = k_scale is not None or v_scale is not None
    _check(qkv, positions, keys, values, q_weight, k_weight, options, scaled)
    check_scales(k_scale, v_scale, keys)
    rotated = 0 if rope is None else 2 * len(rope.frequencies)
    weights = None if q_weight is None else (q_weight, k_weight)
    operands = qkv, narrow_positions(positions), keys, values, weights
    rows = "b, b, b, b, - -> b, b, b"
    if scaled:
        operands += (k_scale, v_scale)
        rows = "b, b, b, b, -, -, - -> b, b, b"
    return run(
        "prepare_heads",
        operands,
        rows,
        target=target,
        backend=backend,
        options={"options": options},
        dtype=qkv.dtype.name,
        sizes={"head width": keys.shape[3], "rotated width": rotated},
        cache_dtype=keys.dtype.name if scaled else None,
    )


def _check(qkv, positions, keys, values, q_weight, k_weight, options, scaled):
    """Raise a ValueError that names the argument which does not fit.

    `scaled` says whether the cache has scales. It is then in FP8.
    """
    check_axes("qkv", qkv, "b, t, (n + 2m) d")
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
    check_integers("positions", positions, (b, t))
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
def meaning(
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


def _lower(
    ffi_target,
    fp8_target,
    qkv,
    positions,
    keys,
    values,
    weights,
    k_scale=None,
    v_scale=None,
    *,
    options,
):
    """Lower `prepare_heads` to an FFI target.

    The kernel writes the new keys and values into the memory of the cache.

    Args:
      fp8_target: name of the target for a cache in FP8.
    """
    (b, t, width), (_, m, _, d) = qkv.shape, keys.shape
    outputs = (
        jax.ShapeDtypeStruct((b, t, options.count_queries(width, m, d), d), qkv.dtype),
        keys,
        values,
    )
    call = kernel_call(
        ffi_target if k_scale is None else fp8_target, outputs, input_output_aliases={2: 1, 3: 2}
    )
    # The kernel reads weights of the dtype of the heads, or of float32.
    own = [
        weight if weight.dtype == qkv.dtype else weight.astype(jnp.float32)
        for weight in weights or (jnp.zeros(0, qkv.dtype),) * 2
    ]
    rope = options.rope
    frequencies = () if rope is None else rope.frequencies
    scales, rounding = (), {}
    if k_scale is not None:
        scales = k_scale, v_scale
        rounding = {"multiply_by_reciprocal": options.multiply_by_reciprocal}
    return call(
        qkv,
        positions,
        keys,
        values,
        *own,
        jnp.asarray(frequencies, jnp.float32),
        *scales,
        eps=np.float32(options.eps),
        rotation_scale=np.float32(1 if rope is None else rope.scale),
        rotates_first=options.rotates_first,
        gated=options.gated,
        **rounding,
    )


HEADS_CUDA = Backend(
    "heads_cuda",
    {"prepare_heads": Kernel(_lower, "nvfp4_prepare_heads_cuda", "nvfp4_prepare_heads_fp8_cuda")},
    (CUDA,),
    dtypes=HALVES,
    limits={"head width": "PREPARED_WIDTHS_CUDA", "rotated width": "PREPARED_WIDTHS_CUDA"},
)


HEADS_CPU = Backend(
    "heads_cpu",
    {"prepare_heads": Kernel(_lower, "nvfp4_prepare_heads_cpu", "nvfp4_prepare_heads_fp8_cpu")},
    (CPU,),
    dtypes=HALVES,
    limits={"head width": "PREPARED_WIDTHS", "rotated width": "PREPARED_WIDTHS"},
)


BACKENDS = (HEADS_CUDA, HEADS_CPU)
MEANINGS = {"prepare_heads": meaning}
