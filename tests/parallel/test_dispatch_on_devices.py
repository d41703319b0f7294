"""Test tokens exchanged between eight CPU devices: their results and their collectives."""

import functools
import re
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.devices.expert_block import block
from support.devices.host_devices import (
    BOUND,
    call,
    connected,
    difference,
    make_mesh,
    name_shape,
    run_counted,
    tokens,
)
from support.devices.ragged_emulation import emulate_ragged

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.nn.experts import routed_experts
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.parallel import ExpertMesh
from jax_nvfp4_moe.parallel.dispatch import _count_updates

pytestmark = pytest.mark.eight_devices


@functools.cache
def one_device(scheme):
    """Return the result of one device for 24 tokens, which does not depend on other tokens."""
    return np.asarray(call(block(scheme=scheme)(), tokens(24)))


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize(
    ("scheme", "shape", "reduced"),
    [("w4a16", (8, 1), 0), ("w4a16", (2, 2), 1), ("w4a4", (8, 1), 0)],
    ids=name_shape,
)
def test_exchanged_tokens_equal_one_device_in_rounds_too(scheme, shape, reduced, capacity):
    """Rows are sent out and back. Rounds of two rows need one more all-reduce, for their number.

    In such rounds over eight shards, w4a4 rows are sent as codes, once for each expert.
    """
    how = {"mesh": make_mesh(shape), "dispatch": "all_to_all", "capacity": capacity}
    found, sent = run_counted(block(scheme=scheme)(**how), tokens(24))
    assert difference(found, one_device(scheme)) <= BOUND
    reduces = reduced + (capacity is not None)
    assert sent == {"all-to-all": 2} | ({"all-reduce": reduces} if reduces else {})


@pytest.mark.parametrize(
    ("scheme", "shape", "reduced"),
    [("w4a4", (2, 2), 1), ("w4a4_unit_scale", (2, 1), 0), ("w4a4_token_scale", (2, 1), 0)],
    ids=name_shape,
)
def test_exchanged_tokens_equal_one_device(scheme, shape, reduced):
    eight = block(scheme=scheme)(mesh=make_mesh(shape), dispatch="all_to_all")
    found, sent = run_counted(eight, tokens(24))
    assert difference(found, one_device(scheme)) <= BOUND
    assert sent == {"all-to-all": 2} | ({"all-reduce": reduced} if reduced else {})


@pytest.mark.parametrize("capacity", [None, 2])
def test_a_count_of_tokens_that_shards_do_not_divide(capacity):
    """The result cannot be divided into equal parts, so one all-gather replicates it."""
    how = {"mesh": make_mesh((8, 1)), "dispatch": "all_to_all", "capacity": capacity}
    found, sent = run_counted(block()(**how), tokens(21))
    assert difference(found, one_device(None)[:21]) <= BOUND
    assert sent["all-gather"] == 1


@pytest.mark.parametrize("scheme", ["w4a16", "w4a4"])
@pytest.mark.parametrize(
    ("shape", "count", "sums"), [((8, 1), 24, 2), ((2, 2), 24, 2), ((2, 1), 1, 3), ((8, 1), 21, 2)]
)
def test_connected_gpus_share_few_tokens_by_sums(shape, count, sums, scheme):
    """Of the tokens with ids and weights, which XLA may join on CPUs, and of the results.

    With one token, XLA also replicates the result by a sum. It gathers other numbers of rows that
    shards do not divide.
    """
    eight = block(scheme=scheme)(mesh=connected(shape), dispatch="all_to_all")
    found, sent = run_counted(eight, tokens(count))
    assert difference(found, one_device(scheme)[:count]) <= BOUND
    assert sent == {"all-reduce": sums} | ({"all-gather": 1} if count == 21 else {})


def test_connected_gpus_exchange_many_tokens_as_others_do():
    many = 2 << 20 >> 8  # of 256 bytes, which is twice what GPUs add up through their memory
    eight = block()(mesh=connected((2, 1)), dispatch="all_to_all")
    given = jax.ShapeDtypeStruct((many, 64), jnp.float32)
    text = call.lower(eight, given).as_text()
    assert text.count('"stablehlo.all_to_all"') == 2


def test_gradients_through_few_tokens_are_those_of_one_device():
    def loss(x, module):
        return (module(x) ** 2).sum()

    one, eight = block()(), block()(mesh=connected((2, 1)), dispatch="all_to_all")
    x = tokens(6)
    found, expected = (jax.jit(jax.grad(loss))(jnp.asarray(x), module) for module in (eight, one))
    assert difference(found, expected) <= 10 * BOUND


def test_no_token_is_not_exchanged():
    eight = block()(mesh=make_mesh((2, 1)), dispatch="all_to_all")
    found, sent = run_counted(eight, tokens(0))
    assert found.shape == (0, 64)
    assert sent == {}


@pytest.mark.parametrize("scheme", ["w4a4", "w4a4_unit_scale", "w4a4_token_scale"])
def test_rows_with_weights_on_the_input_are_quantized_once(scheme):
    router = Router(4, score="sigmoid", weight_on_input=True)
    one, x = block(top_k=None, router=router, scheme=scheme), tokens(24)
    found, sent = run_counted(one(mesh=make_mesh((2, 1)), dispatch="all_to_all"), x)
    assert difference(found, call(one(), x)) <= BOUND
    assert sent == {"all-to-all": 2}


# The leading axes of tokens, and the mesh axis along which the tokens are sharded.
EXPLICIT = [((1,), None), ((5,), None), ((1, 5), None), ((3, 1), None), ((3, 8), None)]
EXPLICIT += [(lead, axis) for lead in ((8, 3), (24,)) for axis in (None, "expert")]


@functools.cache
def explicit_block():
    return block()(mesh=make_mesh((8, 1), AxisType.Explicit), dispatch="all_to_all")


@pytest.mark.parametrize(("lead", "axis"), EXPLICIT, ids=name_shape)
def test_explicit_tokens_of_any_count(lead, axis):
    """The result is sharded as the tokens are, whether or not shards divide their number."""
    count = np.prod(lead)
    x = tokens(count).reshape(*lead, 64)
    mesh = make_mesh((8, 1), AxisType.Explicit)
    given = jax.device_put(x, NamedSharding(mesh, PartitionSpec(axis)))
    found = call(explicit_block(), given)
    assert difference(found, one_device(None)[:count].reshape(x.shape)) <= BOUND
    assert found.sharding.is_equivalent_to(given.sharding, x.ndim)


def test_explicit_axes_and_tokens_of_no_mesh():
    assert difference(call(explicit_block(), tokens(24)), one_device(None)) <= BOUND


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("w4a16", (2 * 64 + 4 * 8) // 4),
        ("w4a4_unit_scale", (64 * 9 // 16 + 4 * 8 + 4) // 4),
    ],
)
def test_quantized_rows_are_a_quarter(scheme, words):
    """Each of 8 shards gets 8 rows of 64 values with 4 ids and weights.

    A value takes 2 or 9 / 16 bytes, and an id with its weight 8 bytes. A row takes an even number
    of words of 4 bytes.
    """
    make = block(scheme=scheme, dtype=jnp.bfloat16)
    text = call.lower(make(mesh=make_mesh((8, 1)), dispatch="all_to_all"), tokens(64)).as_text()
    assert re.findall(r"all_to_all.*-> tensor<([0-9x]+)xui32>", text) == [f"8x8x{words}"]


def test_a_ragged_exchange_lowers_for_a_gpu():
    """The test finds the collectives by name in the program, because a CPU cannot run it."""
    eight = block(target=Target("cuda", (9, 0)))(mesh=make_mesh((8, 1)), dispatch="ragged")
    text = call.trace(eight, tokens(64)).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"custom_call @(ragged_all_to_all|nvfp4_moe_w4a16_sm90)", text)
    assert found == ["ragged_all_to_all", "nvfp4_moe_w4a16_sm90", "ragged_all_to_all"]


@pytest.mark.parametrize(
    ("scheme", "shape", "count", "near", "pieces"),
    [
        ("w4a16", (8, 1), 24, True, 3),
        ("w4a16", (8, 1), 24, False, 1),
        ("w4a4", (2, 1), 5, True, 3),
        ("w4a4", (2, 1), 5, False, 1),
        ("w4a4_token_scale", (2, 1), 24, True, 13),
        ("w4a4_token_scale", (2, 1), 24, False, 1),
    ],
    ids=name_shape,
)
def test_a_ragged_exchange_equals_all_to_all(scheme, shape, count, near, pieces, monkeypatch):
    """Results are equal bit for bit, in several pieces within a process, otherwise in one.

    A CPU has no `ragged_all_to_all`. The emulation follows XLA's documentation.
    """
    x, one = tokens(count), block(scheme=scheme)
    expected = call(one(mesh=make_mesh(shape), dispatch="all_to_all"), x)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulate_ragged)
    monkeypatch.setattr(routed_experts, "check_platform", lambda *_: None)
    with unittest.mock.patch.object(ExpertMesh, "in_one_process", return_value=near):
        # The function is new, because JAX would reuse the trace with the other number of pieces.
        found = jax.jit(lambda m, x: m(x))(one(mesh=make_mesh(shape), dispatch="ragged"), x)
    assert _count_updates(-(-count // shape[0]), shape[0], near) == pieces
    np.testing.assert_array_equal(found, expected)
