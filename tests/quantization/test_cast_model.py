"""Test `cast_model` and `quantize --cast`: MXFP4 becomes NVFP4, and no value changes."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.devices.host_devices import call
from support.files.checkpoint_edits import edited, read_all
from support.files.given import CHECKPOINTS, reference_tensors
from support.models.architecture import EXACT

from jax_nvfp4_moe import CheckpointError, cast_model, load_model, load_moe
from jax_nvfp4_moe.checkpoint.export import write_folder
from jax_nvfp4_moe.cli import app as cli

GPT_OSS = CHECKPOINTS / "gpt_oss-mxfp4"


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    return stopped.value.code or 0, *capsys.readouterr()


def test_the_command_writes_what_the_source_loads_as(tmp_path, capsys):
    """Both folders load as equal arrays, and the logits match the reference."""
    status, out, err = run(capsys, "quantize", GPT_OSS, tmp_path / "q", "--cast")
    assert status == 0, err
    result = json.loads(out)
    assert (result["cast_matrices"], result["scheme"]) == (2 * 4 * 3, "w4a16")
    written = json.loads((tmp_path / "q" / "hf_quant_config.json").read_text())["quantization"]
    assert written["quant_algo"] == "W4A16_NVFP4"
    assert "lm_head" in written["exclude_modules"]
    ours, theirs = load_model(tmp_path / "q", **EXACT), load_model(GPT_OSS, **EXACT)
    found, expected = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    given = reference_tensors(GPT_OSS)
    logits = np.asarray(call(ours, jnp.asarray(given["input_ids"], jnp.int32)))
    bound = 1e-5 * np.sqrt(np.mean(given["logits"] ** 2))
    assert np.abs(logits - given["logits"]).max() < bound
    rounded = logits.astype(ml_dtypes.bfloat16).astype(np.float32)  # negative control
    assert np.abs(rounded - given["logits"]).max() > 100 * bound


def test_all_other_tensors_stay_as_they_are(tmp_path):
    report = cast_model(GPT_OSS, tmp_path / "q", shard_bytes=20_000)
    assert (tmp_path / "q" / "model.safetensors.index.json").exists()
    before, after = read_all(GPT_OSS), read_all(tmp_path / "q")
    for name, tensors in (("source_bytes", before), ("bytes", after)):
        assert report[name] == sum(tensor.nbytes for tensor in tensors.values())
    for name, value in before.items():
        if ".experts." not in name:
            assert after[name].dtype == value.dtype
            np.testing.assert_array_equal(after[name], value)
    bias = before["model.layers.0.mlp.experts.gate_up_proj_bias"]
    up = after["model.layers.0.mlp.experts.3.up_proj.bias"]
    assert up.dtype == bias.dtype
    np.testing.assert_array_equal(up, bias[3, 1::2])


def test_experts_one_by_one_keep_their_names(tmp_path):
    """Mixtral names the projections of its experts w1, w3 and w2."""
    source = CHECKPOINTS / "mixtral-window-modelopt-w4a16"
    tensors, rng = read_all(source), np.random.default_rng(0)
    written = {}
    for name, value in tensors.items():
        module, _, last = name.rpartition(".")
        if f"{module}.weight_scale_2" not in tensors:
            written[name] = value
        elif last == "weight" and ".experts." in name:
            n, k = value.shape[0], 2 * value.shape[1] // 32
            written[name] = np.resize(value, (n, 16 * k)).astype(np.uint8)
            written[f"{module}.weight_scale"] = rng.integers(110, 125, (n, k), np.uint8)
        elif last == "weight":
            written[name] = np.ones((value.shape[0], 2 * value.shape[1]), np.float32)
    config = json.loads((source / "config.json").read_text())
    width = config["intermediate_size"] // 32 * 32
    for name in list(written):
        if ".experts." in name and ".w2." not in name:
            written[name] = written[name][:width]
    config |= {"intermediate_size": width, "quantization_config": {"quant_method": "mxfp4"}}
    write_folder(tmp_path / "m", written, config)
    cast_model(tmp_path / "m", tmp_path / "q")
    after = read_all(tmp_path / "q")
    assert any(name.endswith("experts.3.w2.weight_scale_2") for name in after)
    ours, theirs = (
        load_moe(tmp_path / one, 0, **EXACT).experts.params.get_value() for one in ("q", "m")
    )
    for found, expected in ((ours.gate_up, theirs.gate_up), (ours.down, theirs.down)):
        np.testing.assert_array_equal(found.packed, expected.packed)
        np.testing.assert_array_equal(found.dequantize(), expected.dequantize())


def test_gate_and_up_share_a_scale_where_it_serves_both(tmp_path):
    def spread(tensors):
        scales = tensors["model.layers.0.mlp.experts.gate_up_proj_scales"]
        scales[0, 1::2] += 5
        scales[1, 1::2] += 60

    folder = edited(tmp_path, GPT_OSS.name, spread)
    cast_model(folder, tmp_path / "q")
    after = read_all(tmp_path / "q")

    def scale(expert, name):
        return after[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight_scale_2"]

    assert scale(0, "gate") == scale(0, "up")
    assert scale(1, "up") == scale(1, "gate") * 2.0**60


def test_what_does_not_fit_leaves_nothing(tmp_path):
    def spread(tensors):
        tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 7] -= 60

    folder = edited(tmp_path, GPT_OSS.name, spread)
    with pytest.raises(CheckpointError, match=r"layers.1.*down_proj_scales.*expert 2"):
        cast_model(folder, tmp_path / "q")
    assert not (tmp_path / "q" / "config.json").exists()
    assert not list(tmp_path.glob("q/*"))


def test_sources_without_mxfp4_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no MXFP4"):
        cast_model(CHECKPOINTS / "gpt_oss-modelopt-w4a16", tmp_path / "q")


@pytest.mark.parametrize(
    "option",
    [("--scheme", "w4a4"), ("--modules", "experts"), ("--algorithm", "search")],
    ids=lambda option: option[0],
)
def test_options_that_a_cast_does_not_take(tmp_path, capsys, option):
    status, _, err = run(capsys, "quantize", GPT_OSS, tmp_path / "q", "--cast", *option)
    assert status == 2
    assert option[0] in err
    assert "expected no such option with --cast" in err
