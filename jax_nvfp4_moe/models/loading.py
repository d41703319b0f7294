"""From a checkpoint folder to modules: the table of architectures, and two loaders."""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import CONFIG, merge_text_config
from jax_nvfp4_moe.checkpoint.formats import Decision
from jax_nvfp4_moe.checkpoint.opening import Checkpoint, open_checkpoint
from jax_nvfp4_moe.checkpoint.options import LoadOptions
from jax_nvfp4_moe.checkpoint.reading import Reader
from jax_nvfp4_moe.checkpoint.table import WeightTable
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
from jax_nvfp4_moe.models.decoder import Architecture, Decoder
from jax_nvfp4_moe.nn.building import Builder, ExpertPart, Part, check_parts_cover
from jax_nvfp4_moe.nn.filling import fill, place
from jax_nvfp4_moe.nn.moe import NVFP4MoE
from jax_nvfp4_moe.nn.settings import Settings
from jax_nvfp4_moe.ops.moe import DTYPES
from jax_nvfp4_moe.parallel import DISPATCHES
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, find_expert_mesh
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
    backend: str | Sequence[str] | None = None,
    mesh: Any = None,
    dispatch: str = "psum",
) -> Decoder:
    """Load a checkpoint as a `flax.nnx` model, its experts in the layout of their kernels.

    Args:
      path: folder with ``config.json`` and safetensors files, or a name on the Hugging Face Hub,
        such as "nvidia/Qwen3-30B-A3B-FP4" or "owner/model@revision".
      scheme: None (by the checkpoint and the device), "checkpoint" or a `Scheme`.
      dtype: of activations, dense weights and cache: bfloat16, float16 or float32.
      backend: name of a record for all NVFP4 modules; a sequence of names, tried in that order;
        None to choose.
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
        plan = plan_model(checkpoint, settings)
        with plan.open_reader() as reader:
            model = plan.materialize(reader)
    _say_where_scheme_is_idle(model, settings.scheme)
    return model


def load_moe(
    path: Folder,
    layer: int,
    *,
    scheme: Scheme | str | None = None,
    dtype=jnp.bfloat16,
    backend: str | Sequence[str] | None = None,
    mesh: Any = None,
    dispatch: str = "psum",
) -> NVFP4MoE:
    """Load the expert block of one layer; no other tensor is read.

    Args:
      path: as for `load_model`.
      layer: index of the decoder layer, from 0.
      scheme, dtype, backend, mesh, dispatch: as for `load_model`.

    Raises:
      ValueError: that layer has no experts; also as `load_model`.
    """
    settings = _settings(scheme, dtype, backend, mesh, dispatch)
    with open_checkpoint(path) as checkpoint:
        plan = plan_moe(checkpoint, layer, settings)
        with plan.open_reader() as reader:
            return plan.materialize(reader)


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """What headers alone tell of a model: its modules, and what fills them.

    Attributes:
      model: abstract: its arrays are `jax.ShapeDtypeStruct`.
      path: of `model` in the whole model; empty for that itself.
      parts: path -> what is read; see `nn.building`.
      table: of the checkpoint's tensors.
      settings: where the values go.
    """

    model: Any
    path: str
    parts: Sequence[Part | ExpertPart]
    table: WeightTable
    settings: Settings

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """Module of the file -> how the file quantizes it and what said so."""
        return self.table.decisions

    def open_reader(self, progress: bool | None = None, label: str = "loading"):
        """Return a context with a reader; arguments as for `WeightTable.open_reader`."""
        return self.table.open_reader(progress, label)

    def read(self, path: str, reader: Reader) -> Any:
        """Return the one part at `path`, such as "embedding": a module, a variable, or its value.

        Args:
          path: of the part.
          reader: of an `open_reader`.

        Raises:
          CheckpointError, MemoryError: as `materialize`.
        """
        part = next(part for part in self.parts if part.path == path)
        return place(part, reader, self.settings)

    def materialize(self, reader: Reader, path: str | None = None) -> Any:
        """Return the model, or the part of it at `path`, with its weights.

        Args:
          reader: of an `open_reader`.
          path: such as "layers.3"; `model` where None.

        Raises:
          CheckpointError: a scale is NaN or infinite.
          MemoryError: the device's memory is too small.
        """
        found = self.model
        for name in () if path is None else path.split("."):
            found = found[int(name)] if name.isdigit() else getattr(found, name)
        leaves, tree = jax.tree.flatten(found)
        made = tree.unflatten(leaves)  # the plan's own modules stay abstract
        fill(made, self.path if path is None else path, self.parts, reader, self.settings)
        return made


def plan_model(
    checkpoint: Checkpoint, settings: Settings, options: LoadOptions | None = None
) -> LoadPlan:
    """Plan the load of a whole model: build it without weights, and find its tensors.

    Args:
      checkpoint: open.
      settings: how modules are made.
      options: how tensors are read; by `settings` where None.

    Raises:
      CheckpointError: lists everything that is missing, misshapen or unexpected; nothing is read.
    """
    row, config = _read_config(checkpoint)
    return _plan(checkpoint, row, lambda make: row.build_model(config, make), "", settings, options)


def plan_moe(checkpoint: Checkpoint, layer: int, settings: Settings) -> LoadPlan:
    """Plan the load of the expert block of one layer; else as `plan_model`."""
    row, config = _read_config(checkpoint)
    path = row.moe.replace("*", str(layer))
    return _plan(
        checkpoint, row, lambda make: row.build_moe(config, layer, make), path, settings, None
    )


def _plan(checkpoint, row, build, path, settings, options):
    options = options or _options(settings)
    table = WeightTable(checkpoint, options)
    make = Builder(table, row.keys, settings)
    try:
        model = nnx.eval_shape(lambda: build(make))
    except Exception:
        # Stand-ins for tensors that are wrong may break the model's own code.
        table.raise_problems()
        raise
    check_parts_cover(model, make.parts, path)
    only = None
    if path:
        # The names of all parts of the block begin with that of the block itself.
        names = [f"{source.name}." for part in make.parts for source in part.all_sources]
        only = os.path.commonprefix(names).rpartition(".")[0]
    table.check(only)
    return LoadPlan(model, path, make.parts, table, settings)


def abstract_model(
    path: Folder, *, scheme: Scheme | str | None = None, dtype=jnp.bfloat16
) -> LoadPlan:
    """Plan a load from headers alone, checking them all, for a look at the model.

    Args:
      path, scheme, dtype: as for `load_model`.

    Raises:
      CheckpointError: as `load_model`.
    """
    settings = _settings(scheme, dtype, None)
    with open_checkpoint(path) as checkpoint:
        return plan_model(checkpoint, settings, _options(settings, input_scales="optional"))


def plan_unquantized(checkpoint: Checkpoint) -> LoadPlan:
    """Plan the load in float32 of a checkpoint that is not quantized.

    Raises:
      CheckpointError: as `load_model`; all headers are checked.
    """
    settings = _settings(None, jnp.float32, None)
    return plan_model(checkpoint, settings, _options(settings, input_scales="ignored"))


def read_model_config(checkpoint: Checkpoint) -> Any:
    """Return the sizes of an open checkpoint's model, such as vocab_size and max_positions.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    return _read_config(checkpoint)[1]


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
            f"tokens are shared out; got {axes}. Pass mesh=, or leave dispatch at 'psum'"
        )
    if dispatch == "ragged" and target.platform == "cpu":
        raise ValueError("dispatch: expected GPUs with 'ragged', got CPUs; use 'all_to_all'")


def _read_config(checkpoint: Checkpoint) -> tuple[Architecture, Any]:
    try:
        config = merge_text_config(checkpoint.config)
        row = find_architecture(config)
        return row, row.read_config(config)
    except CheckpointError as error:
        raise CheckpointError(error.problems, str(checkpoint.folder)) from None


def _options(settings, input_scales=None):
    if input_scales is None:
        chosen, _ = choose_scheme(Scheme.W4A4, settings.scheme, settings.target)
        input_scales = "required" if chosen is Scheme.W4A4 else "ignored"
    return LoadOptions(dtype=settings.dtype, input_scales=input_scales)
