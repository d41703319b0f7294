"""What the checkpoint formats have in common: tensor names as a record, schemes by module name."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.key_mapping import PREFIXES
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme

# Runtimes run these projections as one, and exclusion lists may name that one.
_FUSED = {
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
# Files keep the first names of Mixtral's modules; tools load them under the second.
_LOADED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_SPARSE = ".block_sparse_moe."
_GARBAGE = re.compile(r"\0[^*]*")
# The name of the weight's scale of an FP8 linear, and that of its activations, in all formats.
FP8_SCALE, FP8_INPUT_SCALE = "weight_scale", "input_scale"


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """How a checkpoint format stores one quantized linear, ``MODULE.NAME`` for each name.

    Attributes:
      packed: uint8 ``[n, k/2]``, low nibble = even k.
      block_scale: float8_e4m3fn ``[n, k/16]``; multiplies.
      weight_global: float32 scalar of the weights.
      input_global: float32 scalar of the activations.
      divides: the two scalars are the reciprocals of the scales.
      fp8_by_factor: how activations are rounded to FP8; see `numerics.fp8.round_fp8`.
    """

    packed: str
    block_scale: str
    weight_global: str
    input_global: str
    divides: bool
    fp8_by_factor: bool

    def to_scale(self, stored: np.ndarray) -> Any:
        """Return the float32 factors that multiply: `stored`, or its rounded reciprocals."""
        if not self.divides:
            return stored
        with np.errstate(divide="ignore", over="ignore"):  # callers look for infinities
            return np.asarray(np.float32(1) / stored)


class Decision(NamedTuple):
    """How one module is quantized, and what said so.

    Attributes:
      scheme: None where it is not quantized.
      source: the file, its key and the name or pattern that decided.
    """

    scheme: CheckpointScheme
    source: str


@dataclasses.dataclass(frozen=True)
class KVCache:
    """What a config says of the cache of keys and values.

    Attributes:
      algorithm: "FP8", or another that is not supported.
      source: where it was read.
      multiply_by_reciprocal: how the tool rounds; see `numerics.fp8.round_fp8`.
    """

    algorithm: str
    source: str
    multiply_by_reciprocal: bool


class Rules(Protocol):
    """Which modules a quantization config quantizes, and how.

    Attributes:
      source: where it was read, for messages.
      summary: the algorithm as written, such as "NVFP4".
      kv_cache: of keys and values; None where nothing is said.
    """

    source: str
    summary: str
    kv_cache: KVCache | None

    def decide(self, module: str) -> Decision:
        """Return how `module` is quantized.

        Raises:
          CheckpointError: in a way that is not supported.
        """
        ...


@dataclasses.dataclass(frozen=True)
class CheckpointFormat:
    """A checkpoint format: how to recognize, parse and read it.

    Attributes:
      name: for messages.
      quant_method: of ``quantization_config``, whole or before an underscore.
      names: its tensors.
      parse: the section and where it was read -> `Rules`, None where it quantizes nothing;
        CheckpointError if it makes no sense.
    """

    name: str
    quant_method: str
    names: TensorNames
    parse: Callable[[Mapping[str, Any], str], Rules | None]

    def claims(self, quant_method: Any) -> bool:
        """Whether `quant_method`, from a file, means this format."""
        return isinstance(quant_method, str) and (
            quant_method == self.quant_method or quant_method.startswith(self.quant_method + "_")
        )


def equivalent_names(module: str) -> list[str]:
    """Return the names by which a config may mean `module`, its own first.

    Exporters disagree on where the language model sits, even with their own files, and may name
    the product that runtimes make of some projections.
    """
    names = [module]
    parent, dot, leaf = module.rpartition(".")
    if leaf in _LOADED and ".experts." in module:
        names.append(parent + dot + _LOADED[leaf])
    names += [name.replace(_SPARSE, ".mlp.") for name in names if _SPARSE in name]
    if leaf in _FUSED:
        names.append(parent + dot + _FUSED[leaf])
    prefix = next((prefix for prefix in PREFIXES if module.startswith(prefix)), None)
    if leaf == "lm_head" and prefix in (None, parent + dot):
        names += [leaf, *(other + leaf for other in PREFIXES)]
    elif prefix is not None:
        names += [other + name.removeprefix(prefix) for other in PREFIXES for name in names]
    return list(dict.fromkeys(names))


def fused_name(module: str) -> str:
    """Return the name of the product that runtimes make of `module` and others, or its own."""
    parent, dot, leaf = module.rpartition(".")
    return parent + dot + _FUSED.get(leaf, leaf)


def shards(leaf: str) -> list[str]:
    """Return the projections that `leaf`, a name such as "qkv_proj", is the product of."""
    return [shard for shard, fused in _FUSED.items() if fused == leaf]


def parents(module: str) -> list[str]:
    """Return the modules that contain `module`, innermost first: a.b.c -> a.b, a."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def check_group_size(value: Any, source: str) -> None:
    """Check that `value`, an integer or its decimal text, is the block of NVFP4.

    Raises:
      CheckpointError: it is not.
    """
    if (type(value) is int and value == BLOCK) or value == str(BLOCK):
        return
    raise CheckpointError(
        [f"{source}: group_size: NVFP4 has blocks of {BLOCK} elements, got {quoted(value)}"]
    )


def clean_name(name: str) -> str:
    r"""Return a module's name or pattern without what stands behind a null character.

    Exporters of models with renamed tensors leave a mark, such as
    ``backbone.layers.0.mixer.in_proj.\\0backbone.pt_name_sentinel``; a star behind it is meant.
    """
    return _GARBAGE.sub("", name).rstrip(".") if "\0" in name else name


def names_in(section: Mapping[str, Any], key: str, source: str) -> Sequence[str]:
    """Return the list of strings at `key`, empty where it is missing or null.

    Raises:
      CheckpointError: it is something else.
    """
    value = section.get(key)
    if value is None:
        return ()
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(filter(None, map(clean_name, value)))
    raise CheckpointError([f"{source}: {key}: expected a list of names, got {quoted(value)}"])


def object_in(section: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    """Return the object at `key`, empty where it is missing or null.

    Raises:
      CheckpointError: it is something else.
    """
    value = section.get(key)
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise CheckpointError([f"{source}: {key}: expected an object, got {quoted(value)}"])
