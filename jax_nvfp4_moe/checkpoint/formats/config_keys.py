"""The keys of quantization configs: which are read, and which change nothing.

A key that is in neither list, and whose value is not empty, might change what the model computes:

* A section, which is an object or a list, is refused. It describes something that is done.
* A single value is named in a warning. It may be a remark of the tool.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_nvfp4_moe.checkpoint.errors import quoted

log = logging.getLogger("jax_nvfp4_moe")


class KnownKeys(NamedTuple):
    """The keys of one kind of object.

    Attributes:
      read: the keys that this package reads, or checks and refuses.
      harmless: key -> why it changes nothing.
    """

    read: frozenset[str]
    harmless: Mapping[str, str] = {}


_VERSION = "it names the version of the tool"
_CALIBRATION = "it says how the tool found the scales, which are stored"
_STORED = "the stored tensors tell"
_RUNTIME = "it is an option of another runtime"
# Sections that any format may have. `transforms` reads both.
SECTIONS = frozenset({"transform_config", "sparsity_config"})
_CACHE = frozenset({"kv_cache_scheme", "kv_cache_quant_algo"})

MODELOPT_KEYS = KnownKeys(
    SECTIONS
    | _CACHE
    | {"quant_method", "quant_algo", "quantization", "group_size", "awq_block_size"}
    | {"exclude_modules", "ignore", "modules_to_not_convert"}
    | {"quantized_layers", "config_groups", "producer", "has_zero_point"}
    | {"lora_rank", "clamp_val", "use_meta_recipe", "output_activations", "format"},
    {
        "version": _VERSION,
        "quantization_status": _STORED,
        "global_compression_ratio": "it reports a size",
        "pre_quant_scale": _STORED,
        "smoothquant_val": _CALIBRATION,
        "recipe": _CALIBRATION,
        "nvfp4_embed": _STORED,
        "run_compressed": _RUNTIME,
    },
)
MODELOPT_FILE_KEYS = KnownKeys(frozenset({"producer", "quantization"}), {"version": _VERSION})
# Of an entry of quantized_layers.
MODELOPT_LAYER_KEYS = KnownKeys(
    frozenset({"quant_algo", "group_size", "awq_block_size", "has_zero_point", "lora_rank"}),
    {"pre_quant_scale": _STORED},
)
MODELOPT_GROUP_KEYS = KnownKeys(
    frozenset({"targets", "weights", "input_activations", "output_activations"})
    # The last two repeat what other keys of the config say.
    | {"has_zero_point", "lora_rank", "quant_algo", "format"},
    {"pre_quant_scale": _STORED},
)
COMPRESSED_TENSORS_KEYS = KnownKeys(
    SECTIONS | {"quant_method", "format", "config_groups", "ignore", "kv_cache_scheme"},
    {
        "version": _VERSION,
        "producer": _VERSION,
        "quantization_status": _STORED,
        "global_compression_ratio": "it reports a size",
        "run_compressed": _RUNTIME,
        "recipe": _CALIBRATION,
    },
)
GROUP_KEYS = KnownKeys(
    frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
)
# Of weights, of activations and of the KV cache.
ARGUMENT_KEYS = KnownKeys(
    frozenset({"num_bits", "type", "group_size", "strategy", "symmetric", "dynamic"})
    | {"block_structure", "actorder", "scale_dtype"},
    {
        "zp_dtype": "symmetric numbers have no zero points",
        "observer": _CALIBRATION,
        "observer_kwargs": _CALIBRATION,
    },
)
FP8_KEYS = KnownKeys(
    MODELOPT_KEYS.read | {"weight_block_size", "fmt", "ignored_layers", "moe_quant_algo"},
    {
        "activation_scheme": "activations keep the model's dtype",
        "scale_fmt": _STORED,
        "dequantize": _RUNTIME,
        "is_checkpoint_fp8_serialized": _STORED,
        "version": _VERSION,
    },
)
MXFP4_KEYS = KnownKeys(
    SECTIONS | _CACHE | {"quant_method", "modules_to_not_convert"},
    {"dequantize": _RUNTIME, "version": _VERSION},
)

ALL = (
    MODELOPT_KEYS,
    MODELOPT_FILE_KEYS,
    MODELOPT_LAYER_KEYS,
    MODELOPT_GROUP_KEYS,
    COMPRESSED_TENSORS_KEYS,
    GROUP_KEYS,
    ARGUMENT_KEYS,
    FP8_KEYS,
    MXFP4_KEYS,
)


def find_unknown_keys(section: Mapping[str, Any], known: KnownKeys, source: str) -> list[str]:
    """Warn of single values that are not known, and return a problem for each such section.

    Args:
      section: an object of a config.
      known: the keys that it may have.
      source: the file and the key of the object, for messages.
    """
    problems = []
    for key, value in section.items():
        if key in known.read or key in known.harmless or not value:
            continue
        if isinstance(value, (dict, list)):
            problems.append(
                f"{source}: {quoted(key)} is not supported: this package does not know what it "
                f"does to the model; got {quoted(value)}"
            )
        else:
            log.warning(
                "%s: %s is not known and has no effect here; got %s",
                source,
                quoted(key),
                quoted(value),
            )
    return problems
