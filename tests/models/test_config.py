"""Test the values of ``config.json`` that all readers check alike: numbers, and positions."""

import functools
import json

import numpy as np
import pytest
from support.files.given import CHECKPOINTS, MODELS, copy_with_config

from jax_nvfp4_moe import CheckpointError, load_model
from jax_nvfp4_moe.checkpoint.folder import merge_text_config, parse_object, read_config
from jax_nvfp4_moe.models.loading import find_architecture

QWEN = CHECKPOINTS / "qwen3moe-modelopt-w4a16"
EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "hc_eps", "layer_norm_eps")
FACTORS = (
    "routed_scaling_factor",
    "moe_router_scaling_factor",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "clip_qkv",
    "floor_scale",
)
# Numbers of a file that no model can use. JSON of Python has the words, and 1e999 is infinite.
WRONG = ("NaN", "Infinity", "-Infinity", "1e999", "1e39", "-1.0", "-1e-6", "1" + 400 * "0")


@functools.cache
def given_config(name):
    return merge_text_config(read_config(CHECKPOINTS / name))


def sizes(config):
    return find_architecture(config).read_config(config)


def families(*names):
    """Return one folder with each of the fields `names`, for each architecture that has it."""
    found = {}
    for folder in MODELS:
        config = given_config(folder)
        for name in names:
            if config.get(name) is not None:
                found.setdefault((config["architectures"][-1], name), folder)
    return [(folder, name) for (_, name), folder in found.items()]


NUMBERS = families(*EPSILONS, *FACTORS)


def test_every_family_has_an_epsilon():
    assert {given_config(folder)["architectures"][-1] for folder in MODELS} == {
        given_config(folder)["architectures"][-1] for folder, name in NUMBERS if name in EPSILONS
    }


@pytest.mark.parametrize(("folder", "name"), NUMBERS)
def test_numbers_that_no_model_can_use_are_refused(folder, name):
    config = given_config(folder)
    for text in WRONG:
        value = parse_object(b'{"x": %s}' % text.encode())["x"]
        with pytest.raises(CheckpointError, match=f"{name}: expected"):
            sizes({**config, name: value})
    for value in (0, 1e-50) if name != "logits_scaling" else (0,):
        with pytest.raises(CheckpointError, match=f"{name}: expected"):
            sizes({**config, name: value})


def test_bases_that_no_model_can_use_are_refused():
    config = given_config(QWEN.name)
    for wrong in (0, -1.0, float("nan"), float("inf"), 1e-50):
        with pytest.raises(CheckpointError, match="rope_theta: expected"):
            sizes({**config, "rope_parameters": {"rope_theta": wrong}})
        with pytest.raises(CheckpointError, match="rope_theta: expected"):
            sizes({**config, "rope_parameters": None, "rope_theta": wrong})
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}
    with pytest.raises(CheckpointError, match="rope_theta: expected more than 1 with YaRN"):
        sizes({**config, "rope_parameters": rope})


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-1", "1e9", "0", "1" + 400 * "0", "[1]"])
def test_numbers_in_lists_and_objects_are_refused_too(text):
    """Each of these values is one sentence, and never another error or a large allocation."""
    value = parse_object(b'{"x": %s}' % text.encode())["x"]
    huge = len(text) > 100
    cases = [
        ("mistral4", {"rope_parameters": {"partial_rotary_factor": value}}),
        ("deepseek_v4", {"partial_rotary_factor": value, "rope_parameters": None}),
        ("glm4_moe-groups", {"rope_parameters": {"partial_rotary_factor": value}}),
        ("qwen3_next", {"rope_parameters": {"partial_rotary_factor": value}}),
    ]
    if huge or text == "[1]":
        cases += [
            ("step3p7", {"swiglu_limits": [value] * 3}),
            ("granitemoehybrid", {"time_step_limit": [0.0, value]}),
            ("nemotron_h", {"time_step_limit": [0.0, value], "auto_map": {}}),
        ]
    for name, changes in cases:
        given = given_config(f"{name}-modelopt-w4a16")
        rope = changes.get("rope_parameters") or {}
        changes |= {one: {**given[one], **rope} for one in ("rope_parameters",) if rope}
        with pytest.raises(CheckpointError, match=r"partial_rotary|swiglu_limits|time_step_limit"):
            sizes({**given, **changes})


def test_more_positions_than_int32_has_are_refused():
    for kind in ("yarn", "linear"):
        rope = {"rope_type": kind, "factor": 1e9}
        with pytest.raises(CheckpointError, match="512 positions times"):
            sizes({**given_config(QWEN.name), "rope_parameters": rope})


def test_an_epsilon_above_one_is_refused():
    for folder, name in NUMBERS:
        if name in EPSILONS:
            with pytest.raises(CheckpointError, match=f"{name}: expected"):
                sizes({**given_config(folder), name: 1e3})


@pytest.mark.parametrize("wrong", [-4.0, float("nan"), float("inf"), 0, 0.5, "4"])
def test_rope_factors_that_no_model_can_use_are_refused(wrong):
    for kind in ("yarn", "linear", "llama3"):
        rope = {"rope_type": kind, "factor": wrong, "low_freq_factor": 1, "high_freq_factor": 4}
        with pytest.raises(CheckpointError, match="factor: expected"):
            sizes({**given_config(QWEN.name), "rope_parameters": rope})
    rope = {"rope_type": "yarn", "factor": 2.0, "attention_factor": wrong}
    if wrong != 0.5:
        with pytest.raises(CheckpointError, match="attention_factor: expected"):
            sizes({**given_config(QWEN.name), "rope_parameters": rope})


@pytest.mark.parametrize(
    ("rope", "top", "expected"),
    [
        ({"rope_type": "default"}, {}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, {}, 256),
        ({"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 64}, {}, 160),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, {}, 16384),
        ({"type": "yarn", "factor": 4.0}, {}, 2048),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, {}, 512),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
            {"original_max_position_embeddings": 64},
            256,
        ),
        ({"rope_type": "linear", "factor": 4.0}, {}, 2048),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 64},
            {},
            512,
        ),
        ({"type": "mrope", "mrope_section": [8, 4, 4]}, {}, 512),
    ],
)
def test_the_number_of_positions(rope, top, expected):
    """The rule of vLLM's `_get_and_verify_max_len`."""
    config = {**given_config(QWEN.name), **top, "max_position_embeddings": 512}
    for name in ("rope_scaling", "rope_parameters"):
        other = {"rope_scaling": None, "rope_parameters": None} | {name: rope}
        assert sizes(config | other).max_positions == expected


@pytest.mark.parametrize("folder", MODELS)
def test_yarn_lengthens_every_family_that_rotates(folder):
    config = dict(given_config(folder))
    config.pop("original_max_position_embeddings", None)  # which takes precedence
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    given = config.get("rope_scaling") or config.get("rope_parameters")
    if not given:
        return  # of Kimi-Linear and Nemotron-H, whose attention does not rotate
    nested = {name: one for name, one in given.items() if isinstance(one, dict)}
    rope = {name: one | yarn for name, one in nested.items()} if nested else {**given, **yarn}
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rotates = config.get("position_embedding_type", "rope") == "rope"
    rotates &= config["model_type"] != "phi3"  # where "yarn" is a name of LongRoPE
    expected = 256 if rotates else config["max_position_embeddings"]
    assert sizes({**config, name: rope}).max_positions == expected


def test_positions_beyond_those_are_refused_with_the_number(tmp_path):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    folder = copy_with_config(QWEN, tmp_path / "m", rope_parameters=rope, max_position_embeddings=8)
    model = load_model(folder)
    assert model.config.max_positions == 32
    with pytest.raises(ValueError, match="33 tokens, but the model has 32 positions"):
        model(np.zeros((1, 33), np.int32))


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "ntk"])
def test_other_ropes_are_refused_by_name(kind):
    rope = {"rope_type": kind, "factor": 2.0}
    with pytest.raises(CheckpointError, match=f"rope_type: '{kind}' is not supported"):
        sizes({**given_config(QWEN.name), "rope_scaling": rope})


def test_one_rope_for_each_type_of_layers():
    """Where all layers share one rotation, objects by type must agree."""
    config = given_config(QWEN.name)
    one, other = {"rope_type": "default", "rope_theta": 5e3}, {"rope_theta": 7e3}
    flat = sizes({**config, "rope_parameters": one})
    nested = {"full_attention": one, "sliding_attention": one}
    assert sizes({**config, "rope_parameters": nested}) == flat
    with pytest.raises(CheckpointError, match=r"one rotary embedding, .*different ones"):
        sizes({**config, "rope_parameters": nested | {"sliding_attention": other}})


@pytest.mark.parametrize("local", [None, 7e3])
def test_a_flat_rope_of_gemma_4(local):
    """vLLM applies it to all layers, with another base in those with a window."""
    config = given_config("gemma4-modelopt-w4a16")
    full = {"rope_type": "proportional", "rope_theta": 2e4, "partial_rotary_factor": 0.25}
    given = {"rope_parameters": full, "rope_local_base_freq": local}
    expected = {"full_attention": full, "sliding_attention": full | {"rope_theta": local or 1e4}}
    assert sizes(config | given) == sizes(config | {"rope_parameters": expected})


def test_published_positions_do_not_change():
    """The published configurations declare the context that their YaRN gives."""
    published = json.loads((CHECKPOINTS / "published_configurations.json").read_text())
    for name, config in published.items():
        folder = next(one for one in MODELS if one.startswith(f"{name}-modelopt"))
        row = find_architecture(given_config(folder))
        declared = config.get("max_position_embeddings") or config["model_max_length"]
        assert row.read_config(config).max_positions == declared
