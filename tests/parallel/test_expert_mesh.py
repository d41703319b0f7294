"""Test axes of meshes: the roles, refused meshes, and `data`, along which no token is gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from support.devices.expert_block import block, weights
from support.devices.host_devices import call, collectives, difference, make_mesh, tokens
from support.files.given import CHECKPOINTS, EXAMPLE

from jax_nvfp4_moe import NVFP4MoE, load_model, load_moe
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


def call_in_context(module):
    with jax.set_mesh(make_mesh((8, 1), AxisType.Explicit)):
        return call(module, tokens(8))


# Each case has a call that is refused, and its message.
REFUSALS = {
    "experts": (
        lambda: block()(mesh=make_mesh((3,), names=("expert",))),
        "axis 'expert' of 3 does not divide num_experts = 16 .* 1, 2, 4, 8, 16",
    ),
    "blocks": (
        lambda: block()(mesh=make_mesh((3,), names=("tensor",))),
        "axis 'tensor' of 3 does not divide intermediate = 128 .* 16; .* 1, 2, 4, 8",
    ),
    "axes": (
        lambda: block()(mesh=make_mesh((8,), names=("dp",))),
        "mesh: expected at least one of the axes 'expert', 'tensor' .* got {'dp': 8}.* axis_names",
    ),
    "roles": (
        lambda: block()(mesh=make_mesh((8,), names=("dp",)), axis_names={"batch": "dp"}),
        "axis_names: expected keys among 'expert', 'tensor' and 'data', got 'batch'",
    ),
    "names": (
        lambda: block()(mesh=make_mesh((8,), names=("dp",)), axis_names={"data": "ep"}),
        "axis_names: expected names of axes of the mesh {'dp': 8}, got 'ep'",
    ),
    "one-axis-for-two-roles": (
        lambda: block()(
            mesh=make_mesh((8,), names=("dp",)), axis_names={"data": "dp", "expert": "dp"}
        ),
        "axis_names: expected another axis for each role",
    ),
    "type": (
        lambda: block()(mesh=jax.devices()),
        r"mesh: expected a jax.sharding.Mesh .* got list",
    ),
    "rows": (
        lambda: block(scheme="w4a4_token_scale")(mesh=make_mesh((1, 2))),
        "mesh: expected axis 'tensor' of 1 with w4a4_token_scale",
    ),
    "alternating": (
        lambda: block(activation="swigluoai", params=weights())(mesh=make_mesh((1, 2))),
        "expects gate and up rows that alternate",
    ),
    "context": (
        lambda: call_in_context(block()(mesh=make_mesh((8, 1)))),
        "mesh: expected a call outside jax.set_mesh of Explicit axes",
    ),
    "exchange name": (
        lambda: load_model(EXAMPLE, dispatch="broadcast"),
        "dispatch: expected one of psum, all_to_all, ragged; got 'broadcast'",
    ),
    "exchange alone": (
        lambda: load_model(EXAMPLE, dispatch="all_to_all"),
        "dispatch: expected a mesh .* for 'all_to_all'.* got no mesh",
    ),
    "exchange axes": (
        lambda: load_moe(
            EXAMPLE, 0, dispatch="all_to_all", mesh=make_mesh((2,), names=("tensor",))
        ),
        "dispatch: expected a mesh with an axis 'expert' .* got axes {'tensor'",
    ),
    "exchange platform": (
        lambda: load_model(EXAMPLE, dispatch="ragged", mesh=make_mesh((8, 1))),
        "dispatch: expected GPUs for 'ragged', got CPUs",
    ),
    "checkpoint": (
        lambda: load_model(CHECKPOINTS / "deepseekv3-modelopt-w4a4", mesh=make_mesh((2, 4))),
        "axis 'tensor' of 4 does not divide intermediate = 96 .* 1, 2, 3, 6",
    ),
}


@pytest.mark.parametrize(("refused", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_what_is_legal(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()
