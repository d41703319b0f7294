"""What a Mamba-2 mixer computes between its two projections, in jnp.

`mix_mamba2` is the reference of `ops.mamba2_step`. For prompts, the mixer also calls it, with
`ops.mamba2_scan` as its scan. `apply_mamba2` is the reference of that op.

Prompts are divided into chunks. Inside a chunk, matrix products compute all tokens at once. One
more product computes the states before all chunks of a batch, and a scan carries the state from
batch to batch.

Source: arXiv:2405.21060, section 6.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.numerics.activations import ActivationCall, activate
from jax_nvfp4_moe.numerics.chunk_decay import sum_between, sum_from_start, sum_to_end
from jax_nvfp4_moe.ops.convolution import meaning as convolve_channels
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.ops.recurrent.delta_chunks import choose_precision, for_device
from jax_nvfp4_moe.ops.recurrent.padding import count_present, find_present, keep_present

# Number of tokens in a chunk on a GPU, and on other devices; see `for_device`.
_GPU_CHUNK, _CPU_CHUNK = 128, 64
# Number of tokens, over all rows, whose chunks are computed at once. It bounds the memory of the
# products.
_BATCH_TOKENS = 2048


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
    scan: Callable | None = None,
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
      scan: the recurrence for t tokens, with the arguments and results of `apply_mamba2`, so that
        padding costs no products. The lengths are None for a single row. None (default) for one
        token.
      convolution: function that convolves the tokens and applies `activation`, with the arguments
        and results of `ops.convolution.meaning`. None (default) for that one.

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
        convolution = functools.partial(convolve_channels, activation=act)
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
    B, C = (part.reshape(b, t, groups, n) for part in (B, C))
    a = -jnp.exp(A_log)
    if scan is None:
        y, state = ssd_step(x, dt, a, B, C, state)
        y = y + D[None, None, :, None] * x
    else:
        y, state = scan(x, dt, a, B, C, D, state, lengths=count_present(present))
    y = y.reshape(b, t, inner)
    y = _normalize(y * jax.nn.silu(gate.astype(jnp.float32)), norm, groups, eps)
    return y.astype(inputs.dtype), inputs, state


def apply_mamba2(x, dt, a, B, C, D, state, lengths=None, *, dtype):
    """Compute `ops.mamba2_scan` in chunks for the device on which it runs."""
    if lengths is not None:
        present = find_present(lengths, x.shape[1])
        # All operands, because 0 times a NaN of padding would reach the state.
        x, dt, B, C = (keep_present(part, present) for part in (x, dt, B, C))
    rule = functools.partial(ssd_chunks, precision=choose_precision(dtype))
    y, state = for_device(rule, _GPU_CHUNK, _CPU_CHUNK)(x, dt, a, B, C, state)
    # The term with D is 0 for padding, and so is y, because C is.
    return y + D[None, None, :, None] * x, state


def ssd_chunks(
    x: Float[Array, "b t h p"],
    dt: Float[Array, "b t h"],
    a: Float[Array, " h"],
    B: Float[Array, "b t g n"],
    C: Float[Array, "b t g n"],
    state: Float[Array, "b h p n"],
    chunk: int = _CPU_CHUNK,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> tuple[Float[Array, "b t h p"], Float[Array, "b h p n"]]:
    """Run the recurrence of Mamba-2 for t tokens, without the term ``d * x``.

    Each head computes for every token::

      state = exp(dt * a) * state + dt * outer(x, b)
      y = state @ c

    All arrays are float32.

    Args:
      x: inputs of the heads, ``[b, t, h, p]``.
      dt: steps, ``[b, t, h]``. A step of 0 leaves the state unchanged.
      a: negative numbers, ``[h]``.
      B: b of each group, ``[b, t, g, n]``. Group 0 holds the first h / g heads, and so on.
      C: c of each group, ``[b, t, g, n]``.
      state: state before the first token, ``[b, h, p, n]``.
      chunk: number of tokens in a chunk, a power of 2.
      precision: precision of the products with x, b, c and states. Full float32 by default.
        Exponents and the sums of states are computed in full float32 in any case: a lower precision
        rounds what is read from a state and what is added to it, but never the state.

    Returns:
      y ``[b, t, h, p]``, and the state after the last token, ``[b, h, p, n]``.
    """
    (b, t, h, p), (g, n) = x.shape, B.shape[2:]
    if b == 0 or t == 0:
        return x, state
    if t == 1:
        return ssd_step(x, dt, a, B, C, state)
    x = (x * dt[..., None]).reshape(b, t, g, h // g, p)
    decay = (dt * a[None, None, :]).reshape(b, t, g, h // g)
    grouped = state.reshape(b, g, h // g, p, n)
    chunk = min(chunk, 1 << (t - 1).bit_length())
    chunks = -(-t // chunk)
    batches = -(-chunks * chunk * b // _BATCH_TOKENS)
    per_batch = -(-chunks // batches)
    batches = -(-chunks // per_batch)

    def split(x):
        padded = batches * per_batch * chunk
        x = jnp.pad(x, [(0, 0), (0, padded - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, batches, per_batch, chunk, *x.shape[2:]), 1, 0)

    def run(grouped, batch):
        y, grouped = _chunks(batch, grouped, precision)
        return grouped, y

    operands = tuple(map(split, (x, decay, B, C)))
    grouped, y = lax.scan(run, grouped, operands)
    y = jnp.moveaxis(y, 0, 1).reshape(b, -1, h, p)[:, :t]
    return y, grouped.reshape(state.shape)


def _chunks(operands, state, precision):
    """Compute c chunks of q tokens: ``x [b, c, q, g, r, p]``; the other operands begin likewise."""
    product = functools.partial(jnp.einsum, precision=precision)
    x, logs, B, C = operands
    logs = jnp.moveaxis(logs, 2, -1)
    between = jnp.tril(jnp.exp(sum_between(logs)))
    from_start, to_end = (
        jnp.moveaxis(jnp.exp(total(logs[..., None])), -2, 2)
        for total in (sum_from_start, sum_to_end)
    )
    scores = product("bcign,bcjgn->bcgij", C, B)
    y = product("bcgrij,bcjgrp->bcigrp", scores[:, :, :, None] * between, x)
    added = product("bcjgrp,bcjgn->bcgrpn", x * to_end, B)
    before, state = _carry(jnp.sum(logs, axis=-1), added, state)
    carried = product("bcign,bcgrpn->bcigrp", C, before)
    return y + carried * from_start, state


def _carry(logs, added, state):
    """Return the state before each chunk, ``[b, c, g, r, p, n]``, and the state after the last one.

    ``state[c] = exp(logs[c]) * state[c - 1] + added[c]``. Each state is a sum over the state before
    the batch and over what the chunks add, so that one product computes all states.
    """
    count = logs.shape[1] + 1
    size = 1 << (count - 1).bit_length()
    # Index 0 belongs to the state before the batch.
    logs = jnp.pad(jnp.moveaxis(logs, 1, -1), [(0, 0)] * 3 + [(1, size - count)])
    between = jnp.tril(jnp.exp(sum_between(logs)))[..., :count, :count]
    given = jnp.concatenate([state[:, None], added], axis=1)
    states = jnp.einsum("bgrij,bjgrpn->bigrpn", between, given, precision=lax.Precision.HIGHEST)
    return states[:, :-1], states[:, -1]


def _normalize(y, weight, groups, eps):
    """Divide the channels of each group by their root mean square; multiply by the weight."""
    grouped = y.reshape(*y.shape[:-1], groups, y.shape[-1] // groups)
    mean = jnp.mean(jnp.square(grouped), axis=-1, keepdims=True)
    return (grouped * lax.rsqrt(mean + eps)).reshape(y.shape) * weight[None, None, :]
