"""EXAONE 4, and the language model of EXAONE 4.5.

The large model attends over a window in most layers, with rotation. The other layers see all keys,
without rotation. All layers of the small model see all keys, with rotation. Norms follow the parts
of a layer, and none stands before them.

Source: `modeling_exaone4` and `modeling_exaone4_5` of transformers; arXiv:2507.11407.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Decoder, build_around
from jax_nvfp4_moe.models.dense import KEYS, DenseConfig, architecture, read_dense
from jax_nvfp4_moe.models.exaone_moe import read_attentions
from jax_nvfp4_moe.models.post_norms import NORM_KEYS, PostNormLayer, build_dense_parts
from jax_nvfp4_moe.nn.building.builder import Builder

_EPS = 1e-5
_WINDOW = 4096  # where the config does not have the field


def read_config(config: Mapping[str, Any]) -> DenseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    config = {"sliding_window": _WINDOW, **config}
    fields = Fields(config)
    return read_dense(fields, read_attentions(fields, config), eps=_EPS)


def build_model(config: DenseConfig, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(layer):
        return PostNormLayer(*build_dense_parts(config, layer, make, before=False))

    return build_around(config, make, build_layer, tied=config.tied)


ARCHITECTURE = architecture(read_config, {**KEYS, **NORM_KEYS}, build_model=build_model)
