"""Test that models on a mesh with an axis `data` shard their rows, and gather no tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from given import CHECKPOINTS
from host_devices import call, collectives, difference, make_mesh

from jax_nvfp4_moe import NVFP4MoE, load_model
from jax_nvfp4_moe.parallel import find_expert_mesh

pytestmark = pytest.mark.eight_devices

# Bound for float32 sums in another order, through a few layers.
BOUND = 1e-5
# What mixes tokens -> a checkpoint, the mesh, and the names of its axes.
MODELS = {
    "latents": ("kimi_k2-modelopt-w4a16", (4, 2), {"data": "dp", "expert": "ep"}),
    "recurrent": ("nemotron_h-modelopt-w4a16", (8,), {"data": "data"}),
}
IDS = np.random.default_rng(0).integers(0, 256, (8, 3)).astype(np.int32)
load = functools.partial(load_model, dtype=jnp.float32)


@pytest.mark.parametrize("name", MODELS)
def test_models_with_their_caches(name):
    checkpoint, shape, names = MODELS[name]
    mesh = make_mesh(shape, names=tuple(names.values()))
    alone = load(CHECKPOINTS / checkpoint)
    model = load(CHECKPOINTS / checkpoint, mesh=mesh, axis_names=names)
    cache = model.init_cache(8, 4)
    program = jax.jit(lambda *args: args[0](*args[1:])).lower(model, IDS, cache).compile()
    assert set(collectives(program)) <= {"all-reduce"}  # of the experts
    (logits, cache) = program(model, IDS, cache)
    for leaf in (logits, *jax.tree.leaves(cache)):
        assert leaf.sharding.spec[0] == names["data"]
    expected, whole = call(alone, IDS, alone.init_cache(8, 4))
    assert difference(logits, expected) <= BOUND
    for own, one in zip(jax.tree.leaves(cache), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(np.asarray(own), np.asarray(one), rtol=0, atol=BOUND)
    # Three rows do not divide among the parts, so every part computes them.
    assert difference(call(model, IDS[:3]), expected[:3]) <= BOUND


def test_gradients_of_experts():
    """Each part of `data` adds its gradients of the router, and no tokens are gathered."""

    @nnx.jit
    def gradients(module, x):
        return nnx.grad(lambda module, x: jnp.sum(jnp.sin(module(x))), argnums=(0, 1))(module, x)

    def make(**options):
        return NVFP4MoE(4, 64, 64, top_k=2, dtype=jnp.float32, rngs=nnx.Rngs(0), **options)

    x = np.random.default_rng(0).standard_normal((4, 3, 64)).astype(np.float32)
    names = ("data", "expert", "tensor")
    module = make(mesh=make_mesh((2, 2, 2), names=names))
    assert set(collectives(gradients.lower(module, x).compile())) == {"all-reduce"}
    found, expected = (jax.tree.leaves(gradients(each, x)) for each in (module, make()))
    for own, one in zip(found, expected, strict=True):
        assert difference(own, one) <= BOUND


def test_roles_of_axes():
    mesh = find_expert_mesh(
        make_mesh((2, 2, 2), names=("a", "b", "expert")), {"tensor": "a", "data": "b"}
    )
    assert (mesh.expert, mesh.tensor, mesh.data, mesh.axes) == (2, 2, 2, ("expert", "a"))
    assert tuple(mesh.spec("data", None, ("data", "expert"))) == ("b", None, ("b", "expert"))
    assert (mesh.rows(4), mesh.rows(3), mesh.rows(0)) == ("data", None, None)
    further = find_expert_mesh(make_mesh((2, 4), names=("expert", "mine")))
    assert (further.expert, further.tensor, further.data) == (2, 1, 1)
