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
from given import CHECKPOINTS

import jax_nvfp4_moe as nvfp4
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
    model = nvfp4.load_model(CHECKPOINTS / folder)
    ids, lengths = jnp.ones((2, 8), jnp.int32), jnp.array([8, 3], jnp.int32)
    cache = model.init_cache(2, 16)
    alone = jax.eval_shape(lambda: model(ids, lengths=lengths))
    logits, grown = jax.eval_shape(lambda: model(ids, cache, lengths=lengths))
    assert alone.dtype == logits.dtype == jnp.float32
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
    params = random_moe_params(jax.random.key(0), **SIZES)
    how = {"scheme": scheme, "backend": backend}
    run = functools.partial(nvfp4.ops.moe_mlp, params=params, **how)
    x, ids = jnp.ones((3, 64), jnp.bfloat16), jnp.zeros((3, 2), jnp.int32)
    weights = jnp.ones((3, 2), jnp.float32)
    given = {"expert_ids": ids, "expert_weights": weights}
    assert jax.eval_shape(lambda: run(x, **given)).dtype == jnp.bfloat16
    bar = jax.eval_shape(jax.grad(lambda x: run(x, **given).sum()), x)
    assert bar.dtype == jnp.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_and_their_gradients(backend):
    weight = nvfp4.quantize(jnp.ones((4, 48, 64), jnp.float32))
    one = nvfp4.quantize(jnp.ones((48, 64), jnp.float32))
    x, sizes = jnp.ones((5, 64), jnp.bfloat16), jnp.array([1, 0, 3, 1], jnp.int32)
    runs = (
        lambda x: nvfp4.ops.grouped_gemm(x, weight, sizes, backend=backend),
        lambda x: nvfp4.ops.linear(x, one, backend=backend),
    )
    for run in runs:
        assert jax.eval_shape(run, x).dtype == jnp.bfloat16
        assert jax.eval_shape(jax.grad(lambda x, run=run: run(x).sum()), x).dtype == jnp.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantize_and_route(backend):
    packed = nvfp4.ops.quantize_nvfp4(jnp.ones((3, 64), jnp.bfloat16), backend=backend)
    assert packed.global_scale.dtype == jnp.float32
    ids, weights = jax.eval_shape(lambda: nvfp4.ops.route(Router(2), jnp.ones((3, 8), jnp.float32)))
    assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounding_of_weights(algorithm):
    x = jax.random.normal(jax.random.key(0), (4, 32), jnp.float32)
    importance = jnp.ones(32, jnp.float32) if ALGORITHMS[algorithm].needs_importance else None
    found = quantize_weight(x, algorithm=algorithm, importance=importance)
    assert found[2].dtype == jnp.float32


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_block_over_a_mesh(dispatch):
    mesh = jax.make_mesh((1, 1), ("expert", "tensor"))
    moe = nvfp4.NVFP4MoE(*SIZES.values(), top_k=2, mesh=mesh, dispatch=dispatch, rngs=nnx.Rngs(0))
    assert jax.eval_shape(moe, jnp.ones((3, 64), jnp.bfloat16)).dtype == jnp.bfloat16


def test_modules():
    linear = nvfp4.NVFP4Linear(64, 32, use_bias=True, rngs=nnx.Rngs(0))
    assert linear(jnp.ones((2, 64), jnp.bfloat16)).dtype == jnp.bfloat16
