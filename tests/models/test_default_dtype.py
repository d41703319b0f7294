"""Test each checkpoint as `load_model` gives it by default, in bfloat16, against float32.

The default model runs its kernels and a cache. The yardstick is the error that rounding explains:
that of the float32 model with the inputs and outputs of its modules rounded to bfloat16. That model
has no code of its own for bfloat16 (see `plain_rounding`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from given import CHECKPOINTS, MODELS, reference_tensors
from plain_rounding import followed_choices, own_choices, rounded_modules

from jax_nvfp4_moe import explain, load_model
from jax_nvfp4_moe.nn.experts import RoutedTokens
from jax_nvfp4_moe.nn.gated_delta_net import GatedDeltaNet
from jax_nvfp4_moe.nn.intermediates import capture
from jax_nvfp4_moe.nn.mamba2 import Mamba2

# Allowed ratio of the worst token's error to that of plain rounding, as in the tests of kernels.
TIMES_ROUNDING = 2
# Allowed share of expert choices that differ from those in float32. The largest share measured is
# 0.04, also with plain rounding.
SHARE_REPLACED = 0.1


@jax.jit
def run_float32(model, ids, choices, rounds):
    """Return logits, the choices of experts and keys, and which tokens' choices were replaced."""
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
    """Return logits and replaced choices of a prefill of `first` tokens and of the decode."""

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


def times_rounding(name, edit=lambda default: None):
    """Return the default model's worst error over that of plain rounding, and the share replaced.

    Args:
      name: name of the checkpoint.
      edit: function that changes the default model before it runs.
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
    """Prefill and decoding reach 0.8 to 1.4 times the error of plain rounding."""
    error, replaced = times_rounding(name)
    assert error <= TIMES_ROUNDING
    assert replaced <= SHARE_REPLACED


@pytest.mark.parametrize(
    ("name", "mixer"),
    [("nemotron_h-modelopt-w4a16", Mamba2), ("qwen3_next-modelopt-w4a16", GatedDeltaNet)],
)
def test_the_bound_catches_states_that_fade_faster(name, mixer):
    """Negative control: logarithms of decays are twice as large, in the bfloat16 model only."""

    def edit(default):
        mixers = [part for _, part in nnx.iter_modules(default) if isinstance(part, mixer)]
        assert mixers
        for part in mixers:
            part.A_log.set_value(part.A_log.get_value() + jnp.log(2.0))

    error, _ = times_rounding(name, edit)
    assert error > 2 * TIMES_ROUNDING
