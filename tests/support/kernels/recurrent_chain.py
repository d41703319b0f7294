"""Run a step of a recurrent mixer behind the layer that writes its token, in one chain."""

import jax
import jax.numpy as jnp

from jax_nvfp4_moe import Target, ops
from jax_nvfp4_moe.ops.dense import dense

_WIDTH = 32  # of the input of the layer, and the most tokens


def lower_behind_layer(step, projected, *rest):
    """Return ``step(projected, *rest)`` as a lowered program, and the operands of that program.

    A linear layer writes `projected`, of up to 32 tokens. Token i of its input is one at place i,
    so that the result has the bits of `projected`.
    """
    (b, t, n), dtype = projected.shape, projected.dtype
    weight = jnp.pad(jnp.asarray(projected).reshape(b * t, n).T, ((0, 0), (0, _WIDTH - b * t)))
    x = jnp.eye(b * t, _WIDTH, dtype=dtype).reshape(b, t, _WIDTH)

    def run(x, weight, *rest):
        return step(dense(x, weight, target=Target.current(), dtype=dtype), *rest)

    operands = x, weight, *map(jnp.asarray, rest)
    return jax.jit(ops.chain_calls(run)).lower(*operands), operands
