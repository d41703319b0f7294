"""Ops that decode few tokens with a recurrent mixer: all that lies between its two projections.

A row has one token and one state, or a window of tokens and the states after each of them, as
decoding with drafts needs them (`ops.state_window`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends.kernel_call import kernel_call, scratch
from jax_nvfp4_moe.backends.launch_facts import workspace_bytes_of_rows
from jax_nvfp4_moe.backends.record import CUDA, Backend, Kernel
from jax_nvfp4_moe.numerics.activations import ActivationCall, find_activation
from jax_nvfp4_moe.ops.checks import check_axes, check_floats, check_integers, check_shapes
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.positions import narrow_positions
from jax_nvfp4_moe.ops.recurrent.gated_delta import mix_gated_delta
from jax_nvfp4_moe.ops.recurrent.kernel_limits import STATES
from jax_nvfp4_moe.ops.recurrent.kimi_delta import mix_kimi_delta
from jax_nvfp4_moe.ops.recurrent.mamba2 import mix_mamba2
from jax_nvfp4_moe.ops.running import run
from jax_nvfp4_moe.ops.state_window import over_window
from jax_nvfp4_moe.scheme import Target


@public_op
def gated_delta_step(
    projected: Float[Array, "b t n"],
    positions: Int[Array, "b t"],
    inputs: Float[Array, "b *w taps-1 c"],
    state: Float[Array, "b *w m r d e"],
    *,
    conv_weight: Float[Array, "c taps"],
    A_log: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    norm: Float[Array, " e"],
    rates: Float[Array, "b t k"] | None = None,
    interleaved: bool = False,
    eps: float = 1e-6,
    kept: Int[Array, " b"] | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "b t h"], Float[Array, "b *w taps-1 c"], Float[Array, "b *w m r d e"]]:
    """Decode few tokens of each row with a gated delta net, without its two projections.

    ::

      q, k, v = silu(convolve(qkv))
      q, k = q / |q| / sqrt(d), k / |k|
      a, beta = exp(-exp(A_log) * softplus(step + dt_bias)), sigmoid(rate)
      S = a S + k (beta (v - k.T a S))
      y = norm(q.T S) * silu(z)

    All of it is computed in float32. Under `jax.jit`, the new `inputs` and `state` take the memory
    of the old ones if those are donated or carried by a loop.

    Args:
      projected: t projected tokens of each of b rows, ``[b, t, n]``, bfloat16, float16 or float32.
        It has q of m heads, k of m heads, v and z of ``m * r`` heads, and one rate and one step for
        each of these: ``n = 2 m d + 2 m r e + 2 m r``.
      positions: position of each token, integers ``[b, t]``. A token at position 2**30 or after it
        is padding: it changes neither `inputs` nor `state`, and its result is undefined.
      inputs: last inputs of the convolution, ``[b, taps - 1, c]``, the oldest first, where
        ``c = 2 m d + m r e`` counts all q, then all k, then all v. Zeros before the first token.
      state: state of each value head, float32 ``[b, m, r, d, e]``. Zeros before the first token.
      conv_weight: weights of the convolution, float32 ``[c, taps]``. The last one of a channel
        multiplies the newest input.
      A_log: logarithm of the rate of decay, float32 ``[m r]``.
      dt_bias: bias of the step, float32 ``[m r]``.
      norm: weight of the norm, float32 ``[e]``.
      rates: the rates and steps ``[b, t, 2 m r]`` in the dtype of `projected`, if another product
        made them. `projected` then ends after z. None (default) if they are in `projected`.
      interleaved: order of `projected`. False (default): all q, all k, all v, all z, all rates, all
        steps. True: key head by key head with its q, k, v and z, and then key head by key head with
        its rates and steps.
      eps: epsilon of the norm, 1e-6 by default.
      kept: int32 ``[b]``: for t tokens of each row, the index of the state from which each row goes
        on. `inputs` and `state` then have an axis of ``w >= t`` states behind the rows, and so have
        the results: the states after the tokens take its first t places. None (default) for t = 1
        and a single state.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      A tuple ``(y, inputs, state)``: y ``[b, t, m r e]`` in the dtype of `inputs`, and the new
      `inputs` and `state`. Gradients flow to all float arguments, in plain XLA.

    Raises:
      ValueError: if a shape or dtype does not fit the others.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> state = jnp.zeros((1, 2, 3, 16, 8))  # 2 key heads, each with 3 value heads
      >>> y, inputs, state = nvfp4.ops.gated_delta_step(
      ...     jnp.ones((1, 1, 172)), jnp.array([[0]]), jnp.zeros((1, 3, 112)), state,
      ...     conv_weight=jnp.ones((112, 4)), A_log=jnp.zeros(6), dt_bias=jnp.zeros(6),
      ...     norm=jnp.ones(8),
      ... )
      >>> y.shape, inputs.shape
      ((1, 1, 48), (1, 3, 112))

    Source:
      arXiv:2412.06464; `modeling_qwen3_next` of transformers for the details.
    """
    (b, t), states, (m, r, d, e) = _check_states(projected, state, kept, "m, r, d, e")
    heads = m * r
    channels, taps = 2 * m * d + heads * e, conv_weight.shape[-1]
    check_floats(projected=projected, inputs=inputs)
    last = 2 * heads if rates is None else 0
    if rates is not None and (rates.shape, rates.dtype) != ((b, t, 2 * heads), projected.dtype):
        raise ValueError(
            f"rates: expected {projected.dtype.name} {(b, t, 2 * heads)}, or None; got "
            f"{rates.dtype.name} {rates.shape}"
        )
    check_shapes(
        {
            "projected": (projected, (b, t, channels + heads * e + last)),
            "positions": (positions, (b, t)),
            "inputs": (inputs, (*states, taps - 1, channels)),
            "conv_weight": (conv_weight, (channels, taps)),
            "A_log": (A_log, (heads,)),
            "dt_bias": (dt_bias, (heads,)),
            "norm": (norm, (e,)),
        }
    )
    weights = {"conv_weight": conv_weight, "A_log": A_log, "dt_bias": dt_bias, "norm": norm}
    options = {"interleaved": interleaved, "eps": eps}
    tokens = (projected, narrow_positions(positions), inputs, state, kept, rates)
    how = {"target": target, "backend": backend, "sizes": {"key width": d, "value width": e}}
    return _run("gated_delta_step", tokens, weights, options, how)


@public_op
def kimi_delta_step(
    projected: Float[Array, "b t m"],
    decays: Float[Array, "b t nd"],
    gates: Float[Array, "b t ne"],
    positions: Int[Array, "b t"],
    inputs: Float[Array, "b *w taps-1 c"],
    state: Float[Array, "b *w n d e"],
    *,
    conv_weight: Float[Array, "c taps"],
    A_log: Float[Array, " n"],
    dt_bias: Float[Array, " nd"],
    norm: Float[Array, " e"],
    rates: Float[Array, "b t n"] | None = None,
    lower_bound: float | None = None,
    eps: float = 1e-5,
    kept: Int[Array, " b"] | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "b t ne"], Float[Array, "b *w taps-1 c"], Float[Array, "b *w n d e"]]:
    """Decode few tokens of each row with Kimi delta attention, without its projections.

    Each channel of the keys has a decay of its own::

      q, k, v = silu(convolve(qkv))
      q, k = q / |q| / sqrt(d), k / |k|
      a, beta = exp(-exp(A_log) * softplus(decays + dt_bias)), sigmoid(rate)
      S = diag(a) S + k (beta (v - k.T diag(a) S))
      y = norm(q.T S) * sigmoid(gates)

    With a `lower_bound`, ``a = exp(lower_bound * sigmoid(exp(A_log) * (decays + dt_bias)))``. All
    of it is computed in float32. Under `jax.jit`, the new `inputs` and `state` take the memory of
    the old ones if those are donated or carried by a loop.

    Args:
      projected: t projected tokens of each of b rows, ``[b, t, m]``, bfloat16, float16 or float32:
        q, k and v of n heads, and one rate for each head, ``m = n (2 d + e + 1)``.
      decays: what the decays come from, ``[b, t, n d]`` in the dtype of `projected`.
      gates: gates of the results, ``[b, t, n e]`` in the dtype of `projected`.
      positions: position of each token, integers ``[b, t]``. A token at position 2**30 or after it
        is padding: it changes neither `inputs` nor `state`, and its result is undefined.
      inputs: last inputs of the convolution, ``[b, taps - 1, c]``, the oldest first, where
        ``c = n (2 d + e)`` counts all q, then all k, then all v. Zeros before the first token.
      state: state of each head, float32 ``[b, n, d, e]``. Zeros before the first token.
      conv_weight: weights of the convolution, float32 ``[c, taps]``. The last one of a channel
        multiplies the newest input.
      A_log: logarithm of the rate of decay, float32 ``[n]``.
      dt_bias: bias of the decays, float32 ``[n d]``.
      norm: weight of the norm, float32 ``[e]``.
      rates: the rates ``[b, t, n]`` in the dtype of `projected`, if another product made them.
        `projected` then ends after v. None (default) if they are in `projected`.
      lower_bound: smallest logarithm of a decay, a negative number. None (default) for none.
      eps: epsilon of the norm, 1e-5 by default.
      kept: int32 ``[b]``: for t tokens of each row, the index of the state from which each row goes
        on. `inputs` and `state` then have an axis of ``w >= t`` states behind the rows, and so have
        the results: the states after the tokens take its first t places. None (default) for t = 1
        and a single state.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      A tuple ``(y, inputs, state)``: y ``[b, t, n e]`` in the dtype of `inputs`, and the new
      `inputs` and `state`. Gradients flow to all float arrays, in plain XLA.

    Raises:
      ValueError: if a shape or dtype does not fit the others, or `lower_bound` is not negative.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> state = jnp.zeros((1, 2, 16, 8))  # 2 heads: 80 channels, and 2 rates
      >>> y, inputs, state = nvfp4.ops.kimi_delta_step(
      ...     jnp.ones((1, 1, 82)), jnp.ones((1, 1, 32)), jnp.ones((1, 1, 16)), jnp.array([[0]]),
      ...     jnp.zeros((1, 3, 80)), state, conv_weight=jnp.ones((80, 4)), A_log=jnp.zeros(2),
      ...     dt_bias=jnp.zeros(32), norm=jnp.ones(8),
      ... )
      >>> y.shape, inputs.shape
      ((1, 1, 16), (1, 3, 80))

    Source:
      arXiv:2510.26692; `modeling_kimi_linear` of transformers for the details.
    """
    (b, t), states, (n, d, e) = _check_states(projected, state, kept, "n, d, e")
    channels, taps = n * (2 * d + e), conv_weight.shape[-1]
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound: expected a negative number or None, got {lower_bound}")
    check_floats(projected=projected, inputs=inputs)
    parts = {"decays": (decays, (b, t, n * d)), "gates": (gates, (b, t, n * e))}
    if rates is not None:
        parts["rates"] = rates, (b, t, n)
    for name, (array, shape) in parts.items():
        if (array.shape, array.dtype) != (shape, projected.dtype):
            raise ValueError(
                f"{name}: expected {projected.dtype.name} {shape}, got {array.dtype.name} "
                f"{array.shape}"
            )
    check_shapes(
        {
            "projected": (projected, (b, t, channels + (n if rates is None else 0))),
            "positions": (positions, (b, t)),
            "inputs": (inputs, (*states, taps - 1, channels)),
            "conv_weight": (conv_weight, (channels, taps)),
            "A_log": (A_log, (n,)),
            "dt_bias": (dt_bias, (n * d,)),
            "norm": (norm, (e,)),
        }
    )
    weights = {"conv_weight": conv_weight, "A_log": A_log, "dt_bias": dt_bias, "norm": norm}
    options = {"lower_bound": lower_bound, "eps": eps}
    tokens = (projected, narrow_positions(positions), inputs, state, kept, decays, gates, rates)
    how = {"target": target, "backend": backend, "sizes": {"key width": d, "value width": e}}
    return _run("kimi_delta_step", tokens, weights, options, how)


@public_op
def mamba2_step(
    projected: Float[Array, "b t m"],
    positions: Int[Array, "b t"],
    inputs: Float[Array, "b *w taps-1 c"],
    state: Float[Array, "b *w h p n"],
    *,
    conv_weight: Float[Array, "c taps"],
    conv_bias: Float[Array, " c"] | None = None,
    A_log: Float[Array, " h"],
    dt_bias: Float[Array, " h"],
    D: Float[Array, " h"],
    norm: Float[Array, " inner"],
    activation: str | ActivationCall = "silu_no_mul",
    step_limits: tuple[float, float] = (0.0, float("inf")),
    eps: float = 1e-5,
    kept: Int[Array, " b"] | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "b t inner"], Float[Array, "b *w taps-1 c"], Float[Array, "b *w h p n"]]:
    """Decode few tokens of each row with a Mamba-2 mixer, without its two projections.

    ::

      x, B, C = activation(convolve(xbc) + conv_bias)
      dt = clip(softplus(dt + dt_bias), *step_limits)
      S = exp(-exp(A_log) * dt) S + dt x B.T
      y = norm((S C + D x) * silu(z))

    Each of g groups of heads has its own B and C, and the norm applies to each group by itself. All
    of it is computed in float32. Under `jax.jit`, the new `inputs` and `state` take the memory of
    the old ones if those are donated or carried by a loop.

    Args:
      projected: t projected tokens of each of b rows, ``[b, t, m]``, bfloat16, float16 or float32:
        z of h heads, x of h heads, B of g groups, C of g groups, and one step for each head.
      positions: position of each token, integers ``[b, t]``. A token at position 2**30 or after it
        is padding: it changes neither `inputs` nor `state`, and its result is undefined.
      inputs: last inputs of the convolution, ``[b, taps - 1, c]``, the oldest first, where
        ``c = h p + 2 g n``. Zeros before the first token.
      state: state of each head, float32 ``[b, h, p, n]``. Zeros before the first token.
      conv_weight: weights of the convolution, float32 ``[c, taps]``. The last one of a channel
        multiplies the newest input.
      conv_bias: bias of the convolution, float32 ``[c]``; None (default) for none.
      A_log: logarithm of the rate of decay, float32 ``[h]``.
      dt_bias: bias of the step, float32 ``[h]``.
      D: factor of x in the result, float32 ``[h]``.
      norm: weight of the norm, float32 ``[h p]``.
      activation: function after the convolution, "silu_no_mul" by default, or the result of
        `find_activation`. It must not be gated.
      step_limits: smallest and largest dt, 0 and infinity by default.
      eps: epsilon of the norm, 1e-5 by default.
      kept: int32 ``[b]``: for t tokens of each row, the index of the state from which each row goes
        on. `inputs` and `state` then have an axis of ``w >= t`` states behind the rows, and so have
        the results: the states after the tokens take its first t places. None (default) for t = 1
        and a single state.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      A tuple ``(y, inputs, state)``: y ``[b, t, h p]`` in the dtype of `inputs`, and the new
      `inputs` and `state`. Gradients flow to all float arguments, in plain XLA.

    Raises:
      ValueError: if a shape or dtype does not fit the others, or the activation is gated.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> state = jnp.zeros((1, 4, 8, 16))  # 4 heads in 2 groups: 96 channels
      >>> y, inputs, state = nvfp4.ops.mamba2_step(
      ...     jnp.ones((1, 1, 132)), jnp.array([[0]]), jnp.zeros((1, 3, 96)), state,
      ...     conv_weight=jnp.ones((96, 4)), A_log=jnp.zeros(4), dt_bias=jnp.zeros(4),
      ...     D=jnp.ones(4), norm=jnp.ones(32),
      ... )
      >>> y.shape, inputs.shape
      ((1, 1, 32), (1, 3, 96))

    Source:
      arXiv:2405.21060; `modeling_nemotron_h` of transformers for the details.
    """
    (b, t), states, (heads, p, n) = _check_states(projected, state, kept, "h, p, n")
    (channels, taps), inner = conv_weight.shape, heads * p
    groups, rest = divmod(channels - inner, 2 * n)
    if groups < 1 or rest or heads % groups:
        raise ValueError(
            f"conv_weight: expected {inner} rows, and {2 * n} more for each of some groups that "
            f"divide {heads} heads; got {conv_weight.shape}"
        )
    call = find_activation(activation)
    if call.row.gated:
        raise ValueError(f"activation: expected one that is not gated, got {call.name!r}")
    check_floats(projected=projected, inputs=inputs)
    arrays = {
        "projected": (projected, (b, t, inner + channels + heads)),
        "positions": (positions, (b, t)),
        "inputs": (inputs, (*states, taps - 1, channels)),
        "A_log": (A_log, (heads,)),
        "dt_bias": (dt_bias, (heads,)),
        "D": (D, (heads,)),
        "norm": (norm, (inner,)),
        "conv_bias": (conv_bias, (channels,)),
    }
    check_shapes(arrays)
    weights = {"conv_weight": conv_weight, "conv_bias": conv_bias, "A_log": A_log}
    weights |= {"dt_bias": dt_bias, "D": D, "norm": norm}
    options = {"activation": call, "step_limits": step_limits, "eps": eps}
    tokens = (projected, narrow_positions(positions), inputs, state, kept)
    how = {"target": target, "backend": backend, "sizes": {"head width": p, "state width": n}}
    return _run("mamba2_step", tokens, weights, options, how)


def _check_states(projected, state, kept, sizes):
    """Check the number of tokens and of states; `sizes` names the sizes of a state.

    Returns:
      The rows and their tokens, the axes in front of a state, and its sizes.
    """
    check_axes("projected", projected, "b, t, n")
    front, count = ("b", 1) if kept is None else ("b, w", 2)
    if state.ndim != count + len(sizes.split(",")):
        raise ValueError(f"state: expected shape [{front}, {sizes}], got {state.shape}")
    states, b, t = state.shape[:count], state.shape[0], projected.shape[1]
    if kept is not None:
        check_integers("kept", kept, (b,))
    if kept is None and t != 1:
        raise ValueError(f"projected: expected one token of each row, or `kept`; got {t} tokens")
    if kept is not None and not 1 <= t <= states[1]:
        raise ValueError(
            f"projected: expected 1 to {states[1]} tokens of each row, as many as there are states "
            f"{state.shape}; got {t}"
        )
    return (b, t), states, state.shape[count:]


def _run(op, tokens, weights, options, how):
    """Run an op; `how` has the target, the requested backend, and the widths of a state."""
    projected, positions, inputs, state, kept, *apart = tokens
    kept = None if kept is None else kept.astype(jnp.int32)
    tokens = (projected, positions, inputs, state.astype(jnp.float32), kept, *apart)
    weights = jax.tree.map(lambda value: value.astype(jnp.float32), weights)
    rows = "b, " * len(tokens) + "- -> b, b, b"
    dtype = inputs.dtype.name
    return run(op, tokens, rows, named=weights, options=options, dtype=dtype, **how)


def _lower_delta_step(ffi_target, *tokens, conv_weight, A_log, dt_bias, norm, interleaved, eps):
    """Lower `gated_delta_step` to its FFI target."""
    *tokens, rates = tokens
    operands = conv_weight, A_log, dt_bias, norm, _cast(rates, tokens)
    m, r, _, e = tokens[3].shape[-4:]
    options = {"interleaved": bool(interleaved), "eps": np.float32(eps)}
    return _call_in_place(ffi_target, tokens, operands, m * r * e, **options)


def _lower_kimi_delta_step(
    ffi_target, *tokens, conv_weight, A_log, dt_bias, norm, lower_bound, eps
):
    """Lower `kimi_delta_step` to its FFI target."""
    *tokens, decays, gates, rates = tokens
    apart = (_cast(x, tokens) for x in (rates, decays, gates))
    operands = conv_weight, A_log, dt_bias, norm, *apart
    options = {"lower_bound": np.float32(lower_bound or 0.0), "eps": np.float32(eps)}
    n, _, e = tokens[3].shape[-3:]
    return _call_in_place(ffi_target, tokens, operands, n * e, **options)


def _lower_mamba2_step(ffi_target, *tokens, activation, step_limits, eps, **weights):
    """Lower `mamba2_step` to its FFI target."""
    if weights["conv_bias"] is None:
        weights["conv_bias"] = jnp.zeros(0, jnp.float32)
    names = "conv_weight", "conv_bias", "A_log", "dt_bias", "D", "norm"
    operands = [weights[name] for name in names]
    (b, t), (heads, p, n) = tokens[1].shape, tokens[3].shape[-3:]
    return _call_in_place(
        ffi_target,
        tokens,
        operands,
        heads * p,
        [scratch(workspace_bytes_of_rows(ffi_target, b * t, heads, p))],
        activation=activation.name,
        alpha=np.float32(activation.alpha),
        limit=np.float32(activation.limit),
        groups=np.int64((operands[0].shape[0] - heads * p) // (2 * n)),
        smallest_step=np.float32(step_limits[0]),
        largest_step=np.float32(step_limits[1]),
        eps=np.float32(eps),
    )


def _cast(x, tokens):
    """Return an array in the dtype of the last inputs, empty if it is None."""
    dtype = tokens[2].dtype
    return jnp.zeros(0, dtype) if x is None else x.astype(dtype)


def _call_in_place(ffi_target, tokens, operands, width, more=(), **attributes):
    """Call a kernel that writes the new inputs and the new state into the memory of the old ones.

    Args:
      ffi_target: name of the target.
      tokens: the projected tokens, their positions, the last inputs, the state, and which state is
        kept; None for that if there is one.
      operands: the other operands of the kernel, which stand behind the positions.
      width: width of y, which has the dtype of the inputs.
      more: further results, which are not returned.
      **attributes: attributes of the call.
    """
    projected, positions, inputs, state, kept = tokens
    only = kept is None
    if only:  # for the kernel, one state is a window of one
        inputs, state, kept = inputs[:, None], state[:, None], jnp.zeros(0, jnp.int32)
    y = jax.ShapeDtypeStruct((*positions.shape, width), inputs.dtype)
    first = 3 + len(operands)
    aliases = {first: 1, first + 1: 2}
    call = kernel_call(ffi_target, (y, inputs, state, *more), input_output_aliases=aliases)
    own = projected.astype(inputs.dtype)
    y, inputs, state = call(own, positions, *operands, kept, inputs, state, **attributes)[:3]
    return (y, inputs[:, 0], state[:, 0]) if only else (y, inputs, state)


RECURRENT_CUDA = Backend(
    "recurrent_cuda",
    {
        "gated_delta_step": Kernel(_lower_delta_step, "nvfp4_delta_step_cuda"),
        "kimi_delta_step": Kernel(_lower_kimi_delta_step, "nvfp4_kimi_delta_step_cuda"),
        "mamba2_step": Kernel(_lower_mamba2_step, "nvfp4_mamba2_step_cuda"),
    },
    (CUDA,),
    limits=STATES,
)


BACKENDS = (RECURRENT_CUDA,)
MEANINGS = {
    "gated_delta_step": over_window(mix_gated_delta),
    "kimi_delta_step": over_window(mix_kimi_delta),
    "mamba2_step": over_window(mix_mamba2),
}
