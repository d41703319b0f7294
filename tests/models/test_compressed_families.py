"""Test newer families in the form of compressed-tensors.

llm-compressor pins a version of transformers that does not have these families. The files are
therefore ModelOpt's, written in the form of compressed-tensors: the same codes and block scales,
the reciprocals of the global scales, and its own configuration.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support.files.checkpoint_edits import read_all
from support.files.given import CHECKPOINTS, reference_tensors
from support.models.architecture import KERNELS, logit_error, run

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.formats.compressed_tensors import declaration

FAMILIES = (
    "qwen2_moe-modelopt-w4a16",
    "ernie4_5_moe-modelopt-w4a16",
    "afmoe-modelopt-w4a16",
    "hy_v3-modelopt-w4a16",
    "solar_open-modelopt-w4a16",
    "dots1-modelopt-w4a16",
    "glm4v_moe-modelopt-w4a16",
    "phimoe-modelopt-w4a16",
    "qwen3_omni_moe-modelopt-w4a16",
)


def rewrite(source, folder, divides=True):
    """Write a W4A16 checkpoint of ModelOpt in the form of compressed-tensors.

    Args:
      source: folder of the checkpoint.
      folder: folder to write.
      divides: whether to store the reciprocals of the global scales, as the form demands.
    """
    tensors, found = read_all(source), {}
    modules = {n.removesuffix(".weight_scale_2") for n in tensors if n.endswith(".weight_scale_2")}
    for name, value in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module in modules and leaf == "weight":
            found[f"{module}.weight_packed"] = value
        elif leaf == "weight_scale_2":
            scale = np.float32(1) / value if divides else value
            found[f"{module}.weight_global_scale"] = np.reshape(scale, (1,)).astype(np.float32)
        else:
            found[name] = value
    linears = {n.removesuffix(".weight") for n in found if n.endswith(".weight")}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = declaration(False, linears, "0.19.0")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", found)
    return folder


def error(folder, name):
    tensors = reference_tensors(CHECKPOINTS / name)
    logits = run(load_model(folder, **KERNELS), jnp.asarray(tensors["input_ids"], jnp.int32))
    return logit_error(logits, tensors["logits"])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_loads_from_compressed_tensors(name, tmp_path):
    assert error(rewrite(CHECKPOINTS / name, tmp_path / "m"), name) < 1e-5


def test_the_bound_catches_global_scales_that_multiply(tmp_path):
    folder = rewrite(CHECKPOINTS / FAMILIES[0], tmp_path / "m", divides=False)
    assert not error(folder, FAMILIES[0]) < 1e-2
