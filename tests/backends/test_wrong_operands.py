"""Test the messages of FFI targets for wrong operands: each names the operand and what it expects.

The ops check their arguments before. These tests call the CPU targets of NVFP4 weights directly.
Those of GPUs have the same tables of operands.
"""

import jax
import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn
from support.extensions import cpu_calls

T, H, E, INNER, K = 3, 80, 4, 48, 2  # tokens, sizes and experts of the layer
M, N = 5, 72  # rows and outputs of the grouped GEMM
F32, S32, U8, E4M3 = np.float32, np.int32, np.uint8, float8_e4m3fn

# Target -> the shapes and dtypes of its operands and results by name, the number of its operands,
# and its attributes.
TARGETS = {
    "nvfp4_moe_w4a16_cpu": (
        {
            "x": ((T, H), bfloat16),
            "gate_up_packed": ((E, 2 * INNER, H // 2), U8),
            "gate_up_block_scale": ((E, 2 * INNER, H // 16), E4M3),
            "gate_up_global_scale": ((E, 2), F32),
            "gate_up_input_scale": ((E,), F32),
            "gate_up_bias": ((E, 2 * INNER), F32),
            "down_packed": ((E, H, INNER // 2), U8),
            "down_block_scale": ((E, H, INNER // 16), E4M3),
            "down_global_scale": ((E, 1), F32),
            "down_input_scale": ((E,), F32),
            "down_bias": ((E, H), F32),
            "expert_ids": ((T, K), S32),
            "expert_weights": ((T, K), F32),
            "y": ((T, H), bfloat16),
            "workspace": ((1 << 16,), U8),
        },
        13,
        {
            "activation": "silu",
            "alpha": F32(1),
            "beta": F32(0),
            "limit": F32(np.inf),
            "activation_scale": "static",
            "weight_on_input": False,
            "intermediate": np.int64(INNER),
        },
    ),
    "nvfp4_grouped_gemm_w4a16_cpu": (
        {
            "x": ((M, H), bfloat16),
            "packed": ((E, 80, H // 2), U8),  # the layout pads 72 rows to 80
            "block_scale": ((E, 80, H // 16), E4M3),
            "global_scale": ((E, 1), F32),
            "input_scale": ((E,), F32),
            "bias": ((E, N), F32),
            "group_sizes": ((E,), S32),
            "y": ((M, N), bfloat16),
            "workspace": ((1 << 16,), U8),
        },
        7,
        {"activation_scale": "static"},
    ),
    "nvfp4_transposed_gemm_cpu": (
        {
            "x": ((M, N), bfloat16),
            "packed": ((E, 80, H // 2), U8),
            "block_scale": ((E, 80, H // 16), E4M3),
            "global_scale": ((E, 1), F32),
            "group_sizes": ((E,), S32),
            "y": ((M, H), bfloat16),
            "workspace": ((1 << 16,), U8),
        },
        5,
        {},
    ),
    "nvfp4_quantize_cpu": (
        {
            "x": ((M, H), F32),
            "global_scale": ((), F32),
            "packed": ((M, H // 2), U8),
            "block_scale": ((128, 8), E4M3),
            "used_scale": ((), F32),
            "workspace": ((0,), U8),
        },
        2,
        {"scale_layout": "swizzle_128x4"},
    ),
}
MOE, GEMM, TRANSPOSED, QUANTIZER = TARGETS


def run(target, changes):
    """Call a target with other buffers, or other attributes, than its own; None leaves one out."""
    buffers, count, attributes = TARGETS[target]
    own = {key: value for key, value in changes.items() if key in attributes}
    named = {**buffers, **changes}
    buffers = [named[name] for name in buffers]
    operands = [np.zeros(*each) for each in buffers[:count] if each is not None]
    results = [jax.ShapeDtypeStruct(*each) for each in buffers[count:] if each is not None]
    call = jax.ffi.ffi_call(target, results)
    with jax.default_device(jax.devices("cpu")[0]):
        jax.block_until_ready(call(*operands, **{**attributes, **own}))


@pytest.fixture(scope="module", autouse=True)
def _targets():
    cpu_calls.present_isas()


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        *((target, {}) for target in TARGETS),
        (MOE, {"gate_up_bias": ((0, 0), F32)}),
        (MOE, {"gate_up_input_scale": ((0,), F32), "activation_scale": "none"}),
        (GEMM, {"global_scale": ((E, N), F32)}),
        (TRANSPOSED, {"x": ((M, N), F32), "y": ((M, H), F32)}),
        (QUANTIZER, {"global_scale": ((0,), F32)}),
        (QUANTIZER, {"block_scale": ((M, H // 16), E4M3), "scale_layout": "linear"}),
    ],
)
def test_right_operands_are_taken(target, changes):
    run(target, changes)


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        (MOE, {"x": ((T, H), np.int8)}, "x: expected bfloat16, float16 or float32"),
        (MOE, {"x": ((T, H, 1), bfloat16)}, "x [t, h]: expected 2 dimensions, got [3, 80, 1]"),
        (MOE, {"x": ((T, 81), bfloat16)}, "h (x): expected a positive multiple of 16, got 81"),
        (
            MOE,
            {"gate_up_packed": ((E, 97, 40), U8)},
            "gate_up_packed [e, n1, h/2] in tiles of 16 x 16: expected [4, 96, 40], got",
        ),
        (
            MOE,
            {"down_block_scale": ((E, H, 4), E4M3)},
            "down_block_scale [e, h, i/16] in tiles of 16 x 16: expected [4, 80, 3], got",
        ),
        (
            MOE,
            {"gate_up_global_scale": ((E, 1), F32)},
            "gate_up_global_scale [e, parts]: expected [4, 2], got [4, 1]",
        ),
        (
            MOE,
            {"down_input_scale": ((0,), F32)},
            "down_input_scale [e]: expected [4], got [0]",
        ),
        (
            MOE,
            {"gate_up_bias": ((E, 96, 1), F32)},
            "gate_up_bias [e, n1]: expected [4, 96], got [4, 96, 1]",
        ),
        (MOE, {"expert_ids": ((T, K), F32)}, "expert_ids: expected int32, got float32"),
        (MOE, {"y": ((T, H), F32)}, "y: expected bfloat16, got float32"),
        (MOE, {"workspace": ((1 << 16,), F32)}, "workspace: expected uint8, got float32"),
        (MOE, {"intermediate": np.int64(40)}, "i (intermediate): expected a positive multiple"),
        (MOE, {"activation": "relu2"}, "gate_up_packed [e, n1, h/2] in tiles of 16 x 16"),
        (MOE, {"activation": "mish"}, "activation: expected one of silu, gelu, "),
        (MOE, {"activation_scale": "row"}, "expected one of none, static, token, got row"),
        (
            MOE,
            {"expert_weights": None},
            "call: expected 13 operands and 2 results, got 12 operands and 2 results",
        ),
        (
            GEMM,
            {"packed": ((E, N, 40), U8)},
            "packed [e, n, k/2] in tiles of 16 x 16: expected [4, 80, 40], got [4, 72, 40]",
        ),
        (
            GEMM,
            {"global_scale": ((E, 3), F32)},
            "parts (global_scale): expected 1, 2 or n, which is 72, got 3",
        ),
        (GEMM, {"group_sizes": ((0,), S32)}, "group_sizes [e]: expected [4], got [0]"),
        (GEMM, {"input_scale": ((0,), F32)}, "input_scale [e]: expected [4], got [0]"),
        (GEMM, {"bias": ((E, N + 1), F32)}, "bias [e, n]: expected [4, 72], got [4, 73]"),
        (GEMM, {"workspace": ((64,), U8)}, "workspace [bytes]: expected at least"),
        (
            TRANSPOSED,
            {"x": ((M, 81), bfloat16)},
            "packed [e, n, k/2] in tiles of 16 x 16: expected [4, 96, 40], got [4, 80, 40]",
        ),
        (TRANSPOSED, {"x": ((M, N), np.int8)}, "x: expected bfloat16, float16 or float32"),
        (TRANSPOSED, {"y": ((M, 81), bfloat16)}, "k (y): expected a positive multiple of 16"),
        (
            TRANSPOSED,
            {"global_scale": ((E, 2), F32)},
            "global_scale [e, 1]: expected [4, 1], got [4, 2]",
        ),
        (TRANSPOSED, {"group_sizes": ((0,), S32)}, "group_sizes [e]: expected [4], got [0]"),
        (TRANSPOSED, {"workspace": ((64,), U8)}, "workspace [bytes]: expected at least"),
        (QUANTIZER, {"x": ((M, 72), F32)}, "k (x): expected a positive multiple of 16, got 72"),
        (
            QUANTIZER,
            {"block_scale": ((M, 5), E4M3)},
            "block_scale [m, k/16] in tiles of 128 x 64: expected [128, 8], got [5, 5]",
        ),
        (QUANTIZER, {"global_scale": ((1,), F32)}, "global_scale []: expected [], got [1]"),
        (QUANTIZER, {"scale_layout": "rows"}, "scale_layout: expected one of linear, swizzle"),
    ],
)
def test_the_message_names_the_operand(target, changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        run(target, changes)
    assert message in str(raised.value)
