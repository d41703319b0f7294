"""Write one architecture in one form: the tool's checkpoint, and transformers' results for it."""

import json
import pathlib
import shutil
import tempfile
from typing import Any

import safetensors.torch
import torch
import transformers

from tests.reference import dense, models, record, rewrite, tools
from tests.reference.architecture import Architecture
from tests.reference.architectures import ARCHITECTURES
from tests.reference.forms import FORMS, ModelOpt

TRIALS = 4
NOISE = 1e-6
STEADY = 1e-3  # largest change of logits, whose rms is about one
ATTEMPTS = 12


def generate(architecture: str, form: str, rewritten: str, seed: int, folder: pathlib.Path) -> None:
    """Write `folder`: the checkpoint, reference.safetensors and reference.json.

    If a rounding or a routing decision nearly ties, noise in the last bits moves whole logits. The
    next seeds are therefore tried until one is STEADY.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
        for tried in range(seed, seed + ATTEMPTS):
            written = pathlib.Path(scratch, str(tried))
            facts = generate_once(architecture, form, tried, written)
            change = facts["sensitivity_to_1e6_noise"]["max_abs_logit_change"]
            if change < STEADY or tried == seed + ATTEMPTS - 1:
                if rewritten:
                    rewrite.rewrite(written, rewritten)
                written.rename(folder)
                break


def generate_once(architecture: str, form: str, seed: int, folder: pathlib.Path) -> dict[str, Any]:
    """Write all files of one seed to `folder`, and return the contents of reference.json."""
    kind, recipe = ARCHITECTURES[architecture], FORMS[form]
    with tempfile.TemporaryDirectory() as scratch:
        source = pathlib.Path(scratch, "source")
        models.save_random(kind, seed, source)
        if isinstance(recipe, ModelOpt):
            versions = tools.write_with_modelopt(recipe, kind, source, folder)
        else:
            versions = tools.write_with_llmcompressor(recipe, kind, source, folder)
        original = safetensors.torch.load_file(source / "model.safetensors")
    number_shards(folder, original)
    weights = dense.read(folder)
    if getattr(recipe, "mtp", False):
        drop_further_tokens(weights, kind)
    errors = weight_errors(original, weights)
    if kind.stacked is not None:
        dense.stack_experts(weights, kind.stacked)
    model = dense_model(kind, folder, weights)
    ids = models.prompt(kind, model.config.get_text_config().vocab_size, seed + 1)
    tensors = record.run(model, weights, ids)
    safetensors.torch.save_file(tensors, folder / "reference.safetensors")
    facts = {
        "architecture": architecture,
        "form": form,
        "seed": seed,
        "tool": recipe.tool,
        "recipe": vars(recipe),
        "tools": versions,
        "relative_rms_of_weight_errors": errors,
        "topk_margin": margins(tensors),
        "sensitivity_to_1e6_noise": sensitivity(model, weights, tensors),
    }
    (folder / "reference.json").write_text(json.dumps(facts, indent=1, default=str) + "\n")
    edit_config(folder, kind)
    return facts


def number_shards(folder: pathlib.Path, original: dict[str, torch.Tensor]) -> None:
    """Divide a table of n-grams into the shards of the source.

    modelopt 0.47 writes one table, and calls it `shard_` without a number.
    """
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name in [name for name in tensors if name.endswith(".shard_.weight")]:
        stem = name.removesuffix("shard_.weight") + "ngram_embedding.shard_"
        count = sum(one.startswith(stem) for one in original)
        for index, part in enumerate(tensors.pop(name).chunk(count)):
            tensors[f"{stem}{index}.weight"] = part.clone()
        safetensors.torch.save_file(tensors, path, {"format": "pt"})


def drop_further_tokens(weights: dense.Dense, architecture: Architecture) -> None:
    """Remove the layers that transformers does not build."""
    for name in [n for n in weights.tensors if n.startswith(f"{architecture.mtp}.")]:
        del weights.tensors[name]


def dense_model(
    architecture: Architecture, folder: pathlib.Path, weights: dense.Dense
) -> transformers.PreTrainedModel:
    """Load the dequantized tensors with transformers' own loader, in float32."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    with tempfile.TemporaryDirectory() as scratch:
        plain = pathlib.Path(scratch)
        (plain / "config.json").write_text(json.dumps(config))
        safetensors.torch.save_file(weights.tensors, plain / "model.safetensors", {"format": "pt"})
        return models.load(architecture, plain, torch.float32)


def weight_errors(original: dict[str, torch.Tensor], weights: dense.Dense) -> dict[str, float]:
    """Return the least and the largest rms(W - original) / rms(original) of quantized weights.

    The error is about 0.1 with NVFP4 and 0.03 with FP8. A wrong name or orientation gives more than
    one. transformers writes Step-3.7 without the prefix `language_model.`, which the tool keeps.
    """
    original |= {n.replace("model.", "model.language_model.", 1): w for n, w in original.items()}
    errors = [
        ((weights.tensors[name] - original[name]).norm() / original[name].norm()).item()
        for name in weights.weights
        if name in original
    ]
    return {
        "compared": len(errors),
        "least": min(errors, default=0),
        "most": max(errors, default=0),
    }


def margins(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the smallest gap between the last chosen and the next logit of each router."""
    found = {}
    for name, logits in tensors.items():
        if name.endswith("router_logits"):
            chosen = tensors[name.replace("router_logits", "topk_indices")].shape[-1]
            flat = logits.reshape(-1, logits.shape[-1]).sort(descending=True).values
            if chosen < flat.shape[-1]:
                found[name] = (flat[:, chosen - 1] - flat[:, chosen]).min().item()
    return found


def sensitivity(
    model: transformers.PreTrainedModel, weights: dense.Dense, tensors: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return how far the logits move when the embeddings move by a relative 1e-6."""
    table: Any = model.get_input_embeddings().weight
    before, changes = table.detach().clone(), []
    for trial in range(TRIALS):
        generator = torch.Generator().manual_seed(trial)
        with torch.no_grad():
            table.copy_(before * (1 + NOISE * torch.randn(before.shape, generator=generator)))
        moved = record.logits(model, weights, tensors["input_ids"])
        changes.append((moved - tensors["logits"]).abs().max().item())
    with torch.no_grad():
        table.copy_(before)
    return {
        "trials": TRIALS,
        "max_abs_logit_change": max(changes),
        "median_max_abs_logit_change": sorted(changes)[TRIALS // 2],
    }


def edit_config(folder: pathlib.Path, architecture: Architecture) -> None:
    """Write the architecture's published spellings into config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if architecture.old_rope:
        config |= old_rope(config.pop("rope_parameters"))
    removed = [key for key, value in architecture.edits.items() if value is None]
    config |= architecture.edits
    config = {key: value for key, value in config.items() if key not in removed}
    path.write_text(json.dumps(config, indent=2) + "\n")


def old_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` as they were spelled before transformers 5."""
    kept = ("rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in rope.items() if key not in (*kept, "rope_type")}
    fields = {key: rope[key] for key in kept if key in rope}
    named = {"type": rope["rope_type"]} | scaling
    return fields | {"rope_scaling": None if rope["rope_type"] == "default" else named}
