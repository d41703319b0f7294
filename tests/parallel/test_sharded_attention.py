"""Attentions divided by heads: latent ones, Llama 4's, those normalized as a whole."""

import functools

import pytest
from host_devices import start
from sharded_attention import ATTENTIONS

pytestmark = pytest.mark.slow

# Sums of float32 in another order, up to four of them for each all-reduce; logits pass through
# some layers of that.
BOUND = 1e-6
# All-reduces: of attentions, experts, dense MLPs, the embedding, means of queries and keys; and of
# shared experts, which go with those of the experts where both are of the same devices.
SENT = {
    "latent": (2 + 1 + 1 + 1, 1),
    "direct": (2 + 2 + 0 + 1, 2),
    "llama4": (4 + 2 + 2 + 1, 2),
    "normalized": (2 + 2 + 0 + 1 + 2, 0),
    "minimax": (2 + 2 + 0 + 1 + 2, 0),
}
LATENT = {"q": 4, "kv_up": 4, "out": 4, "down.q_a": 1, "down.kv": 1, "q_norm": 1, "kv_norm": 1}
# Four shards of two key heads: a device has one of them.
GROUPED = {"qkv.q": 4, "qkv.k": 2, "qkv.v": 2, "out": 4}
SHARES = {
    # 24 rows of queries fill a tile of 16 and half of another.
    "latent-w4a16": LATENT | {"q": 96 / 32},
    "latent-biases": {"down.q": 96 / 32, "kv_up": 4, "out": 4, "down.kv": 1, "kv_norm": 1},
    "latent-w4a4": LATENT,
    "latent-fp8": LATENT | {"kv": 4},  # scales of keys and values
    "latent-fp8-weights": LATENT,
    "llama4-w4a16": GROUPED,
    "llama4-w4a4": GROUPED,
    "normalized-biases": GROUPED | {"q_norm": 4, "k_norm": 2},
    "normalized": GROUPED | {"q_norm": 4, "k_norm": 2},
}


@functools.cache
def figures(name):
    """Return the figures of one check, which takes a process of its own."""
    return start("sharded_attention.py", [name])[name]


@pytest.mark.parametrize("name", SENT)
def test_models_with_cut_heads_equal_one_device(name):
    """Logits, and over (2, 4) those of a prefill and one step; the gather is that of the logits."""
    found, (joint, shared) = figures(name), SENT[name]
    assert "2x4" in found
    for shape, (error, sent) in found.items():
        assert error <= BOUND
        reduced = joint if shape.startswith("1x") else joint + shared
        uncut = shape.endswith("x1")
        assert sent == ({"all-reduce": 1} if uncut else {"all-reduce": reduced, "all-gather": 1})


def test_a_latent_model_runs_on_all_four_shapes():
    """Over (8, 1) its one expert block alone is shared out."""
    assert list(figures("latent")) == ["8x1", "4x2", "2x4", "1x2"]


@pytest.mark.parametrize("case", ATTENTIONS)
def test_quantized_attentions_by_heads(case):
    """As their files quantize them, over four shards: prefill, one step, and the cache."""
    found = figures("attentions")[case]
    assert found["result"] <= BOUND
    assert found["cache"] <= BOUND


@pytest.mark.parametrize("case", ATTENTIONS)
def test_heads_out_of_place_are_seen(case):
    """Parts with another part's columns of the output, the negative control of the bound."""
    assert figures("attentions")[case]["control"] > 0.1


@pytest.mark.parametrize("case", ATTENTIONS)
def test_a_device_holds_its_own_heads(case):
    """One part in four of what heads have of their own, and a latent cache whole."""
    found = figures("attentions")[case]
    assert found["shares"] == SHARES[case]
    whole, part = found["cache_bytes"]
    assert whole == part * (1 if "latent" in case else 2)


def test_a_part_does_not_normalize_its_heads_alone():
    assert figures("unshared") > 1e-2
