"""Test DeepSeek-V4 as DeepSeek and NVIDIA publish it: FP8 beside experts in MXFP4 or NVFP4."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.checkpoint_edits import read_all
from support.files.deepseek_v4_files import (
    FP8,
    add_input_scales,
    manifest,
    publish_names,
    store_fp8,
    store_mxfp4,
    write,
)
from support.files.given import CHECKPOINTS
from support.files.resized import write_resized
from support.files.unquantized import read_config
from support.models.architecture import logit_error, run

from jax_nvfp4_moe import CheckpointError, cast_model, load_model
from jax_nvfp4_moe.checkpoint import open_checkpoint
from jax_nvfp4_moe.cli.inspection import inspect
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.scheme import Scheme

GIVEN = CHECKPOINTS / "deepseek_v4-modelopt-w4a16"
EXACT = {"dtype": jnp.float32, "backend": "reference"}
# The places in which NVIDIA's files list the modules in NVFP4.
LISTED = ("file", "config", "both", "nowhere")


@pytest.fixture(scope="module")
def resized(tmp_path_factory):
    """Return a folder whose experts have whole blocks of MXFP4."""
    folder = tmp_path_factory.mktemp("v4") / "m"
    write_resized(GIVEN, folder, moe_intermediate_size=64)
    return folder


def published(source):
    tensors = read_all(source)
    publish_names(tensors)
    return tensors


def write_deepseek(source, folder, decoded=False):
    """Write the form of DeepSeek, or the same values in float32."""
    tensors = published(source)
    store_fp8(tensors, decoded)
    store_mxfp4(tensors, decoded)
    return write(folder, tensors, read_config(source), None if decoded else FP8)


def write_nvidia(folder, listed="file", **changes):
    """Write the form of NVIDIA, with the experts of the given checkpoint."""
    tensors = published(GIVEN)
    store_fp8(tensors, decoded=False)
    add_input_scales(tensors)
    contents = manifest(tensors)
    section = FP8 | {"moe_quant_algo": "NVFP4"}
    if listed in ("config", "both"):
        own = contents["quantization"]
        section |= {name: own[name] for name in ("quant_algo", "group_size")}
        section |= {"ignore": own["exclude_modules"]}
        section["quantized_layers"] = {
            f"layers.{layer}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}
            for layer in range(3)
        }
    file = contents if listed in ("file", "both") else None
    return write(folder, tensors, read_config(GIVEN), section | changes, file)


def leaves(model):
    """Return the path of each array of a model -> its values; FP8 weights are dequantized."""
    found = jax.tree.leaves_with_path(model, is_leaf=is_fp8)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf.dequantize() if is_fp8(leaf) else leaf)
        for path, leaf in found
    }


def is_fp8(leaf):
    return isinstance(leaf, FP8Tensor)


def experts(model, layer):
    params = model.layers[layer].mlp.experts.params.get_value()
    return params.gate_up, params.down


def test_the_form_of_deepseek_loads_with_its_values(resized, tmp_path):
    """Experts become NVFP4 and linears stay in FP8, each value exactly."""
    found = load_model(write_deepseek(resized, tmp_path / "a"), **EXACT)
    expected = load_model(write_deepseek(resized, tmp_path / "b", decoded=True), **EXACT)
    for layer in range(3):
        pairs = zip(experts(found, layer), experts(expected, layer), strict=True)
        for one, other in pairs:
            np.testing.assert_array_equal(one.dequantize(), other)
    kept = [leaf for leaf in jax.tree.leaves(found, is_leaf=is_fp8) if is_fp8(leaf)]
    assert len(kept) >= 3 * 4
    ours, theirs = leaves(found), leaves(expected)
    others = [path for path in theirs if "experts" not in path or "shared" in path]
    assert len(others) > 60
    for path in others:
        np.testing.assert_array_equal(ours[path], theirs[path])


@pytest.mark.slow
def test_the_form_of_deepseek_has_the_logits_of_its_values(resized, tmp_path):
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)), jnp.int32)
    folders = (write_deepseek(resized, tmp_path / str(how), decoded=how) for how in (False, True))
    found, expected = (np.asarray(run(load_model(folder, **EXACT), ids)) for folder in folders)
    assert logit_error(found, expected) < 1e-5


def test_the_form_of_deepseek_is_cast_to_that_of_nvidia(resized, tmp_path):
    """The cast loads as equal arrays. Everything but the routed experts keeps its bytes."""
    source = write_deepseek(resized, tmp_path / "a")
    report = cast_model(source, tmp_path / "q")
    assert (report["cast_matrices"], report["format"]) == (3 * 6 * 3, "fp8")
    assert read_config(tmp_path / "q")["quantization_config"]["moe_quant_algo"] == "W4A16_NVFP4"
    before, after = read_all(source), read_all(tmp_path / "q")
    kept = [name for name in before if ".ffn.experts." not in name]
    assert [name for name in after if ".ffn.experts." not in name] == kept
    for name in kept:
        assert (after[name].dtype, after[name].tobytes()) == (
            before[name].dtype,
            before[name].tobytes(),
        )
    found, expected = (
        leaves(load_model(folder, scheme="checkpoint", **EXACT))
        for folder in (tmp_path / "q", source)
    )
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array)


def test_a_cast_needs_mxfp4(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no MXFP4.*or fp8 with experts in MXFP4"):
        cast_model(write_nvidia(tmp_path / "m"), tmp_path / "q")


@pytest.mark.parametrize("listed", LISTED)
def test_the_form_of_nvidia_loads_with_its_values(listed, tmp_path):
    """Experts have the bytes of the tool. What the manifest excludes is FP8, with its values."""
    folder = write_nvidia(tmp_path / "a", listed)
    with open_checkpoint(folder) as checkpoint:
        scheme = checkpoint.quant.checkpoint_scheme
        assert scheme("model.layers.1.ffn.experts.3.w2") is Scheme.W4A4
        assert scheme("model.layers.1.ffn.shared_experts.w2") is BlockFP8.SQUARE
        assert scheme("model.layers.1.attn.wq_a") is BlockFP8.SQUARE
    given = leaves(load_model(GIVEN, scheme="w4a16", **EXACT))
    found = leaves(load_model(folder, scheme="w4a16", **EXACT))
    routed = [path for path in given if ".experts." in path]
    assert len(routed) == 3 * 2 * 3
    for path in routed:
        np.testing.assert_array_equal(found[path], given[path])
    tensors = published(GIVEN)
    store_fp8(tensors, decoded=True)
    for layer in range(3):
        own = [v for p, v in found.items() if re.match(rf"\.layers\[{layer}\].*out_b.*weight", p)]
        np.testing.assert_array_equal(own, [tensors[f"layers.{layer}.attn.wo_b.weight"]])


def test_calibrated_experts_round_their_inputs(tmp_path):
    model = load_model(write_nvidia(tmp_path / "m"), scheme="checkpoint", **EXACT)
    scales = [v for path, v in leaves(model).items() if "input_scale" in path]
    assert len(scales) == 3 * 2
    for one in scales:
        np.testing.assert_array_equal(one, np.float32(0.01))


def test_inspect_says_what_lists_the_experts(tmp_path):
    shown = inspect(write_nvidia(tmp_path / "m"))
    assert "FP8 in blocks of 128 x 128, experts in NVFP4" in shown
    assert "quantized_layers" in shown
    assert "quant_method fp8" in shown


def test_lists_that_differ_are_refused(tmp_path):
    """The file lists all experts, and config.json those of two layers."""
    folder = write_nvidia(tmp_path / "m", "both")
    config = read_config(folder)
    del config["quantization_config"]["quantized_layers"]["layers.2.ffn.experts"]
    write(folder, read_all(folder), config, config["quantization_config"])
    with pytest.raises(CheckpointError, match=r"layers\.2\.ffn\.experts.*configs disagree"):
        load_model(folder, **EXACT)


def test_other_algorithms_of_experts_are_refused(tmp_path):
    folder = write_nvidia(tmp_path / "m", "nowhere", moe_quant_algo="INT4")
    with pytest.raises(CheckpointError, match="moe_quant_algo: 'INT4' is not supported"):
        load_model(folder, **EXACT)
