"""Emulate `lax.ragged_all_to_all` for CPUs, which do not have it."""

import jax
import jax.numpy as jnp


def emulate_ragged(operand, output, first, sizes, there, came, *, axis_name):
    """Gather everything, and put each row where the description of the operation says."""
    shards, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    given = operand, first, sizes, there
    operands, *cuts = (jax.lax.all_gather(part, axis_name) for part in given)
    first, sizes, there = (cut.reshape(shards, shards, -1)[:, me].reshape(-1) for cut in cuts)
    sender = jnp.repeat(jnp.arange(shards), first.size // shards)
    row = jnp.arange(output.shape[0])[:, None]
    inside = (row >= there[None, :]) & (row < (there + sizes)[None, :])
    piece = inside.argmax(axis=1)
    source = first[piece] + row[:, 0] - there[piece]
    rows = operands[sender[piece], jnp.clip(source, 0, operand.shape[0] - 1)]
    said = (came == sizes).all() & (inside.sum(axis=1) <= 1).all()  # no row is written twice
    put = jnp.where(inside.any(axis=1)[:, None], rows, output)
    return jnp.where(said, put, jnp.zeros_like(output))
