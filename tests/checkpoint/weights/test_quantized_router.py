"""Test routers that a file stores quantized: their weight is dequantized exactly."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.files.checkpoint_edits import GIVEN, W4A4, W4A16, edited, read_all, tool_weight

from jax_nvfp4_moe import load_moe
from jax_nvfp4_moe.models.loading import abstract_model

ROUTER = "hunyuan_v1_moe-modelopt-router"
GATE = "model.layers.0.mlp.gate"


def router(folder, **options):
    """Return the router's weight of the first layer with experts."""
    moe = load_moe(folder, 0, backend="reference", **{"dtype": jnp.float32, **options})
    return moe.token_router.weight.get_value()


@pytest.mark.parametrize("scheme", ["checkpoint", "w4a16"])
def test_a_router_in_nvfp4_has_the_values_of_the_tool(scheme):
    module = f"{GATE}.wg"
    expected = tool_weight(read_all(GIVEN / ROUTER), module, divides=False)
    assert len(np.unique(expected)) > 50
    weight = router(GIVEN / ROUTER, scheme=scheme)
    assert weight.dtype == jnp.float32
    np.testing.assert_array_equal(weight, expected)
    assert abstract_model(GIVEN / ROUTER).decisions[module].scheme == "w4a16"


def test_a_router_in_fp8_has_its_values_times_its_scale(tmp_path):
    values = np.random.default_rng(0).normal(size=(16, 256)).astype(ml_dtypes.float8_e4m3fn)
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4"}}
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    for layer in range(2):
        layers |= {
            f"model.layers.{layer}.self_attn.{name}": {"quant_algo": "W4A16_NVFP4"}
            for name in names
        }
    layers |= {"model.layers.1.mlp.experts": {"quant_algo": "W4A16_NVFP4"}}
    layers |= {GATE: {"quant_algo": "FP8"}}

    def store(tensors):
        tensors[f"{GATE}.weight"] = values
        tensors[f"{GATE}.weight_scale"] = np.float32(0.37)
        tensors[f"{GATE}.input_scale"] = np.float32(0.01)

    folder = edited(
        tmp_path,
        W4A16,
        store,
        quant_algo="MIXED_PRECISION",
        quantized_layers=layers,
        exclude_modules=[],
        ignore=[],
    )
    expected = values.astype(np.float32) * np.float32(0.37)
    np.testing.assert_array_equal(router(folder), expected)


def test_a_router_that_is_declared_dense_but_stored_quantized(tmp_path, caplog):
    values = np.random.default_rng(0).integers(0, 256, (16, 128)).astype(np.uint8)

    def store(tensors):
        tensors[f"{GATE}.weight"] = values
        tensors[f"{GATE}.weight_scale"] = np.ones((16, 16), ml_dtypes.float8_e4m3fn)
        tensors[f"{GATE}.weight_scale_2"] = np.float32(0.5)

    folder = edited(tmp_path, W4A4, store)
    assert "gate" in json.dumps(json.loads((folder / "hf_quant_config.json").read_text()))
    expected = tool_weight(read_all(folder), GATE, divides=False)
    np.testing.assert_array_equal(router(folder), expected)
    assert f"'{GATE}' holds NVFP4 codes but is declared dense" in caplog.text

    def store_half(tensors):
        store(tensors)
        del tensors[f"{GATE}.weight_scale_2"]

    with pytest.raises(ValueError, match=r"mlp.gate.weight_scale_2' is missing"):
        router(edited(tmp_path, W4A4, store_half))
