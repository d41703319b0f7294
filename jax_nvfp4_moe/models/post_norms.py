"""Layers with a norm after the attention and after the feed-forward."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_nvfp4_moe.models.decoder import DecoderLayer
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.gated_mlp import GatedMLP, build_gated_mlp
from jax_nvfp4_moe.nn.norm import Residual, RMSNorm


class PostNormLayer(DecoderLayer):
    """A decoder layer that normalizes what it adds to the residual stream.

    ``x = x + attention_post_norm(attention(attention_norm(x)))``
    ``y = x + mlp_post_norm(mlp(mlp_norm(x)))``

    Attributes:
      attention_norm: the norm before the attention, or None.
      attention: the attention.
      attention_post_norm: the norm after the attention.
      mlp_norm: the norm before the feed-forward, or None.
      mlp: a dense MLP or an expert block.
      mlp_post_norm: the norm after the feed-forward.
    """

    def __init__(
        self,
        attention_norm: RMSNorm | None,
        attention: Any,
        attention_post_norm: RMSNorm,
        mlp_norm: RMSNorm | None,
        mlp: Any,
        mlp_post_norm: RMSNorm,
    ):
        """Make a layer of its parts."""
        self.attention_norm, self.attention = attention_norm, attention
        self.attention_post_norm = attention_post_norm
        self.mlp_norm, self.mlp, self.mlp_post_norm = mlp_norm, mlp, mlp_post_norm

    def __call__(self, stream, positions, entries):
        """Run the layer with the arguments and results of `DecoderLayer`."""
        with jax.named_scope("attention"):
            x, normal = _normalize(self.attention_norm, stream)
            y, entries = self.attention(normal, positions, entries)
            stream = Residual(x, _normalize_alone(self.attention_post_norm, y))
        with jax.named_scope("mlp"):
            x, normal = _normalize(self.mlp_norm, stream)
            y = self.mlp(normal)
            return Residual(x, _normalize_alone(self.mlp_post_norm, y)), entries


def _normalize_alone(norm: RMSNorm, y: jax.Array) -> jax.Array:
    """Normalize ``y [b, t, h]``, for a few tokens by a kernel, as the norms of the stream are."""
    return norm.normalize_sum(Residual(y))[1]


def add(stream: Residual) -> jax.Array:
    """Return the residual stream ``[b, t, h]`` as one array."""
    return stream.x if stream.added is None else stream.x + stream.added


def _normalize(norm, stream):
    """Return the sum of the stream, and what the next part reads: the sum itself without a norm."""
    if norm is None:
        x = add(stream)
        return x, x
    return norm.normalize_sum(stream)


def build_dense_parts(
    config: Any,
    layer: int,
    make: Builder,
    *,
    before: bool,
    activation: str = "silu",
    centered: bool = False,
    build_attention: Callable[..., Any] = build_attention,
    intermediate: int | None = None,
) -> tuple[Any, ...]:
    """Make the parts of a `PostNormLayer` with a dense MLP.

    Args:
      config: the sizes of the model.
      layer: the index of the layer.
      make: builds the parts.
      before: whether the layer also has the norms before its parts.
      activation: the activation of the MLP.
      centered: whether the norms in the file store ``weight - 1``.
      build_attention: takes the sizes, the index of a layer and `make`, and returns its attention.
        Grouped-query attention by default.
      intermediate: the intermediate size of the MLP. None takes that of the sizes.
    """
    path, h = f"layers.{layer}", config.hidden
    width = config.dense_intermediate if intermediate is None else intermediate

    def norm(name):
        return make.norm(f"{path}.{name}", h, config.eps, centered=centered)

    build: Callable[..., GatedMLP] = functools.partial(GatedMLP, activation=activation)
    return (
        norm("attention_norm") if before else None,
        build_attention(config, layer, make),
        norm("attention_post_norm"),
        norm("mlp_norm") if before else None,
        build_gated_mlp(make, f"{path}.mlp", h, width, build),
        norm("mlp_post_norm"),
    )


# The names of the norms after the parts, and of the norm before the feed-forward if there is one.
NORM_KEYS = {
    "layers.*.attention_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.mlp_post_norm": "model.layers.*.post_feedforward_layernorm",
}
