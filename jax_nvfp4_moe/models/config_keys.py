"""Find keys of a config that would change what a model computes, and that nothing here reads.

Readers take the keys of their architecture. `NEUTRAL` lists keys of other architectures that change
the function, with the values that leave it as it is. `HARMLESS` lists keys that no reader needs.
`NOT_APPLIED` lists keys of ``generation_config.json`` that change which tokens are chosen.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, printable, quoted
from jax_nvfp4_moe.checkpoint.folder import CONFIG, exists, read_json
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.numerics.routing import Router

GENERATION_CONFIG = "generation_config.json"
_LOG = logging.getLogger("jax_nvfp4_moe")
_OFF = (None, False, 0)
_ONE = (None, False, 1)
# Types of layers that see all keys. An indexer, where a layer has one, has tensors of its own.
_PLAIN_LAYERS = ("full_attention", "attention", "indexed_attention")

# A key -> the values with which it changes nothing. Tensors that belong to a feature are no part of
# this table: stored tensors that nothing reads are a problem in any case.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (  # bounds and clamps
            "attn_logit_softcapping",
            "attn_logit_softcap",
            "attention_logit_softcapping",
            "final_logit_softcapping",
            "router_logit_softcapping",
            "moe_router_logit_softcapping",
            "logit_softcapping",
            "logits_soft_cap",
            "output_logit_softcapping",
            "clip_qkv",
            "swiglu_limit",
            "swiglu_limits",
            "swiglu_limits_shared",
        ),
        _OFF,
    ),
    **dict.fromkeys(
        (  # factors
            "embedding_multiplier",
            "embedding_multiplier_scale",
            "residual_multiplier",
            "attention_multiplier",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "attn_output_multiplier",
            "key_multiplier",
            "lm_head_multiplier",
            "logits_scaling",
            "logit_scale",
            "output_multiplier_scale",
            "scale_emb",
            "embedding_scale",
            "attention_scale",
            "attention_value_scale",
            "scale_attention",
            "softmax_scale",
            "routed_scaling_factor",
            "moe_router_scaling_factor",
            "moe_routed_scaling_factor",
            "compression_ratio",
            "rotary_pct",
        ),
        _ONE,
    ),
    **dict.fromkeys(
        (  # other attentions, positions and layers
            "scale_depth",
            "dim_model_base",
            "ssm_multipliers",
            "mlp_multipliers",
            "query_pre_attn_scalar",
            "alibi",
            "use_alibi",
            "scale_attn_by_inverse_layer_idx",
            "use_logn_attn",
            "logn_attn",
            "use_dynamic_ntk",
            "llama_4_scaling",
            "attn_temperature_tuning",
            "attention_chunk_size",
            "use_parallel_residual",
            "parallel_attn",
            "parallel_block",
            "use_mup",
            "use_cla",
            "zero_expert_num",
            "num_zero_experts",
            "rope_interleave",
            "rope_interleaved",
            "rotary_dim",
            "no_rope_layer_interval",
            "sliding_window",
        ),
        _OFF,
    ),
    "n_group": _ONE,
    "norm_topk_prob": (None, True),
    "scoring_func": (None,),
    "position_embedding_type": (None, "rope", "rotary", "nope"),
    "no_rope_layers": (None, []),
    "layer_types": (None, []),
}

# A key -> the key without which its reader does not look at it.
_SWITCHES = dict.fromkeys(("sliding_window", "layer_types"), "use_sliding_window")

_FOR_TRAINING = "it matters in training alone"
_FOR_TOKENIZER = "token ids come from the tokenizer and the caller"
_FOR_TOOL = "it describes a tool, a file or a kernel of another runtime"
_OTHER_MODULE = "it belongs to a module that is not loaded"
_DERIVED = "shapes, lists of layers or another key say the same"
# A key that no reader needs -> the reason.
HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "attention_dropout",
            "hidden_dropout",
            "embedding_dropout",
            "embd_pdrop",
            "resid_pdrop",
            "residual_dropout",
            "initializer_range",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "input_jitter_noise",
            "router_z_loss_coef",
            "aux_loss_alpha",
            "seq_aux",
            "output_router_logits",
            "output_attentions",
            "output_hidden_states",
            "moe_norm_min",  # a bound on the sum of weights, which softmax weights exceed
            "moe_capacity",
            "moe_drop_tokens",
            "moe_use_aux_free",
            "mtp_loss_scaling_factor",
            "load_balance_coeff",
            "rescale_prenorm_residual",
            "time_step_max",  # the range from which training drew the first biases
            "time_step_floor",
            "pretraining_tp",
            "ep_size",
        ),
        _FOR_TRAINING,
    ),
    **dict.fromkeys(
        (
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "sep_token_id",
            "image_token_id",
            "video_token_id",
            "vision_start_token_id",
            "vision_end_token_id",
            "image_start_token_id",
            "image_end_token_id",
            "video_start_token_id",
            "video_end_token_id",
            "audio_token_id",
            "image_token_index",
            "boi_token_id",
            "boi_token_index",
            "eoi_token_id",
            "eoi_token_index",
            "boa_token_id",
            "eoa_token_index",
            "eod_token_id",
            "image_start_token_id",
            "image_end_token_id",
            "video_start_token_id",
            "video_end_token_id",
            "audio_start_token_id",
            "audio_end_token_id",
            "position_id_per_seconds",
            "user_token_id",
            "system_token_id",
            "assistant_token_id",
            "im_start_token_id",
            "im_end_token_id",
            "tts_bos_token_id",
            "tts_eos_token_id",
            "tts_pad_token_id",
        ),
        _FOR_TOKENIZER,
    ),
    **dict.fromkeys(
        (
            "transformers_version",
            "torch_dtype",
            "dtype",
            "auto_map",
            "model_type",
            "architectures",
            "_name_or_path",
            "use_cache",
            "return_dict",
            "quantization_config",  # read by `checkpoint.quantization`
            "use_mamba_kernels",
            "chunk_size",
            "mamba_chunk_size",
            "mamba_ssm_dtype",
            "mamba_ssm_cache_dtype",
            "moe_shared_expert_overlap",
            "use_grouped_mm",
            "enable_moe_fp32_combine",  # the dtype in which a sum or a product is rounded
            "enable_attention_fp32_softmax",
            "enable_lm_head_fp32",
            "num_logits_to_keep",
        ),
        _FOR_TOOL,
    ),
    **dict.fromkeys(
        (
            "vision_config",
            "audio_config",
            "text_config",  # merged into the top level
            "llm_config",
            "thinker_config",
            "talker_config",
            "code2wav_config",
            "enable_audio_output",
            "num_nextn_predict_layers",
            "num_mtp_modules",
            "mtp_num_hidden_layers",
            "use_mtp",
            "mtp_layer_types",
            "mtp_mlp_layer_types",
            "mtp_layers_block_type",
            "projector_bias",
            "mm_tokens_per_image",
            "multimodal_projector_bias",
            "projector_hidden_act",
            "spatial_merge_size",
            "vision_feature_layer",
        ),
        _OTHER_MODULE,
    ),
    **dict.fromkeys(
        (
            "head_dim",  # where q, k and v have sizes of their own
            "qk_head_dim",
            "expand",
            "max_window_layers",  # of models that have layer_types, or a window in all layers
            "num_key_value_heads",
            "intermediate_size",
            "num_attention_groups",
            "linear_num_heads",
            "expert_hidden_dim",
            "model_max_length",
            "use_double_wide_mlp",  # with keys shared between layers, which are refused
            "original_max_position_embeddings",  # where the embedding is not scaled, or has it too
            "partial_rotary_factor",  # of an embedding that no layer has
            "rope_theta",
            "rope_parameters",
            "rope_scaling",
            "compress_rope_theta",  # where rope_parameters has an object for it
            "first_k_dense_replace",
            "num_experts_per_tok",  # where no layer has experts
            "mlp_bias",  # where stored biases are refused
            "mamba_proj_bias",
            "linear_conv_kernel_dim",
            "sliding_window_pattern",
            "_sliding_window_pattern",
            "number_of_conv_states",
            "num_sliding_attention_heads",
            "num_hidden_layers",  # where a pattern lists the layers
            "n_shared_experts",  # where their whole width is given
            "dense_intermediate_size",  # where no layer is dense
            "moe_intermediate_size",  # where no layer has experts
            "moe_latent_size",
            "moe_shared_expert_intermediate_size",
            "n_routed_experts",
            "num_experts",
            "num_experts_per_tok",
            "top_k_experts",
            "topk_group",
            "hidden_act",  # where another key names the activation
            "index_block_size",  # where no layer has an indexer
            "index_head_dim",
            "index_local_blocks",
            "index_n_heads",
            "index_topk_blocks",
            "vocab_size_per_layer_input",  # where layers have no embeddings of their own
        ),
        _DERIVED,
    ),
    "time_step_limit": "transformers does not read it for files without code of their own",
}

# A key of generation_config.json -> the values with which it changes nothing.
NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1),
    "encoder_repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "num_beams": (None, 1),
    "watermarking_config": (None, {}),
}


def refuse_unread_keys(
    config: Mapping[str, Any], sizes: Any, read_config: Callable[[Mapping[str, Any]], Any]
) -> None:
    """Refuse each key of `NEUTRAL` that changes the function and that the reader does not read.

    A reader reads a key if it returns other sizes, or an error, for other values of the key.

    Args:
      config: the parsed ``config.json``, its ``text_config`` at the top level.
      sizes: what `read_config` returns for `config`.
      read_config: reads the sizes of the architecture.

    Raises:
      CheckpointError: lists all such keys.
    """
    problems = [
        f"{CONFIG}: {name}: {quoted(config[name])} changes what a model computes, and is not "
        "supported for this architecture"
        for name, neutral in NEUTRAL.items()
        if name in config
        if not _is_neutral(config, name, neutral, sizes)
        if not _is_read(config, name, sizes, read_config)
    ]
    if problems:
        raise CheckpointError(problems)


def _is_neutral(config, name, neutral, sizes) -> bool:
    """Return whether a key has a value that changes nothing, or one that the sizes have anyway."""
    value = config[name]
    if any(value == one for one in neutral):
        return True
    return name in _IMPLIED and bool(_IMPLIED[name](config, value, sizes))


def _is_read(config, name, sizes, read_config) -> bool:
    """Return whether other values of a key lead to other sizes, or to an error."""
    try:
        if name in _SWITCHES:
            config = {**config, _SWITCHES[name]: True}
            sizes = read_config(config)
        others = (None, "no value that any reader takes")
        return any(read_config({**config, name: other}) != sizes for other in others)
    except Exception:  # of any kind: a reader has looked at the value
        return True


def _has_plain_layers(config, value, sizes) -> bool:
    del config, sizes
    return isinstance(value, list) and all(one in _PLAIN_LAYERS for one in value)


def _rotates_all_layers(config, value, sizes) -> bool:
    del config, sizes
    return isinstance(value, list) and all(value)


def _lists_rotated_layers(config, value, sizes) -> bool:
    del value, sizes
    return bool(config.get("no_rope_layers"))


def _has_no_effect(config, value, sizes) -> bool:
    """Return whether a window is switched off, or as long as the context."""
    off = config.get("use_sliding_window") is False
    return off or (type(value) is int and value >= sizes.max_positions)


def _is_the_score(config, value, sizes) -> bool:
    del config
    return value in [router.score for router in _parts(sizes, Router)]


def _is_rotated(config, value, sizes) -> bool:
    del config
    return value in [2 * len(rope.frequencies) for rope in _parts(sizes, Rope)]


def _is_interleaved(config, value, sizes) -> bool:
    del config, value
    return any(getattr(part, "interleaved", False) for part in _parts(sizes, object))


def _is_gemma(config, value, sizes) -> bool:
    """Return whether a model is a Gemma 4, whose norms replace the factor on queries.

    transformers and vLLM do not read it either.
    """
    del value, sizes
    return str(config.get("model_type", "")).startswith("gemma4")


# A key -> whether the sizes have its value without reading it.
_IMPLIED: Mapping[str, Callable[[Mapping[str, Any], Any, Any], bool]] = {
    "layer_types": _has_plain_layers,
    "no_rope_layers": _rotates_all_layers,
    "no_rope_layer_interval": _lists_rotated_layers,
    "sliding_window": _has_no_effect,
    "scoring_func": _is_the_score,
    "rotary_dim": _is_rotated,
    "rope_interleave": _is_interleaved,
    "rope_interleaved": _is_interleaved,
    "query_pre_attn_scalar": _is_gemma,
}


def _parts(value: Any, kind: type) -> Iterator[Any]:
    """Yield the dataclasses of one kind inside the sizes of a model."""
    if isinstance(value, tuple):
        for one in dict.fromkeys(value):
            yield from _parts(one, kind)
    elif dataclasses.is_dataclass(value):
        if isinstance(value, kind):
            yield value
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name), kind)


def warn_of_generation_keys(folder: Any) -> None:
    """Write a warning if ``generation_config.json`` has settings that `generate` does not apply.

    Sampling is the caller's: `generate` is greedy where it is not asked for anything else.
    """
    if not exists(folder, GENERATION_CONFIG):
        return
    try:
        config = read_json(folder, GENERATION_CONFIG)
    except CheckpointError:
        return  # the tokenizer reads the file, and tells what is wrong with it
    found = [
        f"{name} {quoted(config[name])}"
        for name, neutral in NOT_APPLIED.items()
        if name in config and not any(config[name] == one for one in neutral)
    ]
    if found:
        _LOG.warning(
            "%s: %s: not applied, because `generate` does not implement it: %s",
            printable(folder),
            GENERATION_CONFIG,
            ", ".join(found),
        )
