"""The public ops: each checks its arguments, chooses a plan and lowers to one call.

The leading axes of activations, such as rows and tokens, may have no entries. The results then have
that shape, a state or a cache stays as it is, and no kernel runs.
"""

from jax_nvfp4_moe.ops.causal_attention.op import attention
from jax_nvfp4_moe.ops.chain import chain_calls
from jax_nvfp4_moe.ops.convolution import causal_convolution
from jax_nvfp4_moe.ops.gating import activate, add_gated, add_linear_gated, gate_heads
from jax_nvfp4_moe.ops.heads import prepare_heads
from jax_nvfp4_moe.ops.latents import prepare_latents
from jax_nvfp4_moe.ops.moe import moe_mlp
from jax_nvfp4_moe.ops.norms import add_rms_norm
from jax_nvfp4_moe.ops.preparation import prepare
from jax_nvfp4_moe.ops.products import grouped_gemm, linear
from jax_nvfp4_moe.ops.quantize import quantize_nvfp4
from jax_nvfp4_moe.ops.recurrent.delta_rule import gated_delta_rule
from jax_nvfp4_moe.ops.recurrent.mamba2_scan import mamba2_scan
from jax_nvfp4_moe.ops.recurrent.steps import gated_delta_step, kimi_delta_step, mamba2_step
from jax_nvfp4_moe.ops.routing import route

__all__ = [
    "activate",
    "add_gated",
    "add_linear_gated",
    "add_rms_norm",
    "attention",
    "causal_convolution",
    "chain_calls",
    "gate_heads",
    "gated_delta_rule",
    "gated_delta_step",
    "grouped_gemm",
    "kimi_delta_step",
    "linear",
    "mamba2_scan",
    "mamba2_step",
    "moe_mlp",
    "prepare",
    "prepare_heads",
    "prepare_latents",
    "quantize_nvfp4",
    "route",
]
