"""Make drafting layers for the given checkpoints, in every environment and with numpy alone.

The program `tests/reference/drafting.py` and the tests make the same tensors, so that no file has
to hold them. Their values follow from their names. They have the shapes of a layer of the model.
"""

import hashlib
import json
import math
import pathlib
import re
import struct

import numpy as np

QWEN = {
    "joint": "mtp.fc",
    "embedding": "mtp.pre_fc_norm_embedding",
    "hidden": "mtp.pre_fc_norm_hidden",
    "layer": "mtp.layers.0",
    "norm": "mtp.norm",
}
NEMOTRON = {
    "joint": "mtp.layers.0.eh_proj",
    "embedding": "mtp.layers.0.enorm",
    "hidden": "mtp.layers.0.hnorm",
    "layer": "mtp.layers.0",
    "norm": "mtp.layers.1.final_layernorm",
}
DEEPSEEK_V4 = {
    "embedding": "mtp.0.enorm",
    "hidden": "mtp.0.hnorm",
    "layer": "mtp.0",
    "norm": "mtp.0.norm",
}
# Drafting layers that follow those of a model, by the names of their parts: those of DeepSeek-V3
# and GLM, and those of Hy3.
BEHIND = {
    "joint": "eh_proj",
    "embedding": "enorm",
    "hidden": "hnorm",
    "layer": "",
    "norm": "shared_head.norm",
}
HY3 = BEHIND | {"norm": "final_layernorm"}
# The folder of a checkpoint -> how its drafting layers are called, and the layers of the model that
# they are like.
DRAFTED = {
    "qwen3moe-modelopt-w4a16": (QWEN, (1,)),
    "qwen3_next-modelopt-w4a16": (QWEN, (1,)),
    "qwen3_5_moe-modelopt-w4a16": (QWEN, (1,)),
    "qwen3_5-modelopt-w4a16": (QWEN, (1,)),
    "kimi_k2-modelopt-w4a16": (BEHIND, (1,)),
    "deepseek_v3-direct-modelopt-w4a16": (BEHIND, (1,)),
    "glm4_moe-groups-modelopt-w4a16": (BEHIND, (1,)),
    "glm4_moe_lite-modelopt-w4a16": (BEHIND, (0,)),
    "deepseek_v32-modelopt-w4a16": (BEHIND, (1,)),
    "glm_moe_dsa-modelopt-w4a16": (BEHIND, (1,)),
    "hy_v3-modelopt-w4a16": (HY3, (0,)),
    "deepseek_v4-modelopt-w4a16": (DEEPSEEK_V4, (0,)),
    "nemotron_h-modelopt-w4a16": (NEMOTRON, (1, 2)),
    "nemotron_h-latent-modelopt-w4a16": (NEMOTRON, (2, 1)),
}
_SCALES = re.compile(r"\.(weight|input)_scale(_2)?$")


def read_shapes(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the weights of a ModelOpt checkpoint have when dequantized."""
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__" and not _SCALES.search(name):
            *rows, columns = entry["shape"] or (1,)
            found[name] = (*rows, columns * 2 if entry["dtype"] == "U8" else columns)
    return found


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 values that bfloat16 holds exactly, and that follow from the name.

    Matrices keep the size of what they multiply. Other weights are close to 1, and biases small.
    """
    count = math.prod(shape)
    draws = np.frombuffer(hashlib.shake_256(name.encode()).digest(count), np.int8)
    numbers = draws.astype(np.float32).reshape(shape)
    if len(shape) > 1:
        return np.ldexp(numbers, -round(math.log2(74 * math.sqrt(shape[-1]))))
    small = np.trunc(numbers / 16) / 64
    return small if "bias" in name else 1 + small


def drafting_names(folder: pathlib.Path) -> dict[str, str]:
    """Return how the drafting layers of a given checkpoint are called."""
    names, _ = DRAFTED[folder.name]
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    if names.get("layer"):
        return names
    stem = f"model.layers.{config['num_hidden_layers']}"
    return {part: f"{stem}.{name}".rstrip(".") for part, name in names.items()}


def _of_streams(made: dict, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return what DeepSeek-V4 has beside a layer, whose experts no table chooses."""
    del made["mtp.0.ffn.gate.tid2eid"]
    width = made["mtp.0.hc_attn_fn"][1]
    streams = width // hidden
    return {
        "mtp.0.ffn.gate.bias": made["mtp.0.ffn.gate.weight"][:1],
        "mtp.0.e_proj.weight": (hidden, hidden),
        "mtp.0.h_proj.weight": (hidden, hidden),
        "mtp.0.hc_head_fn": (streams, width),
        "mtp.0.hc_head_base": (streams,),
        "mtp.0.hc_head_scale": (1,),
    }


def drafting_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the drafting layers of a given checkpoint in float32, by their names in the file."""
    names, (_, layers) = drafting_names(folder), DRAFTED[folder.name]
    shapes = read_shapes(folder)
    made: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(layers):
        inside = re.compile(rf"(?:model|backbone)(?:\.language_model)?\.layers\.{layer}\.(.+)")
        stem = f"mtp.layers.{index}" if layers[1:] else names["layer"]
        for name, shape in shapes.items():
            if found := inside.fullmatch(name):
                made[f"{stem}.{found[1]}"] = shape
    hidden = shapes[next(name for name in shapes if "embed" in name)][1]
    if "joint" in names:
        made[f"{names['joint']}.weight"] = (hidden, 2 * hidden)
    else:
        made |= _of_streams(made, hidden)
    for part in ("embedding", "hidden", "norm"):
        made[f"{names[part]}.weight"] = (hidden,)
    return {name: values(name, shape) for name, shape in sorted(made.items())}
