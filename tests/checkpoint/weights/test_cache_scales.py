"""Test the scales of an FP8 KV cache: under all names, missing, doubled, and not declared."""

import logging

import ml_dtypes
import numpy as np
import pytest
from support.files.checkpoint_edits import CT, W4A4, check, edited, load, problems_of

from jax_nvfp4_moe.checkpoint import LoadOptions, open_checkpoint
from jax_nvfp4_moe.checkpoint.weights.cache_scales import find_part

ATTENTION = "model.layers.0.self_attn"
OPTIONS = LoadOptions(only=ATTENTION)
DECLARED = {"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}}


def build_without_cache(w):
    sizes = {"q_proj": (256, 256), "k_proj": (128, 256), "v_proj": (128, 256)}
    for name, nk in {**sizes, "o_proj": (256, 256)}.items():
        w.linear(f"{ATTENTION}.{name}", *nk)
    return [w.array(f"{ATTENTION}.{name}_norm.weight", (64,)) for name in "qk"]


def build(w):
    build_without_cache(w)
    return w.cache_scales(ATTENTION, k=2, v=2)


def scales_of(tmp_path, tensors, name=W4A4, **config):
    """Return the scales of keys and values that a table reads from these tensors."""
    stored = {f"{ATTENTION}.{key}": np.asarray(value, np.float32) for key, value in tensors.items()}
    folder = edited(tmp_path, name, lambda t: t.update(stored), **(config or DECLARED))
    with open_checkpoint(folder) as checkpoint:
        scales = load(checkpoint, build, OPTIONS).scales
    return {key: list(map(float, value)) for key, value in scales.items()}


@pytest.mark.parametrize("name", [W4A4, CT])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("mla_attn.mla_attn.k_scale", "mla_attn.mla_attn.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("qkqkv_proj.k_scale", "qkqkv_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("k_cache.scale", "v_cache.scale"),
        ("k_cache_scale", "v_cache_scale"),
        ("attn.impl.k_scale", "attn.impl.v_scale"),
    ],
)
def test_scales_under_all_names(tmp_path, name, key, value):
    found = scales_of(tmp_path, {key: 0.25, value: [0.5]}, name)
    assert found == {"k": [0.25, 0.25], "v": [0.5, 0.5]}


@pytest.mark.parametrize(
    "name", ["kv_scale", "attn.kv_scale", "kv_cache_scale", "kv_b_proj.output_scale"]
)
def test_one_scale_for_keys_and_values(tmp_path, name, caplog):
    assert scales_of(tmp_path, {name: 0.25}) == {"k": [0.25, 0.25], "v": [0.25, 0.25]}
    assert "KV cache" not in caplog.text


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 1, 1), (1, 2, 1, 1), (1, 2)])
def test_a_scale_for_each_head(tmp_path, shape):
    tensors = {"k_scale": np.reshape([0.25, 2], shape), "v_scale": np.ones((1, 1, 1, 1))}
    assert scales_of(tmp_path, tensors) == {"k": [0.25, 2], "v": [1, 1]}


def test_a_scale_of_another_shape_is_a_problem(tmp_path):
    stored = {f"{ATTENTION}.kv_scale": np.ones(3, np.float32)}
    folder = edited(tmp_path, W4A4, lambda t: t.update(stored), **DECLARED)
    (problem,) = problems_of(folder, build, OPTIONS)
    assert problem.startswith(f"'{ATTENTION}.kv_scale'")


def test_a_scale_of_keys_alone_serves_values_too(tmp_path, caplog):
    assert scales_of(tmp_path, {"k_scale": 0.25}) == {"k": [0.25, 0.25], "v": [0.25, 0.25]}
    assert f"stores '{ATTENTION}.k_scale' alone as a scale of the KV cache" in caplog.text


def test_a_declared_cache_without_scales_warns_once(tmp_path, caplog):
    assert scales_of(tmp_path, {}) == {"k": [1, 1], "v": [1, 1]}
    (record,) = [record for record in caplog.records if "KV cache" in record.getMessage()]
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert "kv_cache_scheme declares an FP8 KV cache, but the file has no scale" in message
    assert f"in 1 of 1 attention modules, such as '{ATTENTION}': 1 is used" in message


@pytest.mark.parametrize("value", [0, -1, np.nan, np.inf, 1e-40])
def test_scales_that_cannot_be_are_one(tmp_path, caplog, value):
    assert scales_of(tmp_path, {"k_scale": value, "v_scale": 2}) == {"k": [1, 1], "v": [2, 2]}
    assert "a scale of the KV cache (k) is not a positive finite number of normal" in caplog.text


def test_two_scales_of_one_part_are_compared(tmp_path, caplog):
    equal = {"k_proj.k_scale": 0.25, "attn.k_scale": [0.25], "v_scale": 0.25, "kv_scale": 0.25}
    scales_of(tmp_path, equal)
    assert "differ" not in caplog.text
    assert scales_of(tmp_path, equal | {"attn.k_scale": 0.5})["k"] == [0.25, 0.25]
    assert f"'{ATTENTION}.k_proj.k_scale' is used, and '{ATTENTION}.attn.k_scale'" in caplog.text


def undeclared(tmp_path, tensors, **config):
    stored = {f"{ATTENTION}.{key}": value for key, value in tensors.items()}
    folder = edited(tmp_path, W4A4, lambda t: t.update(stored), **config)
    with open_checkpoint(folder) as checkpoint:
        check(checkpoint, build_without_cache, OPTIONS)


@pytest.mark.parametrize(
    "name", ["k_proj.k_scale", "kv_scale", "v_proj.output_scale", "v_cache.scale"]
)
def test_scales_of_a_cache_that_is_not_declared(tmp_path, caplog, name):
    undeclared(tmp_path, {name: np.ones(1, ml_dtypes.bfloat16)})
    assert caplog.text == ""
    undeclared(tmp_path, {name: np.full(1, 0.5, np.float32)})
    assert "stores scales of an FP8 KV cache, but no configuration declares" in caplog.text
    assert f"'{ATTENTION}.{name}'" in caplog.text
    caplog.clear()
    undeclared(tmp_path, {name: np.full(1, 0.5, np.float32)}, **DECLARED)
    assert "no configuration declares" not in caplog.text


@pytest.mark.parametrize("name", ["q_proj.output_scale", "q_scale", "attn.prob_scale"])
def test_scales_of_queries_are_compared_with_one(tmp_path, caplog, name):
    undeclared(tmp_path, {name: np.ones((), np.float32)})
    assert caplog.text == ""
    undeclared(tmp_path, {name: np.float32(2)})
    assert "scales of queries or of attention weights in FP8" in caplog.text


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.3.mixer.k_proj.k_scale", "k"),
        ("self_attn.prob_output_scale", "prob"),
        ("self_attn.q_cache.scale", "q"),
        ("k_proj.weight_scale", None),
        ("k_proj.input_scale", None),
        ("mlp.gate.e_score", None),
        ("mask_scale", None),
        ("o_proj.output_scale", None),
    ],
)
def test_which_tensors_are_scales(name, part):
    assert find_part(name) == part
