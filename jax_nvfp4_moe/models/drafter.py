"""Drafter: drafting layers, which predict one token beyond the token that the model predicts."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.norm import Residual, RMSNorm


class Drafter(nnx.Module):
    """The drafting layers of a model (multi-token prediction).

    At token i, it reads a pair: the model's normalized vector of token i, and the embedding of
    token i + 1. Its result at token i predicts token i + 2:

    ``x = joint(concatenate([embedding_norm(embedded), hidden_norm(hidden)]))``, then the layers,
    then ``normal = norm(x)``, of which the head makes logits.

    To draft a token further, the drafter reads its own normalized vector in place of the model's.

    Attributes:
      embedding_norm: the norm of the embeddings.
      hidden_norm: the norm of the model's vectors.
      joint: the linear from both, ``[2 h]``, to ``[h]``.
      layers: the decoder layers, as those of the model.
      norm: the norm before the head.
      embedding: ``[v, h]`` if the file stores one that differs from the model's, otherwise None.
      head: the linear that makes logits if the file stores one that differs from the model's,
        otherwise None.
      rounded_head: the linear that makes logits of drafts if there is a rounded copy of the head,
        otherwise None. See `models.draft_head`.
      streams: the number of vectors ``[h]`` of which `hidden` consists, 1 here. Static.

    Source: arXiv:2412.19437, section 2.2, and `MtpModel` of transformers 5.24.
    """

    streams = 1

    def __init__(
        self,
        embedding_norm: RMSNorm,
        hidden_norm: RMSNorm,
        joint: Any,
        layers: Sequence[Any],
        norm: RMSNorm,
        *,
        embedding: nnx.Param | None = None,
        head: Any = None,
    ):
        """Make a drafter of its parts."""
        self.embedding_norm, self.hidden_norm = embedding_norm, hidden_norm
        self.joint, self.layers, self.norm = joint, nnx.List(list(layers)), norm
        self.embedding, self.head = embedding, head
        self.rounded_head: Any = nnx.data(None)

    def init_cache(self, batch: int, max_length: int) -> tuple[Mapping[str, Array], ...]:
        """Return the empty cache entries of all layers for `batch` rows."""
        return tuple(layer.init_cache(batch, max_length) for layer in self.layers)

    def __call__(
        self,
        embedded: Float[Array, "b t h"],
        hidden: Float[Array, "b t h"],
        positions: Int32[Array, "b t"],
        entries: Sequence[Any] | None,
    ) -> tuple[Float[Array, "b t h"], Float[Array, "b t h"], tuple[Any, ...]]:
        """Read pairs of a vector and of the token that follows it.

        Args:
          embedded: the embeddings of the tokens that follow.
          hidden: the vectors that the model's last norm has made, or the first result of this
            method for the pairs before.
          positions: the position of each pair, which is that of the vector's token.
          entries: the cache entries of each layer. None runs without a cache.

        Returns:
          The vectors with which the next pairs are made, the vectors of which the head makes
          logits, and the updated cache entries. The two are the same vectors, except in
          DeepSeek-V4.
        """
        parts = (
            self.embedding_norm.normalize_sum(Residual(embedded))[1],
            self.hidden_norm.normalize_sum(Residual(hidden))[1],
        )
        stream = Residual(self.joint(jnp.concatenate(parts, axis=-1)))
        updated = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"draft_layer_{index}"):
                stream, entry = layer(
                    stream, positions, None if entries is None else entries[index]
                )
            updated.append(entry)
        normal = self.norm.normalize_sum(stream)[1]
        return normal, normal, tuple(updated)
