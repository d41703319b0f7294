"""Test compressed keys against their definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS
from support.models.architecture import EXACT, KERNELS, relative

from jax_nvfp4_moe import load_model

BOUND = 1e-5
run = jax.jit(lambda module, *args: module(*args))


FOLDER = CHECKPOINTS / "deepseek_v4-modelopt-w4a16"


@functools.cache
def load():
    return load_model(FOLDER, **EXACT)


def pool_of(kind):
    """Return a pool, whose windows have 2 tokens with overlap, or 5 without."""
    attention = load().layers[2 if kind == "heavy" else 1].attention
    return attention.indexer.pool if kind == "index" else attention.pool


def tokens(pool):
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 13, 64)))
    return x, np.broadcast_to(np.arange(13, dtype=np.int32), (2, 13))


def define(pool, x, gated=True, offset=0):
    """Return the compressed keys of one row ``[windows, d]``, by loops over tokens.

    Args:
      pool: the `KeyPool`.
      x: tokens ``[t, h]``.
      gated: whether gates weigh the tokens; if not, each has the same weight.
      offset: how many tokens windows begin too late.
    """
    rate, d = pool.sizes.rate, pool.sizes.head_dim
    values, gates = np.split(np.asarray(pool.projections(jnp.asarray(x)), np.float64), 2, axis=-1)
    bias, weight = (np.asarray(v.get_value(), np.float64) for v in (pool.bias, pool.norm.weight))
    angle = np.asarray(pool.sizes.rope.frequencies)
    found = []
    for window in range((len(x) - offset) // rate):
        parts = [(window, slice(d, None) if pool.sizes.overlaps else slice(None))]
        if pool.sizes.overlaps and window:
            parts.append((window - 1, slice(0, d)))
        at = [(offset + w * rate + s, s, half) for w, half in parts for s in range(rate)]
        scores = np.stack([gated * (gates[token] + bias[s])[half] for token, s, half in at])
        shares = np.exp(scores) / np.exp(scores).sum(axis=0)
        key = sum(
            share * values[token][half] for share, (token, _, half) in zip(shares, at, strict=True)
        )
        key = weight * key / np.sqrt(np.mean(key**2) + pool.sizes.eps)
        turned = key[d - 2 * len(angle) :: 2] + 1j * key[d - 2 * len(angle) + 1 :: 2]
        turned = turned * np.exp(1j * window * rate * angle)
        pairs = np.stack([turned.real, turned.imag], axis=-1).reshape(-1)
        found.append(np.concatenate([key[: d - 2 * len(angle)], pairs]))
    return np.stack(found)


@pytest.mark.parametrize("kind", ["sparse", "heavy", "index"])
def test_keys_of_windows(kind):
    """A last window that is not full has no key."""
    pool = pool_of(kind)
    x, positions = tokens(pool)
    keys, _ = run(pool, x, positions, None)
    for row in range(2):
        expected = define(pool, x[row])
        assert len(expected) == 13 // pool.sizes.rate
        assert relative(keys[row, : len(expected)], expected) < BOUND
        wrong = define(pool, x[row], gated=False)
        assert relative(keys[row, : len(wrong)], wrong) > 1000 * BOUND
        late = define(pool, x[row], offset=1)
        assert relative(keys[row, : len(late)], late) > 1000 * BOUND


def test_a_cache_of_keys_in_uneven_pieces():
    """Rows with other numbers of tokens in each piece have the keys of all their tokens.

    A row without tokens keeps its entries.
    """
    pool = pool_of("sparse")
    x, positions = tokens(pool)
    whole, _ = run(pool, x, positions, None)
    entries, read = pool.empty_cache(2, 13), np.zeros(2, np.int32)
    for counts in ((3, 0), (0, 4), (4, 1), (1, 4), (4, 3), (1, 1)):
        steps = np.arange(4, dtype=np.int32)[None]
        real = steps < np.asarray(counts)[:, None]
        at = np.where(real, read[:, None] + steps, 2**30 + steps).astype(np.int32)
        piece = np.take_along_axis(x, np.where(real, at, 0)[..., None], axis=1)
        keys, entries = run(pool, piece, at, entries)
        read += np.asarray(counts, np.int32)
    assert read.tolist() == [13, 13]
    assert keys.shape == (2, 6, 16)
    assert relative(keys, np.asarray(whole[:, :6])) < BOUND


@pytest.mark.parametrize("length", [2, 13])
def test_a_cache_keeps_no_more_tokens_than_it_may_hold(length):
    """The window of the layers is 3. Kernels of experts compile faster than the reference."""
    model = load_model(FOLDER, **KERNELS)
    ids = np.arange(length, dtype=np.int32)[None] + 3
    cache = model.init_cache(1, length)
    kept = {entries["tokens"].shape[1] for entries in cache.layers}
    assert kept == {min(length, model.layers[0].attention.config.window)}
    found = []
    for token in ids.T:
        logits, cache = run(model, token[:, None], cache)
        found.append(np.asarray(logits)[:, 0])
    whole = np.asarray(run(model, ids))
    assert relative(np.stack(found, axis=1), whole) < BOUND
