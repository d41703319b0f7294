"""Define what to quantize and how: each form is a tool and a recipe for that tool."""

import dataclasses
from typing import Any

ATTENTION = ("*self_attn.*", "*mixer.[qkvo]_proj*", "*linear_attn.*_proj*")
SHARED = ("*shared_expert*",)
ROUTERS = ("*mlp.gate.*",)


@dataclasses.dataclass(frozen=True)
class ModelOpt:
    """A recipe of nvidia-modelopt. Its patterns match the names of a module's quantizers.

    Attributes:
      preset: name of a configuration in `modelopt.torch.quantization`.
      fp8: patterns of linears that become FP8 (weights and inputs per tensor).
      off: patterns of linears that stay as they are.
      on: patterns of linears that the tool leaves as they are, and that are quantized here.
      kv: whether the cache is rounded to FP8.
      mtp: whether to add layers that predict further tokens, without quantization, as the tool's
        own script does.
      shard: largest size of a file.
      tool: name of the tool.
    """

    preset: str
    fp8: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    kv: bool = False
    mtp: bool = False
    shard: str = "10GB"
    tool: str = "nvidia-modelopt"


@dataclasses.dataclass(frozen=True)
class LlmCompressor:
    """A recipe of llm-compressor: arguments of its `QuantizationModifier`."""

    arguments: dict[str, Any]
    tool: str = "llm-compressor"


REWRITES = ("", "w1w3w2", "rows", "faults")  # see rewrite.py; the first changes nothing
LEFT_OUT = (
    "lm_head",
    r"re:.*mlp\.gate$",
    r"re:.*block_sparse_moe\.gate$",
    r"re:.*\.router$",
    r"re:.*shared_expert_gate$",
    r"re:.*mixer\.gate$",
    r"re:.*linear_attn\.in_proj_[ab]$",
    r"re:.*linear_attn\.in_proj_ba$",
    r"re:.*conv1d$",
    r"re:.*visual.*",
    r"re:.*vision_.*",
    r"re:.*multi_modal_projector.*",
)
EXPERTS = r"re:.*\.experts\.\d+\..*_proj$"
MLP_LINEARS = r"re:.*\.(mlp|shared_mlp)\.\w*(proj|linear)$"
ATTENTION_LINEARS = r"re:.*(self_attn|mixer|linear_attn)\.\w*proj\w*$"

FORMS: dict[str, ModelOpt | LlmCompressor] = {
    "modelopt-w4a4": ModelOpt("NVFP4_DEFAULT_CFG"),
    "modelopt-w4a16": ModelOpt("W4A16_NVFP4_CFG"),
    "modelopt-router": ModelOpt("W4A16_NVFP4_CFG", on=ROUTERS),
    "modelopt-awq": ModelOpt("NVFP4_AWQ_LITE_CFG"),
    "modelopt-experts": ModelOpt("NVFP4_EXPERTS_ONLY_CFG"),
    "modelopt-experts-kv8": ModelOpt("NVFP4_EXPERTS_ONLY_CFG", kv=True),
    "modelopt-w4a4-kv8": ModelOpt("NVFP4_DEFAULT_CFG", kv=True),
    "modelopt-mixed-w4a4": ModelOpt("NVFP4_DEFAULT_CFG", fp8=ATTENTION, off=SHARED),
    "modelopt-mixed-w4a16": ModelOpt("W4A16_NVFP4_CFG", fp8=ATTENTION, off=SHARED),
    "modelopt-mixed-w4a16-kv8": ModelOpt("W4A16_NVFP4_CFG", fp8=ATTENTION, off=SHARED, kv=True),
    "modelopt-mtp": ModelOpt("NVFP4_EXPERTS_ONLY_CFG", mtp=True),
    "modelopt-sharded": ModelOpt("W4A16_NVFP4_CFG", shard="40KB"),
    "modelopt-mamba": ModelOpt("MAMBA_MOE_NVFP4_CONSERVATIVE_CFG", kv=True),
    "ct-w4a4": LlmCompressor({"targets": "Linear", "scheme": "NVFP4", "ignore": LEFT_OUT}),
    "ct-w4a16": LlmCompressor({"targets": "Linear", "scheme": "NVFP4A16", "ignore": LEFT_OUT}),
    "ct-experts": LlmCompressor({"targets": [EXPERTS], "scheme": "NVFP4", "ignore": LEFT_OUT}),
    "ct-mixed": LlmCompressor(
        {
            "config_groups": {
                "experts": {"targets": [EXPERTS], "preset": "NVFP4"},
                "attention": {"targets": [ATTENTION_LINEARS], "preset": "FP8_DYNAMIC"},
            },
            "ignore": LEFT_OUT,
        }
    ),
    "ct-mixed-w4a16": LlmCompressor(
        {
            "config_groups": {
                "experts": {"targets": [EXPERTS], "preset": "NVFP4A16"},
                "attention": {"targets": [ATTENTION_LINEARS], "preset": "FP8_DYNAMIC"},
            },
            "ignore": LEFT_OUT,
        }
    ),
    "ct-mixed-dense": LlmCompressor(
        {
            "config_groups": {
                "mlps": {"targets": [MLP_LINEARS], "preset": "NVFP4"},
                "attention": {"targets": [ATTENTION_LINEARS], "preset": "FP8_DYNAMIC"},
            },
            "ignore": LEFT_OUT,
        }
    ),
    "ct-w4a4-kv8": LlmCompressor(
        {
            "targets": "Linear",
            "scheme": "NVFP4",
            "ignore": LEFT_OUT,
            "kv_cache_scheme": {
                "num_bits": 8,
                "type": "float",
                "strategy": "tensor",
                "dynamic": False,
                "symmetric": True,
            },
        }
    ),
}
