"""Test steps that are the program of each device, on CPU devices, where XLA adds up all arrays."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.devices.host_devices import (
    IDS,
    call,
    collectives,
    connected,
    difference,
    make_mesh,
)
from support.files.given import CHECKPOINTS, EXAMPLE

from jax_nvfp4_moe import add_lora, generate, load_model
from jax_nvfp4_moe.inference import generation
from jax_nvfp4_moe.parallel.expert_mesh import left_apart
from jax_nvfp4_moe.parallel.tensor_parallel import find_largest
from jax_nvfp4_moe.parallel.whole_steps import (
    find_connected_mesh,
    from_first_device,
    on_each_device,
    start_together,
)

pytestmark = pytest.mark.eight_devices

# Folder -> the shapes (expert, tensor) of meshes that divide its model.
MODELS = {
    EXAMPLE: [(2, 1), (1, 2), (2, 2)],
    # Recurrent states, and shared experts with a gate.
    CHECKPOINTS / "qwen3_5_moe-modelopt-w4a16": [(2, 1), (1, 3)],
    CHECKPOINTS / "deepseekv3-modelopt-w4a4": [(1, 2)],  # latent attention, shared experts
}
CASES = [
    pytest.param(folder, shape, id=f"{folder.name}-{shape[0]}x{shape[1]}")
    for folder, shapes in MODELS.items()
    for shape in shapes
]


def load(folder, mesh=None, **options):
    return load_model(folder, scheme="w4a16", dtype=jnp.float32, mesh=mesh, **options)


@pytest.mark.parametrize(("folder", "shape"), CASES)
def test_a_step_of_each_device_has_the_logits_of_the_whole_program(folder, shape):
    model = load(folder, connected(shape))
    mesh = find_connected_mesh(model)
    assert mesh is not None
    ids = jnp.asarray(IDS % model.config.vocab_size)
    _, cache = call(model, ids[:, :-1], model.init_cache(*ids.shape))
    own = jax.jit(on_each_device(generation._read, mesh))
    (logits, after), (expected, kept) = (f(model, ids[:, -1:], cache) for f in (own, call))
    assert difference(logits, expected) < 1e-6
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(kept), strict=True):
        assert one.shape == other.shape
        assert difference(one, other) < 1e-5 or not np.any(other)
    compiled = own.lower(model, ids[:, -1:], cache).compile()
    assert set(collectives(compiled)) <= {"all-reduce", "all-gather"}


@pytest.mark.parametrize(
    ("name", "shape", "sums"),
    [
        # Attention and experts of three layers, the embedding and the logits.
        ("deepseekv3-modelopt-w4a4", (1, 2), 3 * 2 + 2),
        # Routed experts of two layers. All devices have the shared ones.
        ("deepseekv3-modelopt-w4a4", (2, 1), 2),
        # Experts of two layers. Three devices divide neither the heads nor the vocabulary.
        ("qwen3_5_moe-modelopt-w4a16", (1, 3), 2),
    ],
)
def test_each_block_adds_up_once(name, shape, sums):
    """Routed and shared experts add up together."""
    model = load(CHECKPOINTS / name, connected(shape))
    ids = jnp.asarray(IDS[:, -1:] % model.config.vocab_size)
    step = on_each_device(generation._read, find_connected_mesh(model))
    program = str(jax.make_jaxpr(step)(model, ids, model.init_cache(*ids.shape)))
    assert len(re.findall(r"\bpsum(?:_invariant)?\[", program)) == sums


@pytest.mark.parametrize(("folder", "shape"), CASES)
def test_generate_gives_the_tokens_of_one_device(folder, shape):
    ids = np.asarray(IDS[:, :8])
    found = []
    for mesh in (None, connected(shape)):
        model = load(folder, mesh)
        prompt = ids % model.config.vocab_size
        found.append(np.asarray(generate(model, prompt, max_new_tokens=6, stop_ids=())))
    np.testing.assert_array_equal(*found)


def test_terms_stay_apart_in_an_inner_block_too():
    mesh, term = connected((1, 2)), jnp.ones(4)
    with left_apart(True), left_apart(False):
        assert mesh.add_up(term, "tensor") is term
    with left_apart(False), pytest.raises(NameError, match="tensor"):  # a sum, outside of a mesh
        mesh.add_up(term, "tensor")


def test_other_programs_start_together_too():
    """A prefill in chunks, steps with drafts, and a trace of the whole call."""
    model = load(EXAMPLE, connected((1, 2)))
    prompt = np.asarray(IDS[:, :8]) % model.config.vocab_size
    run = functools.partial(generate, max_new_tokens=6, stop_ids=())
    expected = run(model, prompt)
    for options in ({"prefill_chunk": 4}, {"draft": "lookup", "draft_tokens": 2}):
        np.testing.assert_array_equal(run(model, prompt, **options), expected)
    np.testing.assert_array_equal(jax.jit(run)(model, prompt), expected)


def test_a_mesh_that_is_not_connected_is_not_found():
    assert find_connected_mesh(load(EXAMPLE, make_mesh((1, 2)))) is None
    assert find_connected_mesh(load(EXAMPLE)) is None


@pytest.mark.parametrize("dispatch", ["all_to_all", "psum"])
def test_dispatched_tokens_run_module_by_module(dispatch):
    """In the program of each device, all devices have the same tokens."""
    model = load(EXAMPLE, connected((2, 1)), dispatch=dispatch)
    found = find_connected_mesh(model)
    assert (found is None) == (dispatch != "psum")
    prompt = np.asarray(IDS[:, :8]) % model.config.vocab_size
    tokens = [generate(m, prompt, max_new_tokens=6, stop_ids=()) for m in (model, load(EXAMPLE))]
    np.testing.assert_array_equal(*tokens)


def test_dispatch_in_a_whole_step_is_an_error():
    mesh = connected((2, 1))
    model = load(EXAMPLE, mesh, dispatch="all_to_all")
    ids = jnp.asarray(IDS % model.config.vocab_size)
    cache = model.init_cache(*ids.shape)
    with pytest.raises(ValueError, match="dispatch: expected 'psum' in the program of each device"):
        jax.eval_shape(on_each_device(generation._read, mesh), model, ids, cache)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16])
def test_values_of_the_first_device_come_by_a_collective(dtype):
    mesh, values = connected((2, 2)), jnp.arange(5).astype(dtype)
    run = jax.jit(lambda values: from_first_device(values, mesh))
    np.testing.assert_array_equal(run(values), values)
    assert collectives(run.lower(values).compile()) == {"all-reduce": 1}


def test_only_programs_of_connected_models_start_together():
    for mesh in (None, make_mesh((1, 2))):
        values = np.ones(2)
        assert start_together(load(EXAMPLE, mesh), values) is values
    assert start_together(object(), values) is values
    assert start_together(load(EXAMPLE, connected((1, 2))), values) is not values


def test_a_model_inside_of_your_own_shard_map_is_an_error():
    """It would get the whole arrays where it expects those of one shard."""
    mesh = connected((1, 2))
    model, whole = load(EXAMPLE, mesh), mesh.spec()
    run = jax.shard_map(model, mesh=mesh.mesh, in_specs=whole, out_specs=whole, check_vma=False)
    with pytest.raises(ValueError, match=r"(?i)manual|mesh"):
        jax.eval_shape(run, jnp.asarray(IDS))


def test_models_with_adapters_of_experts_run_module_by_module():
    """A step of each device would need to know how the adapters are sharded."""
    model = load(EXAMPLE, connected((2, 1)))
    assert find_connected_mesh(model) is not None
    add_lora(model, 2, targets="experts", rngs=nnx.Rngs(0))
    assert find_connected_mesh(model) is None


def loop_collectives(model, sampling):
    """Return the collectives of the loop of `generate`, whose logits take more than 1 MiB."""
    b, room = 80, 64
    cache = jax.eval_shape(lambda: model.init_cache(b, 128))
    state = jax.eval_shape(lambda: generation.State.begin(model.init_cache(b, 128), b, room))
    state = dataclasses.replace(state, cache=cache)
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    return collectives(generation.decode.lower(model, sampling, state, limit).compile())


def test_greedy_decoding_exchanges_only_the_largest_logits():
    model = load(EXAMPLE, connected((1, 2)))
    greedy = generation.make_sampling(0.0, None, 1.0, (), None)
    drawn = generation.make_sampling(1.0, None, 1.0, (), jax.random.key(0))
    assert "all-gather" not in loop_collectives(model, greedy)
    assert loop_collectives(model, drawn)["all-gather"] == 1


@pytest.mark.parametrize("shape", [(1, 2), (2, 4)])
def test_the_largest_of_all_shards_is_that_of_argmax(shape):
    """Also of NaN, of infinities, and of equal numbers."""
    mesh = connected(shape)
    rows = np.random.default_rng(0).integers(-3, 4, (40, 3, 64)).astype(np.float32)
    rows[1, :, 30], rows[2, 0, [5, 60]], rows[3] = np.nan, np.inf, -np.inf
    rows[4, 1, 60], rows[4, 1, 3] = np.nan, np.inf
    columns = mesh.spec(None, None, "tensor")
    run = jax.jit(
        mesh.shard_map(lambda own: find_largest(own, mesh), (columns,), (mesh.spec(), mesh.spec()))
    )
    index, value = run(rows)
    np.testing.assert_array_equal(index, np.argmax(rows, axis=-1))
    expected = np.take_along_axis(rows, np.asarray(index)[..., None], axis=-1)[..., 0]
    np.testing.assert_array_equal(value, expected)


def test_a_sampled_text_is_that_of_one_device():
    key, found = jax.random.key(1), []
    for mesh in (None, connected((1, 2))):
        model = load(EXAMPLE, mesh)
        prompt = np.asarray(IDS[:, :8]) % model.config.vocab_size
        how = {"max_new_tokens": 6, "stop_ids": (), "temperature": 1.0, "key": key}
        found.append(np.asarray(generate(model, prompt, **how)))
    np.testing.assert_array_equal(*found)
