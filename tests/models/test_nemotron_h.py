"""Test configs, options and single layers of Nemotron-H; test_architectures checks the rest."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS, copy_with_config, reference_tensors
from support.models.architecture import KERNELS

from jax_nvfp4_moe import CheckpointError, load_model, load_moe
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.safetensors import open_tensors
from jax_nvfp4_moe.models.nemotron_h import read_config
from jax_nvfp4_moe.nn.norm import Residual

NANO = CHECKPOINTS / "nemotron_h-modelopt-w4a16"
SUPER = CHECKPOINTS / "nemotron_h-latent-modelopt-w4a16"


def config_of(folder, without=(), **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    return {name: value for name, value in config.items() if name not in without}


@jax.jit
def layer_outputs(model, ids):
    """Return the residual stream after each layer."""
    stream, found = Residual(model.embedding.get_value()[ids]), []
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    for layer in model.layers:
        stream, _ = layer(stream, positions, None)
        found.append(stream.x + stream.added)
    return found


@pytest.mark.parametrize("folder", [NANO, SUPER], ids=["nano", "super"])
def test_each_layer_is_exact(folder):
    """The bound 1e-5 is from the checkpoints' README. The last layer has the errors of all."""
    tensors = reference_tensors(folder)
    model = load_model(folder, **KERNELS)
    outputs = jax.jit(layer_outputs)(model, jnp.asarray(tensors["input_ids"], jnp.int32))
    for layer, output in enumerate(outputs):
        expected = tensors[f"layers.{layer}.output"]
        error = np.asarray(output, np.float64) - expected
        assert np.linalg.norm(error) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_block_type": None, "hybrid_override_pattern": "M*E-"},
        {"layers_block_type": None, "hybrid_override_pattern": "M*E-", "num_hidden_layers": 4},
        {"layers_block_type": ["mamba", "attention", "moe", "mlp"]},
        {
            "layers_block_type": None,
            "layer_types": ["linear_attention", "full_attention", "moe", "mlp"],
        },
        {"n_groups": None, "mamba_n_groups": 2, "conv_kernel": None, "mamba_d_conv": 4},
        {"n_routed_experts": None, "num_local_experts": 8},
        {"use_conv_bias": None, "mamba_conv_bias": True, "mamba_dt_min": 0.001},
        {"head_dim": None, "attention_head_dim": 16},
        {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    ],
    ids=str,
)
def test_spellings_of_one_config(changes):
    assert read_config(config_of(NANO, **changes)) == read_config(config_of(NANO))


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, (0.001, math.inf)),
        ({"time_step_min": 0.01}, (0.01, math.inf)),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.X"}}, (0.0, math.inf)),
        ({"auto_map": {}, "time_step_limit": [0.0, math.inf]}, (0.0, math.inf)),
        ({"auto_map": {}, "time_step_limit": [0.002, 0.1]}, (0.002, 0.1)),
    ],
    ids=str,
)
def test_limits_of_time_steps(changes, limits):
    """The limits depend on the code that a file is for: NVIDIA's own, or transformers' class."""
    assert read_config(config_of(NANO, **changes)).mamba.step_limits == limits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type: expected a list of"),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M|E"},
            "hybrid_override_pattern or layers_block_type: expected .* got 'M|E'",
        ),
        ({"layers_block_type": None}, "hybrid_override_pattern or layers_block_type"),
        ({"sliding_window": 128}, "sliding_window is not supported"),
        ({"mlp_hidden_act": "relu"}, "mlp_hidden_act: 'relu' is not supported; supported: 'relu2'"),
        ({"mamba_hidden_act": "tanh"}, "mamba_hidden_act: 'tanh' is not supported"),
        ({"n_groups": 3}, "mamba_num_heads: expected a multiple of 3 groups, got 8"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads: expected a multiple of 3 key heads, got 4",
        ),
        ({"num_experts_per_tok": 9}, "9 experts cannot be chosen from 1 of 1 groups of 8"),
        (
            {"auto_map": {}, "time_step_limit": [1, 0]},
            "time_step_limit: expected two nonnegative numbers",
        ),
        (
            {"auto_map": {}, "time_step_limit": "none"},
            "time_step_limit: expected two nonnegative numbers",
        ),
        ({"moe_latent_size": 0}, "moe_latent_size: expected a positive integer"),
    ],
    ids=str,
)
def test_configs_that_do_not_fit(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(config_of(NANO, **changes))


def test_a_model_without_experts_needs_no_sizes_of_them():
    sizes = [name for name in config_of(NANO) if "expert" in name or "moe" in name]
    config = config_of(NANO, sizes, layers_block_type=None, hybrid_override_pattern="M-*-")
    assert read_config(config).experts is None


@pytest.mark.parametrize("layer", [0, 1, 3, 4, -1])
def test_load_moe_names_a_layer_without_experts(layer):
    with pytest.raises(
        ValueError, match=rf"layer: expected .* E in the pattern M\*E-; got {layer}"
    ):
        load_moe(NANO, layer)


def with_tensors(folder, target, edit, **changes):
    """Copy a checkpoint with fields of its config and tensors changed."""
    copy_with_config(folder, target, **changes)
    with open_tensors(folder) as tensors:
        read = {name: np.array(tensors.read(name)) for name in tensors.names()}
    edit(read)
    write_safetensors(target / "model.safetensors", read)
    return target


def logits_of(folder, ids, **changes):
    return np.asarray(jax.jit(lambda m, i: m(i))(load_model(folder, **KERNELS | changes), ids))


def test_biases_where_the_file_has_them(tmp_path):
    """Biases of zero change nothing, and biases of 0.1 change the logits."""
    ids = jnp.arange(12, dtype=jnp.int32)[None]
    flags = {"attention_bias": True, "mlp_bias": True, "use_bias": True}
    rows = {"in_proj": 328, "out_proj": 64, "q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
    plain = logits_of(NANO, ids)
    found = {}
    for size in (0.0, 0.1):

        def edit(tensors, size=size):
            for name in [n for n in tensors if n.endswith(".weight")]:
                module = name.removesuffix(".weight")
                leaf = module.rpartition(".")[2]
                n = rows.get(leaf, len(tensors[name]))
                if leaf in rows or leaf in ("up_proj", "down_proj"):
                    tensors[f"{module}.bias"] = np.full(n, size, np.float32)

        found[size] = logits_of(with_tensors(NANO, tmp_path / str(size), edit, **flags), ids)
    np.testing.assert_allclose(found[0.0], plain, atol=1e-5)
    assert np.abs(found[0.1] - plain).max() > 0.1


def test_a_shared_embedding_is_the_head(tmp_path):
    """transformers writes a head even if the embedding is shared. The model then uses that head."""
    ids = jnp.arange(12, dtype=jnp.int32)[None]
    own = copy_with_config(NANO, tmp_path / "own", tie_word_embeddings=True)
    np.testing.assert_array_equal(logits_of(own, ids), logits_of(NANO, ids))

    def drop(tensors):
        tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"]

    untied = with_tensors(NANO, tmp_path / "untied", drop)

    def share(tensors):
        del tensors["lm_head.weight"]

    tied = with_tensors(NANO, tmp_path / "tied", share, tie_word_embeddings=True)
    np.testing.assert_array_equal(logits_of(tied, ids), logits_of(untied, ids))


def test_a_wide_residual_stream(tmp_path):
    """Layers add up in float32; the last returns the head's dtype. Float32 models do not change."""
    ids = jnp.arange(12, dtype=jnp.int32)[None]
    wide = copy_with_config(NANO, tmp_path / "wide", residual_in_fp32=True)
    np.testing.assert_array_equal(logits_of(wide, ids), logits_of(NANO, ids))
    for folder, dtype in ((wide, jnp.float32), (NANO, jnp.bfloat16)):
        outputs = layer_outputs(load_model(folder, dtype=jnp.bfloat16), ids)
        assert [x.dtype for x in outputs] == [dtype] * 3 + [jnp.bfloat16]


def test_the_state_is_float32_in_any_dtype():
    model = load_model(NANO, dtype=jnp.bfloat16)
    cache = model.init_cache(2, 8)
    assert cache.layers[0]["state"].dtype == jnp.float32
    assert cache.layers[0]["conv"].shape == (2, 3, 192)
    assert [sorted(layer) for layer in cache.layers] == [["conv", "state"], ["k", "v"], [], []]
    logits, cache = jax.eval_shape(model, jnp.ones((2, 3), jnp.int32), cache)
    assert logits.dtype == jnp.float32
    assert cache.layers[0]["state"].dtype == jnp.float32
    assert cache.layers[0]["conv"].dtype == jnp.bfloat16
