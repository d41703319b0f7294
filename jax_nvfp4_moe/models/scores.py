"""Score given tokens without the logits of all positions in memory."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jax_nvfp4_moe.nn.indexed_tuple import register_indexed

# Number of tokens whose logits are in memory together. With a vocabulary of 151936 tokens, their
# logits take 0.3 GB. The head's weights are read once for so many tokens.
_TOGETHER = 512


@register_indexed
class TokenScores(NamedTuple):
    """How a model predicts given tokens.

    Attributes:
      log_probability: logarithm of the probability of each token.
      likeliest: whether the token has the largest logit. Of equal logits, the one of the smallest
        token id counts.
    """

    log_probability: Float[Array, "b t"]
    likeliest: Bool[Array, "b t"]


def score_targets(
    make_logits: Callable, x: Float[Array, "b t h"], targets: Int32[Array, "b t"]
) -> TokenScores:
    """Return the scores of `targets`, with the logits of 512 positions in memory at a time.

    Args:
      make_logits: takes vectors ``[1, n, h]`` and returns float32 logits ``[1, n, vocab]``.
      x: vectors of the positions, as the head reads them.
      targets: the token to score at each position.
    """

    def score(piece):
        x, targets = piece
        logits = make_logits(x[None])[0]
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32) == targets
        return TokenScores(chosen - jax.nn.logsumexp(logits, axis=-1), likeliest)

    rows, count = (x.reshape(-1, x.shape[-1]), targets.reshape(-1)), targets.size
    if count <= _TOGETHER:
        scores = score(rows)
    else:
        # Otherwise a forward pass would keep the logits of all pieces for the backward pass.
        again = jax.checkpoint(score, prevent_cse=False)
        scores = jax.tree.map(jnp.ravel, lax.map(again, jax.tree.map(_split, rows)))
    return jax.tree.map(lambda each: each[:count].reshape(targets.shape), scores)


def _split(x):
    """Return rows ``[n, ...]`` in pieces ``[n / 512, 512, ...]``, with zeros after the last row."""
    pad = [(0, -len(x) % _TOGETHER)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad).reshape(-1, _TOGETHER, *x.shape[1:])
