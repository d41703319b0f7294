"""Load attentions alone from checkpoints, for tests that divide them over a mesh."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.checkpoint import LoadOptions, WeightTable, open_checkpoint
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.filling import fill
from jax_nvfp4_moe.nn.building.settings import Settings

IDS = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)


def load_attention(folder, architecture, expert_mesh, scheme=None, layer=0):
    """Load only the attention of one layer, over a mesh unless `expert_mesh` is None."""
    settings = Settings(Target("cpu"), scheme, dtype=jnp.float32, expert_mesh=expert_mesh)
    options = LoadOptions(
        dtype=jnp.float32,
        only=f"model.layers.{layer}.self_attn",
        input_scales="required" if scheme == "checkpoint" else "ignored",
    )
    with open_checkpoint(folder) as checkpoint:
        config = architecture.read_config(merge_text_config(checkpoint.config))
        table = WeightTable(checkpoint, options)
        make = Builder(table, architecture.KEYS, settings)
        attention = nnx.eval_shape(lambda: architecture.build_attention(config, layer, make))
        table.check()
        with table.open_reader() as reader:
            fill(attention, f"layers.{layer}.attention", make.parts, reader, settings)
    return attention
