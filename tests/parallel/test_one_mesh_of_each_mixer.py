"""Test one mesh of models whose shards need more than their rows of a matrix.

The slow tests of this folder cover all models, meshes and operations. These few run by default, so
that a fault in what mixers alone divide is seen at once.
"""

import jax.numpy as jnp
import pytest
from host_devices import BOUND, IDS, call, difference, make_mesh
from unquantized import dequantized

from jax_nvfp4_moe import load_model

pytestmark = pytest.mark.eight_devices

FOLDERS = (
    "olmoe-bias-modelopt-w4a16",  # norms over the heads of all shards
    "lfm2_moe-modelopt-w4a16",  # the channels of a convolution, and of its three inputs
    "nemotron_h-modelopt-w4a16",  # channels of x, B and C, each in parts of its own
    "qwen3_next-modelopt-w4a16",  # channels of queries, keys and values
)


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_equal_those_of_one_device(tmp_path, name):
    """The weights are not quantized: blocks of 16 do not divide the sizes of these models."""
    folder = dequantized(name, tmp_path)
    one = load_model(folder, dtype=jnp.float32)
    cut = load_model(folder, dtype=jnp.float32, mesh=make_mesh((1, 2)))
    ids = IDS % one.config.vocab_size
    assert difference(call(cut, ids), call(one, ids)) <= BOUND
