"""`python -m tests.reference.drafting [FOLDER...]`: logits of drafting layers by transformers.

Each folder is a checkpoint of ``tests/checkpoints`` that `DRAFTED` lists. It gets drafting layers
from ``tests/support/files/drafting_tensors.py``, under published names and in bfloat16.
transformers runs the model in float32, as modelopt dequantizes it, and its `MtpModel` drafts from
the model's last hidden states. ``tests/checkpoints/drafting`` gets these states and the logits of
all pairs of a token's vector and of the token that follows. Nemotron-H and DeepSeek-V4 have no
`MtpModel`: their drafters are written after vLLM's ``nemotron_h_mtp.py`` and
``deepseek_v4_mtp.py``.
"""

import json
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

import safetensors.torch
import torch
import transformers
from transformers.modeling_layers import MtpModel

from tests.reference import dense, generate, record
from tests.reference.architectures import ARCHITECTURES
from tests.support.files.drafting_tensors import DRAFTED, drafting_names, drafting_tensors

CHECKPOINTS = pathlib.Path(__file__).parents[1] / "checkpoints"
FILE = CHECKPOINTS / "drafting/reference.safetensors"
# Fields of a config that list the layers of a model, and what they are for its drafting layer.
BESIDE = ("enorm", "hnorm", "e_proj", "h_proj")  # of the drafting layer of DeepSeek-V4
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
LISTS = {"mtp_layer_types": "layer_types", "mtp_mlp_layer_types": "mlp_layer_types"}


class NemotronDrafter(torch.nn.Module):
    """The drafting layers of Nemotron-3: a norm after the last of several layers."""

    def __init__(self, model: Any, tensors: dict[str, torch.Tensor]):
        super().__init__()
        config, module = model.config, sys.modules[type(model).__module__]
        own = type(config)(**config.to_dict() | {"layers_block_type": ["full_attention", "moe"]})
        own._attn_implementation = own._experts_implementation = "eager"
        norm = type(model.model.norm_f)
        self.layers = torch.nn.ModuleList(module.NemotronHBlock(own, index) for index in (0, 1))
        first, last = self.layers
        first.enorm, first.hnorm, last.final_layernorm = (
            norm(config.hidden_size, config.layer_norm_epsilon) for _ in range(3)
        )
        first.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.load_state_dict(stacked({n.removeprefix("mtp."): one for n, one in tensors.items()}))

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        first, last = self.layers
        x = first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(hidden)], dim=-1))
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        x = first(x, attention_mask=mask)
        return last.final_layernorm(last(x))


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with those of all experts in one, as transformers has them in memory."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    for stem, parts in experts.items():
        stacks = {
            part: torch.stack([each[index] for index in range(len(each))])
            for part, each in parts.items()
        }
        if "gate_proj" in stacks:
            both = [stacks.pop("gate_proj"), stacks.pop("up_proj")]
            stacks["gate_up_proj"] = torch.cat(both, dim=1)
        found |= {f"{stem}.{part}": stack for part, stack in stacks.items()}
    return found


def with_drafting_layers(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the drafting layers of a checkpoint in float32, for the loader of `MtpModel`."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = {name: torch.from_numpy(one) for name, one in drafting_tensors(source).items()}
    # transformers has no names for the drafting layers of Hy3, whose last norm has one of its own.
    tensors = {name.replace("final_layer", "shared_head."): one for name, one in tensors.items()}
    safetensors.torch.save_file(stacked(tensors), folder / "model.safetensors", {"format": "pt"})


def load_drafter(model: transformers.PreTrainedModel, source: pathlib.Path, scratch: Any) -> Any:
    """Return transformers' drafter of a model, whose weights have been read by its own loader."""
    folder = scratch / "drafter"
    with_drafting_layers(source, folder)
    config = model.config.get_text_config()
    config.num_mtp_layers = 1
    for field, of_model in LISTS.items():
        kinds = getattr(config, of_model, None)
        if kinds is not None and getattr(config, field, None) is None:
            setattr(config, field, ["full_attention" if of_model == "layer_types" else "sparse"])
    model.config.name_or_path = config.name_or_path = str(folder)
    stem = drafting_names(source)["layer"].replace("mtp.layers.0", "mtp").replace(".", r"\.")
    model._keys_to_ignore_on_load_unexpected = [rf"^{stem}\."]
    drafter = MtpModel.from_pretrained(model, dtype=torch.float32).eval()
    # The layers of GLM-5 also return the keys that they chose, which `MtpLayer` does not expect.
    drafter.layers[0].mtp_block.register_forward_hook(lambda block, given, out: record.first(out))
    return drafter


def load_model(source: pathlib.Path, scratch: pathlib.Path) -> transformers.PreTrainedModel:
    """Return the model of a checkpoint in float32, as modelopt dequantizes it."""
    config = json.loads((source / "config.json").read_text())
    facts = json.loads((source / "reference.json").read_text())
    kind = ARCHITECTURES[facts.get("architecture", config["model_type"])]
    weights = dense.read(source)
    if kind.stacked is not None:
        dense.stack_experts(weights, kind.stacked)
    if "model_type" in kind.edits:
        config["model_type"] = kind.model_type
    (scratch / "config.json").write_text(json.dumps(config))
    return generate.dense_model(kind, scratch, weights)


def draft_from_streams(
    model: Any, source: pathlib.Path, scratch: pathlib.Path, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual streams of DeepSeek-V4, and the vectors that its head reads for drafts.

    The drafting layer is the only layer of a model of its own, whose embedding is not used.
    """
    kept = []
    with model.model.layers[-1].register_forward_hook(lambda layer, given, out: kept.append(out)):
        model(ids, use_cache=False)
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "mlp_layer_types": ["moe"]}
    config["layer_types"] = config["layer_types"][:1]
    tensors = {name: torch.from_numpy(one) for name, one in drafting_tensors(source).items()}
    beside = {part: tensors.pop(f"mtp.0.{part}.weight") for part in BESIDE}
    named = {"model.embed_tokens.weight": model.get_input_embeddings().weight.detach().clone()}
    named["head.weight"] = model.get_output_embeddings().weight.detach().clone()
    for name, tensor in tensors.items():
        rest = name.removeprefix("mtp.0.")
        own = rest.replace("hc_head_", "hc_head.hc_").replace("attn.kv_norm", "attn.norm")
        named[
            f"model.{own}" if "hc_head" in own or own == "norm.weight" else f"model.layers.0.{own}"
        ] = tensor
    weights = dense.Dense(named, {}, {}, {}, [])
    (scratch / "config.json").write_text(json.dumps(config))
    drafter = generate.dense_model(ARCHITECTURES["deepseek_v4"], scratch, weights)
    norms = [type(drafter.model.norm)(config["hidden_size"], config["rms_norm_eps"]) for _ in "eh"]
    for norm, part in zip(norms, ("enorm", "hnorm"), strict=True):
        norm.weight.copy_(beside[part])
    embedded = norms[0](model.get_input_embeddings()(ids[:, 1:])) @ beside["e_proj"].T
    x = norms[1](kept[0][:, :-1]) @ beside["h_proj"].T + embedded[:, :, None]
    with drafter.model.layers[0].register_forward_pre_hook(lambda layer, given: (x, *given[1:])):
        found = drafter.model(ids[:, 1:], use_cache=False).last_hidden_state
    return kept[0].flatten(2), found


def run(source: pathlib.Path) -> dict[str, torch.Tensor]:
    """Return the model's vectors of the folder's input_ids, and the logits of their pairs."""
    ids = safetensors.torch.load_file(source / "reference.safetensors")["input_ids"]
    with torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
        model = load_model(source, pathlib.Path(scratch))
        hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
        if model.config.model_type == "deepseek_v4":
            hidden, found = draft_from_streams(model, source, pathlib.Path(scratch), ids)
        elif model.config.model_type == "nemotron_h":
            tensors = {n: torch.from_numpy(one) for n, one in drafting_tensors(source).items()}
            embedded = model.get_input_embeddings()(ids[:, 1:])
            found = NemotronDrafter(model, tensors).eval()(embedded, hidden[:, :-1])
        else:
            drafter = load_drafter(model, source, pathlib.Path(scratch))
            positions = torch.arange(1, ids.shape[1])[None].expand(len(ids), -1)
            found = drafter.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
        logits = model.get_output_embeddings()(found)
    made = {"hidden": hidden, "logits": logits}
    return {f"{source.name}.{part}": value.float().contiguous() for part, value in made.items()}


def main(folders: list[str]) -> int:
    """Write the logits of all folders, beside those that the file has."""
    FILE.parent.mkdir(exist_ok=True)
    tensors = safetensors.torch.load_file(FILE) if FILE.exists() else {}
    for folder in folders or sorted(DRAFTED):
        name = pathlib.Path(folder).name
        tensors |= run(CHECKPOINTS / name)
        safetensors.torch.save_file(tensors, FILE)
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
