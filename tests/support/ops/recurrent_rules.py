"""Checks that the rules of all recurrent mixers share: by chunks against step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.testing import assert_as_accurate_as


def check_gradients(by_chunks, by_steps, tokens, state):
    """Check the gradients of `by_chunks` against those of `by_steps` in float64.

    Args:
      by_chunks: ``(*tokens, state) -> (y, state)``.
      by_steps: ``(tokens, state) -> (y, state)``, whose float32 gradients are the yardstick.
      tokens: tuple of the operands that have a value for each token.
      state: the state before the first token.
    """

    def total(rule, operands):
        y, last = rule(*operands)
        return jnp.sum(jnp.square(y)) + jnp.sum(jnp.square(last))

    operands = (*tokens, state)
    got = jax.jit(jax.grad(functools.partial(total, by_chunks)))(operands)
    with jax.enable_x64(True):
        steps = jax.jit(jax.grad(lambda given: total(lambda *x: by_steps(x[:-1], x[-1]), given)))
        exact = steps(tuple(jnp.asarray(np.asarray(x, np.float64)) for x in operands))
    yardstick = steps(operands)
    for ours, float32, truth in zip(got, yardstick, exact, strict=True):
        assert_as_accurate_as(ours, float32, np.asarray(truth), factor=4.0)
