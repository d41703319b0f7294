"""`python -m tests.reference.long_texts FOLDER...`: logits of 5000 tokens by transformers.

Each folder is a checkpoint of ``tests/checkpoints``. transformers runs its weights in float32, as
modelopt dequantizes them, on two rows of random tokens. ``tests/checkpoints/long-texts`` gets the
logits at some positions, under the name of the folder. test_long_text.py compares them.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import safetensors.torch
import torch

from tests.reference import dense, generate
from tests.reference.reload import architecture_of

TOKENS = 5000
# Where logits are kept: behind more than one block of queries, and at the end.
POSITIONS = (600, 1500, 2500, 4998, 4999)
FILE = pathlib.Path(__file__).parents[1] / "checkpoints/long-texts/reference.safetensors"


def long_copy(source: pathlib.Path, folder: pathlib.Path) -> dict:
    """Copy a checkpoint whose model takes `TOKENS` positions, and return its text config."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("reference*"))
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text["max_position_embeddings"] = TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    return text


def run(source: pathlib.Path) -> torch.Tensor:
    """Return the logits ``[2, positions, vocabulary]``."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / source.name
        text = long_copy(source, folder)
        kind = architecture_of(json.loads((folder / "config.json").read_text()))
        weights = dense.read(folder)
        if kind.stacked is not None:
            dense.stack_experts(weights, kind.stacked)
        model = generate.dense_model(kind, folder, weights).eval()
    size = (2, TOKENS)
    ids = np.random.default_rng(0).integers(text["vocab_size"], size=size, dtype=np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long(), use_cache=False).logits
    return logits[:, list(POSITIONS)].float().contiguous()


def main(folders: list[str]) -> int:
    """Write the logits of all folders, beside those that the file has."""
    FILE.parent.mkdir(exist_ok=True)
    tensors = safetensors.torch.load_file(FILE) if FILE.exists() else {}
    tensors["positions"] = torch.tensor(POSITIONS)
    for folder in map(pathlib.Path, folders):
        tensors[folder.name] = run(folder)
        safetensors.torch.save_file(tensors, FILE)
        print(f"{folder.name}: {list(tensors[folder.name].shape)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
