"""Test the scores of given tokens, and that a padded batch computes its true tokens alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS
from support.models.architecture import EACH_MIXER, KERNELS

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.models import scores
from jax_nvfp4_moe.models.loading import abstract_model
from jax_nvfp4_moe.models.scores import score_targets
from jax_nvfp4_moe.nn.experts.routed_experts import RoutedTokens
from jax_nvfp4_moe.nn.intermediates import capture
from jax_nvfp4_moe.testing import assert_as_accurate_as

QWEN = CHECKPOINTS / "qwen3moe-modelopt-w4a16"


def log_softmax(logits):
    """Return the log-probabilities of all tokens, in the dtype of `logits`."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def take(values, targets):
    return np.take_along_axis(values, targets[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("together", [1, 4, 10, 512])
def test_pieces_have_the_scores_of_all_logits(monkeypatch, together):
    """The ten tokens do not fill their last piece if four are scored together."""
    monkeypatch.setattr(scores, "_TOGETHER", together)
    rng = np.random.default_rng(0)
    x, head = rng.normal(size=(2, 5, 8)), 3 * rng.normal(size=(8, 11))
    logits = x @ head
    targets = np.where(np.arange(5) % 2, logits.argmax(-1), rng.integers(11, size=(2, 5)))
    x, head = np.float32(x), np.float32(head)
    found = score_targets(lambda x: x @ head, jnp.asarray(x), jnp.asarray(targets, jnp.int32))
    np.testing.assert_array_equal(found.likeliest, logits.argmax(-1) == targets)
    truth = take(log_softmax(np.float64(x) @ np.float64(head)), targets)
    assert_as_accurate_as(found.log_probability, take(log_softmax(x @ head), targets), truth)


def test_of_equal_logits_the_first_token_is_likeliest():
    targets = jnp.arange(3, dtype=jnp.int32)[None]
    found = score_targets(lambda x: jnp.zeros((*x.shape[:2], 3)), jnp.ones((1, 3, 2)), targets)
    np.testing.assert_array_equal(found.likeliest, [[True, False, False]])


@pytest.mark.parametrize("num_tokens", [None, 9])
def test_scores_of_a_model(num_tokens):
    """A padded batch with a cache, packed or not, has the scores of its logits."""
    model = load_model(QWEN, **KERNELS)
    rng, lengths = np.random.default_rng(0), np.array([6, 2], np.int32)
    ids, targets = rng.integers(model.config.vocab_size, size=(2, 2, 6), dtype=np.int32)
    how = {"lengths": lengths, "num_tokens": num_tokens}

    @jax.jit
    def run(model, ids, targets):
        found = model.score(ids, targets, model.init_cache(2, 8), **how)
        return found, model(ids, model.init_cache(2, 8), **how)

    (found, cache), (logits, expected) = run(model, ids, targets)
    true = np.arange(6) < lengths[:, None]
    plain = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    truth = take(log_softmax(np.float64(logits)), targets)
    assert_as_accurate_as(found.log_probability[true], plain[true], truth[true])
    likeliest = np.asarray(logits).argmax(-1) == targets
    np.testing.assert_array_equal(np.asarray(found.likeliest)[true], likeliest[true])
    jax.tree.map(np.testing.assert_array_equal, cache, expected)


def test_wrong_targets_are_refused():
    model, ids = load_model(QWEN, **KERNELS), np.ones((2, 4), np.int32)
    with pytest.raises(ValueError, match=r"targets: expected integers \(2, 4\).*int32 \(2, 3\)"):
        model.score(ids, ids[:, 1:])
    with pytest.raises(ValueError, match=r"targets: expected ids from 0 to .* got -1 to 1"):
        model.score(ids, np.where(np.arange(4) == 3, -1, ids))


@pytest.mark.parametrize("folder", EACH_MIXER)
def test_linears_and_experts_compute_true_tokens_alone(folder):
    """Prompts of unequal length cost their tokens: nothing else enters a linear or an expert.

    The latents that attention expands are left out: `LatentAttention` records them in rows.
    """
    model = abstract_model(CHECKPOINTS / folder).model

    def enter(model, ids, lengths, num_tokens):
        with capture(model) as seen:
            model(ids, model.init_cache(3, 16), lengths=lengths, num_tokens=num_tokens)
        values = [x for path, each in seen.items() if not path.endswith("kv_up") for x in each]
        return [x.x if isinstance(x, RoutedTokens) else x for x in values]

    def count_axes(num_tokens):
        args = jax.ShapeDtypeStruct((3, 9), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
        run = functools.partial(enter, num_tokens=num_tokens)
        return {x.shape[:-1] for x in jax.eval_shape(run, model, *args)}

    assert count_axes(13) == {(1, 13)}
    assert count_axes(None) == {(3, 9)}
