"""Train and run models with their batches sharded over several devices, as a user would.

These programs run on CPU devices or on GPUs, except one that needs eight devices.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_nvfp4_moe as nvfp4

pytestmark = pytest.mark.two_devices

DEVICES = min(8, jax.device_count())
VOCABULARY, HIDDEN = 32, 64
CHECKPOINT = pathlib.Path(__file__).parents[1] / "checkpoints" / "qwen3moe-modelopt-w4a16"


@pytest.fixture(autouse=True)
def exact_products():
    """Multiply float32 matrices in float32 on GPUs too, so that results can be compared."""
    with jax.default_matmul_precision("float32"):
        yield


class Classifier(nnx.Module):
    """A user's own model: dense layers around frozen experts."""

    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCABULARY, HIDDEN, rngs=rngs)
        self.moe = nvfp4.NVFP4MoE(4, HIDDEN, 32, top_k=2, dtype=jnp.float32, rngs=rngs)
        self.linear = nvfp4.NVFP4Linear(HIDDEN, HIDDEN, dtype=jnp.float32, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, VOCABULARY, rngs=rngs)

    def __call__(self, ids):
        x = self.embedding(ids)
        x = x + self.moe(x)
        return self.head(x + self.linear(x))


@nnx.jit
def train_step(model, optimizer, ids, labels):
    def loss(model):
        scores = model(ids)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def make():
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def draw_batch():
    random = np.random.default_rng(0)
    return tuple(random.integers(0, VOCABULARY, (16, 5)).astype(np.int32) for _ in range(2))


def test_training():
    ids, labels = draw_batch()
    others = np.concatenate([0 * labels[:2], labels[2:]])
    expected, wrong = (
        [float(train_step(*alone, ids, given)) for _ in range(3)]
        for alone, given in ((make(), labels), (make(), others))
    )
    assert expected[2] < expected[0]
    # Negative control: one of eight devices has wrong labels.
    assert (np.abs(np.subtract(wrong, expected)) > 1e-4 * np.asarray(expected)).all()

    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    model, optimizer = make()
    everywhere = NamedSharding(mesh, PartitionSpec())
    for part in (model, optimizer):
        nnx.update(part, jax.device_put(nnx.state(part), everywhere))
    batch = jax.device_put((ids, labels), NamedSharding(mesh, PartitionSpec("data")))
    program = train_step.lower(model, optimizer, *batch).compile().as_text()
    assert "all-reduce" in program  # gradients of parameters
    assert "all-gather" not in program
    assert "all-to-all" not in program
    losses = [float(train_step(model, optimizer, *batch)) for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.eight_devices
def test_a_checkpoint_on_named_axes():
    """Data, experts and heads are sharded, two parts each, along axes with the user's names."""
    names = {"data": "dp", "expert": "ep", "tensor": "tp"}
    mesh = jax.make_mesh((2, 2, 2), tuple(names.values()), axis_types=(AxisType.Auto,) * 3)
    alone = nvfp4.load_model(CHECKPOINT, dtype=jnp.float32)
    model = nvfp4.load_model(CHECKPOINT, dtype=jnp.float32, mesh=mesh, axis_names=names)
    ids = np.random.default_rng(0).integers(0, alone.config.vocab_size, (4, 6)).astype(np.int32)

    run = jax.jit(lambda model, ids, cache: model(ids, cache))
    cache = model.init_cache(4, 8)
    program = run.lower(model, ids, cache).compile()
    # Logits are gathered along the vocabulary, and no token is.
    gathered = [line for line in program.as_text().splitlines() if " all-gather(" in line]
    assert len(gathered) == 1
    assert f"f32[2,6,{alone.config.vocab_size}]" in gathered[0]

    logits, cache = program(model, ids, cache)
    assert logits.sharding.spec[0] == "dp"
    assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(cache)} == {"dp"}
    expected, _ = run(alone, ids, alone.init_cache(4, 8))
    expected = np.asarray(expected)
    bound = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(logits), expected, rtol=0, atol=bound)
    # Negative control: the products of one of the two devices along `ep` are lost in one layer.
    parts = (part for _, part in nnx.iter_modules(alone))
    experts = next(part for part in parts if isinstance(part, nvfp4.NVFP4Experts))
    params = experts.params.get_value()
    down = dataclasses.replace(params.down, global_scale=params.down.global_scale.at[::2].set(0))
    experts.params.set_value(dataclasses.replace(params, down=down))
    lost, _ = run(alone, ids, alone.init_cache(4, 8))
    assert np.abs(np.asarray(lost) - expected).max() > 100 * bound


def test_generation():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    alone = nvfp4.load_model(CHECKPOINT, dtype=jnp.float32)
    model = nvfp4.load_model(CHECKPOINT, dtype=jnp.float32, mesh=mesh)
    ids = np.random.default_rng(1).integers(0, alone.config.vocab_size, (4, 6)).astype(np.int32)
    how = {"lengths": np.int32([6, 2, 4, 5]), "max_new_tokens": 3}
    tokens = nvfp4.generate(model, ids, **how)
    np.testing.assert_array_equal(np.asarray(tokens), np.asarray(nvfp4.generate(alone, ids, **how)))
