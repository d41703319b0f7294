"""Edit copies of the given checkpoints, and build modules from them."""

import json
import pathlib
import shutil
from typing import NamedTuple

import jax
import numpy as np
import pytest
from support.files.given import CHECKPOINTS, EXAMPLE
from support.kernels.float64_layer import CODE_VALUES, unpack

from jax_nvfp4_moe.checkpoint import (
    CheckpointError,
    LoadOptions,
    Source,
    WeightTable,
    open_checkpoint,
    read_source,
)
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.safetensors import open_tensors
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.scheme import CheckpointScheme

GIVEN, TINY = CHECKPOINTS, EXAMPLE
QWEN = ("qwen3moe-modelopt-w4a4", "qwen3moe-modelopt-w4a16", "qwen3moe-ct-w4a4")
W4A4, W4A16, CT = QWEN
DEEPSEEK = "deepseekv3-modelopt-w4a4"
EXPERTS = "model.layers.1.mlp.experts"
MOE = LoadOptions(only="model.layers.1.mlp")
E2M1 = CODE_VALUES.astype(np.float32)


class ExpertWeights(NamedTuple):
    """The experts of one layer, and the scheme that the file declares for them."""

    params: MoEParams | DenseExperts
    checkpoint_scheme: CheckpointScheme


def check(checkpoint, build, options=None):
    """Check the tensors that `build` asks a table for. Return the bytes that reading would read."""
    table = WeightTable(checkpoint, options)
    build(table)
    return table.check()


def load(checkpoint, build, options=None, progress=None):
    """Read the tensors that `build` asks a table for, and put them on the device."""
    table = WeightTable(checkpoint, options)
    asked = build(table)
    table.check()
    with table.open_reader(progress) as reader:

        def read(source):
            value = jax.device_put(read_source(source, reader))
            if isinstance(value, (MoEParams, DenseExperts)):
                return ExpertWeights(value, source.checkpoint_scheme)
            return value

        return jax.tree.map(read, asked, is_leaf=lambda leaf: isinstance(leaf, Source))


def read_all(folder):
    with open_tensors(folder) as tensors:
        return {name: tensors.read(name).copy() for name in tensors.names()}


def edited(tmp_path, name, edit, **config):
    """Copy a given checkpoint with tensors changed by `edit` and quantization fields replaced."""
    tensors = read_all(GIVEN / name)
    edit(tensors)
    folder = tmp_path / "edited"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    keys = {"config.json": "quantization_config", "hf_quant_config.json": "quantization"}
    for given in filter(pathlib.Path.exists, (GIVEN / name / file for file in keys)):
        contents = json.loads(given.read_text())
        if config:
            contents[keys[given.name]] |= config
        (folder / given.name).write_text(json.dumps(contents))
    return folder


def store_codes_as_f4(folder, ending=("weight", "weight_packed", "_proj")):
    """Give codes of a single file the dtype F4, whose shapes count elements; no byte changes."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, entry in header.items():
        if name.endswith(ending) and entry["dtype"] == "U8":
            *lead, columns = entry["shape"]
            entry |= {"dtype": "F4", "shape": [*lead, 2 * columns]}
    packed = json.dumps(header).encode()
    path.write_bytes(len(packed).to_bytes(8, "little") + packed + raw[8 + length :])
    return folder


def build_model(w):
    """Ask the table `w` for all weights of the small Qwen3 checkpoints."""
    widths = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "o_proj": 256}
    built = [w.array("model.embed_tokens.weight", (512, 256)), w.linear("lm_head", 512, 256)]
    built.append(w.array("model.norm.weight", (256,)))
    for prefix in ("model.layers.0", "model.layers.1"):
        built += [w.linear(f"{prefix}.self_attn.{name}", n, 256) for name, n in widths.items()]
        built += [w.array(f"{prefix}.self_attn.{x}_norm.weight", (64,)) for x in "qk"]
        built += [
            w.array(f"{prefix}.{name}.weight", (256,))
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        built += build_moe(w, prefix + ".mlp")
    return built


def build_moe(w, prefix="model.layers.1.mlp"):
    return w.linear(f"{prefix}.gate", 16, 256), w.experts(f"{prefix}.experts", 16, 256, 128)


def load_moe(folder, progress=None, **options):
    options = LoadOptions(only="model.layers.1.mlp", **options)
    with open_checkpoint(folder) as checkpoint:
        return load(checkpoint, build_moe, options, progress)[1]


def problems_of(folder, build=build_model, options=None, run=check):
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError) as caught:
        run(checkpoint, build, options)
    assert str(folder) in str(caught.value)
    return caught.value.problems


def tool_weight(tensors, module, divides):
    """Return the weight as the tool that wrote the file dequantizes it."""
    packed = tensors[f"{module}.weight{'_packed' if divides else ''}"]
    scale = tensors[f"{module}.weight_scale"].astype(np.float32)
    if divides:
        scale = scale / tensors[f"{module}.weight_global_scale"]
    else:
        scale = scale * tensors[f"{module}.weight_scale_2"]
    return E2M1[unpack(packed)] * np.repeat(scale, 16, axis=-1)


def remove_experts(tensors):
    for name in [name for name in tensors if EXPERTS in name]:
        del tensors[name]
