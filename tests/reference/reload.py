"""`python -m tests.reference.reload FOLDER...`: what tools compute from this package's checkpoints.

Writes `reference.safetensors` (input_ids and logits) into each folder for
`tests.reference.compare`.

compressed-tensors: transformers' `from_pretrained` runs with compressed-tensors' own decompression
and rounding of inputs. It runs in llm-compressor's `load_context`, which keeps experts as single
linears. The fused experts of transformers 5.17 drop `weight_global_scale`, because its
`DecompressExperts` asks only for packed weights and block scales.

modelopt: it has no loader for what it exports. transformers' loader takes the weights as modelopt's
`NVFP4QTensor` dequantizes them, and inputs are rounded as modelopt does.
"""

import functools
import json
import pathlib
import sys
from typing import Any

import safetensors.torch
import torch
import transformers

from tests.reference import dense, generate, models, record, tools
from tests.reference.architecture import Architecture
from tests.reference.architectures import ARCHITECTURES

BY_FUSED_NAME = ("llama4", "llama4_text", "gpt_oss")  # transformers reads only stacked experts


def architecture_of(config: dict[str, Any]) -> Architecture:
    """Return the first architecture of the table with the model type of a config."""
    return next(a for a in ARCHITECTURES.values() if a.model_type == config["model_type"])


def run_compressed_tensors(folder: pathlib.Path, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return input_ids and logits, in float32.

    Raises:
        ValueError: the model has another number of quantized linears than the file.
    """
    from compressed_tensors.compressors.nvfp4 import base
    from llmcompressor.utils import load_context

    # Without this, weights are rounded to bfloat16.
    base.unpack_fp4_from_uint8 = functools.partial(base.unpack_fp4_from_uint8, dtype=torch.float32)
    make = transformers.AutoModelForCausalLM
    with tools.own_conversions(), load_context(make):
        model: Any = make.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
        )
    quantized = [m for m in model.modules() if getattr(m, "quantization_scheme", None) is not None]
    stored = dense.read(folder)
    if len(quantized) != len(stored.weights):
        raise ValueError(f"{folder}: {len(quantized)} of {len(stored.weights)} linears quantized.")
    with torch.no_grad():
        return {"input_ids": ids, "logits": model.float().eval()(ids, use_cache=False).logits}


def run_modelopt(folder: pathlib.Path, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return input_ids, logits and what passes through MoE blocks, in float32."""
    kind = architecture_of(json.loads((folder / "config.json").read_text()))
    weights = dense.read(folder)
    if kind.model_type in BY_FUSED_NAME:
        dense.stack_experts(weights, str(kind.stacked))
    return record.run(generate.dense_model(kind, folder, weights), weights, ids)


def main(folders: list[str]) -> int:
    """Write the results for all folders."""
    for folder in map(pathlib.Path, folders):
        config = json.loads((folder / "config.json").read_text())
        vocabulary = config.get("text_config", config)["vocab_size"]
        ids = models.prompt(architecture_of(config), vocabulary, seed=2)
        form = config["quantization_config"]["quant_method"]
        run = {"compressed-tensors": run_compressed_tensors, "modelopt": run_modelopt}[form]
        tensors = {name: value.contiguous() for name, value in run(folder, ids).items()}
        safetensors.torch.save_file(tensors, folder / "reference.safetensors")
        print(f"{folder}: {form}, logits {list(tensors['logits'].shape)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
