"""Test latent attention to many keys, which it expands for one group of heads after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.devices.divided_attention import load_attention
from support.files.given import CHECKPOINTS

from jax_nvfp4_moe.models import deepseek_v3
from jax_nvfp4_moe.nn.attention import latent_attention
from jax_nvfp4_moe.nn.attention.latent_attention import LatentAttention

TOKENS, ROOM = 48, 64


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """The attention is that of a CPU, also on a machine with a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="module")
def attention(on_cpu):
    return load_attention(CHECKPOINTS / "deepseek_v3-direct-modelopt-w4a16", deepseek_v3, None)


def program(attention):
    """Return the compiled attention of 48 tokens with a cache, and its operands."""
    x = jax.random.normal(jax.random.key(0), (1, TOKENS, attention.config.hidden))
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    operands = attention, x, positions, attention.init_cache(1, ROOM)
    # A function of its own for each bound, because `jit` remembers what it has traced.
    run = jax.jit(lambda attention, *tokens: attention(*tokens))
    return run.lower(*operands).compile(), operands


def difference(actual, expected):
    return float(jnp.abs(actual - expected).max() / jnp.abs(expected).max())


def test_groups_of_heads_compute_the_same(attention, monkeypatch):
    """At most twice what the other form changes, which sums in another order."""
    assert not attention._absorbs(TOKENS, ROOM)
    whole, operands = program(attention)
    y, entries = whole(*operands)
    with monkeypatch.context() as patch:
        patch.setattr(LatentAttention, "_absorbs", lambda *_: True)
        bound = 2 * difference(program(attention)[0](*operands)[0], y)
    monkeypatch.setattr(latent_attention, "_EXPANDED_BYTES", 1)
    assert attention._head_groups(entries["latent"]) == attention.config.num_heads > 1
    parts, _ = program(attention)
    found, others = parts(*operands)
    assert parts.memory_analysis().temp_size_in_bytes < whole.memory_analysis().temp_size_in_bytes
    np.testing.assert_array_equal(others["latent"], entries["latent"])
    assert difference(found, y) <= bound < 1e-4
    # A negative control: one token is off by a thousandth.
    wrong = (attention, operands[1].at[:, 7].multiply(1.001), *operands[2:])
    assert difference(parts(*wrong)[0], y) > bound


@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (2, 2), (1, 4)])
def test_the_bound_decides_how_many_groups_there_are(attention, heads, groups, monkeypatch):
    config = attention.config
    seen = attention.init_cache(1, ROOM)["latent"]
    width = 2 * config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    each = ROOM * width * seen.dtype.itemsize
    monkeypatch.setattr(latent_attention, "_EXPANDED_BYTES", heads * each)
    assert config.num_heads == 4
    assert attention._head_groups(seen) == groups
