"""Emit one XLA FFI call for an op, with the operand order that all kernels here share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.backends.kernel_call import kernel_call, scratch
from jax_nvfp4_moe.backends.launch_facts import facts, workspace_bytes, workspace_bytes_of_rows
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.scheme import Scheme

# How a kernel scales activations before each GEMM, by scheme.
ACTIVATION_SCALE = {
    Scheme.W4A16: "none",
    Scheme.W4A4: "static",
    Scheme.W4A4_UNIT_SCALE: "static",
    Scheme.W4A4_TOKEN_SCALE: "token",
}


def _input_scale(scale, num_experts, scheme):
    """Return the operand ``[e]``, or ``[0]`` if the kernel reads no input scales."""
    if scheme is Scheme.W4A4_UNIT_SCALE:
        return jnp.ones(num_experts, jnp.float32)
    if scheme is not Scheme.W4A4:
        return jnp.zeros(0, jnp.float32)
    if scale is None:
        raise ValueError(
            "input_scale: expected one scale per expert, because scheme w4a4 multiplies by it; "
            "got None"
        )
    return jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (num_experts,))


def _global_scale(weight: NVFP4Tensor, parts: int):
    """Return the operand ``[e, parts]``: the global scales of a weight, broadcast to its parts."""
    scale = weight.global_scale.astype(jnp.float32)
    scale = scale[:, None] if scale.ndim == 1 else scale
    return jnp.broadcast_to(scale, (scale.shape[0], max(parts, scale.shape[1])))


def _bias(bias):
    """Return the operand ``[e, n]``, or ``[0, 0]`` if there is no bias."""
    return jnp.zeros((0, 0), jnp.float32) if bias is None else bias.astype(jnp.float32)


def _workspace(ffi_target, rows, *sizes):
    """Return the scratch result of a call for `rows` rows, or tokens, and further sizes.

    Raises:
      ValueError: if the number of rows is a symbol of `jax.export.symbolic_shape`. Kernels that
        work in rounds accept that.
    """
    if ffi_target in facts().WORKSPACE_ROWS:
        return scratch(workspace_bytes_of_rows(ffi_target, rows, *sizes))
    if not isinstance(rows, int):
        raise ValueError(
            f"x: expected a known number of tokens, because the kernel {ffi_target} computes the "
            f"size of its workspace from it; got the symbolic size {rows}. Export the program once "
            "for each number of tokens, or with backend='reference'"
        )
    return scratch(workspace_bytes(ffi_target, rows, *sizes))


def _as_one_program(*static):
    """Return a decorator: outside of `jax.jit`, a call runs one program, not one per operation."""
    return functools.partial(jax.jit, inline=True, static_argnames=static)


@_as_one_program("ffi_target", "scheme", "call", "weight_on_input")
def lower_moe(
    ffi_target,
    x,
    params,
    expert_ids,
    expert_weights,
    *,
    scheme,
    call,
    weight_on_input,
):
    """Lower `moe_mlp` to an FFI target."""
    (t, h), (e, top_k) = x.shape, (params.num_experts, expert_ids.shape[1])
    sizes = top_k, e, h, params.intermediate, params.gated, x.dtype.itemsize
    operands = (
        x,
        params.gate_up.packed,
        params.gate_up.block_scale,
        _global_scale(params.gate_up, 2 if params.gated else 1),
        _input_scale(params.gate_up_input_scale, e, scheme),
        _bias(params.gate_up_bias),
        params.down.packed,
        params.down.block_scale,
        _global_scale(params.down, 1),
        _input_scale(params.down_input_scale, e, scheme),
        _bias(params.down_bias),
        expert_ids,
        expert_weights,
    )
    attributes = {
        "activation": call.name,
        "alpha": np.float32(call.alpha),
        "beta": np.float32(call.beta),
        "limit": np.float32(call.limit),
        "activation_scale": ACTIVATION_SCALE[scheme],
        "weight_on_input": bool(weight_on_input),
        "intermediate": np.int64(params.intermediate),  # arrays may have the padded size
    }
    outputs = jax.ShapeDtypeStruct((t, h), x.dtype), _workspace(ffi_target, t, *sizes)
    return kernel_call(ffi_target, outputs)(*operands, **attributes)[0]


@_as_one_program("ffi_target", "scheme")
def lower_grouped_gemm(
    ffi_target,
    x,
    weight,
    group_sizes,
    input_scale,
    bias,
    *,
    scheme,
):
    """Lower `grouped_gemm` to an FFI target."""
    (m, k), (e, n, _) = x.shape, weight.shape
    operands = (
        x,
        weight.packed,
        weight.block_scale,
        _global_scale(weight, 1),
        _input_scale(input_scale, e, scheme),
        _bias(bias),
        jnp.zeros(0, jnp.int32) if group_sizes is None else group_sizes,
    )
    attributes = {"activation_scale": ACTIVATION_SCALE[scheme]}
    workspace = _workspace(ffi_target, m, e, n, k, x.dtype.itemsize)
    outputs = jax.ShapeDtypeStruct((m, n), x.dtype), workspace
    return kernel_call(ffi_target, outputs)(*operands, **attributes)[0]


@_as_one_program("ffi_target")
def lower_transposed_gemm(ffi_target, x, weight, group_sizes):
    """Lower `transposed_gemm` to an FFI target. The weight has one global scale for each expert."""
    (m, n), (e, _, k) = x.shape, weight.shape
    # The kernel reads 16 bytes of a row at once.
    x = jnp.pad(x, [(0, 0), (0, -n % 16)])
    operands = (
        x,
        weight.packed,
        weight.block_scale,
        _global_scale(weight, 1),
        jnp.zeros(0, jnp.int32) if group_sizes is None else group_sizes,
    )
    workspace = _workspace(ffi_target, m, e, k, x.shape[1])
    outputs = jax.ShapeDtypeStruct((m, k), x.dtype), workspace
    return kernel_call(ffi_target, outputs)(*operands)[0]
