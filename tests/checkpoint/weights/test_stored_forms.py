"""Test that what is stored decides where a config says something else, or leaves it open."""

import json
import logging

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.files.checkpoint_edits import (
    CT,
    EXPERTS,
    GIVEN,
    W4A4,
    W4A16,
    build_model,
    edited,
    load,
    load_moe,
    problems_of,
    tool_weight,
)

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint import open_checkpoint
from jax_nvfp4_moe.checkpoint.safetensors import TensorInfo
from jax_nvfp4_moe.checkpoint.weights.stored_forms import StoredForm, Weight, find_forms
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.scheme import FP8ActivationScaling, Scheme

Q = "model.layers.0.self_attn.q_proj"
E4M3 = ml_dtypes.float8_e4m3fn
EIGHT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
DYNAMIC = EIGHT | {"strategy": "token", "dynamic": True}


def without_scales(tensors):
    for name in [name for name in tensors if name.endswith("input_scale")]:
        del tensors[name]


def unlabelled(folder):
    """Remove config_groups, so that only the name of the algorithm speaks of activations."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["config_groups"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_label_without_any_input_scale_is_weights_alone(tmp_path, caplog):
    folder = unlabelled(edited(tmp_path, W4A4, without_scales))
    moe = nvfp4.load_moe(folder, 1, dtype=jnp.float32, scheme="checkpoint")
    assert moe.scheme == "w4a16"
    assert f"'{EXPERTS}.0.gate_proj' is labelled w4a4 (" in caplog.text
    assert "quant_algo NVFP4), but the file stores no input scale" in caplog.text
    with pytest.raises(ValueError, match="w4a4 needs input scales, and these weights have none"):
        nvfp4.load_moe(folder, 1, scheme="w4a4")


def test_a_label_with_an_input_scale_anywhere_is_w4a4(tmp_path, caplog):
    def edit(tensors):
        kept = f"{EXPERTS}.3.up_proj.input_scale", f"{EXPERTS}.3.down_proj.input_scale"
        found = {name: tensors[name] for name in kept}
        without_scales(tensors)
        tensors.update(found)

    assert load_moe(unlabelled(edited(tmp_path, W4A4, edit))).checkpoint_scheme == "w4a4"
    assert "labelled" not in caplog.text


def test_declared_activations_without_any_input_scale_are_a_problem(tmp_path):
    for name in (W4A4, CT):
        remove = {"input_global_scale": None} if name == CT else {}

        def edit(tensors, remove=remove):
            for key in [k for k in tensors if k.endswith(("input_scale", *remove))]:
                del tensors[key]

        problems = problems_of(edited(tmp_path, name, edit), build_model)
        assert any("is declared w4a4, but the file has no input scales" in p for p in problems)


def test_input_scales_of_weights_alone_are_ignored_with_a_note(tmp_path, caplog):
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    groups = {"g": {"weights": {"num_bits": 4, "type": "float"}, "targets": ["Linear"]}}
    folder = edited(tmp_path, W4A4, lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"] = groups
    (folder / "config.json").write_text(json.dumps(config))
    params, scheme = load_moe(folder)
    assert scheme == "w4a16"
    assert not params.has_input_scales
    assert "input scales are ignored: the checkpoint declares quantized weights only" in caplog.text


def store_fp8(tensors, module, divides, rows=True):
    """Store a linear in FP8, with one scale for each row or one for all; return its values."""
    weight = tool_weight(tensors, module, divides)
    for name in [name for name in tensors if name.startswith(f"{module}.")]:
        del tensors[name]
    scale = np.abs(weight).max(axis=1, keepdims=True) / 448 if rows else np.float32(0.001)
    values = (weight / scale).astype(E4M3)
    tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"] = values, np.float32(scale)
    return values.astype(np.float32) * scale


def read_linear(folder):
    with open_checkpoint(folder) as checkpoint:
        return load(checkpoint, build_model)[3]


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("excluded", [False, True])
def test_stored_fp8_wins_over_a_declaration(tmp_path, caplog, excluded, calibrated):
    expected = []

    def edit(tensors):
        expected.append(store_fp8(tensors, Q, False))
        if calibrated:
            tensors[f"{Q}.input_scale"] = np.float32(0.01)

    lists = {"exclude_modules": [Q], "ignore": [Q]} if excluded else {}
    linear = read_linear(edited(tmp_path, W4A4, edit, **lists))
    scheme = FP8ActivationScaling.STATIC if calibrated else FP8ActivationScaling.WEIGHTS
    assert linear.checkpoint_scheme is scheme
    np.testing.assert_array_equal(linear.weight.dequantize(jnp.float32), expected[0])
    said = "dense" if excluded else "w4a4"
    assert f"'{Q}' holds FP8 values but is declared {said} (" in caplog.text
    assert f"it is read as {scheme}" in caplog.text


def test_stored_fp8_takes_the_scheme_of_the_group_of_the_file(tmp_path, caplog):
    group = {"targets": ["re:nothing"], "weights": EIGHT, "input_activations": DYNAMIC}

    def folder_with(ignore):
        folder = edited(tmp_path, CT, lambda tensors: store_fp8(tensors, Q, True), ignore=ignore)
        config = json.loads((folder / "config.json").read_text())
        groups = config["quantization_config"]["config_groups"]
        groups["group_1"] = group | {"format": "float-quantized"}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    for ignore in ([Q], []):
        linear = read_linear(folder_with(ignore))
        assert linear.checkpoint_scheme is FP8ActivationScaling.TOKEN
        assert f"'{Q}' holds FP8 values but is declared {'dense' if ignore else 'w4a4'}" in (
            caplog.text
        )


@pytest.mark.parametrize("first", ["nvfp4", "fp8"])
def test_the_stored_form_chooses_between_groups_that_overlap(tmp_path, caplog, first):
    eight = {"weights": EIGHT, "input_activations": DYNAMIC, "format": "float-quantized"}
    folder = edited(tmp_path, CT, lambda tensors: store_fp8(tensors, Q, True))
    config = json.loads((folder / "config.json").read_text())
    section = config["quantization_config"]
    (own,) = section["config_groups"].values()
    groups = {
        "nvfp4": own | {"targets": ["re:.*layers.*"]},
        "fp8": eight | {"targets": ["re:.*layers.*"]},
    }
    section["config_groups"] = {first: groups[first], **groups}
    (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as checkpoint:
        linears = load(checkpoint, build_model)
    assert linears[3].checkpoint_scheme is FP8ActivationScaling.TOKEN
    assert linears[4].checkpoint_scheme is Scheme.W4A4
    assert load_moe(folder).checkpoint_scheme is Scheme.W4A4
    assert "but is declared" not in caplog.text


def test_stored_floats_win_over_a_declaration(tmp_path, caplog):
    def edit(tensors):
        weight = tool_weight(tensors, Q, False).astype(ml_dtypes.bfloat16)
        for name in [name for name in tensors if name.startswith(f"{Q}.")]:
            del tensors[name]
        tensors[f"{Q}.weight"] = weight

    assert read_linear(edited(tmp_path, W4A4, edit)).checkpoint_scheme is None
    assert f"'{Q}' is stored in floats but declared w4a4 (config.json: " in caplog.text


def test_stacked_experts_that_are_declared_dense(tmp_path, caplog):
    def edit(tensors):
        parts = {"weight": "", "weight_scale": "_weight_scale", "weight_scale_2": "_weight_scale_2"}
        for part, name in parts.items():
            one = {
                projection: np.stack(
                    [tensors.pop(f"{EXPERTS}.{e}.{projection}.{part}") for e in range(16)]
                )
                for projection in ("gate_proj", "up_proj", "down_proj")
            }
            up = one["gate_proj"], one["up_proj"]
            joined = np.maximum(*up) if part == "weight_scale_2" else np.concatenate(up, axis=1)
            tensors[f"{EXPERTS}.gate_up_proj{name}"] = joined
            tensors[f"{EXPERTS}.down_proj{name}"] = one["down_proj"]

    lists = {"exclude_modules": ["*.experts*"], "ignore": ["*.experts*"]}
    params, scheme = load_moe(edited(tmp_path, W4A16, edit, **lists))
    given = load_moe(GIVEN / W4A16).params
    assert scheme is Scheme.W4A16
    np.testing.assert_array_equal(params.down.packed, given.down.packed)
    assert f"'{EXPERTS}.gate_up_proj' holds NVFP4 codes but is declared dense" in caplog.text


def test_experts_in_fp8_that_are_declared_nvfp4(tmp_path, caplog):
    def edit(tensors):
        for e in range(16):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                store_fp8(tensors, f"{EXPERTS}.{e}.{projection}", False)

    params, scheme = load_moe(edited(tmp_path, W4A4, edit))
    assert scheme is FP8ActivationScaling.WEIGHTS
    assert params.gate_up.values.dtype == E4M3
    assert f"'{EXPERTS}.0.gate_proj' holds FP8 values but is declared w4a4 (" in caplog.text
    assert "and so for 47 other modules" in caplog.text


@pytest.mark.parametrize("name", [W4A4, CT])
def test_a_file_without_any_quantization_config(tmp_path, caplog, name):
    folder = edited(tmp_path, name, lambda tensors: None)
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    params, scheme = load_moe(folder)
    given = load_moe(GIVEN / name).params
    assert scheme is Scheme.W4A4
    np.testing.assert_array_equal(params.gate_up_input_scale, given.gate_up_input_scale)
    np.testing.assert_array_equal(params.gate_up.global_scale, given.gate_up.global_scale)
    assert "declared dense (no quantization config): what is stored decides" in caplog.text


def test_a_quantized_router_of_compressed_tensors(tmp_path, caplog):
    gate, values = "model.layers.0.mlp.gate", []

    def edit(tensors):
        draw = np.random.default_rng(0).integers(0, 256, (16, 128))
        tensors[f"{gate}.weight_packed"] = draw.astype(np.uint8)
        tensors[f"{gate}.weight_scale"] = np.ones((16, 16), E4M3)
        tensors[f"{gate}.weight_global_scale"] = np.ones(1, np.float32)
        del tensors[f"{gate}.weight"]
        values.append(tool_weight(tensors, gate, divides=True))

    moe = nvfp4.load_moe(edited(tmp_path, CT, edit), 0, dtype=jnp.float32, backend="reference")
    np.testing.assert_array_equal(moe.token_router.weight.get_value(), values[0])
    assert f"'{gate}' holds NVFP4 codes but is declared dense" in caplog.text


def info(dtype, *shape):
    return TensorInfo("name", "file", dtype, shape, 0, 0)


@pytest.mark.parametrize(
    ("values", "scale", "forms"),
    [
        (("U8", 256, 128), ("F8_E4M3", 256, 16), [StoredForm.NVFP4]),
        (("F4", 256, 256), ("F8_E4M3", 256, 16), [StoredForm.NVFP4]),
        (("U8", 256, 128), ("F32",), []),
        (("U8", 256, 128), None, []),
        (("BF16", 256, 256), None, [StoredForm.DENSE]),
        (("BF16", 256, 256), ("F32",), []),
        (("F8_E4M3", 256, 512), None, []),
        (("F8_E4M3", 256, 512), ("F32",), [StoredForm.FP8]),
        (("F8_E4M3", 256, 512), ("BF16", 256, 1), [StoredForm.FP8]),
        (("F8_E4M3", 256, 512), ("F32", 2, 4), [StoredForm.BLOCKS]),
        (("F8_E4M3", 256, 512), ("F8_E8M0", 2, 4), [StoredForm.BLOCKS]),
        (("F8_E4M3", 256, 512), ("F32", 2, 1, 4, 1), [StoredForm.BLOCKS]),
        (("F8_E4M3", 256, 512), ("U8", 256, 16), [StoredForm.MXFP8]),
        (("F8_E4M3", 64, 64), ("F32", 1, 1), [StoredForm.FP8, StoredForm.BLOCKS]),
        (("F8_E4M3", 256, 512), ("F32", 3), []),
        (("F8_E4M3", 4, 256, 512), ("F32", 4), [StoredForm.FP8]),
        (("F8_E4M3", 4, 256, 512), ("F32", 4, 256, 1), [StoredForm.FP8]),
        (("F8_E4M3",), ("F32", 5), []),
        (None, ("F32",), []),
    ],
)
def test_forms_by_dtypes_and_shapes(values, scale, forms):
    weight = Weight(*(part and info(*part) for part in (values, scale)))
    assert list(find_forms(weight)) == forms


def test_blocks_that_are_declared_dense(tmp_path, caplog):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith(f"{Q}.")]:
            del tensors[name]
        tensors[f"{Q}.weight"] = np.ones((256, 256), E4M3)
        tensors[f"{Q}.weight_scale_inv"] = np.full((2, 2), 0.5, np.float32)

    lists = {"exclude_modules": [Q], "ignore": [Q]}
    folder = edited(tmp_path, W4A4, edit, **lists)
    linear = read_linear(folder)
    np.testing.assert_array_equal(linear.weight.dequantize(jnp.float32), np.full((256, 256), 0.5))
    assert f"'{Q}' holds FP8 values with scales of blocks but is declared dense" in caplog.text
    assert f"it is read as {BlockFP8.SQUARE}" in caplog.text


def renamed(tensors, compressed):
    """Rename the tensors of all quantized modules as the other tool has them."""
    pairs = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
    if not compressed:
        pairs = {new: old for old, new in pairs.items()}
    for name in list(tensors):
        module, _, leaf = name.rpartition(".")
        if leaf in pairs:
            value = np.float32(1) / tensors.pop(name)
            tensors[f"{module}.{pairs[leaf]}"] = value.reshape((1,) if compressed else ())
        elif tensors[name].dtype == np.uint8:
            tensors[f"{module}.{'weight_packed' if compressed else 'weight'}"] = tensors.pop(name)


@pytest.mark.parametrize("name", [W4A4, CT])
def test_names_of_another_tool_than_the_config(tmp_path, caplog, name):
    folder = edited(tmp_path, name, lambda tensors: renamed(tensors, compressed=name == W4A4))
    params, scheme = load_moe(folder)
    given = load_moe(GIVEN / name).params
    assert scheme is Scheme.W4A4
    np.testing.assert_array_equal(params.gate_up.packed, given.gate_up.packed)
    # The reciprocal of a reciprocal is rounded twice.
    scales = params.gate_up.global_scale, given.gate_up.global_scale
    np.testing.assert_allclose(*scales, rtol=2 * np.finfo(np.float32).eps)
    tool = "ModelOpt" if name == W4A4 else "compressed-tensors"
    assert f"the config is that of {tool}, but tensors have names such as" in caplog.text


def test_experts_in_nvfp4_of_a_file_that_declares_fp8_in_blocks(tmp_path, caplog):
    """The config of DeepSeek's file is left beside experts that were quantized again."""
    folder = edited(tmp_path, W4A4, lambda tensors: None)
    (folder / "hf_quant_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config["quantization_config"] = blocks
    (folder / "config.json").write_text(json.dumps(config))
    params, scheme = load_moe(folder)
    assert scheme is Scheme.W4A4
    np.testing.assert_array_equal(params.down.packed, load_moe(GIVEN / W4A4).params.down.packed)
    assert "holds NVFP4 codes but is declared fp8_blocks (config.json" in caplog.text
