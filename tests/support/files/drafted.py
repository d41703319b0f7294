"""Write given checkpoints with drafting layers, in the forms in which files store them."""

import json
import re
import shutil

import ml_dtypes
import numpy as np
from support.files.checkpoint_edits import read_all
from support.files.drafting_tensors import drafting_names, drafting_tensors
from support.files.given import CHECKPOINTS, reference_tensors

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint.export import write_safetensors

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def in_bfloat16(tensors):
    """Return tensors as published files store them: only corrections of routers are float32."""
    return {
        name: tensor if "correction_bias" in name else tensor.astype(ml_dtypes.bfloat16)
        for name, tensor in tensors.items()
    }


def stacked(tensors):
    """Return bfloat16 tensors, with gate and up and with down of all experts in one tensor."""
    experts, made = {}, {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            made[name] = tensor
    for stem, parts in experts.items():
        gate, up, down = (
            np.stack([parts[part][e] for e in range(len(parts[part]))])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        made |= {f"{stem}.gate_up_proj": np.concatenate([gate, up], 1), f"{stem}.down_proj": down}
    return in_bfloat16(made)


def packed(tensors):
    """Return tensors with the experts in NVFP4, and what they stand for in float32."""
    stored, meant = in_bfloat16(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if _EXPERT.fullmatch(name):
            weight = nvfp4.quantize(tensor)
            meant[name] = np.asarray(weight.dequantize(np.float32))
            stored[name] = np.asarray(weight.packed)
            stored[f"{name}_scale"] = np.asarray(weight.block_scale)
            stored[f"{name}_scale_2"] = np.asarray(weight.global_scale)
    return stored, meant


def in_fp8(tensors):
    """Return tensors with all linears in FP8, and what they stand for in float32."""
    stored, meant = in_bfloat16(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            scale = np.float32(np.abs(tensor).max() / 448)
            stored[name] = (tensor / scale).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale"] = scale
            meant[name] = stored[name].astype(np.float32) * scale
    return stored, meant


def in_fp8_blocks(tensors):
    """Return tensors with all linears in FP8 with scales of blocks, and what they stand for."""
    stored, meant = in_bfloat16(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            n, k = tensor.shape
            blocks = np.pad(tensor, [(0, -n % 128), (0, -k % 128)])
            blocks = blocks.reshape(-(-n // 128), 128, -(-k // 128), 128)
            scale = np.abs(blocks).max((1, 3)) / np.float32(448)
            every = np.kron(scale, np.ones((128, 128), np.float32))[:n, :k]
            stored[name] = (tensor / every).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            meant[name] = stored[name].astype(np.float32) * every
    return stored, meant


def write_drafted(name, folder, change=in_bfloat16, *, file="model", excluded=False, **config):
    """Write a given checkpoint with drafting layers, and return its folder.

    Args:
      name: the folder of the given checkpoint.
      folder: the folder to write.
      change: from drafting tensors in float32 to those that are stored.
      file: the name of the file that holds the drafting layers.
      excluded: whether the configs say that nothing of the drafting layers is quantized.
      config: fields of ``config.json`` to replace.
    """
    source = CHECKPOINTS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tensors, drafting = read_all(source), change(drafting_tensors(source))
    files = {"model": tensors}
    files[file] = files.get(file, {}) | drafting
    for stem, contents in files.items():
        write_safetensors(folder / f"{stem}.safetensors", contents)
    for given in ("config.json", "hf_quant_config.json"):
        fields = json.loads((source / given).read_text())
        if excluded:
            lists = fields.get("quantization", fields.get("quantization_config"))
            key = "exclude_modules" if given != "config.json" else "ignore"
            stem = drafting_names(source)["layer"]
            lists[key] = [*lists[key], f"{stem}*", f"{stem.removeprefix('model.')}*"]
        changed = config if given == "config.json" else {}
        (folder / given).write_text(json.dumps(fields | changed))
    return folder


def drafting_reference(name):
    """Return input_ids, and transformers' vectors of them and logits of their pairs."""
    ids = reference_tensors(CHECKPOINTS / name)["input_ids"].astype(np.int32)
    tensors = reference_tensors(CHECKPOINTS / "drafting", f"{name}.")
    return ids, tensors["hidden"], tensors["logits"]
