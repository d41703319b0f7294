"""Gemma 3, the language model.

Most layers attend over a window. The other layers see all keys, and have a rotation of their own.
Each layer has a norm before and after both of its parts.

Source: `modeling_gemma3` of transformers; arXiv:2503.19786.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Decoder, build_around
from jax_nvfp4_moe.models.dense import KEYS, DenseConfig, architecture, read_dense
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_window
from jax_nvfp4_moe.models.post_norms import NORM_KEYS, PostNormLayer, build_dense_parts
from jax_nvfp4_moe.nn.building.builder import Builder

ACTIVATION = "gelu_pytorch_tanh"
SLIDING, FULL = "sliding_attention", "full_attention"
PATTERN = 6  # without layer_types, each layer of this number attends to all keys
_EPS = 1e-6
# The base of the rotation: its name in older files, and its default.
_BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
# What published files leave out.
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


@dataclasses.dataclass(frozen=True)
class GemmaConfig(DenseConfig):
    """The sizes of a Gemma model.

    Attributes:
      logit_cap: the bound c of the logits, ``c * tanh(logits / c)``. None for no bound.
    """

    logit_cap: float | None


def read_config(config: Mapping[str, Any]) -> GemmaConfig:
    """Read a parsed ``config.json``, its ``text_config`` at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    config = {**_DEFAULTS, **config}
    fields = Fields(config)
    read_activation(fields)
    fields.only("use_bidirectional_attention", (False,), False)
    fields.require(
        "text_config" not in config or not fields.present("final_logit_softcapping"),
        "final_logit_softcapping: expected null, because transformers does not apply it in models "
        f"with a text_config; got {quoted(config.get('final_logit_softcapping'))}",
    )
    cap = read_logit_cap(fields)
    read = read_dense(
        fields,
        _read_attentions(fields, config),
        eps=_EPS,
        tied=True,
        activation=ACTIVATION,
        positions=fields.positions(counted=("linear",)),
    )
    return GemmaConfig(**vars(read), logit_cap=cap)


def read_activation(fields: Fields) -> None:
    """Check the activation, which Gemma calls ``hidden_activation``."""
    fields.only("hidden_activation", (ACTIVATION,), ACTIVATION)
    fields.only("hidden_act", (None, ACTIVATION), None)


def read_logit_cap(fields: Fields) -> float | None:
    """Return ``final_logit_softcapping``, or None if it is missing or null."""
    if not fields.present("final_logit_softcapping"):
        return None
    return fields.number("final_logit_softcapping")


def _read_attentions(fields, config):
    """Return the sizes of the attention of each layer."""
    layers = fields.size("num_hidden_layers")
    pattern = fields.size("sliding_window_pattern", default=PATTERN)
    default = [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    types = fields.layer_types((SLIDING, FULL), default)
    window = read_window(fields)
    fields.relate(
        window is not None or SLIDING not in types,
        "sliding_window: null, but some layers have sliding_attention",
    )
    bias = fields.flag("attention_bias", False)
    scalar = fields.number("query_pre_attn_scalar", 256)
    fields.relate(scalar > 0, f"query_pre_attn_scalar: expected a positive number, got {scalar}")
    attentions = {
        kind: read_grouped_query(
            fields,
            {**config, "rope_parameters": _read_rope_fields(fields, config, kind)}
            | {"rope_scaling": None},
            eps=_EPS,
            bias=bias,
            out_bias=bias,
            normalize="heads",
            centered=True,
            window=window if kind == SLIDING else None,
            scale=max(scalar, 1e-6) ** -0.5,
        )
        for kind in (SLIDING, FULL)
    }
    return tuple(attentions[kind] for kind in types)


def _read_rope_fields(fields, config, kind):
    """Return the fields of the rotary embedding of layers of this kind.

    Newer files have an object for each kind. Older ones have the base of each kind, and the
    scaling of those that see all keys. One flat object applies to the latter, as in vLLM.
    """
    given, scaling = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for name, value in (("rope_parameters", given), ("rope_scaling", scaling)):
        fields.require(isinstance(value, dict), f"{name}: expected an object, got {quoted(value)}")
    name, base = _BASES[kind]
    own = {"rope_theta": fields.number(name, base)}
    if not isinstance(given, dict) or not isinstance(scaling, dict):
        return own
    nested = any(isinstance(one, dict) for one in given.values())
    section = given.get(kind) or {} if nested else given if kind == FULL else {}
    if not isinstance(section, dict):
        fields.require(False, f"rope_parameters: expected an object {kind}, got {quoted(given)}")
        return own
    return own | section | (scaling if kind == FULL else {})


class GemmaDecoder(Decoder):
    """A decoder whose embedding is multiplied by ``sqrt(h)`` and whose logits may be bounded."""

    def embed(self, table, input_ids):
        """Return the vectors of tokens ``[b, t, h]``; `table` is the embedding's value."""
        factor = jnp.asarray(self.config.hidden**0.5, table.dtype)
        return super().embed(table, input_ids) * factor

    def _logits(self, x):
        logits, cap = super()._logits(x), self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def build_model(config: GemmaConfig, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(layer):
        parts = build_dense_parts(
            config, layer, make, before=True, activation=ACTIVATION, centered=True
        )
        return PostNormLayer(*parts)

    return build_around(
        config, make, build_layer, tied=config.tied, centered=True, decoder=GemmaDecoder
    )


ARCHITECTURE = architecture(read_config, {**KEYS, **NORM_KEYS}, build_model=build_model)
