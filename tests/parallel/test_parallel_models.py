"""Test whole models over a mesh of eight CPU devices: logits, decoding, trees and reads."""

import functools
import re
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from divided_attention import load_attention
from flax import nnx
from given import CHECKPOINTS, EXAMPLE
from host_devices import (
    BOUND,
    IDS,
    call,
    decode,
    describe,
    difference,
    differing_copies,
    make_mesh,
    over_shapes,
    run_counted,
    tokens,
)
from jax.sharding import AxisType
from synthetic_model import SIZES, write_model
from unquantized import dequantized

import jax_nvfp4_moe.parallel.experts
from jax_nvfp4_moe import generate, load_model, load_moe
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, open_tensors
from jax_nvfp4_moe.models import gpt_oss
from jax_nvfp4_moe.parallel import ExpertMesh

pytestmark = pytest.mark.eight_devices
REORDERED = 4e-6  # share of the largest logit: effect of another order of float32 sums
load = functools.partial(load_model, dtype=jnp.float32)
SMALL_IDS = IDS % SIZES.vocab
CUT_SYNTHETIC = {"all-reduce": 2 + 2 + 1, "all-gather": 1}


@pytest.mark.parametrize(
    ("folder", "shape", "scheme", "sent"),
    [
        pytest.param(
            CHECKPOINTS / "qwen3moe-modelopt-w4a16",
            (2, 4),
            None,
            {"all-reduce": 2 + 2 + 1, "all-gather": 1},
            id="qwen",
        ),
        pytest.param(
            CHECKPOINTS / "deepseekv3-modelopt-w4a4",
            (4, 2),
            "checkpoint",
            {"all-reduce": 2 + 3 + 3 + 1, "all-gather": 1},
            id="deepseek",
        ),
        # One layer has FP8 experts, and the other has NVFP4 experts.
        pytest.param(
            CHECKPOINTS / "qwen3_moe-ct-mixed", (8, 1), None, {"all-reduce": 2}, id="mixed"
        ),
        pytest.param(
            EXAMPLE, (4, 2), None, {"all-reduce": 5 + 5 + 1, "all-gather": 1}, id="example"
        ),
    ],
)
def test_checkpoints_over_a_mesh_equal_one_device(folder, shape, scheme, sent):
    """A mesh changes logits at most twice as much as the reference backend's order of sums does.

    That order changes them by 3e-7 to 1.8e-6 of the largest logit, and a mesh by 2e-7 to 9e-7.
    There is an all-reduce for each expert layer, and one for each attention and for the embedding
    if these are sharded. DeepSeek's dense layer and two shared experts are sharded too. The
    all-gather is for the logits.
    """
    expected = call(load(folder, scheme=scheme), IDS)
    reordered = difference(call(load(folder, scheme=scheme, backend="reference"), IDS), expected)
    assert reordered <= REORDERED
    found, counted = run_counted(load(folder, scheme=scheme, mesh=make_mesh(shape)), IDS)
    assert difference(found, expected) <= 2 * reordered
    assert counted == sent


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """Return the folder of a small random model with fewer key heads than four shards."""
    return write_model(tmp_path_factory.mktemp("synthetic"))


@functools.cache
def one_device(folder):
    return call(load(folder), SMALL_IDS)


@over_shapes
def test_a_model_runs_on_all_four_shapes(synthetic, shape):
    """Heads, dense parts and vocabulary are sharded if the mesh has shards along `tensor`."""
    eight = load(synthetic, mesh=make_mesh(shape, AxisType.Explicit))
    found, sent = run_counted(eight, SMALL_IDS)
    assert difference(found, one_device(synthetic)) <= BOUND
    assert sent == ({"all-reduce": 2} if shape == (8, 1) else CUT_SYNTHETIC)


def test_decoding_over_a_mesh(synthetic):
    """Four shards have two key heads, so pairs of shards keep the same head."""
    one, eight = load(synthetic), load(synthetic, mesh=make_mesh((2, 4), AxisType.Explicit))
    steps, _ = decode(one, SMALL_IDS, [11])
    found, cache = decode(eight, SMALL_IDS, [11])
    assert difference(found, steps) <= BOUND
    keys = cache.layers[0]["k"]
    assert keys.shape == (2, 4, 12, 16)
    assert tuple(keys.sharding.spec)[:2] == (None, "tensor")
    given = {"lengths": [4, 1], "max_new_tokens": 4}  # 5 of 64 padded tokens are true
    new = (generate(model, SMALL_IDS[:, :4], **given) for model in (one, eight))
    np.testing.assert_array_equal(*new)


@pytest.mark.parametrize(("rows", "shape"), [(2, (8, 1)), (3, (2, 2))], ids=["2 rows", "3 rows"])
def test_a_model_whose_tokens_are_exchanged(synthetic, rows, shape):
    """Tokens of prompts, a prefill and a step are exchanged; shards do not divide all of them.

    Each row has 12 tokens, which makes 24 or 36 in a prompt. Decoding takes 11 tokens of each row
    and then 1. The model has two expert layers.
    """
    ids = np.resize(SMALL_IDS, (rows, 12))
    one, eight = load(synthetic), load(synthetic, mesh=make_mesh(shape), dispatch="all_to_all")
    found, sent = run_counted(eight, ids)
    assert difference(found, call(one, ids)) <= BOUND
    assert sent["all-to-all"] == 2 * 2
    assert difference(decode(eight, ids, [11])[0], decode(one, ids, [11])[0]) <= BOUND


def test_one_block_whose_tokens_are_exchanged(synthetic):
    moe = load_moe(synthetic, 0, mesh=make_mesh((8, 1)), dispatch="all_to_all")
    assert moe.experts.options.dispatch == "all_to_all"


@pytest.fixture(scope="module")
def written(synthetic, tmp_path_factory):
    """Return a function from a model's name to its folder, which it writes once.

    One model has NVFP4 experts. The models with DeepSeek's attention are not quantized.
    """

    @functools.cache
    def write(name):
        if name == "nvfp4":
            return synthetic
        return dequantized(f"{name}-modelopt-w4a16", tmp_path_factory.mktemp(name))

    return write


@functools.cache
def tree_of_one_device(folder):
    return describe(load(folder))


@over_shapes
@pytest.mark.parametrize("name", ["nvfp4", "deepseek_v3-direct", "kimi_k2"])
def test_the_tree_of_a_model_does_not_depend_on_the_mesh(written, name, shape):
    """Paths and dtypes are those of one device. Devices with the same part hold equal bytes."""
    model = load(written(name), mesh=make_mesh(shape))
    assert describe(model) == tree_of_one_device(written(name))
    assert differing_copies(model) == []


def test_heads_with_sinks_and_biases():
    """The test runs the attention of gpt-oss alone. Its biases count once."""
    x, positions = tokens(6)[None], np.arange(6, dtype=np.int32)[None]

    def attend(expert_mesh):
        attention = load_attention(CHECKPOINTS / "gpt_oss-modelopt-w4a16", gpt_oss, expert_mesh)
        return call(attention, x, positions, None)[0]

    assert difference(attend(ExpertMesh(make_mesh((2, 2)))), attend(None)) <= BOUND


@functools.cache
def shared_experts_of_one_device():
    return call(load(CHECKPOINTS / "deepseekv3-modelopt-w4a4"), IDS)


@pytest.mark.parametrize(("dispatch", "rows"), [("psum", 24), ("all_to_all", 6)])
def test_shared_experts_run_where_their_tokens_are(dispatch, rows):
    """With all_to_all, each of four shards runs a quarter of the tokens, also in custom calls."""
    folder = CHECKPOINTS / "deepseekv3-modelopt-w4a4"
    eight = load(folder, mesh=make_mesh((4, 2)), dispatch=dispatch)
    compiled = call.lower(eight, IDS).compile()
    call_line = r"= \(f32\[(\d+),\d+\].* custom-call\(.*/shared_experts/"
    seen = set(map(int, re.findall(call_line, compiled.as_text())))
    assert difference(compiled(eight, IDS), shared_experts_of_one_device()) <= BOUND
    assert seen == {rows}


def test_a_model_goes_where_the_caller_says():
    """The default device belongs to the thread that sets it. Another thread reads the experts."""
    with jax.default_device(jax.devices()[3]):
        loaded = load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16")
    leaves = jax.tree.leaves(nnx.state(loaded))
    assert {device.id for leaf in leaves for device in leaf.devices()} == {3}


def test_a_shard_reads_its_own_experts_alone(synthetic):
    """Shard 3 of 8 reads only expert 3. Input scales, 4 bytes each, are not read in w4a16.

    The model loads as in a process that has only that device.
    """
    seen, sizes = set(), []
    into = Tensors.read_into

    def recorded(self, name, out, *rest):
        if found := re.search(r"experts\.(\d+)\.", name):
            seen.add(int(found.group(1)))
            sizes.append(out.nbytes)
        return into(self, name, out, *rest)

    def own_part(shape, sharding, part):
        """Read the part of device 3, and use zeros for parts that other processes would read."""
        own = sharding.devices_indices_map(tuple(shape))[jax.devices()[3]]
        kept = part(own)
        return jax.make_array_from_callback(
            tuple(shape), sharding, lambda index: kept if index == own else np.zeros_like(kept)
        )

    with (
        unittest.mock.patch.object(Tensors, "read_into", recorded),
        unittest.mock.patch.object(jax_nvfp4_moe.parallel.experts, "stack_parts", own_part),
    ):
        load_model(synthetic, mesh=make_mesh((8, 1)))
    with open_tensors(synthetic) as tensors:
        names = [name for name in tensors.names() if ".experts." in name]
        total = sum(tensors.info(name).nbytes for name in names)
    assert seen == {3}
    assert sum(sizes) <= total / 8
