"""Read the sizes of a grouped-query attention from ``config.json``."""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields, read_rope
from jax_nvfp4_moe.nn.grouped_query import GQAConfig


def read_grouped_query(
    fields: Fields,
    config: Mapping[str, Any],
    *,
    eps: float,
    theta: float = 10000.0,
    head_dim: int | None = None,
    share: float | None = None,
    **options: Any,
) -> GQAConfig:
    """Read the sizes of an attention.

    Args:
      fields: of ``config.json``; takes the problems.
      config: the same, parsed.
      eps, theta: of the norms and of the rotation, where the file names none.
      head_dim: where the file has none; None for ``hidden_size / num_attention_heads``.
      share: of a head's channels that are rotated where the file does not say; None for
        models that rotate all of them.
      options: further fields of `GQAConfig`.
    """
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    head_dim = fields.size("head_dim", default=head_dim or max(hidden // heads, 1))
    fields.relate(heads % kv_heads == 0, f"{heads} heads do not divide by {kv_heads} key heads")
    fields.relate(head_dim % 2 == 0, f"head_dim: expected an even number, got {head_dim}")
    positions = fields.size("max_position_embeddings")
    rope = read_rope(fields, config, head_dim, positions, theta=theta, share=share or 1.0)
    fields.relate(
        share is not None or 2 * len(rope.frequencies) == head_dim,
        "partial_rotary_factor: this architecture rotates all channels of a head",
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


def read_window(fields: Fields) -> int | None:
    """Return ``sliding_window``, None where it is missing or null."""
    return fields.size("sliding_window") if fields.present("sliding_window") else None
