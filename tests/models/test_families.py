"""Test files of new families as their owners publish them, and configs that are not supported."""

import collections
import contextlib
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.checkpoint_edits import edited, read_all
from support.files.deepseek_v4_files import publish_names
from support.files.given import CHECKPOINTS, copy_with_config, reference_tensors
from support.files.published_step import NOT_PUBLISHED, PUBLISHED
from support.files.unquantized import (
    ROUNDABLE,
    dense_tensors,
    dequantized,
    read_config,
    write_source,
)
from support.models.architecture import EXACT, logit_error, run

from jax_nvfp4_moe import CheckpointError, load_model, quantize_model
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.models.loading import find_architecture
from jax_nvfp4_moe.nn.attention.latent_attention import MLAConfig


def given(name):
    return CHECKPOINTS / f"{name}-modelopt-w4a16"


def read(name, **changes):
    """Return the config of a checkpoint as its family reads it. A value of None removes a field."""
    config = merge_text_config(json.loads((given(name) / "config.json").read_text())) | changes
    config = {field: value for field, value in config.items() if value is not None}
    return find_architecture(config).read_config(config)


def publish_kimi(tensors):
    """Rename tensors as in published Kimi-Linear files, with one convolution per projection.

    transformers 5.23 gives the dense MLP the name of the expert blocks.
    """
    for name in list(tensors):
        new = name.replace(".forget_gate", "").replace(".mlp.", ".block_sparse_moe.")
        if ".experts." in name and ".shared_experts." not in name:
            for old, other in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                new = new.replace(old, other)
        tensors[new] = tensors.pop(name)
    split_convolution(tensors, "model.layers.0.self_attn")


def publish_ling(tensors):
    """Rename tensors as in published Ling files."""
    for name in list(tensors):
        new = name.replace(".forget_gate", "").replace(".self_attn.", ".attention.")
        new = new.replace("attention.o_proj", "attention.dense")
        new = new.replace("gate.e_score_correction_bias", "gate.expert_bias")
        tensors[new.replace("embed_tokens", "word_embeddings")] = tensors.pop(name)
    split_convolution(tensors, "model.layers.0.attention")


def split_convolution(tensors, mixer):
    for part, weight in zip("qkv", np.split(tensors.pop(f"{mixer}.conv1d.weight"), 3), strict=True):
        tensors[f"{mixer}.{part}_conv1d.weight"] = weight


def nest_experts(tensors):
    """Rename experts of Gemma 4 as in files that have a module `moe` around them."""
    for name in list(tensors):
        tensors[name.replace(".experts.", ".moe.experts.")] = tensors.pop(name)


def publish_minimax_m3(tensors):
    """Rename tensors as in published MiniMax-M3 files, with gate and up in one matrix each."""
    for name in list(tensors):
        tensor = tensors.pop(name)
        name = name.replace("indexer.", "index_").replace("1.mlp.", "1.block_sparse_moe.")
        name = name.replace("moe.gate.e_score", "moe.e_score")
        if ".experts." in name:
            for old, other in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                name = name.replace(old, other)
        if "gate_up_proj" in name:
            parts = np.split(tensor, 2) if tensor.ndim else (tensor, tensor)
            for part, half in zip(("gate_proj", "up_proj"), parts, strict=True):
                tensors[name.replace("gate_up_proj", part)] = half
        else:
            tensors[name] = tensor


def publish_step(tensors):
    """Rename tensors as in published Step-3.7 files, with all experts of a projection in one."""
    stacks = collections.defaultdict(dict)
    for name in list(tensors):
        new = name.replace("model.language_model.", "model.")
        new = new.replace(".mlp.gate.e_score_correction_bias", ".moe.router_bias")
        new = new.replace(".mlp.gate.", ".moe.gate.")
        new = new.replace(".mlp.shared_experts.", ".share_expert.")
        block, found, rest = new.partition(".mlp.experts.")
        if found:
            expert, _, rest = rest.partition(".")
            stacks[f"{block}.moe.{rest}"][int(expert)] = tensors.pop(name)
        else:
            tensors[new] = tensors.pop(name)
    for name, parts in stacks.items():
        tensors[name] = np.stack([parts[expert] for expert in sorted(parts)])


# The end of a name in files of DeepSeek-V4 -> the end of the name in memory of transformers.
IN_MEMORY = {
    ".attn_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".q_norm.": ".q_a_norm.",
    "attn.norm.": "attn.kv_norm.",
    "compressor.norm.": "compressor.kv_norm.",
    "indexer.compressor.": "compressor.indexer.",
    "indexer.wq_b.": "compressor.indexer.q_b_proj.",
    "indexer.weights_proj.": "compressor.indexer.scorer.weights_proj.",
    ".attn.": ".self_attn.",
    ".ffn.": ".mlp.",
    ".hc_attn_": ".attn_hc.",
    ".hc_ffn_": ".ffn_hc.",
    ".attn_sink": ".sinks",
    ".ape": ".position_bias",
    ".wq_a.": ".q_a_proj.",
    ".wq_b.": ".q_b_proj.",
    ".wkv.": ".kv_proj.",
    ".wgate.": ".gate_proj.",
    ".wo_a.": ".o_a_proj.",
    ".wo_b.": ".o_b_proj.",
    ".gate.bias": ".gate.e_score_correction_bias",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
    "head.weight": "lm_head.weight",
}


def keep_deepseek_v4_in_memory(tensors):
    """Rename tensors of DeepSeek-V4 as transformers 5 does in memory."""
    for name in list(tensors):
        new = name
        for old, other in IN_MEMORY.items():
            new = new.replace(old, other)
        tensors[new] = tensors.pop(name)


def publish_glm5_next(tensors):
    """Rename tensors of GLM-5-Next as in published files, with one convolution per projection."""
    for name in list(tensors):
        new = name.replace(".forget_gate", "")
        for part in ("attn", "ffn"):
            new = new.replace(f".{part}_hc.", f".hc_{part}_")
        tensors[new] = tensors.pop(name)
    split_convolution(tensors, "model.language_model.layers.0.self_attn")


def join_ngram_table(tensors):
    """Put the table of Qwen4-Exp into one tensor, as transformers 5 does in memory."""
    stem = "model.layers.0.ple.ple_embedding.ngram_embedding"
    parts = [tensors.pop(f"{stem}.shard_{index}.weight") for index in range(4)]
    tensors[f"{stem}.weight"] = np.concatenate(parts)


def keep_laguna_in_memory(tensors):
    """Rename tensors of Laguna as transformers 5 does in memory."""
    for name in list(tensors):
        new = name.replace("experts.e_score", "gate.e_score")
        tensors[new.replace("shared_expert.", "shared_experts.")] = tensors.pop(name)


def keep_mimo_in_memory(tensors):
    """Rename tensors of MiMo-V2-Flash as transformers 5 does in memory."""
    for name in list(tensors):
        tensors[name.replace("attention_sink_bias", "sinks")] = tensors.pop(name)


def keep_in_memory(tensors):
    """Rename tensors of EXAONE-MoE and Granite as transformers 5 does in memory."""
    for name in list(tensors):
        new = name.replace("mlp.e_score", "mlp.gate.e_score").replace("router.layer", "router")
        tensors[new] = tensors.pop(name)


def keep_hy3_in_memory(tensors):
    """Rename tensors of Hy3 as transformers 5 does in memory."""
    for name in list(tensors):
        new = name.replace("mlp.router.gate.", "mlp.gate.").replace("shared_mlp", "shared_experts")
        new = new.replace("mlp.expert_bias", "mlp.e_score_correction_bias")
        tensors[new] = tensors.pop(name)


def keep_phimoe_in_memory(tensors):
    """Rename tensors of Phi-3.5-MoE as transformers 5 does in memory."""
    for name in list(tensors):
        new = name.replace("block_sparse_moe.gate.", "mlp.router.").replace(
            "block_sparse_moe", "mlp"
        )
        tensors[new] = tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("hy_v3", keep_hy3_in_memory),
        ("phimoe", keep_phimoe_in_memory),
        ("kimi_linear", publish_kimi),
        ("bailing_hybrid", publish_ling),
        ("gemma4", nest_experts),
        ("step3p7", publish_step),
        ("deepseek_v4", publish_names),
        ("deepseek_v4", keep_deepseek_v4_in_memory),
        ("exaone_moe", keep_in_memory),
        ("granitemoe", keep_in_memory),
        ("glm5_next", publish_glm5_next),
        ("qwen4_exp", join_ngram_table),
        ("laguna", keep_laguna_in_memory),
        ("mimo_v2_flash", keep_mimo_in_memory),
    ],
)
def test_other_spellings_of_a_file(name, rename, tmp_path):
    """The model has the arrays of the given file, whose logits test_default_dtype.py compares."""
    found = arrays_of(edited(tmp_path, given(name).name, rename))
    expected = arrays_of(given(name))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array)


def arrays_of(folder):
    """Return the path of each array of a model -> its values, with convolutions in one array."""
    leaves = jax.tree.leaves_with_path(load_model(folder, **EXACT))
    found = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    for path in [path for path in found if ".conv_q." in path]:
        parts = [found.pop(path.replace("conv_q", f"conv_{part}")) for part in "qkv"]
        found[path.replace("conv_q", "conv")] = np.concatenate(parts)
    return found


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h-latent"])
def test_nemotron_in_a_multimodal_file(name, tmp_path):
    """Files of Nemotron-3.5 with vision, and of Nemotron-3 Nano Omni, hold the language model."""

    def nest(tensors):
        for key in list(tensors):
            tensors["language_model." + key] = tensors.pop(key)
        for key in ("vision_model.radio_model.model.blocks.0.norm1.weight", "mlp1.0.weight"):
            tensors[key] = np.ones(8, np.float32)
        tensors["sound_encoder.encoder.layers.0.norm_out.weight"] = np.ones(8, np.float32)

    folder = edited(tmp_path, given(name).name, nest)
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["NemotronH_Omni_Reasoning_V3"], "model_type": "nemotron_h_omni"}
    outer["quantization_config"] = config.pop("quantization_config")
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(outer | {"llm_config": config}))
    found, expected = arrays_of(folder), arrays_of(given(name))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array)


def test_the_thinker_in_a_file_of_qwen3_omni(tmp_path):
    """Such a file holds a talker too, whose layers have names like those of the thinker."""

    def nest(tensors):
        for key in list(tensors):
            new = key.replace("model.language_model.", "model.")
            for tower in ("visual", "audio_tower"):
                new = new.replace(f"model.{tower}", tower)
            tensors[f"thinker.{new}"] = tensors.pop(key)
        for key in ("model.layers.0.self_attn.q_proj", "codec_head", "text_projection.linear_fc1"):
            tensors[f"talker.{key}.weight"] = np.ones((8, 8), np.float32)
        tensors["code2wav.pre_transformer.layers.0.mlp.up_proj.weight"] = np.ones((8, 8))

    folder = edited(tmp_path, given("qwen3_omni_moe").name, nest)
    thinker = json.loads((folder / "config.json").read_text())
    quantization = thinker.pop("quantization_config")
    quantization["ignore"] = [
        "thinker." + name.replace("model.language_model.", "model.").replace("model.v", "v")
        for name in quantization["ignore"]
    ]
    del thinker["architectures"]
    outer = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "thinker_config": thinker,
        "talker_config": {"text_config": {"hidden_size": 8, "num_hidden_layers": 1}},
        "code2wav_config": {},
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    found, expected = arrays_of(folder), arrays_of(given("qwen3_omni_moe"))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array)


def test_the_thinker_alone_is_quantized(tmp_path):
    """The language model has the bytes of the tool, which quantizes the audio tower too."""
    source = dequantized(given("qwen3_omni_moe").name, tmp_path / "source", ROUNDABLE)
    quantize_model(source, tmp_path / "q")
    ours, theirs = read_all(tmp_path / "q"), read_all(given("qwen3_omni_moe"))
    quantized = [key for key in theirs if ".audio_tower." not in key and "visual" not in key]
    assert [key for key in ours if ".audio_tower." in key and key.endswith("_scale")] == []
    for key in quantized:
        if key.endswith("weight_scale_2"):  # the source rounded 2688 * scale
            np.testing.assert_array_max_ulp(ours[key], theirs[key], 1)
        else:
            assert ours[key].tobytes() == theirs[key].tobytes()


def test_minimax_m3_as_published(tmp_path):
    """Its gate and up are two linears, which this package joins in another module."""
    folder = edited(tmp_path, given("minimax_m3").name, publish_minimax_m3)
    tensors = reference_tensors(given("minimax_m3"))
    found = run(load_model(folder, **EXACT), jnp.asarray(tensors["input_ids"], jnp.int32))
    assert logit_error(found, tensors["logits"]) < 1e-5


def test_granite_is_quantized_as_published(tmp_path):
    """All experts are in one tensor, gate rows before up rows. The bytes equal the tool's."""
    dense = dense_tensors(read_all(given("granitemoe")), ROUNDABLE)
    for layer in range(2):
        block = f"model.layers.{layer}.block_sparse_moe"
        experts = [
            [dense.pop(f"{block}.experts.{e}.{part}_proj.weight") for e in range(6)]
            for part in ("gate", "up", "down")
        ]
        gate, up, down = map(np.stack, experts)
        dense[f"{block}.input_linear.weight"] = np.concatenate([gate, up], axis=1)
        dense[f"{block}.output_linear.weight"] = down
    compare_quantized("granitemoe", dense, read_all(given("granitemoe")), tmp_path)


def test_minimax_m3_is_quantized_as_published(tmp_path):
    """The linears of the indexer share a global scale with the queries, as in the tool's file."""
    dense = dense_tensors(read_all(given("minimax_m3")), ROUNDABLE)
    publish_minimax_m3(dense)
    theirs = read_all(given("minimax_m3"))
    publish_minimax_m3(theirs)
    compare_quantized("minimax_m3", dense, theirs, tmp_path)


def test_step_is_quantized_as_published(tmp_path):
    """The source stacks gate and up apart. Each expert is written on its own, with its bytes."""
    dense = dense_tensors(read_all(given("step3p7")), ROUNDABLE)
    publish_step(dense)
    theirs = {
        name.replace(".mlp.experts.", ".moe.experts."): tensor
        for name, tensor in read_all(given("step3p7")).items()
    }
    publish_step(theirs)
    compare_quantized("step3p7", dense, theirs, tmp_path)


def compare_quantized(name, dense, theirs, folder):
    """Quantize `dense` tensors with the config of a checkpoint, and compare the bytes written."""
    source = write_source(folder / "source", dense, read_config(given(name)))
    quantize_model(source, folder / "q")
    ours = read_all(folder / "q")
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        if key.endswith("weight_scale_2"):  # the source rounded 2688 * scale
            np.testing.assert_array_max_ulp(tensor, theirs[key], 1)
        else:
            assert tensor.tobytes() == theirs[key].tobytes()


def test_published_names_of_sizes():
    """Kimi-Linear has sizes in an object of their own, and Hunyuan in lists of equal numbers."""
    kimi = read(
        "kimi_linear",
        layer_types=None,
        mlp_layer_types=None,
        linear_head_dim=None,
        linear_num_heads=None,
        linear_conv_kernel_dim=None,
        first_k_dense_replace=1,
        linear_attn_config={
            "full_attn_layers": [2],
            "kda_layers": [1],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    )
    assert kimi == read("kimi_linear")
    assert read("dots1", scoring_func="noaux_tc") == read("dots1")
    hunyuan = read("hunyuan_v1_moe", moe_topk=[2, 2], moe_intermediate_size=[48, 48])
    assert hunyuan == read("hunyuan_v1_moe")
    sparse = {
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 32,
        "sparse_block_size": 3,
        "sparse_topk_blocks": 3,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1],
    }
    minimax = read(
        "minimax_m3",
        layer_types=None,
        mlp_layer_types=None,
        index_n_heads=None,
        index_head_dim=None,
        index_block_size=None,
        index_topk_blocks=None,
        index_local_blocks=None,
        sparse_attention_config=sparse,
        moe_layer_freq=[0, 1],
        hidden_act="swigluoai",
    )
    assert minimax == read("minimax_m3")
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    deepseek = read(
        "deepseek_v4",
        layer_types=None,
        compress_ratios=[0, 4, 128, 0],  # the last one is of a layer that predicts further tokens
        compress_rates=None,
        compress_rate_csa=2,
        compress_rate_hca=5,
        mlp_layer_types=None,
        num_hash_layers=1,
        partial_rotary_factor=None,
        rope_parameters=None,
        rope_scaling=rope,
    )
    assert deepseek == read("deepseek_v4")
    granite = read("granitemoehybrid")
    layers = range(granite.num_layers)
    older = ["mamba" if layer in granite.recurrent else "attention" for layer in layers]
    assert set(older) == {"attention", "mamba"}
    for name in ("layer_types", "layers_block_type"):
        assert read("granitemoehybrid", **{"layer_types": None, name: older}) == granite
    sizes = {"global_head_dim": 32, "num_global_key_value_heads": 1}
    assert read("gemma4", per_layer_config=None, **sizes) == read("gemma4")


COUNT = ("num_experts", "num_local_experts")
ROUTED = ("n_routed_experts", "num_local_experts")
# The names that a size has in files of a family, of published models and of transformers.
NAMES = {
    "afmoe": (COUNT,),
    "deepseek_v3-direct": (ROUTED,),
    "deepseek_v32": (ROUTED,),
    "deepseek_v4": (ROUTED,),
    "dots1": (ROUTED,),
    "ernie4_5_moe": (("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok")),
    "exaone_moe": ((*COUNT, "n_routed_experts"),),
    "glm4_moe-groups": ((*COUNT, "n_routed_experts"),),
    "glm4v_moe": ((*COUNT, "n_routed_experts"),),
    "glm5_next": (ROUTED,),
    "glm_moe_dsa": (ROUTED,),
    "gpt_oss": (COUNT, ("num_experts_per_tok", "experts_per_token")),
    "granitemoe": (COUNT,),
    "hunyuan_v1_moe": (COUNT, ("moe_topk", "num_experts_per_tok")),
    "hy_v3": (COUNT,),
    "kimi_linear": (
        (*COUNT, "n_routed_experts"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("moe_renormalize", "norm_topk_prob"),
        ("num_expert_group", "n_group"),
        ("num_shared_experts", "n_shared_experts"),
        ("model_max_length", "max_position_embeddings"),
    ),
    "lfm2_moe": (COUNT, ("tie_embedding", "tie_word_embeddings")),
    "llama4_text": (COUNT,),
    "mimo_v2_flash": (ROUTED,),
    "minimax_m2": (COUNT,),
    "minimax_m3": (COUNT,),
    "mistral4": (ROUTED,),
    "mixtral-window": (COUNT,),
    "nemotron_h": (
        ("head_dim", "attention_head_dim"),
        ("n_groups", "mamba_n_groups"),
        ("conv_kernel", "mamba_d_conv"),
    ),
    "olmoe-bias": (COUNT,),
    "phimoe": (COUNT,),
    "qwen2_moe": (COUNT,),
    "qwen3_omni_moe": (COUNT,),
    "qwen3_vl_moe": (COUNT,),
    "qwen3moe": (COUNT,),
    "solar_open": (ROUTED,),
    "step3p7": (("n_routed_experts", "moe_num_experts", "num_local_experts"),),
}


# Values in place of those of the given files, which are defaults.
OTHER_VALUES = {
    "moe_renormalize": False,
    "num_expert_group": 2,
    "num_shared_experts": 2,
    "tie_embedding": False,
    "conv_kernel": 3,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_size_has_its_value_under_each_name(name):
    """A name that is not read would give the default, where there is one."""
    config = merge_text_config(read_config(given(name)))
    for names in NAMES[name]:
        (found,) = {config[one] for one in names if config.get(one) is not None}
        value, nothing = OTHER_VALUES.get(names[0], found), dict.fromkeys(names)
        first, *others = (read(name, **nothing | {one: value}) for one in names)
        assert others == [first] * len(others), names
        with contextlib.suppress(CheckpointError):  # there is no default
            assert read(name, **nothing) != first, names


def test_phimoe_has_a_rotation_for_short_texts_and_one_for_long_texts():
    """Published files have the fields of the embedding under their older names."""
    phi = read("phimoe")
    assert phi.max_positions == 128
    config = read_config(given("phimoe"))
    rope = dict(config["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    older = {"rope_parameters": None, "rope_theta": theta, "rope_scaling": rope | {"type": kind}}
    assert read("phimoe", **older) == phi
    del rope["original_max_position_embeddings"]  # which stands beside it, too
    assert read("phimoe", **older | {"rope_scaling": rope | {"type": kind}}) == phi
    plain = read("phimoe", rope_parameters={"rope_theta": theta}, max_position_embeddings=128)
    assert plain.max_positions == 128
    assert (plain.attention.rope.scale, plain.attention.long_rope) == (1.0, None)
    length, long = phi.attention.long_rope
    assert length == 32
    for kind, own in (("short", phi.attention.rope), ("long", long)):
        frequencies = np.float32(plain.attention.rope.frequencies)
        divided = frequencies / np.float32(rope[f"{kind}_factor"])
        np.testing.assert_array_equal(np.float32(own.frequencies), divided)
        assert own.scale == rope[f"{kind}_mscale"]


def test_phimoe_takes_the_rotation_for_the_room_of_its_cache(tmp_path):
    """Its file is also read with the rotation for long texts alone, also for short ones."""
    rope = read_config(given("phimoe"))["rope_parameters"]
    long = rope | {f"short_{part}": rope[f"long_{part}"] for part in ("factor", "mscale")}
    changed = copy_with_config(given("phimoe"), tmp_path / "long", rope_parameters=long)
    both, other = (load_model(folder, **EXACT) for folder in (given("phimoe"), changed))
    ids = np.arange(7, dtype=np.int32)[None]
    for room, equal in ((32, False), (33, True)):
        first, second = (model(ids, model.init_cache(1, room))[0] for model in (both, other))
        assert (logit_error(first, np.asarray(second)) < 1e-5) == equal


def test_published_names_of_step():
    """Published files have lists with a value for each layer, also for those of other tokens."""
    step = read("step3p7", **NOT_PUBLISHED, **PUBLISHED)
    assert step == read("step3p7")
    assert step.expert_limits == (math.inf, math.inf, 0.5)
    assert [one.num_heads for one in step.attention] == [4, 8, 4]
    assert read("step3p7", per_layer_config={"01": {"num_attention_heads": 8}}) == step
    # Only layers without a window have scaled frequencies.
    scaling = {"rope_type": "linear", "factor": 2.0}
    scaled = read("step3p7", **NOT_PUBLISHED, **PUBLISHED, rope_scaling=scaling)
    for old, new, factor in zip(step.attention, scaled.attention, (2, 1, 2), strict=True):
        assert new.rope.frequencies == pytest.approx([f / factor for f in old.rope.frequencies])


def test_published_names_of_mimo():
    """Published files have other names for lists of layers and for rotary embeddings."""
    given = read("mimo_v2_flash")
    published = {
        **dict.fromkeys(("layer_types", "mlp_layer_types", "rope_parameters", "sliding_window")),
        "hybrid_layer_pattern": [0, 1, 0],
        "moe_layer_freq": [0, 1, 1],
        "rope_theta": 5000.0,
        "swa_rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "sliding_window_size": 5,  # without the query itself
        "swa_num_key_value_heads": 2,
        "layernorm_epsilon": 1e-5,
        "rope_scaling": {"type": "default"},
    }
    mimo = read("mimo_v2_flash", **published)
    assert mimo.dense_layers == given.dense_layers == {0}
    assert mimo.attention[0] == mimo.attention[2] == given.attention[0]
    sliding = dataclasses.replace(mimo.attention[1], rope=given.attention[1].rope)
    assert sliding == given.attention[1]
    rotated = [100.0 ** (-n / 8) for n in range(8)]
    assert mimo.attention[1].rope.frequencies == pytest.approx(rotated)
    assert read("mimo_v2_flash", **published | {"swa_rope_theta": 99.0}) != mimo


def test_published_names_of_glm5_next():
    """Published files have the sizes of linear attention in an object."""
    given = read("glm5_next")
    names = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "linear_lower_bound")
    inner = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, "gate_lower_bound": -4.0}
    nothing = dict.fromkeys(names)
    assert read("glm5_next", **nothing, linear_attn_config=inner) == given
    assert read("glm5_next", **nothing, linear_attn_config=inner | {"num_heads": 2}) != given
    unbounded = inner | {"gate_lower_bound": None}
    glm = read("glm5_next", **nothing, linear_attn_config=unbounded | {"safe_gate": False})
    assert glm.attention[0].lower_bound is None
    glm = read("glm5_next", **nothing, linear_attn_config=unbounded)
    assert glm.attention[0].lower_bound == -5.0
    assert read("glm5_next", layer_types=["linear_attention", "full_attention"]) == given


def test_layers_with_two_digits_have_their_own_sizes():
    """transformers writes their indices with zeros before them."""
    plain = {"layer_types": None, "num_hidden_layers": 12}
    own = {"05": {"head_dim": 32}, "11": {"head_dim": 64}}
    gemma = read("gemma4", **plain, per_layer_config=own)
    assert [one.head_dim for one in gemma.attention] == [16] * 5 + [32] + [16] * 5 + [64]


def test_layers_are_as_transformers_derives_them():
    """If a file leaves out the lists of layers, they are derived as in transformers."""
    qwen = read("qwen2_moe", layer_types=None)
    assert qwen == read("qwen2_moe")
    assert [one.window for one in qwen.attention] == [6, None, None]
    plain = {"layer_types": None, "mlp_layer_types": None, "num_hidden_layers": 4}
    exaone = read("exaone_moe", **plain)
    assert [one.window for one in exaone.attention] == [6, 6, 6, None]
    assert [one.rope is None for one in exaone.attention] == [False, False, False, True]
    assert exaone.dense_layers == {0}
    other = read("exaone_moe", **plain, sliding_window_pattern="LG")
    assert [one.window for one in other.attention] == [6, None, 6, None]
    plain["num_hidden_layers"] = 5
    other = read("exaone_moe", **plain, sliding_window_pattern="LLG")
    assert [one.window for one in other.attention] == [6, 6, None, 6, None]
    afmoe = read("afmoe", layer_types=None, num_hidden_layers=8, num_dense_layers=None)
    assert [one.window for one in afmoe.attention] == [6, 6, 6, None] * 2
    assert [one.rope is None for one in afmoe.attention] == [False, False, False, True] * 2
    assert afmoe.dense_layers == {0}
    other = read("afmoe", layer_types=None, global_attn_every_n_layers=1)
    assert [one.window for one in other.attention] == [None, None]
    assert read("hy_v3", mlp_layer_types=None).dense_layers == {0}
    assert read("hy_v3", mlp_layer_types=None, first_k_dense_replace=2).dense_layers == {0, 1}
    dots = read("dots1", layer_types=None, num_hidden_layers=3)
    assert [one.window for one in dots.attention] == [None, 6, 6]
    config = json.loads((given("dots1") / "config.json").read_text())
    with pytest.raises(CheckpointError, match="sliding_window: null, but layer_types has"):
        find_architecture(config).read_config(config | {"sliding_window": None})
    config |= {"layer_types": None, "sliding_window": None}
    dots = find_architecture(config).read_config(config)
    assert [one.window for one in dots.attention] == [None, None]
    # The last layer has no window, whatever the file says.
    plain = {"layer_types": None, "per_layer_config": None, "num_hidden_layers": 8}
    gemma = read("gemma4", **plain, rope_parameters=None)
    assert [one.window for one in gemma.attention] == [6, 6, 6, 6, 6, None, 6, None]
    assert {(one.head_dim, one.num_kv_heads) for one in gemma.attention} == {(16, 2), (512, 2)}
    assert gemma.attention[-1].rope.frequencies[63:65] == (pytest.approx(1e6 ** (-126 / 512)), 0.0)
    plain = {"layer_types": None, "mlp_layer_types": None, "num_hidden_layers": 8}
    laguna = read("laguna", **plain, num_attention_heads_per_layer=None)
    assert [one.window for one in laguna.attention] == [None] * 8
    assert laguna.dense_layers == {0}
    cohere = read("cohere2_moe", **plain, first_k_dense_replace=2)
    assert [one.window for one in cohere.attention] == [None, None, 6, 6, 6, None, 6, 6]
    assert [one.rope is None for one in cohere.attention] == [False] * 5 + [True, False, False]
    assert cohere.dense_layers == {0, 1}
    mimo = read("mimo_v2_flash", **plain)
    assert [one.window for one in mimo.attention] == [None, 6, 6, 6, 6, None, 6, 6]
    assert [one.num_kv_heads for one in mimo.attention] == [1, 2, 2, 2, 2, 1, 2, 2]
    assert mimo.dense_layers == {0}
    qwen = read("qwen4_exp", **plain)
    assert qwen.attention_layers == {3, 7}
    glm = read("glm5_next", **plain, indexer_types=None)
    assert [isinstance(one, MLAConfig) for one in glm.attention] == ([False] * 3 + [True]) * 2
    assert glm.dense_layers == {0, 1, 2}
    deepseek = read("deepseek_v4", layer_types=None, mlp_layer_types=None, num_hidden_layers=6)
    kinds = [one.pool and one.pool.rate for one in deepseek.attention]
    assert kinds == [5, 5, 5, 2, 5, 2]
    assert deepseek.hash_layers == {0, 1, 2}
    ernie = read("ernie4_5_moe", num_hidden_layers=6, moe_layer_end_index=-1, moe_layer_interval=2)
    assert ernie.dense_layers == {0, 2, 4}
    assert read("qwen3_vl_moe").router.renormalize
    every = {"indexer_types": None, "num_hidden_layers": 9, "mlp_layer_types": None}
    assert read("glm_moe_dsa", **every).attention.types == ("full",) * 9
    glm = read("glm_moe_dsa", **every, index_topk_freq=4, index_skip_topk_offset=3)
    assert [layer for layer in range(9) if not glm.attention.is_shared(layer)] == [0, 1, 2, 6]
    assert glm == read("glm_moe_dsa", **every, index_topk_pattern="FFFSSSFSS")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ernie4_5_moe", {"use_bias": True}, "use_bias: True is not supported"),
        ("ernie4_5_moe", {"moe_k": 9}, "moe_k: 9 of 8 experts"),
        (
            "ministral3",
            {"model_type": "pixtral"},
            "text_config.model_type: 'pixtral' is not supported in Mistral3ForConditional",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 8}},
            "short_factor: expected 8 positive numbers, one a frequency; got None",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "su", "short_factor": [1.0] * 7 + [0.0]}},
            "short_factor: expected 8 positive numbers",
        ),
        ("phi3", {"rope_parameters": {"rope_type": "llama3"}}, "supported: default, longrope"),
        ("granite", {"mlp_bias": True}, "mlp_bias: True is not supported"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling: expected not zero, got 0.0"),
        (
            "granitehybrid",
            {"shared_intermediate_size": 0},
            "shared_intermediate_size: expected a positive integer without experts, got 0",
        ),
        ("olmo3", {"layer_types": ["conv", "conv"]}, "layer_types: expected a list of 2 values"),
        ("olmo3", {"rope_parameters": [1]}, "rope_parameters: expected an object"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias: True is not supported"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act: 'silu' is not supported"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave: False is not supported"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim: expected at least qk_rope"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 3}, 'expected "full" for the first layer'),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types: expected a list of 3 values"),
        ("granitemoe", {"logits_scaling": 0.0}, "logits_scaling: expected not zero, got 0.0"),
        (
            "granitemoehybrid",
            {"layer_types": ["conv", "conv"]},
            "layer_types: expected a list of 2 values from",
        ),
        ("granitemoehybrid", {"mamba_d_head": 8}, "mamba_d_head: expected 8 heads to fill 128"),
        ("granitemoehybrid", {"time_step_limit": [2.0, 1.0]}, "time_step_limit: expected two"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 1]}, "moe_topk: layers that differ"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": 32}, "moe_intermediate_size: expected"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla: True is not supported"),
        ("exaone_moe", {"sliding_window": None}, "sliding_window: null, but layer_types has"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate: False is not supported"),
        ("qwen3_5", {"output_gate_type": "sigmoid"}, "output_gate_type: .sigmoid. is not suppor"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True is"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation: .gelu. is not supported"),
        ("gemma3", {"hidden_act": "silu"}, "hidden_act: .silu. is not supported"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: expected null"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a positive"),
        ("gemma3", {"rope_parameters": [1]}, "rope_parameters: expected an object, got"),
        ("gemma3", {"rope_scaling": 8}, "rope_scaling: expected an object, got 8"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": 8, "sliding_attention": {}}},
            "rope_parameters: expected an object full_attention",
        ),
        ("gemma4_dense", {"num_kv_shared_layers": 1}, "num_kv_shared_layers: expected 0, because"),
        ("gemma4_edge", {"num_kv_shared_layers": 5}, "num_kv_shared_layers: expected fewer lay"),
        ("gemma4_edge", {"num_kv_shared_layers": 7}, "num_kv_shared_layers: expected fewer lay"),
        ("gemma4_edge", {"vocab_size_per_layer_input": 128}, "per_layer_input: expected 64, the v"),
        ("gemma4_dense", {"final_logit_softcapping": 0.0}, "softcapping: expected a positive num"),
        ("nemotron_h_dense", {"mlp_hidden_act": "tanh"}, "mlp_hidden_act: .tanh. is not supported"),
        ("exaone4", {"sliding_window": 0}, "sliding_window: expected a positive integer"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: expected 2 integers, got 1"),
        ("smollm3", {"no_rope_layers": [1, "a"]}, "no_rope_layers: expected a list of integers"),
        ("smollm3", {"use_sliding_window": False}, "layer_types: sliding_attention expects use_s"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias: True is not supported"),
        ("gemma4", {"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input: expected"),
        ("gemma4", {"num_kv_shared_layers": 1}, "num_kv_shared_layers: expected 0"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: 'all'"),
        ("gemma4", {"hidden_activation": "silu"}, "hidden_activation: 'silu' is not supported"),
        ("gemma4", {"final_logit_softcapping": 0.0}, "softcapping: expected a positive number"),
        ("gemma4", {"top_k_experts": 7}, "top_k_experts: expected at most 6 experts, got 7"),
        ("gemma4", {"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config: expect"),
        ("gemma4", {"rope_parameters": {"full_attention": {}}}, "expected an object sliding_att"),
        ("step3p7", {"rope_parameters": {"rope_theta": 1e4}}, "object for each of full_attention"),
        ("minimax_m3", {"index_n_heads": 4}, "index_n_heads: expected 2, one for each key head"),
        ("minimax_m3", {"index_head_dim": 4}, "index_head_dim: expected at least 8 rotated"),
        ("minimax_m3", {"swiglu_limit": 0.0}, "swiglu_limit: expected a positive number"),
        ("minimax_m3", {"sparse_attention_config": 1}, "sparse_attention_config: expected an obj"),
        ("minimax_m3", {"layer_types": ["linear", "linear"]}, "layer_types: expected a list of 2"),
        ("step3p7", {"gating": False}, "gating: False is not supported"),
        ("step3p7", {"mlp_bias": True}, "mlp_bias: True is not supported"),
        ("step3p7", {"swiglu_limits": [0.5]}, "swiglu_limits: expected 3 numbers of 0 or more"),
        ("step3p7", {"swiglu_limits_shared": [0, 0, -1]}, "swiglu_limits_shared: expected 3"),
        ("step3p7", {"sliding_window": None}, "sliding_window: null, but layer_types has"),
        ("step3p7", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a positive"),
        ("step3p7", {"per_layer_config": {"one": {}}}, "per_layer_config: expected layers with"),
        (
            "step3p7",
            {"mlp_layer_types": None, "moe_layers_enum": "1;2"},
            "moe_layers_enum: expected indices",
        ),
        (
            "step3p7",
            {"rope_parameters": None, "rope_theta": [1e4]},
            "rope_theta: expected 3 numbers",
        ),
        (
            "step3p7",
            {"per_layer_config": None, "num_sliding_attention_heads": 5},
            "num_attention_heads: expected a multiple of 2 key heads, got 5",
        ),
        (
            "step3p7",
            {
                "per_layer_config": None,
                "num_sliding_attention_heads": None,
                "attention_other_setting": 1,
            },
            "attention_other_setting: expected an object",
        ),
        ("deepseek_v4", {"o_groups": 3}, "o_groups: 8 heads do not divide by 3 groups"),
        ("deepseek_v4", {"index_head_dim": 4}, "index_head_dim: expected at least 8 rotated"),
        ("deepseek_v4", {"compress_rates": [4]}, "compress_rates: expected an object"),
        ("deepseek_v4", {"swiglu_limit": 0.0}, "swiglu_limit: expected a positive number"),
        (
            "deepseek_v4",
            {"layer_types": None, "compress_ratios": [0, 4, 5]},
            "compress_ratios: expected a list of 3 values from 0, 4, 128",
        ),
        ("qwen4_exp", {"hc_count": 1}, "hc_count: expected at least 2 streams, got 1"),
        ("qwen4_exp", {"indexer_kv_heads": 2}, "indexer_kv_heads: 2 is not supported"),
        ("qwen4_exp", {"indexer_budget": 7}, "indexer_budget: expected a multiple of 3 tokens"),
        ("qwen4_exp", {"indexer_head_dim": 4}, "indexer_head_dim: expected at least 8 rotated"),
        ("qwen4_exp", {"output_gate_type": "tanh"}, "output_gate_type: 'tanh' is not supported"),
        ("qwen4_exp", {"ple_layer_ids": [2]}, "ple_layer_ids: expected layers with linear"),
        ("qwen4_exp", {"ple_layer_ids": [3]}, "ple_layer_ids: expected layers from 1 to 2"),
        ("qwen4_exp", {"eos_token_id": None}, "eos_token_id: expected a token below 64"),
        ("qwen4_exp", {"heads_per_ngram": 3}, "ple_embed_dim: expected a multiple of 6 heads"),
        ("qwen4_exp", {"split_ngram_parts": 2000}, "split_ngram_parts: expected at most 1024"),
        ("glm5_next", {"qk_rope_head_dim": 8}, "qk_rope_head_dim: expected 0, because"),
        ("glm5_next", {"index_topk": 7}, "index_topk: expected a multiple of 3 tokens of a window"),
        ("glm5_next", {"linear_lower_bound": 1.0}, "linear_lower_bound: expected a negative numb"),
        ("glm5_next", {"indexer_types": ["full", "shared"]}, "indexer_types: expected full for"),
        ("glm5_next", {"indexer_types": None, "index_topk_freq": 2}, "indexer_types: expected fu"),
        ("glm5_next", {"index_kpool_always_select_tail": False}, "tail: False is not supported"),
        ("glm5_next", {"num_key_value_heads": 2}, "num_key_value_heads: 2 is not supported"),
        ("glm5_next", {"swiglu_limit": 0.0}, "swiglu_limit: expected a positive number"),
        ("laguna", {"gating": False}, "gating: False is not supported"),
        ("laguna", {"gating_types": ["per_element"] * 3}, "gating_types: expected per_head"),
        ("laguna", {"mlp_only_layers": [0, 1]}, "mlp_only_layers: expected .0., the dense layers"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "on_input: True is not supported"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "expected 3 positive numbers, got .4."),
        ("laguna", {"num_attention_heads_per_layer": [4, 5, 4]}, "expected a multiple of 2 key"),
        ("laguna", {"sliding_window": 0}, "sliding_window: expected a positive integer"),
        ("laguna", {"rope_parameters": {"full_attention": {}}}, "expected an object sliding_att"),
        ("cohere2_moe", {"expert_selection_fn": "relu"}, "selection_fn: 'relu' is not supported"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, "'max' is not supported"),
        ("cohere2_moe", {"use_parallel_block": False}, "use_parallel_block: False is not supp"),
        ("cohere2_moe", {"use_qk_norm": True}, "use_qk_norm: True is not supported"),
        ("mimo_v2_flash", {"swa_head_dim": 16}, "swa_head_dim: 16 is not supported"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 4}, "value_heads: 4 is not supported"),
        ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, "bias: True is not supported"),
        (
            "mimo_v2_flash",
            {"mlp_layer_types": None, "moe_layer_freq": [0, 2, 1]},
            "moe_layer_freq: expected a list of 3 zeros and ones",
        ),
        (
            "mimo_v2_flash",
            {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_scaling: .* is not supported",
        ),
        ("lfm2_moe", {"layer_types": None}, "layer_types: missing"),
        ("afmoe", {"score_func": "softmax"}, "score_func: 'softmax' is not supported"),
        ("afmoe", {"route_norm": False}, "route_norm: False is not supported"),
        ("afmoe", {"n_group": 2}, "n_group: 2 is not supported"),
        ("afmoe", {"num_limited_groups": 2}, "num_limited_groups: 2 is not supported"),
        ("afmoe", {"num_experts_per_tok": 5}, "num_experts_per_tok: expected at most 4 experts"),
        ("afmoe", {"layer_types": ["full_attention"]}, "layer_types: expected a list of 2 values"),
        ("hy_v3", {"qk_norm": False}, "qk_norm: False is not supported"),
        ("hy_v3", {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid: False is not supp"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias: True is not supported"),
        ("hy_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected a list of 2 values"),
        ("solar_open", {"use_qk_norm": True}, "use_qk_norm: True is not supported"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace: 1 is not supported"),
        ("solar_open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts: missing"),
        ("glm4v_moe", {"topk_group": 5}, "cannot be chosen from 5 of 4 groups"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok: 3 is not supported"),
        ("phimoe", {"num_local_experts": 1}, "num_local_experts: expected 2 or more, got 1"),
        ("phimoe", {"router_jitter_noise": -0.1}, "router_jitter_noise: expected 0 or more"),
        ("phimoe", {"rope_parameters": {"rope_type": "longrope"}}, "short_mscale: expected a fin"),
        (
            "phimoe",
            {"rope_parameters": {"rope_type": "longrope", "short_mscale": 1.0, "long_mscale": 0}},
            "short_mscale, long_mscale: expected positive numbers, got 0",
        ),
        (
            "phimoe",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_mscale": 1.0,
                    "long_mscale": 1.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [1.0] * 7 + [0],
                }
            },
            "long_factor: expected 8 positive numbers",
        ),
        ("phimoe", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type: 'dynamic' is not"),
        ("qwen3_omni_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most 6"),
        ("glm4v_moe", {"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope: False is not supported"),
        ("bailing_hybrid", {"kda_lower_bound": 1.0}, "kda_lower_bound: expected a negative"),
    ],
)
def test_what_is_not_supported_is_named(name, changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(name, **changes)
