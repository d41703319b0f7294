"""Test whole models over a mesh of eight CPU devices: logits, decoding, trees and reads."""

import functools
import re
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from support.devices.divided_attention import load_attention
from support.devices.host_devices import (
    BOUND,
    IDS,
    call,
    collectives,
    decode,
    describe,
    difference,
    differing_copies,
    make_mesh,
    over_shapes,
    run_counted,
    tokens,
)
from support.files.given import CHECKPOINTS, EXAMPLE
from support.files.unquantized import dequantized
from support.models.synthetic_model import SIZES, write_model

import jax_nvfp4_moe.parallel.experts
from jax_nvfp4_moe import generate, load_model, load_moe
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, open_tensors
from jax_nvfp4_moe.models import gpt_oss
from jax_nvfp4_moe.parallel import ExpertMesh

pytestmark = pytest.mark.eight_devices
load = functools.partial(load_model, dtype=jnp.float32)
SMALL_IDS = IDS % SIZES.vocab
CUT_SYNTHETIC = {"all-reduce": 2 + 2 + 1, "all-gather": 1}


# Folder, mesh, scheme and collectives of each case.
FILES = {
    "qwen": (
        CHECKPOINTS / "qwen3moe-modelopt-w4a16",
        (2, 4),
        None,
        {"all-reduce": 2 + 2 + 1, "all-gather": 1},
    ),
    "deepseek": (
        CHECKPOINTS / "deepseekv3-modelopt-w4a4",
        (4, 2),
        "checkpoint",
        {"all-reduce": 2 + 3 + 3 + 1, "all-gather": 1},
    ),
    # One layer has FP8 experts, and the other has NVFP4 experts.
    "mixed": (CHECKPOINTS / "qwen3_moe-ct-mixed", (8, 1), None, {"all-reduce": 2}),
    "example": (EXAMPLE, (4, 2), None, {"all-reduce": 5 + 5 + 1, "all-gather": 1}),
}


# A mesh changes logits by 2e-7 to 9e-7 of the largest one, and the order of sums of the reference
# backend by 3e-7 to 1.2e-6.
LOGITS_BOUND = 2e-6


@functools.cache
def one_device_of(name, scheme):
    return call(load(FILES[name][0], scheme=scheme), IDS)


@functools.cache
def compiled_over_a_mesh(name, scheme, dispatch="psum"):
    """Return the logits over the mesh of a case, and the compiled program."""
    folder, shape, *_ = FILES[name]
    model = load(folder, scheme=scheme, mesh=make_mesh(shape), dispatch=dispatch)
    compiled = call.lower(model, IDS).compile()
    return compiled(model, IDS), compiled


@pytest.mark.parametrize("name", FILES)
def test_checkpoints_over_a_mesh_equal_one_device(name):
    """The logits agree, and only what is needed is sent.

    There is an all-reduce for each expert layer, and one for each attention and for the embedding
    if these are sharded. DeepSeek's dense layer and two shared experts are sharded too. The
    all-gather is for the logits.
    """
    *_, scheme, sent = FILES[name]
    found, compiled = compiled_over_a_mesh(name, scheme)
    assert difference(found, one_device_of(name, scheme)) <= LOGITS_BOUND
    assert collectives(compiled) == sent


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """Return the folder of a small random model with fewer key heads than four shards."""
    return write_model(tmp_path_factory.mktemp("synthetic"))


@functools.cache
def one_device(folder):
    """Return the logits of one device for whole prompts.

    Prefills and steps over a mesh are compared with them too, which saves programs of one device.
    """
    return call(load(folder), SMALL_IDS)


@over_shapes
def test_a_model_runs_on_all_four_shapes(synthetic, shape):
    """Heads, dense parts and vocabulary are sharded if the mesh has shards along `tensor`."""
    eight = load(synthetic, mesh=make_mesh(shape, AxisType.Explicit))
    found, sent = run_counted(eight, SMALL_IDS)
    assert difference(found, one_device(synthetic)) <= BOUND
    assert sent == ({"all-reduce": 2} if shape == (8, 1) else CUT_SYNTHETIC)


def test_decoding_over_a_mesh(synthetic):
    """Four shards have two key heads, so pairs of shards keep the same head.

    One device finds each generated token the likeliest one behind those before it.
    """
    eight = load(synthetic, mesh=make_mesh((2, 4), AxisType.Explicit))
    found, cache = decode(eight, SMALL_IDS, [11])
    assert difference(found, one_device(synthetic)) <= BOUND
    keys = cache.layers[0]["k"]
    assert keys.shape == (2, 4, 12, 16)
    assert tuple(keys.sharding.spec)[:2] == (None, "tensor")
    lengths = [4, 1]  # 5 of 64 padded tokens are true
    new = np.asarray(generate(eight, SMALL_IDS[:, :4], lengths=lengths, max_new_tokens=4))
    texts = SMALL_IDS.copy()
    for row, start in enumerate(lengths):
        texts[row, start : start + 4] = new[row]
    likeliest = np.asarray(call(load(synthetic), texts)).argmax(axis=-1)
    for row, start in enumerate(lengths):
        np.testing.assert_array_equal(new[row], likeliest[row, start - 1 : start + 3])


@pytest.mark.parametrize(
    ("rows", "shape", "cuts"),
    [(2, (8, 1), (11, 12)), (3, (2, 2), (10, 11))],
    ids=["2 rows", "3 rows"],
)
def test_a_model_whose_tokens_are_exchanged(synthetic, rows, shape, cuts):
    """Tokens of a prefill and a step are exchanged. Shards divide only the 30 of three rows.

    The others are 22, 2 and 3. A third row repeats the first. The model has two expert layers.
    """
    repeated = [0, 1, 0][:rows]
    ids, expected = SMALL_IDS[repeated], np.asarray(one_device(synthetic))[repeated, : cuts[1]]
    eight = load(synthetic, mesh=make_mesh(shape), dispatch="all_to_all")
    cache, pieces = eight.init_cache(rows, 12), []
    for piece in np.split(ids, cuts, axis=1)[:2]:
        (logits, cache), sent = run_counted(eight, piece, cache)
        assert sent["all-to-all"] == 2 * 2
        pieces.append(logits)
    assert difference(np.concatenate(pieces, axis=1), expected) <= BOUND


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


@pytest.mark.parametrize(
    ("scheme", "dispatch", "rows"), [("checkpoint", "psum", 24), ("w4a16", "all_to_all", 6)]
)
def test_shared_experts_run_where_their_tokens_are(scheme, dispatch, rows):
    """With all_to_all, each of four shards runs a quarter of the tokens, also in custom calls."""
    found, compiled = compiled_over_a_mesh("deepseek", scheme, dispatch)
    call_line = r"= \(f32\[(\d+),\d+\].* custom-call\(.*/shared_experts/"
    seen = set(map(int, re.findall(call_line, compiled.as_text())))
    assert difference(found, one_device_of("deepseek", scheme)) <= LOGITS_BOUND
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
    into = Tensors.read_bytes

    def recorded(self, name, view, *rest):
        if found := re.search(r"experts\.(\d+)\.", name):
            seen.add(int(found.group(1)))
            sizes.append(len(view))
        return into(self, name, view, *rest)

    def own_part(shape, sharding, part):
        """Read the part of device 3, and use zeros for parts that other processes would read."""
        own = sharding.devices_indices_map(tuple(shape))[jax.devices()[3]]
        kept = part(own)
        return jax.make_array_from_callback(
            tuple(shape), sharding, lambda index: kept if index == own else np.zeros_like(kept)
        )

    with (
        unittest.mock.patch.object(Tensors, "read_bytes", recorded),
        unittest.mock.patch.object(jax_nvfp4_moe.parallel.experts, "stack_parts", own_part),
    ):
        load_model(synthetic, mesh=make_mesh((8, 1)))
    with open_tensors(synthetic) as tensors:
        names = [name for name in tensors.names() if ".experts." in name]
        total = sum(tensors.info(name).nbytes for name in names)
    assert seen == {3}
    assert sum(sizes) <= total / 8
