"""`python -m tests.reference.sources qwen3_moe ... --folder sources`: what a quantizer starts from.

Writes a folder for each architecture. It holds `source` (a random model in bfloat16), `tokens.json`
(windows to calibrate on), and what the tools make of them: `modelopt` and, with --ct, `ct`. For
each folder of a checkpoint, writes `calibration.json` into it, with the windows and modelopt's
input scales of the dequantized model. modelopt calibrates in float32.
"""

import argparse
import json
import pathlib
import re
import sys
import tempfile
import traceback

from tests.reference.architecture import Architecture
from tests.reference.architectures import ARCHITECTURES
from tests.reference.forms import FORMS


def write(name: str, seed: int, folder: pathlib.Path, ct: bool) -> None:
    """Write the folder of one architecture."""
    import torch
    import transformers

    from tests.reference import generate, models, tools

    kind: Architecture = ARCHITECTURES[name]
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        exact = pathlib.Path(scratch, "source")
        models.save_random(kind, seed, exact)
        add_edges(exact / "model.safetensors")
        model = models.load(kind, exact, torch.bfloat16)
        model.save_pretrained(folder / "source")
        vocabulary = model.config.get_text_config().vocab_size
        windows = torch.cat(models.calibration_batches(vocabulary, seed=3)).tolist()
        (folder / "tokens.json").write_text(json.dumps(windows))
        load = models.load
        models.load = lambda kind, folder, dtype: load(kind, folder, torch.float32)
        try:
            tools.write_with_modelopt(FORMS["modelopt-w4a4"], kind, exact, folder / "modelopt")
        finally:
            models.load = load
        if ct:
            tools.write_with_llmcompressor(FORMS["ct-w4a4"], kind, exact, folder / "ct")
    for written in ("source", "modelopt", "ct"):
        if (folder / written).exists():
            generate.edit_config(folder / written, kind)
    print(f"{name}: {transformers.__version__}, written to {folder}", flush=True)


def write_scales(folder: pathlib.Path) -> None:
    """Write `calibration.json` into the folder of a checkpoint that `tests.reference` wrote."""
    import safetensors.torch
    import torch

    from tests.reference import dense, generate, models, tools

    kind = ARCHITECTURES[json.loads((folder / "reference.json").read_text())["architecture"]]
    weights = dense.read(folder)
    if kind.stacked is not None:
        dense.stack_experts(weights, kind.stacked)
    with tempfile.TemporaryDirectory() as scratch:
        written = pathlib.Path(scratch, "modelopt")
        model = generate.dense_model(kind, folder, weights)
        load = models.load
        models.load = lambda *_: model
        try:
            tools.write_with_modelopt(FORMS["modelopt-w4a4"], kind, folder, written)
        finally:
            models.load = load
        tensors = safetensors.torch.load_file(written / "model.safetensors")
    found = {
        name.removesuffix("input_scale")[:-1]: value.item()
        for name, value in tensors.items()
        if name.endswith("input_scale")
    }
    # All experts of a layer have one scale.
    scales = {re.sub(r"experts\.\d+", "experts", name): scale for name, scale in found.items()}
    vocabulary = model.config.get_text_config().vocab_size
    windows = torch.cat(models.calibration_batches(vocabulary, seed=3)).tolist()
    facts = {"windows": windows, "input_scales": scales}
    (folder / "calibration.json").write_text(json.dumps(facts) + "\n")
    print(f"{folder}: {len(scales)} input scales", flush=True)


def add_edges(path: pathlib.Path) -> None:
    """Put a block of zeros, a negative zero and a block of tiny values into each large matrix."""
    import safetensors.torch

    tensors = safetensors.torch.load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") and tensor.ndim == 2:
            tensor[0, :16] = 0.0
            tensor[1, 0] = -0.0
            tensor[2, :16] *= 2.0**-20
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


def main(arguments: list[str]) -> int:
    """Write everything that is asked for, and return how many failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.reference.sources", description=__doc__)
    parser.add_argument("wanted", nargs="+", metavar="architecture|folder")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("sources"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ct", action="store_true", help="let llm-compressor quantize it as well")
    options = parser.parse_args(arguments)
    failed = []
    for name in options.wanted:
        try:
            if name in ARCHITECTURES:
                write(name, options.seed, options.folder / name, options.ct)
            else:
                write_scales(pathlib.Path(name))
        except Exception:  # the other folders are still useful
            traceback.print_exc()
            failed.append(name)
    print(f"failed: {failed}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
