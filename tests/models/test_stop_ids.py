"""Test that a loaded model carries the stop ids of its checkpoint."""

import json

import pytest
from flax import nnx
from support.files.given import CHECKPOINTS, copy_with_config

from jax_nvfp4_moe import CheckpointError, load_model
from jax_nvfp4_moe.checkpoint.table import WeightTable

GIVEN = CHECKPOINTS / "qwen3moe-modelopt-w4a16"


def test_the_ids_of_all_files(tmp_path):
    """They are static, so that copies of the model have them, and none is none."""
    assert load_model(GIVEN).stop_ids == ()
    folder = copy_with_config(GIVEN, tmp_path / "m", eos_token_id=[7, 5])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    vocabulary = {"model": {"vocab": {"<s>": 1, "</s>": 2}}}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    model = load_model(folder)
    assert model.stop_ids == (9, 7, 5, 2)
    assert nnx.merge(*nnx.split(model)).stop_ids == nnx.clone(model).stop_ids == model.stop_ids


def test_ids_of_a_wrong_type_are_said_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(WeightTable, "open_reader", None)
    folder = copy_with_config(GIVEN, tmp_path / "m", eos_token_id="</s>")
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id: expected a token id"):
        load_model(folder)
