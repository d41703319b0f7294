"""Test what users write around adapters: remat, scans, optimizers, accumulation, bfloat16."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.models.adapters import fill
from support.models.own_model import (
    ADAPTERS,
    TARGETS,
    Own,
    differentiate_plain,
    read_adapters,
    read_gradients,
    total,
)

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.testing import assert_as_accurate_as

X = np.random.default_rng(0).standard_normal((6, 32), np.float32)


@pytest.fixture(autouse=True)
def usual_promotion():
    """Promote as usual: optax needs it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def make(filled=True, **how):
    model = Own(nnx.Rngs(0))
    nvfp4.add_lora(model, 2, targets=TARGETS, rngs=nnx.Rngs(0), **how)
    if filled:
        fill(model)
    return model


def assert_accurate(found, yardstick, truth):
    """Compare each gradient with float64, and confirm that the bound sees a change of 2^-10."""
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        assert_as_accurate_as(found[name], yardstick[name], expected)
        with pytest.raises(AssertionError, match="yardstick"):
            assert_as_accurate_as(found[name] * (1 + 2**-10), yardstick[name], expected)


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_of_adapters(remat):
    model = make()
    run = nnx.remat(total) if remat else total
    gradients = nnx.jit(nnx.grad(run, argnums=ADAPTERS))(model, X)
    _, truth = differentiate_plain([model], X, np.float64)
    _, yardstick = differentiate_plain([model], X, np.float32)
    assert len(truth) == 6
    assert_accurate(read_gradients(model, gradients), yardstick, truth)


def test_adapters_that_are_merge_aware_have_the_gradients_of_plain_ones_at_first():
    """Both options compute the frozen weights while B is zero, and A has no gradient then."""
    model = make(filled=False, merge_aware=True)
    found = read_gradients(model, nnx.jit(nnx.grad(total, argnums=ADAPTERS))(model, X))
    _, truth = differentiate_plain([model], X, np.float64)
    _, yardstick = differentiate_plain([model], X, np.float32)
    for one in (found, truth, yardstick):
        assert not any(one.pop(name).any() for name in list(one) if name.endswith(".a"))
    assert_accurate(found, yardstick, truth)


def take(stack, index):
    """Return one model of a stack."""
    graph, state = nnx.split(stack)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[index], state))


def make_stack():
    """Return two models whose arrays are stacked, with adapters."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0)
    def make(rngs):
        return Own(rngs)

    stack = make(nnx.Rngs(0))
    nvfp4.add_lora(stack, 2, targets=TARGETS, rngs=nnx.Rngs(0))
    fill(stack)
    return stack


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def run_stack(x, layer):
    return layer(x)


def run_with_lax(x, stack):
    """Run a stack as users of plain JAX do."""
    graph, state = nnx.split(stack)
    return jax.lax.scan(lambda x, state: (nnx.merge(graph, state)(x), None), x, state)[0]


@pytest.mark.parametrize("run", [run_stack, run_with_lax])
def test_a_scan_over_stacked_layers_has_the_gradients_of_a_loop(run):
    """The kernels and the backward pass run inside a scan, over experts and adapters alike.

    The loop is the yardstick of the gradients: with six tokens, the error of plain XLA depends much
    on the tokens. `test_gradients_of_adapters` compares one layer with plain XLA.
    """
    stack = make_stack()
    models = [take(stack, index) for index in range(2)]

    def scanned(stack, x):
        return total(lambda x: run(x, stack), x)

    def results(stack, x):
        return run(x, stack)

    def looped(first, second, x):
        return total(lambda x: second(first(x)), x)

    both = nnx.DiffState(0, nnx.LoRAParam), nnx.DiffState(1, nnx.LoRAParam)
    of_loop = nnx.jit(nnx.grad(looped, argnums=both))(*models, X)
    gradients = nnx.jit(nnx.grad(scanned, argnums=ADAPTERS))(stack, X)
    truth, yardstick = (differentiate_plain(models, X, dtype) for dtype in (np.float64, np.float32))
    y = {"y": np.asarray(nnx.jit(results)(stack, X))}
    assert_accurate(y, yardstick[0], truth[0])
    for index, wanted in enumerate(truth[1:]):
        own = jax.tree.map(operator.itemgetter(index), gradients)
        found = read_gradients(take(stack, index), own)
        assert_accurate(found, read_gradients(models[index], of_loop[index]), wanted)


def squares(model, x):
    return jnp.mean(jnp.square(model(x) - 0.1))


def frozen_bytes(model):
    others = nnx.All(nnx.Variable, nnx.Not(nnx.LoRAParam))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nnx.state(model, others))]


def train(model, transform, batches, donated=True):
    """Do a step for each batch, as users write it; return the losses before the steps."""
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.LoRAParam)

    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(squares, argnums=ADAPTERS)(model, x)
        optimizer.update(model, gradients)
        return value

    step = nnx.jit(step, donate_argnums=(0, 1) if donated else ())
    return [float(step(model, optimizer, jnp.asarray(batch))) for batch in batches]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_step_that_donates_the_model_and_the_optimizer(dtype):
    """The adapters keep their dtype and learn, and the frozen weights keep their bytes."""
    model = make(filled=False, dtype=dtype)
    before = frozen_bytes(model)
    losses = train(model, optax.adamw(1e-2, weight_decay=0.01), [X] * 8)
    assert losses[-1] < 0.9 * losses[0]
    assert frozen_bytes(model) == before
    assert {value.dtype for value in read_adapters(model).values()} == {np.dtype(dtype)}


def test_gradients_in_bfloat16_are_those_of_float32():
    """Adapters in bfloat16 have the gradients at their own values, rounded once."""
    model, wide = make(), make()
    for one, dtype in ((model, jnp.bfloat16), (wide, jnp.float32)):
        rounded = jax.tree.map(
            lambda leaf, dtype=dtype: leaf.astype(jnp.bfloat16).astype(dtype),
            nnx.state(one, nnx.LoRAParam),
        )
        nnx.update(one, rounded)
    found, wanted = (
        read_gradients(one, nnx.jit(nnx.grad(total, argnums=ADAPTERS))(one, X))
        for one in (model, wide)
    )
    for name, expected in wanted.items():
        assert found[name].dtype == jnp.bfloat16
        error = np.abs(np.asarray(found[name], np.float32) - expected)
        # Half of the spacing of bfloat16, and the sums of float32 in another order.
        assert (error <= 2**-8 * np.abs(expected) + 2**-18 * np.abs(expected).max()).all()


def test_accumulated_gradients_are_those_of_the_whole_batch():
    """`optax.MultiSteps` changes the adapters with the mean gradient of two halves."""
    rate = 0.5
    parts, whole = make(), make()
    start = read_adapters(parts)
    train(parts, optax.MultiSteps(optax.sgd(rate), 2), [X[:3]])
    for name, value in read_adapters(parts).items():  # nothing moves before the second half
        np.testing.assert_array_equal(value, start[name])
    parts = make()
    train(parts, optax.MultiSteps(optax.sgd(rate), 2), [X[:3], X[3:]])
    train(whole, optax.sgd(rate), [X])
    one, other = read_adapters(parts), read_adapters(whole)
    for name, value in start.items():
        moved = np.abs(other[name] - value).max()
        assert moved > 0
        # The sums have at most as many terms as the batch has rows, the hidden size and experts.
        error = np.abs(one[name] - other[name]).max()
        assert error <= 256 * 2**-24 * moved + 2**-23 * np.abs(value).max()


def test_accumulation_with_adamw_learns():
    model = make(filled=False)
    transform = optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2)
    losses = train(model, transform, [X[:3], X[3:]] * 6)
    assert np.mean(losses[-2:]) < 0.9 * np.mean(losses[:2])
