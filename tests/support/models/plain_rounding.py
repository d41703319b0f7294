"""Estimate the error of bfloat16 by a float32 model whose modules round inputs and outputs.

Other tests compare the float32 model with the reference tensors of the tools. It shares nothing
that depends on the dtype with a bfloat16 model, so a fault that only bfloat16 has is a difference
between the two.
"""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_nvfp4_moe import NVFP4MoE
from jax_nvfp4_moe.models.decoder import Decoder
from jax_nvfp4_moe.nn.attention.indexer import Indexer
from jax_nvfp4_moe.nn.experts.routed_experts import RoutedTokens
from jax_nvfp4_moe.nn.experts.token_router import TokenRouter
from jax_nvfp4_moe.nn.intermediates import record

# Methods by which a model runs its modules. Norms have one that adds to the residual stream.
_CALLS = ("__call__", "normalize_sum")
# A weight that changes by more has lost or gained an expert of about the same logit, which halves
# or doubles it. Rounding logits to bfloat16 changes a weight by a hundredth.
_JUMP = 0.1


@contextlib.contextmanager
def rounded_modules(model, rounds):
    """Round floats to bfloat16 on their way into and out of each module inside `model`.

    Args:
      model: a `Decoder` in float32. Its logits and the weights of experts are not rounded, as in a
        bfloat16 model.
      rounds: bool scalar, which may be traced. Whether to round, so that one program serves both
        cases.
    """

    def rounded(value):
        if not isinstance(value, jax.Array) or value.dtype != jnp.float32:
            return value
        # `lax` traces faster than `jnp`, and this occurs hundreds of times in a program.
        return lax.select_n(rounds, value, lax.reduce_precision(value, 8, 7))

    def wrap(call):
        def wrapped(self, *args, **named):
            return jax.tree.map(rounded, call(self, *jax.tree.map(rounded, args), **named))

        return wrapped

    kinds = {type(module) for _, module in nnx.iter_modules(model)}
    calls = {
        (owner, name)
        for kind in kinds
        for name in _CALLS
        for owner in [_owner(kind, name)]
        if owner not in (None, Decoder, TokenRouter)
    }
    with contextlib.ExitStack() as stack:
        for owner, name in calls:
            stack.enter_context(mock.patch.object(owner, name, wrap(vars(owner)[name])))
        yield


def _owner(kind, name):
    """Return the class that defines method `name` of instances of `kind`, or None."""
    return next((base for base in kind.__mro__ if name in vars(base)), None)


def own_choices(model, ids):
    """Return the `choices` that let each router and each indexer keep its own."""
    kinds = (NVFP4MoE, Indexer)
    found = [part for _, part in nnx.iter_modules(model) if isinstance(part, kinds)]
    counts = [p.sizes.count if isinstance(p, Indexer) else p.router.top_k for p in found]
    shapes = [(*ids.shape, count) for count in counts]
    return [(np.full(shape, -1, np.int32), np.zeros(shape, np.float32)) for shape in shapes]


@contextlib.contextmanager
def followed_choices(choices):
    """Replace what routers and indexers choose for a token where they disagree with `choices`.

    A near tie in a router may fall to the other side in bfloat16. The logits of that token then say
    nothing about rounding. If the ids agree, the router's own weights stay, but for one kind of
    router: `select="near"` weighs an expert against those with almost the same logit, so its
    weights jump where another expert comes near enough. The keys that an indexer chooses are
    replaced in the same way as experts, and recorded as if they were experts.

    Args:
      choices: ids ``[b, t, k]`` and weights of each expert block and each indexer, in the order of
        the calls. The weights of an indexer have no meaning. Ids of -1 keep what the router or the
        indexer decides.

    Yields:
      A list that receives float32 ``[b, t]`` for each block and each indexer: whether the token's
        experts were replaced, or the share of its keys that were.
    """
    given, replaced = iter(choices), []
    route, choose = NVFP4MoE.route, Indexer.choose

    def follow(ids):
        there, their_weights = next(given)
        # The ids of a token are distinct, so they are the same if each is among the others.
        same = (ids[..., None] == there[..., None, :]).any(axis=-1).all(axis=-1, keepdims=True)
        return same | (there[..., :1] < 0), there, their_weights

    def follow_route(self, *args):
        ids, weights = route(self, *args)
        same, there, their_weights = follow(ids)
        if self.router.select == "near":
            jumps = (jnp.abs(weights - their_weights) > _JUMP).any(axis=-1, keepdims=True)
            same &= ~jumps | (there[..., :1] < 0)
        replaced.append(1.0 - same[..., 0].astype(jnp.float32))
        return jnp.where(same, ids, there), jnp.where(same, weights, their_weights)

    def follow_choose(self, *args):
        ids = choose(self, *args)
        same, there, _ = follow(ids)
        kept = (ids[..., None] == there[..., None, :]).any(axis=-1).mean(axis=-1)
        replaced.append(jnp.where(same[..., 0], 0.0, 1.0 - kept))
        ids = jnp.where(same, ids, there)
        record(self, RoutedTokens(ids, ids, jnp.zeros(ids.shape)))
        return ids

    with (
        mock.patch.object(NVFP4MoE, "route", follow_route),
        mock.patch.object(Indexer, "choose", follow_choose),
    ):
        yield replaced
