"""Test the router as a module: replaced, adapted, trained, left out, and sharded over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.devices.host_devices import make_mesh

from jax_nvfp4_moe import NVFP4MoE, Router, quantize_experts
from jax_nvfp4_moe.nn import TokenRouter
from jax_nvfp4_moe.testing import assert_as_accurate_as

SIZES = 8, 64, 32
X = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)


def make(**changes):
    return NVFP4MoE(*SIZES, **{"top_k": 2, "dtype": jnp.float32, "rngs": nnx.Rngs(0)} | changes)


class Best(nnx.Module):
    """A user's own router: the best expert by a linear layer with a bias, weighed 1."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 8, rngs=rngs)

    def logits(self, x):
        return self.linear(x)

    def __call__(self, x):
        best = jnp.argmax(self.logits(x), axis=-1)[..., None].astype(jnp.int32)
        return best, jnp.ones(best.shape, jnp.float32)


def test_a_fresh_router_and_the_moments_of_adam_are_float32():
    for moe, dtype in (
        (make(dtype=jnp.bfloat16), jnp.float32),
        (make(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16), jnp.bfloat16),
    ):
        assert moe.token_router.weight.dtype == dtype
        optimizer = nnx.Optimizer(moe, optax.adam(1e-3), wrt=nnx.Param)
        moments = [leaf for leaf in jax.tree.leaves(optimizer.opt_state) if leaf.shape == (8, 64)]
        assert [leaf.dtype for leaf in moments] == [dtype, dtype]
    given = make(router_weight=jnp.ones((8, 64), jnp.float16))
    assert given.token_router.weight.dtype == jnp.float16


def test_logits_have_every_part_of_the_router():
    rng = np.random.default_rng(1)
    weight, bias = rng.standard_normal((8, 64)), rng.standard_normal(8)
    parts = {"router_weight": weight, "router_logit_bias": bias}
    moe = make(**{k: v.astype(np.float32) for k, v in parts.items()}, router_norm=lambda x: 2 * x)
    logits = moe.router_logits(X.reshape(2, 3, 64))
    assert (logits.shape, logits.dtype) == ((2, 3, 8), jnp.float32)
    truth = 2 * X.astype(np.float64) @ weight.T + bias
    np.testing.assert_allclose(logits.reshape(6, 8), truth, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(moe.route(X)[0], np.argsort(-truth, axis=1)[:, :2])


def test_a_loss_of_the_logits_trains_the_router():
    moe = make()

    def loss(moe):
        return jnp.mean(jax.nn.logsumexp(moe.router_logits(X), axis=-1) ** 2)

    gradient = nnx.grad(loss)(moe)
    assert [path for path, _ in nnx.to_flat_state(gradient)] == [("token_router", "weight")]
    before = float(loss(moe))
    optimizer = nnx.Optimizer(moe, optax.sgd(1e-2), wrt=nnx.Param)
    optimizer.update(moe, gradient)
    assert float(loss(moe)) < before


def test_lora_on_the_router():
    """A fresh adapter changes nothing, and training moves it alone."""
    moe, plain = make(), make()
    moe.token_router.adapter = nnx.LoRA(64, 2, 8, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(moe.router_logits(X), plain.router_logits(X))
    optimizer = nnx.Optimizer(moe, optax.sgd(1.0), wrt=nnx.LoRAParam)

    def loss(moe):
        return jnp.square(moe(X)).sum() + jnp.square(moe.router_logits(X)).sum()

    optimizer.update(moe, nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(moe))
    adapter = moe.token_router.adapter
    added = X @ adapter.lora_a[...] @ adapter.lora_b[...]
    assert np.abs(added).max() > 0
    np.testing.assert_allclose(
        moe.router_logits(X), plain.router_logits(X) + added, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(moe.token_router.weight[...], plain.token_router.weight[...])


def test_a_router_that_is_given_is_the_one_that_the_arguments_make():
    arrays = np.random.default_rng(2).standard_normal((3, 8)).astype(np.float32)
    weight = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
    rule = Router(2, score="sigmoid", scaling=2.5)
    bias, logit_bias, scale = arrays
    router = TokenRouter(
        8, 64, router=rule, weight=weight, correction_bias=bias, logit_bias=logit_bias, scale=scale
    )
    router.dtype = jnp.dtype(jnp.float32)
    given = make(top_k=None, token_router=router)
    parts = {"router_bias": bias, "router_logit_bias": logit_bias, "router_scale": scale}
    made = make(top_k=None, router=rule, router_weight=weight, **parts)
    assert given.router == made.router == rule
    for ours, theirs in zip(given.route(X), made.route(X), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_router_of_the_user():
    own = Best(nnx.Rngs(3))
    made, replaced = make(token_router=own, top_k=1), make()
    replaced.token_router = own
    ids = np.asarray(own.linear(X)).argmax(-1)[:, None]
    for moe in (made, replaced):
        np.testing.assert_array_equal(moe.route(X)[0], ids)
        np.testing.assert_array_equal(moe.router_logits(X), own.linear(X))
        y = moe.experts(X, ids, np.ones((6, 1), np.float32))
        np.testing.assert_array_equal(nnx.jit(lambda moe, x: moe(x))(moe, X), y)
        assert moe.router is None
    with pytest.raises(ValueError, match="router: expected one of top_k and router"):
        make(token_router=own, top_k=None)


def test_a_block_without_a_router_says_so():
    moe = make(use_router=False, top_k=None)
    for run in (moe, moe.route, moe.router_logits):
        with pytest.raises(ValueError, match=r"token_router: .* made without one\. Call moe\.exp"):
            run(X)
    ids, weights = np.zeros((6, 3), np.int32), np.ones((6, 3), np.float32)
    y = moe.experts(X, ids, weights)
    moe.token_router = Best(nnx.Rngs(3))
    assert moe(X).shape == y.shape
    kernels = [np.ones(shape, np.float32) for shape in ((8, 32, 64), (8, 64, 32))]
    params = quantize_experts(None, *kernels)
    assert NVFP4MoE(*SIZES, use_router=False, params=params, activation="relu2").router is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"token_router": TokenRouter(8, 64, top_k=2, rngs=nnx.Rngs(0))},
            "top_k, router: .* 2 and",
        ),
        ({"token_router": Best(nnx.Rngs(0)), "router_weight": X}, "router_weight: .* has these"),
        ({"use_router": False, "router_bias": X}, "router_bias: expected None.*use_router is Fal"),
        ({"use_router": False, "token_router": Best(nnx.Rngs(0))}, "token_router: expected None"),
    ],
)
def test_arguments_that_contradict_each_other(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_arguments_of_a_router_that_do_not_fit():
    for changes, message in (
        ({"weight": np.ones((8, 32), np.float32)}, r"weight: expected shape \(8, 64\)"),
        ({"correction_bias": np.ones(7, np.float32)}, r"correction_bias: expected shape \(8,\)"),
        ({"token_experts": np.ones((5, 3), np.int32)}, r"token_experts: expected shape \(5, 2\)"),
        ({"rngs": None}, "rngs: .* weight; got None"),
        ({"dtype": jnp.int8}, "dtype: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenRouter(8, 64, **{"top_k": 2, "rngs": nnx.Rngs(0)} | changes)


@pytest.mark.eight_devices
@pytest.mark.parametrize("dispatch", ["psum", "all_to_all"])
def test_routers_on_a_mesh(dispatch):
    """The arrays of every router are on all devices, and rows are routed as on one device."""
    mesh, one = make_mesh((2, 1)), make()
    own = Best(nnx.Rngs(3))
    table = np.arange(20, dtype=np.int32).reshape(10, 2) % 8
    for changes, further in (
        ({}, ()),
        ({"token_router": own, "top_k": 1}, ()),
        ({"token_experts": table}, (np.arange(6, dtype=np.int32)[::-1].copy(),)),
    ):
        moe = make(mesh=mesh, dispatch=dispatch, **changes)
        for leaf in jax.tree.leaves(moe.token_router):
            assert leaf.sharding.is_fully_replicated
            assert len(leaf.sharding.device_set) == 2
        alone = own if changes.get("top_k") else make(**changes).route
        for ours, theirs in zip(moe.route(X, *further), alone(X, *further), strict=True):
            np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-6)
    assert len(one.token_router.weight.get_value().sharding.device_set) == 1


def test_logits_with_a_bound():
    """The bound changes logits before they choose and weigh experts."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 64)), jnp.float32)
    plain = TokenRouter(8, 64, top_k=2, dtype=jnp.float32, rngs=nnx.Rngs(0))
    weight = plain.weight.get_value()
    bounded = TokenRouter(8, 64, top_k=2, weight=weight, logit_cap=0.5, dtype=jnp.float32)
    ids, weights = bounded(x)

    def compute(numpy, kind):
        logits = kind(0.5) * numpy.tanh(numpy.asarray(plain.logits(x), kind) / kind(0.5))
        chosen = numpy.exp(numpy.take_along_axis(logits, numpy.asarray(ids), axis=-1))
        return logits, chosen / chosen.sum(axis=-1, keepdims=True)

    # XLA's hyperbolic tangent is less exact on CPUs without AVX512 than that of NumPy.
    exact, rounded = compute(np, np.float64), compute(jnp, jnp.float32)
    for found, yardstick, truth in zip((bounded.logits(x), weights), rounded, exact, strict=True):
        assert_as_accurate_as(found, yardstick, truth)
    assert np.abs(plain(x)[1] - weights).max() > 0.01
