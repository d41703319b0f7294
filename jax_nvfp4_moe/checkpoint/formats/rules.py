"""What the checkpoint formats have in common: names of tensors, and schemes of modules."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.key_mapping import plain_prefix
from jax_nvfp4_moe.checkpoint.names import FUSED, PREFIXES, PROJECTIONS, SPELLINGS
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

# Mixtral's files use other names. Tools rename the modules, and may write either into a config.
_LOADED = dict(zip(SPELLINGS[1], PROJECTIONS, strict=True))
_SPARSE = ".block_sparse_moe."
_LAYERS = "layers."
_GARBAGE = re.compile(r"\0[^*]*")
# A scheme that quantizes activations -> the scheme of the same weights that does not.
WEIGHTS_ONLY: Mapping[CheckpointScheme, CheckpointScheme] = {
    Scheme.W4A4: Scheme.W4A16,
    FP8ActivationScaling.STATIC: FP8ActivationScaling.WEIGHTS,
    FP8ActivationScaling.TOKEN: FP8ActivationScaling.WEIGHTS,
}


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """The names of one quantized linear's tensors, each stored as ``MODULE.NAME``.

    Attributes:
      packed: uint8 ``[n, k/2]``, two codes per byte. The low nibble holds the even k.
      block_scale: float8_e4m3fn ``[n, k/16]``. The scale of a block multiplies its codes.
      weight_global: float32 scalar, the global scale of the weight.
      input_global: float32 scalar, the global scale of the activations.
      divides: whether the file stores the reciprocals of the two global scales.
      fp8_by_factor: how the tool rounds activations to FP8, as `multiply_by_reciprocal` of
        `numerics.fp8.round_fp8`.
    """

    packed: str
    block_scale: str
    weight_global: str
    input_global: str
    divides: bool
    fp8_by_factor: bool

    def to_scale(self, stored: np.ndarray) -> Any:
        """Return the global scales that multiply: `stored`, or its float32 reciprocals."""
        if not self.divides:
            return stored
        with np.errstate(divide="ignore", over="ignore"):  # callers check for infinities
            return np.asarray(np.float32(1) / stored)


class Decision(NamedTuple):
    """How one module is quantized, and which entry of the checkpoint decided that.

    Attributes:
      scheme: the module's scheme. None if the module is not quantized.
      source: the file, its key, and the name or the pattern that decided.
      labelled: whether only the name of an algorithm says that activations are quantized. Tools
        give such a label to files that quantize weights alone, too.
    """

    scheme: CheckpointScheme
    source: str
    labelled: bool = False

    def agrees(self, other: "Decision") -> bool:
        """Return whether two decisions say the same, or differ only because one is a label."""
        labels = [one for one in (self, other) if one.labelled]
        schemes = [self.scheme, other.scheme]
        return schemes[0] == schemes[1] or any(
            WEIGHTS_ONLY.get(label.scheme) in schemes for label in labels if label.scheme
        )


@dataclasses.dataclass(frozen=True)
class KVCache:
    """What a config declares about the KV cache.

    Attributes:
      algorithm: "FP8", "NVFP4", or the description of an algorithm that is not supported.
      source: the file and the key that declare it.
      multiply_by_reciprocal: how the tool rounds; see `numerics.fp8.round_fp8`.
    """

    algorithm: str
    source: str
    multiply_by_reciprocal: bool


class Rules(Protocol):
    """Tells which modules a quantization config quantizes, and how.

    Attributes:
      source: the file and the key of the config, for messages.
      summary: the algorithm as the config spells it, such as "NVFP4".
      kv_cache: what the config declares about the KV cache. None if it declares nothing.
    """

    source: str
    summary: str
    kv_cache: KVCache | None

    @property
    def schemes(self) -> Sequence[CheckpointScheme]:
        """All schemes that the config declares for any module, in its order."""
        ...

    def choices(self, module: str) -> list[Decision]:
        """Return how `module` may be quantized; the first is what the config says.

        Others follow if several entries of the config mean the module. What is stored decides
        between them.

        Raises:
          CheckpointError: the config quantizes the module in a way that is not supported.
        """
        ...


@dataclasses.dataclass(frozen=True)
class CheckpointFormat:
    """A checkpoint format: how to recognize it, and how to parse its quantization config.

    Attributes:
      name: the name of the format, for messages.
      quant_method: the value of ``quant_method`` in ``quantization_config``. A file may add an
        underscore and more.
      names: the names of a quantized linear's tensors.
      parse: takes the config and its source, and returns `Rules`, or None if the config quantizes
        nothing. It raises `CheckpointError` if the config is not valid.
      mx_experts: whether experts may be stored in MXFP4. They are weights only then.
    """

    name: str
    quant_method: str
    names: TensorNames
    parse: Callable[[Mapping[str, Any], str], Rules | None]
    mx_experts: bool = False

    def claims(self, quant_method: Any) -> bool:
        """Return whether `quant_method`, a value from a file, means this format."""
        if not isinstance(quant_method, str):
            return False
        lower = quant_method.lower()
        return lower == self.quant_method or lower.startswith(f"{self.quant_method}_")


# Several lists of several sources ask for the names of one module, one after the other.
@functools.lru_cache(maxsize=1024)
def equivalent_names(module: str) -> tuple[str, ...]:
    """Return all names by which a quantization config may mean `module`, its own name first.

    Exporters disagree on the prefix of the language model, sometimes even with their own files.
    They may also name the linear into which runtimes merge several projections.
    """
    names = [module]
    parent, dot, leaf = module.rpartition(".")
    if leaf in _LOADED and ".experts." in module:
        names.append(parent + dot + _LOADED[leaf])
    names += [name.replace(_SPARSE, ".mlp.") for name in names if _SPARSE in name]
    if leaf in FUSED:
        names.append(parent + dot + FUSED[leaf])
    prefix = next((prefix for prefix in PREFIXES if module.startswith(prefix)), None)
    if leaf == "lm_head" and prefix in (None, parent + dot):
        names += [leaf, *(other + leaf for other in PREFIXES)]
    elif prefix is not None:
        bare = [name.removeprefix(prefix) for name in names]
        names += [other + name for other in PREFIXES for name in bare]
        names += [name for name in bare if name.startswith(_LAYERS)]  # of DeepSeek-V4
    return tuple(dict.fromkeys(names))


def fused_name(module: str) -> str:
    """Return the name of the linear into which runtimes merge `module`.

    A module that is not merged keeps its own name.
    """
    parent, dot, leaf = module.rpartition(".")
    return parent + dot + FUSED.get(leaf, leaf)


def shards(leaf: str) -> list[str]:
    """Return the projections that runtimes merge into `leaf`, a name such as "qkv_proj"."""
    return [shard for shard, fused in FUSED.items() if fused == leaf]


def parents(module: str) -> tuple[str, ...]:
    """Return the modules that contain `module`, innermost first: "a.b", "a" for "a.b.c"."""
    return _and_parents(module.rpartition(".")[0])


@functools.lru_cache(maxsize=1024)
def _and_parents(module):
    """Return a module and those that contain it; the linears of one expert share them."""
    parts = module.split(".")
    return tuple(".".join(parts[:count]) for count in range(len(parts), 0, -1) if module)


def check_group_size(value: Any, source: str) -> None:
    """Check that a group size is the block size of NVFP4, or twice as large.

    Block scales of 32 weights become two equal scales of 16 each.

    Args:
      value: the group size, as an integer or as its decimal text.
      source: where the value was read, for the message.

    Raises:
      CheckpointError: the group size is neither 16 nor 32.
    """
    for size in (BLOCK, 2 * BLOCK):
        if (type(value) is int and value == size) or value == str(size):
            return
    raise CheckpointError(
        f"{source}: group_size: expected {BLOCK}, the block size of NVFP4, or {2 * BLOCK}; got "
        f"{quoted(value)}"
    )


def clean_name(name: str) -> str:
    r"""Return the name or pattern of a module without the part after a null character.

    Exporters that rename tensors leave such a part behind, as in
    ``backbone.layers.0.mixer.in_proj.\0backbone.pt_name_sentinel``. A star after it belongs to the
    pattern and is kept. The prefix becomes the one that `key_mapping.plain_prefix` returns.
    """
    name = _GARBAGE.sub("", name).rstrip(".") if "\0" in name else name
    return plain_prefix(name)


def names_in(section: Mapping[str, Any], key: str, source: str) -> Sequence[str]:
    """Return the list of strings at `key`, or an empty list if the key is missing or null.

    Raises:
      CheckpointError: the value is not a list of strings.
    """
    value = section.get(key)
    if value is None:
        return ()
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(filter(None, map(clean_name, value)))
    raise CheckpointError(f"{source}: {key}: expected a list of names, got {quoted(value)}")


def object_in(section: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    """Return the object at `key`, or an empty one if the key is missing or null.

    Raises:
      CheckpointError: the value is not an object.
    """
    value = section.get(key)
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise CheckpointError(f"{source}: {key}: expected an object, got {quoted(value)}")
