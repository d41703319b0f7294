"""From a checkpoint folder to modules: the table of architectures, and two loaders."""

import dataclasses
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.expert_names import Requests
from jax_nvfp4_moe.checkpoint.folder import CONFIG, merge_text_config
from jax_nvfp4_moe.checkpoint.formats import Decision
from jax_nvfp4_moe.checkpoint.options import LoadOptions
from jax_nvfp4_moe.checkpoint.resolve import (
    Checkpoint,
    ExpertWeights,
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
from jax_nvfp4_moe.models.settings import Observer
from jax_nvfp4_moe.nn.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.ops.moe import DTYPES
from jax_nvfp4_moe.ops.preparation import find_moe_layout
from jax_nvfp4_moe.parallel import DISPATCHES
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, ExpertMesh, find_expert_mesh, replicate
from jax_nvfp4_moe.parallel.experts import check_experts, shard_experts
from jax_nvfp4_moe.parallel.streaming import join_pieces, piece_size
from jax_nvfp4_moe.scheme import Scheme, Target, choose_scheme

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

_LOG = logging.getLogger("jax_nvfp4_moe")

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
    dispatch: str = "psum",
) -> Decoder:
    """Load a checkpoint as a `flax.nnx` model, its experts in the layout of their kernels.

    Args:
      path: folder with ``config.json`` and safetensors files.
      scheme: None (by the checkpoint and the device), "checkpoint" or a `Scheme`.
      dtype: of activations, dense weights and cache: bfloat16, float16 or float32.
      backend: name of a record for all NVFP4 modules, or None to choose.
      mesh: devices to load onto, with axes `expert` and `tensor`, either of which may be missing;
        see `parallel`. None for one device. `input_ids` and logits are whole on every device.
        Explicit axes become Auto ones, so call the model outside ``jax.set_mesh`` of Explicit ones.
      dispatch: how tokens reach their experts over a mesh: "psum", where all devices have all
        tokens; "all_to_all", or "ragged" on GPUs, where expert blocks share them out along
        `expert`, whatever their number; see `parallel.dispatch`.

    Returns:
      A model: ``model(input_ids [b, t]) -> float32 [b, t, vocab]``; see `models.decoder.Decoder`.

    Raises:
      CheckpointError: lists everything that is wrong with the folder; nothing is loaded then.
      ValueError: an argument is wrong, or the scheme does not go with the checkpoint.
      NoBackendError: no backend fits.
      MemoryError: the device's memory is too small; names the tensor and its size.
    """
    settings = _settings(scheme, dtype, backend, mesh, dispatch)
    with open_checkpoint(path) as checkpoint:
        row, config = _read_config(path, checkpoint.config)

        def build(weights):
            return row.build_model(config, weights, settings)

        model = load(checkpoint, _tolerant(build, settings.expert_mesh), _options(settings))
    _say_where_scheme_is_idle(model, settings.scheme)
    return model


def load_moe(
    path: Folder,
    layer: int,
    *,
    scheme: Scheme | str | None = None,
    dtype=jnp.bfloat16,
    backend: str | None = None,
    mesh: Any = None,
    dispatch: str = "psum",
) -> NVFP4MoE:
    """Load the expert block of one layer; no other tensor is read.

    Args:
      path: folder of the checkpoint.
      layer: index of the decoder layer, from 0.
      scheme, dtype, backend, mesh, dispatch: as for `load_model`.

    Raises:
      ValueError: that layer has no experts; also as `load_model`.
    """
    settings = _settings(scheme, dtype, backend, mesh, dispatch)
    with open_checkpoint(path) as checkpoint:
        row, config = _read_config(path, checkpoint.config)

        def build(weights):
            return row.build_moe(config, layer, weights, settings)

        options = _options(settings, only=row.moe_prefix(layer))
        return load(checkpoint, _tolerant(build, settings.expert_mesh), options)


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


def read_requests(checkpoint: Checkpoint) -> Requests:
    """Return the linears and experts that the model of an open checkpoint asks for.

    Raises:
      CheckpointError: as `load_model`; all headers are checked.
    """
    settings = _settings(None, jnp.float32, None)
    row, config = _read_config(checkpoint.folder, checkpoint.config)
    requested_scheme = []

    def build(weights):
        requested_scheme.append(weights.requests)
        _abstract(lambda w: row.build_model(config, w, settings), weights)

    check(checkpoint, build, LoadOptions(input_scales="ignored"))
    return requested_scheme[0]


def read_model_config(checkpoint: Checkpoint) -> Any:
    """Return the sizes of an open checkpoint's model, such as vocab_size and max_positions.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    return _read_config(checkpoint.folder, checkpoint.config)[1]


def observe_layers(
    checkpoint: Checkpoint, observer: Observer, progress: bool | None = None
) -> None:
    """Make the model of an open checkpoint in float32, part by part, before the eyes of `observer`.

    Parts that the observer does not keep are freed before the next are read.

    Args:
      checkpoint: not quantized.
      observer: sees the embedding, every linear and the experts of a layer, and the layer.
      progress: as for `LoadOptions`.

    Raises:
      CheckpointError: as `load_model`; nothing is read then.
    """
    plain = _settings(None, jnp.float32, None)
    settings = dataclasses.replace(plain, observer=observer)
    row, config = _read_config(checkpoint.folder, checkpoint.config)

    def build(weights):
        return row.build_model(config, weights, settings if weights.reads else plain)

    options = dataclasses.replace(_options(plain), progress=progress, label="calibrating")
    load(checkpoint, _tolerant(build, None), options)


def find_dtype(dtype) -> jnp.dtype:
    """Return `dtype`, a name or a type, as one that modules take.

    Raises:
      ValueError: it is another; lists those.
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}; got {name!r}")
    return jnp.dtype(name)


def _say_where_scheme_is_idle(model, scheme):
    """Warn of a scheme that a model without NVFP4 weights cannot follow."""
    schemes = (getattr(module, "scheme", None) for _, module in nnx.iter_modules(model))
    if scheme not in (None, "checkpoint") and not any(isinstance(s, Scheme) for s in schemes):
        _LOG.warning(
            "scheme %s says nothing here: no weight of this checkpoint is NVFP4; "
            "`jax-nvfp4-moe quantize` makes one that is",
            scheme,
        )


def _settings(scheme, dtype, backend, mesh=None, dispatch="psum"):
    expert_mesh = None if mesh is None else find_expert_mesh(mesh).automatic()
    target = Target.current() if expert_mesh is None else expert_mesh.target
    _check_dispatch(dispatch, expert_mesh, target)
    choose_scheme(Scheme.W4A4, scheme, target)  # an unknown name should not wait for the headers
    requested_scheme = None if scheme is None else str(scheme)
    return Settings(
        target,
        requested_scheme,
        backend,
        find_dtype(dtype),
        expert_mesh=expert_mesh,
        dispatch=dispatch,
    )


def _check_dispatch(dispatch, expert_mesh, target):
    if dispatch not in DISPATCHES:
        raise ValueError(f"dispatch: expected one of {', '.join(DISPATCHES)}; got {dispatch!r}")
    if dispatch == "psum":
        return
    if expert_mesh is None or EXPERT not in expert_mesh.axes:
        axes = "no mesh" if expert_mesh is None else f"axes {dict(expert_mesh.mesh.shape)}"
        raise ValueError(
            f"dispatch: expected a mesh with an axis '{EXPERT}' with {dispatch!r}, along which "
            f"tokens are shared out; got {axes}. Pass mesh=, or leave exchange at 'psum'"
        )
    if dispatch == "ragged" and target.platform == "cpu":
        raise ValueError("dispatch: expected GPUs with 'ragged', got CPUs; use 'all_to_all'")


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
        dtype=settings.dtype,
        place=_placer(settings),
        input_scales=input_scales,
        only=only,
        deferred=True,
    )


def _placer(settings):
    """Return what puts one value on the device, experts in the layout of their kernel."""
    put = _put if settings.expert_mesh is None else _put_shards

    def place(name, value, checkpoint_scheme):
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(value))
        try:
            # One layer at a time: reading the next must not begin while this one is in two forms.
            return jax.block_until_ready(put(value, checkpoint_scheme, settings))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(
                f"out of memory on {settings.target}: {size / 2**20:.1f} MiB for {name}"
            ) from error

    return place


def _op_arguments(checkpoint_scheme, settings):
    scheme, _ = choose_scheme(checkpoint_scheme, settings.scheme, settings.target)
    return {"scheme": scheme, "target": settings.target, "backend": settings.backend}


def _put(value, checkpoint_scheme, settings):
    """Return one value on the device."""
    if not isinstance(value, MoEParams):
        return jax.device_put(jax.tree.map(lambda leaf: leaf[()], value))
    layout = find_moe_layout(value, **_op_arguments(checkpoint_scheme, settings))
    step = piece_size(value, value.num_experts, settings.target)

    def read(first):
        return jax.tree.map(lambda leaf: leaf[first : first + step], value)

    return join_pieces(read, value.num_experts, step, layout)


def _put_shards(value, checkpoint_scheme, settings):
    """Return one value on the devices of the grid: experts cut, all else whole on each."""
    if isinstance(value, MoEParams):
        layout = find_moe_layout(value, **_op_arguments(checkpoint_scheme, settings))
        return shard_experts(value, settings.expert_mesh, layout=layout)
    if isinstance(value, DenseExperts):
        return shard_experts(value, settings.expert_mesh)
    return replicate(value, settings.expert_mesh)


def _tolerant(
    build: Callable[[Any], Built], expert_mesh: ExpertMesh | None
) -> Callable[[Weights], Built]:
    """Return `build` such that the placeholders of the first pass go through it as traced zeros."""
    return (
        lambda weights: build(weights) if weights.reads else _abstract(build, weights, expert_mesh)
    )


def _abstract(build, weights, expert_mesh=None):
    return nnx.eval_shape(lambda: build(_Zeros(weights, expert_mesh)))


class _Zeros:
    """Answers as a `Weights` of the first pass, with arrays of zeros for placeholders."""

    def __init__(self, weights: Weights, expert_mesh: ExpertMesh | None):
        self._weights, self._expert_mesh = weights, expert_mesh

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
        params, checkpoint_scheme = self._weights.experts(*args, **kwargs)
        if self._expert_mesh is not None:  # sizes that it does not divide are known before any read
            check_experts(params, self._expert_mesh)
        return ExpertWeights(_zeros(params), checkpoint_scheme)

    def cache_scales(self, *args, **kwargs):
        """As `Weights.cache_scales`."""
        return _zeros(self._weights.cache_scales(*args, **kwargs))


def _zeros(tree):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
