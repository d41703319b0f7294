"""Mistral's own format: ``params.json``, and tensors in files named ``consolidated``.

Mistral publishes NVFP4 checkpoints of Mistral Large 3 and Mistral Small 4 in this form alone. Sizes
and tensors have other names than in the form of transformers; their values are the same. Only
models with experts and a latent attention are read. In the others, transformers stores the rows of
queries and keys in another order.

Source: ``params.json`` of both models; ``transformers_utils/configs/mistral.py`` and
``models/mistral_large_3.py`` of vLLM.
"""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted

PARAMS = "params.json"
# The index, and the file of a checkpoint in one file; those of transformers have other names.
FILES = "consolidated.safetensors.index.json", "consolidated.safetensors"
OTHER_FILES = "model.safetensors.index.json", "model.safetensors"

# A name in params.json -> that in config.json.
_SIZES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied_embeddings": "tie_word_embeddings",
}
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
# The parts for images, and what the other names say already.
_UNUSED = {"vision_encoder", "multimodal", "model_type", "max_seq_len"}
# How the model was trained over devices.
_UNUSED_OF_EXPERTS = {"expert_parallel", "expert_model_parallel"}
_POSITIONS = 128_000  # vLLM's default

_LAYER = re.compile(r"(layers\.\d+\.)(.+)")
_EXPERT = re.compile(r"(experts\.\d+|shared_experts|feed_forward)\.w([123])\.(.+)")
_PROJECTIONS = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}
_WHOLE = {"tok_embeddings.": "model.embed_tokens.", "norm.": "model.norm.", "output.": "lm_head."}
_MODULES = {
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "attention.wq_a.": "self_attn.q_a_proj.",
    "attention.q_a_norm.": "self_attn.q_a_layernorm.",
    "attention.wq_b.": "self_attn.q_b_proj.",
    "attention.wkv_a_with_mqa.": "self_attn.kv_a_proj_with_mqa.",
    "attention.kv_a_norm.": "self_attn.kv_a_layernorm.",
    "attention.wkv_b.": "self_attn.kv_b_proj.",
    "attention.wo.": "self_attn.o_proj.",
    "gate.": "mlp.gate.",
}


def is_mistral_format(folder: pathlib.Path) -> bool:
    """Return whether a folder has its weights in Mistral's own format alone."""
    return _has_any(folder, FILES) and not has_other_files(folder)


def has_other_files(folder: pathlib.Path) -> bool:
    """Return whether a folder has weights in the form of transformers."""
    return _has_any(folder, OTHER_FILES)


def _has_any(folder, names) -> bool:
    # A broken link counts as a file, and a folder that cannot be searched as an empty one.
    return any(os.path.lexists(folder / name) for name in names)


def to_config(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` that means the same as a parsed ``params.json``.

    Names that are not known keep their values, so that the reader of the config reports them.

    Raises:
      CheckpointError: lists what is missing or not supported.
    """
    problems: list[str] = []
    experts, yarn, scaling = (
        _object(params, name, problems) for name in ("moe", "yarn", "llama_4_scaling")
    )
    shared = experts.get("num_shared_experts")
    if not problems and (not shared or params.get("kv_lora_rank") is None):
        raise CheckpointError(
            f"{PARAMS}: in Mistral's own format, only models with shared experts and a latent "
            "attention are read, which are Mistral Large 3 and Mistral Small 4; pass a folder in "
            "the form of transformers, with config.json"
        )
    _expect(yarn, "yarn.apply_scale", False, problems)
    _expect(experts, "moe.route_every_n", 1, problems)
    _expect(params, "quantization", None, problems)
    beta, length = (scaling.get(name) for name in ("beta", "original_max_position_embeddings"))
    if not problems and (beta is None or length != yarn.get("original_max_position_embeddings")):
        problems.append(
            f"{PARAMS}: llama_4_scaling: expected beta, and original_max_position_embeddings as in "
            f"yarn; got {quoted(dict(scaling))}"
        )
    if problems:
        raise CheckpointError(problems)
    rope = {
        **_renamed(yarn, _YARN, {"apply_scale"}),
        **{"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"rope_theta": params.get("rope_theta"), "llama_4_scaling_beta": beta},
    }
    others = {"moe", "yarn", "llama_4_scaling", "rope_theta", "quantization", *_UNUSED}
    return {
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": _POSITIONS,
        **_renamed(params, _SIZES, others),
        **_renamed(experts, _EXPERTS, {"route_every_n", *_UNUSED_OF_EXPERTS}),
        **{"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"},
        **{"rope_parameters": rope, "rope_interleave": True, "norm_topk_prob": True},
    }


def to_names(names: Iterable[str], problems: list[str]) -> dict[str, str]:
    """Return the names of tensors -> those that transformers gives them.

    Tensors for images, and those that are not known, keep the rest of their names.

    Args:
      names: the names of all tensors.
      problems: receives a sentence for each pair of tensors that would have the same name.
    """
    owner: dict[str, str] = {}
    for name in names:
        if (first := owner.setdefault(_to_name(name), name)) != name:
            problems.append(f"ambiguous: {quoted(first)} and {quoted(name)} mean the same")
    return {name: new for new, name in owner.items()}


def _to_name(name):
    for own, other in _WHOLE.items():
        if name.startswith(own):
            return other + name.removeprefix(own)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name
    prefix, rest = f"model.{layer[1]}", layer[2]
    if found := _EXPERT.fullmatch(rest):
        block, projection, leaf = found.groups()
        inside = "" if block == "feed_forward" else f"{block}."
        return f"{prefix}mlp.{inside}{_PROJECTIONS[projection]}.{leaf}"
    own = next((own for own in _MODULES if rest.startswith(own)), "")
    return prefix + _MODULES.get(own, "") + rest.removeprefix(own)


def _object(params, name, problems) -> Mapping[str, Any]:
    """Return the object `name`, or an empty one, which is a problem."""
    found = params.get(name)
    if isinstance(found, dict):
        return found
    problems.append(f"{PARAMS}: {name}: expected an object, got {quoted(found)}")
    return {}


def _expect(values, path, expected, problems):
    """Add a problem if a value that may be missing has another value than the expected one."""
    found = values.get(path.rpartition(".")[2])
    if found is not None and found != expected:
        problems.append(f"{PARAMS}: {path}: expected {quoted(expected)}, got {quoted(found)}")


def _renamed(values, names, left_out) -> dict[str, Any]:
    """Return values under new names, without some of them."""
    return {names.get(name, name): v for name, v in values.items() if name not in left_out}
