"""Write a given checkpoint in Mistral's own format."""

import json

import numpy as np
from support.files.checkpoint_edits import read_all
from support.files.given import CHECKPOINTS

from jax_nvfp4_moe.checkpoint.export import write_safetensors

SOURCE = CHECKPOINTS / "mistral4-modelopt-w4a16"
# The names of transformers -> those of Mistral, as the headers of Mistral Large 3 have them.
NAMES = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.norm.": "norm.",
    "lm_head.": "output.",
    "model.layers.": "layers.",
    "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "self_attn.q_a_proj.": "attention.wq_a.",
    "self_attn.q_a_layernorm.": "attention.q_a_norm.",
    "self_attn.q_b_proj.": "attention.wq_b.",
    "self_attn.kv_a_proj_with_mqa.": "attention.wkv_a_with_mqa.",
    "self_attn.kv_a_layernorm.": "attention.kv_a_norm.",
    "self_attn.kv_b_proj.": "attention.wkv_b.",
    "self_attn.o_proj.": "attention.wo.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.down_proj.": "feed_forward.w2.",
    "mlp.up_proj.": "feed_forward.w3.",
    "mlp.gate.": "gate.",
    "mlp.shared_experts.": "shared_experts.",
    "mlp.experts.": "experts.",
    "gate_proj.": "w1.",
    "down_proj.": "w2.",
    "up_proj.": "w3.",
}


def to_mistral(name):
    for own, other in NAMES.items():
        name = name.replace(own, other)
    return name


def params_of(config):
    """Return the `params.json` of a `config.json`."""
    rope = config["rope_parameters"]
    return {
        "dim": config["hidden_size"],
        "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "tied_embeddings": False,
        "rope_theta": rope["rope_theta"],
        "moe": {
            "num_experts": config["n_routed_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"],
            "num_shared_experts": config["n_shared_experts"],
            "expert_hidden_dim": config["moe_intermediate_size"],
            "first_k_dense_replace": config["first_k_dense_replace"],
            "routed_scale": config["routed_scaling_factor"],
            "num_expert_groups": config["n_group"],
            "num_expert_groups_per_tok": config["topk_group"],
            "expert_parallel": 1,
            "expert_model_parallel": 1,
            "route_every_n": 1,
        },
        "yarn": {
            "factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope["beta_fast"],
            "alpha": rope["beta_slow"],
            "apply_scale": False,
        },
        "llama_4_scaling": {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        },
        "vision_encoder": {"hidden_size": 8},
        **{name: config[name] for name in ("kv_lora_rank", "q_lora_rank", "v_head_dim")},
        **{name: config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim")},
        **{name: config[name] for name in ("vocab_size", "max_position_embeddings")},
        "quantization_config": config["quantization_config"],
    }


def write_mistral_format(folder, shards=1, **edits):
    """Write SOURCE in Mistral's own format."""
    config = json.loads((SOURCE / "config.json").read_text())
    (folder / "params.json").write_text(json.dumps(params_of(config) | edits))
    tensors = {to_mistral(name): x for name, x in read_all(SOURCE).items()}
    tensors["vision_encoder.transformer.layers.0.attention.wq.weight"] = np.zeros(
        (4, 4), np.float32
    )
    tensors["patch_merger.merging_layer.weight"] = np.zeros((4, 4), np.float32)
    if shards == 1:
        write_safetensors(folder / "consolidated.safetensors", tensors)
        return folder
    index = {}
    for shard in range(shards):
        name = f"consolidated-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[shard::shards]}
        write_safetensors(folder / name, part)
        index |= dict.fromkeys(part, name)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "consolidated.safetensors.index.json").write_text(text)
    return folder
