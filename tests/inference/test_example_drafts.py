"""The drafting layer of the example model: it loads as it is declared, and drafts well."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.given import EXAMPLE, EXAMPLE_REFERENCE, copy_with_config

import jax_nvfp4_moe as nvfp4

DRAFTS, NEW, ROWS = 3, 96, 8
# Tokens of a step with three drafts: the mean over 32 prompts of the held-out text, with 300 new
# tokens each in float32, and the standard deviation of a prompt.
MEASURED, DEVIATION = 3.10, 0.73
# Of 700 means of `ROWS` prompts, one is below three standard errors.
FLOOR = MEASURED - 3 * DEVIATION / ROWS**0.5


@pytest.mark.parametrize("scheme", [None, "checkpoint"])
@pytest.mark.parametrize("draft", [None, "mtp"])
def test_it_loads_without_a_warning(draft, scheme, caplog):
    model = nvfp4.load_model(EXAMPLE, draft=draft, scheme=scheme)
    assert [record.getMessage() for record in caplog.records] == []
    if draft == "mtp":
        assert model.drafter.layers[0].mlp.experts.scheme == model.layers[0].mlp.experts.scheme


def test_what_is_not_declared_is_said(tmp_path, caplog):
    """Without the list of modules in floats, there is a warning."""
    section = json.loads((EXAMPLE / "config.json").read_text())["quantization_config"]
    named = [name for name in section["ignore"] if not name.startswith("mtp.")]
    assert len(named) < len(section["ignore"])
    changed = section | {"ignore": named}
    folder = copy_with_config(EXAMPLE, tmp_path / "m", quantization_config=changed)
    (folder / "hf_quant_config.json").unlink()
    nvfp4.load_model(folder, draft="mtp")
    assert "'mtp.layers.0.self_attn.q_proj' is stored in floats but declared w4a4" in caplog.text


@functools.cache
def load(dtype):
    return nvfp4.load_model(EXAMPLE, draft="mtp", dtype=dtype)


@functools.cache
def prompts():
    """Return prompts from places all over the held-out text."""
    text = (EXAMPLE_REFERENCE / "heldout.txt").read_text(encoding="utf-8")
    ids = np.asarray(nvfp4.load_tokenizer(EXAMPLE).encode(text), np.int32)
    starts = np.linspace(4096, len(ids) - 65, ROWS).astype(int)
    return np.stack([ids[start : start + 64] for start in starts])


@functools.cache
def decode(dtype, draft=None):
    return generate(load(dtype), draft=draft)


def generate(model, **options):
    given = {"max_new_tokens": NEW, "stop_ids": (), "draft_tokens": DRAFTS, "stats": True}
    return jax.tree.map(np.asarray, nvfp4.generate(model, prompts(), **given, **options))


def tokens_a_step(stats):
    return float(((NEW - 1) / (stats.steps - 1)).mean())


def test_most_drafts_are_right():
    _, stats = decode("float32", "mtp")
    assert tokens_a_step(stats) > FLOOR
    # Each step yields one more token than it keeps drafts, unless the last draft ends the row.
    assert np.isin(stats.steps + stats.accepted - NEW, (0, 1)).all()


def test_a_layer_that_has_learned_nothing_is_below_the_floor():
    """The columns of the linear that joins a token and a vector are in another order."""
    model = nnx.clone(load("float32"))
    joint = model.drafter.joint.weight
    order = np.random.default_rng(0).permutation(joint.get_value().shape[1])
    joint.set_value(joint.get_value()[:, order])
    _, stats = generate(model, draft="mtp")
    assert 1 <= tokens_a_step(stats) < FLOOR


def test_tokens_are_those_without_drafts():
    np.testing.assert_array_equal(decode("float32", "mtp")[0], decode("float32")[0])


def test_in_the_default_dtype_every_token_is_the_likeliest_but_for_rounding():
    """No token has a smaller logit in float32 than rounding to bfloat16 explains."""
    new, stats = decode("bfloat16", "mtp")
    assert tokens_a_step(stats) > FLOOR
    exact, rounded = (every_logit(load(dtype), new) for dtype in ("float32", "bfloat16"))
    bound = 2 * np.abs(exact - rounded).max((1, 2))[:, None]
    assert (behind_the_largest(exact, new) <= bound).all()
    wrong = np.roll(new, 1, axis=1)
    assert (behind_the_largest(exact, wrong) > bound).mean() > 0.5


def every_logit(model, new):
    """Return the logits from which all new tokens were drawn."""
    ids = np.concatenate([prompts(), new[:, :-1]], axis=1)
    first = prompts().shape[1] - 1
    return np.asarray(jax.jit(lambda model, ids: model(ids)[:, first:])(model, jnp.asarray(ids)))


def behind_the_largest(logits, tokens):
    """Return how far the logit of each token is below the largest one."""
    return logits.max(-1) - np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
