"""Test whole models inside a user's `jax.shard_map`, and on a user's mesh with Explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.devices.host_devices import difference, make_mesh
from support.files.given import CHECKPOINTS

from jax_nvfp4_moe import load_model

pytestmark = pytest.mark.eight_devices

# Mixers of every kind: latent attention that chooses keys, Mamba-2, a convolution, delta rules of
# both kinds, compressed keys, blocks of keys, and windows with sinks.
QUICK = ("glm_moe_dsa", "nemotron_h", "lfm2_moe")
OTHERS = ("qwen3_next", "kimi_linear", "deepseek_v4", "minimax_m3", "gpt_oss", "gemma4", "step3p7")
MODELS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
BOUND = 1e-5  # float32 sums in another order


def load(name):
    """Return a model's parameters, its ids, and the function of both that gives the gradient."""
    model = load_model(CHECKPOINTS / f"{name}-modelopt-w4a16", dtype=jnp.float32)
    graph, params, others = nnx.split(model, nnx.Param, ...)
    ids = np.random.default_rng(0).integers(0, 60, (2, 5)).astype(np.int32)

    def loss(params, others, ids):
        return jnp.sum(jnp.sin(nnx.merge(graph, params, others)(ids)))

    return (params, others, jnp.asarray(ids)), loss


def shardings(operands):
    """Return the shardings of parameters and ids on a mesh with Explicit axes."""
    mesh = make_mesh((2,), AxisType.Explicit, names=("data",))
    specs = P(), P(), P("data")
    return mesh, [
        jax.tree.map(lambda _, spec=spec: NamedSharding(mesh, spec), operand)
        for operand, spec in zip(operands, specs, strict=True)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_types_of_gradients(name):
    """Every parameter has a gradient of its own type, with the rows of text on two devices."""
    operands, loss = load(name)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), operands[0])
    run = jax.shard_map(
        jax.grad(loss),
        mesh=make_mesh((2,), names=("data",)),
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
    )
    found = jax.eval_shape(run, *operands)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == shapes
    mesh, own = shardings(operands)
    with jax.set_mesh(mesh):
        given = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            operands,
            tuple(own),
        )
        found = jax.eval_shape(jax.grad(loss), *given)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == shapes


@pytest.mark.slow
def test_gradients_are_those_of_one_device():
    operands, loss = load("lfm2_moe")
    expected = jax.tree.leaves(jax.jit(jax.grad(loss))(*operands))
    run = jax.shard_map(
        jax.grad(loss),
        mesh=make_mesh((2,), names=("data",)),
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
    )
    inside = jax.tree.leaves(jax.jit(run)(*operands))
    mesh, own = shardings(operands)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(operands, tuple(own))
        explicit = jax.tree.leaves(jax.jit(jax.grad(loss))(*sharded))
    for one, two, want in zip(inside, explicit, expected, strict=True):
        if np.asarray(want).any():
            assert difference(one, want) <= BOUND
            assert difference(two, want) <= BOUND
