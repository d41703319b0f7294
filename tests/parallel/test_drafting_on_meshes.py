"""Drafts over a mesh of eight CPU devices: states and caches go back on each of them."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.files.drafted import write_drafted
from support.files.unquantized import dequantized
from support.models.drafters import Oracle

from jax_nvfp4_moe import generate, load_model
from jax_nvfp4_moe.inference import drafting

pytestmark = pytest.mark.eight_devices
MESHES = {
    "tensor": {"tensor": 2},
    "rows, experts and tensor": {"data": 2, "expert": 2, "tensor": 2},
}


def make_mesh(axes):
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_are_those_without_drafts(mesh, monkeypatch, tmp_path):
    """Keys and values, and the states of a delta net, whose heads and rows are sharded.

    The weights are not quantized: blocks of 16 do not divide the sizes of this model.
    """
    folder = dequantized("qwen3_next-modelopt-w4a16", tmp_path)
    model = load_model(folder, dtype="float32", mesh=make_mesh(MESHES[mesh]))
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=(4, 6), dtype=np.int32)
    given = {"max_new_tokens": 8, "stop_ids": (), "lengths": [6, 3, 5, 6]}
    plain = np.asarray(generate(model, ids, **given))
    oracle = Oracle(plain, "alternating")
    monkeypatch.setattr(drafting, "DRAFTERS", {**drafting.DRAFTERS, "lookup": oracle})
    drafted, stats = generate(model, ids, **given, draft="lookup", draft_tokens=2, stats=True)
    np.testing.assert_array_equal(drafted, plain)
    assert (np.asarray(stats.accepted) > 0).all()


def test_drafting_layers(tmp_path):
    folder = write_drafted("qwen3_next-modelopt-w4a16", tmp_path / "folder")
    one, several = (
        load_model(folder, draft="mtp", dtype="float32", mesh=mesh)
        for mesh in (None, make_mesh({"data": 2, "expert": 2}))
    )
    ids = np.random.default_rng(0).integers(one.config.vocab_size, size=(2, 6), dtype=np.int32)
    given = {"max_new_tokens": 6, "stop_ids": (), "draft": "mtp", "draft_tokens": 2, "stats": True}
    expected, told = generate(one, ids, **given)
    tokens, stats = generate(several, ids, **given)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(stats.accepted, told.accepted)
