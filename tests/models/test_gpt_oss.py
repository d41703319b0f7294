"""Test gpt-oss against the tools that wrote its checkpoints, and which configs it accepts."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.files.checkpoint_edits import E2M1, edited, load, read_all
from support.files.given import CHECKPOINTS, copy_with_config, reference_tensors
from support.models.architecture import (
    EXACT,
    KERNELS,
    block_errors,
    logit_error,
    run,
)

from jax_nvfp4_moe import CheckpointError, load_model, load_moe
from jax_nvfp4_moe.checkpoint import open_checkpoint
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.models import gpt_oss

STACKED = CHECKPOINTS / "gpt_oss-modelopt-w4a16"
EACH = CHECKPOINTS / "gpt_oss-ct-w4a4"
FOLDERS = pytest.mark.parametrize("folder", [STACKED, EACH], ids=["stacked", "each"])
# The reference sums in another order: float32 logits of two layers differ by about 1e-6 of their
# RMS. A wrong rotation, window or sink changes them by more than 1e-2.
LOGITS = 1e-5


def tokens(folder):
    return jnp.asarray(reference_tensors(folder)["input_ids"], jnp.int32)


def test_the_bound_of_blocks_catches_unrounded_activations():
    assert block_errors(EACH, 0, scheme="w4a16")["experts"] > 1e-2


@FOLDERS
def test_the_reference_covers_windows(folder):
    """The prompts are at least two windows long."""
    config = gpt_oss.read_config(json.loads((folder / "config.json").read_text()))
    assert tokens(folder).shape[1] >= 2 * config.attention[0].window


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 7},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
        {"num_experts_per_tok": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_bound_of_logits_catches(tmp_path, changes):
    model = load_model(copy_with_config(STACKED, tmp_path / "m", **changes), **KERNELS)
    logits = run(model, tokens(STACKED))
    assert logit_error(logits, reference_tensors(STACKED)["logits"]) > 100 * LOGITS


@pytest.mark.parametrize("name", ["self_attn.sinks", "mlp.router.bias"])
def test_the_bound_of_logits_catches_what_is_left_out(tmp_path, name):
    def leave_out(tensors):
        tensors[f"model.layers.0.{name}"] *= 0

    model = load_model(edited(tmp_path, STACKED.name, leave_out), **KERNELS)
    logits = run(model, tokens(STACKED))
    assert logit_error(logits, reference_tensors(STACKED)["logits"]) > 100 * LOGITS


def test_alternating_rows_come_out_in_halves():
    """Even columns of the file are gate rows, and odd ones are up rows. Biases alternate too."""
    prefix = "model.layers.1.mlp.experts.gate_up_proj"
    tensors = read_all(STACKED)
    packed = np.swapaxes(tensors[prefix], 1, 2)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1)
    scale = np.swapaxes(tensors[f"{prefix}_weight_scale"], 1, 2).astype(np.float32)
    values = E2M1[codes] * np.repeat(scale * tensors[f"{prefix}_weight_scale_2"], 16, axis=-1)
    params = load_moe(STACKED, 1, **EXACT).experts.params.get_value()
    weight = params.gate_up.dequantize()
    np.testing.assert_array_equal(weight[:, :48], values[:, 0::2])
    np.testing.assert_array_equal(weight[:, 48:], values[:, 1::2])
    bias = tensors[f"{prefix}_bias"].astype(np.float32)
    np.testing.assert_array_equal(params.gate_up_bias[:, :48], bias[:, 0::2])
    np.testing.assert_array_equal(params.gate_up_bias[:, 48:], bias[:, 1::2])


def test_row_major_stacks_with_dotted_names_are_the_same(tmp_path):
    """The same experts are stored as ``[e, n, k/2]`` under ``.weight``, with a scale per expert."""

    def turn(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            stem, found, suffix = name.partition("_proj")
            value = tensors.pop(name)
            if suffix.endswith("_scale_2"):
                value = np.full(6, value)
            elif value.ndim == 3:
                value = np.swapaxes(value, 1, 2)
            tensors[f"{stem}{found}.{suffix.lstrip('_') or 'weight'}"] = value

    turned = load_moe(edited(tmp_path, STACKED.name, turn), 0, **EXACT).experts.params.get_value()
    plain = load_moe(STACKED, 0, **EXACT).experts.params.get_value()
    for ours, theirs in ((turned.gate_up, plain.gate_up), (turned.down, plain.down)):
        np.testing.assert_array_equal(ours.packed, theirs.packed)
        np.testing.assert_array_equal(ours.dequantize(), theirs.dequantize())
    np.testing.assert_array_equal(turned.gate_up_bias, plain.gate_up_bias)


def test_square_dense_stacks_lie_as_their_family_says(tmp_path):
    """With 32 inputs and 16 + 16 rows, only the architecture knows which axis is which."""
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((3, 32, 32)).astype(ml_dtypes.bfloat16)
    down = rng.standard_normal((3, 16, 32)).astype(ml_dtypes.bfloat16)
    write_safetensors(
        tmp_path / "model.safetensors", {"x.gate_up_proj": gate_up, "x.down_proj": down}
    )
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(tmp_path) as checkpoint:
        experts = load(
            checkpoint,
            lambda w: w.experts("x", 3, 32, 16, interleaved=True, inputs_first=True),
        ).params
    turned = np.swapaxes(gate_up, 1, 2)
    np.testing.assert_array_equal(experts.gate_up[:, :16], turned[:, 0::2])
    np.testing.assert_array_equal(experts.gate_up[:, 16:], turned[:, 1::2])
    np.testing.assert_array_equal(experts.down, np.swapaxes(down, 1, 2))


def test_mxfp4_that_does_not_fill_blocks_is_refused(tmp_path):
    """48 inputs are no whole number of MXFP4's blocks of 32, whatever the config declares."""

    def blocks(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        for layer in range(2):
            for stem, rows in (("gate_up_proj", 96), ("down_proj", 64)):
                name = f"model.layers.{layer}.mlp.experts.{stem}"
                tensors[f"{name}_blocks"] = np.zeros((6, rows, 2, 16), np.uint8)
                tensors[f"{name}_scales"] = np.zeros((6, rows, 2), np.uint8)
                tensors[f"{name}_bias"] = np.zeros((6, rows), ml_dtypes.bfloat16)

    with pytest.raises(CheckpointError, match=r"intermediate = 48: expected a multiple of 32"):
        load_model(edited(tmp_path, STACKED.name, blocks))


def test_published_spellings_of_one_config():
    config = json.loads((STACKED / "config.json").read_text())
    rope = dict(config["rope_parameters"])
    older = {n: v for n, v in config.items() if n not in ("rope_parameters", "num_experts_per_tok")}
    older |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "experts_per_token": config["num_experts_per_tok"],
        "swiglu_limit": 7.0,
        "layer_types": None,
    }
    assert gpt_oss.read_config(older) == gpt_oss.read_config(config)
    without = {n: v for n, v in older.items() if n not in ("rope_theta", "rope_scaling")}
    assert gpt_oss.read_config(without) == gpt_oss.read_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit: 5.0 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: expected a list of 2 values"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types: expected a list of 2 values"),
        ({"sliding_window": None}, "sliding_window: expected a number"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most 6 experts, got 7"),
        ({"partial_rotary_factor": 0.5}, "expected 1, because gpt-oss rotates whole heads"),
    ],
)
def test_configs_that_do_not_fit(changes, message):
    config = json.loads((STACKED / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        gpt_oss.read_config(config | changes)
