"""Test mixed checkpoints: FP8 beside NVFP4, unquantized layers, FP8 caches, faults of tools."""

import json
import logging
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.devices.host_devices import call
from support.files.checkpoint_edits import GIVEN, W4A4, edited, read_all
from support.files.given import CHECKPOINTS, reference_tensors
from support.models.architecture import KERNELS

from jax_nvfp4_moe import CheckpointError, explain, generate, load_model, load_moe
from jax_nvfp4_moe.checkpoint import open_checkpoint
from jax_nvfp4_moe.checkpoint.export import write_checkpoint, write_safetensors
from jax_nvfp4_moe.cli.inspection import inspect
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.scheme import FP8ActivationScaling

MIXED = "qwen3_moe-modelopt-mixed-w4a16-kv8"
CT_MIXED = "qwen3_moe-ct-mixed"
CT_KV = "qwen3_moe-ct-w4a4-kv8"
FAULTS = "qwen3_moe-modelopt-w4a4-faults"
LATENT = "deepseek_v3-modelopt-mixed-w4a16-kv8"
BOUND = 1e-5
IDS = np.arange(32, dtype=np.int32).reshape(2, 16) % 128


def relative(actual, expected):
    actual = np.asarray(actual, np.float64).reshape(expected.shape)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def copied(tmp_path, name, edit=lambda tensors: None, **quantization):
    """Copy a fixture with changed tensors and with changed fields in both quantization configs."""
    folder = tmp_path / "copied"
    shutil.copytree(CHECKPOINTS / name, folder)
    tensors = read_all(folder)
    edit(tensors)
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", tensors)
    for file, key in (
        ("config.json", "quantization_config"),
        ("hf_quant_config.json", "quantization"),
    ):
        if (folder / file).exists():
            contents = json.loads((folder / file).read_text())
            contents[key] |= quantization
            (folder / file).write_text(json.dumps(contents))
    return folder


def logits_of(folder, **options):
    return np.asarray(call(load_model(folder, **(KERNELS | options)), IDS))


@pytest.mark.parametrize(
    ("name", "checkpoint_scheme", "linears"),
    [
        # Each layer has its own input scale.
        (MIXED, FP8ActivationScaling.STATIC, ("q", "k", "v")),
        (CT_MIXED, FP8ActivationScaling.TOKEN, ("q_k_v",)),
    ],
)
def test_linears_in_fp8_beside_nvfp4_experts(name, checkpoint_scheme, linears):
    model = load_model(CHECKPOINTS / name, **KERNELS)
    attention = model.layers[0].attention
    assert attention.qkv.names == linears
    for part in (*(getattr(attention.qkv, name) for name in linears), attention.out):
        assert isinstance(part, FP8Linear)
        assert part.activations is checkpoint_scheme
        assert part.weight.get_value().values.dtype == jnp.float8_e4m3fn
        assert (part.input_scale is None) == (len(linears) == 1)
    assert isinstance(model.head, DenseLinear)
    assert isinstance(model.layers[0].mlp.experts.params.get_value(), MoEParams)


def test_sixteen_bit_activations_where_asked():
    """Weights stay in FP8, and no activation is rounded. The difference in logits is not small."""
    model = load_model(CHECKPOINTS / MIXED, **(KERNELS | {"scheme": "w4a16"}))
    assert model.layers[0].attention.out.activations is FP8ActivationScaling.WEIGHTS
    assert model.layers[0].attention.kv.scales is None
    logits = reference_tensors(CHECKPOINTS / MIXED)["logits"]
    ids = reference_tensors(CHECKPOINTS / MIXED)["input_ids"].astype(np.int32)
    assert 1e-3 < relative(call(model, ids), logits) < 0.2


def weight_of(tensors, module):
    """Return one linear of a ModelOpt file, dequantized."""
    w = tensors[f"{module}.weight"]
    if w.dtype == ml_dtypes.float8_e4m3fn:
        return w.astype(np.float32) * tensors[f"{module}.weight_scale"]
    codes = np.stack([w & 15, w >> 4], axis=-1).reshape(len(w), -1)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    scale = (
        tensors[f"{module}.weight_scale"].astype(np.float32) * tensors[f"{module}.weight_scale_2"]
    )
    return np.concatenate([table, -table])[codes] * np.repeat(scale, 16, axis=-1)


def unquantize(tensors, layers):
    """Store the linears of `layers` as float32 values, without any scale."""
    for name in [n for n in tensors if n.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        if int(module.split(".")[2]) in layers:
            tensors[f"{module}.weight"] = weight_of(tensors, module)
            for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
                tensors.pop(f"{module}.{suffix}", None)


@pytest.mark.parametrize("layers", [(1,), (0, 1)], ids=["one layer", "all"])
def test_layers_that_are_not_quantized_run_with_the_same_weights(tmp_path, layers):
    table = json.loads((CHECKPOINTS / MIXED / "hf_quant_config.json").read_text())
    table = table["quantization"]["quantized_layers"]
    kept = {
        module: entry for module, entry in table.items() if int(module.split(".")[2]) not in layers
    }
    kept = kept or {"unrelated": {"quant_algo": "FP8"}}

    def edit(tensors):
        unquantize(tensors, layers)

    folder = copied(
        tmp_path, MIXED, edit, quantized_layers=kept, kv_cache_quant_algo=None, kv_cache_scheme=None
    )
    requested_scheme = {"scheme": "w4a16"}
    model = load_model(folder, **(KERNELS | requested_scheme))
    assert isinstance(model.layers[1].mlp.experts.params.get_value(), DenseExperts)
    assert isinstance(model.layers[1].attention.out, DenseLinear)
    whole = logits_of(CHECKPOINTS / MIXED, **requested_scheme)
    assert relative(call(model, IDS), whole) < BOUND
    moe = load_moe(folder, 1, **KERNELS)
    x = np.random.default_rng(0).standard_normal((7, 64), np.float32)
    same = load_moe(CHECKPOINTS / MIXED, 1, **KERNELS)
    assert relative(call(moe, x), np.asarray(call(same, x))) < BOUND
    assert relative(call(moe, x[::-1]), np.asarray(call(same, x))) > 0.1
    assert generate(model, IDS, max_new_tokens=2).shape == (2, 2)


def test_a_checkpoint_without_any_quantization_loads(tmp_path):
    folder = copied(tmp_path, MIXED, lambda tensors: unquantize(tensors, (0, 1)))
    (folder / "hf_quant_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    expected = logits_of(CHECKPOINTS / MIXED, scheme="w4a16")
    assert relative(logits_of(folder), expected) < BOUND
    bfloat16 = logits_of(folder, scheme=None, dtype=jnp.bfloat16, backend=None)
    assert relative(bfloat16, expected) < 0.1
    with pytest.raises(ValueError, match="contains none"):
        explain(load_model(folder))


def test_experts_in_fp8(tmp_path):
    """Experts that are quantized again to FP8 stay near. One scheme holds for the whole layer."""

    def edit(tensors):
        for name in [n for n in tensors if ".experts." in n and n.endswith(".weight_scale")]:
            module = name.removesuffix(".weight_scale")
            dense = weight_of(tensors, module)
            scale = np.float32(np.abs(dense).max() / 448)
            tensors[f"{module}.weight"] = (dense / scale).astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{module}.weight_scale"] = scale
            tensors[f"{module}.input_scale"] = np.float32(0.02)
            del tensors[f"{module}.weight_scale_2"]

    table = {f"model.layers.{n}": {"quant_algo": "FP8"} for n in range(2)}
    router = [f"model.layers.{n}.mlp.gate" for n in range(2)]
    folder = copied(
        tmp_path, MIXED, edit, quantized_layers=table, exclude_modules=router, ignore=router
    )
    moe = load_moe(folder, 1, **KERNELS)
    assert moe.experts.checkpoint_scheme is FP8ActivationScaling.STATIC
    x = np.random.default_rng(0).standard_normal((7, 64), np.float32)
    same = load_moe(CHECKPOINTS / MIXED, 1, **KERNELS)
    assert 1e-4 < relative(call(moe, x), np.asarray(call(same, x))) < 0.2
    assert "8 experts 64 > 48, top 2; FP8 fp8" in inspect(folder)


@pytest.mark.parametrize("name", [MIXED, CT_KV])
def test_a_cache_in_fp8_has_half_the_bytes_and_the_same_logits(name):
    tensors = reference_tensors(CHECKPOINTS / name)
    ids = tensors["input_ids"].astype(np.int32)
    model = load_model(CHECKPOINTS / name, **KERNELS)
    whole = np.asarray(call(model, ids))
    cache = model.init_cache(len(ids), 20)
    assert {entry.dtype for entry in cache.layers[0].values()} == {jnp.dtype(jnp.float8_e4m3fn)}
    _, cache = call(model, ids[:, :8], cache)
    rest, _ = call(model, ids[:, 8:], cache)
    assert relative(rest, whole[:, 8:]) < BOUND
    plain = load_model(CHECKPOINTS / name, scheme="w4a16", dtype=jnp.bfloat16)
    half = sum(entry.nbytes for entry in cache.layers[0].values())
    assert sum(e.nbytes for e in plain.init_cache(len(ids), 20).layers[0].values()) == 2 * half


def test_the_bound_catches_a_scale_of_the_cache_that_is_not_read(tmp_path):
    def edit(tensors):
        for name in [n for n in tensors if n.endswith(("k_scale", "v_scale"))]:
            del tensors[name]

    tensors = reference_tensors(CHECKPOINTS / MIXED)
    ids = tensors["input_ids"].astype(np.int32)
    model = load_model(copied(tmp_path, MIXED, edit), **KERNELS)
    scales = model.layers[0].attention.kv.scales
    assert float(scales["k"].get_value()[0]) == 1
    assert relative(call(model, ids), tensors["logits"]) > 100 * BOUND


def test_scales_of_the_cache_that_cannot_be_are_one(tmp_path, caplog):
    def edit(tensors):
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = np.float32(0)
        tensors["model.layers.1.self_attn.v_proj.v_scale"] = np.array([np.nan, 2], np.float32)

    model = load_model(copied(tmp_path, MIXED, edit), **KERNELS)
    first, second = (layer.attention.kv.scales for layer in model.layers)
    np.testing.assert_array_equal(first["k"].get_value(), [1, 1])
    np.testing.assert_array_equal(second["v"].get_value(), [1, 2])
    assert (
        "model.layers.0.self_attn: a scale of the KV cache (k) is not a positive finite number"
        in caplog.text
    )


def test_latent_attention_rounds_the_keys_and_values_of_all_heads():
    model = load_model(CHECKPOINTS / LATENT, **KERNELS)
    assert model.init_cache(1, 4).layers[0]["latent"].dtype == jnp.float32
    assert model.layers[0].attention.kv.scales["k"].get_value().shape == (4,)


def test_a_cache_in_nvfp4_keeps_the_dtype_of_the_model(tmp_path, caplog):
    model = load_model(copied(tmp_path, MIXED, kv_cache_quant_algo="NVFP4"), **KERNELS)
    assert model.layers[0].attention.kv.scales is None
    assert model.init_cache(1, 4).layers[0]["k"].dtype == jnp.float32
    assert "the KV cache is declared NVFP4" in caplog.text


def test_other_caches_are_named(tmp_path):
    folder = copied(tmp_path, MIXED, kv_cache_quant_algo="INT8")
    with pytest.raises(CheckpointError, match="kv_cache_quant_algo: 'INT8' is not supp"):
        load_model(folder, **KERNELS)
    assert load_model(folder, scheme="w4a16").layers[0].attention.kv.scales is None


def test_faults_of_tools_are_survived(caplog):
    """The file has null characters, a string as group_size, and bad or distant scales."""
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    model = load_model(CHECKPOINTS / FAULTS, **KERNELS)
    params = model.layers[0].mlp.experts.params.get_value()
    ratio = np.asarray(params.gate_up.global_scale[:, 0] / params.gate_up.global_scale[:, 1])
    assert params.gate_up.global_scale.shape == (8, 2)
    assert max(ratio.max(), 1 / ratio.min()) > 4
    assert "2 of 8 input scales are missing, zero or not finite" in caplog.text
    assert np.isfinite(params.down_input_scale).all()
    assert isinstance(model.head, DenseLinear)


def test_an_input_scale_of_fp8_that_is_missing_is_a_problem_only_where_it_is_read(tmp_path):
    def edit(tensors):
        del tensors["model.layers.0.self_attn.o_proj.input_scale"]
        tensors["model.layers.1.self_attn.o_proj.input_scale"] = np.float32(0)

    folder = copied(tmp_path, MIXED, edit)
    with pytest.raises(
        CheckpointError, match=r"o_proj' is declared fp8, but the file has no input"
    ):
        load_model(folder, **KERNELS)
    load_model(folder, scheme="w4a16")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("weight_scale", np.float32(np.inf), "expected finite scales, got NaN or infinity"),
        ("weight_scale", np.ones((64, 4), np.float32), "o_proj.weight_scale' .* F32 .64, 4."),
        ("weight", np.zeros((64, 32), np.uint8), "o_proj.weight' .*expected F8_E4M3 .64, 64."),
    ],
)
def test_fp8_linears_that_do_not_fit(tmp_path, name, value, expected):
    def edit(tensors):
        tensors[f"model.layers.0.self_attn.o_proj.{name}"] = value

    with pytest.raises(CheckpointError, match=expected):
        load_model(copied(tmp_path, MIXED, edit), **KERNELS)


def test_fp8_that_is_declared_dense_stays_fp8(tmp_path, caplog):
    module = "model.layers.0.self_attn.o_proj"
    folder = copied(tmp_path, MIXED, ignore=[module], exclude_modules=[module])
    np.testing.assert_array_equal(
        logits_of(folder, **KERNELS), logits_of(CHECKPOINTS / MIXED, **KERNELS)
    )
    assert f"'{module}' holds FP8 values but is declared dense (hf_quant_config" in caplog.text
    assert "it is read as fp8" in caplog.text


def test_inspect_shows_what_decided():
    text = inspect(CHECKPOINTS / MIXED)
    for expected in (
        "KV cache      FP8 (hf_quant_config.json: quantization: kv_cache_quant_algo)",
        "layers.*.attention.out        2      64 > 64; FP8 fp8",
        "model.layers.*.mlp.experts.*     2      w4a16",
        "quantized_layers: 'model.layers.*.mlp.experts' W4A16_NVFP4",
        "lm_head                          1      not quantized  hf_quant_config.json",
    ):
        assert expected in text
    assert "targets 're:.*" in inspect(CHECKPOINTS / CT_MIXED)


def test_what_is_written_mixed_is_read(tmp_path):
    """`write_checkpoint` declares a mixed checkpoint so that it loads as before."""
    source = CHECKPOINTS / MIXED
    table = json.loads((source / "hf_quant_config.json").read_text())["quantization"]
    layers = {name: entry["quant_algo"] for name, entry in table["quantized_layers"].items()}
    config = json.loads((source / "config.json").read_text())
    write_checkpoint(
        tmp_path,
        read_all(source),
        config,
        algorithm="MIXED_PRECISION",
        layers=layers,
        kv_cache="FP8",
        version="1",
    )
    np.testing.assert_array_equal(logits_of(tmp_path), logits_of(source))
    with open_checkpoint(tmp_path) as written, open_checkpoint(source) as given:
        for module in (*layers, "lm_head", "model.layers.0.mlp.gate"):
            assert written.quant.checkpoint_scheme(module) == given.quant.checkpoint_scheme(module)


@pytest.mark.parametrize(
    "fields",
    [
        {"algorithm": "MXFP8"},
        {"algorithm": "MIXED_PRECISION"},
        {"algorithm": "NVFP4", "layers": {"a": "FP8"}},
        {"algorithm": "MIXED_PRECISION", "layers": {"a": "FP8_PB_WO"}},
        {"algorithm": "NVFP4", "kv_cache": "NVFP4"},
    ],
)
def test_what_cannot_be_read_is_not_written(tmp_path, fields):
    with pytest.raises(ValueError, match="expected"):
        write_checkpoint(tmp_path, {"a": np.zeros(2, np.float32)}, {}, **fields)
    assert list(tmp_path.iterdir()) == []


def test_global_scales_of_gate_and_up_that_differ_are_kept_exactly(tmp_path):
    def edit(tensors):
        for expert in range(16):
            name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight_scale_2"
            tensors[name] = np.float32(tensors[name] * (1 + expert % 10))

    params = load_moe(edited(tmp_path, W4A4, edit), 1, **KERNELS).experts.params.get_value()
    given = load_moe(GIVEN / W4A4, 1, **KERNELS).experts.params.get_value()
    factor = np.float32(1) + np.arange(16, dtype=np.float32) % 10
    np.testing.assert_array_equal(
        params.gate_up.global_scale[:, 0], given.gate_up.global_scale[:, 0]
    )
    np.testing.assert_array_equal(
        params.gate_up.global_scale[:, 1], given.gate_up.global_scale[:, 1] * factor
    )
