"""Read folders in Mistral's own format: `params.json`, and files named "consolidated"."""

import copy
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from support.devices.host_devices import call
from support.files.checkpoint_edits import read_all
from support.files.given import CHECKPOINTS
from support.files.mistral_files import SOURCE, params_of, to_mistral, write_mistral_format
from support.files.unquantized import dequantized

from jax_nvfp4_moe import CheckpointError, load_model, quantize_model
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.folder import read_config
from jax_nvfp4_moe.checkpoint.mistral_format import to_config, to_names

FLOAT32 = {"scheme": "w4a16", "dtype": "float32"}
IDS = jnp.arange(24, dtype=jnp.int32)[None] % 64  # beyond the 8 positions before queries grow

# What params.json of Mistral-Large-3-675B-Instruct-2512 has, without images and quantization.
LARGE = {
    "dim": 7168,
    "head_dim": 192,
    "hidden_dim": 16384,
    "kv_lora_rank": 512,
    "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8192},
    "max_position_embeddings": 294912,
    "moe": {
        "expert_hidden_dim": 4096,
        "expert_model_parallel": 1,
        "expert_parallel": 1,
        "first_k_dense_replace": 3,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "route_every_n": 1,
        "routed_scale": 1.0,
    },
    "n_heads": 128,
    "n_kv_heads": 128,
    "n_layers": 61,
    "norm_eps": 1e-06,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000.0,
    "tied_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 131072,
    "yarn": {
        "alpha": 1,
        "apply_scale": False,
        "beta": 32,
        "factor": 36,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("shards", [1, 3])
def test_logits_are_those_of_the_form_of_transformers(tmp_path, shards):
    one, other = (
        load_model(each, **FLOAT32) for each in (SOURCE, write_mistral_format(tmp_path, shards))
    )
    np.testing.assert_array_equal(call(other, IDS), call(one, IDS))
    tensors = read_all(SOURCE)
    assert (
        to_mistral("model.layers.1.mlp.experts.0.up_proj.weight") == "layers.1.experts.0.w3.weight"
    )
    assert not any("proj" in to_mistral(name) for name in tensors)


def test_a_quantized_copy_is_in_the_form_of_transformers(tmp_path):
    plain, own = tmp_path / "plain", tmp_path / "own"
    dequantized(SOURCE.name, plain)
    config = json.loads((plain / "config.json").read_text())
    params = params_of({"quantization_config": None, **config})
    own.mkdir()
    (own / "params.json").write_text(json.dumps(params))
    tensors = {to_mistral(name): x for name, x in read_all(plain).items()}
    write_safetensors(own / "consolidated.safetensors", tensors)
    made = []
    for folder in (plain, own):
        quantize_model(folder, folder.with_suffix(".nvfp4"))
        made.append(call(load_model(folder.with_suffix(".nvfp4"), **FLOAT32), IDS))
    np.testing.assert_array_equal(*made)


def test_a_config_for_vllm_may_lie_beside(tmp_path):
    write_mistral_format(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["MistralLarge3ForCausalLM"]}')
    assert read_config(tmp_path)["architectures"] == ["Mistral4ForCausalLM"]
    (tmp_path / "consolidated.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"params\.json, which must be in the folder"):
        load_model(tmp_path)


def test_the_form_of_transformers_comes_first(tmp_path):
    """A folder with both forms is read as before."""
    write_mistral_format(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(SOURCE / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json.*missing"):
        load_model(tmp_path)


def test_a_config_without_weights_is_that_of_transformers(tmp_path):
    """Many of Mistral's models have both configs, and people copy these files alone."""
    for name in ("config.json", "hf_quant_config.json"):
        shutil.copy(SOURCE / name, tmp_path)
    (tmp_path / "params.json").write_text("{}")
    assert read_config(tmp_path) == read_config(SOURCE)


def test_sizes_of_the_published_model():
    config = to_config(LARGE)
    expected = {
        "hidden_size": 7168,
        "intermediate_size": 16384,
        "moe_intermediate_size": 4096,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 294912,
        "tie_word_embeddings": False,
        "head_dim": 192,
    }
    assert {name: config[name] for name in expected} == expected
    rope = config["rope_parameters"]
    assert (rope["beta_fast"], rope["beta_slow"], rope["factor"]) == (32, 1, 36)
    assert rope["llama_4_scaling_beta"] == 0.1
    assert "moe" not in config


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p.pop("kv_lora_rank"), "only models with shared experts"),
        (lambda p: p["moe"].update(num_shared_experts=0), "only models with shared experts"),
        (lambda p: p.pop("moe"), "moe: expected an object, got None"),
        (lambda p: p.pop("yarn"), "yarn: expected an object, got None"),
        (lambda p: p["yarn"].update(apply_scale=True), "yarn.apply_scale: expected False"),
        (lambda p: p["moe"].update(route_every_n=2), "moe.route_every_n: expected 1, got 2"),
        (lambda p: p.update(quantization={"qformat_weight": "fp8_e4m3"}), "quantization: expected"),
        (
            lambda p: p["llama_4_scaling"].update(original_max_position_embeddings=4096),
            "original_max_position_embeddings as in yarn",
        ),
    ],
)
def test_what_is_not_supported_is_named(edit, message):
    params = copy.deepcopy(LARGE)
    edit(params)
    with pytest.raises(CheckpointError, match=message):
        to_config(params)


def test_an_unknown_size_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="sliding_window"):
        load_model(write_mistral_format(tmp_path, sliding_window=16))


def test_two_tensors_of_one_meaning_are_ambiguous():
    problems = []
    to_names(["norm.weight", "model.norm.weight"], problems)
    assert problems == ["ambiguous: 'norm.weight' and 'model.norm.weight' mean the same"]


def test_input_scales_may_be_stored_in_bfloat16(tmp_path):
    """Mistral Small 4 stores those of shared experts so, and those of other experts in float32."""
    source = CHECKPOINTS / "qwen3moe-ct-w4a4"
    tensors = read_all(source)
    scales = [name for name in tensors if name.endswith("input_global_scale")]
    assert scales
    rounded = {name: tensors[name].astype(jnp.bfloat16) for name in scales}
    for folder, dtype in ((tmp_path / "a", np.float32), (tmp_path / "b", jnp.bfloat16)):
        shutil.copytree(source, folder)
        edited = tensors | {name: x.astype(dtype) for name, x in rounded.items()}
        write_safetensors(folder / "model.safetensors", edited)
    how = {"scheme": "w4a4", "dtype": "float32", "backend": "reference"}
    one, other = (load_model(tmp_path / name, **how) for name in "ab")
    np.testing.assert_array_equal(call(other, IDS), call(one, IDS))
