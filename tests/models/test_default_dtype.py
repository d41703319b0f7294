"""Every checkpoint as `load_model` gives it by default, beside float32: bfloat16, kernel, cache.

The yardstick is what rounding explains: the float32 model with the inputs and outputs of its
modules rounded to bfloat16. It has no code of its own for bfloat16, see `plain_rounding`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from given import CHECKPOINTS, MODELS, reference_tensors
from plain_rounding import followed_choices, rounded_modules

from jax_nvfp4_moe import NVFP4MoE, explain, load_model
from jax_nvfp4_moe.nn.experts import RoutedTokens
from jax_nvfp4_moe.nn.gated_delta_net import GatedDeltaNet
from jax_nvfp4_moe.nn.intermediates import capture
from jax_nvfp4_moe.nn.mamba2 import Mamba2

# The worst token's error beside that of plain rounding: the rule of the kernels' tests.
TIMES_ROUNDING = 2
# Choices of a token in a layer that differ from float32's; 4 in 100 are the most that is seen, of
# plain rounding too.
SHARE_REPLACED = 0.1


@jax.jit
def run_float32(model, ids, choices, rounds):
    """Return logits, the choice of each expert block, and which tokens' choices were replaced."""
    with (
        rounded_modules(model, rounds),
        followed_choices(choices) as replaced,
        capture(model) as seen,
    ):
        logits = model(ids)
    tokens = [one for calls in seen.values() for one in calls if isinstance(one, RoutedTokens)]
    return logits, [(one.expert_ids, one.expert_weights) for one in tokens], jnp.stack(replaced)


@functools.partial(jax.jit, static_argnames="first")
def run_with_cache(model, ids, choices, first):
    """Return logits of a prefill of `first` tokens and of one token at a time after it."""

    def take(cache, given):
        ids, choices = given
        with followed_choices(choices) as replaced:
            logits, cache = model(ids, cache)
        return cache, (logits, jnp.stack(replaced))

    given = ids, choices
    cache, (prefill, kept) = take(
        model.init_cache(*ids.shape), jax.tree.map(lambda x: x[:, :first], given)
    )
    each = jax.tree.map(lambda x: jnp.moveaxis(x[:, first:], 1, 0)[:, :, None], given)
    _, (decoded, kept_later) = jax.lax.scan(take, cache, each)
    logits = jnp.concatenate([prefill, jnp.moveaxis(decoded[:, :, 0], 0, 1)], axis=1)
    return logits, jnp.concatenate([kept, jnp.moveaxis(kept_later[..., 0], 0, 2)], axis=2)


def own_choices(model, ids):
    """Return the `choices` that leave each router's own."""
    blocks = [part for _, part in nnx.iter_modules(model) if isinstance(part, NVFP4MoE)]
    shapes = [(*ids.shape, block.router.top_k) for block in blocks]
    return [(jnp.full(shape, -1, jnp.int32), jnp.zeros(shape)) for shape in shapes]


def times_rounding(name, edit=lambda default: None):
    """Return the default model's worst error in units of plain rounding's, and what is replaced.

    Args:
      name: of the checkpoint.
      edit: changes the default model.
    """
    folder = CHECKPOINTS / name
    ids = jnp.asarray(reference_tensors(folder)["input_ids"], jnp.int32)
    default = load_model(folder)
    assert default.dtype == jnp.bfloat16
    edit(default)
    scheme = explain(default).scheme.value
    model = load_model(folder, scheme=scheme, dtype=jnp.float32, backend="reference")
    exact, choices, _ = run_float32(model, ids, own_choices(model, ids), False)
    rounded, _, _ = run_float32(model, ids, choices, True)
    logits, replaced = run_with_cache(default, ids, choices, ids.shape[1] // 2)
    explained, found = (np.abs(np.asarray(one) - exact).max() for one in (rounded, logits))
    return found / explained, np.mean(replaced)


@pytest.mark.parametrize("name", MODELS)
def test_the_default_is_as_exact_as_bfloat16(name):
    """Both of a prefill and of decoding; 0.8 to 1.4 times the error of rounding are reached."""
    error, replaced = times_rounding(name)
    assert error <= TIMES_ROUNDING
    assert replaced <= SHARE_REPLACED


@pytest.mark.parametrize(
    ("name", "mixer"),
    [("nemotron_h-modelopt-w4a16", Mamba2), ("qwen3_next-modelopt-w4a16", GatedDeltaNet)],
)
def test_the_bound_catches_states_that_fade_faster(name, mixer):
    """The negative control: logarithms of decays twice as large, in bfloat16 alone."""

    def edit(default):
        mixers = [part for _, part in nnx.iter_modules(default) if isinstance(part, mixer)]
        assert mixers
        for part in mixers:
            part.A_log.set_value(part.A_log.get_value() + jnp.log(2.0))

    error, _ = times_rounding(name, edit)
    assert error > 2 * TIMES_ROUNDING
