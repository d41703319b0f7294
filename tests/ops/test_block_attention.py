"""Test attention to chosen blocks of keys, against attention with a plain mask in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.ops.block_attention import BlockChoice, block_attention
from jax_nvfp4_moe.ops.causal_attention import attention

BOUND = 1e-6  # float32 sums in another order


def draw(tokens, keys):
    """Return random operands: two rows, four query heads, two key heads."""
    shapes = (2, tokens, 4, 8), (2, 2, keys, 8), (2, 2, keys, 8), (2, tokens, 2, 4), (2, 1, keys, 4)
    each = zip(jax.random.split(jax.random.key(0), 5), shapes, strict=True)
    return [jax.random.normal(key, shape) for key, shape in each]


def by_hand(q, k, v, index_q, index_k, positions, choice):
    """Compute one query and key head after the other in float64."""
    q, k, v, index_q, index_k = (np.asarray(x, np.float64) for x in (q, k, v, index_q, index_k))
    y = np.zeros(q.shape)
    for b, t, m in np.ndindex(q.shape[0], q.shape[1], k.shape[1]):
        last = int(positions[b, t])
        scores = index_k[b, 0, : last + 1] @ index_q[b, t, m]
        own = last // choice.size
        best = [scores[n * choice.size :][: choice.size].max() for n in range(own + 1)]
        for n in range(max(own - choice.local + 1, 0), own + 1):
            best[n] = np.inf
        kept = np.argsort(best)[::-1][: choice.top]
        seen = np.isin(np.arange(last + 1) // choice.size, kept)
        for n in range(2 * m, 2 * m + 2):
            logits = np.where(seen, k[b, m, : last + 1] @ q[b, t, n] * 8**-0.5, -np.inf)
            weights = np.exp(logits - logits.max())
            y[b, t, n] = weights @ v[b, m, : last + 1] / weights.sum()
    return y


def test_each_key_head_chooses_its_blocks():
    """The last block of keys is cut short, and the cache has room behind the last query."""
    operands = draw(9, 17)
    positions = jnp.broadcast_to(jnp.arange(4, 13, dtype=jnp.int32)[None], (2, 9))
    choice = BlockChoice(size=3, top=3, local=2)
    run = jax.jit(lambda *operands: block_attention(*operands, choice=choice))
    expected = by_hand(*operands, positions, choice)
    np.testing.assert_allclose(run(*operands, positions), expected, atol=BOUND * 4)
    other = by_hand(*operands, positions, BlockChoice(size=3, top=3, local=1))
    assert np.abs(expected - other).max() > 0.1  # negative control: a local block less


def test_all_blocks_are_plain_attention():
    """More queries than one block of queries, with enough blocks for all keys."""
    q, k, v, *index = draw(140, 140)
    positions = jnp.broadcast_to(jnp.arange(140, dtype=jnp.int32)[None], (2, 140))
    found = block_attention(q, k, v, *index, positions, choice=BlockChoice(16, 9, 1))
    np.testing.assert_allclose(found, attention(q, k, v, positions), atol=BOUND * 4)
    fewer = block_attention(q, k, v, *index, positions, choice=BlockChoice(16, 8, 1))
    assert np.abs(fewer - found).max() > 0.01
