"""Attention, delta nets and Mamba-2 cut by heads over eight host devices: `sharded_mixers.py`."""

import itertools

import pytest
from host_devices import BOUND, NAMES, start
from sharded_mixers import CASES

from jax_nvfp4_moe.parallel.shard_spec import ShardSpec

pytestmark = pytest.mark.slow

# What each device holds whole: one number a matrix, what is added once, norms that heads share.
WHOLE = ("global_scale", "out.bias.value", "q_norm.weight.value", "k_norm.weight.value")
# One all-reduce of each mixer, dense part, shared expert and expert layer, and of the embedding.
# Where `tensor` is the whole mesh, experts and shared experts add up over the same devices, and
# XLA makes one of the two. On four shards the delta net of qwen3_5 is whole.
CUT = {
    "qwen3_next": {"4x2": 3 + 1 + 2 + 2 + 1, "2x4": 3 + 1 + 2 + 2 + 1, "1x2": 3 + 1 + 2 + 1},
    "qwen3_5": {"4x2": 2 + 2 + 2 + 1, "2x4": 1 + 2 + 2 + 1, "1x2": 2 + 2 + 1},
    "nemotron_h": {"4x2": 2 + 1 + 1 + 1 + 1, "2x4": 2 + 1 + 1 + 1 + 1, "1x2": 2 + 1 + 1 + 1},
}
EXPERT_LAYERS = {"qwen3_next": 2, "qwen3_5": 2, "nemotron_h": 1}


@pytest.fixture(scope="module")
def figures():
    """Return name -> figures of every model."""
    return start("sharded_mixers.py", CASES)


@pytest.mark.parametrize("shape", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_a_model_over_a_mesh_equals_one_device(figures, name, shape):
    error, sent = figures[name][shape]
    assert error <= BOUND
    if shape == "8x1":
        assert sent == {"all-reduce": EXPERT_LAYERS[name]}
    else:
        assert sent == {"all-reduce": CUT[name][shape], "all-gather": 1}


@pytest.mark.parametrize("name", CASES)
def test_decoding_with_cut_states(figures, name):
    """A prefill, one token and two more; states are cut by heads, keys held twice each.

    The two key heads of all models are shared by four shards, as is all of what stays whole.
    """
    assert figures[name]["decoding"] <= BOUND
    entries = figures[name]["cache"]
    assert len(entries) == 2 * (3 if name == "qwen3_next" else 2)
    recurrent = 1.0 if name == "qwen3_5" else 4.0
    for path, held in entries.items():
        assert held == (2.0 if path.endswith(("['k']", "['v']")) else recurrent)


@pytest.mark.parametrize("name", CASES)
def test_a_device_holds_its_part_of_a_mixer(figures, name):
    """A quarter of all on four shards, but half of what makes two key heads."""
    mixers = figures[name]["mixers"]
    assert len(mixers) == {"qwen3_next": 3, "qwen3_5": 1, "nemotron_h": 2}[name]
    for leaves in mixers.values():
        delta = ".A_log.value" in leaves and ".D.value" not in leaves  # Mamba-2 has a D
        for path, held in leaves.items():
            if path.endswith(WHOLE) or (delta and path == ".norm.value"):
                assert held == 1.0
            elif path.startswith((".qkv.k", ".qkv.v")):
                assert held == 2.0
            else:
                assert held == 4.0


def test_what_stays_whole_is_said(figures):
    assert [figures[name]["said"] for name in ("qwen3_next", "nemotron_h")] == [[], []]
    [line] = figures["qwen3_5"]["said"]
    assert "out_proj are whole on each of 4 shards" in line
    assert "2 key heads do not make 4 parts" in line


@pytest.mark.parametrize("name", CASES)
def test_channels_in_a_wrong_order_are_seen(figures, name):
    """Rows cut in one range, across the bounds of queries, keys and values, give this error."""
    assert figures[name]["unordered"] > 1e-2


@pytest.mark.parametrize("segments", [(1,), (8, 8, 24), (2, 2, 6)])
def test_parts_of_segments_are_all_of_an_axis_once(segments):
    """Segments are proportions: of rows, or of columns of which two lie in a byte."""
    split = ShardSpec("rows", 4, segments)
    parts = [[x for one in split.ranges(40, i) for x in range(40)[one]] for i in range(4)]
    assert sorted(itertools.chain(*parts)) == list(range(40))
    if len(segments) > 1:
        assert parts[1] == [2, 3, 10, 11, *range(22, 28)]
    else:
        assert parts[1] == list(range(10, 20))
