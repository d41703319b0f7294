"""What a Mamba-2 mixer computes between its two projections, in jnp.

`mix_mamba2` is the reference of `ops.mamba2_step`. The mixer also calls it for prompts, with a rule
for many tokens.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.backends.attention import PADDING
from jax_nvfp4_moe.backends.convolution import causal_convolution
from jax_nvfp4_moe.numerics.activations import ActivationCall, activate


def ssd_step(
    x: Float[Array, "b 1 h p"],
    dt: Float[Array, "b 1 h"],
    a: Float[Array, " h"],
    B: Float[Array, "b 1 g n"],
    C: Float[Array, "b 1 g n"],
    state: Float[Array, "b h p n"],
) -> tuple[Float[Array, "b 1 h p"], Float[Array, "b h p n"]]:
    """Run the recurrence of Mamba-2 for one token, without the term ``d * x``.

    Args:
      x: inputs of the heads, float32 ``[b, 1, h, p]``.
      dt: steps, float32 ``[b, 1, h]``. A step of 0 leaves the state unchanged.
      a: negative numbers, float32 ``[h]``.
      B: b of each group, float32 ``[b, 1, g, n]``. Group 0 holds the first h / g heads, and so on.
      C: c of each group, float32 ``[b, 1, g, n]``.
      state: state before the token, float32 ``[b, h, p, n]``.

    Returns:
      y ``[b, 1, h, p]``, and the state after the token, ``[b, h, p, n]``.
    """
    (b, _, h, p), (g, n) = x.shape, B.shape[2:]
    x = (x * dt[..., None]).reshape(b, g, h // g, p)
    decay = (dt * a[None, None, :]).reshape(b, g, h // g)
    B, C = (part[:, 0, :, None, None, :] for part in (B, C))
    grouped = state.reshape(b, g, h // g, p, n)
    grouped = jnp.exp(decay)[..., None, None] * grouped + x[..., None] * B
    y = jnp.sum(grouped * C, axis=-1)
    return y.reshape(b, 1, h, p), grouped.reshape(state.shape)


def mix_mamba2(
    projected: Float[Array, "b t m"],
    positions: Int32[Array, "b t"],
    inputs: Float[Array, "b taps-1 c"],
    state: Float[Array, "b h p n"],
    *,
    conv_weight: Float[Array, "c taps"],
    conv_bias: Float[Array, " c"] | None,
    A_log: Float[Array, " h"],
    dt_bias: Float[Array, " h"],
    D: Float[Array, " h"],
    norm: Float[Array, " inner"],
    activation: ActivationCall,
    step_limits: tuple[float, float],
    eps: float,
    rule: Callable = ssd_step,
    convolution: Callable | None = None,
) -> tuple[Float[Array, "b t inner"], Float[Array, "b taps-1 c"], Float[Array, "b h p n"]]:
    """Compute `ops.mamba2_step` for t tokens.

    Args:
      projected: projected tokens.
      positions: position of each token. Padding must follow all other tokens of its row.
      inputs: last inputs of the convolution.
      state: states of the heads.
      conv_weight: weights of the convolution.
      conv_bias: bias of the convolution, or None.
      A_log: logarithm of the rate of decay.
      dt_bias: bias of the step.
      D: factor of x in the result.
      norm: weight of the norm.
      activation: function after the convolution, not gated.
      step_limits: smallest and largest step.
      eps: epsilon of the norm.
      rule: the recurrence for t tokens, with the arguments and results of `ssd_step`.
      convolution: function that convolves the tokens and applies `activation`, with the arguments
        and results of `causal_convolution`. None (default) for that one.

    Returns:
      The normalized results in the dtype of `inputs`, and the new `inputs` and `state`.
    """
    (b, t, _), (_, heads, p, n) = projected.shape, state.shape
    inner, channels = heads * p, conv_weight.shape[0]
    groups = (channels - inner) // (2 * n)
    present = positions < PADDING
    gate, dt = projected[..., :inner], projected[..., inner + channels :]
    if convolution is None:
        act = functools.partial(activate, activation)
        convolution = functools.partial(causal_convolution, activation=act)
    (x, B, C), inputs = convolution(
        projected.astype(inputs.dtype),
        positions,
        inputs,
        weight=conv_weight,
        bias=conv_bias,
        widths=(inner, groups * n, groups * n),
        first=inner,
    )
    x = x.reshape(b, t, heads, p)
    dt = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias[None, None, :])
    # Padding gets a step of 0, which leaves the state unchanged.
    dt = jnp.where(present[:, :, None], jnp.clip(dt, *step_limits), 0.0)
    B, C = (part.reshape(b, t, groups, -1) for part in (B, C))
    y, state = rule(x, dt, -jnp.exp(A_log), B, C, state)
    y = (y + D[None, None, :, None] * x).reshape(b, t, -1)
    y = _normalize(y * jax.nn.silu(gate.astype(jnp.float32)), norm, groups, eps)
    return y.astype(inputs.dtype), inputs, state


def _normalize(y, weight, groups, eps):
    """Divide the channels of each group by their root mean square; multiply by the weight."""
    grouped = y.reshape(*y.shape[:-1], groups, -1)
    mean = jnp.mean(jnp.square(grouped), axis=-1, keepdims=True)
    return (grouped * lax.rsqrt(mean + eps)).reshape(y.shape) * weight[None, None, :]
