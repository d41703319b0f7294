"""Write spellings and faults of published files: the same numbers in another form.

Each function takes and returns all tensors of a checkpoint and its two configurations.
`hf_quant_config` is empty if the tool writes none.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

GARBAGE = "\0backbone.pt_name_sentinel"
APART = 8.0  # a power of two, so that scales move without rounding


@dataclasses.dataclass
class Files:
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    hf_quant_config: dict[str, Any]


def w1_w3_w2(files: Files) -> Files:
    """Rename experts' `gate_proj`, `up_proj`, `down_proj` to `w1`, `w3`, `w2`."""
    short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    pattern = re.compile(r"(\.experts\.\d+\.)(gate_proj|up_proj|down_proj)\.")
    tensors = {
        pattern.sub(lambda m: f"{m[1]}{short[m[2]]}.", name): tensor
        for name, tensor in files.tensors.items()
    }
    return dataclasses.replace(files, tensors=tensors)


def stacked_rows(files: Files) -> Files:
    """Stack modelopt's experts to one [E, out, in/2] per projection, with `weight_scale_2` [E]."""
    tensors = dict(files.tensors)
    stems = sorted({m[1] for m in map(re.compile(r"(.*\.experts)\.0\.").match, tensors) if m})
    for stem in stems:
        count = len([n for n in tensors if re.fullmatch(rf"{stem}\.\d+\.down_proj\.weight", n)])
        for stacked, parts in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                if f"{stem}.0.{parts[0]}.{part}" not in tensors:
                    continue
                rows = [
                    [tensors.pop(f"{stem}.{e}.{p}.{part}") for p in parts] for e in range(count)
                ]
                whole = [torch.cat(row) if row[0].ndim else row[0] for row in rows]
                name = f"{stem}.{stacked}" + ("" if part == "weight" else f"_{part}")
                tensors[name] = torch.stack(whole)
    for name in [n for n in tensors if ".experts." in n and n.endswith("_proj_weight_scale")]:
        turn_stacked(tensors, name.removesuffix("_weight_scale"))
    return dataclasses.replace(files, tensors=tensors)


def turn_stacked(tensors: dict[str, torch.Tensor], name: str) -> None:
    """Transpose [E, in/2, out] to [E, out, in/2], and leave rows as they are."""
    if tensors[f"{name}_weight_scale_2"].ndim == 0:
        for part in (name, f"{name}_weight_scale"):
            tensors[part] = tensors[part].transpose(1, 2).contiguous()
        experts = tensors[name].shape[0]
        for part in (f"{name}_weight_scale_2", f"{name}_input_scale"):
            if part in tensors:
                tensors[part] = tensors[part].expand(experts).contiguous()


def faults(files: Files) -> Files:
    """Give modelopt's W4A4 faults that loaders must survive.

    The global scales of gate and up are APART, unless a block's scale would round. The first
    expert's down_proj has no input scale, and the second's is zero. Names of excluded modules end
    in GARBAGE. `group_size` is a string.
    """
    tensors = dict(files.tensors)
    for name in [n for n in tensors if ".experts." in n and n.endswith("gate_proj.weight_scale")]:
        smaller = tensors[name].float() / APART
        if torch.equal(smaller.to(torch.float8_e4m3fn).float(), smaller):
            tensors[name] = smaller.to(torch.float8_e4m3fn)
            tensors[f"{name}_2"] = tensors[f"{name}_2"] * APART
    for name in [n for n in tensors if n.endswith("experts.0.down_proj.input_scale")]:
        del tensors[name]
    for name in [n for n in tensors if n.endswith("experts.1.down_proj.input_scale")]:
        tensors[name] = torch.zeros_like(tensors[name])
    quantization = files.hf_quant_config["quantization"]
    quantization["group_size"] = str(quantization["group_size"])
    quantization["exclude_modules"] = [f"{n}.{GARBAGE}" for n in quantization["exclude_modules"]]
    ignored = files.config["quantization_config"]["ignore"]
    files.config["quantization_config"]["ignore"] = [f"{name}.{GARBAGE}" for name in ignored]
    return dataclasses.replace(files, tensors=tensors)


REWRITES: dict[str, Callable[[Files], Files]] = {
    "w1w3w2": w1_w3_w2,
    "rows": stacked_rows,
    "faults": faults,
}


def rewrite(folder: pathlib.Path, name: str) -> None:
    """Apply REWRITES[name] to the checkpoint in `folder`, which has one safetensors file."""
    paths = [folder / "config.json", folder / "hf_quant_config.json"]
    configs = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    weights = folder / "model.safetensors"
    files = REWRITES[name](Files(safetensors.torch.load_file(weights), *configs))
    safetensors.torch.save_file(files.tensors, weights, {"format": "pt"})
    for path, config in zip(paths, (files.config, files.hf_quant_config), strict=True):
        if config:
            path.write_text(json.dumps(config, indent=2) + "\n")
