"""Call the CUDA extension's FFI targets, operand by operand, on arrays of `float64_layer`."""

import jax
import jax.numpy as jnp
import numpy as np
from support.kernels.float64_layer import Layer, Options

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.backends.launch_facts import workspace_bytes
from jax_nvfp4_moe.numerics.layouts import find_layout, to_layout
from jax_nvfp4_moe.ops.quantize import QUANTIZE_CUDA

# Any GPU runs these targets. The others need compute capability 10.x or 12.x, or a build that
# emulates it.
MOE_TARGETS = ("w4a16_sm80", "w4a16_sm90")
# The other targets use "mma_64x64".
_LAYOUTS = {"w4a4_sm100": "fp4_128x64", "w4a4_sm120": "fp4_64x64"}


def register():
    """Register the targets, or raise an error that says why they cannot be used."""
    if reason := _ffi.why_unavailable("_nvfp4_cuda"):
        raise RuntimeError(reason)


def prepare(layer: Layer, layout="mma_64x64", *, gated):
    """Put the weights of a canonical layer into the layouts of the CUDA kernels."""
    of_down = find_layout(layout)
    of_gate_up = find_layout((of_down.of_halves or layout) if gated else layout)
    gate_up = to_layout(layer.gate_up_packed, layer.gate_up_block_scale, of_gate_up)
    down = to_layout(layer.down_packed, layer.down_block_scale, of_down)
    return layer._replace(
        gate_up_packed=gate_up[0],
        gate_up_block_scale=gate_up[1],
        down_packed=down[0],
        down_block_scale=down[1],
    )


def moe(x, layer: Layer, expert_ids, expert_weights, options: Options, suffix="w4a16_sm90"):
    """Run an expert layer on canonical weights, and return [t, h] in the dtype of x."""
    prepared = prepare(layer, _LAYOUTS.get(suffix, "mma_64x64"), gated=options.gated)
    i = layer.down_packed.shape[2] * 2
    return moe_prepared(x, prepared, expert_ids, expert_weights, options, i, suffix)


def moe_prepared(
    x, layer: Layer, expert_ids, expert_weights, options: Options, i, suffix="w4a16_sm90"
):
    """Run an expert layer on weights from `prepare`; i is the intermediate size."""
    target, operands, outputs, attributes = moe_call(
        x, layer, expert_ids, expert_weights, options, i, suffix
    )
    return jax.ffi.ffi_call(target, outputs)(*operands, **attributes)[0]


def moe_call(x, layer: Layer, expert_ids, expert_weights, options: Options, i, suffix):
    """Return the target of an expert layer, its operands, its results and its attributes."""
    (t, h), top_k = x.shape, expert_ids.shape[1]
    e = layer.down_packed.shape[0]
    target, sizes = f"nvfp4_moe_{suffix}", (t, top_k, e, h, i, options.gated, x.dtype.itemsize)
    workspace = workspace_bytes(target, *sizes)
    attributes = {
        "activation": options.activation,
        "alpha": np.float32(options.alpha),
        "beta": np.float32(options.beta),
        "limit": np.float32(options.limit),
        "activation_scale": options.activation_scale,
        "weight_on_input": options.weight_on_input,
        "intermediate": np.int64(i),
    }
    operands = x, *layer, expert_ids, expert_weights
    return target, operands, _outputs((t, h), x.dtype, workspace), attributes


def _outputs(shape, dtype, workspace):
    return (
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    )


def grouped_gemm(
    x, packed, block_scale, global_scale, input_scale, bias, sizes, mode, suffix="w4a16_sm90"
):
    """Multiply rows, sorted by group, by canonical weights; return [m, n] in the dtype of x."""
    operands = x, packed, block_scale, global_scale, input_scale, bias, sizes
    target, operands, outputs, attributes = grouped_gemm_call(operands, mode, suffix)
    return jax.ffi.ffi_call(target, outputs)(*operands, **attributes)[0]


def grouped_gemm_call(operands, mode, suffix):
    """Return the target of a grouped GEMM, its operands, its results and its attributes."""
    x, packed, block_scale, *others = operands
    (m, k), (e, n, _) = x.shape, packed.shape
    layout = find_layout(_LAYOUTS.get(suffix, "mma_64x64"))
    packed, block_scale = to_layout(packed, block_scale, layout)
    target = f"nvfp4_grouped_gemm_{suffix}"
    workspace = workspace_bytes(target, m, e, n, k, x.dtype.itemsize)
    operands = x, packed, block_scale, *others
    return target, operands, _outputs((m, n), x.dtype, workspace), {"activation_scale": mode}


def quantize(x, global_scale=None, scale_layout="linear"):
    """Quantize rows.

    Returns packed uint8, block_scale e4m3 (with padding if swizzled), and global_scale.
    """
    return QUANTIZE_CUDA.lower["quantize_nvfp4"](x, global_scale, scale_layout)


def graphs_hold_custom_call(dump) -> bool:
    """Return whether XLA put a custom call into a command buffer, which is a CUDA graph.

    This function reads the thunk sequence that XLA writes into the folder `dump` under
    ``--xla_dump_to``. The commands of a command buffer are indented below its line.
    """
    inside = False
    for path in dump.glob("*thunk_sequence*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith(" "):
                inside = "kCommandBuffer" in line
            elif inside and "kCustomCall" in line:
                return True
    return False
