"""Read a written checkpoint as dense float32 tensors, and how each linear rounds its input."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import safetensors.torch
import torch

from tests.reference import rounding
from tests.reference.rounding import Rounding

QUANTIZED = re.compile(r"(.*?)([._])weight_scale$")
CACHE = re.compile(r".*\blayers\.(\d+)\..*\.([kv])_scale$")


@dataclasses.dataclass
class Dense:
    """The dense weights of a checkpoint, and how its linears round their inputs.

    Attributes:
      tensors: dense tensors by their names in the file.
      inputs: name of a quantized weight -> the rounding of its input.
      scales: name of such a weight -> the number that is stored for that rounding, or None.
      cache: (layer, "k" or "v") -> the rounding of what the cache holds.
      weights: names of the tensors that were quantized.
      stacked: matrices made of several linears, each with the rounding of its one input.
    """

    tensors: dict[str, torch.Tensor]
    inputs: dict[str, Rounding]
    scales: dict[str, float | None]
    cache: dict[tuple[int, str], Rounding]
    weights: list[str]
    stacked: list[tuple[torch.Tensor, Rounding]] = dataclasses.field(default_factory=list)


def read(folder: pathlib.Path) -> Dense:
    """Dequantize the weights of a folder with the functions of the tool that wrote it."""
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        stored |= safetensors.torch.load_file(path)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    dequantize = {"modelopt": modelopt_linear, "compressed-tensors": compressed_linear}
    dense = Dense({}, {}, {}, {}, [])
    used: set[str] = set()
    for name in stored:
        matched = QUANTIZED.match(name)
        if matched:
            stem, joint = matched.groups()
            parts = take(stored, stem, joint)
            used |= set(parts.values())
            tensors = {part: stored[full] for part, full in parts.items()}
            weight, activation = dequantize[config["quant_method"]](tensors, config)
            target = f"{stem}.weight" if joint == "." else stem
            dense.tensors[target] = weight
            dense.weights.append(target)
            if activation is not None:
                dense.inputs[target] = activation
                dense.scales[target] = stored_scale(tensors)
        elif cached := CACHE.match(name):
            used.add(name)
            key = (int(cached[1]), cached[2])
            dense.cache[key] = cache_rounding(stored[name], config)
    for name, tensor in stored.items():
        if name not in used:
            dense.tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    return dense


def take(stored: dict[str, torch.Tensor], stem: str, joint: str) -> dict[str, str]:
    """Return part -> full name. Stacked experts append a part to the parameter's name with `_`."""
    endings = ("weight_packed", "weight_scale", "weight_scale_2", "input_scale")
    endings += ("weight_global_scale", "input_global_scale", "pre_quant_scale")
    parts = {part: f"{stem}{joint}{part}" for part in endings}
    parts["weight"] = f"{stem}.weight" if joint == "." else stem
    return {part: full for part, full in parts.items() if full in stored}


def stack_experts(dense: Dense, how: str) -> None:
    """Replace `experts.E.{gate,up,down}_proj.*` by transformers' stacked parameters.

    Gate and up become "rows" [E, 2 I, H] or "columns" [E, H, 2 I]. If they are "interleaved", the
    even columns are those of gate.
    """
    numbered = re.compile(r"(.*\.experts)\.(\d+)\.gate_proj\.weight$")
    counts: dict[str, int] = {}
    for match in filter(None, map(numbered.match, dense.tensors)):
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    for stem, count in counts.items():
        for kind, end in (("weight", ""), ("bias", "_bias")):
            if f"{stem}.0.gate_proj.{kind}" in dense.tensors:
                gate, up, down = (
                    torch.stack(
                        [dense.tensors.pop(f"{stem}.{e}.{part}_proj.{kind}") for e in range(count)]
                    )
                    for part in ("gate", "up", "down")
                )
                gate_up, down = stacked(gate, up, down, how)
                dense.tensors[f"{stem}.gate_up_proj{end}"] = gate_up
                dense.tensors[f"{stem}.down_proj{end}"] = down
        stack_roundings(dense, stem, count)


def stacked(
    gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, how: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (gate_up, down), stacked from weights [E, out, in] or biases [E, out]."""
    if gate.ndim == 3 and how != "rows":
        gate, up, down = (weight.transpose(1, 2) for weight in (gate, up, down))
    if how == "interleaved":
        gate_up = torch.stack([gate, up], -1).flatten(-2)
    else:
        gate_up = torch.cat([gate, up], 1 if how == "rows" else -1)
    return gate_up.contiguous(), down.contiguous()


def stack_roundings(dense: Dense, stem: str, count: int) -> None:
    """Move the roundings of the experts' inputs to the stacked parameters."""
    for part, first in (("gate_up_proj", "gate"), ("down_proj", "down")):
        names = [f"{stem}.{e}.{first}_proj.weight" for e in range(count)]
        if names[0] in dense.inputs:
            roundings = [dense.inputs.pop(name) for name in names]
            weights = dense.tensors[f"{stem}.{part}"]
            dense.stacked.append((weights, each_its_own(roundings)))
            dense.stacked.extend(zip(weights, roundings, strict=True))
    for e in range(count):
        check_pair(dense, f"{stem}.{e}.gate_proj.weight", f"{stem}.{e}.up_proj.weight")
        dense.inputs.pop(f"{stem}.{e}.up_proj.weight", None)


def check_pair(dense: Dense, gate: str, up: str) -> None:
    """Raise ValueError if gate and up round the same input differently."""
    if dense.scales.get(gate) != dense.scales.get(up):
        raise ValueError(f"{gate}, {up}: expected one scale of their input.")


def each_its_own(roundings: list[Rounding]) -> Rounding:
    """Return a rounding of x [E, t, h] that applies the e-th rounding to x[e]."""
    return lambda x: torch.stack([r(part) for r, part in zip(roundings, x, strict=True)])


def stored_scale(parts: dict[str, torch.Tensor]) -> float | None:
    """Return the one number that is stored for the rounding of the input, or None."""
    names = [name for name in ("input_scale", "input_global_scale") if name in parts]
    return parts[names[0]].item() if names else None


def modelopt_linear(
    parts: dict[str, torch.Tensor], config: dict[str, Any]
) -> tuple[torch.Tensor, Rounding | None]:
    """Return (W, input rounding) by modelopt's dequantization; 3-D weights are [E, in, out]."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight, scale, activation = parts["weight"], parts["weight_scale"], None
    if "weight_scale_2" not in parts:
        if "input_scale" in parts:
            activation = rounding.modelopt_fp8(parts["input_scale"])
        return weight.float() * scale.float(), activation
    if weight.ndim == 3:
        weight, scale = weight.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
    shape = torch.Size((*weight.shape[:-1], 2 * weight.shape[-1]))
    values = NVFP4QTensor(shape, torch.float32, weight).dequantize(
        dtype=torch.float32,
        scale=scale,
        double_scale=parts["weight_scale_2"],
        block_sizes={-1: rounding.BLOCK},
    )
    if "input_scale" in parts:
        activation = rounding.modelopt_nvfp4(parts["input_scale"])
    if "pre_quant_scale" in parts:
        activation = rounding.after_scaling(parts["pre_quant_scale"], activation)
    return (values.transpose(1, 2).contiguous() if weight.ndim == 3 else values), activation


def compressed_linear(
    parts: dict[str, torch.Tensor], config: dict[str, Any]
) -> tuple[torch.Tensor, Rounding | None]:
    """Return (W, input rounding) by compressed-tensors' own dequantization, in float32."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    bits = 4 if "weight_packed" in parts else 8
    group = next(g for g in config["config_groups"].values() if g["weights"]["num_bits"] == bits)
    args = QuantizationArgs(**group["weights"])
    scale, global_scale = parts["weight_scale"].float(), parts.get("weight_global_scale")
    if bits == 4:
        rows, half = parts["weight_packed"].shape
        values = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * half, torch.float32)
    else:
        values = parts["weight"].float()
    weight = dequantize(values, scale, None, args, torch.float32, global_scale)
    inputs = group["input_activations"]
    if inputs is None:
        return weight, None
    return weight, rounding.compressed_tensors_dynamic(inputs, parts.get("input_global_scale"))


def cache_rounding(scale: torch.Tensor, config: dict[str, Any]) -> Rounding:
    """Return the rounding of keys or values by the tool that stored `scale`."""
    if config["quant_method"] == "modelopt":
        return rounding.modelopt_fp8(scale)
    return rounding.compressed_tensors_static(config["kv_cache_scheme"], scale)
