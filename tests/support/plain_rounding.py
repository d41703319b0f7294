"""Estimate the error of bfloat16 by a float32 model whose modules round inputs and outputs.

Other tests compare the float32 model with the reference tensors of the tools. It shares nothing
that depends on the dtype with a bfloat16 model, so a fault that only bfloat16 has is a difference
between the two.
"""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe import NVFP4MoE
from jax_nvfp4_moe.models.decoder import Decoder


@contextlib.contextmanager
def rounded_modules(model, rounds):
    """Round floats to bfloat16 on their way into and out of each module inside `model`.

    Args:
      model: a `Decoder` in float32. Its logits are not rounded, as in a bfloat16 model.
      rounds: bool scalar, which may be traced. Whether to round, so that one program serves both
        cases.
    """

    def rounded(value):
        if not isinstance(value, jax.Array) or value.dtype != jnp.float32:
            return value
        return jnp.where(rounds, value.astype(jnp.bfloat16).astype(jnp.float32), value)

    def wrap(call):
        def wrapped(self, *args, **named):
            return jax.tree.map(rounded, call(self, *jax.tree.map(rounded, args), **named))

        return wrapped

    owners = {
        owner
        for _, module in nnx.iter_modules(model)
        for owner in [_owner_of_call(type(module))]
        if owner not in (None, Decoder)
    }
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(mock.patch.object(owner, "__call__", wrap(vars(owner)["__call__"])))
        yield


def _owner_of_call(kind):
    """Return the class that defines how instances of `kind` are called, or None."""
    return next((base for base in kind.__mro__ if "__call__" in vars(base)), None)


@contextlib.contextmanager
def followed_choices(choices):
    """Replace the experts of each token for which the router disagrees with `choices`.

    A near tie in a router may fall to the other side in bfloat16. The logits of that token then say
    nothing about rounding. If the ids agree, the router's own weights stay.

    Args:
      choices: ids ``[b, t, k]`` and weights of each expert block, in the order of the calls. Ids of
        -1 keep what the router decides.

    Yields:
      A list that receives bool ``[b, t]`` for each block: whether the token's experts were
        replaced.
    """
    original, given, replaced = NVFP4MoE.route, iter(choices), []

    def route(self, x):
        ids, weights = original(self, x)
        there, their_weights = next(given)
        same = (jnp.sort(ids, axis=-1) == jnp.sort(there, axis=-1)).all(axis=-1, keepdims=True)
        same |= there[..., :1] < 0
        replaced.append(~same[..., 0])
        return jnp.where(same, ids, there), jnp.where(same, weights, their_weights)

    with mock.patch.object(NVFP4MoE, "route", route):
        yield replaced
