"""Test MXFP4 experts in files: stacked as in gpt-oss, and one by one as in DeepSeek-V4."""

import json
import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.devices.host_devices import call, difference, make_mesh, name_shape
from support.files.checkpoint_edits import E2M1, check, edited, load, problems_of, read_all
from support.files.given import CHECKPOINTS, reference_tensors
from support.models.architecture import EXACT

from jax_nvfp4_moe import CheckpointError, load_model, load_moe
from jax_nvfp4_moe.checkpoint import WeightTable, open_checkpoint
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.cli.inspection import inspect
from jax_nvfp4_moe.numerics.tensor import MoEParams
from jax_nvfp4_moe.scheme import Scheme

GPT_OSS = CHECKPOINTS / "gpt_oss-mxfp4"
CONFIG = {"quantization_config": {"quant_method": "mxfp4"}}
E, HIDDEN, WIDTH = 3, 64, 96


def values_of(packed, scales):
    """Decode MXFP4 codes ``[..., k/2]`` and their scales to float32 with lookup tables."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return E2M1[codes] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=-1)


def draw(seed=0, low=115, high=128):
    """Return random codes and scales: gate and up in alternating rows, then down."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, n, k in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        made[name] = (
            rng.integers(0, 256, (E, n, k // 2), np.uint8),
            rng.integers(low, high, (E, n, k // 32), np.uint8),
        )
    return made


def write(folder: pathlib.Path, tensors, config=None):
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def write_stacked(folder, made):
    tensors = {}
    for name, (packed, scales) in made.items():
        tensors[f"x.experts.{name}_blocks"] = packed.reshape(*scales.shape, 16)
        tensors[f"x.experts.{name}_scales"] = scales
    return write(folder, tensors)


def build_stacked(w):
    return w.experts("x.experts", E, HIDDEN, WIDTH, interleaved=True)


def build_each(w):
    return w.experts("x.experts", E, HIDDEN, WIDTH)


def load_experts(folder, build=build_stacked):
    with open_checkpoint(folder) as checkpoint:
        found = load(checkpoint, build)
    assert found.checkpoint_scheme is Scheme.W4A16
    assert isinstance(found.params, MoEParams)
    return found.params


def expected(made):
    """Return the expected values: gate rows followed by up rows, and the down matrix."""
    first, down = (values_of(*made[name]) for name in ("gate_up_proj", "down_proj"))
    return np.concatenate([first[:, 0::2], first[:, 1::2]], axis=1), down


def assert_values(params, made):
    for weight, values in zip((params.gate_up, params.down), expected(made), strict=True):
        np.testing.assert_array_equal(weight.dequantize(), values)


def test_stacked_experts_keep_their_values(tmp_path):
    made = draw()
    params = load_experts(write_stacked(tmp_path / "m", made))
    assert params.gate_up.global_scale.shape == (E, 2)
    assert not params.has_input_scales
    assert_values(params, made)


def test_experts_one_by_one_keep_their_values(tmp_path):
    """DeepSeek-V4 stores codes as signed bytes and scales as float8_e8m0fnu."""
    made, tensors = draw(), {}
    for x in range(E):
        for name, stem, rows in (
            ("w1", "gate_up_proj", slice(0, None, 2)),
            ("w3", "gate_up_proj", slice(1, None, 2)),
            ("w2", "down_proj", slice(None)),
        ):
            packed, scales = (array[x, rows] for array in made[stem])
            tensors[f"x.experts.{x}.{name}.weight"] = packed.view(np.int8)
            tensors[f"x.experts.{x}.{name}.scale"] = scales.view(ml_dtypes.float8_e8m0fnu)
    assert_values(load_experts(write(tmp_path / "m", tensors), build_each), made)


def test_each_projection_has_the_global_scale_that_it_needs(tmp_path):
    """Gate, up and down of an expert differ widely; none alone spans more than 18 powers of two."""
    made = draw(low=100, high=118)
    made["gate_up_proj"][1][:, 1::2] += 60
    made["gate_up_proj"][1][1] += 10
    assert_values(load_experts(write_stacked(tmp_path / "m", made)), made)


def test_zeros_and_codes_with_room_reach_further(tmp_path):
    made = draw(low=111, high=129)
    packed, scales = made["gate_up_proj"]
    scales[:, ::3, 0] = 0  # quantizers write 0 as the scale of a block of zeros
    packed[:, ::3, :16] = 0x80
    scales[1, 4, 1], packed[1, 4, 16:] = 131, 0x91  # 0.5 and -0.5 can be doubled three times
    assert_values(load_experts(write_stacked(tmp_path / "m", made)), made)


@pytest.mark.parametrize("low", [115, 108], ids=["as they are", "shifted"])
def test_any_part_of_an_array_is_what_the_whole_has(tmp_path, low):
    """Parts begin and end inside blocks of 32. Experts that are not requested are not read."""
    made = draw(low=low)
    made["gate_up_proj"][0][:] = made["down_proj"][0][:] = 0x22  # 1.0, which can be halved once
    with open_checkpoint(write_stacked(tmp_path / "m", made)) as checkpoint:
        table = WeightTable(checkpoint)
        source = build_stacked(table)
        table.check()
        with table.open_reader() as reader:
            params = source.read(reader)
            for weight in (params.gate_up, params.down):
                packed, scale = (np.asarray(a[()]) for a in (weight.packed, weight.block_scale))
                again = source.read(reader)
                lazy = again.gate_up if weight is params.gate_up else again.down
                for part in (
                    (slice(1, 2), slice(3, 40), slice(8, 24)),
                    (slice(0, 3), slice(50, 51), slice(0, 8)),
                    (2, slice(None), slice(24, 32)),
                ):
                    np.testing.assert_array_equal(lazy.packed[part], packed[part])
                    half = slice(part[2].start // 8, part[2].stop // 8)
                    np.testing.assert_array_equal(
                        lazy.block_scale[(*part[:2], half)], scale[(*part[:2], half)]
                    )


def test_one_expert_reads_its_own_bytes_alone(tmp_path):
    made = draw()
    with open_checkpoint(write_stacked(tmp_path / "m", made)) as checkpoint:
        table = WeightTable(checkpoint)
        source = build_stacked(table)
        total = table.check()
        with table.open_reader() as reader:
            read = []
            reader._advance = read.append
            params = source.read(reader)
            for weight in (params.gate_up, params.down):
                for array in (weight.packed, weight.block_scale, weight.global_scale):
                    array[0:1]
    assert sum(read) == total // E


def test_a_layer_of_gpt_oss_has_the_values_of_its_file():
    tensors = read_all(GPT_OSS)
    prefix = "model.layers.1.mlp.experts."
    params = load_moe(GPT_OSS, 1, **EXACT).experts.params.get_value()
    for name, weight in (("gate_up_proj", params.gate_up), ("down_proj", params.down)):
        scales = tensors[f"{prefix}{name}_scales"]
        packed = tensors[f"{prefix}{name}_blocks"].reshape(*scales.shape[:2], -1)
        values = values_of(packed, scales)
        if name == "gate_up_proj":
            values = np.concatenate([values[:, 0::2], values[:, 1::2]], axis=1)
        np.testing.assert_array_equal(weight.dequantize(), values)


@pytest.mark.eight_devices
@pytest.mark.parametrize("shape", [(4, 1), (1, 2)], ids=name_shape)
def test_a_mesh_gets_the_same_experts(shape):
    """Two shards along `tensor` divide the only block of 32 in a row of the down matrix."""
    x = jnp.asarray(reference_tensors(GPT_OSS)["layers.1.moe.input"])
    plain, divided = (load_moe(GPT_OSS, 1, mesh=mesh, **EXACT) for mesh in (None, make_mesh(shape)))
    assert difference(call(divided, x), call(plain, x)) < 1e-6


@pytest.mark.slow
@pytest.mark.eight_devices
def test_a_mesh_gets_the_same_model():
    ids = jnp.asarray(reference_tensors(GPT_OSS)["input_ids"], jnp.int32)
    divided = load_model(GPT_OSS, mesh=make_mesh((2, 2)), **EXACT)
    assert difference(call(divided, ids), reference_tensors(GPT_OSS)["logits"]) < 1e-5


def test_what_does_not_fit_is_refused_with_its_range(tmp_path):
    made = draw()
    packed, scales = made["down_proj"]
    packed[:] = 0x17  # 6 and 0.5
    scales[:] = 120
    scales[1, 5, 2], scales[1, 6, 0] = 100, 119
    with pytest.raises(CheckpointError) as caught:
        load_experts(write_stacked(tmp_path / "m", made))
    assert len(caught.value.problems) == 1
    message = str(caught.value)
    assert "x.experts.down_proj_scales" in message
    assert "expert 1" in message
    assert "from 2^-27 to 2^-7" in message


def test_nan_scales_are_refused(tmp_path):
    made = draw()
    made["gate_up_proj"][1][2, 3, 1] = 255
    with pytest.raises(CheckpointError, match=r"gate_up_proj_scales.*expert 2.*scales are NaN"):
        load_experts(write_stacked(tmp_path / "m", made))


def change(tensors, name, value):
    if value is None:
        del tensors[f"model.layers.0.mlp.experts.{name}"]
    else:
        tensors[f"model.layers.0.mlp.experts.{name}"] = value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("down_proj_scales", None, r"down_proj_scales' is missing: expected U8 or F8_E8M0"),
        ("down_proj_blocks", np.zeros((4, 64, 2, 16), np.uint8), r"expected U8 \[4, 64, 1, 16\]"),
        ("gate_up_proj_blocks", None, r"gate_up_proj_blocks' is missing"),
        ("gate_up_proj_scales", np.zeros((4, 64, 2), np.float32), r"got F32"),
    ],
    ids=["no scales", "another shape", "no blocks", "another dtype"],
)
def test_tensors_that_are_wrong_are_named(tmp_path, name, value, message):
    folder = edited(tmp_path, GPT_OSS.name, lambda tensors: change(tensors, name, value))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_sizes_that_are_no_whole_blocks_are_named(tmp_path):
    folder = write_stacked(tmp_path / "m", draw())
    found = problems_of(folder, lambda w: w.experts("x.experts", E, HIDDEN, 80), run=check)
    assert any("intermediate = 80: expected a multiple of 32" in problem for problem in found)


@pytest.mark.parametrize(
    "config",
    [{}, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x.*"]}}],
    ids=["no config", "excluded"],
)
def test_stored_mxfp4_wins_over_a_declaration_of_dense(tmp_path, config, caplog):
    made = draw()
    folder = write_stacked(tmp_path / "m", made)
    with open_checkpoint(folder) as checkpoint:
        expected = load(checkpoint, build_stacked).params
    (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as checkpoint:
        found, scheme = load(checkpoint, build_stacked)
    assert scheme is Scheme.W4A16
    np.testing.assert_array_equal(found.gate_up.dequantize(), expected.gate_up.dequantize())
    assert "'x.experts': experts are stored in MXFP4 but declared dense (" in caplog.text


def test_schemes_that_need_input_scales_are_refused():
    with pytest.raises(ValueError, match="w4a4"):
        load_model(GPT_OSS, scheme="w4a4")


def test_inspect_says_what_is_cast():
    shown = inspect(GPT_OSS)
    assert "quantization  MXFP4 (config.json: quantization_config)" in shown
    assert "4 experts 64 > 32, top 2; NVFP4 w4a16" in shown
    assert "quant_method mxfp4, cast to NVFP4" in shown
