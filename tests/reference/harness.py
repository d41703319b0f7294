"""`python -m tests.reference.harness`: what HFLM of lm-evaluation-harness gives for the example.

HFLM runs a dequantized float32 copy of the example with transformers. Its token ids, scores and
texts go to ``tests/checkpoints/tiny-python-moe-reference/harness.json``, which
test_harness_reference.py compares with `HarnessModel`.
"""

import functools
import json
import pathlib
import shutil
import tempfile

import lm_eval
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file, save_file

from tests.support.models import harness_cases as cases

FILE = cases.TESTS / "checkpoints/tiny-python-moe-reference/harness.json"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCALES = (".weight_scale", ".weight_scale_2", ".input_scale")


def dequantize(tensors: dict) -> dict:
    """Return the tensors of a checkpoint of modelopt in float32."""
    table = torch.cat([E2M1, -E2M1])
    dense = {}
    for name, stored in tensors.items():
        if name.endswith(SCALES):
            continue
        dense[name] = stored.float()
        if name + "_scale" in tensors:
            codes = torch.stack([stored & 15, stored >> 4], -1).flatten(-2).long()
            scale = tensors[name + "_scale"].float() * tensors[name + "_scale_2"].float()
            dense[name] = table[codes] * scale.repeat_interleave(16, -1)
    return dense


def write_dense(folder: pathlib.Path) -> None:
    """Write the example as an ordinary checkpoint of transformers."""
    folder.mkdir()
    weights = dequantize(load_file(cases.EXAMPLE / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(cases.EXAMPLE / name, folder)
    config = json.loads((cases.EXAMPLE / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))


def make(folder: pathlib.Path, **options) -> HFLM:
    """Return HFLM without two of its faults.

    Only batches of one text end exactly at a stop string. With its cache of logits, lm-eval 0.4.13
    takes the score of a continuation from the wrong position if another request has the same first
    tokens and a longer continuation.
    """
    exact = {"batch_size": 1, "logits_cache": False}
    return HFLM(_model(folder.parent / "dense"), tokenizer=str(folder), **exact, **options)


@functools.cache
def _model(folder: pathlib.Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main() -> None:
    """Write what HFLM gives."""
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch)
        write_dense(root / "dense")
        folders = {
            name: cases.write_variant(root / "dense", root / name, name) for name in cases.VARIANTS
        }
        found = {
            "lm_eval": lm_eval.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "tokens": {
                f"{name} {add} {prefix}": cases.tokens(
                    make(folder, add_bos_token=add, prefix_token_id=prefix)
                )
                for name, folder in folders.items()
                for add, prefix in cases.OPTIONS
            },
            "scores": {
                f"{name} {add}": cases.scores(
                    make(folders[name], add_bos_token=add, max_length=cases.MAX_LENGTH)
                )
                for name, add in cases.SCORED
            },
            "chats": {
                name: cases.chats(make(folder))
                for name, folder in folders.items()
                if name.endswith("chat")
            },
            "tasks": {
                name: cases.run_tasks(make(folders[variant]), root, options)
                for name, (variant, options) in cases.RUNS.items()
            },
        }
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
