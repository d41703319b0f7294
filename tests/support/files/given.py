"""Read the given checkpoints and their reference files."""

import json
import os
import pathlib

import numpy as np

import jax_nvfp4_moe
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, read_header

TESTS = pathlib.Path(__file__).parents[2]
ROOT = TESTS.parent  # of the repository
PROGRAMS = TESTS / "programs"
CHECKPOINTS = TESTS / "checkpoints"
# Folders that hold a model and the outputs that its original tool computed with it.
MODELS = sorted(
    path.parent.name
    for path in CHECKPOINTS.glob("*/reference.safetensors")
    if (path.parent / "model.safetensors").exists()
)
# Those of them without experts, by the name of the family.
DENSE_FAMILIES = (
    "apertus",
    "exaone4",
    "gemma3",
    "gemma4_dense",
    "gemma4_edge",
    "granite",
    "granitehybrid",
    "llama",
    "ministral3",
    "mistral",
    "nemotron_h_dense",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "seed_oss",
    "smollm3",
)
WITH_EXPERTS = [name for name in MODELS if name.split("-")[0] not in DENSE_FAMILIES]
EXAMPLE = pathlib.Path(jax_nvfp4_moe.__file__).parent / "examples" / "tiny-python-moe"
EXAMPLE_REFERENCE = CHECKPOINTS / "tiny-python-moe-reference"

# Checkpoint, folder of its reference, prefix of the reference's tensors, scheme to load with.
RUNS = {
    "qwen3-w4a16": (CHECKPOINTS / "qwen3moe-modelopt-w4a16", None, "", "checkpoint"),
    "qwen3-w4a4": (CHECKPOINTS / "qwen3moe-modelopt-w4a4", None, "", "checkpoint"),
    "qwen3-ct-w4a4": (CHECKPOINTS / "qwen3moe-ct-w4a4", None, "", "checkpoint"),
    "deepseek-w4a4": (CHECKPOINTS / "deepseekv3-modelopt-w4a4", None, "", "checkpoint"),
    "tiny-w4a16": (EXAMPLE, EXAMPLE_REFERENCE, "w4a16.", "w4a16"),
    "tiny-w4a4": (EXAMPLE, EXAMPLE_REFERENCE, "w4a4.", "w4a4"),
}


def reference_tensors(folder, prefix=""):
    """Read the tensors of `reference.safetensors` that have `prefix`, and drop it from names.

    `input_ids` is always included.
    """
    path, problems = folder / "reference.safetensors", []
    infos = read_header(path, path.name, problems)
    assert not problems
    with Tensors({path.name: path}, infos) as tensors:
        read = {name: np.array(tensors.read(name)) for name in tensors.names()}
    return {
        name.removeprefix(prefix): value
        for name, value in read.items()
        if name.startswith(prefix) or name == "input_ids"
    }


def reference_facts(folder):
    """Read `reference.json`."""
    return json.loads((folder / "reference.json").read_text())


def copy_with_config(source, folder, **changes):
    """Copy a checkpoint with fields of ``config.json`` replaced; None takes a field out.

    Fields that are in ``text_config`` are replaced there.
    """
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".md" and not path.name.startswith("reference"):
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    text = config.get("text_config", {})
    text |= {name: changes.pop(name) for name in list(changes) if name in text}
    config = {name: value for name, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def user_environment() -> dict[str, str]:
    """Return a user's environment, in which Python finds modules in the folder where it starts."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
