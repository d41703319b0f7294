"""Run a step of a recurrent mixer behind the layer that writes its token, in one chain."""

import jax
import jax.numpy as jnp

from jax_nvfp4_moe import Target, ops
from jax_nvfp4_moe.ops.dense import dense

_WIDTH = 8  # of the input of the layer, and the most rows


def lower_behind_layer(step, projected, *rest):
    """Return ``step(projected, *rest)`` as a lowered program, and the operands of that program.

    A linear layer writes `projected`, of up to 8 rows. Row i of its input is one at place i, so
    that the result has the bits of `projected`.
    """
    rows, dtype = jnp.asarray(projected)[:, 0], projected.dtype
    weight = jnp.pad(rows.T, ((0, 0), (0, _WIDTH - rows.shape[0])))
    x = jnp.eye(rows.shape[0], _WIDTH, dtype=dtype)[:, None]

    def run(x, weight, *rest):
        return step(dense(x, weight, target=Target.current(), dtype=dtype), *rest)

    operands = x, weight, *map(jnp.asarray, rest)
    return jax.jit(ops.chain_calls(run)).lower(*operands), operands
