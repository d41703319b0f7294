"""From a checkpoint folder to modules: the table of architectures, and two loaders."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import CONFIG, merge_text_config
from jax_nvfp4_moe.checkpoint.forms import Decision
from jax_nvfp4_moe.checkpoint.resolve import (
    ExpertWeights,
    LoadOptions,
    Weights,
    check,
    load,
    open_checkpoint,
)
from jax_nvfp4_moe.models import (
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    llama4,
    minimax_m2,
    mixtral,
    nemotron_h,
    olmoe,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, Settings
from jax_nvfp4_moe.nn import NVFP4MoE
from jax_nvfp4_moe.ops.moe import DTYPES
from jax_nvfp4_moe.ops.prepare import prepare
from jax_nvfp4_moe.scheme import Scheme, Target, choose_scheme
from jax_nvfp4_moe.tensor import MoEParams

ARCHITECTURES: Mapping[str, Architecture] = {
    "Qwen3MoeForCausalLM": qwen3_moe.ARCHITECTURE,
    "DeepseekV3ForCausalLM": deepseek_v3.ARCHITECTURE,
    "KimiK2ForCausalLM": deepseek_v3.ARCHITECTURE,
    "KimiK25ForConditionalGeneration": deepseek_v3.ARCHITECTURE,
    "Kimi_K25ForConditionalGeneration": deepseek_v3.ARCHITECTURE,
    "Glm4MoeLiteForCausalLM": deepseek_v3.LITE,
    "Glm4MoeForCausalLM": glm4_moe.ARCHITECTURE,
    "MiniMaxM2ForCausalLM": minimax_m2.ARCHITECTURE,
    "MixtralForCausalLM": mixtral.ARCHITECTURE,
    "OlmoeForCausalLM": olmoe.ARCHITECTURE,
    "Qwen3NextForCausalLM": qwen3_next.ARCHITECTURE,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe.ARCHITECTURE,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe.ARCHITECTURE,
    "NemotronHForCausalLM": nemotron_h.ARCHITECTURE,
    "Llama4ForConditionalGeneration": llama4.ARCHITECTURE,
    "Llama4ForCausalLM": llama4.ARCHITECTURE,
    "GptOssForCausalLM": gpt_oss.ARCHITECTURE,
}

Folder = str | pathlib.Path
Built = TypeVar("Built", bound=nnx.Module)


def find_architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the row that ``architectures`` of a parsed ``config.json`` names.

    Raises:
      CheckpointError: it names none that is supported; lists those that are.
    """
    names = config.get("architectures")
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise CheckpointError(
        [
            f"{CONFIG}: architectures: {quoted(names)} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        ]
    )


def load_model(
    path: Folder,
    *,
    scheme: Scheme | str | None = None,
    dtype=jnp.bfloat16,
    backend: str | None = None,
    mesh: Any = None,
) -> Decoder:
    """Load a checkpoint as a `flax.nnx` model, its experts in the layout of their kernels.

    Args:
      path: folder with ``config.json`` and safetensors files.
      scheme: None (by the checkpoint and the device), "checkpoint" or a `Scheme`.
      dtype: of activations, dense weights and cache: bfloat16, float16 or float32.
      backend: name of a record for all NVFP4 modules, or None to choose.
      mesh: must be None: sharded loading is not there yet.

    Returns:
      A model: ``model(input_ids [b, t]) -> float32 [b, t, vocab]``; see `models.decoder.Decoder`.

    Raises:
      CheckpointError: lists everything that is wrong with the folder; nothing is loaded then.
      ValueError: an argument is wrong, or the scheme does not go with the checkpoint.
      NoBackendError: no backend fits.
      MemoryError: the device's memory is too small; names the tensor and its size.
    """
    if mesh is not None:
        raise ValueError("mesh: sharding over several devices is not there yet; pass None")
    settings = _settings(scheme, dtype, backend)
    with open_checkpoint(path) as checkpoint:
        row, config = _read_config(path, checkpoint.config)

        def build(weights):
            return row.build_model(config, weights, settings)

        return load(checkpoint, _tolerant(build), _options(settings))


def load_moe(
    path: Folder,
    layer: int,
    *,
    scheme: Scheme | str | None = None,
    dtype=jnp.bfloat16,
    backend: str | None = None,
) -> NVFP4MoE:
    """Load the expert block of one layer; no other tensor is read.

    Args:
      path: folder of the checkpoint.
      layer: index of the decoder layer, from 0.
      scheme, dtype, backend: as for `load_model`.

    Raises:
      ValueError: that layer has no experts; also as `load_model`.
    """
    settings = _settings(scheme, dtype, backend)
    with open_checkpoint(path) as checkpoint:
        row, config = _read_config(path, checkpoint.config)

        def build(weights):
            return row.build_moe(config, layer, weights, settings)

        options = _options(settings, only=row.moe_prefix(layer))
        return load(checkpoint, _tolerant(build), options)


class AbstractModel(NamedTuple):
    """What headers alone tell of a checkpoint.

    Attributes:
      model: of `jax.ShapeDtypeStruct`.
      decisions: module -> how the file quantizes it and what said so; see `Weights.decisions`.
    """

    model: Decoder
    decisions: Mapping[str, Decision]


def abstract_model(
    path: Folder, *, scheme: Scheme | str | None = None, dtype=jnp.bfloat16
) -> AbstractModel:
    """Build a model of `jax.ShapeDtypeStruct` from headers alone, checking them all.

    Args:
      path, scheme, dtype: as for `load_model`.

    Raises:
      CheckpointError: as `load_model`.
    """
    settings = _settings(scheme, dtype, None)
    with open_checkpoint(path) as checkpoint:
        row, config = _read_config(path, checkpoint.config)
        built = []

        def build(weights):
            model = _abstract(lambda w: row.build_model(config, w, settings), weights)
            built.append(AbstractModel(model, weights.decisions))

        check(checkpoint, build, _options(settings, input_scales="optional"))
        return built[0]


def find_dtype(dtype) -> jnp.dtype:
    """Return `dtype`, a name or a type, as one that modules take.

    Raises:
      ValueError: it is another; lists those.
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}; got {name!r}")
    return jnp.dtype(name)


def _settings(scheme, dtype, backend):
    target = Target.current()
    choose_scheme(Scheme.W4A4, scheme, target)  # an unknown name should not wait for the headers
    return Settings(target, None if scheme is None else str(scheme), backend, find_dtype(dtype))


def _read_config(path, config):
    try:
        config = merge_text_config(config)
        row = find_architecture(config)
        return row, row.read_config(config)
    except CheckpointError as error:
        raise CheckpointError(error.problems, str(path)) from None


def _options(settings, only=None, input_scales=None):
    if input_scales is None:
        chosen, _ = choose_scheme(Scheme.W4A4, settings.scheme, settings.target)
        input_scales = "required" if chosen is Scheme.W4A4 else "ignored"
    return LoadOptions(
        dtype=settings.dtype, place=_placer(settings), input_scales=input_scales, only=only
    )


def _placer(settings):
    """Return what puts one value on the device, experts in the layout of their kernel."""

    def place(name, value, declared):
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(value))
        try:
            value = jax.device_put(value)
            if isinstance(value, MoEParams):
                scheme, _ = choose_scheme(declared, settings.scheme, settings.target)
                value = prepare(
                    value, scheme=scheme, target=settings.target, backend=settings.backend
                )
            # One layer at a time: reading the next must not begin while this one is in two forms.
            return jax.block_until_ready(value)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(
                f"out of memory on {settings.target}: {size / 2**20:.1f} MiB for {name}"
            ) from error

    return place


def _tolerant(build: Callable[[Any], Built]) -> Callable[[Weights], Built]:
    """Return `build` such that the placeholders of the first pass go through it as traced zeros."""
    return lambda weights: build(weights) if weights.reads else _abstract(build, weights)


def _abstract(build, weights):
    return nnx.eval_shape(lambda: build(_Zeros(weights)))


class _Zeros:
    """Answers as a `Weights` of the first pass, with arrays of zeros for placeholders."""

    def __init__(self, weights: Weights):
        self._weights = weights

    def __getattr__(self, name):
        return getattr(self._weights, name)

    def array(self, *args, **kwargs):
        """As `Weights.array`."""
        return _zeros(self._weights.array(*args, **kwargs))

    def linear(self, *args, **kwargs):
        """As `Weights.linear`."""
        return _zeros(self._weights.linear(*args, **kwargs))

    def experts(self, *args, **kwargs):
        """As `Weights.experts`."""
        params, declared = self._weights.experts(*args, **kwargs)
        return ExpertWeights(_zeros(params), declared)

    def cache_scales(self, *args, **kwargs):
        """As `Weights.cache_scales`."""
        return _zeros(self._weights.cache_scales(*args, **kwargs))


def _zeros(tree):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
