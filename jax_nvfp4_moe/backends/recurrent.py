"""Records and lowerings of the CUDA kernels of recurrent mixers."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.scheme import Backend, Capability, Device

# The kernels hold a state of at most this many rows and columns in registers, and read 4 columns at
# a time.
_MOST, _FACTOR = 128, 4

_MOST_TAPS, _PARTS = 8, 3  # of the convolution for prompts

_CHUNK, _SMALL_CHUNK = 64, 32  # tokens in the chunks of a recurrence over a prompt


def _lower_delta_step(
    projected,
    positions,
    inputs,
    state,
    rates=None,
    *,
    conv_weight,
    A_log,
    dt_bias,
    norm,
    interleaved,
    eps,
):
    """Lower `gated_delta_step` to its FFI target."""
    dtype = inputs.dtype
    rates = jnp.zeros(0, dtype) if rates is None else rates.astype(dtype)
    weights = (conv_weight, A_log, dt_bias, norm, rates)
    outputs = (state.shape[0], 1, state.shape[1] * state.shape[2] * state.shape[4])
    call = _call_in_place("nvfp4_delta_step_cuda", outputs, len(weights), inputs, state, ())
    return call(
        projected.astype(dtype),
        positions,
        *weights,
        inputs,
        state,
        interleaved=bool(interleaved),
        eps=np.float32(eps),
    )


def _lower_kimi_delta_step(
    projected,
    positions,
    inputs,
    state,
    decays,
    gates,
    rates=None,
    *,
    conv_weight,
    A_log,
    dt_bias,
    norm,
    lower_bound,
    eps,
):
    """Lower `kimi_delta_step` to its FFI target."""
    dtype = inputs.dtype
    rates = jnp.zeros(0, dtype) if rates is None else rates.astype(dtype)
    apart = (rates, decays.astype(dtype), gates.astype(dtype))
    weights = (conv_weight, A_log, dt_bias, norm, *apart)
    outputs = (state.shape[0], 1, state.shape[1] * state.shape[3])
    call = _call_in_place("nvfp4_kimi_delta_step_cuda", outputs, len(weights), inputs, state, ())
    return call(
        projected.astype(dtype),
        positions,
        *weights,
        inputs,
        state,
        lower_bound=np.float32(lower_bound or 0.0),
        eps=np.float32(eps),
    )


def _lower_mamba2_step(
    projected,
    positions,
    inputs,
    state,
    *,
    conv_weight,
    conv_bias,
    A_log,
    dt_bias,
    D,
    norm,
    activation,
    step_limits,
    eps,
):
    """Lower `mamba2_step` to its FFI target."""
    b, heads, p, n = state.shape
    if conv_bias is None:
        conv_bias = jnp.zeros(0, jnp.float32)
    weights = (conv_weight, conv_bias, A_log, dt_bias, D, norm)
    scratch = (jax.ShapeDtypeStruct((4 * b * heads * p,), jnp.uint8),)
    outputs = (b, 1, heads * p)
    target = "nvfp4_mamba2_step_cuda"
    call = _call_in_place(target, outputs, len(weights), inputs, state, scratch)
    return call(
        projected.astype(inputs.dtype),
        positions,
        *weights,
        inputs,
        state,
        activation=activation.name,
        alpha=np.float32(activation.alpha),
        limit=np.float32(activation.limit),
        groups=np.int64((conv_weight.shape[0] - heads * p) // (2 * n)),
        smallest_step=np.float32(step_limits[0]),
        largest_step=np.float32(step_limits[1]),
        eps=np.float32(eps),
    )[:3]


def delta_rule_workspace_bytes(
    b: int, t: int, key_heads: int, shared: int, channel_decays: bool = False
) -> int:
    """Return the bytes that `gated_delta_rule` needs between its two kernels.

    Each token of a key head has a key and a query. For each of the `shared` value heads, it has a
    decayed key, its pairs with the tokens of a chunk, and two decays or other factors. Decays of
    channels take one more number of each channel for each small chunk. `ChunkWorkspaceBytes` in
    ffi/cuda/recurrent/chunk_tiles.cuh is the same number.
    """
    decays = 2 + (_MOST // _SMALL_CHUNK if channel_decays else 0)
    return 4 * b * _padded(t) * key_heads * (2 * _MOST + shared * (_MOST + _CHUNK + decays))


def mamba2_scan_workspace_bytes(b: int, t: int, groups: int, shared: int) -> int:
    """Return the bytes that `mamba2_scan` needs between its two kernels.

    As `delta_rule_workspace_bytes`, without decayed keys.
    """
    return 4 * b * _padded(t) * groups * (2 * _MOST + shared * (_CHUNK + 2))


def _padded(t):
    return -(-t // _CHUNK) * _CHUNK


def _lower_delta_rule(q, k, v, g, beta, state, lengths=None, *, normalize, dtype):
    """Lower `gated_delta_rule` to its FFI target. The record accepts one `dtype` only."""
    del dtype
    (b, t, m, r, e), d = v.shape, q.shape[3]
    channel_decays = g.ndim == v.ndim
    if channel_decays and r > 1:
        # The value heads of a key head share no products, so each gets a key head of its own.
        q, k = (jnp.repeat(x, r, axis=2) for x in (q, k))
        n = m * r
        v, g, beta = v.reshape(b, t, n, 1, e), g.reshape(b, t, n, 1, d), beta.reshape(b, t, n, 1)
        operands = q, k, v, g, beta, state.reshape(b, n, 1, d, e), lengths
        y, new = _lower_delta_rule(*operands, normalize=normalize, dtype=None)
        return y.reshape(b, t, m, r, e), new.reshape(state.shape)
    lengths = jnp.zeros(0, jnp.int32) if lengths is None else lengths
    size = delta_rule_workspace_bytes(b, t, m, r, channel_decays)
    workspace = jax.ShapeDtypeStruct((size,), jnp.uint8)
    results = jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)
    call = kernel_call(
        "nvfp4_delta_rule_cuda",
        (*results, workspace),
        input_output_aliases={6: 1},
    )
    return tuple(call(q, k, v, g, beta, lengths, state, normalize=bool(normalize))[:2])


def _lower_mamba2_scan(x, dt, a, B, C, D, state, lengths=None, *, dtype):
    """Lower `mamba2_scan` to its FFI target. The record accepts one `dtype` only."""
    del dtype
    lengths = jnp.zeros(0, jnp.int32) if lengths is None else lengths
    (b, t, heads, _), groups = x.shape, B.shape[2]
    size = mamba2_scan_workspace_bytes(b, t, groups, heads // groups)
    results = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(state.shape, x.dtype))
    call = kernel_call(
        "nvfp4_mamba2_scan_cuda",
        (*results, jax.ShapeDtypeStruct((size,), jnp.uint8)),
        input_output_aliases={7: 1},
    )
    return tuple(call(x, dt, a, B, C, D, lengths, state)[:2])


def _lower_convolution(x, positions, inputs, *, weight, bias, widths, first, heads, stride):
    """Lower `causal_convolution` to its FFI target."""
    parts = [jax.ShapeDtypeStruct((*x.shape[:2], heads * width), jnp.float32) for width in widths]
    missing = [jax.ShapeDtypeStruct((0,), jnp.float32)] * (_PARTS - len(parts))
    call = kernel_call(
        "nvfp4_causal_convolution_cuda",
        (*parts, *missing, jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)),
        input_output_aliases={4: _PARTS},
    )
    results = call(
        x,
        positions,
        weight,
        jnp.zeros(0, jnp.float32) if bias is None else bias,
        inputs,
        widths=np.array(widths, np.int64),
        first=np.int64(first),
        heads=np.int64(heads),
        stride=np.int64(stride),
    )
    return tuple(results[: len(parts)]), results[-1]


def _call_in_place(ffi_target, outputs, weights, inputs, state, scratch):
    """Return an FFI call whose last two operands share their memory with two of its results.

    The operands are the projected tokens, their positions, `weights` arrays, `inputs` and `state`.
    The results are y of shape `outputs` in the dtype of `inputs`, the new inputs and state, and
    `scratch`.
    """
    results = (
        jax.ShapeDtypeStruct(outputs, inputs.dtype),
        jax.ShapeDtypeStruct(inputs.shape, inputs.dtype),
        jax.ShapeDtypeStruct(state.shape, jnp.float32),
        *scratch,
    )
    return kernel_call(
        ffi_target,
        results,
        input_output_aliases={2 + weights: 1, 3 + weights: 2},
    )


RECURRENT_CUDA = Backend(
    name="recurrent_cuda",
    can=Capability(
        ops=frozenset({"gated_delta_step", "kimi_delta_step", "mamba2_step"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension="_nvfp4_cuda",
        head_widths=range(_FACTOR, _MOST + 1, _FACTOR),
    ),
    layout=CANONICAL,
    lower={
        "gated_delta_step": _lower_delta_step,
        "kimi_delta_step": _lower_kimi_delta_step,
        "mamba2_step": _lower_mamba2_step,
    },
    status="executed",
    ffi_targets=("nvfp4_delta_step_cuda", "nvfp4_kimi_delta_step_cuda", "nvfp4_mamba2_step_cuda"),
)


def _over_prompts(op: str, name: str, lower) -> Backend:
    """Return the record of a recurrence over prompts.

    Its products take TensorFloat-32, which is accurate enough for results that are rounded to
    bfloat16: see `choose_precision`.
    """
    return Backend(
        name=name,
        can=Capability(
            ops=frozenset({op}),
            devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
            platform="cuda",
            extension="_nvfp4_cuda",
            dtypes=frozenset({"bfloat16"}),
            head_widths=range(_FACTOR, _MOST + 1, _FACTOR),
        ),
        layout=CANONICAL,
        lower={op: lower},
        status="executed",
        ffi_targets=(f"nvfp4_{name}",),
    )


DELTA_RULE_CUDA = _over_prompts("gated_delta_rule", "delta_rule_cuda", _lower_delta_rule)
MAMBA2_SCAN_CUDA = _over_prompts("mamba2_scan", "mamba2_scan_cuda", _lower_mamba2_scan)

# The widths are the number of taps, and the counts of columns. A thread reads 4 columns at a time.
CONVOLUTION_CUDA = Backend(
    name="convolution_cuda",
    can=Capability(
        ops=frozenset({"causal_convolution"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension="_nvfp4_cuda",
        dtypes=frozenset({"bfloat16", "float16"}),
        max_extent=1 << 22,
        head_widths=(range(2, _MOST_TAPS + 1), *(range(0, 1 << 22, _FACTOR),) * (3 + _PARTS)),
    ),
    layout=CANONICAL,
    lower={"causal_convolution": _lower_convolution},
    status="executed",
    ffi_targets=("nvfp4_causal_convolution_cuda",),
)
