"""Train models with experts in NVFP4 on several devices, as a user would write it.

These programs run on CPU devices or on GPUs. On a machine with one GPU, each mesh has one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_nvfp4_moe as nvfp4

HIDDEN, TOKENS = 64, 16
RATE = 1e-2  # of learning
DEVICES = min(2, jax.device_count())


def make_mesh(kind):
    return jax.make_mesh((DEVICES,), ("data",), (kind,), devices=jax.devices()[:DEVICES])


class Block(nnx.Module):
    """A block of a user's own transformer, around experts and a linear of this package."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.moe = nvfp4.NVFP4MoE(8, HIDDEN, 32, top_k=2, dtype=jnp.float32, rngs=rngs)
        self.out = nvfp4.NVFP4Linear(HIDDEN, HIDDEN, dtype=jnp.float32, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(x + self.out(self.moe(self.norm(x))))


def loss_of(model, x, y):
    return jnp.sum((model(x) - y) ** 2) / TOKENS


def data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, HIDDEN), np.float32)
    return x, rng.standard_normal((TOKENS, 4), np.float32)


def other_labels():
    """Return the data for a negative control: the tokens of the last device have other labels."""
    x, y = data()
    y[TOKENS // 2 :] = 0
    return x, y


def errors(actual, expected):
    """Return the error of each leaf of a state, in units of its bound.

    The bound allows another order of sums, and the precision of matrix units of GPUs.
    """
    bound = 1e-5 if jax.default_backend() == "cpu" else 2e-2
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    pairs = [(np.asarray(got), np.asarray(want)) for got, want in pairs]
    assert any(want.any() for _, want in pairs)
    return [np.abs(got - want).max() / (bound * np.abs(want).max()) for got, want in pairs]


@pytest.fixture(scope="module")
def expected():
    """Return the gradient on one device."""
    return nnx.jit(nnx.grad(loss_of))(Block(nnx.Rngs(0)), *data())


def test_nnx_grad_inside_nnx_shard_map(expected):
    model = Block(nnx.Rngs(0))

    @nnx.jit
    @nnx.shard_map(
        mesh=make_mesh(AxisType.Auto), in_specs=(P(), P("data"), P("data")), out_specs=P()
    )
    def gradients(model, x, y):
        return nnx.grad(loss_of)(model, x, y)  # shared weights get the sum over all devices

    assert max(errors(gradients(model, *data()), expected)) <= 1
    assert min(errors(gradients(model, *other_labels()), expected)) > 3


def test_a_function_of_parameters_inside_shard_map():
    """Functions without modules: a router and experts, with a weight that the user trains."""
    params = nvfp4.prepare(
        nvfp4.testing.random_moe_params(
            jax.random.key(0), num_experts=8, hidden=HIDDEN, intermediate=32
        ),
        scheme="w4a16",
        dtype="float32",
    )
    router = jax.random.normal(jax.random.key(1), (HIDDEN, 8))

    def loss(router, x, y):
        ids, weights = nvfp4.ops.route(nvfp4.Router(2), jnp.dot(x, router, precision="highest"))
        out = nvfp4.ops.moe_mlp(x, params, ids, weights, scheme="w4a16")
        return jnp.sum((out[:, :4] - y) ** 2) / TOKENS

    def local(router, x, y):
        value, gradient = jax.value_and_grad(loss)(router, x, y)
        return jax.lax.psum(value, "data"), gradient

    sharded = jax.shard_map(
        local,
        mesh=make_mesh(AxisType.Auto),
        in_specs=(P(), P("data"), P("data")),
        out_specs=(P(), P()),
    )
    sharded, expected = jax.jit(sharded), jax.jit(jax.value_and_grad(loss))(router, *data())
    assert max(errors(sharded(router, *data()), expected)) <= 1
    assert min(errors(sharded(router, *other_labels()), expected)) > 3


@nnx.jit
def step(model, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, gradients)
    return loss


def train(put, given):
    """Train for three steps, and return the losses and the weights."""
    model = jax.device_put(Block(nnx.Rngs(0)), put(P()))
    optimizer = nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)
    x, y = (jax.device_put(array, put(P("data"))) for array in given)
    losses = [float(step(model, optimizer, x, y)) for _ in range(3)]
    return losses, jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_training_on_a_mesh_with_explicit_axes():
    """Adam divides by the size of a gradient: small gradients have errors of a part of a step.

    The bounds are therefore a third of a step for weights. The negative control is over three times
    each bound.
    """
    mesh = make_mesh(AxisType.Explicit)
    one, weights = train(lambda spec: None, data())
    with jax.set_mesh(mesh):
        two, sharded = train(lambda spec: NamedSharding(mesh, spec), data())
    bound = 1e-4 if jax.default_backend() == "cpu" else 2e-2
    np.testing.assert_allclose(two, one, rtol=bound)
    assert two[-1] < two[0]
    for got, want in zip(sharded, weights, strict=True):
        assert np.abs(got - want).max() < RATE / 3
    other, wrong = train(lambda spec: None, other_labels())
    assert (np.abs(np.subtract(other, one)) > 3 * bound * np.asarray(one)).all()
    for got, want in zip(wrong, weights, strict=True):
        assert np.abs(got - want).max() > RATE


def test_results_on_explicit_axes_are_sharded_like_the_tokens():
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        model = jax.device_put(Block(nnx.Rngs(0)), NamedSharding(mesh, P()))
        x = jax.device_put(data()[0], NamedSharding(mesh, P("data")))
        y = nnx.jit(lambda model, x: model.moe(x))(model, x)
    assert jax.typeof(y).sharding.spec == P("data", None)
