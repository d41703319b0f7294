"""Run the package under ``jax_enable_x64`` and strict promotion.

Integers and Python numbers are then 64 bits wide. Most tests only compute shapes, because a wrong
dtype raises an error while a program is traced.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.given import CHECKPOINTS
from support.models.architecture import EACH_MIXER

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.nn.experts import routed_experts
from jax_nvfp4_moe.numerics.rounding import ALGORITHMS, quantize_weight
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.parallel import DISPATCHES
from jax_nvfp4_moe.testing import random_moe_params

FOLDERS = sorted(path.parent.name for path in CHECKPOINTS.glob("*/model.safetensors"))
BACKENDS = [None, "reference"]
SIZES = {"num_experts": 8, "hidden": 64, "intermediate": 32}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_architecture(folder):
    """What a model does without a cache depends on its mixers alone."""
    model = nvfp4.load_model(CHECKPOINTS / folder)
    ids, lengths = np.ones((2, 8), np.int32), np.array([8, 3], np.int32)
    cache = jax.eval_shape(lambda: model.init_cache(2, 16))
    logits, grown = jax.eval_shape(lambda cache: model(ids, cache, lengths=lengths), cache)
    assert logits.dtype == jnp.float32
    if folder in EACH_MIXER:
        alone = jax.eval_shape(lambda: model(ids, lengths=lengths))
        assert alone.dtype == jnp.float32
    assert jax.tree.map(lambda x: x.dtype, grown) == jax.tree.map(lambda x: x.dtype, cache)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_generate(temperature):
    model = nvfp4.load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16")
    sampling = {"temperature": temperature, "top_k": 5, "top_p": 0.9, "key": jax.random.key(0)}
    ids = np.array([[5, 6, 7]])
    wide = nvfp4.generate(model, ids, max_new_tokens=4, **sampling)
    with jax.enable_x64(False):
        np.testing.assert_array_equal(
            wide, nvfp4.generate(model, ids, max_new_tokens=4, **sampling)
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", nvfp4.Scheme)
def test_a_layer_and_its_gradient(backend, scheme):
    params = jax.eval_shape(lambda: random_moe_params(jax.random.key(0), **SIZES))
    x, ids, weights = map(
        jnp.asarray,
        (np.ones((3, 64), jnp.bfloat16), np.zeros((3, 2), np.int32), np.ones((3, 2), np.float32)),
    )
    given = {"expert_ids": ids, "expert_weights": weights}
    run = functools.partial(nvfp4.ops.moe_mlp, scheme=scheme, backend=backend, **given)
    assert jax.eval_shape(run, x, params).dtype == jnp.bfloat16
    bar = jax.eval_shape(jax.grad(lambda x, params: run(x, params).sum()), x, params)
    assert bar.dtype == jnp.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_and_their_gradients(backend):
    shapes = np.ones((4, 48, 64), np.float32), np.ones((48, 64), np.float32)
    x, sizes = np.ones((5, 64), jnp.bfloat16), np.array([1, 0, 3, 1], np.int32)
    runs = (
        lambda x, weight: nvfp4.ops.grouped_gemm(x, weight, sizes, backend=backend),
        lambda x, weight: nvfp4.ops.linear(x, weight, backend=backend),
    )
    for run, full in zip(runs, shapes, strict=True):
        given = x, jax.eval_shape(nvfp4.quantize, full)
        assert jax.eval_shape(run, *given).dtype == jnp.bfloat16
        bar = jax.eval_shape(jax.grad(lambda *given, run=run: run(*given).sum()), *given)
        assert bar.dtype == jnp.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantize_and_route(backend):
    packed = nvfp4.ops.quantize_nvfp4(jnp.ones((3, 64), jnp.bfloat16), backend=backend)
    assert packed.global_scale.dtype == jnp.float32
    ids, weights = jax.eval_shape(lambda: nvfp4.ops.route(Router(2), jnp.ones((3, 8), jnp.float32)))
    assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounding_of_weights(algorithm):
    x, ones = np.ones((4, 32), np.float32), np.ones(32, np.float32)
    importance = ones if ALGORITHMS[algorithm].needs_importance else None
    found = jax.eval_shape(
        functools.partial(quantize_weight, algorithm=algorithm), x, importance=importance
    )
    assert found[2].dtype == jnp.float32


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_block_over_a_mesh(dispatch, monkeypatch):
    # "ragged" runs on GPUs alone.
    monkeypatch.setattr(routed_experts, "check_platform", lambda *_: None)
    mesh = jax.make_mesh((1, 1), ("expert", "tensor"))
    moe = nvfp4.NVFP4MoE(*SIZES.values(), top_k=2, mesh=mesh, dispatch=dispatch, rngs=nnx.Rngs(0))
    assert jax.eval_shape(moe, jnp.ones((3, 64), jnp.bfloat16)).dtype == jnp.bfloat16


def test_modules():
    linear = nvfp4.NVFP4Linear(64, 32, use_bias=True, rngs=nnx.Rngs(0))
    assert linear(jnp.ones((2, 64), jnp.bfloat16)).dtype == jnp.bfloat16
