"""Test drafting layers: against transformers, in steps, in all formats, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.drafted import (
    drafting_reference,
    in_bfloat16,
    in_fp8,
    packed,
    stacked,
    write_drafted,
)
from support.files.drafting_tensors import DRAFTED
from support.models.architecture import relative

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.nn.experts.routed_experts import RoutedExperts
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.numerics.tensor import MoEParams

EXACT = {"scheme": "checkpoint", "dtype": jnp.float32, "backend": "reference"}
QWEN, GLM = "qwen3_next-modelopt-w4a16", "glm4_moe-groups-modelopt-w4a16"
NEMOTRON = "nemotron_h-latent-modelopt-w4a16"
# The logits agree to about 1e-6. With the two halves that are joined in the other order, or with
# vectors from before the last norm, they differ by more than 0.1.
BOUND, WRONG = 1e-5, 0.1


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function that writes a given checkpoint with drafting layers, and loads it."""

    def load(name, change=in_bfloat16, settings=EXACT, **options):
        folder = tmp_path_factory.mktemp("drafted") / "folder"
        return load_model(write_drafted(name, folder, change, **options), draft="mtp", **settings)

    return load


@jax.jit
def draft(model, hidden, ids):
    """Return the logits of all pairs of `ids`, of which `hidden` are the vectors."""
    cache = model.init_draft_cache(*ids.shape)
    logits, _, _ = model.draft(hidden[:, :-1], ids[:, 1:], cache)
    return logits


@jax.jit
def step(model, hidden, ids, cache, lengths=None, logits_at=None):
    """Return the results of one call of `draft`."""
    return model.draft(hidden, ids, cache, lengths=lengths, logits_at=logits_at)


@functools.partial(jax.jit, static_argnames="num_tokens")
def read(model, ids, cache=None, lengths=None, logits_at=None, num_tokens=None):
    """Return the results of one call of the model, with its vectors."""
    options = {"lengths": lengths, "logits_at": logits_at, "num_tokens": num_tokens}
    return model(ids, cache, with_hidden=True, **options)


@pytest.mark.parametrize("name", DRAFTED)
def test_draft_logits_are_those_of_transformers(name, load):
    ids, hidden, expected = drafting_reference(name)
    assert relative(draft(load(name), hidden, ids), expected) < BOUND


def test_the_order_of_joining_and_the_last_norm_matter(load):
    """The negative control: both mistakes are far beyond the bound."""
    ids, hidden, expected = drafting_reference(QWEN)
    model = load(QWEN)
    before = hidden / np.asarray(model.norm.weight[...])  # as of a model without weights in it
    assert relative(draft(model, before, ids), expected) > WRONG
    swapped = nnx.clone(model)
    halves = jnp.split(model.drafter.joint.weight[...], 2, axis=1)
    swapped.drafter.joint.weight[...] = jnp.concatenate(halves[::-1], axis=1)
    assert relative(draft(swapped, hidden, ids), expected) > WRONG


def test_the_model_returns_the_vectors_that_its_head_reads(load):
    ids, hidden, expected = drafting_reference(QWEN)
    model = load(QWEN)
    _, found = read(model, ids)
    assert relative(found, hidden) < BOUND
    assert relative(draft(model, found, ids), expected) < BOUND


def test_vectors_of_all_positions_come_with_logits_of_one(load):
    model, ids = load(GLM), jnp.asarray([[1, 2, 3, 4], [5, 6, 0, 0]])
    lengths, at = jnp.asarray([4, 2]), jnp.asarray([3, 1])
    logits, hidden = read(model, ids, lengths=lengths)
    cache = model.init_cache(2, 8)
    last, packed_hidden, cache = read(model, ids, cache, lengths, at, num_tokens=6)
    np.testing.assert_allclose(last[:, 0], logits[np.arange(2), at], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed_hidden[0], hidden[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed_hidden[1, :2], hidden[1, :2], rtol=1e-4, atol=1e-5)
    assert cache.lengths.tolist() == [4, 2]


@pytest.mark.parametrize("name", [QWEN, "deepseek_v32-modelopt-w4a16", NEMOTRON])
def test_steps_with_a_cache_draft_what_one_call_drafts(name, load):
    """The rows read different numbers of pairs, in steps of up to five pairs."""
    ids, hidden, _ = drafting_reference(name)
    model = load(name)
    ids, hidden = np.resize(ids, (2, 12)), np.resize(hidden, (2, 12, hidden.shape[-1]))
    hidden[1] += 0.25  # another row
    whole, vectors, _ = step(model, hidden, ids, model.init_draft_cache(2, 16))
    cache, read = model.init_draft_cache(2, 16), np.zeros(2, int)
    rows = np.arange(2)[:, None]
    for lengths in np.asarray([(5, 3), (1, 1), (1, 0), (4, 5)]):
        at = np.minimum(read[:, None] + np.arange(5), 11)
        logits, found, cache = step(model, hidden[rows, at], ids[rows, at], cache, lengths)
        for row, count in enumerate(lengths):
            past = slice(read[row], read[row] + count)
            np.testing.assert_allclose(logits[row, :count], whole[row, past], rtol=2e-4, atol=2e-5)
            np.testing.assert_allclose(found[row, :count], vectors[row, past], rtol=2e-4, atol=2e-5)
        read += lengths
        assert cache.lengths.tolist() == read.tolist()
    assert read.tolist() == [11, 9]


def test_logits_at_are_those_of_one_pair(load):
    ids, hidden, expected = drafting_reference(QWEN)
    model, at = load(QWEN), jnp.asarray([40])
    logits, vectors, _ = step(
        model, hidden[:, :-1], ids[:, 1:], model.init_draft_cache(1, 70), logits_at=at
    )
    assert logits.shape == (1, 1, 64)
    assert vectors.shape == hidden[:, :-1].shape
    assert relative(logits[:, 0], expected[:, 40]) < BOUND


def test_stacked_experts_in_bfloat16_draft_as_single_ones(load):
    ids, hidden, expected = drafting_reference(QWEN)
    model = load(QWEN, stacked)
    assert relative(draft(model, hidden, ids), expected) < BOUND


@pytest.mark.parametrize(
    ("change", "kinds", "stated"),
    [(packed, {"nvfp4"}, {}), (packed, {"nvfp4"}, {"excluded": True}), (in_fp8, {"fp8"}, {})],
)
def test_what_is_stored_decides_the_format(change, kinds, stated, load):
    """The list of exclusions is right about the drafting layers, wrong about them, or silent."""
    ids, hidden, _ = drafting_reference(GLM)
    model = load(GLM, lambda tensors: change(tensors)[0], **stated)
    meant = load(GLM, lambda tensors: change(tensors)[1])
    assert relative(draft(model, hidden, ids), draft(meant, hidden, ids)) < BOUND
    found = set()
    for _, module in nnx.iter_modules(model.drafter):
        if isinstance(module, RoutedExperts) and isinstance(module.params.get_value(), MoEParams):
            found.add("nvfp4")
        if isinstance(module, FP8Linear):
            found.add("fp8")
    assert found == kinds


def test_the_default_scheme_and_dtype_run_packed_and_stacked_drafters(load):
    """Against float32: bfloat16 has a relative precision of 0.004, through one layer."""
    for name, change in ((GLM, lambda tensors: packed(tensors)[0]), (QWEN, stacked)):
        ids, hidden, _ = drafting_reference(name)
        exact = draft(load(name, change), hidden, ids)
        plain = draft(load(name, change, settings={}), hidden, ids)
        assert plain.dtype == jnp.float32
        assert relative(plain, np.asarray(exact)) < 0.05
