"""Record and lowerings of the CUDA kernels that decode one token with a recurrent mixer."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.scheme import Backend, Capability, Device

# The kernels hold a state of at most this many rows and columns in registers, and read 4 columns at
# a time.
_MOST, _FACTOR = 128, 4


def _lower_delta_step(
    projected,
    positions,
    inputs,
    state,
    *,
    conv_weight,
    A_log,
    dt_bias,
    norm,
    interleaved,
    eps,
):
    """Lower `gated_delta_step` to its FFI target."""
    weights = (conv_weight, A_log, dt_bias, norm)
    outputs = (state.shape[0], 1, state.shape[1] * state.shape[2] * state.shape[4])
    call = _call_in_place("nvfp4_delta_step_cuda", outputs, len(weights), inputs, state)
    projected = projected.astype(inputs.dtype)
    return call(
        projected,
        positions,
        *weights,
        inputs,
        state,
        interleaved=bool(interleaved),
        eps=np.float32(eps),
    )


def _call_in_place(ffi_target, outputs, weights, inputs, state):
    """Return an FFI call whose last two operands and last two results share their memory.

    The operands are the projected tokens, their positions, `weights` arrays, `inputs` and `state`.
    The results are y of shape `outputs` in the dtype of `inputs`, and the new inputs and state.
    """
    results = (
        jax.ShapeDtypeStruct(outputs, inputs.dtype),
        jax.ShapeDtypeStruct(inputs.shape, inputs.dtype),
        jax.ShapeDtypeStruct(state.shape, jnp.float32),
    )
    return jax.ffi.ffi_call(
        ffi_target,
        results,
        input_output_aliases={2 + weights: 1, 3 + weights: 2},
        vmap_method="sequential",
    )


RECURRENT_CUDA = Backend(
    name="recurrent_cuda",
    can=Capability(
        ops=frozenset({"gated_delta_step"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension="_nvfp4_cuda",
        head_widths=range(_FACTOR, _MOST + 1, _FACTOR),
    ),
    layout=CANONICAL,
    lower={"gated_delta_step": _lower_delta_step},
    status="compiled, executed by emulation",
    ffi_targets=("nvfp4_delta_step_cuda",),
)
