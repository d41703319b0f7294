"""`python -m tests.reference.digests FOLDER ...`: what modelopt makes of weights that all can make.

For each folder of a checkpoint in W4A16, quantizes the same model again with the weights of
`tests/support/files/hashed_weights.py` in place of those that were quantized. Writes a digest of
the bytes of each quantized matrix to `tests/checkpoints/modelopt-digests.json`.
"""

import json
import pathlib
import re
import sys
import tempfile
import unittest.mock

import safetensors.torch
import torch

from tests.reference import dense, generate, models, tools
from tests.reference.architectures import ARCHITECTURES
from tests.reference.forms import FORMS
from tests.support.files.hashed_weights import digest, hashed_weight

TESTS = pathlib.Path(__file__).parents[1]
RESULTS = TESTS / "checkpoints" / "modelopt-digests.json"
_PARTS = re.compile(r"(.+)\.(weight|weight_scale|weight_scale_2)")


def digests(folder: pathlib.Path) -> dict[str, str]:
    """Return matrix -> digest of what modelopt writes for it."""
    facts = json.loads((folder / "reference.json").read_text())
    kind = ARCHITECTURES[facts["architecture"]]
    weights = dense.read(folder)
    for name in weights.weights:
        value = hashed_weight(name, tuple(weights.tensors[name].shape))
        weights.tensors[name] = torch.from_numpy(value)
    quantized = [name.removesuffix(".weight") for name in weights.weights]
    if kind.stacked is not None:
        dense.stack_experts(weights, kind.stacked)
    model = generate.dense_model(kind, folder, weights)
    with tempfile.TemporaryDirectory() as scratch:
        written = pathlib.Path(scratch, "modelopt")
        with unittest.mock.patch.object(models, "load", return_value=model):
            tools.write_with_modelopt(FORMS["modelopt-w4a16"], kind, folder, written)
        tensors = safetensors.torch.load_file(written / "model.safetensors")
    found: dict[str, dict[str, bytes]] = {name: {} for name in quantized}
    for name, tensor in tensors.items():
        matched = _PARTS.fullmatch(name)
        if matched and matched[1] in found:
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            found[matched[1]][matched[2]] = bytes(raw.numpy())
    return {name: digest(parts) for name, parts in sorted(found.items())}


def main(folders: list[str]) -> None:
    """Add the digests of all folders to the results."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for folder in map(pathlib.Path, folders):
        results[folder.name] = digests(folder)
        print(f"{folder.name}: {len(results[folder.name])} matrices", flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
