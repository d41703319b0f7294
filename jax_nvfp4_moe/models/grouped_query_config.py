"""Read the sizes of a grouped-query attention from ``config.json``."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import MOST, ROPE_TYPES, Fields, is_index, read_rope
from jax_nvfp4_moe.nn.attention.grouped_query import GQAConfig


def read_grouped_query(
    fields: Fields,
    config: Mapping[str, Any],
    *,
    eps: float,
    theta: float = 10000.0,
    head_dim: int | None = None,
    key_heads: int | None = None,
    share: float | None = None,
    types: Sequence[str] = ROPE_TYPES,
    **options: Any,
) -> GQAConfig:
    """Read the sizes of a grouped-query attention.

    Args:
      fields: the fields of ``config.json``, which receive the problems.
      config: the parsed ``config.json``.
      eps: the default epsilon of the norms.
      theta: the default of ``rope_theta``.
      head_dim: the default of ``head_dim``. None means ``hidden_size / num_attention_heads``.
      key_heads: the default of ``num_key_value_heads``. None takes one for each query head.
      share: the default share of a head's channels that are rotated. None for models that always
        rotate all of them.
      types: the types of rotary embeddings that the architecture has.
      options: further fields of `GQAConfig`.
    """
    hidden, (heads, kv_heads) = fields.size("hidden_size"), fields.heads(key_heads)
    head_dim = fields.size("head_dim", default=head_dim or max(hidden // heads, 1))
    fields.relate(head_dim % 2 == 0, f"head_dim: expected an even number, got {head_dim}")
    positions = fields.size("max_position_embeddings")
    rope = read_rope(
        fields, config, head_dim, positions, theta=theta, share=share or 1.0, types=types
    )
    fields.relate(
        share is not None or 2 * len(rope.frequencies) == head_dim,
        "partial_rotary_factor: expected 1, because this architecture rotates all channels",
    )
    return GQAConfig(
        hidden,
        heads,
        kv_heads,
        head_dim,
        fields.number("rms_norm_eps", eps),
        rope,
        **options,
    )


def read_layer_fields(
    fields: Fields, config: Mapping[str, Any], layer: int, allowed: Sequence[str]
) -> Mapping[str, Any] | None:
    """Return the fields that have other values in `layer`, from ``per_layer_config``.

    transformers writes the indices of layers as text with leading zeros, such as "07".

    Args:
      fields: the fields of ``config.json``, which receive the problems.
      config: the parsed ``config.json``.
      layer: the index of the layer.
      allowed: the names of fields that layers may have of their own.

    Returns:
      None if the config has no ``per_layer_config``.
    """
    listed = config.get("per_layer_config")
    if listed is None:
        return None
    known = isinstance(listed, dict) and len(listed) <= MOST["num_hidden_layers"]
    if known and all(map(is_index, listed)):
        own = next((own for index, own in listed.items() if int(index) == layer), {})
        if isinstance(own, dict) and set(own) <= set(allowed):
            return own
    if not fields.problems:  # each layer would repeat it
        fields.require(
            False,
            f"per_layer_config: expected layers with {' and '.join(allowed)}, got {quoted(listed)}",
        )
    return {}


def with_rope_of(
    fields: Fields, config: Mapping[str, Any], kind: str, default: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the config with the rotary embedding of one type of layers for all layers.

    Args:
      fields: the fields of ``config.json``, which receive the problems.
      config: the parsed ``config.json``, whose ``rope_parameters`` has an object for each type.
      kind: the type of layers.
      default: the ``rope_parameters`` of a config that has none.
    """
    given = config.get("rope_parameters") or default
    own = given.get(kind) if isinstance(given, dict) else None
    if not isinstance(own, dict):
        fields.require(False, f"rope_parameters: expected an object {kind}, got {quoted(given)}")
        own = default[kind]
    others = dict.fromkeys(("rope_scaling", "rope_theta", "partial_rotary_factor"))
    return {**config, **others, "rope_parameters": own}


def read_window(fields: Fields) -> int | None:
    """Return ``sliding_window``, or None if it is missing or null."""
    return fields.size("sliding_window") if fields.present("sliding_window") else None
