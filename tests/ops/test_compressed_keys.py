"""Test attention to near and compressed keys against a softmax over the keys of each query."""

import functools

import jax
import numpy as np
import pytest
from support.models.architecture import relative

from jax_nvfp4_moe.ops import chosen_keys
from jax_nvfp4_moe.ops.compressed_keys import attend_to_compressed

WINDOW, RATE = 3, 2


def draw():
    """Return queries, keys, the places of queries, visible compressed keys, chosen ones, sinks."""
    rng = np.random.default_rng(0)
    q, near, far, sinks = (
        rng.standard_normal(shape, np.float32)
        for shape in ((2, 5, 4, 8), (2, 9, 8), (2, 6, 8), (4,))
    )
    places = np.stack([np.arange(5), np.arange(5) + 4]).astype(np.int32)
    visible = np.minimum((places + 1) // RATE, 6).astype(np.int32)
    chosen = np.argsort(rng.uniform(size=(2, 5, 6)))[..., :4]
    return q, near, places, far, visible, chosen.astype(np.int32), sinks


def define(q, near, places, far, visible, chosen, sinks, window=WINDOW):
    y = np.zeros(q.shape)
    for row, token, head in np.ndindex(q.shape[:3]):
        place = places[row, token]
        ids = range(len(far[row])) if chosen is None else chosen[row, token]
        ids = [one for one in ids if one < visible[row, token]]
        keys = np.concatenate([near[row, max(place - window + 1, 0) : place + 1], far[row, ids]])
        scores = np.append(keys @ q[row, token, head] * 0.3, sinks[head]).astype(np.float64)
        shares = np.exp(scores - scores.max())
        y[row, token, head] = (shares / shares.sum())[:-1] @ keys
    return y


@pytest.mark.parametrize("together", [1, 100])
@pytest.mark.parametrize("chooses", [False, True])
def test_near_and_compressed_keys_share_one_softmax(monkeypatch, chooses, together):
    monkeypatch.setattr(chosen_keys, "_ELEMENTS", 2**26 if together > 1 else 1)
    given = list(draw())
    if not chooses:
        given[5] = None
    run = jax.jit(functools.partial(attend_to_compressed, window=WINDOW, scale=0.3))
    found = run(*given)
    assert relative(found, define(*given)) < 1e-6
    assert relative(found, define(*given, window=WINDOW + 1)) > 1e-2
