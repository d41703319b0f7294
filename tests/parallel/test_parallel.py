"""Experts over a mesh of eight host devices, in one process of its own: `eight_devices.py`."""

import dataclasses

import eight_devices
import eight_devices_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from host_devices import BOUND, NAMES, SHAPES, start

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

REORDERED = 4e-6  # of the largest logit: another order of float32 sums in a whole model


@pytest.fixture(scope="module")
def figures():
    """Return name -> figures of every check."""
    scripts = eight_devices, eight_devices_models
    started = [start(f"{script.__name__}.py", script.CHECKS) for script in scripts]
    return started[0] | started[1]


@pytest.mark.parametrize("case", ["w4a16", "w4a4", "relu2", "swigluoai", "reference", "explicit"])
def test_a_block_over_a_mesh_equals_one_device(figures, case):
    """One all-reduce, and nothing else is sent."""
    for error, sent in figures["blocks"][case].values():
        assert error <= BOUND
        assert sent == {"all-reduce": 1}


def test_a_block_runs_on_all_four_shapes(figures):
    assert list(figures["blocks"]["w4a16"]) == NAMES


def test_sums_of_half_precision_are_float32(figures):
    """Outputs of shards are rounded to bfloat16 each, their sum once more: at most double."""
    one, eight = figures["half_precision"]
    assert 0 < eight <= 2 * one


def test_a_block_made_inside_jit(figures):
    assert figures["traced"] <= BOUND


def test_a_mesh_of_one_axis(figures):
    assert max(figures["one_axis"]) <= BOUND


def test_a_wrong_shard_is_seen(figures):
    """Ids that are one off, as a shard's that counts from a wrong expert, give this error."""
    assert figures["unshifted"] > 1e-2


def test_shards_are_prepared_for_their_own_number_of_experts(figures):
    runs_the_kernel, converts = figures["many_experts"]
    assert runs_the_kernel
    assert not converts


@pytest.mark.parametrize("name", ["qwen", "deepseek", "mixed", "example"])
def test_checkpoints_over_a_mesh_equal_one_device(figures, name):
    """A mesh changes logits as much as the reference backend's order of sums does, at most double.

    That order changes 3e-7 to 1.8e-6 of the largest logit, and a mesh 2e-7 to 9e-7.
    All-reduces: one of each expert layer; of each attention and the embedding if those are cut.
    DeepSeek's dense layer and two shared experts are cut too. The gather is that of the logits.
    """
    sent = {
        "qwen": {"all-reduce": 2 + 2 + 1, "all-gather": 1},
        "deepseek": {"all-reduce": 2 + 3 + 3 + 1, "all-gather": 1},
        "mixed": {"all-reduce": 2},
        "example": {"all-reduce": 5 + 5 + 1, "all-gather": 1},
    }
    reordered = figures[name]["reordered"]
    assert reordered <= REORDERED
    for error, found in figures[name]["meshes"].values():
        assert error <= 2 * reordered
        assert found == sent[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_runs_on_all_four_shapes(figures, name):
    error, sent = figures["synthetic"][name]
    assert error <= BOUND
    cut = {"all-reduce": 2 + 2 + 1, "all-gather": 1}
    assert sent == ({"all-reduce": 2} if name == "8x1" else cut)


@pytest.mark.parametrize("name", ["nvfp4", "deepseek_v3-direct", "kimi_k2"])
def test_the_tree_of_a_model_does_not_depend_on_the_mesh(figures, name):
    """Paths and dtypes are those of one device; devices that hold the same part agree on it."""
    for shape in SHAPES:
        same, differing = figures["trees"][f"{name} {shape}"]
        assert same
        assert differing == []


def test_heads_with_sinks_and_biases(figures):
    assert figures["sinks"] <= BOUND


def test_decoding_over_a_mesh(figures):
    """Four shards of two key heads: pairs of shards keep the same one."""
    assert figures["synthetic"]["same_tokens"]
    shape, sharding = figures["synthetic"]["cache"]
    assert shape == [2, 4, 12, 16]
    assert "PartitionSpec(None, 'tensor'" in sharding or "P(None, 'tensor'" in sharding


@pytest.mark.parametrize("rows", ["2 rows", "3 rows"])
def test_a_model_whose_tokens_are_exchanged(figures, rows):
    """Prompts, a prefill and a step, of tokens that shards divide and do not; two expert layers."""
    errors, sent = figures["exchanged_models"][rows]
    assert max(errors) <= BOUND
    assert sent == 2 * 2
    assert figures["exchanged_models"]["load_moe"] == "all_to_all"


@pytest.mark.parametrize(("dispatch", "rows"), [("psum", 24), ("all_to_all", 6)])
def test_shared_experts_run_where_their_tokens_are(figures, dispatch, rows):
    """Each of four shards has a quarter of them, in the custom calls of NVFP4 linears too."""
    error, seen = figures["shared_experts"][dispatch]
    assert error <= BOUND
    assert seen == [rows]


def test_a_model_goes_where_the_caller_says(figures):
    assert figures["elsewhere"] == [3]


def test_a_shard_reads_its_own_experts_alone(figures):
    """Shard 3 of 8 has expert 3; input scales, 4 bytes each, are not read in w4a16."""
    experts, share = figures["synthetic"]["read"]
    assert experts == [3]
    assert share <= 1 / 8


@pytest.mark.parametrize(
    ("case", "reduced"),
    [
        ("w4a16", 0),
        ("product", 1),
        ("w4a4", 1),
        ("w4a4 by slot", 0),
        ("w4a4_unit_scale", 0),
        ("w4a4_token_scale", 0),
    ],
)
def test_exchanged_tokens_equal_one_device(figures, case, reduced):
    """Rows go out and come back; rounds need one more all-reduce, of their number."""
    for (error, sent), rounds in zip(figures["dispatched"][case], (0, 1), strict=False):
        assert error <= BOUND
        reduces = {"all-reduce": reduced + rounds} if reduced + rounds else {}
        assert sent == {"all-to-all": 2} | reduces


def test_counts_of_tokens_that_shards_do_not_divide(figures):
    """The result cannot lie in equal parts, so that one gather makes it whole; or there is none."""
    for error, sent in figures["dispatched"]["uneven"]:
        assert error <= BOUND
        assert sent["all-gather"] == 1
    assert figures["dispatched"]["nothing"] == [[0.0, {}]]


@pytest.mark.parametrize("scheme", ["w4a4", "w4a4_unit_scale", "w4a4_token_scale"])
def test_rows_with_weights_on_the_input_are_quantized_once(figures, scheme):
    [[error, sent]] = figures["dispatched"][f"{scheme} on input"]
    assert error <= BOUND
    assert sent == {"all-to-all": 2}


def test_explicit_tokens_of_any_count(figures):
    """Cut as they came in, whether shards divide them or not."""
    assert {"(1,) ", "(5,) ", "(1, 5) ", "(3, 1) ", "(8, 3) expert"} < {*figures["explicit_tokens"]}
    for error, same in figures["explicit_tokens"].values():
        assert error <= BOUND
        assert same


def test_a_sum_of_explicit_tokens_that_are_cut(figures):
    error, spec = figures["explicit_sum"]
    assert error <= BOUND
    assert "expert" in spec


def test_gradients_over_a_mesh_equal_one_device(figures):
    """To tokens, weights and biases, with ids out of range; one device's are not zero.

    The bias of gate and up is put into the order of one device; that of down counts once.
    """
    assert len(figures["gradients"]) == 2 * 2 * 3
    for errors in figures["gradients"].values():
        assert len(errors) == 5
        assert max(errors) <= BOUND


def test_quantized_rows_are_a_quarter(figures):
    """8 rows of 64 values to each of 8 shards, 2 or 9 / 16 bytes each, and 8 for each of 4 ids.

    In words of 4 bytes, an even number of them.
    """
    assert figures["bytes_sent"]["w4a16"] == [f"8x8x{(2 * 64 + 4 * 8) // 4}"]
    assert figures["bytes_sent"]["w4a4_unit_scale"] == [f"8x8x{(64 * 9 // 16 + 4 * 8 + 4) // 4}"]


def test_a_ragged_exchange_lowers_for_a_gpu(figures):
    assert figures["ragged"] == ["ragged_all_to_all", "nvfp4_moe_w4a16_sm90", "ragged_all_to_all"]


def test_a_ragged_exchange_equals_all_to_all(figures):
    """To the bit, and in however many pieces; each case has some of them and one."""
    assert [name.rsplit(" ", 1)[1] for name in figures["ragged_numbers"]] == [
        "3",
        "1",
        "3",
        "1",
        "33",
        "1",
    ]
    assert set(figures["ragged_numbers"].values()) == {0.0}


@pytest.mark.parametrize(
    ("scheme", "top_k", "shards", "rounds", "codes", "by_slot"),
    [
        ("w4a16", 8, 64, True, False, False),
        ("w4a4_unit_scale", 8, 2, False, True, False),
        ("w4a4_token_scale", 8, 2, False, True, False),
        ("w4a4", 8, 2, False, False, False),
        ("w4a4", 8, 64, False, False, False),  # room for eight rows of each token
        ("w4a4", 1, 2, False, True, True),
        ("w4a4", 8, 4, True, False, False),
        ("w4a4", 8, 8, True, True, True),
    ],
)
def test_rows_go_in_the_fewest_bytes(scheme, top_k, shards, rounds, codes, by_slot):
    row = {"hidden": 7168, "top_k": top_k, "dtype": jnp.bfloat16}
    wire = choose_wire_format(Scheme(scheme), **row, shards=shards, rounds=rounds)
    assert (wire.scheme is not None, wire.by_slot) == (codes, by_slot)
    token_scale = 8 if scheme == "w4a4_token_scale" else 0  # 4, up to a multiple of 8
    sent = 7168 * 9 // 16 if codes else 7168 * 2
    assert wire.row_bytes(**row) == sent + 8 * (1 if by_slot else top_k) + token_scale
    block = {"hidden": 64, "top_k": 4, "dtype": jnp.float32}  # of `eight_devices.exchanged`
    assert choose_wire_format(Scheme.W4A4, **block, shards=8, rounds=True).by_slot


def test_rows_that_come_are_codes_as_sent():
    """By scales of their own, in float32: what is received quantizes to the same bits.

    A scale made of the largest value's product, an ulp off in some rows, would not give them.
    """
    x = jax.random.normal(jax.random.key(0), (3000, 64)) * jnp.linspace(0.1, 3, 3000)[:, None]
    ids, scheme = jnp.zeros((3000, 1), jnp.int32), Scheme.W4A4_TOKEN_SCALE
    rows = Rows(x, ids, ids, 1, WireFormat(scheme=scheme), None)
    decode = jax.vmap(rows._decoded, in_axes=None, axis_name="expert", axis_size=1)
    packed, block_scale, largest = sent = rows._encoded()
    again = dataclasses.replace(rows, x=decode(sent, ids)[0])._encoded()
    for before, after in zip(sent, again, strict=True):
        np.testing.assert_array_equal(before.view(jnp.uint8), after.view(jnp.uint8))
    scale = divide(largest, jnp.float32(SCALE_RANGE))
    product = dequantize(packed, decode_scale(block_scale) * scale[:, None])
    assert (amax(product, -1) != largest).any()


def test_ragged_pieces():
    """Of whole rows, an odd number, hundreds for all GPUs together; one where NCCL sends them."""
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
    """No mesh, no sharding, no collective in the program."""
    moe = NVFP4MoE(8, 64, 32, top_k=2, rngs=nnx.Rngs(0))
    text = jax.jit(lambda moe, x: moe(x)).lower(moe, jnp.zeros((3, 64))).as_text()
    assert "nvfp4_moe" in text
    assert not [word for word in ("sdy", "mesh", "shard", "all_reduce") if word in text]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("experts", "axis 'expert' of 3 does not divide num_experts = 16 .* 1, 2, 4, 8, 16"),
        ("blocks", "axis 'tensor' of 3 does not divide intermediate = 128 .* 16; .* 1, 2, 4, 8"),
        ("axes", "mesh: expected axes 'expert' and 'tensor'.* got {'data': 8}"),
        ("type", r"mesh: expected a jax.sharding.Mesh .* got list"),
        ("rows", "mesh: expected axis 'tensor' of 1 with w4a4_token_scale"),
        ("alternating", "takes gate and up rows that alternate"),
        ("context", "mesh: expected a call outside jax.set_mesh of Explicit axes"),
        ("exchange name", "dispatch: expected one of psum, all_to_all, ragged; got 'broadcast'"),
        ("exchange alone", "dispatch: expected a mesh .* with 'all_to_all'.* got no mesh"),
        ("exchange axes", "dispatch: expected a mesh with an axis 'expert' .* got axes {'tensor'"),
        ("exchange platform", "dispatch: expected GPUs with 'ragged', got CPUs"),
        ("checkpoint", "axis 'tensor' of 4 does not divide intermediate = 96 .* 1, 2, 3, 6"),
    ],
)
def test_refusals_name_what_is_legal(figures, case, message):
    with pytest.raises(ValueError, match=message):
        raise ValueError(figures["refusals"][case])


def test_divisors():
    assert divisors(96, 16) == [1, 2, 3, 6]
    assert divisors(100, 16) == []
    check_parts("tensor", 3, "intermediate", 96, 16)
    with pytest.raises(ValueError, match="legal sizes of 'tensor': none"):
        check_parts("tensor", 2, "intermediate", 100, 16)
