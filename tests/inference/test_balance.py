"""Test expert load on the trained example: counts, placement, and results that stay the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.devices.host_devices import call, make_mesh
from support.files.drafted import write_drafted
from support.files.given import CHECKPOINTS, EXAMPLE, EXAMPLE_REFERENCE
from support.models.architecture import run

from jax_nvfp4_moe import NVFP4MoE, load_model
from jax_nvfp4_moe.inference.balance import count_experts, device_load, place_model
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.nn.experts.moe import expert_blocks
from jax_nvfp4_moe.parallel.placement import balance_experts, imbalance, unplaced
from jax_nvfp4_moe.testing import random_moe_params


@pytest.fixture(scope="module")
def text():
    """Return two batches ``[4, 128]`` of held-out text, for placement and for measurement."""
    text = (EXAMPLE_REFERENCE / "heldout.txt").read_text(encoding="utf-8")
    return np.asarray(load_tokenizer(EXAMPLE).encode(text)[4096:5120]).reshape(2, 4, 128)


@pytest.fixture(scope="module")
def model():
    return load_model(EXAMPLE, scheme="w4a16", dtype=jnp.float32)


def lower(model, ids):
    return jax.jit(lambda model, ids: model(ids)).lower(model, ids)


def test_padding_does_not_count():
    model = load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16", dtype=jnp.float32)
    lengths = (128, 40, 0)
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=(3, 128), dtype=np.int32)
    padded = np.where(np.arange(128) < np.array(lengths)[:, None], ids, 0)
    rows = [count_experts(model, ids[i : i + 1, :n]) for i, n in enumerate(lengths) if n]
    alone = np.sum(rows, axis=0)
    np.testing.assert_array_equal(count_experts(model, padded, lengths), alone)
    assert (count_experts(model, padded) != alone).any()
    load = device_load(model, padded, 4, lengths)
    np.testing.assert_array_equal(load, alone.reshape(len(load), 4, -1).sum(axis=-1))


@pytest.mark.parametrize("lengths", [(1, 2, 3), (1, 2, 3, 129), (1, 2, 3, -1)])
def test_lengths_that_do_not_fit(model, text, lengths):
    with pytest.raises(ValueError, match="lengths: expected 4 numbers from 0 to 128, got"):
        count_experts(model, text[0], lengths)


def test_the_example_is_balanced_and_computes_the_same(model, text):
    (seen, new), model = text, nnx.clone(model)
    before = lower(model, new)
    load = count_experts(model, seen)
    # Counting has left no trace in the program.
    assert lower(model, new).as_text() == before.as_text()
    config = model.config
    assert load.shape == (config.num_layers, config.num_experts)
    assert (load.sum(axis=-1) == seen.size * config.router.top_k).all()

    logits = np.asarray(before.compile()(model, new))
    unbalanced = [imbalance(row) for row in device_load(model, new, 4)]
    physical = config.num_experts + 4
    place_model(model, [balance_experts(row, 4, physical) for row in load])
    assert {m.experts.params.get_value().num_experts for _, m in expert_blocks(model)} == {physical}
    placed = [imbalance(row) for row in device_load(model, new, 4)]
    assert np.mean(placed) < np.mean(unbalanced)
    assert max(placed) < max(unbalanced)
    np.testing.assert_array_equal(count_experts(model, seen), load)
    # After placement, each layer adds the outputs of its experts in another order.
    moved = np.asarray(run(model, new))
    assert np.abs(moved - logits).max() <= 2e-5 * np.abs(logits).max()


def block(rngs=1):
    return NVFP4MoE(8, 64, 32, top_k=2, dtype=jnp.float32, rngs=nnx.Rngs(rngs))


def test_counts_are_those_of_the_router():
    moe = block()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((50, 64), np.float32))
    ids, _ = moe.route(x)
    expected = np.bincount(np.asarray(ids).ravel(), minlength=8)
    np.testing.assert_array_equal(count_experts(moe, x), expected[None, :])


def test_the_measured_load_is_that_of_the_placement():
    moe = block()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((50, 64), np.float32))
    ids, _ = moe.route(x)
    placed = balance_experts(count_experts(moe, x)[0], 4, 12)
    y = moe(x)
    place_model(moe, [placed])
    np.testing.assert_array_equal(device_load(moe, x, 4)[0], placed.routed_load(ids))
    assert jnp.abs(moe(x) - y).max() <= 1e-6
    place_model(moe, [unplaced(8, 4)])
    np.testing.assert_array_equal(moe(x), y)


@functools.cache
def mesh_params():
    return random_moe_params(jax.random.key(0), num_experts=8, hidden=64, intermediate=64)


def mesh_block(params, scheme, **over):
    weight = np.random.default_rng(1).standard_normal((8, 64), np.float32) / 8
    arguments = {"checkpoint_scheme": scheme, "scheme": scheme, "dtype": jnp.float32, **over}
    return NVFP4MoE(
        8, 64, 64, top_k=2, params=params, router_weight=jnp.asarray(weight), **arguments
    )


@pytest.mark.eight_devices
@pytest.mark.parametrize(
    ("kind", "dispatch", "scheme"),
    [
        ("Auto", "psum", "w4a16"),
        ("Auto", "all_to_all", "w4a4"),
        ("Explicit", "psum", "w4a4"),
        ("Explicit", "all_to_all", "w4a4"),
    ],
)
def test_experts_are_placed_over_a_mesh(kind, dispatch, scheme):
    """Results also agree for Explicit axes and for tokens that are exchanged between devices."""
    shape = (2, 2) if dispatch == "psum" else (4, 1)
    mesh = make_mesh(shape, AxisType[kind])
    x = np.random.default_rng(2).standard_normal((16, 64), np.float32)
    expected = call(mesh_block(mesh_params(), scheme), x)
    with jax.set_mesh(mesh):
        spec = PartitionSpec("expert" if dispatch == "all_to_all" else None)
        x = jax.device_put(x, NamedSharding(mesh, spec))
        moe = mesh_block(mesh_params(), scheme, mesh=mesh, dispatch=dispatch)
        load = count_experts(moe, x)[0]
        placed = balance_experts(load, shape[0], 8 + shape[0])
        place_model(moe, [placed])
        actual = np.asarray(call(moe, x))
        measured = device_load(moe, x, shape[0])[0]
    # Two outputs of about 1 are added in another order, and so are the sums of the shards.
    assert np.abs(actual - expected).max() <= 1e-6
    assert placed.copies.max() > 1
    assert measured.sum() == load.sum() == 32


def test_ids_of_no_expert_are_not_counted():
    moe = nnx.merge(*nnx.split(block()))
    x = jnp.ones((3, 64), jnp.float32)
    ids = jnp.array([[-1, 2], [8, 2], [7, -5]])

    class Given(nnx.Module):
        def __init__(self):
            self.moe = moe

        def __call__(self, x):
            return self.moe.experts(x, ids, jnp.ones((3, 2), jnp.float32))

    np.testing.assert_array_equal(count_experts(Given(), x)[0], [0, 0, 2, 0, 0, 0, 0, 1])


def test_bad_arguments():
    moe, x = block(), jnp.ones((3, 64), jnp.float32)
    with pytest.raises(ValueError, match=r"placements: expected 1, one per layer .*; got 2"):
        place_model(moe, [unplaced(8, 2)] * 2)
    with pytest.raises(ValueError, match="params: expected 4 experts"):
        place_model(moe, [unplaced(4, 2)])
    with pytest.raises(ValueError, match="num_devices: expected a divisor of 8"):
        device_load(moe, x, 3)
    with pytest.raises(ValueError, match="expected a module that contains an NVFP4MoE"):
        count_experts(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), x)


def test_experts_of_drafting_layers_are_not_counted(tmp_path):
    """A call of the model does not run them, and they stay where they are."""
    folder = write_drafted("qwen3_next-modelopt-w4a16", tmp_path / "drafted")
    model = load_model(folder, draft="mtp", dtype=jnp.float32, backend="reference")
    ids = jnp.arange(12).reshape(2, 6)
    counts = count_experts(model, ids)
    assert counts.shape == (2, 6)
    place_model(model, [balance_experts(row, 2, 8) for row in counts])
    np.testing.assert_array_equal(count_experts(model, ids), counts)
    assert model.drafter.layers[0].mlp.experts.slots is None
