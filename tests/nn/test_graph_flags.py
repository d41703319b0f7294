"""Test modules without Flax's graphs: Flax's own flags make them plain trees."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.files.given import CHECKPOINTS
from support.files.unquantized import SMALL

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.inference.balance import count_experts, place_model
from jax_nvfp4_moe.parallel.placement import balance_experts
from jax_nvfp4_moe.quantization.layer_errors import measure_errors

OFF = [("mode",), ("updates",), ("mode", "updates")]
X = jax.random.normal(jax.random.key(0), (3, 64), jnp.float32)
IDS = np.arange(8, dtype=np.int32)[None]


@pytest.fixture(params=OFF, ids="-".join)
def _graphs_off(request):
    """Turn the flags off that ``config.update("nnx_graph_mode", False)`` sets."""
    flags = {"mode": nnx.set_graph_mode, "updates": nnx.set_graph_updates}
    with contextlib.ExitStack() as stack:
        for name in request.param:
            stack.enter_context(flags[name](False))
        yield


pytestmark = pytest.mark.usefixtures("_graphs_off")


def make(seed=0):
    shared = nvfp4.NVFP4Linear(64, 64, use_bias=True, rngs=nnx.Rngs(seed))
    correction = {"router_bias": jnp.zeros(8), "shared_experts": shared}
    return nvfp4.NVFP4MoE(8, 64, 32, top_k=2, rngs=nnx.Rngs(seed), **correction, dtype=X.dtype)


def test_a_block_is_made_called_compiled_and_split():
    moe = make()
    y = jax.jit(lambda moe, x: moe(x))(moe, X)
    np.testing.assert_array_equal(nnx.jit(lambda moe, x: moe(x))(moe, X), y)
    graph, state = nnx.split(moe)
    np.testing.assert_array_equal(jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, X), y)
    assert moe(X).shape == X.shape
    assert nvfp4.explain(moe).backend == moe.experts.plan.backend.name
    shapes = nnx.eval_shape(make)
    assert jax.tree.structure(nnx.state(shapes)) == jax.tree.structure(state)


def test_a_step_of_training_changes_parameters_alone():
    """Without graphs, Flax differentiates whole arguments, so the parameters are split off."""
    moe = make()
    optimizer = nnx.Optimizer(moe, optax.sgd(0.1), wrt=nnx.Param)
    packed = np.asarray(moe.experts.params.get_value().down.packed)

    @nnx.jit
    def step(moe, optimizer, x):
        graph, params, rest = nnx.split(moe, nnx.Param, ...)

        def loss(params):
            return jnp.square(nnx.merge(graph, params, rest)(x)).sum()

        value, gradients = jax.value_and_grad(loss)(params)
        optimizer.update(moe, gradients)
        return value

    losses = [float(step(moe, optimizer, X)) for _ in range(2)]
    assert losses[1] < losses[0]
    np.testing.assert_array_equal(moe.experts.params.get_value().down.packed, packed)


def test_a_model_generates_and_counts_its_experts(tmp_path):
    model = nvfp4.load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16")
    tokens = nvfp4.generate(model, IDS, max_new_tokens=3)
    np.testing.assert_array_equal(
        np.stack(list(nvfp4.stream(model, IDS, max_new_tokens=3)), axis=1), tokens
    )
    load = count_experts(model, IDS)
    assert (load.sum(axis=1) == IDS.size * model.config.router.top_k).all()
    place_model(model, [balance_experts(row, 2, 20) for row in load])
    assert nvfp4.generate(model, IDS, max_new_tokens=3).shape == tokens.shape
    nvfp4.save(tmp_path / "m", model)
    restored = nvfp4.restore(tmp_path / "m", nnx.eval_shape(lambda: model))
    run = jax.jit(lambda model: model(IDS))
    np.testing.assert_array_equal(run(restored), run(model))


def test_a_model_is_quantized_and_measured(tmp_path):
    nvfp4.quantize_model(SMALL / "source", tmp_path / "q", token_ids=IDS[0], window=8)
    assert measure_errors(tmp_path / "q", IDS[0])
