"""Test the order of entries on a mesh: what each shard holds, and the way back."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ops.numpy_weights import random_experts

from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts, NVFP4Tensor, quantize
from jax_nvfp4_moe.parallel import shard_order
from jax_nvfp4_moe.parallel.shard_spec import ShardLayout, ShardSpec, array_layouts

PARAMS = random_experts(0, 3, 80, 96)
to_shards = jax.jit(shard_order.to_shards, static_argnums=(1, 2))
to_one_device = jax.jit(shard_order.to_one_device, static_argnums=1)
HALVES = ShardLayout("rows", ((48, 2), (48, 2)), 2)  # gate and up rows of two shards


@functools.partial(jax.jit, static_argnums=1)
def to_layout(tensor, name):
    return tensor.to_layout(name)


def same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("layout", ["canonical", "cpu_16x16", "mma_64x64", "fp4_64x64"])
def test_each_shard_has_the_layout_of_its_own_sizes(layout):
    """Some layouts pad the 48 columns of a shard to 64."""
    names = jax.eval_shape(lambda: PARAMS.to_layout(layout)).gate_up.layout, layout
    sharded = to_shards(PARAMS, HALVES, names)
    rows = np.r_[48:96, 144:192]  # of shard 1
    gate_up, down = jax.tree.map(np.asarray, (PARAMS.gate_up, PARAMS.down))
    own = [
        (gate_up.packed[:, rows], gate_up.block_scale[:, rows]),
        (down.packed[..., 24:], down.block_scale[..., 3:]),
    ]
    scales = gate_up.global_scale, down.global_scale
    for (packed, block_scale), scale, name, axis, tensor in zip(
        own, scales, names, (1, 2), (sharded.gate_up, sharded.down), strict=True
    ):
        wanted = to_layout(NVFP4Tensor(packed, block_scale, scale), name)
        assert (tensor.rows, tensor.columns) == (wanted.rows, wanted.columns)
        for array, part in (
            (tensor.packed, wanted.packed),
            (tensor.block_scale, wanted.block_scale),
        ):
            shard = np.split(np.asarray(array), 2, axis)[1]
            np.testing.assert_array_equal(shard, np.asarray(part))
    same(to_one_device(sharded, HALVES), PARAMS)


def test_segments_that_shards_share():
    """Each of four shards has its queries, pairs share half of the keys, and all share a bias."""
    layout = ShardLayout("rows", ((2, 4), (3, 2), (1, 1)), 4)
    rows = np.arange(8 + 6 + 1)
    sharded = to_shards(rows, layout, ())
    np.testing.assert_array_equal(
        sharded.reshape(4, 6),
        [
            [0, 1, 8, 9, 10, 14],
            [2, 3, 8, 9, 10, 14],
            [4, 5, 11, 12, 13, 14],
            [6, 7, 11, 12, 13, 14],
        ],
    )
    np.testing.assert_array_equal(to_one_device(sharded, layout), rows)


def test_gradients_and_the_sign_of_zero():
    """Each entry has the sum of the weights of its copies. A way back has those of the first."""
    layout = ShardLayout("rows", ((2, 4), (3, 2), (1, 1)), 4)
    rows = np.arange(15, dtype=np.float32)
    rows[0] = -0.0
    copies = to_shards(np.arange(15), layout, ())
    weights = np.arange(1, 25, dtype=np.float32)
    wanted = np.zeros(15, np.float32)
    np.add.at(wanted, np.asarray(copies), weights)
    sharded, gradient = jax.vjp(lambda rows: to_shards(rows, layout, ()), rows)
    assert np.signbit(np.asarray(sharded)[0])
    np.testing.assert_array_equal(gradient(weights)[0], wanted)
    joined, gradient = jax.vjp(lambda sharded: to_one_device(sharded, layout), sharded)
    assert np.asarray(joined).tobytes() == np.asarray(rows).tobytes()
    first = np.unique(np.asarray(copies), return_index=True)[1]
    np.testing.assert_array_equal(np.flatnonzero(gradient(weights[:15])[0]), np.sort(first))


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_columns_of_a_tensor():
    tensor = quantize(normal(32, 64))
    layout = ShardLayout("columns", ((16, 4),), 4)
    sharded = to_shards(tensor, layout, ("mma_64x64",))
    assert (sharded.rows, sharded.columns) == (32, 16)
    same(to_one_device(sharded, layout), tensor)


@pytest.mark.parametrize("divisors", [False, True])
def test_global_scales_of_rows_move_with_their_rows(divisors):
    """Joined queries and keys have a global scale for each row. Shards share the keys."""
    tensor = quantize(normal(24, 32))
    scales = np.arange(1.0, 25.0, dtype=np.float32)
    joined = dataclasses.replace(
        tensor, global_scale=scales, global_divisor=1 / scales if divisors else None
    )
    layout = ShardLayout("rows", ((8, 2), (8, 1)), 2)
    sharded = to_shards(joined, layout, ("mma_64x64",))
    order = np.r_[0:8, 16:24, 8:16, 16:24]
    np.testing.assert_array_equal(sharded.global_scale, scales[order])
    same(to_one_device(sharded, layout), joined)
    axes = [layout.axis for layout in jax.tree.leaves(array_layouts(joined, layout))]
    assert axes == [0] * (4 if divisors else 3)


def test_experts_in_fp8():
    """Scales of gate and up rows move with their rows. Scales of down belong to all shards."""

    def matrices(n, k):
        values = np.arange(2 * n * k, dtype=np.float32).reshape(2, n, k) % 240
        scale = np.arange(2 * n, dtype=np.float32).reshape(2, n)
        return FP8Tensor(values.astype(jnp.float8_e4m3fn), scale)

    bias = np.arange(32, dtype=np.float32).reshape(2, 16)
    experts = DenseExperts(matrices(16, 4), matrices(4, 8), bias)
    layout = ShardLayout("rows", ((4, 2), (4, 2)), 2)
    sharded = to_shards(experts, layout, ())
    order = np.r_[0:4, 8:12, 4:8, 12:16]
    np.testing.assert_array_equal(sharded.gate_up.scale, experts.gate_up.scale[:, order])
    np.testing.assert_array_equal(sharded.gate_up_bias, experts.gate_up_bias[:, order])
    np.testing.assert_array_equal(sharded.down.scale, experts.down.scale)
    same(to_one_device(sharded, layout), experts)
    axes = [layout.axis for layout in jax.tree.leaves(array_layouts(experts, layout))]
    assert axes == [1, 1, 2, None, 1]


def test_segments_that_do_not_divide():
    layout = ShardLayout("rows", ((3, 2),), 2)
    with pytest.raises(ValueError, match="segments: expected segments that divide an axis of 7"):
        to_shards(jnp.zeros(7), layout, ())
    with pytest.raises(ValueError, match="array: expected a shape that"):
        to_one_device(jnp.zeros(7), layout)


@pytest.mark.parametrize("segments", [(1,), (8, 8, 24), (2, 2, 6)])
def test_parts_of_segments_are_all_of_an_axis_once(segments):
    """Segments are proportions, of rows or of columns that are stored two to a byte."""
    split = ShardSpec("rows", 4, segments)
    parts = [[x for one in split.ranges(40, i) for x in range(40)[one]] for i in range(4)]
    assert sorted(itertools.chain(*parts)) == list(range(40))
    if len(segments) > 1:
        assert parts[1] == [2, 3, 10, 11, *range(22, 28)]
    else:
        assert parts[1] == list(range(10, 20))
