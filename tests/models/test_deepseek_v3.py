"""Test that both methods of latent attention agree, and how configs of the family are read."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS, copy_with_config

from jax_nvfp4_moe import CheckpointError, Target, load_model
from jax_nvfp4_moe.models import deepseek_v3
from jax_nvfp4_moe.models.loading import ARCHITECTURES
from jax_nvfp4_moe.nn.attention import latent_attention
from jax_nvfp4_moe.nn.attention.latent_attention import HeadMatrices
from jax_nvfp4_moe.nn.intermediates import capture

DEEPSEEK = CHECKPOINTS / "deepseekv3-modelopt-w4a4"
LITE = CHECKPOINTS / "glm4_moe_lite-modelopt-w4a16"
DIRECT = CHECKPOINTS / "deepseek_v3-direct-modelopt-w4a16"
EXACT = {"dtype": jnp.float32, "backend": "reference"}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def attended(attention, absorbs, monkeypatch):
    """Return the outputs for 5 tokens, with the up-projection absorbed into the queries or not."""
    monkeypatch.setattr(latent_attention.LatentAttention, "_absorbs", lambda *_: absorbs)
    x = jax.random.normal(jax.random.key(0), (2, 5, attention.config.hidden))
    positions = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (2, 5))
    y, _ = jax.jit(lambda module, x: module(x, positions, None))(attention, x)
    return np.asarray(y, np.float64)


@pytest.mark.parametrize("folder", [LITE, DIRECT], ids=["lite", "direct"])
def test_attending_to_latents_is_attending_to_what_they_expand_to(folder, monkeypatch):
    """The bound has a float32 rounding for each term of the sums over a head and over a latent."""
    attention = load_model(folder, **EXACT).layers[0].attention
    assert isinstance(attention.kv_up, HeadMatrices)
    expanded = attended(attention, False, monkeypatch)
    config = attention.config
    bound = (
        (config.qk_nope_head_dim + config.qk_rope_head_dim + config.kv_lora_rank)
        * 2.0**-24
        * np.abs(expanded).max()
    )
    assert np.abs(attended(attention, True, monkeypatch) - expanded).max() <= bound

    keys = attention.kv_up.keys
    keys.set_value(jnp.flip(keys.get_value(), axis=0))  # each head with another's matrix
    assert np.abs(attended(attention, True, monkeypatch) - expanded).max() > 1000 * bound


def test_an_expansion_of_rounded_latents_stays_whole():
    """W4A4 rounds the latents before the up-projection. Absorbing it would skip that rounding."""
    rounding = load_model(DEEPSEEK, scheme="checkpoint", **EXACT).layers[1].attention
    assert not isinstance(rounding.kv_up, HeadMatrices)
    plain = load_model(DEEPSEEK, scheme="w4a16", **EXACT).layers[1].attention
    assert isinstance(plain.kv_up, HeadMatrices)


def test_decoding_attends_to_latents_and_prefill_does_not():
    """The sizes are those of DeepSeek-V3: 128 heads of 128 + 64 channels, and a latent of 512."""
    sizes = dataclasses.replace(
        deepseek_v3.read_config(config_of(DEEPSEEK)).attention,
        num_heads=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    attention = object.__new__(latent_attention.LatentAttention)
    object.__setattr__(attention, "config", sizes)
    assert attention._absorbs(1, 4096)
    assert attention._absorbs(64, 4096)
    assert not attention._absorbs(4096, 4096)
    assert not attention._absorbs(512, 4096)


def calls_of(tokens, dtype):
    """Return the names of the kernels that an attention layer with a cache calls on Hopper."""
    model = load_model(LITE, dtype=dtype)
    entries = model.init_cache(1, 200).layers[0]
    x = jnp.zeros((1, tokens, model.config.hidden), dtype)
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    attention = model.layers[0].attention
    attention.target = Target("cuda", (9, 0))
    lowered = jax.jit(lambda module, *rest: module(*rest)).lower(attention, x, positions, entries)
    names = r"custom_call @nvfp4_(\w*(?:attention|latents|queries|values))_cuda"
    return sorted(re.findall(names, lowered.as_text()))  # functions of a program have no order


def test_decoding_calls_the_kernels_for_latents():
    few = ["absorb_queries", "expand_values", "latent_attention", "prepare_latents"]
    assert calls_of(1, jnp.bfloat16) == few
    assert calls_of(8, jnp.bfloat16) == few
    assert calls_of(9, jnp.bfloat16) == ["latent_attention"]
    assert calls_of(150, jnp.bfloat16) == ["attention"]
    assert calls_of(1, jnp.float32) == []


@pytest.mark.parametrize("folder", [LITE, DIRECT], ids=["lite", "direct"])
def test_one_kernel_for_latents_changes_no_bit(folder, monkeypatch):
    """The cache has room for a token more, and two tokens in it."""
    model = load_model(folder, **EXACT)
    x = jax.random.normal(jax.random.key(0), (2, 3, model.config.hidden))
    positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (2, 3))
    run = jax.jit(lambda module, *operands: module(*operands))

    def outputs():
        attention, entries = model.layers[0].attention, model.init_cache(2, 4).layers[0]
        _, entries = run(attention, x[:, :2], positions[:, :2], entries)
        return jax.tree.leaves(run(attention, x[:, 2:], positions[:, 2:], entries))

    at_once = outputs()
    monkeypatch.setattr(latent_attention, "_FEW_TOKENS", 0)
    jax.clear_caches()
    for got, expected in zip(at_once, outputs(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_calibration_sees_the_latents_of_a_decoding_step():
    model = load_model(LITE, **EXACT)
    x, positions = jnp.ones((1, 1, model.config.hidden)), jnp.zeros((1, 1), jnp.int32)
    with capture(model) as seen:
        model.layers[0].attention(x, positions, model.init_cache(1, 4).layers[0])
    (latents,) = seen["layers.0.attention.kv_up"]
    assert latents.shape == (1, 1, model.config.attention.kv_lora_rank)


def test_the_cache_keeps_latents():
    model = load_model(LITE, **EXACT)
    config = model.config.attention
    (entry,) = model.init_cache(3, 7).layers[0].values()
    assert entry.shape == (3, 1, 7, config.kv_lora_rank + config.qk_rope_head_dim)


def test_fields_that_files_leave_out_have_the_values_of_transformers():
    config = config_of(DEEPSEEK)
    left_out = ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob")
    read = deepseek_v3.read_config({n: v for n, v in config.items() if n not in left_out})
    router = read.router
    assert (router.num_groups, router.groups_kept, router.scaling) == (8, 4, 2.5)
    assert router.renormalize
    without = {n: v for n, v in config.items() if n != "first_k_dense_replace"}
    assert deepseek_v3.read_config(without).dense_layers == {0, 1, 2}


def test_dense_layers_of_the_lite_model():
    config = config_of(LITE)
    assert deepseek_v3.read_lite_config(config).dense_layers == {1}
    published = {n: v for n, v in config.items() if n != "mlp_layer_types"}
    assert deepseek_v3.read_lite_config(published).dense_layers == {0}
    published["first_k_dense_replace"] = 2
    assert deepseek_v3.read_lite_config(published).dense_layers == {0, 1}


@pytest.mark.parametrize(
    ("folder", "changes", "message"),
    [
        (
            LITE,
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types: expected a list of 2 values from dense",
        ),
        (
            LITE,
            {"mlp_layer_types": ["dense", "moe"]},
            "mlp_layer_types: expected a list of 2 values",
        ),
        (LITE, {"partial_rotary_factor": 0.5}, "expected 1, because this architecture rot"),
        (DIRECT, {"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported"),
        (DIRECT, {"kv_lora_rank": None}, "kv_lora_rank: missing"),
        (DIRECT, {"q_lora_rank": 16}, "q_a_proj"),
    ],
)
def test_configs_that_do_not_fit(tmp_path, folder, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_model(copy_with_config(folder, tmp_path / "m", **changes))


@pytest.mark.parametrize("name", ["KimiK2ForCausalLM", "KimiK25ForConditionalGeneration"])
def test_kimi_is_read_as_a_deepseek(name):
    assert ARCHITECTURES[name] is ARCHITECTURES["DeepseekV3ForCausalLM"]
