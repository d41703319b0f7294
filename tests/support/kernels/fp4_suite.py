"""Test that quantization fused into the first GEMM has the bits of the separate quantizer.

The sums of the first GEMM are exact here, so that both quantize the same values.
"""

import numpy as np
import pytest
from support.kernels import kernel_cases as cases
from support.kernels.float64_layer import E4M3, Options, random_layer
from support.kernels.kernel_suite import exact_rows, exact_weight

# tokens, experts, hidden, intermediate
FUSED_CASES = {
    "smallest": (3, 1, 16, 16),
    "fills_no_tile": (9, 3, 80, 48),
    "tiles": (140, 2, 144, 144),
}


def _make(case, activation):
    """Return a layer whose second GEMM copies single elements of the activations."""
    t, e, h, i = FUSED_CASES[case]
    rng, options = np.random.default_rng(t), Options(activation, activation_scale="static")
    parts, g = 2 if options.gated else 1, np.float32(2.0**-5)
    layer = random_layer(rng, e, h, i, gated=options.gated, bias=True)
    packed, block_scale = exact_weight(rng, e, parts * i, h)
    ones = np.zeros((e, h, i), np.uint8)
    ones[:, np.arange(min(h, i)), np.arange(min(h, i))] = 2  # the code of 1
    layer = layer._replace(
        gate_up_packed=packed,
        gate_up_block_scale=block_scale,
        gate_up_global_scale=np.full((e, parts), 2.0**-6, np.float32),
        gate_up_input_scale=np.full(e, g),
        down_packed=ones[..., 0::2] | ones[..., 1::2] << 4,
        down_block_scale=np.ones((e, h, i // 16), E4M3),
        down_global_scale=np.ones((e, 1), np.float32),
        down_bias=np.zeros((0, 0), np.float32),
    )
    x = exact_rows(rng, t, h, g, cases.BF16)
    ids = rng.integers(0, e, (t, 1)).astype(np.int32)
    return cases.LayerCall(x, layer, ids, np.ones((t, 1), np.float32), options)


class FusedQuantizationSuite:
    """Test kernels that quantize inside the first GEMM.

    `run` calls such a kernel. `sixteen_bits` calls a 16-bit engine, which quantizes in a kernel of
    its own.
    """

    @pytest.mark.parametrize("case", FUSED_CASES)
    @pytest.mark.parametrize("activation", ["silu", "relu2", "gelu"])
    def test_fused_quantization_is_that_of_the_quantizer(self, run, sixteen_bits, case, activation):
        call = _make(case, activation)
        actual, want = np.asarray(run(call)), np.asarray(sixteen_bits(call))
        assert np.unique(actual.astype(np.float32)).size > 8
        np.testing.assert_array_equal(actual.view(np.uint16), want.view(np.uint16))
