"""Emit one XLA FFI call for an op, with the operand order that all kernels here share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.backends.kernel_call import kernel_call
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


def _check_known(ffi_target, rows, symbolic_rows):
    """Check that the number of rows is known if the size of the workspace depends on it.

    Raises:
      ValueError: if the number is a symbol of `jax.export.symbolic_shape`.
    """
    if not (symbolic_rows or isinstance(rows, int)):
        raise ValueError(
            f"x: expected a known number of tokens, because the kernel {ffi_target} computes the "
            f"size of its workspace from it; got the symbolic size {rows}. Export the program once "
            "for each number of tokens, or with backend='reference'"
        )


def _as_one_program(*static):
    """Return a decorator: outside of `jax.jit`, a call runs one program, not one per operation."""
    return functools.partial(jax.jit, inline=True, static_argnames=static)


def lower_moe(ffi_target, workspace_bytes, *, symbolic_rows=False):
    """Return the function that lowers `moe_mlp` to an FFI target.

    Args:
      ffi_target: name under which the extension registers the target.
      workspace_bytes:
        ``(tokens, top_k, num_experts, hidden, intermediate, *, gated, dtype) -> int``, the size of
        the scratch result; the handler checks it.
      symbolic_rows: whether `workspace_bytes` accepts a symbolic number of tokens (`jax.export`);
        False by default.
    """

    @_as_one_program("scheme", "call", "weight_on_input")
    def lower(x, params, expert_ids, expert_weights, *, scheme, call, weight_on_input):
        (t, h), (e, top_k) = x.shape, (params.num_experts, expert_ids.shape[1])
        _check_known(ffi_target, t, symbolic_rows)
        size = workspace_bytes(
            t, top_k, e, h, params.intermediate, gated=params.gated, dtype=x.dtype
        )
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
        outputs = jax.ShapeDtypeStruct((t, h), x.dtype), jax.ShapeDtypeStruct((size,), jnp.uint8)
        call = kernel_call(ffi_target, outputs)
        return call(*operands, **attributes)[0]

    return lower


def lower_grouped_gemm(ffi_target, workspace_bytes, *, symbolic_rows=False):
    """Return the function that lowers `grouped_gemm` to an FFI target.

    Args:
      ffi_target: name under which the extension registers the target.
      workspace_bytes: ``(rows, num_experts, n, k, *, dtype) -> int``, the size of the scratch
        result; the handler checks it.
      symbolic_rows: whether `workspace_bytes` accepts a symbolic number of rows (`jax.export`);
        False by default.
    """

    @_as_one_program("scheme")
    def lower(x, weight, group_sizes, input_scale, bias, *, scheme):
        (m, k), (e, n, _) = x.shape, weight.shape
        _check_known(ffi_target, m, symbolic_rows)
        operands = (
            x,
            weight.packed,
            weight.block_scale,
            _global_scale(weight, 1),
            _input_scale(input_scale, e, scheme),
            _bias(bias),
            jnp.zeros(0, jnp.int32) if group_sizes is None else group_sizes,
        )
        size = workspace_bytes(m, e, n, k, dtype=x.dtype)
        attributes = {"activation_scale": ACTIVATION_SCALE[scheme]}
        outputs = jax.ShapeDtypeStruct((m, n), x.dtype), jax.ShapeDtypeStruct((size,), jnp.uint8)
        call = kernel_call(ffi_target, outputs)
        return call(*operands, **attributes)[0]

    return lower


def lower_quantize(ffi_target, partials):
    """Return the function that lowers `quantize_nvfp4` to an FFI target.

    The call returns packed uint8, block_scale float8_e4m3fn and the global scale. Swizzled block
    scales are padded to whole tiles. Without a given global scale, the kernel computes it from x.

    Args:
      ffi_target: name under which the extension registers the target.
      partials: number of 4-byte words of scratch memory that the search for the largest magnitude
        needs.
    """

    @_as_one_program("scale_layout")
    def lower(x, global_scale, scale_layout):
        m, k = x.shape
        scales = (m, k // 16) if scale_layout == "linear" else (-(-m // 128) * 128, -(-k // 64) * 4)
        outputs = (
            jax.ShapeDtypeStruct((m, k // 2), jnp.uint8),
            jax.ShapeDtypeStruct(scales, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((), jnp.float32),
            jax.ShapeDtypeStruct((4 * partials if global_scale is None else 0,), jnp.uint8),
        )
        scale = jnp.zeros(0, jnp.float32) if global_scale is None else global_scale
        call = kernel_call(ffi_target, outputs)
        packed, block_scale, own_scale, _ = call(x, scale, scale_layout=scale_layout)
        return packed, block_scale, own_scale if global_scale is None else global_scale

    return lower


def lower_dense(ffi_target, *, rows_dtype=None):
    """Return the function that lowers ``x @ weight.T + bias`` for few rows to an FFI target.

    The function takes x ``[..., k]``, a weight ``[n, k]`` and a bias ``[n]`` or None, and returns
    ``[..., n]`` in `dtype`.

    Args:
      ffi_target: name under which the extension registers the target.
      rows_dtype: dtype to which x is cast, for a kernel whose results are float32, and which adds
        no bias. None (default) if the kernel takes x as it is, adds a bias, and returns float32 or
        the dtype of x.
    """

    def lower(x, weight, bias, dtype):
        rows = x.reshape(-1, x.shape[-1]).astype(rows_dtype or x.dtype)
        own = jnp.float32 if rows_dtype or dtype != x.dtype else dtype
        output = jax.ShapeDtypeStruct((rows.shape[0], weight.shape[0]), own)
        operands = (rows, weight) if rows_dtype else (rows, weight, _dense_bias(bias, x.dtype))
        y = kernel_call(ffi_target, output)(*operands)
        if rows_dtype and bias is not None:
            y = y + bias.astype(own)[None]
        return y.reshape(*x.shape[:-1], weight.shape[0]).astype(dtype)

    return lower


def _dense_bias(bias, dtype):
    """Return the operand ``[n]`` in `dtype` or float32, or ``[0]`` if there is no bias."""
    if bias is None:
        return jnp.zeros(0, dtype)
    return bias if bias.dtype == dtype else bias.astype(jnp.float32)


def lower_dense_fp8(ffi_target):
    """Return the function that lowers ``x @ dequantize(weight).T + bias`` to an FFI target.

    The function takes few rows x ``[..., k]``, the values ``[n, k]`` and the scales of an
    `FP8Tensor`, the scales of the rows of x (None, one, or one for each), and a bias ``[n]`` or
    None. It returns ``[..., n]`` in `dtype`.

    Args:
      ffi_target: name under which the extension registers the target.
    """

    def lower(x, values, scale, row_scale, bias, dtype):
        rows, n = x.reshape(-1, x.shape[-1]), values.shape[0]
        row_scale = jnp.zeros(0, jnp.float32) if row_scale is None else row_scale.reshape(-1)
        output = jax.ShapeDtypeStruct((rows.shape[0], n), dtype if dtype == x.dtype else np.float32)
        call = kernel_call(ffi_target, output)
        y = call(rows, values, scale, row_scale, _dense_bias(bias, x.dtype))
        return y.reshape(*x.shape[:-1], n).astype(dtype)

    return lower


def lower_add_rms_norm(ffi_target):
    """Return the function that lowers `add_rms_norm` to an FFI target.

    Args:
      ffi_target: name under which the extension registers the target.
    """

    def lower(x, added, weight, *, eps):
        rows = x.reshape(-1, x.shape[-1])
        nothing = jnp.zeros((0, 0), x.dtype)
        operand = nothing if added is None else added.reshape(rows.shape)
        outputs = (
            jax.ShapeDtypeStruct(operand.shape, x.dtype),
            jax.ShapeDtypeStruct(rows.shape, x.dtype),
        )
        call = kernel_call(ffi_target, outputs)
        total, y = call(rows, operand, weight, eps=np.float32(eps))
        return (x if added is None else total.reshape(x.shape)), y.reshape(x.shape)

    return lower


def lower_activate(ffi_target):
    """Return the function that lowers `activate` to an FFI target.

    Args:
      ffi_target: name under which the extension registers the target.
    """

    def lower(gate_up, *, call):
        *lead, width = gate_up.shape
        rows = gate_up.reshape(-1, width)
        output = jax.ShapeDtypeStruct((rows.shape[0], width // 2), gate_up.dtype)
        y = kernel_call(ffi_target, output)(
            rows,
            activation=call.name,
            alpha=np.float32(call.alpha),
            beta=np.float32(call.beta),
            limit=np.float32(call.limit),
        )
        return y.reshape(*lead, width // 2)

    return lower


def lower_add_gated(ffi_target):
    """Return the function that lowers `add_gated` to an FFI target.

    Args:
      ffi_target: name under which the extension registers the target.
    """

    def lower(x, gate, z):
        rows = x.reshape(-1, x.shape[-1])
        operand = jnp.zeros(0, x.dtype) if gate is None else gate.reshape(-1)
        output = jax.ShapeDtypeStruct(rows.shape, x.dtype)
        call = kernel_call(ffi_target, output)
        return call(rows, operand, z.reshape(rows.shape)).reshape(x.shape)

    return lower


def lower_add_linear_gated(ffi_target):
    """Return the function that lowers `add_linear_gated` to an FFI target.

    Args:
      ffi_target: name under which the extension registers the target.
    """

    def lower(x, gate_input, gate_weight, z):
        rows = x.reshape(-1, x.shape[-1])
        inputs = gate_input.reshape(rows.shape[0], gate_weight.shape[0])
        output = jax.ShapeDtypeStruct(rows.shape, x.dtype)
        call = kernel_call(ffi_target, output)
        return call(rows, inputs, gate_weight, z.reshape(rows.shape)).reshape(x.shape)

    return lower


def lower_gate_heads(ffi_target):
    """Return the function that lowers `gate_heads` to an FFI target.

    Args:
      ffi_target: name under which the extension registers the target.
    """

    def lower(x, gates):
        rows = x.reshape(-1, *x.shape[-2:])
        output = jax.ShapeDtypeStruct(rows.shape, x.dtype)
        call = kernel_call(ffi_target, output)
        return call(rows, gates.reshape(-1, gates.shape[-1])).reshape(x.shape)

    return lower


def lower_route(ffi_target):
    """Return the function that lowers `route` to an FFI target.

    Routing by logits uses no correction, no groups and no renormalization, so the call then passes
    neutral values.

    Args:
      ffi_target: name under which the extension registers the target.
    """

    def lower(router, logits, bias):
        shape, by_score = (logits.shape[0], router.top_k), router.select == "scores"
        outputs = (
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        )
        call = kernel_call(ffi_target, outputs)
        ids, weights = call(
            logits,
            bias if bias is not None and by_score else jnp.zeros(0, jnp.float32),
            score=router.score,
            select_logits=not by_score,
            renormalize=router.renormalize and by_score,
            num_groups=np.int32(router.num_groups if by_score else 1),
            groups_kept=np.int32(router.groups_kept if by_score else 1),
            scaling=np.float32(router.scaling),
        )
        return ids, weights

    return lower
