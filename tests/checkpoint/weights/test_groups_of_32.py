"""Test codes with one scale for 32 weights: NVFP4 in groups of 32, and MXFP4 of any linear."""

import json

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from support.files.checkpoint_edits import E2M1, read_all
from support.files.given import CHECKPOINTS
from support.models.architecture import EXACT, KERNELS, LOGIT_BOUND, relative

from jax_nvfp4_moe import CheckpointError, load_model
from jax_nvfp4_moe.checkpoint.export import write_safetensors

E4M3 = ml_dtypes.float8_e4m3fn
IDS = np.arange(1, 25, dtype=np.int32).reshape(2, 12)
SCALES = ("weight_scale", "gate_up_proj_weight_scale", "down_proj_weight_scale")
MXFP4_WEIGHTS = {
    "type": "float",
    "num_bits": 4,
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": "torch.uint8",
    "symmetric": True,
    "dynamic": False,
}
MXFP4_INPUTS = MXFP4_WEIGHTS | {"dynamic": True}


def write(folder, source, tensors, quantization=None):
    """Write the tensors with the config of `source`, and with another quantization config."""
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((source / "config.json").read_text())
    if quantization is not None:
        config = {name: value for name, value in config.items() if name != "quantization_config"}
        config |= {"quantization_config": quantization} if quantization else {}
    elif (source / "hf_quant_config.json").exists():
        (folder / "hf_quant_config.json").write_bytes(
            (source / "hf_quant_config.json").read_bytes()
        )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def along_k(name):
    """Return the axis of the blocks: stacks that a tool writes as [e, k, n] have them before n."""
    return -2 if name.endswith(SCALES[1:]) else -1


def in_groups(tensors, repeated):
    """Return the tensors with every second block scale, stored once or twice.

    Matrices with an odd number of blocks stay as they are.
    """
    made = dict(tensors)
    for name, scales in tensors.items():
        axis = along_k(name)
        if name.endswith(SCALES) and scales.shape[axis] % 2 == 0:
            even = np.take(scales.view(np.uint8), range(0, scales.shape[axis], 2), axis)
            made[name] = (np.repeat(even, 2, axis) if repeated else even).view(E4M3)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "qwen3moe-modelopt-w4a16",  # one tensor for each expert
        "gpt_oss-modelopt-w4a16",  # all experts in one tensor, inputs first
        "llama-modelopt-w4a16",
        "llama-modelopt-w4a4",
    ],
)
def test_groups_of_32_are_pairs_of_blocks(tmp_path, name, caplog):
    """The logits are those of a file that stores each scale twice, to the bit."""
    source = CHECKPOINTS / name
    tensors = read_all(source)
    few = write(tmp_path / "few", source, in_groups(tensors, repeated=False))
    twice = write(tmp_path / "twice", source, in_groups(tensors, repeated=True))
    for how in (EXACT, KERNELS):
        how = how | {"scheme": "w4a16"}
        expected = load_model(twice, **how)(IDS)
        np.testing.assert_array_equal(load_model(few, **how)(IDS), expected)
        assert np.ptp(np.asarray(expected)) > 1
    caplog.clear()
    declared = load_model(few, scheme="checkpoint", dtype="float32")
    assert ("activations are not rounded" in caplog.text) == name.endswith("w4a4")
    np.testing.assert_array_equal(declared(IDS), expected)


def write_mxfp4(folder, packed, quantization, name="llama-modelopt-w4a16"):
    """Write a dense model with random MXFP4 weights, and one with the values that they mean.

    Args:
      folder: receives the folders "packed" and "dense".
      packed: the last part of the name of the codes.
      quantization: the quantization config of the packed model.
      name: the checkpoint whose weights are replaced.
    """
    source, rng = CHECKPOINTS / name, np.random.default_rng(0)
    tensors, codes, values = read_all(source), {}, {}
    for name, array in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if f"{stem}.weight_scale" not in tensors:
            codes[name] = values[name] = array
        elif leaf == "weight":
            n, k = array.shape[0], 2 * array.shape[1]
            scales = rng.integers(119, 124, (n, k // 32), np.uint8)
            codes[f"{stem}.{packed}"], codes[f"{stem}.weight_scale"] = array, scales
            each = np.stack([array & 15, array >> 4], axis=-1).reshape(n, k)
            factors = np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=-1)
            values[name] = (E2M1[each] * factors).astype(np.float32)
    write(folder / "packed", source, codes, quantization)
    write(folder / "dense", source, values, {})


def of_llm_compressor(inputs=None, **whole):
    group = {"targets": ["Linear"], "weights": MXFP4_WEIGHTS, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group | {"format": "mxfp4-pack-quantized"}},
        "ignore": ["lm_head"],
        **whole,
    }


OF_MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "MXFP4",
    "group_size": 32,
    "ignore": ["lm_head"],
}


@pytest.mark.parametrize(
    ("packed", "quantization"),
    [
        ("weight_packed", of_llm_compressor()),
        ("weight_packed", of_llm_compressor(MXFP4_INPUTS)),
        ("weight_packed", of_llm_compressor(format="mixed-precision")),
        ("weight", OF_MODELOPT),
    ],
)
@pytest.mark.parametrize("name", ["llama-modelopt-w4a16", "qwen3moe-modelopt-w4a16"])
@pytest.mark.parametrize("scheme", ["checkpoint", None])
def test_mxfp4_has_the_logits_of_its_values(tmp_path, packed, quantization, name, scheme):
    write_mxfp4(tmp_path, packed, quantization, name)
    expected = load_model(tmp_path / "dense", dtype="float32")(IDS)
    model = load_model(tmp_path / "packed", dtype="float32", scheme=scheme)
    assert "NVFP4Linear" in {type(module).__name__ for _, module in nnx.iter_modules(model)}
    assert relative(model(IDS), np.asarray(expected)) <= LOGIT_BOUND


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 16}, "weights: group_size 16 is not supported for MXFP4; supported: 32"),
        ({"dynamic": True}, "weights: dynamic True is not supported for MXFP4"),
        ({"scale_dtype": "torch.float8_e4m3fn"}, "scale_dtype 'torch.float8_e4m3fn' is not supp"),
        ({"num_bits": 3}, "'float' of 3 bits"),
    ],
)
def test_other_groups_of_mxfp4_are_refused(tmp_path, change, message):
    quantization = of_llm_compressor()
    quantization["config_groups"]["group_0"]["weights"] = MXFP4_WEIGHTS | change
    write_mxfp4(tmp_path, "weight_packed", quantization)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "packed")


def test_a_scale_that_is_no_number_is_named(tmp_path):
    write_mxfp4(tmp_path, "weight_packed", of_llm_compressor())
    tensors = read_all(tmp_path / "packed")
    tensors["model.layers.1.mlp.down_proj.weight_scale"][2, 1] = 255
    write_safetensors(tmp_path / "packed" / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj.*scales are NaN"):
        load_model(tmp_path / "packed")
