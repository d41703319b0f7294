"""The names of tensors and modules that files have for the same thing: all tables of them.

Models ask for tensors by one name each, whatever the file calls them; see `key_mapping`. The names
of a family's own parts stand in the key table of its file in `models`.
"""

from collections.abc import Mapping

CANONICAL = "model."
# The prefixes that a language model may have in a quantization config.
PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.backbone.",
    "language_model.",
    "backbone.",
    CANONICAL,
)
# The parts of which the prefix of a file may consist. The last ones are those of wrappers, of which
# "thinker" is that of Qwen3-Omni.
WRAPPERS = ("base_model", "module", "_orig_mod", "thinker")
PARTS = ("language_model", "backbone", "model", *WRAPPERS)
# Names that follow the prefix, and the name that all other models use: those of Nemotron-H, and
# that of DeepSeek-V4's embedding.
ALIASES: Mapping[str, str] = {
    "embeddings.": "embed_tokens.",
    "embedding.": "embed_tokens.",
    "norm_f.": "norm.",
    "embed.": "embed_tokens.",
}
# Stacked experts that a file names otherwise: those of Granite, as published.
STACKED: Mapping[str, str] = {
    ".block_sparse_moe.input_linear.": ".block_sparse_moe.experts.gate_up_proj.",
    ".block_sparse_moe.output_linear.": ".block_sparse_moe.experts.down_proj.",
}
# The gate, up and down projections of one expert, which follow ``EXPERTS.E.`` in a tensor's name:
# first as models ask for them, then as other files spell them.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SPELLINGS = (
    PROJECTIONS,  # Qwen, DeepSeek, GLM, Kimi, Nemotron (no gate)
    ("w1", "w3", "w2"),  # Mixtral, MiniMax
    ("linear", "linear_v", "linear_1"),  # Grok
)
# How any file spells a projection -> the name by which models ask for it.
PROJECTION_OF: Mapping[str, str] = {
    name: own for names in SPELLINGS for name, own in zip(names, PROJECTIONS, strict=True)
}
# Runtimes merge these projections into one linear. Exclusion lists may name the merged linear.
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}
# The names of the scales of FP8 values. "inv" is a misnomer of DeepSeek's: it multiplies as well.
SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")
# All formats use these names for the scales of an FP8 linear's weight and activations.
FP8_SCALE, FP8_INPUT_SCALE = "weight_scale", "input_scale"
# ModelOpt's name for the scales of a linear's input channels, which AWQ chooses.
CHANNEL_SCALE = "pre_quant_scale"
