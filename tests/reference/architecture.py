"""The record of an architecture, and fields that several tiny models share."""

import dataclasses
from typing import Any

SMALL = {"vocab_size": 128, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
MLA = {
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
GRANITE = {
    "intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model type of transformers, the fields that make it tiny, and the prompt's shape.

    Attributes:
      model_type: name of the type in transformers.
      fields: fields of its configuration.
      prompt: rows and tokens of the prompt. The tokens cross a chunk of recurrent mixers (64 tokens
        in transformers' delta net).
      model: class in transformers, if it is not the one that AutoModelForCausalLM chooses.
      stacked: how transformers stacks experts that llm-compressor writes one by one, if it cannot
        read them one by one. Gate and up are "rows" or "columns" of one matrix, or "interleaved"
        columns.
      mtp: where published files keep the layers that predict further tokens.
      old_rope: whether config.json gets the rope fields that were used before transformers 5.
      edits: fields of config.json as in published files, which transformers 5 reads but does not
        write. None removes a field.
    """

    model_type: str
    fields: dict[str, Any]
    prompt: tuple[int, int] = (2, 16)
    model: str = "AutoModelForCausalLM"
    stacked: str | None = None
    mtp: str = "mtp"
    old_rope: bool = False
    edits: dict[str, Any] = dataclasses.field(default_factory=dict)


def dense(**fields: Any) -> dict[str, Any]:
    """Return the fields that all tiny models share, changed by `fields`."""
    return {**SMALL, **HEADS, **SPECIAL, "hidden_size": 64, "num_hidden_layers": 2, **fields}
