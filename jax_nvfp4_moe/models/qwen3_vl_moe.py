"""Qwen3-VL-MoE, the language model.

It is a Qwen3-MoE whose weights of the chosen experts always add up to one. The multimodal rotary
embedding (``mrope_section``) divides the channels among positions in time, height and width. For
text these three positions are equal, so that the embedding is the usual one.

Source: `modeling_qwen3_vl_moe` of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models import qwen3_moe
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.sparse import SparseConfig, read_sparse, read_sparse_step, read_top_k
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_experts", "num_local_experts")
_EPS, _THETA = 1e-6, 5e5


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``, its ``text_config`` at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    return read_text(Fields(config), config, theta=_THETA)


def read_text(
    fields: Fields, config: Mapping[str, Any], *, theta: float, renormalize: bool = True
) -> SparseConfig:
    """Read the sizes that Qwen3-VL-MoE and Qwen3-Omni store under the same names.

    Args:
      fields: the fields of `config`.
      config: a parsed ``config.json``, its ``text_config`` at the top level.
      theta: the default of ``rope_theta``.
      renormalize: whether the weights of the chosen experts are divided by their sum.

    Raises:
      CheckpointError: as for `read_config`.
    """
    bias = fields.flag("attention_bias", False)
    attention = read_grouped_query(
        fields, config, eps=_EPS, theta=theta, bias=bias, out_bias=bias, normalize="heads"
    )
    return read_sparse(
        fields,
        attention,
        Router(read_top_k(fields, *_EXPERTS), renormalize=renormalize),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=read_sparse_step(fields),
    )


ARCHITECTURE = Architecture(read_config, qwen3_moe.build_model, qwen3_moe.build_moe, qwen3_moe.KEYS)
