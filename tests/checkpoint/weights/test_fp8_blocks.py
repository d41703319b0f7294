"""Test FP8 with one scale per block, as DeepSeek, ModelOpt and compressed-tensors store it."""

import json
import logging
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.devices.host_devices import call, difference, make_mesh
from support.files.checkpoint_edits import (
    W4A16,
    check,
    edited,
    load,
    problems_of,
    read_all,
    tool_weight,
)
from support.files.given import CHECKPOINTS
from support.models.architecture import KERNELS

from jax_nvfp4_moe import CheckpointError, Target, explain, load_model, ops, restore, save
from jax_nvfp4_moe.checkpoint import LoadOptions, WeightTable, open_checkpoint
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, read_header
from jax_nvfp4_moe.checkpoint.values import LinearWeights
from jax_nvfp4_moe.cli.inspection import inspect, mebibytes
from jax_nvfp4_moe.inference import generation
from jax_nvfp4_moe.models.decoder import _score
from jax_nvfp4_moe.models.loading import find_model
from jax_nvfp4_moe.nn.attention.indexer import Indexer
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.nn.building.sharding import say_replicated
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.linear.merged_linear import find_runs, join_weights
from jax_nvfp4_moe.numerics import fp8_blocks
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec, take_shard
from jax_nvfp4_moe.scheme import FP8ActivationScaling, Scheme
from jax_nvfp4_moe.testing import assert_as_accurate_as

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
BLOCK_WEIGHTS = {
    "type": "float",
    "num_bits": 8,
    "strategy": "block",
    "block_structure": [128, 128],
    "symmetric": True,
}
GROUP_INPUTS = {"type": "float", "num_bits": 8, "strategy": "group", "dynamic": True}
LINEARS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "a": {
            "targets": ["Linear"],
            "weights": BLOCK_WEIGHTS,
            "input_activations": GROUP_INPUTS | {"group_size": 128},
        }
    },
}
# Each format holds the quantization config of config.json, the suffix of the scales' names, and how
# the scales are stored.
FORMATS = {
    "deepseek": (DEEPSEEK, "weight_scale_inv", "grid"),
    "deepseek_v4": (DEEPSEEK | {"scale_fmt": "ue8m0"}, "scale", "e8m0"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "weight_scale", "axes"),
    "modelopt_inv": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        "weight_scale_inv",
        "grid",
    ),
    "compressed-tensors": (LINEARS, "weight_scale", "bf16"),
    "mxfp8": ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "weight_scale", "mx"),
}


def stored(case):
    path, problems = CHECKPOINTS / "fp8-blocks" / "values.safetensors", []
    with Tensors({path.name: path}, read_header(path, path.name, problems)) as tensors:
        names = ("weight", "scale", "float32", "bfloat16")
        return [tensors.read(f"{case}.{name}") for name in names]


@pytest.mark.parametrize("case", ["float32", "e8m0", "mxfp8"])
def test_values_are_those_of_transformers(case):
    values, scales, *made = stored(case)
    block = fp8_blocks.MX if case == "mxfp8" else fp8_blocks.SQUARE
    assert scales.shape == fp8_blocks.grid_shape(*values.shape, block)
    for expected in made:
        found = fp8_blocks.dequantize(
            values, fp8_blocks.decode_scales(scales), block, expected.dtype
        )
        step = len(found) // len(expected)
        np.testing.assert_array_equal(found[::step], expected)
        if case != "mxfp8":
            each_row = np.repeat(fp8_blocks.decode_scales(scales), 128, axis=0)
            kept = FP8Tensor(jnp.asarray(values), jnp.asarray(each_row)).dequantize(expected.dtype)
            np.testing.assert_array_equal(kept[::step], expected)


def draw(n, k, how, seed=0):
    """Return values and scales as a file stores them, and the float32 weight that they mean."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(-448, 448, (n, k)).astype(E4M3)
    block = (1, 32) if how == "mx" else (128, 128)
    shape = -(-n // block[0]), -(-k // block[1])
    scales = rng.uniform(1e-4, 1e-2, shape).astype(np.float32)
    if how in ("mx", "e8m0"):
        powers = rng.integers(110, 125, shape, np.uint8)
        scales = 2.0 ** (powers.astype(np.float32) - 127)
    elif how == "bf16":
        scales = scales.astype(ml_dtypes.bfloat16).astype(np.float32)
    row, column = np.indices((n, k))
    weight = values.astype(np.float32) * scales[row // block[0], column // block[1]]
    kept = {
        "mx": lambda: powers,
        "e8m0": lambda: powers.view(E8M0),
        "axes": lambda: scales[:, None, :, None],
        "bf16": lambda: scales.astype(ml_dtypes.bfloat16),
        "grid": lambda: scales,
    }
    return values, kept[how](), weight


def write(folder, tensors, section):
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    return folder


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_keeps_its_values(tmp_path, name, dtype):
    """Square blocks stay in FP8, and MXFP8 is decoded. A router is decoded in any case.

    With 160 rows and 192 columns, the last blocks of 128 x 128 are partial.
    """
    section, scale, how = FORMATS[name]
    values, scales, weight = draw(160, 192, how)
    tensors = {"x.weight": values, f"x.{scale}": scales}
    with open_checkpoint(write(tmp_path / "m", tensors, section)) as checkpoint:
        options = LoadOptions(dtype=dtype)
        found = load(checkpoint, lambda w: w.linear("x", 160, 192), options)
        decoded = load(checkpoint, lambda w: w.array("x.weight", (160, 192)), options)
    expected = weight.astype(dtype)
    np.testing.assert_array_equal(np.asarray(decoded), expected)
    if name == "mxfp8":
        assert found.checkpoint_scheme is None
        np.testing.assert_array_equal(np.asarray(found.weight), expected)
        return
    assert found.checkpoint_scheme is FP8ActivationScaling.WEIGHTS
    assert (found.weight.scale.shape, found.weight.scale.dtype) == ((160, 2), np.float32)
    assert np.asarray(found.weight.values).tobytes() == values.tobytes()
    np.testing.assert_array_equal(np.asarray(found.weight.dequantize(dtype)), expected)


@pytest.mark.parametrize("name", ["deepseek", "mxfp8"])
def test_experts_one_by_one_are_decoded(tmp_path, name):
    section, scale, how = FORMATS[name]
    tensors, expected = {}, {}
    for x in range(2):
        for index, (part, n, k) in enumerate(
            (("gate_proj", 96, 160), ("up_proj", 96, 160), ("down_proj", 160, 96))
        ):
            values, scales, weight = draw(n, k, how, seed=3 * x + index)
            tensors[f"x.experts.{x}.{part}.weight"] = values
            tensors[f"x.experts.{x}.{part}.{scale}"] = scales
            expected[x, part] = weight
    with open_checkpoint(write(tmp_path / "m", tensors, section)) as checkpoint:
        found = load(checkpoint, lambda w: w.experts("x.experts", 2, 160, 96)).params
    for x in range(2):
        np.testing.assert_array_equal(found.gate_up[x, :96], expected[x, "gate_proj"])
        np.testing.assert_array_equal(found.gate_up[x, 96:], expected[x, "up_proj"])
        np.testing.assert_array_equal(found.down[x], expected[x, "down_proj"])


def test_any_part_of_a_matrix_is_what_the_whole_has(tmp_path):
    values, scales, weight = draw(300, 288, "grid")
    tensors = {"x.weight": values, "x.weight_scale_inv": scales}
    each_row = np.repeat(scales, 128, axis=0)[:300]
    with open_checkpoint(write(tmp_path / "m", tensors, DEEPSEEK)) as checkpoint:
        table = WeightTable(checkpoint)
        source, decoded = table.linear("x", 300, 288), table.array("x.weight", (300, 288))
        table.check()
        with table.open_reader() as reader:
            kept, lazy = source.read(reader).weight, decoded.read(reader)
            for part in (
                (slice(0, 300), slice(0, 288)),
                (slice(127, 129), slice(127, 129)),
                (slice(130, 259), slice(16, 32)),
                (299, slice(256, 288)),
            ):
                np.testing.assert_array_equal(lazy[part], weight[part])
            for part in (
                (slice(0, 300), slice(0, 3)),
                (slice(127, 129), slice(1, 2)),
                (slice(130, 256), slice(0, 2)),
                (slice(256, 257), slice(2, 3)),
                (299, slice(0, 3)),
            ):
                np.testing.assert_array_equal(kept.scale[part], each_row[part])


def deepseek_v4_experts():
    """Return the tensors of one MXFP4 expert; DeepSeek-V4's config declares FP8 for all modules."""
    rng, tensors = np.random.default_rng(0), {}
    for name, n, k in (("w1", 32, 64), ("w3", 32, 64), ("w2", 64, 32)):
        tensors[f"x.experts.0.{name}.weight"] = rng.integers(-128, 128, (n, k // 2), np.int8)
        scales = rng.integers(110, 125, (n, k // 32), np.uint8)
        tensors[f"x.experts.0.{name}.scale"] = scales.view(E8M0)
    return tensors


def test_deepseek_v4_mixes_both(tmp_path):
    values, scales, weight = draw(64, 64, "e8m0")
    tensors = deepseek_v4_experts() | {"x.wq.weight": values, "x.wq.scale": scales}
    section = FORMATS["deepseek_v4"][0]
    with open_checkpoint(write(tmp_path / "m", tensors, section)) as checkpoint:
        experts, linear = load(
            checkpoint, lambda w: [w.experts("x.experts", 1, 64, 32), w.linear("x.wq", 64, 64)]
        )
    assert experts.checkpoint_scheme is Scheme.W4A16
    np.testing.assert_array_equal(np.asarray(linear.weight.dequantize()), weight)


def with_blocks(tensors, modules, dense=False):
    """Store modules of a ModelOpt file as FP8 with block scales, or as equal float32 values."""
    for module in modules:
        weight = tool_weight(tensors, module, divides=False)
        for name in ("weight", "weight_scale", "weight_scale_2"):
            del tensors[f"{module}.{name}"]
        n, k = weight.shape
        padded = np.pad(weight, [(0, -n % 128), (0, -k % 128)])
        blocks = padded.reshape(len(padded) // 128, 128, -1, 128)
        scales = np.abs(blocks).max(axis=(1, 3)).astype(np.float32) / np.float32(448)
        spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:n, :k]
        values = (weight / spread).astype(E4M3)
        if dense:
            tensors[f"{module}.weight"] = values.astype(np.float32) * spread
        else:
            tensors |= {f"{module}.weight": values, f"{module}.weight_scale": scales}


def mixed(tmp_path, dense):
    """Write NVFP4 experts beside attention that is FP8 with block scales, or float32 if `dense`."""
    modules = [f"model.layers.{layer}.self_attn.{x}_proj" for layer in (0, 1) for x in "qkvo"]
    tensors = read_all(CHECKPOINTS / W4A16)
    layers = {
        name.rpartition(".")[0]: {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        for name in tensors
        if name.endswith("weight_scale_2")
    }
    kind = {"quant_algo": None} if dense else {"quant_algo": "FP8_PB_WO"}
    layers |= dict.fromkeys(modules, kind)
    fields = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return edited(tmp_path, W4A16, lambda t: with_blocks(t, modules, dense), **fields)


@pytest.mark.eight_devices
def test_a_mixed_file_gives_the_logits_of_its_values(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 512, (2, 12)), jnp.int32)
    folder = mixed(tmp_path / "a", dense=False)
    found = load_model(folder, **KERNELS)
    expected = call(load_model(mixed(tmp_path / "b", dense=True), **KERNELS), ids)
    np.testing.assert_array_equal(call(found, ids), expected)
    assert found.layers[0].attention.qkv.names == ("q_k_v",)
    divided = load_model(folder, mesh=make_mesh((2, 2)), **KERNELS)
    assert difference(call(divided, ids), expected) < 1e-5
    out = divided.layers[0].attention.out.weight.get_value()
    assert out.scale.shape == (256, 2)  # each shard has the columns of a block
    assert out.scale.sharding.shard_shape(out.scale.shape) == (256, 1)
    save(tmp_path / "saved", divided)
    restored = restore(tmp_path / "saved", found)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(found), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    shown = inspect(folder)
    assert "fp8_blocks" in shown
    assert "FP8_PB_WO" in shown
    n, k = 4 * 64 + 2 * 2 * 64, 256
    one_layer = n * k + n * (k // 128) * 4
    assert f"{k} > {n}; FP8 fp8_weights in blocks" in re.sub(" +", " ", shown)
    assert mebibytes(2 * one_layer) in shown
    jax.clear_caches()


def test_a_decoding_step_reads_blocks_in_one_chain(tmp_path):
    """The attention takes the kernel for FP8 weights and few rows, two calls a layer."""
    with open_checkpoint(mixed(tmp_path, dense=False)) as checkpoint:
        model = find_model(checkpoint, Settings(Target("cuda", (9, 0)))).model
    cache = jax.eval_shape(lambda: model.init_cache(2, 64))
    ids = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    text = str(jax.make_jaxpr(ops.chain_calls(generation._read))(model, ids, cache))
    assert text.count("ffi_call[") == 1
    assert text.count("nvfp4_dense_fp8_few_cuda") == 2 * len(model.layers)
    assert explain(model.layers[0].attention.out).backend == "dense_cuda"


@pytest.mark.eight_devices
def test_blocks_that_a_shard_would_cut_are_not_sharded(tmp_path, caplog):
    """With four shards along `tensor`, each would have half of a block of 128 columns."""
    folder = mixed(tmp_path, dense=False)
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    say_replicated.cache_clear()
    model = load_model(folder, mesh=make_mesh((1, 4)), **KERNELS)
    assert model.layers[0].attention.out.weight.get_value().values.sharding.is_fully_replicated
    assert "256 columns cannot be divided into 4 equal parts of whole blocks of 128" in caplog.text
    weight = FP8Tensor(jnp.zeros((8, 256), E4M3), jnp.ones((8, 2)))
    value = LinearWeights(weight, checkpoint_scheme=FP8ActivationScaling.WEIGHTS)
    half = take_shard(value, ShardSpec("columns", 2), 1, 2).weight
    assert (half.values.shape, half.scale.shape) == ((8, 128), (8, 1))
    with pytest.raises(ValueError, match=r"256 columns of FP8 .* whole blocks of 128. Replicate"):
        take_shard(value, ShardSpec("columns", 4), 1, 4)


def test_layers_with_scales_of_rows_and_of_blocks_stay_apart():
    values = jnp.ones((8, 256), E4M3)
    rows, blocks = (
        LinearWeights(FP8Tensor(values, scale), checkpoint_scheme=FP8ActivationScaling.WEIGHTS)
        for scale in (jnp.ones(8), jnp.ones((8, 2)))
    )
    weights = {"q": blocks, "k": blocks, "v": rows}
    assert list(find_runs(weights, Settings(Target("cpu")))) == [("q", "k"), ("v",)]
    joined = join_weights([blocks, blocks]).weight
    assert (joined.values.shape, joined.scale.shape) == ((16, 256), (16, 2))


@pytest.mark.parametrize("rows", [1, 65])
def test_products_are_as_accurate_as_with_decoded_weights(tmp_path, rows):
    """XLA's dot decodes the weight inside of the program, to the values of decoding at load.

    Logits, and the weights of an indexer's heads, are float32 sums that nothing has rounded.
    """
    values, scales, weight = draw(160, 192, "grid")
    tensors = {"x.weight": values, "x.weight_scale_inv": scales}
    with open_checkpoint(write(tmp_path / "m", tensors, DEEPSEEK)) as checkpoint:
        found = load(checkpoint, lambda w: w.linear("x", 160, 192))
    x = np.random.default_rng(1).normal(0, 1, (rows, 192)).astype(ml_dtypes.bfloat16)
    kept, decoded = FP8Linear(found.weight), DenseLinear(weight)
    y, yardstick = kept(x), decoded(x)
    truth = x.astype(np.float64) @ weight.astype(np.float64).T
    assert_as_accurate_as(y, yardstick, truth)
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(np.roll(y, 1, axis=1), yardstick, truth)
    wide = kept.in_float32(x)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), y)
    for found in (
        _score(kept, x, target=None),
        Indexer._weigh(SimpleNamespace(head_weights=kept), x),
    ):
        assert np.asarray(found).tobytes() == np.asarray(wide).tobytes()
    assert (wide != y.astype(jnp.float32)).any()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"x.weight_scale_inv": None}, "x.weight_scale_inv' is missing: expected BF16 or"),
        ({"x.weight_scale_inv": np.ones((2, 2), np.float32)}, r"expected .* \[2, 3\]"),
        ({"x.weight": np.zeros((160, 300), np.uint8)}, r"expected F8_E4M3 \[160, 300\]"),
    ],
    ids=["no scale", "another grid", "another dtype"],
)
def test_what_is_wrong_is_named(tmp_path, edit, message):
    values, scales, _ = draw(160, 300, "grid")
    tensors = {"x.weight": values, "x.weight_scale_inv": scales} | edit
    tensors = {name: value for name, value in tensors.items() if value is not None}
    folder = write(tmp_path / "m", tensors, DEEPSEEK)
    found = problems_of(folder, lambda w: w.linear("x", 160, 300), run=check)
    assert any(re.search(message, problem) for problem in found)


def test_scales_that_are_not_finite_are_named(tmp_path):
    values, scales, _ = draw(32, 64, "mx")
    scales[3, 1] = 255
    tensors = {"x.weight": values, "x.weight_scale": scales}
    folder = write(tmp_path / "m", tensors, FORMATS["mxfp8"][0])
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match="not finite"):
        load(checkpoint, lambda w: w.linear("x", 32, 64))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (DEEPSEEK | {"weight_block_size": [64, 64]}, r"weight_block_size: \[64, 64\] is not"),
        ({"quant_method": "fp8"}, "weight_block_size: None is not supported"),
        (DEEPSEEK | {"fmt": "e5m2"}, "fmt: 'e5m2' is not supported"),
    ],
)
def test_other_blocks_are_refused(tmp_path, section, message):
    folder = write(tmp_path / "m", {"x": np.zeros(2, np.float32)}, section)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_what_is_excluded_or_stored_dense_stays_so(tmp_path):
    dense = np.ones((16, 16), np.float32)
    section = DEEPSEEK | {"modules_to_not_convert": ["lm_head"]}
    folder = write(tmp_path / "m", {"x.weight": dense, "lm_head.weight": dense}, section)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.quant.checkpoint_scheme("lm_head") is None
        assert checkpoint.quant.checkpoint_scheme("x") is BlockFP8.SQUARE
        for found in load(checkpoint, lambda w: [w.linear(x, 16, 16) for x in ("x", "lm_head")]):
            np.testing.assert_array_equal(found.weight, dense)
