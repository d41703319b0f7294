"""Test that Flax's tools of sharding know how our variables are sharded, on a mesh and without."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from support.devices.host_devices import make_mesh
from support.files.given import CHECKPOINTS

import jax_nvfp4_moe as nvfp4

X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)


def make(mesh=None):
    rngs = nnx.Rngs(0)
    return nvfp4.NVFP4MoE(8, 64, 32, top_k=2, mesh=mesh, rngs=rngs, dtype=jnp.float32)


def assert_known(module, mesh):
    """Assert that the specifications of all arrays are those by which they are sharded."""
    state = nnx.state(module)
    specs = nnx.get_partition_spec(state)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(state), strict=True):
        assert isinstance(spec, PartitionSpec)
        wanted = jax.sharding.NamedSharding(mesh, spec)
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), (spec, leaf.sharding)
    return jax.tree.leaves(specs)


def test_without_a_mesh_every_array_is_replicated():
    moe = make()
    moe.last = nvfp4.NVFP4Linear(64, 32, use_bias=True, rngs=nnx.Rngs(0))
    specs = nnx.get_partition_spec(nnx.state(moe))
    assert set(jax.tree.leaves(specs)) == {PartitionSpec()}
    mesh = jax.make_mesh((1,), ("data",))
    state = jax.device_put(nnx.state(moe), nnx.get_named_sharding(nnx.state(moe), mesh))
    np.testing.assert_array_equal(nnx.merge(nnx.graphdef(moe), state)(X), moe(X))
    with jax.set_mesh(mesh):
        shapes = nnx.state(nnx.eval_shape(make))
    for shape, leaf in zip(
        jax.tree.leaves(shapes), jax.tree.leaves(nnx.state(make())), strict=True
    ):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
    params = moe.experts.params
    assert params.replace(params.get_value()).get_value() is not None
    assert nnx.clone(moe)(X).shape == X.shape


@pytest.mark.eight_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_experts_on_a_mesh(kind):
    mesh = make_mesh((2, 2), kind)
    moe = make(mesh)
    specs = assert_known(moe, mesh)
    assert PartitionSpec("expert", "tensor") in specs
    assert PartitionSpec("expert", None, "tensor") in specs
    y, (graph, state) = moe(X), nnx.split(moe)
    moved = jax.device_put(jax.device_get(state), nnx.get_named_sharding(state, mesh))
    np.testing.assert_array_equal(nnx.merge(graph, moved)(X), y)
    if kind is AxisType.Explicit:
        return  # a block on Explicit axes is made outside of programs
    graph, shapes = nnx.get_abstract_model(lambda: make(mesh), mesh)
    for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
        assert shape.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


@pytest.mark.eight_devices
def test_a_whole_model_on_a_mesh_is_known_and_trained():
    mesh = make_mesh((1, 2))
    model = nvfp4.load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16", mesh=mesh)
    specs = assert_known(model, mesh)
    assert len({str(spec) for spec in specs}) > 3
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    ours = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    moments = jax.tree.leaves(optimizer.opt_state[0].mu)
    for moment, sharding in zip(moments, ours, strict=True):
        assert moment.sharding.is_equivalent_to(sharding, moment.ndim)
