"""What a gated delta net computes between its two projections, in jnp.

`mix_gated_delta` is the reference of `ops.gated_delta_step`. For prompts, the mixer also calls it,
with `ops.gated_delta_rule` as its rule. `apply_gated_delta` is the reference of that op.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.numerics.casts import cast
from jax_nvfp4_moe.numerics.chunk_decay import sum_between, sum_from_start, sum_to_end
from jax_nvfp4_moe.ops.convolution import meaning as convolve_channels
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.ops.recurrent.channel_delta import channel_delta_chunks
from jax_nvfp4_moe.ops.recurrent.delta_chunks import (
    Chunks,
    apply_chunks,
    choose_precision,
    for_device,
    join_chunks,
    normalize_queries_and_keys,
    split_chunks,
)
from jax_nvfp4_moe.ops.recurrent.padding import count_present, find_present, keep_present

# Number of tokens in a chunk on a GPU, and on other devices; see `for_device`. Decays of channels
# take one product for each size of a chunk's parts, which makes larger chunks slower.
_GPU_CHUNK, _GPU_CHANNEL_CHUNK, _CPU_CHUNK = 128, 64, 32


def delta_step(
    q: Float[Array, "b 1 m d"],
    k: Float[Array, "b 1 m d"],
    v: Float[Array, "b 1 m r e"],
    g: Float[Array, "b 1 m r"],
    beta: Float[Array, "b 1 m r"],
    state: Float[Array, "b m r d e"],
) -> tuple[Float[Array, "b 1 m r e"], Float[Array, "b m r d e"]]:
    """Compute the delta rule for one token.

    Args:
      q: queries, float32 ``[b, 1, m, d]``: vectors of length 1, times ``d ** -0.5``.
      k: keys of length 1, float32 ``[b, 1, m, d]``.
      v: values, float32 ``[b, 1, m, r, e]``.
      g: logarithm of the decay, float32 ``[b, 1, m, r]``, at most 0.
      beta: rate of correction, float32 ``[b, 1, m, r]``.
      state: state before the token, float32 ``[b, m, r, d, e]``.

    Returns:
      The results, float32 ``[b, 1, m, r, e]``, and the state after the token.
    """
    decay, beta = jnp.exp(g[:, 0])[..., None], beta[:, 0, ..., None]
    pair = jnp.stack([k[:, 0], q[:, 0]], axis=-2)[:, :, None]
    pair = jnp.broadcast_to(pair, (*state.shape[:3], 2, state.shape[3]))
    # One product reads the old state for the key and for the query, before the state is written.
    read = decay[..., None] * _matmul(pair, state)
    correction = beta * (v[:, 0] - read[..., 0, :])
    state = decay[..., None] * state + pair[..., 0, :, None] * correction[..., None, :]
    shared = jnp.sum(q[:, 0] * k[:, 0], axis=-1)[:, :, None, None]
    return (read[..., 1, :] + shared * correction)[:, None], state


def mix_gated_delta(
    projected: Float[Array, "b t n"],
    positions: Int32[Array, "b t"],
    inputs: Float[Array, "b taps-1 c"],
    state: Float[Array, "b m r d e"],
    rates: Float[Array, "b t k"] | None = None,
    *,
    conv_weight: Float[Array, "c taps"],
    A_log: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    norm: Float[Array, " e"],
    interleaved: bool,
    eps: float,
    rule: Callable | None = None,
    convolution: Callable = convolve_channels,
) -> tuple[Float[Array, "b t h"], Float[Array, "b taps-1 c"], Float[Array, "b m r d e"]]:
    """Compute `ops.gated_delta_step` for t tokens.

    Args:
      projected: projected tokens.
      positions: position of each token. Padding must follow all other tokens of its row.
      inputs: last inputs of the convolution.
      state: states of the value heads.
      rates: rates and steps. None (default) if they are the last columns of `projected`.
      conv_weight: weights of the convolution.
      A_log: logarithm of the rate of decay.
      dt_bias: bias of the step.
      norm: weight of the norm.
      interleaved: whether `projected` has key head after key head.
      eps: epsilon of the norm.
      rule: the delta rule for t tokens, with the arguments and results of `delta_step`, except that
        it normalizes queries and keys itself, and takes the `lengths` of the rows, so that padding
        costs no products. They are None for a single row. None (default) for one token.
      convolution: function that convolves the tokens, with the arguments and results of
        `ops.convolution.meaning` (default).

    Returns:
      The normalized results in the dtype of `inputs`, and the new `inputs` and `state`.
    """
    if rates is not None:
        projected = jnp.concatenate([projected, rates], axis=-1)
    (b, t, _), (_, m, r, d, e) = projected.shape, state.shape
    present = positions < PADDING
    z, beta, step = _split(projected, state.shape, interleaved)
    columns = {"widths": (m * d, m * d, m * r * e)}
    if interleaved:
        columns = {"widths": (d, d, r * e), "heads": m, "stride": 2 * (d + r * e)}
    (q, k, v), inputs = convolution(
        projected.astype(inputs.dtype), positions, inputs, weight=conv_weight, bias=None, **columns
    )
    q, k = (part.reshape(b, t, m, d) for part in (q, k))
    rate = jnp.exp(A_log)[None, None]
    g = -rate * jax.nn.softplus(step.astype(jnp.float32) + dt_bias[None, None])
    # Padding gets g = 0, a decay of 1, and a rate of 0, which leave the state unchanged.
    g, beta = (
        jnp.where(present[..., None], value, 0).reshape(b, t, m, r)
        for value in (g, jax.nn.sigmoid(beta.astype(jnp.float32)))
    )
    operands = q, k, v.reshape(b, t, m, r, e), g, beta, state
    if rule is None:
        y, state = _normalized_step(*operands)
    else:
        y, state = rule(*operands, lengths=count_present(present))
    y = gated_norm(y.reshape(b, t, m * r, e), z, norm, eps, jax.nn.silu)
    return cast(y.reshape(b, t, m * r * e), inputs.dtype), inputs, state


def apply_gated_delta(q, k, v, g, beta, state, lengths=None, *, normalize, dtype):
    """Compute `ops.gated_delta_rule` in chunks for the device on which it runs."""
    present = None
    if lengths is not None:
        present = find_present(lengths, q.shape[1])
        # All operands, because 0 times a NaN of padding would reach the state.
        q, k, v, g, beta = (keep_present(part, present) for part in (q, k, v, g, beta))
    if normalize:
        q, k = normalize_queries_and_keys(q, k)
    rule, gpu_chunk = delta_chunks, _GPU_CHUNK
    if g.ndim == v.ndim:  # a decay for each channel
        rule, gpu_chunk = channel_delta_chunks, _GPU_CHANNEL_CHUNK
    rule = functools.partial(rule, precision=choose_precision(dtype))
    y, state = for_device(rule, gpu_chunk, _CPU_CHUNK)(q, k, v, g, beta, state)
    return y if present is None else keep_present(y, present), state


def delta_chunks(
    q: Float[Array, "b t m d"],
    k: Float[Array, "b t m d"],
    v: Float[Array, "b t m r e"],
    g: Float[Array, "b t m r"],
    beta: Float[Array, "b t m r"],
    state: Float[Array, "b m r d e"],
    chunk: int = _CPU_CHUNK,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> tuple[Float[Array, "b t m r e"], Float[Array, "b m r d e"]]:
    """Compute the delta rule chunk by chunk, with the results of `delta_step` token by token.

    Let S be the state before a chunk, ``G_i`` the sum of g over its tokens up to i, and ``D_ij =
    exp(G_i - G_j)``. The corrections ``u_i`` that the tokens add to the state solve::

      u_i + beta_i sum_{j<i} D_ij (k_i . k_j) u_j = beta_i (v_i - exp(G_i) k_i.T S)

    Args:
      q: queries, float32 ``[b, t, m, d]``: vectors of length 1, times ``d ** -0.5``.
      k: keys of length 1, float32 ``[b, t, m, d]``.
      v: values, float32 ``[b, t, m, r, e]``.
      g: logarithm of the decay, float32 ``[b, t, m, r]``, at most 0.
      beta: rate of correction, float32 ``[b, t, m, r]``.
      state: state before the first token, float32 ``[b, m, r, d, e]``.
      chunk: number of tokens in a chunk, a power of 2.
      precision: precision of the products that `apply_chunks` names. Full float32 by default.

    Returns:
      The results, float32 ``[b, t, m, r, e]``, and the state after the last token.
    """
    t = q.shape[1]
    chunk = min(chunk, 1 << (t - 1).bit_length())
    q, k = (split_chunks(part, chunk)[:, :, :, None] for part in (q, k))  # an axis for r heads
    v, g, beta = (split_chunks(part, chunk) for part in (v, g[..., None], beta[..., None]))
    decay = jnp.exp(sum_between(g[..., 0]))
    faded, left = jnp.exp(sum_from_start(g)), jnp.exp(sum_to_end(g))
    turned = jnp.swapaxes(k, -1, -2)
    chunks = Chunks(
        key_pairs=jnp.tril(decay * _matmul(k, turned), k=-1),
        query_pairs=jnp.tril(decay * jnp.matmul(q, turned, precision=precision)),
        read_keys=faded * k,
        read_queries=faded * q,
        write_keys=left * k,
        values=v,
        beta=beta,
        kept=faded[..., -1:, :],
    )
    y, state = apply_chunks(chunks, state, precision)
    return join_chunks(y, t), state


def _split(projected, sizes, interleaved):
    """Return what no convolution reads of the projected tokens: z, rates and steps."""
    (_, m, r, d, e), lead = sizes, projected.shape[:-1]
    channels, values = 2 * m * d + m * r * e, m * r * e
    if not interleaved:
        _, z, ba = jnp.split(projected, [channels, channels + values], axis=-1)
        return z, *jnp.split(ba, 2, axis=-1)
    qkvz, ba = jnp.split(projected, [channels + values], axis=-1)
    z = qkvz.reshape(*lead, m, 2 * (d + r * e))[..., 2 * d + r * e :]
    beta, step = jnp.split(ba.reshape(*lead, m, 2 * r), 2, axis=-1)
    z, beta, step = (lax.collapse(part, len(lead)) for part in (z, beta, step))
    return z, beta, step


def _normalized_step(q, k, *operands):
    return delta_step(*normalize_queries_and_keys(q, k), *operands)


def gated_norm(
    y: Float[Array, "b t n e"],
    z: Float[Array, "b t ne"],
    weight: Float[Array, " e"],
    eps: float,
    activation: Callable,
) -> Float[Array, "b t n e"]:
    """Return float32 ``norm(y) * activation(z)``; normalize each head by itself."""
    mean = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    normal = weight.reshape(1, 1, 1, -1) * (y * lax.rsqrt(mean + eps))
    return normal * activation(z.astype(jnp.float32).reshape(y.shape))


def _matmul(x, y):
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
