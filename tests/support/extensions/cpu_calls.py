"""Call the CPU extension's FFI targets, operand by operand, on arrays of `float64_layer`.

On the small arrays of tests, compiling a program takes far longer than running kernels. The kernels
of all instruction sets are therefore calls in one program, and tests of one set take its result.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.float64_layer import Layer, Options

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.backends.launch_facts import workspace_bytes_of_rows
from jax_nvfp4_moe.numerics.layouts import find_layout, to_layout

NEED_CPU = ("amx", "avx512", "avx2")  # each has a marker; the scalar kernels run anywhere


def isa_levels():
    """Return all instruction sets as parameters of tests. A machine skips those that it lacks."""
    present_isas()
    marked = [pytest.param(isa, marks=getattr(pytest.mark, f"isa_{isa}")) for isa in NEED_CPU]
    return [*marked, "scalar"]


def present_isas():
    """Register the targets and return this CPU's instruction sets, or raise an error."""
    if reason := _ffi.why_unavailable("_nvfp4_cpu"):
        raise RuntimeError(reason)
    return _ffi.load("_nvfp4_cpu").isa_levels()


def _together(isa, workspace=None):
    """Return the instruction sets that run in one program with `isa`.

    A call with another name or a workspace may be an error, and then runs alone.
    """
    present = present_isas()
    return tuple(present) if isa in present and workspace is None else (isa,)


@jax.jit
def _prepare(packed, block_scale):
    return to_layout(packed, block_scale, find_layout("cpu_16x16"))


@jax.jit
def prepare(layer: Layer):
    """Put the weights of a layer into the layout of the CPU kernels."""
    gate_up, gate_up_scale = _prepare(layer.gate_up_packed, layer.gate_up_block_scale)
    down, down_scale = _prepare(layer.down_packed, layer.down_block_scale)
    return layer._replace(
        gate_up_packed=gate_up,
        gate_up_block_scale=gate_up_scale,
        down_packed=down,
        down_block_scale=down_scale,
    )


def moe(
    x,
    prepared: Layer,
    expert_ids,
    expert_weights,
    options: Options,
    isa="auto",
    workspace: int | None = None,
):
    """Run an expert layer, and return [t, h] in the dtype of x."""
    isas = _together(isa, workspace)
    operands = (x, prepared, expert_ids, expert_weights)
    return _moe(*operands, (options,), isas, workspace)[0][isas.index(isa)]


def moe_of_each(
    x,
    prepared: Layer,
    expert_ids,
    expert_weights,
    options: tuple[Options, ...],
    workspace: int | None = None,
):
    """Run a layer once for each of `options` and each instruction set, in one program.

    Returns options -> instruction set -> output. All options are gated, or none is.
    """
    isas = tuple(present_isas())
    outputs = _moe(x, prepared, expert_ids, expert_weights, options, isas, workspace)
    return {
        option: dict(zip(isas, map(np.asarray, each), strict=True))
        for option, each in zip(options, outputs, strict=True)
    }


@functools.partial(jax.jit, static_argnames=("options", "isas", "workspace"))
def _moe(x, prepared, expert_ids, expert_weights, options, isas, workspace):
    operands = (x, prepared, expert_ids, expert_weights)
    return [_moe_of_one(*operands, option, isas, workspace) for option in options]


def _moe_of_one(x, prepared, expert_ids, expert_weights, options, isas, workspace):
    (t, h), top_k = x.shape, expert_ids.shape[1]
    e = prepared.down_packed.shape[0]
    i = prepared.down_packed.shape[2] * 2  # this layout pads no columns
    sizes = top_k, e, h, i, options.gated, x.dtype.itemsize
    size = (
        workspace_bytes_of_rows("nvfp4_moe_w4a16_cpu", t, *sizes)
        if workspace is None
        else workspace
    )
    outputs = (jax.ShapeDtypeStruct((t, h), x.dtype), jax.ShapeDtypeStruct((size,), jnp.uint8))
    call = functools.partial(
        jax.ffi.ffi_call("nvfp4_moe_w4a16_cpu", outputs),
        activation=options.activation,
        alpha=np.float32(options.alpha),
        beta=np.float32(options.beta),
        limit=np.float32(options.limit),
        activation_scale=options.activation_scale,
        weight_on_input=options.weight_on_input,
        intermediate=np.int64(i),
    )
    return [call(x, *prepared, expert_ids, expert_weights, isa=isa)[0] for isa in isas]


@functools.partial(jax.jit, static_argnames=("n", "modes", "isas", "workspace"))
def _grouped_gemm(
    x, packed, block_scale, global_scale, input_scale, bias, sizes, n, modes, isas, workspace
):
    (m, k), e = x.shape, packed.shape[0]
    target, size = "nvfp4_grouped_gemm_w4a16_cpu", workspace
    if workspace is None:
        size = workspace_bytes_of_rows(target, m, e, n, k, x.dtype.itemsize)
    outputs = (jax.ShapeDtypeStruct((m, n), x.dtype), jax.ShapeDtypeStruct((size,), jnp.uint8))
    operands = (x, packed, block_scale, global_scale, input_scale, bias, sizes)
    call = jax.ffi.ffi_call(target, outputs)
    return [[call(*operands, activation_scale=mode, isa=isa)[0] for isa in isas] for mode in modes]


def grouped_gemm(
    x,
    packed,
    block_scale,
    global_scale,
    input_scale,
    bias,
    sizes,
    mode,
    isa="auto",
    workspace: int | None = None,
):
    """Multiply rows, sorted by group, by canonical weights; return [m, n] in the dtype of x."""
    isas, weight = _together(isa, workspace), _prepare(packed, block_scale)
    others = (global_scale, input_scale, bias, sizes)
    n = packed.shape[1]
    return _grouped_gemm(x, *weight, *others, n, (mode,), isas, workspace)[0][isas.index(isa)]


def grouped_gemm_of_each(
    x, packed, block_scale, *others, modes: tuple[str, ...], workspace: int | None = None
):
    """Multiply once for each of `modes` and each instruction set, in one program.

    `others` are the operands of `grouped_gemm` before the mode. Returns mode -> instruction set ->
    output.
    """
    isas, weight = tuple(present_isas()), _prepare(packed, block_scale)
    outputs = _grouped_gemm(x, *weight, *others, packed.shape[1], modes, isas, workspace)
    return {
        mode: dict(zip(isas, map(np.asarray, each), strict=True))
        for mode, each in zip(modes, outputs, strict=True)
    }


@functools.partial(jax.jit, static_argnames=("k", "isas", "workspace"))
def _transposed_gemm(x, packed, block_scale, global_scale, sizes, k, isas, workspace):
    (m, n), e = x.shape, packed.shape[0]
    target, size = "nvfp4_transposed_gemm_cpu", workspace
    if workspace is None:
        size = workspace_bytes_of_rows(target, m, e, k, n)
    outputs = (jax.ShapeDtypeStruct((m, k), x.dtype), jax.ShapeDtypeStruct((size,), jnp.uint8))
    call = jax.ffi.ffi_call(target, outputs)
    return [call(x, packed, block_scale, global_scale, sizes, isa=isa)[0] for isa in isas]


def transposed_gemm_of_each(x, weight, sizes, workspace: int | None = None):
    """Multiply rows, sorted by group, by transposed weights, with each instruction set.

    Args:
      x: rows ``[m, n]``.
      weight: canonical `NVFP4Tensor` ``[e, n, k]`` with one global scale for each group.
      sizes: int32 ``[e]``.
      workspace: bytes of scratch memory; None (default) for those that the op takes.

    Returns:
      Instruction set -> output ``[m, k]``.
    """
    isas, ready = tuple(present_isas()), _prepare(weight.packed, weight.block_scale)
    scale = weight.global_scale[:, None]
    outputs = _transposed_gemm(x, *ready, scale, sizes, weight.shape[-1], isas, workspace)
    return dict(zip(isas, map(np.asarray, outputs), strict=True))


def quantize(x, global_scale=None, scale_layout="linear", isa="auto"):
    """Quantize rows.

    Returns packed uint8, block_scale e4m3 (with padding if swizzled), and global_scale.
    """
    isas = _together(isa)
    return _quantize(x, global_scale, (scale_layout,), isas)[0][isas.index(isa)]


def quantize_of_each(x, global_scale, scale_layouts: tuple[str, ...]):
    """Quantize once for each layout of scales and each instruction set, in one program.

    Returns layout -> instruction set -> what `quantize` returns.
    """
    isas = tuple(present_isas())
    outputs = _quantize(x, global_scale, scale_layouts, isas)
    return {
        layout: dict(zip(isas, jax.tree.map(np.asarray, each), strict=True))
        for layout, each in zip(scale_layouts, outputs, strict=True)
    }


@functools.partial(jax.jit, static_argnames=("scale_layouts", "isas"))
def _quantize(x, global_scale, scale_layouts, isas):
    return [_quantize_to(layout, x, global_scale, isas) for layout in scale_layouts]


def _quantize_to(scale_layout, x, global_scale, isas):
    m, k = x.shape
    scales = (m, k // 16) if scale_layout == "linear" else (-(-m // 128) * 128, -(-k // 64) * 4)
    outputs = (
        jax.ShapeDtypeStruct((m, k // 2), jnp.uint8),
        jax.ShapeDtypeStruct(scales, jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((), jnp.float32),
        jax.ShapeDtypeStruct((0,), jnp.uint8),
    )
    scale = jnp.zeros(0, jnp.float32) if global_scale is None else global_scale
    call = jax.ffi.ffi_call("nvfp4_quantize_cpu", outputs)
    return [call(x, scale, scale_layout=scale_layout, isa=isa)[:3] for isa in isas]
