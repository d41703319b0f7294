"""Write unquantized checkpoints for tests of the quantizer, by dequantizing given ones."""

import json
import pathlib

import numpy as np
from support.files.checkpoint_edits import E2M1, GIVEN, read_all

from jax_nvfp4_moe.checkpoint.export import write_folder

SMALL = GIVEN / "sources" / "qwen3_moe-small"
SCALES = ("weight_scale_2", "weight_scale", "input_scale")


def tokens(folder=SMALL):
    """Return the calibration windows of `SMALL`, int32 ``[w, t]``."""
    return np.array(json.loads((folder / "tokens.json").read_text()), np.int32)


# The values of the codes, except that code 8, negative zero, is a small negative value. It rounds
# to code 8 again.
ROUNDABLE = np.where(np.arange(16) == 8, np.float32(-0.125), E2M1)


def dequantize(packed, block_scale, global_scale, axis=-1, values=E2M1):
    """Return ``value * (block_scale * global_scale)`` in float32, packed along `axis`."""
    packed, block_scale = np.moveaxis(packed, axis, -1), np.moveaxis(block_scale, axis, -1)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    scale = block_scale.astype(np.float32) * global_scale.astype(np.float32)
    return np.moveaxis(values[codes] * np.repeat(scale, 16, -1), -1, axis)


def dense_tensors(tensors, values=E2M1):
    """Return the tensors of a ModelOpt checkpoint, with quantized ones dequantized to float32."""
    dense = {}
    for name, tensor in tensors.items():
        stem, joint = (name.removesuffix(".weight"), ".") if ".weight" in name else (name, "_")
        if f"{stem}{joint}weight_scale" in tensors:
            scales = (tensors[f"{stem}{joint}{part}"] for part in ("weight_scale", SCALES[0]))
            # Stacked experts are [e, k, n].
            dense[name] = dequantize(
                tensor, *scales, axis=-1 if joint == "." else -2, values=values
            )
        elif not name.endswith(SCALES):
            dense[name] = tensor
    return dense


def write_source(folder, tensors, config, **options):
    """Write an unquantized checkpoint."""
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    write_folder(folder, tensors, config, **options)
    return folder


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def dequantized(name, folder, values=E2M1):
    """Dequantize the given ModelOpt checkpoint called `name`, and write it to `folder`."""
    given = GIVEN / name
    tensors = dense_tensors(read_all(given), values)
    return write_source(pathlib.Path(folder), tensors, read_config(given))


def first_layer_dequantized(name, folder):
    """Do as `dequantized` with the first of two layers that are alike."""
    given = GIVEN / name
    tensors = dense_tensors(read_all(given))
    first = {key: tensor for key, tensor in tensors.items() if "layers.1." not in key}
    return write_source(pathlib.Path(folder), first, read_config(given) | {"num_hidden_layers": 1})
