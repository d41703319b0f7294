"""Run the suite of attention on the kernel for prefills on Hopper, compiled for a CPU."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.emulation.cuda_emulation import fills_sm90, on_device
from support.kernels.attention_suite import CASES, AttentionSuite, make
from support.kernels.axes import axis

from jax_nvfp4_moe.ops import attention

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

# Sizes [b, t, n, m, s] of 128 channels, and whether the kernel for Hopper computes them.
CHOICES = {
    "prefill": ((1, 2048, 32, 4, 2048), True),
    "piece of a long prompt": ((1, 512, 32, 4, 32768), True),
    "short piece": ((1, 256, 32, 4, 32768), False),  # 64 tiles
    "one head": ((1, 2048, 1, 1, 2048), False),  # 16 tiles
    "decoding": ((64, 1, 32, 4, 1024), False),
    "a few queries of many rows": ((64, 8, 32, 4, 1024), False),  # 64 rows of a key head
    "groups that fill tiles": ((64, 16, 32, 4, 1024), True),
    "groups that do not": ((64, 16, 28, 4, 1024), False),  # 7 heads a key head
    "no keys": ((1, 2048, 32, 4, 0), False),
}


def run_on_hopper(library, q, k, v, *rest, multiprocessors=1, **options):
    """Call the kernel, which needs finite keys and values also where no query sees them."""
    k, v = (np.where(np.isnan(x), np.asarray(300, x.dtype), x) for x in (k, v))
    device = {"multiprocessors": multiprocessors, "forced": "sm90"}
    return on_device(library, attention, "attention_cuda", **device)(q, k, v, *rest, **options)


class TestAttentionOnHopper(AttentionSuite):
    case = axis(*CASES)
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def run(self, library):
        return lambda *operands, **options: run_on_hopper(library, *operands, **options)


@pytest.mark.parametrize("name", ["latent prefill", "eight heads in a tile"])
def test_blocks_share_tiles_of_rows(library, name):
    """Results do not depend on the number of blocks, each of which computes some of the tiles."""
    operands, options = make(name, jnp.dtype("bfloat16")), CASES[name].options
    alone, some, many = (
        run_on_hopper(library, *operands, multiprocessors=count, **options) for count in (1, 3, 20)
    )
    np.testing.assert_array_equal(alone, some)
    np.testing.assert_array_equal(alone, many)


@pytest.mark.parametrize("name", CHOICES)
def test_calls_that_fill_the_device(library, name):
    sizes, chosen = CHOICES[name]
    assert fills_sm90(library, *sizes, 128) == chosen
