"""Run the suite of latent attention on its CUDA kernel, compiled for a CPU."""

import pytest
from support.emulation.cuda_emulation import on_device
from support.kernels.axes import axis
from support.kernels.latent_attention_suite import CASES, LatentAttentionSuite

from jax_nvfp4_moe.ops import attention

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

# Shared memory of a block: that of 8.6, 8.9 and 12.x, of 8.0, of 10.x, and of 9.0. The kernel has
# tiles of up to 16, 32 and 64 rows there, and Hopper has another kernel for 64 rows.
SHARED_BYTES = {
    "16 rows": 99 << 10,
    "32 rows": 163 << 10,
    "64 rows": 227 << 10,
    "Hopper": 227 << 10,
}


class TestLatentAttention(LatentAttentionSuite):
    case = axis(*CASES)
    tile = axis(*SHARED_BYTES)

    @pytest.fixture
    def dtype(self, case, tile):
        """Take turns: a GPU runs each case in both types."""
        index = list(CASES).index(case) + list(SHARED_BYTES).index(tile)
        return ("bfloat16", "float16")[index % 2]

    @pytest.fixture
    def run(self, library, tile):
        device = {
            "shared_bytes": SHARED_BYTES[tile],
            "capability": 9 if tile == "Hopper" else 0,
        }
        run = on_device(library, attention, "latent_attention_cuda", **device)
        return lambda q, k, positions, **options: run(q, k, None, positions, **options)
