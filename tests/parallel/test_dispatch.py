"""Test how tokens are dispatched: the format of rows, ragged pieces and legal options."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_nvfp4_moe import NVFP4MoE
from jax_nvfp4_moe.numerics.nvfp4 import SCALE_RANGE, amax, decode_scale, dequantize, divide
from jax_nvfp4_moe.parallel.dispatch import (
    Rows,
    WireFormat,
    _count_updates,
    _cut_rows,
    choose_wire_format,
)
from jax_nvfp4_moe.parallel.expert_mesh import check_parts, divisors
from jax_nvfp4_moe.scheme import Scheme


@pytest.mark.parametrize(
    ("scheme", "top_k", "shards", "rounds", "codes", "by_slot"),
    [
        ("w4a16", 8, 64, True, False, False),
        ("w4a4_unit_scale", 8, 2, False, True, False),
        ("w4a4_token_scale", 8, 2, False, True, False),
        ("w4a4", 8, 2, False, False, False),
        ("w4a4", 8, 64, False, False, False),  # a buffer with room for eight rows per token
        ("w4a4", 1, 2, False, True, True),
        ("w4a4", 8, 4, True, False, False),
        ("w4a4", 8, 8, True, True, True),
    ],
)
def test_rows_go_in_the_fewest_bytes(scheme, top_k, shards, rounds, codes, by_slot):
    row = {"hidden": 7168, "top_k": top_k, "dtype": jnp.bfloat16}
    wire = choose_wire_format(Scheme(scheme), **row, shards=shards, rounds=rounds)
    assert (wire.scheme is not None, wire.by_slot) == (codes, by_slot)
    token_scale = 8 if scheme == "w4a4_token_scale" else 0  # 4 bytes, rounded up to a multiple of 8
    sent = 7168 * 9 // 16 if codes else 7168 * 2
    assert wire.row_bytes(**row) == sent + 8 * (1 if by_slot else top_k) + token_scale
    block = {"hidden": 64, "top_k": 4, "dtype": jnp.float32}  # as in `test_dispatch_on_devices.py`
    assert choose_wire_format(Scheme.W4A4, **block, shards=8, rounds=True).by_slot


def test_rows_that_come_are_codes_as_sent():
    """Received rows quantize to the same bits, by the float32 maximum that is sent with each row.

    The maximum of the dequantized values would be an ulp off in some rows.
    """
    x = jax.random.normal(jax.random.key(0), (3000, 64)) * jnp.linspace(0.1, 3, 3000)[:, None]
    ids, scheme = jnp.zeros((3000, 1), jnp.int32), Scheme.W4A4_TOKEN_SCALE
    rows = Rows(x, ids, ids, 1, WireFormat(scheme=scheme), None, "expert")
    decode = jax.vmap(rows._decoded, in_axes=None, axis_name="expert", axis_size=1)
    packed, block_scale, largest = sent = rows._encoded()
    again = dataclasses.replace(rows, x=decode(sent, ids)[0])._encoded()
    for before, after in zip(sent, again, strict=True):
        np.testing.assert_array_equal(before.view(jnp.uint8), after.view(jnp.uint8))
    scale = divide(largest, jnp.float32(SCALE_RANGE))
    product = dequantize(packed, decode_scale(block_scale) * scale[:, None])
    assert (amax(product, -1) != largest).any()


def test_ragged_pieces():
    """Pieces have whole rows. Their number is odd within one process, and one where NCCL sends."""
    assert [_count_updates(2048, n, near=True) for n in (2, 4, 8)] == [257, 129, 65]
    assert _count_updates(4, 2, near=True) == 5
    assert _count_updates(2048, 16, near=True) == _count_updates(2048, 8, near=False) == 1
    starts, counts = jnp.asarray([3, 20]), jnp.asarray([7, 1])
    first, sizes = (cut.reshape(2, 3) for cut in _cut_rows(starts, counts, 3))
    np.testing.assert_array_equal(first, [[3, 5, 7], [20, 20, 20]])
    np.testing.assert_array_equal(sizes, [[2, 2, 3], [0, 0, 1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dispatch": "broadcast"}, "dispatch: expected one of psum, all_to_all, ragged; got"),
        ({"capacity": 4}, "capacity: expected None, .* got 4 with 'psum'"),
        ({"dispatch": "all_to_all", "capacity": 0}, "capacity: .* got 0 with 'all_to_all'"),
    ],
)
def test_exchanges_that_there_are_not(options, message):
    with pytest.raises(ValueError, match=message):
        NVFP4MoE(8, 64, 32, top_k=2, rngs=nnx.Rngs(0), **options)


def test_one_device_knows_nothing_of_meshes():
    """The program for one device has no mesh, no sharding and no collective."""
    moe = NVFP4MoE(8, 64, 32, top_k=2, rngs=nnx.Rngs(0))
    text = jax.jit(lambda moe, x: moe(x)).lower(moe, jnp.zeros((3, 64))).as_text()
    assert "nvfp4_moe" in text
    assert not [word for word in ("sdy", "mesh", "shard", "all_reduce") if word in text]


def test_divisors():
    assert divisors(96, 16) == [1, 2, 3, 6]
    assert divisors(100, 16) == []
    check_parts("tensor", 3, "intermediate", 96, 16)
    with pytest.raises(ValueError, match="legal sizes of 'tensor': none"):
        check_parts("tensor", 2, "intermediate", 100, 16)
