"""Write small files of DeepSeek-V4 in the forms that DeepSeek and NVIDIA publish.

DeepSeek stores experts in MXFP4 and most other linears in FP8, with a scale for each block of
128 x 128. NVIDIA quantizes the experts to NVFP4 and keeps all else. The layout of its files is that
of `examples/deepseek/deepseek_v4/quantize_to_nvfp4.py` of ModelOpt.
"""

import json
import re

import ml_dtypes
import numpy as np
from support.files.checkpoint_edits import E2M1, tool_weight
from support.kernels.float64_layer import unpack

from jax_nvfp4_moe.checkpoint.export import write_safetensors

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
# What the script of ModelOpt excludes from NVFP4. Most of it is FP8.
EXCLUDED = [
    *("*.attn.*", "*.attn_norm.*", "*.ffn.shared_experts.*", "*.ffn.gate.*", "*.ffn_norm.*"),
    *("embed.weight", "head.weight", "*.hc_*", "*.h_proj.*", "*.e_proj.*", "*.enorm.*"),
    *("*.hnorm.*", "mtp.*.norm.*", "norm.weight"),
]
_STORED_FP8 = re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123])$")


def publish_names(tensors):
    """Rename tensors as in published DeepSeek-V4 files, which have no prefix."""
    for name in list(tensors):
        new = name.replace("attn.norm.", "attn.kv_norm.").replace("hc_head.hc", "hc_head")
        new = new.replace("embed_tokens", "embed").removeprefix("model.")
        tensors[new.replace("lm_head.", "head.")] = tensors.pop(name)
    tensors["mtp.0.attn.wkv.weight"] = np.zeros((16, 64), np.float32)


def modules_of(tensors):
    """Return the modules that have a weight."""
    return [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]


def is_routed(module):
    return ".ffn.experts." in module


def _weight(tensors, module):
    """Return the weight of a module in float32, and remove its tensors."""
    if f"{module}.weight_scale_2" not in tensors:
        return tensors.pop(f"{module}.weight").astype(np.float32)
    weight = tool_weight(tensors, module, divides=False)
    for name in ("weight", "weight_scale", "weight_scale_2"):
        del tensors[f"{module}.{name}"]
    return weight


def store_fp8(tensors, decoded):
    """Store linears as FP8 with scales that are powers of two, or as the equal float32 values.

    Args:
      tensors: the tensors of a ModelOpt file with published names. They are replaced.
      decoded: whether to store float32.
    """
    for module in modules_of(tensors):
        if is_routed(module) or module.startswith("mtp."):
            continue
        weight = _weight(tensors, module)
        if weight.ndim != 2 or ".compressor." in module or not _STORED_FP8.search(module):
            tensors[f"{module}.weight"] = weight
            continue
        rows, columns = (-(-size // 128) for size in weight.shape)
        padded = np.zeros((rows * 128, columns * 128), np.float32)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        largest = np.abs(padded.reshape(rows, 128, columns, 128)).max(axis=(1, 3))
        powers = np.ceil(np.log2(largest / 448))
        spread = np.exp2(np.repeat(np.repeat(powers, 128, 0), 128, 1))
        spread = spread[: weight.shape[0], : weight.shape[1]].astype(np.float32)
        values = (weight / spread).astype(E4M3)
        if decoded:
            tensors[f"{module}.weight"] = values.astype(np.float32) * spread
        else:
            tensors[f"{module}.weight"] = values
            tensors[f"{module}.scale"] = (powers + 127).astype(np.uint8).view(E8M0)


def store_mxfp4(tensors, decoded):
    """Store routed experts in MXFP4 with the codes that they have, or as equal float32 values."""
    for module in filter(is_routed, modules_of(tensors)):
        packed = tensors.pop(f"{module}.weight")
        scale = tensors.pop(f"{module}.weight_scale").astype(np.float32)
        scale *= tensors.pop(f"{module}.weight_scale_2")
        powers = np.floor(np.log2(scale[:, ::2]))  # the block of 32 takes that of its first half
        if decoded:
            values = np.repeat(np.exp2(powers), 32, -1).astype(np.float32)
            tensors[f"{module}.weight"] = E2M1[unpack(packed)] * values
        else:
            tensors[f"{module}.weight"] = packed.view(np.int8)
            tensors[f"{module}.scale"] = (powers + 127).astype(np.uint8).view(E8M0)


def add_input_scales(tensors):
    for module in filter(is_routed, modules_of(tensors)):
        tensors[f"{module}.input_scale"] = np.float32(0.01)


def manifest(tensors):
    """Return ``hf_quant_config.json`` of NVIDIA's files."""
    layer = {"quant_algo": "NVFP4", "group_size": 16}
    return {
        "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"},
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "quantized_layers": dict.fromkeys(filter(is_routed, modules_of(tensors)), layer),
            "exclude_modules": EXCLUDED,
        },
    }


def write(folder, tensors, config, section, listed=None):
    """Write a checkpoint.

    Args:
      folder: where to write it.
      tensors: its tensors.
      config: the values of ``config.json``.
      section: its ``quantization_config``, or None.
      listed: the contents of ``hf_quant_config.json``, or None.
    """
    folder.mkdir(exist_ok=True)
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    if section is not None:
        config["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config))
    if listed is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(listed))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
