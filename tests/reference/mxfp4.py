"""`python -m tests.reference.mxfp4 --folder references`: MXFP4 as transformers reads it.

Writes two folders. `mxfp4-values` holds codes and scales of every kind, with the float32 values
that transformers dequantizes them to. `gpt_oss-mxfp4` is a tiny gpt-oss in the form that OpenAI
publishes, with what transformers computes from it. Its own loader dequantizes the experts to
float32. Needs only torch and transformers.
"""

import argparse
import json
import pathlib
import tempfile

import numpy as np
import safetensors.torch
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.reference import models, record
from tests.reference.architecture import Architecture
from tests.reference.architectures import ARCHITECTURES
from tests.reference.dense import Dense

BLOCK = 32
LARGEST_EXPONENT = 2  # exponent of the largest codes, 4 and 6
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TENSORS = ("gate_up_proj", "down_proj")


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks uint8 [..., k/32, 16] and scales uint8 [..., k/32] of weight [..., k].

    The scale of a block is 2 ** (floor(log2(amax)) - 2). Each value takes the nearest code.

    Source: OCP Microscaling Formats v1.0, section 6.3.
    """
    blocks = weight.reshape(*weight.shape[:-1], -1, BLOCK).float()
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - LARGEST_EXPONENT
    scaled = blocks / torch.exp2(exponent)[..., None]
    code = (scaled.abs()[..., None] - CODES).abs().argmin(-1) | (scaled < 0).long() << 3
    packed = code[..., 0::2] | code[..., 1::2] << 4
    return packed.to(torch.uint8), (exponent + 127).to(torch.uint8)


def write_checkpoint(kind: Architecture, seed: int, folder: pathlib.Path) -> None:
    """Write a random model whose experts are MXFP4."""
    with tempfile.TemporaryDirectory() as scratch:
        source = pathlib.Path(scratch, "source")
        models.save_random(kind, seed, source)
        tensors = safetensors.torch.load_file(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
    written = {}
    for name, tensor in tensors.items():
        if name.endswith(TENSORS):  # [e, k, n]
            blocks, scales = quantize(tensor.transpose(1, 2).contiguous())
            written |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            written[name] = tensor.to(torch.bfloat16)
    folder.mkdir(parents=True)
    safetensors.torch.save_file(written, folder / "model.safetensors", {"format": "pt"})
    section = {"modules_to_not_convert": KEPT, "quant_method": "mxfp4"}
    config |= {"dtype": "bfloat16", "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_model(seed: int, folder: pathlib.Path) -> None:
    """Write a checkpoint, reference.safetensors and reference.json."""
    name = "gpt_oss-mxfp4"
    kind = ARCHITECTURES[name]
    write_checkpoint(kind, seed, folder / name)
    model = models.load(kind, folder / name, torch.float32)
    ids = models.prompt(kind, model.config.vocab_size, seed + 1)
    tensors = record.run(model, Dense({}, {}, {}, {}, []), ids)
    safetensors.torch.save_file(tensors, folder / name / "reference.safetensors")
    facts = {"architecture": name, "seed": seed, "tool": "transformers", "tools": versions()}
    (folder / name / "reference.json").write_text(json.dumps(facts, indent=1) + "\n")


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def cases(seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return name -> codes [e, n, k/32, 16] and scales [e, n, k/32]."""
    rng = np.random.default_rng(seed)
    found = {}

    def add(name, scales, codes=None):
        shape = (*scales.shape, BLOCK // 2)
        packed = rng.integers(0, 256, shape) if codes is None else np.broadcast_to(codes, shape)
        found[name] = packed.astype(np.uint8), scales.astype(np.uint8)

    shape = (3, 8, 4)
    add("random", rng.integers(112, 130, shape))  # 18 powers of two
    add("each_code", np.full((1, 16, 1), 120), (np.arange(16) * 17)[:, None, None][None])
    # Every other block is zero and has the scale that quantizers give to zeros.
    scales = rng.integers(110, 126, shape)
    scales[..., ::2] = 0
    add("zeros_between", scales)
    found["zeros_between"][0][..., ::2, :] = rng.choice([0, 0x80, 0x08, 0x88], (*shape[:2], 2, 16))
    add("all_zero", rng.integers(0, 255, shape), 0)
    # Codes of 0, 0.5 and 1 have scales far above, and codes of 0 and 4 have scales far below.
    scales = rng.integers(110, 125, shape)
    scales[:, 0], scales[:, 1] = 127, 106
    scales[:, 2:, 0] = 125
    add("room_in_codes", scales)
    low, high = (
        rng.choice([0, 1, 2, 8, 9, 10], (2, 3, 4, 16)),
        rng.choice([0, 6, 14], (2, 3, 4, 16)),
    )
    found["room_in_codes"][0][:, 0] = low[0] | low[1] << 4
    found["room_in_codes"][0][:, 1] = high[0] | high[1] << 4
    # Scales from 2 ** -123 on: all values are normal float32 numbers.
    add("small", rng.integers(4, 22, shape))
    add("large", rng.integers(235, 253, shape))  # up to 6 * 2 ** 125
    return found


def write_values(seed: int, folder: pathlib.Path) -> None:
    """Write codes and scales of each case, with transformers' float32 values [e, n, k]."""
    tensors = {}
    for name, (blocks, scales) in cases(seed).items():
        given = torch.from_numpy(blocks), torch.from_numpy(scales)
        values = convert_moe_packed_tensors(*given, dtype=torch.float32)
        tensors |= {f"{name}.blocks": given[0], f"{name}.scales": given[1]}
        tensors[f"{name}.values"] = values.transpose(1, 2).contiguous()
    (folder / "mxfp4-values").mkdir(parents=True)
    safetensors.torch.save_file(tensors, folder / "mxfp4-values" / "values.safetensors")
    facts = json.dumps({"seed": seed, "tools": versions()}, indent=1)
    (folder / "mxfp4-values" / "reference.json").write_text(facts + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.reference.mxfp4", description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("references"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_values(options.seed, options.folder)
    write_model(options.seed, options.folder)
