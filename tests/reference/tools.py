"""Quantize a folder of a random model with the real tool, and write its checkpoint."""

import contextlib
import copy
import importlib.metadata
import pathlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import tokenizers
import torch
import transformers
from transformers import conversion_mapping

from tests.reference import models, rounding
from tests.reference.architecture import Architecture
from tests.reference.forms import LlmCompressor, ModelOpt


def modelopt_config(recipe: ModelOpt) -> dict[str, Any]:
    """Return the preset with the recipe's exceptions after it, because a later rule wins."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(getattr(mtq, recipe.preset))
    fp8 = {"num_bits": (4, 3), "axis": None}
    for pattern in recipe.fp8:
        for kind in ("weight_quantizer", "input_quantizer"):
            rule = {"quantizer_name": f"{pattern}{kind}", "cfg": fp8, "enable": True}
            config["quant_cfg"].append(rule)
    left_out = [rule for rule in config["quant_cfg"] if rule.get("enable") is False]
    off = [{"quantizer_name": f"{pattern}", "enable": False} for pattern in recipe.off]
    config["quant_cfg"].extend(left_out[1:] + off)  # the first rule switches everything off
    of_weights = [
        rule for rule in config["quant_cfg"] if rule.get("quantizer_name") == "*weight_quantizer"
    ]
    for pattern in recipe.on:
        rule = {**copy.deepcopy(of_weights[0]), "quantizer_name": f"{pattern}weight_quantizer"}
        config["quant_cfg"].append({**rule, "enable": True})
    if recipe.kv:
        config["quant_cfg"].extend(copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"]))
    return config


def write_with_modelopt(
    recipe: ModelOpt, architecture: Architecture, source: pathlib.Path, folder: pathlib.Path
) -> dict[str, str]:
    """Calibrate, quantize and export; return the versions of the tools.

    Calibration needs no GPU: modelopt rounds nothing while it collects ranges, and it packs weights
    with plain torch.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = models.load(architecture, source, torch.bfloat16)
    batches = models.calibration_batches(model.config.get_text_config().vocab_size, seed=3)

    def calibrate(model: torch.nn.Module) -> None:
        for batch in batches:
            model(batch)

    with torch.no_grad():
        with rounding_without_gpu():
            mtq.quantize(model, modelopt_config(recipe), calibrate)
        extra = {}
        if recipe.mtp:
            extra = further_tokens(architecture.mtp, model.config.get_text_config().hidden_size)
            vars(model)["_mtp_layer_prefixes"] = [architecture.mtp]  # as the tool's script does
        export_hf_checkpoint(
            model, export_dir=folder, extra_state_dict=extra, max_shard_size=recipe.shard
        )
    return versions("nvidia-modelopt")


@contextlib.contextmanager
def rounding_without_gpu() -> Iterator[None]:
    """Let modelopt's searches, such as AWQ's, round with torch in place of its Triton kernel."""
    from modelopt.torch.quantization import tensor_quant

    def round_blocks(inputs: torch.Tensor, block: int, amax: torch.Tensor, *bits: int):
        if (block, *bits) != (rounding.BLOCK, 4, 2, 8, 4):
            raise ValueError(f"expected NVFP4, got blocks of {block} with bits {bits}.")
        scale = amax.float() / (6.0 * rounding.E4M3_MAX)
        return rounding.modelopt_nvfp4(scale)(inputs).to(inputs.dtype)

    with unittest.mock.patch.object(tensor_quant, "dynamic_block_quantize_op", round_blocks):
        yield


def further_tokens(prefix: str, hidden: int) -> dict[str, torch.Tensor]:
    """Return some bfloat16 tensors with which published models predict further tokens."""
    shapes = {
        "eh_proj.weight": (hidden, 2 * hidden),
        "enorm.weight": (hidden,),
        "mlp.experts.0.down_proj.weight": (hidden, 16),
    }
    return {f"{prefix}.{name}": torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def write_with_llmcompressor(
    recipe: LlmCompressor, architecture: Architecture, source: pathlib.Path, folder: pathlib.Path
) -> dict[str, str]:
    """Run `oneshot` on the calibration prompts and save; return the versions of the tools."""
    from llmcompressor.entrypoints.oneshot import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.utils import load_context

    make = getattr(transformers, architecture.model)
    with own_conversions():
        with load_context(make):
            model = make.from_pretrained(source, dtype=torch.bfloat16, attn_implementation="eager")
        batches = models.calibration_batches(model.config.get_text_config().vocab_size, seed=3)
        prompts: Any = [{"input_ids": batch[0]} for batch in batches]
        oneshot(
            model=model,
            dataset=torch.utils.data.DataLoader(prompts),
            recipe=[QuantizationModifier(**quantization_arguments(recipe))],
            processor=no_tokenizer(),
            pipeline="basic",
        )
        model.save_pretrained(folder, save_compressed=True)
    return versions("llmcompressor", "compressed-tensors")


def no_tokenizer() -> Any:
    """Return a tokenizer that `oneshot` wants with any data set and does not use with ours."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token="?"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words)


@contextlib.contextmanager
def own_conversions() -> Iterator[None]:
    """Let llm-compressor change how transformers reads experts, and undo that afterwards."""
    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")  # fills the table
    before = dict(conversion_mapping._checkpoint_conversion_mapping_cache)
    registered = set(conversion_mapping.USER_REGISTERED_MAPPINGS)
    try:
        yield
    finally:
        conversion_mapping._checkpoint_conversion_mapping_cache = before
        conversion_mapping.USER_REGISTERED_MAPPINGS.intersection_update(registered)


def quantization_arguments(recipe: LlmCompressor) -> dict[str, Any]:
    """Return the recipe's arguments, with each named preset written out."""
    from compressed_tensors.quantization import preset_name_to_scheme

    arguments = copy.deepcopy(recipe.arguments)
    arguments["ignore"] = list(arguments["ignore"])
    for name, group in arguments.get("config_groups", {}).items():
        scheme = preset_name_to_scheme(group["preset"], group["targets"])
        arguments["config_groups"][name] = scheme
    return arguments


def versions(*tools: str) -> dict[str, str]:
    """Return the versions of `tools` and of transformers and torch, which they use."""
    return {name: importlib.metadata.version(name) for name in (*tools, "transformers", "torch")}
