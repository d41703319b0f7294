"""`python -m tests.reference.adapters_back FOLDER`: adapters that this package writes.

It needs jax and no torch. For each folder of ``tests/checkpoints/adapters``, this package adds
adapters of its own with random matrices to the same layers, and writes them with `save_lora` to
FOLDER, with the logits of the last tokens beside them. `tests.reference.adapters --back FOLDER`
reads them with PEFT.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from tests.reference.compare import read

CHECKPOINTS = pathlib.Path(__file__).parents[1] / "checkpoints"
# Checkpoint -> further layers, which PEFT takes for routed experts if they are listed as modules.
SHARED = {
    "deepseek_v3-direct-modelopt-w4a16": ["shared_experts.*", "layers.0.mlp.*_proj"],
    "qwen3_next-modelopt-w4a16": ["shared_expert.*"],
    "glm4_moe_lite-modelopt-w4a16": ["shared_experts.*"],
}
LAST = 3  # as in adapters.py, which needs torch


def write(name: str, folder: pathlib.Path) -> None:
    """Write the adapters of one checkpoint, and the logits with them."""
    how = {"scheme": "checkpoint", "dtype": jnp.float32, "backend": ("moe_w4a16_cpu", "reference")}
    model = nvfp4.load_model(CHECKPOINTS / name, **how)
    config = json.loads((CHECKPOINTS / "adapters" / name / "adapter_config.json").read_text())
    modules, parameters = config["target_modules"] or [], config["target_parameters"] or []
    if isinstance(modules, str):
        modules = ["q_proj", "up_proj", "down_proj"]
    nvfp4.add_lora(model, 3, targets=modules, alpha=7, rngs=nnx.Rngs(0))
    if parameters:
        nvfp4.add_lora(model, 2, targets=parameters, rngs=nnx.Rngs(1))
    if name in SHARED:
        nvfp4.add_lora(model, 2, targets=SHARED[name], alpha=3, rngs=nnx.Rngs(2))
    noise = np.random.default_rng(0)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        values = 0.5 * noise.standard_normal(variable.shape) / variable.shape[-1] ** 0.5
        variable.set_value(jnp.asarray(values, jnp.float32))
    ids = read(CHECKPOINTS / name / "reference.safetensors")["input_ids"]
    logits = jax.jit(lambda model, ids: model(ids))(model, ids.astype(np.int32))[:, -LAST:]
    nvfp4.save_lora(model, folder / name)
    written = {"logits": np.ascontiguousarray(logits)}
    write_safetensors(folder / name / "logits.safetensors", written)


def main(arguments: list[str]) -> int:
    """Write the adapters of all checkpoints that have adapters of PEFT."""
    (folder,) = map(pathlib.Path, arguments)
    for path in sorted((CHECKPOINTS / "adapters").iterdir()):
        if path.is_dir():
            write(path.name, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
