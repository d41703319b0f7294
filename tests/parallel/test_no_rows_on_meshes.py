"""Test that layers and models over a mesh of eight CPU devices take no rows and few tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.devices.host_devices import BOUND, make_mesh
from support.files.given import CHECKPOINTS
from support.files.resized import write_resized
from support.models.mixer_cases import TWO_LAYERS

from jax_nvfp4_moe import NVFP4MoE, generate, load_model
from jax_nvfp4_moe.nn.experts import routed_experts

pytestmark = pytest.mark.eight_devices
SIZES = {"top_k": 2, "dtype": jnp.float32}


@pytest.mark.parametrize(
    ("dispatch", "tokens"),
    # XLA for CPUs has no collective for "ragged" with tokens.
    [
        ("psum", 0),
        ("psum", 5),
        ("all_to_all", 0),
        ("all_to_all", 1),
        ("all_to_all", 5),
        ("ragged", 0),
    ],
)
def test_a_layer_of_few_tokens(dispatch, tokens, monkeypatch):
    monkeypatch.setattr(routed_experts, "check_platform", lambda *_: None)
    mesh = make_mesh((8, 1))
    alone = NVFP4MoE(8, 64, 32, rngs=nnx.Rngs(0), **SIZES)
    over = NVFP4MoE(8, 64, 32, rngs=nnx.Rngs(0), mesh=mesh, dispatch=dispatch, **SIZES)
    x = jax.random.normal(jax.random.key(1), (tokens, 64))
    run = jax.jit(lambda moe, x: moe(x))
    y = run(over, x)
    assert (y.shape, y.dtype) == ((tokens, 64), jnp.float32)
    expected = np.asarray(run(alone, x))
    assert np.abs(y - expected).max(initial=0) <= BOUND * np.abs(expected).max(initial=0)


def check_model(model):
    @jax.jit
    def read(model):
        found = {}
        for shape in ((0, 5), (2, 0)):
            ids = jnp.zeros(shape, jnp.int32)
            found[shape] = model(ids), *model(ids, model.init_cache(shape[0], 8))
        return found

    for shape, (logits, again, cache) in read(model).items():
        assert logits.shape == again.shape == (*shape, model.config.vocab_size)
        assert cache.lengths.shape == shape[:1]
    assert generate(model, jnp.zeros((0, 5), jnp.int32), max_new_tokens=2).shape == (0, 2)


@pytest.mark.parametrize(
    ("folder", "shape", "dispatch"),
    [
        ("qwen3moe-modelopt-w4a16", (2, 4), "psum"),
        ("qwen3moe-modelopt-w4a16", (8, 1), "all_to_all"),
        ("deepseekv3-modelopt-w4a4", (4, 2), "psum"),
    ],
)
def test_models(folder, shape, dispatch):
    check_model(load_model(CHECKPOINTS / folder, mesh=make_mesh(shape), dispatch=dispatch))


def test_a_delta_net_sharded_by_heads(tmp_path):
    name, changes = TWO_LAYERS
    write_resized(CHECKPOINTS / name, tmp_path, **changes)
    check_model(load_model(tmp_path, mesh=make_mesh((2, 4))))
