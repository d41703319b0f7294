"""The delta rule for all tokens of a chunk at once, with a decay for each head or each channel.

Let S be the state before a chunk, and ``D_ij`` the decay of the state from token j to token i. The
corrections ``u_i`` that the tokens of the chunk add to the state solve::

  u_i + beta_i sum_{j<i} (k_i . D_ij k_j) u_j = beta_i (v_i - (D_i k_i).T S)

Here ``D_i`` is the decay from the start of the chunk. With the inverse T of the system::

  u = T beta v - (T beta D k) S

A scan over the chunks carries S and computes the two products that need it. Everything else is
computed for all chunks at once.

Source: arXiv:2406.06484, section 3, for the delta rule; arXiv:2412.06464 for the decay.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.numerics.triangular_inverse import invert_unit_lower

_TINY = 1e-6  # added to the squared length of keys and queries, against a division by zero


class Chunks(NamedTuple):
    """What the tokens of n chunks of c tokens contribute. The dots stand for rows and heads.

    All arrays are float32.

    Attributes:
      key_pairs: ``k_i . D_ij k_j`` for i > j and 0 otherwise, ``[n, ..., c, c]``.
      query_pairs: ``q_i . D_ij k_j`` for i >= j and 0 otherwise, ``[n, ..., c, c]``.
      read_keys: keys, decayed from the start of the chunk, ``[n, ..., c, d]``.
      read_queries: queries, decayed likewise, ``[n, ..., c, d]``.
      write_keys: keys, decayed until the end of the chunk, ``[n, ..., c, d]``.
      values: ``[n, ..., c, e]``.
      beta: rates of correction, ``[n, ..., c, 1]``.
      kept: decay of the state over the whole chunk, ``[n, ..., d, 1]`` or ``[n, ..., 1, 1]``.
    """

    key_pairs: Float[Array, "n ... c c"]
    query_pairs: Float[Array, "n ... c c"]
    read_keys: Float[Array, "n ... c d"]
    read_queries: Float[Array, "n ... c d"]
    write_keys: Float[Array, "n ... c d"]
    values: Float[Array, "n ... c e"]
    beta: Float[Array, "n ... c 1"]
    kept: Float[Array, "n ... d 1"]


def split_chunks(x: Float[Array, "b t m ..."], chunk: int) -> Float[Array, "n b m ..."]:
    """Return the n chunks of the tokens, ``[n, b, m, ..., chunk, width]``; pad with zeros."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], x.shape[1] // chunk, chunk, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, -2)


def join_chunks(x: Float[Array, "n b m ..."], t: int) -> Float[Array, "b t m ..."]:
    """Undo `split_chunks`, and return the first t tokens."""
    x = jnp.moveaxis(jnp.moveaxis(x, -2, 2), 0, 1)
    return lax.collapse(x, 1, 3)[:, :t]


def apply_chunks(
    chunks: Chunks, state: Float[Array, "... d e"], precision: lax.Precision
) -> tuple[Float[Array, "n ... c e"], Float[Array, "... d e"]]:
    """Apply the delta rule to all tokens of all chunks.

    Args:
      chunks: what the tokens contribute.
      state: state before the first chunk, float32.
      precision: precision of the products with values, corrections and states. The system and its
        inverse are computed in full float32 in any case, and the state is a float32 sum: a lower
        precision rounds what is read from the state and what is added to it, but never the state.

    Returns:
      The results of the tokens, and the state after the last chunk, both float32.
    """
    matmul = functools.partial(jnp.matmul, precision=precision)
    size = chunks.values.shape[-2]
    inverse = invert_unit_lower(chunks.beta * chunks.key_pairs)
    wanted = matmul(inverse, chunks.beta * chunks.values)
    known = matmul(inverse, chunks.beta * chunks.read_keys)
    reads = jnp.concatenate([known, chunks.read_queries], axis=-2)  # one product with the state
    writes = jnp.swapaxes(chunks.write_keys, -1, -2)

    def take_in(state, chunk):
        kept, reads, wanted, writes = chunk
        read = matmul(reads, state)
        corrections = wanted - read[..., :size, :]
        return kept * state + matmul(writes, corrections), read

    state, read = lax.scan(take_in, state, (chunks.kept, reads, wanted, writes))
    corrections = wanted - read[..., :size, :]
    return read[..., size:, :] + matmul(chunks.query_pairs, corrections), state


def normalize_queries_and_keys(
    q: Float[Array, "... d"], k: Float[Array, "... d"]
) -> tuple[Float[Array, "... d"], Float[Array, "... d"]]:
    """Scale float32 queries to length ``d ** -0.5``, and keys to length 1."""

    def unit(x):
        return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _TINY)

    return unit(q) * q.shape[-1] ** -0.5, unit(k)


def choose_precision(dtype) -> lax.Precision:
    """Return the precision of the products in `apply_chunks` for modules of `dtype`.

    bfloat16 has 8 bits, and the TensorFloat-32 of NVIDIA's tensor cores, the default of float32
    products there, has 11. After rounding to bfloat16, results have less than twice the error of
    exact ones. float16 has 11 bits itself, so that its modules need float32 products.
    """
    rounded = jnp.dtype(dtype) == jnp.bfloat16
    return lax.Precision.DEFAULT if rounded else lax.Precision.HIGHEST


def for_device(rule: Callable, gpu_chunk: int, cpu_chunk: int) -> Callable:
    """Return `rule` with the chunk size of the device for which it is compiled.

    A GPU computes large chunks as fast as small ones, and each iteration of the scan costs it the
    time of several launches. On a CPU the work that grows with the size of a chunk counts.

    Args:
      rule: function of arrays with the keyword `chunk`.
      gpu_chunk: number of tokens in a chunk on NVIDIA GPUs.
      cpu_chunk: number of tokens in a chunk on all other devices.
    """

    def run(*operands):
        return lax.platform_dependent(
            *operands,
            cuda=functools.partial(rule, chunk=gpu_chunk),
            default=functools.partial(rule, chunk=cpu_chunk),
        )

    return run
