"""Apertus.

Heads of queries and keys are normalized. The MLP has no gate, and an activation with learned
slopes.

Source: `modeling_apertus` of transformers; arXiv:2509.14233.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_nvfp4_moe.models.config import Fields, find_rope_fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, DecoderLayer, build_around
from jax_nvfp4_moe.models.dense import DenseConfig, read_dense, refuse_experts
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import below
from jax_nvfp4_moe.nn.building.sharding import build_sharded
from jax_nvfp4_moe.numerics.xielu import xielu
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import TensorParallel

_EPS = 1e-5
_THETA = 12000000.0
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read_config(config: Mapping[str, Any]) -> DenseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    if not find_rope_fields(config):
        config = {**config, "rope_parameters": _LLAMA3}
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    attention = read_grouped_query(
        fields, config, eps=_EPS, theta=_THETA, bias=bias, out_bias=bias, normalize="heads"
    )
    activation = fields.only("hidden_act", ("xielu",), "xielu")
    return read_dense(fields, attention, eps=_EPS, activation=activation)


class MLP(TensorParallel):
    """The MLP: ``down(xielu(up(x)))``.

    Attributes:
      up: the first linear.
      alpha_p: `nnx.Param` ``[1]``, the slope for positive inputs; see `xielu`.
      alpha_n: `nnx.Param` ``[1]``, the slope for the others.
      beta: `nnx.Param`, the slope at 0. None for the value of `xielu`.
      eps: `nnx.Param`, the largest exponent. None for the value of `xielu`.
      down: the second linear.
    """

    def __init__(self, make: Builder, path: str, hidden: int, intermediate: int):
        """Make an MLP with the `intermediate` columns of one shard."""
        self.up = make.linear(f"{path}.up", intermediate, hidden)
        self.alpha_p = make.variable(f"{path}.alpha_p", (1,), dtype=jnp.float32)
        self.alpha_n = make.variable(f"{path}.alpha_n", (1,), dtype=jnp.float32)
        self.beta, self.eps = (
            make.variable(f"{path}.{name}", (), dtype=jnp.float32)
            if make.has(f"{path}.{name}")
            else None
            for name in ("beta", "eps")
        )
        self.down = make.linear(f"{path}.down", hidden, intermediate)

    def run(self, x):
        """Run the MLP on ``x [..., h]``; the activation is computed in float32."""
        given = {"alpha_p": self.alpha_p, "alpha_n": self.alpha_n}
        given |= {"beta": self.beta, "eps": self.eps}
        slopes = {name: one.get_value() for name, one in given.items() if one is not None}
        return self.down(xielu(self.up(x), **slopes).astype(x.dtype))


def build_mlp(config: DenseConfig, layer: int, make: Builder) -> MLP:
    """Make the MLP of a layer, whose columns are sharded along the mesh axis `tensor`."""
    path, shards, width = f"layers.{layer}.mlp", make.settings.shards, config.dense_intermediate
    return build_sharded(
        make,
        lambda make, width: MLP(make, path, config.hidden, width),
        width,
        width // shards,
        specs={"up": ShardSpec("rows", shards), "down": ShardSpec("columns", shards)},
        last=f"{path}.down",
        width=width,
    )


def build_model(config: DenseConfig, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(index):
        path, h = f"layers.{index}", config.hidden
        return DecoderLayer(
            make.norm(f"{path}.attention_norm", h, config.eps),
            build_attention(config, index, make),
            make.norm(f"{path}.mlp_norm", h, config.eps),
            build_mlp(config, index, make),
        )

    return build_around(config, make, build_layer, tied=config.tied)


_LAYER = "model.layers.*"
_MLP = {"up": "up_proj", "down": "down_proj"}
_MLP |= {name: f"act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", f"{_LAYER}.self_attn"),
    **below("layers.*.mlp", f"{_LAYER}.mlp", _MLP),
    "layers.*.attention_norm": f"{_LAYER}.attention_layernorm",
    "layers.*.mlp_norm": f"{_LAYER}.feedforward_layernorm",
}
ARCHITECTURE = Architecture(read_config, build_model, refuse_experts, KEYS)
