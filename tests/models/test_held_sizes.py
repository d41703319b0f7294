"""Test that counts and sizes of ``config.json`` are refused before anything loops over them."""

import re

import numpy as np
import pytest
from support.files.checkpoint_edits import edited
from support.files.given import CHECKPOINTS, MODELS, WITH_EXPERTS, copy_with_config

from jax_nvfp4_moe import CheckpointError, load_model, load_moe
from jax_nvfp4_moe.checkpoint.folder import merge_text_config, read_config
from jax_nvfp4_moe.cli.inspection import inspect
from jax_nvfp4_moe.models.config import BOUNDS, MOST
from jax_nvfp4_moe.models.loading import find_architecture

QWEN = CHECKPOINTS / "qwen3moe-modelopt-w4a16"


def given_config(name):
    return merge_text_config(read_config(CHECKPOINTS / name))


def sizes(config):
    return find_architecture(config).read_config(config)


EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")
FAMILIES = {
    (given_config(folder)["architectures"][-1], folder in WITH_EXPERTS): folder for folder in MODELS
}
# Lengths may be large. So may numbers that have other bounds.
LARGE = {*BOUNDS, "model_max_length", *(name for name, most in MOST.items() if most > 2**20)}


def problems(folder, action=load_model):
    with pytest.raises(CheckpointError) as caught:
        action(folder)
    assert str(folder) in str(caught.value)
    return caught.value.problems


def is_read(config, changed):
    try:
        return sizes(changed) != sizes(config)
    except CheckpointError:
        return True


@pytest.mark.parametrize("folder", FAMILIES.values())
def test_every_size_has_a_bound(folder):
    """Each of 2,000,000 is refused by name, is not read, or is a length."""
    config = given_config(folder)
    for name, value in config.items():
        if type(value) is not int or name in LARGE:
            continue
        changed = {**config, name: 2_000_000}
        if is_read(config, changed):
            with pytest.raises(CheckpointError, match=rf"{name}|got 2000000"):
                sizes(changed)


@pytest.mark.parametrize("folder", FAMILIES.values())
def test_far_more_layers_or_experts_than_the_file_holds_are_one_sentence(folder, tmp_path):
    config = given_config(folder)
    many = {"num_hidden_layers": 1000}
    for key in ("layers_block_type", "hybrid_override_pattern"):
        if config.get(key):
            many[key] = config[key] * 500
    layers = copy_with_config(CHECKPOINTS / folder, tmp_path / "layers", **many)
    found = problems(layers, inspect)
    # Where the config lists all layers, the list differs from the number.
    assert "000 layers (num_hidden_layers" in found[0] or "expected" in found[0]
    assert len(found) < 6
    if folder not in WITH_EXPERTS:
        return
    name = next(name for name in EXPERTS if name in config)
    many = copy_with_config(CHECKPOINTS / folder, tmp_path / "experts", **{name: 1_000_000})
    found = problems(many, inspect)
    assert any(
        "config.json: 1000000 experts in a layer, but the file holds" in one for one in found
    )
    assert len(found) < 60


def test_layers_of_a_folder_that_holds_only_some(tmp_path):
    """Their names are listed where they are few, and the layers that are held can be loaded."""
    folder = copy_with_config(QWEN, tmp_path / "m", num_hidden_layers=40)
    assert any("model.layers.39.input_layernorm.weight" in one for one in problems(folder))
    assert load_moe(folder, 1).experts.params.num_experts == 16


def test_experts_that_one_layer_does_not_hold(tmp_path):
    folder = copy_with_config(QWEN, tmp_path / "m", num_experts=2000)
    found = problems(folder, lambda folder: load_moe(folder, 1))
    assert "2000 experts in a layer, but the file holds 16 at 'model.layers.1.mlp.exp" in found[0]


def test_heads_of_a_size_that_is_derived():
    config = given_config(QWEN.name) | {"head_dim": None, "hidden_size": 2**20}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    with pytest.raises(CheckpointError, match="head_dim: expected an integer up to 16384"):
        sizes(config)


ODD = [  # each of them was a traceback, or brought control characters into the message
    ("deepseek_v4", {"layer_types": None, "compress_ratios": [[1]]}, "compress_ratios: expected"),
    ("gpt_oss", {"rotary_dim": [1]}, "rotary_dim: .* changes what a model computes"),
    ("gpt_oss", {"scoring_func": {}}, "scoring_func: .* changes what a model computes"),
    ("granitemoehybrid", {"layer_types": 1}, "layer_types: expected a list of 2 values"),
    ("granitemoehybrid", {"layer_types": True}, "layer_types: expected a list of 2 values"),
    ("step3p7", {"mlp_layer_types": None, "moe_layers_enum": "1" * 5000}, "moe_layers_enum: exp"),
    ("step3p7", {"per_layer_config": {"1" * 5000: {}}}, "per_layer_config: expected layers"),
    ("gemma4", {"per_layer_config": {"1" * 5000: {}}}, "per_layer_config: expected layers"),
    (
        "gemma4",
        {"per_layer_config": {str(layer): {} for layer in range(2000)}},
        "per_layer_config: expected layers",
    ),
    (
        "hunyuan_v1_moe",
        {"moe_intermediate_size": 5, "intermediate_size": "\x1b[2J"},
        r"expected intermediate_size '.x1b.2J', got 5",
    ),
    ("minimax_m2", {"attn_type_list": [10**4000]}, "attn_type_list: .*, got 1000"),
    (
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"full_attn_layers": "x"}},
        "full_attn_layers: expected a list of integers",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), ODD)
def test_an_odd_value_is_one_sentence(name, changes, message, tmp_path):
    source = CHECKPOINTS / f"{name}-modelopt-w4a16"
    found = problems(copy_with_config(source, tmp_path / "m", **changes), inspect)
    assert re.search(message, found[0])
    assert len(found[0]) < 700
    assert found[0].isprintable()


@pytest.mark.parametrize("key", ["strategy", "dynamic"])
def test_a_list_in_place_of_a_word_of_fp8(key, tmp_path):
    source = CHECKPOINTS / "qwen3_moe-ct-mixed"
    section = read_config(source)["quantization_config"]
    inputs = [group["input_activations"] for group in section["config_groups"].values()]
    next(one for one in inputs if one and one["num_bits"] == 8)[key] = [1]
    folder = copy_with_config(source, tmp_path / "m", quantization_config=section)
    assert "is not supported for FP8" in problems(folder, inspect)[0]


@pytest.mark.parametrize("share", [1e308, -1e308, "\x1b[2J", 0.0])
def test_an_odd_share_of_mistral_4(share):
    config = given_config("mistral4-modelopt-w4a16")
    rope = {**config["rope_parameters"], "partial_rotary_factor": share}
    with pytest.raises(CheckpointError, match="partial_rotary_factor: expected") as caught:
        sizes({**config, "rope_parameters": rope})
    assert str(caught.value).isprintable()


def test_a_layer_of_5000_digits(tmp_path):
    def add(tensors):
        tensors[f"model.layers.{'1' * 5000}.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors[f"model.layers.{'2' * 5000}.self_attn.k_scale"] = np.zeros((), np.float32)

    found = problems(edited(tmp_path, QWEN.name, add), inspect)
    assert any("is not part of the model" in problem for problem in found)


def test_architectures_of_the_text_model_alone(tmp_path):
    names = [None, *given_config(QWEN.name)["architectures"]]
    outer = {
        "architectures": None,
        "text_config": {**given_config(QWEN.name), "architectures": names},
    }
    folder = copy_with_config(QWEN, tmp_path / "m", **outer)
    assert "architecture  Qwen3MoeForCausalLM\n" in inspect(folder)
