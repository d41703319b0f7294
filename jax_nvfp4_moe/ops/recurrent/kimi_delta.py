"""What Kimi delta attention computes between its projections, in jnp.

`mix_kimi_delta` is the reference of `ops.kimi_delta_step`. For prompts, the mixer also calls it,
with `ops.gated_delta_rule` as its rule.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.ops.convolution import meaning as convolve_channels
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.ops.recurrent.channel_delta import channel_delta_step
from jax_nvfp4_moe.ops.recurrent.delta_chunks import normalize_queries_and_keys
from jax_nvfp4_moe.ops.recurrent.gated_delta import gated_norm
from jax_nvfp4_moe.ops.recurrent.padding import count_present, keep_present


def mix_kimi_delta(
    projected: Float[Array, "b t m"],
    positions: Int32[Array, "b t"],
    inputs: Float[Array, "b taps-1 c"],
    state: Float[Array, "b n d e"],
    decays: Float[Array, "b t nd"],
    gates: Float[Array, "b t ne"],
    rates: Float[Array, "b t n"] | None = None,
    *,
    conv_weight: Float[Array, "c taps"],
    A_log: Float[Array, " n"],
    dt_bias: Float[Array, " nd"],
    norm: Float[Array, " e"],
    lower_bound: float | None,
    eps: float,
    rule: Callable | None = None,
    convolution: Callable = convolve_channels,
) -> tuple[Float[Array, "b t ne"], Float[Array, "b taps-1 c"], Float[Array, "b n d e"]]:
    """Compute `ops.kimi_delta_step` for t tokens.

    Args:
      projected: queries, keys and values of all heads, and then the rates unless they are apart.
      positions: position of each token. Padding must follow all other tokens of its row.
      inputs: last inputs of the convolution.
      state: states of the heads.
      decays: what the decays come from.
      gates: gates of the results, before the sigmoid.
      rates: rates of correction, before the sigmoid. None (default) if they are the last columns of
        `projected`.
      conv_weight: weights of the convolution.
      A_log: logarithm of the rate of decay.
      dt_bias: bias of the decays.
      norm: weight of the norm.
      lower_bound: smallest logarithm of a decay, or None.
      eps: epsilon of the norm.
      rule: the delta rule for t tokens, as for `mix_gated_delta`. None (default) for one token.
      convolution: function that convolves the tokens, with the arguments and results of
        `ops.convolution.meaning` (default).

    Returns:
      The normalized results in the dtype of `inputs`, and the new `inputs` and `state`.
    """
    (b, t, _), (_, n, d, e) = projected.shape, state.shape
    if rates is None:
        rates = projected[..., -n:]
    present = positions < PADDING
    (q, k, v), inputs = convolution(
        projected.astype(inputs.dtype),
        positions,
        inputs,
        weight=conv_weight,
        bias=None,
        widths=(n * d, n * d, n * e),
    )
    # Padding gets g = 0, a decay of 1, and a rate of 0, which leave the state unchanged. A key head
    # of the rule serves one value head.
    g = _log_decays(decays, A_log, dt_bias, lower_bound).reshape(b, t, n, 1, d)
    beta = jax.nn.sigmoid(rates.astype(jnp.float32))[..., None]
    g, beta = (keep_present(value, present) for value in (g, beta))
    q, k = (part.reshape(b, t, n, d) for part in (q, k))
    operands = v.reshape(b, t, n, 1, e), g, beta, state[:, :, None]
    if rule is None:
        y, state = channel_delta_step(*normalize_queries_and_keys(q, k), *operands)
    else:
        y, state = rule(q, k, *operands, lengths=count_present(present))
    y = gated_norm(y[..., 0, :], gates, norm, eps, jax.nn.sigmoid)
    return y.reshape(b, t, n * e).astype(inputs.dtype), inputs, state[:, :, 0]


def _log_decays(decays, A_log, dt_bias, lower_bound):
    """Return the float32 logarithm of the decay of each channel, ``[b, t, nd]``."""
    given = decays.astype(jnp.float32) + dt_bias[None, None]
    rate = jnp.repeat(jnp.exp(A_log), dt_bias.size // A_log.size)[None, None]
    if lower_bound is not None:
        return lower_bound * jax.nn.sigmoid(rate * given)
    return -rate * jax.nn.softplus(given)
