"""Test in which dtype the weight of a router is kept."""

import jax.numpy as jnp
import pytest
from support.files.given import CHECKPOINTS

from jax_nvfp4_moe.checkpoint.opening import open_checkpoint
from jax_nvfp4_moe.models.loading import find_model
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.scheme import Target

CPU, GPU = Target("cpu"), Target("cuda", (9, 0))
BF16, F32 = "qwen3moe-modelopt-w4a16", "ernie4_5_moe-modelopt-w4a16"  # dtypes of their routers


@pytest.mark.parametrize(
    ("folder", "target", "dtype", "expected"),
    [
        (BF16, GPU, jnp.bfloat16, jnp.bfloat16),
        (BF16, GPU, jnp.float16, jnp.float32),
        (BF16, GPU, jnp.float32, jnp.float32),
        (BF16, CPU, jnp.bfloat16, jnp.float32),
        (F32, GPU, jnp.bfloat16, jnp.float32),
    ],
)
def test_a_router_loses_no_bits(folder, target, dtype, expected):
    """A GPU multiplies bfloat16 weights exactly, and reads half the bytes."""
    with open_checkpoint(CHECKPOINTS / folder) as checkpoint:
        model = find_model(checkpoint, Settings(target, dtype=dtype)).model
    routers = [
        layer.mlp.token_router.weight for layer in model.layers if hasattr(layer.mlp, "experts")
    ]
    assert routers
    assert {router.get_value().dtype for router in routers} == {jnp.dtype(expected)}
