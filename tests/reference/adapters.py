"""`python -m tests.reference.adapters [FOLDER...]`: LoRA adapters of PEFT, and logits with them.

Each folder is a checkpoint of ``tests/checkpoints`` that `ADAPTED` lists. transformers runs its
weights in float32, as modelopt dequantizes them, and PEFT adds adapters with random matrices.
``tests/checkpoints/adapters`` gets PEFT's own files, the logits of the last tokens of the
checkpoint's reference prompt, and the names and shapes of the linear layers and experts that
transformers gives to each family.

`--back FOLDER` reads what ``tests.reference.adapters_back`` wrote with this package, and prints how
far PEFT's logits are from those of this package.
"""

import argparse
import json
import pathlib
import re
import sys
import tempfile
import warnings

import peft
import safetensors.torch
import torch
import transformers

from tests.reference import dense, generate
from tests.reference.reload import architecture_of

CHECKPOINTS = pathlib.Path(__file__).parents[1] / "checkpoints"
FOLDER = CHECKPOINTS / "adapters"
LAST = 3  # tokens of each row whose logits are kept
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
# Checkpoint -> the linear layers and the parameters that are adapted.
ADAPTED = {
    # attention; experts with all gate rows first
    "qwen3_moe-window-modelopt-w4a16": (["q_proj", "v_proj", "o_proj"], EXPERTS),
    # inputs before outputs, gate and up interleaved, biases; only the first matrix of experts
    "gpt_oss-modelopt-w4a16": (["k_proj", "o_proj"], EXPERTS[:1]),
    # latent attention
    "glm4_moe_lite-modelopt-w4a16": (["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"], EXPERTS[1:]),
    "deepseek_v3-direct-modelopt-w4a16": (["q_proj", "kv_b_proj", "o_proj"], []),
    # gated delta net, gated attention
    "qwen3_next-modelopt-w4a16": (["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"], EXPERTS),
    # Mamba-2, whose out_proj PEFT refuses; experts without a gate, shared experts
    "nemotron_h-modelopt-w4a16": (
        ["in_proj", "q_proj", "shared_experts.up_proj", "shared_experts.down_proj"],
        ["experts.up_proj", "experts.down_proj"],
    ),
    # short convolutions
    "lfm2_moe-modelopt-w4a16": (["in_proj", "out_proj", "w2"], EXPERTS),
    # Kimi delta attention
    "kimi_linear-modelopt-w4a16": (["q_proj", "v_proj", "o_proj", "kv_b_proj"], []),
    # another name of the experts in the file
    "mixtral-window-modelopt-w4a16": (["q_proj"], EXPERTS),
    # one linear for queries, keys and values, and one for gate and up
    "phi3-modelopt-w4a16": (["qkv_proj", "gate_up_proj", "down_proj"], []),
    # weights on the inputs of experts
    "llama4_text-modelopt-w4a16": (["k_proj", "gate_proj"], EXPERTS),
    # layers of a multimodal model, whose file has another prefix
    "gemma3-modelopt-w4a16": (r"model\.language_model\..*\.(q_proj|up_proj|down_proj)", []),
    # one linear for gate and up of shared experts
    "granitemoehybrid-modelopt-w4a16": (["in_proj", "input_linear", "output_linear"], EXPERTS),
}


def build(folder: pathlib.Path) -> torch.nn.Module:
    """Return transformers' model of a checkpoint, in float32."""
    kind = architecture_of(json.loads((folder / "config.json").read_text()))
    weights = dense.read(folder)
    if kind.stacked is not None:
        dense.stack_experts(weights, kind.stacked)
    return generate.dense_model(kind, folder, weights).eval()


def prompt(folder: pathlib.Path) -> torch.Tensor:
    """Return the reference prompt of a checkpoint."""
    return safetensors.torch.load_file(folder / "reference.safetensors")["input_ids"]


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of the last tokens of each row."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[:, -LAST:].float().contiguous()


def adapt(name: str) -> torch.Tensor:
    """Write an adapter of PEFT for a checkpoint, and return the logits with it."""
    modules, parameters = ADAPTED[name]
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=modules,
        target_parameters=parameters or None,
        rank_pattern={r".*\.1\..*o_proj": 3},
        alpha_pattern={r".*\.1\..*o_proj": 5},
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(build(CHECKPOINTS / name), config)
    for key, value in model.named_parameters():
        if ".lora_" in key:
            value.data = 0.5 * torch.randn(value.shape) / value.shape[-1] ** 0.5
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        target = FOLDER / name
        target.mkdir(parents=True, exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (target / file).write_bytes((pathlib.Path(scratch) / file).read_bytes())
    return logits(model, prompt(CHECKPOINTS / name))


def names() -> dict[str, dict[str, list[list[int]]]]:
    """Return the names of linears and experts of all families, with their shapes, by checkpoint.

    The layer's index is a star. Layers of several kinds may give one name to several shapes.
    """
    found = {}
    for folder in sorted(CHECKPOINTS.iterdir()):
        if not (folder / "reference.json").exists() or not (folder / "model.safetensors").exists():
            continue
        stored = json.loads((folder / "config.json").read_text())
        if stored["model_type"] not in transformers.CONFIG_MAPPING:
            continue  # Kimi-K2 has the names of DeepSeek-V3
        config, kind = transformers.AutoConfig.from_pretrained(folder), architecture_of(stored)
        del config.quantization_config
        make = getattr(transformers, kind.model)
        with torch.device("meta"):
            model = make.from_config(config) if hasattr(make, "from_config") else make(config)
        sizes = {
            f"{key}.weight": list(one.weight.shape)
            for key, one in model.named_modules()
            if isinstance(one, torch.nn.Linear)
        }
        sizes |= {k: list(p.shape) for k, p in model.named_parameters() if "experts." in k}
        own: dict[str, list[list[int]]] = {}
        for key, shape in sizes.items():
            name = re.sub(r"\.\d+\.", ".*.", key).removesuffix(".weight")
            shapes = own.setdefault(name, [])
            if shape not in shapes and not re.search("visual|vision|audio|projector", key):
                shapes.append(shape)
        found[folder.name] = {name: shapes for name, shapes in own.items() if shapes}
    return found


def check_back(written: pathlib.Path) -> int:
    """Print the difference of PEFT's logits from those of this package; return how many are far."""
    far = 0
    for folder in sorted(path for path in written.iterdir() if path.is_dir()):
        model = build(CHECKPOINTS / folder.name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = peft.PeftModel.from_pretrained(model, folder)
        missing = [str(one.message) for one in caught if "missing" in str(one.message)]
        here = logits(model, prompt(CHECKPOINTS / folder.name))
        there = safetensors.torch.load_file(folder / "logits.safetensors")["logits"]
        error = ((here - there).abs().max() / there.square().mean().sqrt()).item()
        far += error > 1e-5 or bool(missing)
        print(f"{folder.name}: {error:.1e} of the root mean square {missing}", flush=True)
    return far


def main(arguments: list[str]) -> int:
    """Write adapters and logits, beside those that are there, or check those of this package."""
    parser = argparse.ArgumentParser(prog="python -m tests.reference.adapters", description=__doc__)
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    parser.add_argument("--back", type=pathlib.Path)
    options = parser.parse_args(arguments)
    if options.back:
        return check_back(options.back)
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / "reference.safetensors"
    tensors = safetensors.torch.load_file(file) if file.exists() else {}
    for name in [folder.name for folder in options.folders] or ADAPTED:
        tensors[name] = adapt(name)
        safetensors.torch.save_file(tensors, file)
        print(f"{name}: {list(tensors[name].shape)}", flush=True)
    (FOLDER / "names.json").write_text(json.dumps(names(), separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
