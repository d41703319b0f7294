"""Test `mesh="auto"`: the predicted bytes of each device, and the mesh that follows from them."""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.devices.host_devices import BOUND, IDS, difference, make_mesh
from support.files.given import CHECKPOINTS

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.parallel import automatic_mesh

pytestmark = pytest.mark.eight_devices
# Folders whose models have some, many or all of their weights outside of the experts.
EXPERTS, HYBRID, DENSE = (
    CHECKPOINTS / f"{name}-modelopt-w4a16" for name in ("qwen3moe", "nemotron_h", "llama")
)


def bytes_on(model, device):
    """Return the bytes of the arrays of a model that lie on one device."""
    arrays = jax.tree.leaves(nnx.state(model))
    shards = [shard for array in arrays for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def mesh_of(model):
    """Return the sizes of the axes of a model's mesh; None without a mesh."""
    found = {tuple(array.sharding.mesh.shape.items()) for array in sharded(model)}
    assert len(found) < 2
    return dict(found.pop()) if found else None


def sharded(model):
    arrays = jax.tree.leaves(nnx.state(model))
    return [array for array in arrays if isinstance(array.sharding, jax.sharding.NamedSharding)]


@pytest.fixture
def given_memory(monkeypatch):
    """Return a function that sets the bytes of memory that all devices say they have."""

    def give(limit):
        monkeypatch.setattr(automatic_mesh, "memory_limit", lambda device: limit)

    return give


@pytest.fixture
def predictions(monkeypatch):
    """Return a list that gets the predicted bytes of each mesh that is tried."""
    found, real = [], automatic_mesh.bytes_of_one_device

    def note(model, mesh):
        found.append((None if mesh is None else dict(mesh.shape), real(model, mesh)))
        return found[-1][1]

    monkeypatch.setattr(automatic_mesh, "bytes_of_one_device", note)
    return found


@pytest.mark.parametrize("folder", [EXPERTS, HYBRID, DENSE], ids=lambda folder: folder.name)
def test_predicted_bytes_are_those_of_the_loaded_model(folder, given_memory, predictions):
    given_memory(1)  # no mesh has room, so that all of them are tried
    load_model(folder, mesh="auto")
    assert len(predictions) > 3
    for sizes, predicted in predictions:
        count = 1 if sizes is None else math.prod(sizes.values())
        if count in (1, 2, 8):  # others take time, and follow the same rule
            mesh = None if sizes is None else make_mesh(tuple(sizes.values()))
            assert predicted == bytes_on(load_model(folder, mesh=mesh), jax.devices()[0]), sizes


@pytest.mark.parametrize(
    ("folder", "share", "expected"),
    [
        (EXPERTS, 1.3, None),
        (EXPERTS, 1.2, {"expert": 2, "tensor": 1}),
        (DENSE, 1.2, {"expert": 1, "tensor": 2}),
        (HYBRID, 1.0, {"expert": 8, "tensor": 1}),
    ],
)
def test_the_fewest_devices_with_room_are_taken(folder, share, expected, given_memory):
    whole = bytes_on(load_model(folder), jax.devices()[0])
    given_memory(share * whole)
    assert mesh_of(load_model(folder, mesh="auto")) == expected


def test_a_model_without_room_gets_the_smallest_parts_and_a_warning(
    given_memory, predictions, caplog
):
    given_memory(1000)
    with caplog.at_level(logging.WARNING, "jax_nvfp4_moe"):
        model = load_model(DENSE, mesh="auto")
    least = min(size for _, size in predictions)
    assert bytes_on(model, jax.devices()[0]) == least
    (message,) = (record.getMessage() for record in caplog.records)
    assert "little is left for caches" in message


def test_devices_of_unknown_memory_are_not_shared(given_memory):
    given_memory(None)
    assert mesh_of(load_model(EXPERTS, mesh="auto")) is None


def test_logits_are_those_of_one_device(given_memory):
    one = load_model(EXPERTS, dtype=jnp.float32)
    given_memory(0.8 * bytes_on(one, jax.devices()[0]))
    shared = load_model(EXPERTS, dtype=jnp.float32, mesh="auto")
    assert mesh_of(shared) is not None
    ids = IDS % one.config.vocab_size
    assert difference(np.asarray(shared(ids)), np.asarray(one(ids))) < BOUND


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": "all"}, "mesh: expected a jax.sharding.Mesh, 'auto' or None, got 'all'"),
        (
            {"mesh": "auto", "axis_names": {"expert": "ep"}},
            r"axis_names: expected None with mesh='auto'.* got \{'expert': 'ep'\}",
        ),
        ({"mesh": "auto", "dispatch": "all_to_all"}, "dispatch: expected a mesh with an axis"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_model(EXPERTS, **arguments)
