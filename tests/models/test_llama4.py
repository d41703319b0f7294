"""Test Llama 4 against the tools that wrote its checkpoints, and which configs it accepts."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS, copy_with_config, reference_tensors
from support.models.architecture import (
    KERNELS,
    block_errors,
    logit_error,
    run,
)

from jax_nvfp4_moe import CheckpointError, load_model, load_moe
from jax_nvfp4_moe.models import llama4

STACKED = CHECKPOINTS / "llama4_text-modelopt-w4a16"  # Llama4ForCausalLM
EACH = CHECKPOINTS / "llama4-ct-w4a4"  # Llama4ForConditionalGeneration, with a vision tower
FOLDERS = pytest.mark.parametrize("folder", [STACKED, EACH], ids=["stacked", "each"])
# The reference sums in another order: float32 logits of four layers differ by about 1e-6 of their
# RMS. A wrong rotation, chunk or temperature changes them by more than 1e-2.
LOGITS = 1e-5


def tokens(folder):
    return jnp.asarray(reference_tensors(folder)["input_ids"], jnp.int32)


def config_of(folder=STACKED):
    return json.loads((folder / "config.json").read_text())


def test_the_bound_of_blocks_catches_unrounded_activations():
    assert block_errors(EACH, 1, scheme="w4a16")["experts"] > 1e-2


@FOLDERS
def test_the_reference_covers_chunks_and_temperatures(folder):
    """The prompt is two chunks long, and its temperature changes four times."""
    given = config_of(folder)
    config = llama4.read_config(given.get("text_config", given))
    length = tokens(folder).shape[1]
    assert length >= 2 * config.chunks[0]
    assert length >= 4 * config.temperature[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_chunk_size": 15},
        {"layer_types": ["full_attention"] * 4},
        {"no_rope_layers": [1, 1, 1, 1]},
        {"attn_temperature_tuning": False},
        {"floor_scale": 16},
        {"use_qk_norm": False},
        {"num_experts_per_tok": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_bound_of_logits_catches(tmp_path, changes):
    model = load_model(copy_with_config(STACKED, tmp_path / "m", **changes), **KERNELS)
    logits = run(model, tokens(STACKED))
    assert logit_error(logits, reference_tensors(STACKED)["logits"]) > 100 * LOGITS


def test_layers_without_experts():
    for layer in (0, 2, 4, -1):
        with pytest.raises(ValueError, match=rf"layer: expected .* got {layer}"):
            load_moe(STACKED, layer)


def test_defaults_of_the_config():
    """Missing fields get the values that transformers gives them."""
    names = ("layer_types", "no_rope_layers", "moe_layers", "no_rope_layer_interval")
    short = {name: value for name, value in config_of().items() if name not in names}
    assert llama4.read_config(short) == llama4.read_config(config_of())
    read = llama4.read_config(short | {"no_rope_layers": [], "no_rope_layer_interval": 2})
    assert read.rotated == (True, False, True, False)
    assert read.chunks == (16, None, 16, None)
    assert llama4.read_config(short | {"interleave_moe_layer_step": 1}).dense_layers == set()
    assert llama4.read_config(short | {"moe_layers": [0]}).dense_layers == {1, 2, 3}


def test_published_configs():
    """The tuning may be an integer, the rotation may have no blend, and both may be off."""
    scaling = {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    }
    older = {n: v for n, v in config_of().items() if n != "rope_parameters"}
    older |= {"rope_theta": 500000.0, "rope_scaling": scaling, "attn_temperature_tuning": 4}
    read = llama4.read_config(older)
    plain = np.array(llama4.read_config(older | {"rope_scaling": None}).rope.frequencies)
    slowed = 64 * plain / (2 * np.pi) < 1
    assert 0 < slowed.sum() < len(plain)
    eps = float(4 * np.finfo(np.float32).eps)
    np.testing.assert_allclose(read.rope.frequencies, np.where(slowed, plain / 16, plain), rtol=eps)
    assert read.temperature == (0.1, 8.0)
    assert llama4.read_config(older | {"attn_temperature_tuning": 0}).temperature is None
    without = {n: v for n, v in older.items() if n not in ("rope_theta", "rope_scaling")}
    np.testing.assert_allclose(llama4.read_config(without).rope.frequencies, plain, rtol=eps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: expected a list of 4 values"),
        ({"attention_chunk_size": None}, "attention_chunk_size: expected a number"),
        ({"no_rope_layers": [1]}, "no_rope_layers: expected 4 integers, got 1"),
        ({"floor_scale": 0}, "floor_scale: expected a positive number"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning: expected true or false"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: expected at most 4 experts, got 9"),
        ({"partial_rotary_factor": 0.5}, "expected 1, because Llama 4 rotates whole heads"),
    ],
)
def test_configs_that_do_not_fit(changes, message):
    with pytest.raises(CheckpointError, match=message):
        llama4.read_config(config_of() | changes)
