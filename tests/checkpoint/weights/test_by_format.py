"""Test scales and their repair, and how files name and fuse experts."""

import logging
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.files.checkpoint_edits import (
    CT,
    EXPERTS,
    GIVEN,
    MOE,
    W4A4,
    W4A16,
    build_model,
    build_moe,
    edited,
    load,
    load_moe,
    problems_of,
    read_all,
    remove_experts,
    store_codes_as_f4,
)

import jax_nvfp4_moe
from jax_nvfp4_moe.checkpoint import CheckpointError, DenseExperts, LoadOptions, open_checkpoint
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.writing.synthetic import SyntheticSizes, write_synthetic


def test_a_relabelled_file_is_weight_only(tmp_path, caplog):
    folder = edited(tmp_path, W4A4, lambda t: None, quant_algo="W4A16_NVFP4")
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    with open_checkpoint(folder) as checkpoint:
        params, checkpoint_scheme = load(checkpoint, build_model)[-1]
    assert checkpoint_scheme == "w4a16"
    assert params.gate_up_input_scale is None
    assert (
        "input scales are ignored: the checkpoint declares quantized weights only (104)"
        in caplog.text
    )


@pytest.mark.parametrize("name", [W4A4, CT])
def test_scales_that_are_not_finite_are_all_reported(tmp_path, name):
    word = "weight_global_scale" if name == CT else "weight_scale_2"

    def edit(tensors):
        tensors[f"{EXPERTS}.2.up_proj.weight_scale"].view(np.uint8)[3, 4] = 0x7F
        tensors[f"{EXPERTS}.2.down_proj.weight_scale"].view(np.uint8)[[0, 1], 0] = 0xFF
        tensors[f"{EXPERTS}.7.gate_proj.{word}"][...] = np.inf
        tensors[f"{EXPERTS}.8.down_proj.{word}"][...] = np.nan

    folder = edited(tmp_path, name, edit)
    file = "('model.safetensors')"
    expected = "expected a global scale that is finite" + " and not zero" * (name == CT)
    assert sorted(problems_of(folder, build_moe, MOE, load)) == sorted([
        f"'{EXPERTS}.2.up_proj.weight_scale' {file}: 1 of 2048 block scales are NaN",
        f"'{EXPERTS}.2.down_proj.weight_scale' {file}: 2 of 2048 block scales are NaN",
        f"'{EXPERTS}.7.gate_proj.{word}' {file}: {expected}, got inf",
        f"'{EXPERTS}.8.down_proj.{word}' {file}: {expected}, got nan",
    ])  # fmt: skip


def test_a_divisor_of_zero_is_refused(tmp_path):
    def edit(tensors):
        tensors[f"{EXPERTS}.7.gate_proj.weight_global_scale"][...] = 0

    (problem,) = problems_of(edited(tmp_path, CT, edit), build_moe, MOE, load)
    assert problem.endswith("expected a global scale that is finite and not zero, got 0.0")


def test_zero_and_negative_block_scales_are_kept(tmp_path):
    name = f"{EXPERTS}.2.up_proj.weight_scale"

    def edit(tensors):
        tensors[name].view(np.uint8)[0, :4] = [0x00, 0x80, 0xC0, 0x81]
        tensors[f"{EXPERTS}.2.up_proj.weight_scale_2"][...] = 0

    params, _ = load_moe(edited(tmp_path, W4A4, edit))
    scales = np.asarray(params.gate_up.block_scale).view(np.uint8)[2, 128, :4]
    assert scales.tolist() == [0x00, 0x80, 0xC0, 0x81]
    assert params.gate_up.global_scale[2, 1] == 0


def test_gate_and_up_keep_their_own_global_scales(tmp_path):
    def edit(tensors):
        tensors[f"{EXPERTS}.2.up_proj.weight_scale_2"][...] *= 10

    params, _ = load_moe(edited(tmp_path, W4A4, edit))
    plain, _ = load_moe(GIVEN / W4A4)
    before, after = (np.asarray(p.gate_up.dequantize())[2] for p in (plain, params))
    np.testing.assert_array_equal(before[:128], after[:128])
    assert params.gate_up.global_scale[2, 1] == plain.gate_up.global_scale[2, 1] * np.float32(10)
    assert np.count_nonzero(after[128:] != before[128:]) > 0


def set_input_scales(values, removed=()):
    def edit(tensors):
        for e in range(16):
            for p in ("gate_proj", "up_proj", "down_proj"):
                name = f"{EXPERTS}.{e}.{p}.input_scale"
                tensors[name] = np.float32(values.get((e, p), 0.5)) * np.ones((), np.float32)
                if (e, p) in removed:
                    del tensors[name]

    return edit


def test_bad_input_scales_take_the_largest_of_the_layer(tmp_path, caplog):
    values = {(0, "gate_proj"): 0.0, (1, "gate_proj"): np.nan, (2, "up_proj"): np.inf}
    values |= {(3, "gate_proj"): 2.0, (5, "down_proj"): -1.0, (6, "down_proj"): 3.0}
    folder = edited(tmp_path, W4A4, set_input_scales(values, {(4, "up_proj"), (7, "down_proj")}))
    params, _ = load_moe(folder)
    expected = np.full(16, 0.5)
    expected[[0, 1, 2, 3, 4]] = 2
    np.testing.assert_array_equal(params.gate_up_input_scale, expected)
    expected = np.full(16, 0.5)
    expected[[5, 6, 7]] = 3
    np.testing.assert_array_equal(params.down_input_scale, expected)
    assert "4 of 32 input scales are missing, zero or not finite" in caplog.text
    assert "2 of 16 input scales" in caplog.text


# The smallest float32, the largest denormal one, and one whose reciprocal is denormal.
DENORMAL = [1e-45, 1.1754942e-38, 3e38]


@pytest.mark.parametrize("value", DENORMAL)
@pytest.mark.parametrize("name", [W4A4, CT])
def test_input_scales_that_kernels_take_for_zero_are_replaced(tmp_path, caplog, name, value):
    """Kernels flush denormal numbers to 0, so that such an expert would return zeros."""
    names, divides = ("input_global_scale", True) if name == CT else ("input_scale", False)

    def edit(tensors):
        for e in range(16):
            for p in ("gate_proj", "up_proj", "down_proj"):
                scale = np.float32(value if e in (2, 5) else 0.5)
                tensors[f"{EXPERTS}.{e}.{p}.{names}"] = np.full(1, scale, np.float32)

    params, _ = load_moe(edited(tmp_path, name, edit))
    expected = 2.0 if divides else 0.5
    np.testing.assert_array_equal(params.gate_up_input_scale, np.full(16, expected))
    np.testing.assert_array_equal(params.down_input_scale, np.full(16, expected))
    assert "4 of 32 input scales are missing, zero or not finite, or denormal" in caplog.text
    assert "2 of 16 input scales" in caplog.text


@pytest.mark.parametrize("value", [1.1754944e-38, 1e-30, 1e30, 8e37])
def test_small_and_large_input_scales_are_kept(tmp_path, value):
    values = {(2, "gate_proj"): value, (2, "up_proj"): value}
    params, _ = load_moe(edited(tmp_path, W4A4, set_input_scales(values)))
    assert params.gate_up_input_scale[2] == np.float32(value)


def test_a_denormal_input_scale_changes_no_expert(tmp_path):
    """An expert with such a scale gives what the same expert gives with the layer's largest one."""
    for name, value in (("denormal", 1e-42), ("largest", 0.5)):
        scales = {(3, part): value for part in ("gate_proj", "up_proj", "down_proj")}
        edited(tmp_path, W4A4, set_input_scales(scales)).rename(tmp_path / name)
    x = np.random.default_rng(0).standard_normal((4, 256), np.float32)
    ids, weights = np.full((4, 1), 3, np.int32), np.ones((4, 1), np.float32)
    found, expected = (
        jax_nvfp4_moe.load_moe(tmp_path / one, 1, scheme="w4a4").experts(x, ids, weights)
        for one in ("denormal", "largest")
    )
    np.testing.assert_array_equal(found, expected)
    assert np.abs(np.asarray(found, np.float32)).max() > 0


def test_different_input_scales_of_gate_and_up(tmp_path, caplog):
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    values = {(3, "gate_proj"): 0.25, (4, "up_proj"): 0.75}
    params, _ = load_moe(edited(tmp_path, W4A4, set_input_scales(values)))
    assert params.gate_up_input_scale[3] == 0.5
    assert params.gate_up_input_scale[4] == 0.75
    assert "the input scales of gate and up differ in 2 experts" in caplog.text


def test_no_input_scales_at_all(tmp_path):
    down = {(e, "down_proj") for e in range(16)}
    folder = edited(tmp_path, W4A4, set_input_scales({}, down))
    (problem,) = problems_of(folder, build_moe, MOE)
    assert problem == (
        f"'{EXPERTS} down' is declared w4a4, but the file has no input scales for it; expected "
        "tensors named input_scale"
    )
    assert load_moe(folder, input_scales="optional").params.down_input_scale is None
    assert load_moe(folder, input_scales="ignored").params.gate_up_input_scale is None
    folder = edited(tmp_path, W4A4, set_input_scales(dict.fromkeys(down, 0.0)))
    (problem,) = problems_of(folder, build_moe, MOE, load)
    assert problem == f"'{EXPERTS} down': none of 16 input scales is a positive finite number"
    assert load_moe(folder, input_scales="optional").params.down_input_scale is None


def test_a_linear_needs_its_input_scale(tmp_path):
    name = "model.layers.0.self_attn.q_proj"

    def build(w):
        return w.linear(name, 256, 256)

    def edit(tensors):
        tensors[f"{name}.input_scale"][...] = 0

    only = LoadOptions(only=name)
    (problem,) = problems_of(edited(tmp_path, W4A4, edit), build, only, load)
    assert problem == f"'{name}': none of 1 input scales is a positive finite number"
    folder = edited(tmp_path, W4A4, lambda t: t.pop(f"{name}.input_scale"))
    (problem,) = problems_of(folder, build, only)
    assert "has no input scales" in problem


def test_other_namings_of_experts(tmp_path):
    def mixtral(tensors):
        for name in [name for name in tensors if EXPERTS in name]:
            new = (
                name.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2")
            )
            tensors[new] = tensors.pop(name)

    def nemotron(tensors):
        for name in [name for name in tensors if "gate_proj" in name]:
            del tensors[name]

    plain, _ = load_moe(GIVEN / W4A4)
    renamed, _ = load_moe(edited(tmp_path, W4A4, mixtral))
    jax.tree.map(np.testing.assert_array_equal, renamed, plain)
    with open_checkpoint(edited(tmp_path, W4A4, nemotron)) as checkpoint:
        params, _ = load(
            checkpoint,
            lambda w: w.experts(EXPERTS, 16, 256, 128, gated=False),
            LoadOptions(only=EXPERTS),
        )
    np.testing.assert_array_equal(params.gate_up.packed, plain.gate_up.packed[:, 128:])
    np.testing.assert_array_equal(params.gate_up.global_scale, plain.gate_up.global_scale[:, 1])


UNDERSCORED = ("", "_weight_scale", "_weight_scale_2", "_input_scale", "_bias")
DOTTED = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale", ".bias")


def fuse(swap, globals_shape, suffixes=UNDERSCORED):
    """Stack the experts of one layer into one tensor for each projection."""

    def rows(tensors, projections, word):
        each = [
            np.concatenate([tensors[f"{EXPERTS}.{e}.{p}.{word}"] for p in projections])
            for e in range(16)
        ]
        return np.swapaxes(each, 1, 2) if swap else np.stack(each)

    def scalars(tensors, projections, word):
        each = np.array(
            [[tensors[f"{EXPERTS}.{e}.{p}.{word}"] for p in projections] for e in range(16)]
        )
        if globals_shape == "parts":
            return each
        return each[: math.prod(globals_shape), 0].reshape(globals_shape)

    def edit(tensors):
        fused = {}
        for stem, projections, n in (
            ("gate_up_proj", ["gate_proj", "up_proj"], 256),
            ("down_proj", ["down_proj"], 256),
        ):
            arrays = (
                rows(tensors, projections, "weight"),
                rows(tensors, projections, "weight_scale"),
                scalars(tensors, projections, "weight_scale_2"),
                scalars(tensors, projections, "input_scale"),
                np.ones((16, n), np.float32),
            )
            for suffix, array in zip(suffixes, arrays, strict=True):
                fused[f"{EXPERTS}.{stem}{suffix}"] = array
        remove_experts(tensors)
        tensors.update(fused)

    return edit


def build_fused(w):
    w.linear("model.layers.1.mlp.gate", 16, 256)
    return w.experts(EXPERTS, 16, 256, 128, bias=True)


@pytest.mark.parametrize("swap", [False, True], ids=["row-major", "k-major"])
@pytest.mark.parametrize("globals_shape", [(16,), (16, 1), (16, 1, 1), "parts"], ids=str)
def test_all_experts_in_one_tensor(tmp_path, swap, globals_shape):
    plain, _ = load_moe(GIVEN / W4A4)
    folder = edited(tmp_path, W4A4, fuse(swap, globals_shape))
    with open_checkpoint(folder) as checkpoint:
        params, checkpoint_scheme = load(checkpoint, build_fused, MOE)
    assert checkpoint_scheme == "w4a4"
    assert params.gate_up_bias.shape == (16, 256)
    np.testing.assert_array_equal(params.gate_up.packed, plain.gate_up.packed)
    np.testing.assert_array_equal(params.down.packed, plain.down.packed)
    for leaf in ("gate_up_input_scale", "down_input_scale"):
        np.testing.assert_array_equal(getattr(params, leaf), getattr(plain, leaf))
    for weight, expected in ((params.gate_up, plain.gate_up), (params.down, plain.down)):
        np.testing.assert_array_equal(weight.block_scale, expected.block_scale)
        np.testing.assert_array_equal(weight.global_scale, expected.global_scale)


def test_fused_experts_share_one_scalar_or_use_dotted_names(tmp_path):
    for shape, suffixes in (((), UNDERSCORED), ((1,), DOTTED)):
        folder = edited(tmp_path, W4A4, fuse(False, shape, suffixes))
        with open_checkpoint(folder) as checkpoint:
            params, _ = load(checkpoint, build_fused, MOE)
        assert np.unique(params.gate_up.global_scale).size == 1
        assert params.down.global_scale.shape == (16,)


def test_fused_experts_of_the_wrong_shape_and_dense_ones(tmp_path):
    folder = edited(tmp_path, W4A4, fuse(True, (16,)))

    def build(w):
        w.linear("model.layers.1.mlp.gate", 16, 256)
        w.experts(EXPERTS, 16, 256, 64, bias=True)

    assert len(problems_of(folder, build, MOE)) == 5


def test_experts_stored_dense_stay_dense(tmp_path):
    def dense(tensors):
        fuse(True, (16,))(tensors)
        remove_experts(tensors)
        tensors[f"{EXPERTS}.gate_up_proj"] = np.full((16, 256, 256), 2, ml_dtypes.bfloat16)
        tensors[f"{EXPERTS}.down_proj"] = np.full((16, 128, 256), 3, ml_dtypes.bfloat16)

    def build(w):
        w.linear("model.layers.1.mlp.gate", 16, 256)
        return w.experts(EXPERTS, 16, 256, 128, inputs_first=True)

    with open_checkpoint(edited(tmp_path, W4A4, dense)) as checkpoint:
        params, checkpoint_scheme = load(checkpoint, build, MOE)
    assert checkpoint_scheme is None
    assert isinstance(params, DenseExperts)
    assert params.down.shape == (16, 256, 128)
    assert params.down.dtype == jnp.bfloat16
    assert float(params.gate_up[3, 5, 7]) == 2
    (problem,) = problems_of(edited(tmp_path, W4A4, dense), build_moe, MOE)
    assert "may be [e, n, k] or [e, k, n], because n = 256 and k = 256 are equal" in problem


@pytest.mark.parametrize("name", [W4A4, CT])
def test_linears_with_codes_of_four_bits(tmp_path, name):
    folder = store_codes_as_f4(edited(tmp_path, name, lambda tensors: None))
    models = []
    for one in (GIVEN / name, folder):
        with open_checkpoint(one) as checkpoint:
            models.append(load(checkpoint, build_model))
    jax.tree.map(np.testing.assert_array_equal, *models)


def test_codes_that_fit_both_ways_follow_their_scales_or_are_refused(tmp_path):
    def square(tensors, scales):
        """Write 256 rows of 512 codes, which take [2, 256, 256] bytes in either orientation."""
        remove_experts(tensors)
        for stem, n, k in (("gate_up_proj", 256, 512), ("down_proj", 512, 128)):
            rng = np.random.default_rng(0)
            tensors[f"{EXPERTS}.{stem}"] = rng.integers(0, 256, (2, k // 2, n), np.uint8)
            scale = np.ones((2, k // 16, n), ml_dtypes.float8_e4m3fn)
            if scales or stem == "down_proj":
                tensors[f"{EXPERTS}.{stem}_weight_scale"] = scale
            tensors[f"{EXPERTS}.{stem}_weight_scale_2"] = np.ones(2, np.float32)

    def build(w):
        w.linear("model.layers.1.mlp.gate", 16, 256)
        return w.experts(EXPERTS, 2, 512, 128)

    folder = edited(tmp_path, W4A16, lambda t: square(t, True))
    with open_checkpoint(folder) as checkpoint:
        params, _ = load(checkpoint, build, MOE)
    stored = read_all(folder)[f"{EXPERTS}.gate_up_proj"]
    np.testing.assert_array_equal(params.gate_up.packed, np.swapaxes(stored, 1, 2))
    folder = edited(tmp_path, W4A16, lambda t: square(t, False))
    assert any("is ambiguous: " in problem for problem in problems_of(folder, build, MOE))


def test_dense_experts_for_the_quantizer(tmp_path):
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((3, 64, 48)).astype(ml_dtypes.bfloat16)
    down = rng.standard_normal((3, 48, 32)).astype(ml_dtypes.bfloat16)
    bias = np.ones((3, 64), ml_dtypes.bfloat16), np.ones((3, 48), ml_dtypes.bfloat16)
    each = {}
    for e in range(3):
        parts = (gate_up[e, :32], gate_up[e, 32:], down[e])
        for name, part in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
            each[f"x.{e}.{name}.weight"] = part
            each[f"x.{e}.{name}.bias"] = np.ones(len(part), ml_dtypes.bfloat16)
    fused = {"x.gate_up_proj": gate_up, "x.down_proj": down}
    swapped = {name: np.swapaxes(array, 1, 2) for name, array in fused.items()}
    biases = {"x.gate_up_proj_bias": bias[0], "x.down_proj_bias": bias[1]}
    (tmp_path / "config.json").write_text("{}")
    for tensors in (each, fused | biases, swapped | biases):
        write_safetensors(tmp_path / "model.safetensors", tensors)
        with open_checkpoint(tmp_path) as checkpoint:
            experts = load(checkpoint, lambda w: w.experts("x", 3, 48, 32, bias=True)).params
        np.testing.assert_array_equal(experts.gate_up, gate_up)
        np.testing.assert_array_equal(experts.down, down)
        np.testing.assert_array_equal(experts.gate_up_bias, bias[0])
        np.testing.assert_array_equal(experts.down_bias, bias[1])
        assert experts.down.dtype == ml_dtypes.bfloat16
    square = {"x.gate_up_proj": gate_up[:, :48], "x.down_proj": down}
    write_safetensors(tmp_path / "model.safetensors", square)
    (problem, *_) = problems_of(tmp_path, lambda w: w.experts("x", 3, 48, 24))
    assert "may be [e, n, k] or [e, k, n], because n = 48 and k = 48 are equal" in problem


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_synthetic_checkpoints_load_from_their_shards(tmp_path, algorithm):
    sizes = SyntheticSizes(
        layers=2,
        num_experts=16,
        top_k=4,
        hidden=256,
        intermediate=128,
        vocab=512,
        heads=4,
        kv_heads=2,
        head_dim=64,
    )
    write_synthetic(tmp_path, sizes, algorithm=algorithm, shard_bytes=1_000_000)
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    with open_checkpoint(tmp_path) as checkpoint:
        params, checkpoint_scheme = load(checkpoint, build_model)[-1]
    assert checkpoint_scheme == {"NVFP4": "w4a4", "W4A16_NVFP4": "w4a16"}[algorithm]
    assert np.unique(params.down.packed).size == 256
    assert np.isfinite(params.down.dequantize()).all()


def test_opening_lists_the_problems_of_config_and_tensors(tmp_path):
    folder = edited(tmp_path, W4A4, lambda t: None, quant_algo="W3A3")
    (folder / "model.safetensors").write_bytes(b"nonsense" * 3)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert len(caught.value.problems) == 3
    assert "W3A3" in str(caught.value)
    assert "'model.safetensors'" in str(caught.value)
