"""Inverse of unit lower triangular matrices by matrix products.

The delta rule solves one triangular system for each chunk of tokens. A solver goes row by row,
which leaves most of a GPU idle. Matrix products compute the same inverse in a few large steps.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.numerics.chunk_decay import keep_neighbors, part_sizes

_BLOCK = 16  # blocks of this size and smaller ones are inverted with whole products of their size


def invert_unit_lower(below: Float[Array, "... c c"]) -> Float[Array, "... c c"]:
    """Return ``(I + below)^-1`` of strictly lower triangular matrices.

    The inverse of each half of the diagonal gives the inverse of the whole::

      [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]

    The delta rule reads all its corrections through this inverse, so that its products stay in
    float32. There, all factors of these products are at most 1 in magnitude, for any keys: an entry
    of the inverse is ``k_i . P k_j``, where P is a product of contractions. The product form
    ``(I - L)(I + L^2)(I + L^4)...`` of the inverse is shorter, but its powers grow to 1e18 for 64
    equal keys, and no digit of the result remains.

    Args:
      below: float32 ``[..., c, c]``, zero on and above the diagonal. c is a power of 2.
    """
    size = below.shape[-1]
    if size <= _BLOCK:
        return _invert_block(below)
    half = size // 2
    diagonal = jnp.stack([below[..., :half, :half], below[..., half:, half:]], axis=-3)
    inverse = invert_unit_lower(diagonal)
    upper, lower = inverse[..., 0, :, :], inverse[..., 1, :, :]
    corner = -_matmul(_matmul(lower, below[..., half:, :half]), upper)
    rows = [
        jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
        jnp.concatenate([corner, lower], axis=-1),
    ]
    return jnp.concatenate(rows, axis=-2)


def _invert_block(below):
    """Invert a small block, with all its parts of one size in one product.

    `inverse` is the inverse of the diagonal parts. Each step joins two neighbors. Products with the
    zeros between the parts cost less than products of many small matrices.
    """
    count = below.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(count, dtype=below.dtype), below.shape)
    for size in part_sizes(count):
        corners = keep_neighbors(below, size)
        # At size 1 the inverse of the parts is the identity.
        change = corners if size == 1 else _matmul(_matmul(inverse, corners), inverse)
        inverse = inverse - change
    return inverse


def _matmul(x, y):
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
