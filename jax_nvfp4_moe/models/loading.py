"""Load a model or one expert block from a checkpoint folder.

`ARCHITECTURES` lists the supported architectures.
"""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.backends.record import FLOATS
from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import CONFIG, merge_text_config
from jax_nvfp4_moe.checkpoint.formats.rules import Decision
from jax_nvfp4_moe.checkpoint.opening import Checkpoint, open_checkpoint
from jax_nvfp4_moe.checkpoint.options import LoadOptions
from jax_nvfp4_moe.checkpoint.reading.garbage import paused_collection
from jax_nvfp4_moe.checkpoint.reading.reader import Reader
from jax_nvfp4_moe.checkpoint.stop_ids import read_end_of_text, read_stop_ids
from jax_nvfp4_moe.checkpoint.table import WeightTable
from jax_nvfp4_moe.checkpoint.weights.held_counts import refuse_layers
from jax_nvfp4_moe.models import (
    afmoe,
    apertus,
    cohere2_moe,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    dots1,
    ernie4_5_moe,
    exaone4,
    exaone_moe,
    gemma3,
    gemma4,
    glm4_moe,
    glm4v_moe,
    glm5_next,
    gpt_oss,
    granite,
    granite_moe,
    hunyuan_moe,
    hy_v3,
    kimi_linear,
    laguna,
    lfm2_moe,
    llama,
    llama4,
    mimo_v2_flash,
    minimax_m2,
    minimax_m3,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    nemotron_h,
    olmo2,
    olmoe,
    phi3,
    phimoe,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_omni_moe,
    qwen3_vl_moe,
    qwen4_exp,
    seed_oss,
    smollm3,
    solar_open,
    step3p7,
)
from jax_nvfp4_moe.models.config_keys import refuse_unread_keys, warn_of_generation_keys
from jax_nvfp4_moe.models.decoder import Architecture, Decoder
from jax_nvfp4_moe.models.draft_head import check_draft_head, set_draft_head
from jax_nvfp4_moe.models.drafting_layers import build_drafter, check_draft
from jax_nvfp4_moe.models.refused import why_refused_family
from jax_nvfp4_moe.models.stored_frequencies import warn_of_other_frequencies
from jax_nvfp4_moe.nn.building.builder import Builder, Part, check_parts_cover
from jax_nvfp4_moe.nn.building.filling import fill, place
from jax_nvfp4_moe.nn.building.projection_names import name_projections
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.parallel import DISPATCHES
from jax_nvfp4_moe.parallel.automatic_mesh import AUTO, choose_mesh
from jax_nvfp4_moe.parallel.dispatch import check_platform
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, TENSOR, find_expert_mesh
from jax_nvfp4_moe.parallel.partition_specs import note_shardings
from jax_nvfp4_moe.parallel.streaming import largest_chunk
from jax_nvfp4_moe.scheme import Scheme, Target, choose_scheme

# The names that ``architectures`` of a ``config.json`` may have.
ARCHITECTURES: Mapping[str, Architecture] = {
    "Qwen3MoeForCausalLM": qwen3_moe.ARCHITECTURE,
    "DeepseekV3ForCausalLM": deepseek_v3.ARCHITECTURE,
    "KimiK2ForCausalLM": deepseek_v3.ARCHITECTURE,
    "KimiK25ForConditionalGeneration": deepseek_v3.ARCHITECTURE,
    "Kimi_K25ForConditionalGeneration": deepseek_v3.ARCHITECTURE,
    "DeepseekV32ForCausalLM": deepseek_v32.ARCHITECTURE,
    "DeepseekV4ForCausalLM": deepseek_v4.ARCHITECTURE,
    "GlmMoeDsaForCausalLM": deepseek_v32.GLM,
    "Glm4MoeLiteForCausalLM": deepseek_v3.LITE,
    "Glm4MoeForCausalLM": glm4_moe.ARCHITECTURE,
    "MiniMaxM2ForCausalLM": minimax_m2.ARCHITECTURE,
    "MixtralForCausalLM": mixtral.ARCHITECTURE,
    "OlmoeForCausalLM": olmoe.ARCHITECTURE,
    "Qwen3NextForCausalLM": qwen3_next.ARCHITECTURE,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe.ARCHITECTURE,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe.ARCHITECTURE,
    "NemotronHForCausalLM": nemotron_h.ARCHITECTURE,
    "NemotronH_Omni_Reasoning_V3": nemotron_h.ARCHITECTURE,
    "NemotronH_Nano_Omni_Reasoning_V3": nemotron_h.ARCHITECTURE,
    "Llama4ForConditionalGeneration": llama4.ARCHITECTURE,
    "Llama4ForCausalLM": llama4.ARCHITECTURE,
    "GptOssForCausalLM": gpt_oss.ARCHITECTURE,
    "HunYuanMoEV1ForCausalLM": hunyuan_moe.ARCHITECTURE,
    "ExaoneMoeForCausalLM": exaone_moe.ARCHITECTURE,
    "Lfm2MoeForCausalLM": lfm2_moe.ARCHITECTURE,
    "KimiLinearForCausalLM": kimi_linear.ARCHITECTURE,
    "BailingHybridForCausalLM": kimi_linear.LING,
    "GraniteMoeForCausalLM": granite_moe.ARCHITECTURE,
    "GraniteMoeSharedForCausalLM": granite_moe.ARCHITECTURE,
    "GraniteMoeHybridForCausalLM": granite_moe.HYBRID,
    "Mistral4ForCausalLM": mistral4.ARCHITECTURE,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl_moe.ARCHITECTURE,
    "Qwen2MoeForCausalLM": qwen2_moe.ARCHITECTURE,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe.ARCHITECTURE,
    "Gemma4ForConditionalGeneration": gemma4.ARCHITECTURE,
    "Gemma4ForCausalLM": gemma4.ARCHITECTURE,
    "Gemma4UnifiedForConditionalGeneration": gemma4.UNIFIED,
    "Gemma4UnifiedForCausalLM": gemma4.UNIFIED,
    "MiniMaxM3SparseForConditionalGeneration": minimax_m3.ARCHITECTURE,
    "MiniMaxM3VLForCausalLM": minimax_m3.ARCHITECTURE,
    "Step3p7ForConditionalGeneration": step3p7.ARCHITECTURE,
    "AfmoeForCausalLM": afmoe.ARCHITECTURE,
    "HYV3ForCausalLM": hy_v3.ARCHITECTURE,
    "SolarOpenForCausalLM": solar_open.ARCHITECTURE,
    "Dots1ForCausalLM": dots1.ARCHITECTURE,
    "Glm4vMoeForConditionalGeneration": glm4v_moe.ARCHITECTURE,
    "PhiMoEForCausalLM": phimoe.ARCHITECTURE,
    "PhimoeForCausalLM": phimoe.ARCHITECTURE,
    "Qwen3OmniMoeForConditionalGeneration": qwen3_omni_moe.ARCHITECTURE,
    "Qwen3OmniMoeThinkerForConditionalGeneration": qwen3_omni_moe.ARCHITECTURE,
    "LagunaForCausalLM": laguna.ARCHITECTURE,
    "Cohere2MoeForCausalLM": cohere2_moe.ARCHITECTURE,
    "Glm5NextForConditionalGeneration": glm5_next.ARCHITECTURE,
    "Qwen4ExpForCausalLM": qwen4_exp.ARCHITECTURE,
    "Qwen4ExpForConditionalGeneration": qwen4_exp.ARCHITECTURE,
    "MiMoV2FlashForCausalLM": mimo_v2_flash.ARCHITECTURE,
    "LlamaForCausalLM": llama.ARCHITECTURE,
    "MistralForCausalLM": mistral.ARCHITECTURE,
    "Qwen2ForCausalLM": qwen3.QWEN2,
    "Qwen3ForCausalLM": qwen3.QWEN3,
    "Exaone4ForCausalLM": exaone4.ARCHITECTURE,
    "Exaone4_5_ForConditionalGeneration": exaone4.ARCHITECTURE,
    "SmolLM3ForCausalLM": smollm3.ARCHITECTURE,
    "Gemma3ForCausalLM": gemma3.ARCHITECTURE,
    "Gemma3ForConditionalGeneration": gemma3.ARCHITECTURE,
    "Qwen3_5ForCausalLM": qwen3_5.ARCHITECTURE,
    "Qwen3_5ForConditionalGeneration": qwen3_5.ARCHITECTURE,
    "Ministral3ForCausalLM": ministral3.ARCHITECTURE,
    "Mistral3ForConditionalGeneration": ministral3.ARCHITECTURE,
    "Phi3ForCausalLM": phi3.ARCHITECTURE,
    "GraniteForCausalLM": granite.ARCHITECTURE,
    "Olmo2ForCausalLM": olmo2.OLMO2,
    "Olmo3ForCausalLM": olmo2.OLMO3,
    "SeedOssForCausalLM": seed_oss.ARCHITECTURE,
    "ApertusForCausalLM": apertus.ARCHITECTURE,
}
# Names of multimodal models that hold one of several language models -> ``model_type`` of the
# language model -> its architecture.
LANGUAGE_MODELS: Mapping[str, Mapping[str, Architecture]] = {
    "Mistral3ForConditionalGeneration": {
        "ministral3": ministral3.ARCHITECTURE,
        "mistral": mistral.ARCHITECTURE,
        "mistral3": mistral.ARCHITECTURE,  # the text_config has no type
        "mistral4": mistral4.ARCHITECTURE,
    },
}

_LOG = logging.getLogger("jax_nvfp4_moe")

Folder = str | pathlib.Path


def list_architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the names under ``architectures`` of a merged config; see `merge_text_config`."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def find_architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a parsed ``config.json`` names under ``architectures``.

    If the name is one of `LANGUAGE_MODELS`, ``model_type`` decides. `config` is a merged config, as
    `merge_text_config` returns it.

    Raises:
      CheckpointError: none of the names is supported. The message lists the supported names.
    """
    names = config.get("architectures")
    for name in list_architectures(config):
        if name in LANGUAGE_MODELS:
            return _find_language_model(config, name)
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise CheckpointError(
        f"{CONFIG}: architectures: {quoted(names)} is not supported"
        f"{why_refused_family(names)}; supported: {', '.join(ARCHITECTURES)}"
    )


def _find_language_model(config, name) -> Architecture:
    """Return the architecture of the language model inside the multimodal model `name`."""
    known, kind = LANGUAGE_MODELS[name], config.get("model_type")
    if isinstance(kind, str) and kind in known:
        return known[kind]
    raise CheckpointError(
        f"{CONFIG}: text_config.model_type: {quoted(kind)} is not supported in {name}; supported: "
        f"{', '.join(known)}"
    )


def load_model(
    path: Folder,
    *,
    scheme: Scheme | str | None = None,
    dtype=jnp.bfloat16,
    backend: str | Sequence[str] | None = None,
    mesh: Any = None,
    axis_names: Mapping[str, str] | None = None,
    dispatch: str = "psum",
    draft: str | None = None,
    draft_head: str | None = None,
) -> Decoder:
    """Load a checkpoint as a `flax.nnx` model, ready to run on this device or on a mesh.

    The weights of NVFP4 experts and linears stay packed, in the layout of the kernels that run
    them. All headers are checked before any weight is read. A progress bar is drawn on standard
    error if it is a terminal.

    Args:
      path: str or path, a folder with ``config.json`` and safetensors files. It may also be the
        name of a model on the Hugging Face Hub, such as "nvidia/Qwen3-30B-A3B-FP4" or
        "owner/model@revision", whose missing files are fetched first.
      scheme: a `Scheme` or its name, such as "w4a16", or "checkpoint" for what the file declares
        for each module. None, the default, decides by the checkpoint and the device; `explain`
        tells what it chose.
      dtype: bfloat16 (the default), float16 or float32, the dtype of activations, dense weights and
        the KV cache. A KV cache that the file declares FP8 is FP8 with scheme "checkpoint" or
        "w4a4", and by default on devices with FP4 tensor cores.
      backend: the name of a backend for all NVFP4 modules, or a sequence of names that are tried in
        order. None, the default, takes the first one that fits the device; `explain` lists them.
      mesh: a `jax.sharding.Mesh` with at least one of the axes `expert`, `tensor` and `data`. The
        weights are sharded along `expert` and `tensor`. The rows of `input_ids`, of the cache and
        of logits are sharded along `data`, if it divides their number; otherwise they are
        replicated. Everything is replicated along further axes. Explicit axes are turned into Auto
        axes, so call the model outside of ``jax.set_mesh`` with Explicit axes. Or what
        `parallel.connect_peers` returned. "auto" takes the fewest devices that have room for the
        weights, along `expert` as far as possible; see `parallel.automatic_mesh`. None, the
        default, loads onto one device.
      axis_names: names of the axes of `mesh` that are called something else, such as ``{"expert":
        "ep", "tensor": "tp", "data": "dp"}``. None, the default, if they are called what they do.
      dispatch: how tokens reach their experts on a mesh. With "psum", the default, every device
        runs its own experts on all tokens, and their results are summed. With "all_to_all", or
        "ragged" on GPUs, tokens are sharded along `expert` and travel to the devices of their
        experts. See `parallel.dispatch`.
      draft: "mtp" to read the drafting layers of the file as well (multi-token prediction), which
        `Decoder.draft` runs. Each keeps the format in which the file stores it. None, the default,
        leaves them out.
      draft_head: the head that makes the logits of drafts. "nvfp4" and "fp8" make a copy of the
        head in that format, which is faster to read. It changes which tokens are drafted, and never
        the tokens of `generate`. "exact" makes no copy. None, the default, makes one in NVFP4 if
        the head is not quantized, has at least 32,768 rows, and a kernel runs the copy.

    Returns:
      A `Decoder`: ``model(input_ids)`` takes int ``[b, t]`` and returns float32 logits ``[b, t,
      vocab]``. ``model.config`` has the sizes, ``model.stop_ids`` the tokens that end a text, and
      ``model.init_cache`` makes a KV cache; see `models.decoder.Decoder`.

    Raises:
      CheckpointError: the folder, a config or a header is wrong, or a scale is NaN or infinite. The
        error lists all problems of the configs and headers. Also if the file has no drafting
        layers, or its architecture's are not supported, and `draft` asks for them.
      ValueError: an argument is wrong, or the scheme does not fit the checkpoint.
      NoBackendError: no backend can run a module. The error lists every backend with its reason.
      MemoryError: the device has too little memory. The message names the tensor and its size, or
        the copy of the head.

    Example:
      >>> import importlib.resources
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> model = nvfp4.load_model(path)
      >>> logits = model(jnp.asarray([[1, 2, 3]]))
      >>> logits.shape, logits.dtype
      ((1, 3, 4096), dtype('float32'))

    Source: the files of ``models/`` name the reference of each architecture.
    """
    check_draft(draft)
    check_draft_head(draft_head, draft)
    automatic = isinstance(mesh, str)
    if automatic:
        _check_automatic(mesh, axis_names)
    settings = _settings(scheme, dtype, backend, None if automatic else mesh, dispatch, axis_names)
    with open_checkpoint(path) as checkpoint:
        find = _find_on_automatic_mesh if automatic else find_model
        unread = find(checkpoint, settings, draft=draft)
        warn_of_generation_keys(checkpoint.folder)
        stop_ids = read_stop_ids(checkpoint.folder, read_end_of_text(checkpoint.folder))
        with unread.open_reader() as reader:
            model = unread.materialize(reader)
    model.stop_ids = stop_ids
    _say_where_scheme_is_idle(model, settings.scheme)
    if model.drafter is not None:
        set_draft_head(model, draft_head, unread.settings)
    return model


def load_moe(
    path: Folder,
    layer: int,
    *,
    scheme: Scheme | str | None = None,
    dtype=jnp.bfloat16,
    backend: str | Sequence[str] | None = None,
    mesh: Any = None,
    axis_names: Mapping[str, str] | None = None,
    dispatch: str = "psum",
) -> NVFP4MoE:
    """Load the expert block of one layer, and read no other tensor.

    The block routes each token to its experts and returns the weighted sum of their outputs, plus
    the shared experts if the model has any: ``y = sum(weight[e] * expert[e](x)) + shared(x)``.

    Args:
      path: str or path, a checkpoint folder or a Hub name, as for `load_model`.
      layer: int, the index of the decoder layer, from 0.
      scheme: as for `load_model`. None, the default, decides by the checkpoint and the device.
      dtype: as for `load_model`. The default is bfloat16.
      backend: as for `load_model`. None, the default, takes the first one that fits the device.
      mesh: as for `load_model`. None, the default, loads onto one device.
      axis_names: as for `load_model`. The default is None.
      dispatch: as for `load_model`. The default is "psum".

    Returns:
      An `NVFP4MoE` module. It takes ``x [t, h]`` and returns ``[t, h]`` in the dtype of the module.

    Raises:
      CheckpointError: as for `load_model`, but only the tensors of the block are checked for
        presence and shape.
      ValueError: the layer has no experts, an argument is wrong, or the scheme does not fit the
        checkpoint.
      NoBackendError: as for `load_model`.
      MemoryError: as for `load_model`.

    Example:
      >>> import importlib.resources
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> moe = nvfp4.load_moe(path, 1, scheme="w4a16")
      >>> y = moe(jnp.ones((8, 256), jnp.bfloat16))
      >>> y.shape, y.dtype
      ((8, 256), dtype(bfloat16))

    Source: the files of ``models/`` name the reference of each architecture.
    """
    settings = _settings(scheme, dtype, backend, mesh, dispatch, axis_names)
    with open_checkpoint(path) as checkpoint:
        unread = find_moe(checkpoint, layer, settings)
        with unread.open_reader() as reader:
            return unread.materialize(reader)


@dataclasses.dataclass(frozen=True)
class UnreadModel:
    """What the headers alone tell about a model: its modules, and the tensors that fill them.

    Attributes:
      model: the model, with a `jax.ShapeDtypeStruct` in place of each array.
      path: the path of `model` in the whole model. It is empty for the whole model itself.
      parts: the parts of the model, and what is read for each; see `nn.building.builder`.
      table: the table of the checkpoint's tensors.
      settings: the settings of the modules, such as dtype and mesh.
    """

    model: Any
    path: str
    parts: Sequence[Part]
    table: WeightTable
    settings: Settings

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """How the file quantizes each of its modules, and what decided that."""
        return self.table.decisions

    def open_reader(self, progress: bool | None = None, label: str = "loading"):
        """Return a context manager that yields a reader; see `WeightTable.open_reader`."""
        # One chunk is used while the next one is read. A third one is for the parts between them.
        return self.table.open_reader(progress, label, 3 * largest_chunk(self.settings.target))

    def read(self, path: str, reader: Reader) -> Any:
        """Return one part with its weights: a module, a variable, or its value.

        Args:
          path: the path of the part, such as "embedding".
          reader: the reader that `open_reader` yields.

        Raises:
          CheckpointError: as for `materialize`.
          MemoryError: as for `materialize`.
        """
        part = next(part for part in self.parts if part.path == path)
        return place(part, reader, self.settings)

    def materialize(self, reader: Reader, path: str | None = None) -> Any:
        """Return the model, or the part of it at `path`, with its weights.

        Args:
          reader: the reader that `open_reader` yields.
          path: the path of the part, such as "layers.3". None returns the whole `model`.

        Raises:
          CheckpointError: a scale is NaN or infinite.
          MemoryError: the device has too little memory.
        """
        found = self.model
        for name in () if path is None else path.split("."):
            found = found[int(name)] if name.isdigit() else getattr(found, name)
        leaves, tree = jax.tree.flatten(found)
        made = tree.unflatten(leaves)  # a copy: the modules of `model` stay without weights
        fill(made, self.path if path is None else path, self.parts, reader, self.settings)
        if self.settings.expert_mesh is not None:
            note_shardings(made, self.settings.expert_mesh)
        return made


def find_model(
    checkpoint: Checkpoint,
    settings: Settings,
    options: LoadOptions | None = None,
    *,
    draft: str | None = None,
) -> UnreadModel:
    """Find a whole model in the headers: build it without weights, and find its tensors.

    Args:
      checkpoint: the open checkpoint.
      settings: the settings of the modules.
      options: how to read tensors. None derives the options from `settings`.
      draft: as for `load_model`. None by default.

    Raises:
      CheckpointError: lists everything that is missing, misshapen or unexpected. Nothing is read.
    """
    unread, config = _find_whole(checkpoint, settings, options, draft)
    warn_of_other_frequencies(checkpoint, config)
    return unread


def _find_whole(checkpoint, settings, options, draft):
    """Return what `find_model` does, and the sizes of the model."""
    row, config = _read_config(checkpoint)
    if draft is not None and row.drafting is None:
        names = list_architectures(merge_text_config(checkpoint.config))
        supported = [name for name, one in ARCHITECTURES.items() if one.drafting is not None]
        problem = (
            f"draft={draft!r}: drafting layers of {quoted(names)} are not read; load it without "
            f"draft. Those of these architectures are read: {', '.join(supported)}"
        )
        raise CheckpointError([problem], str(checkpoint.folder))
    few = refuse_layers(checkpoint.tensors, config.num_layers)
    if few is not None:
        raise CheckpointError([few], str(checkpoint.folder))

    def build(make):
        model = row.build_model(config, make)
        if draft is not None:
            model.drafter = build_drafter(row, config, make)
        return model

    return _find(checkpoint, row, build, "", settings, options), config


def find_moe(checkpoint: Checkpoint, layer: int, settings: Settings) -> UnreadModel:
    """Find the expert block of one layer; otherwise as `find_model`."""
    row, config = _read_config(checkpoint)
    path = row.moe.replace("*", str(layer))
    return _find(
        checkpoint, row, lambda make: row.build_moe(config, layer, make), path, settings, None
    )


@paused_collection()
def _find(checkpoint, row, build, path, settings, options):
    """Build the abstract module at `path`, and check the headers of its tensors."""
    options = options or _options(settings)
    table = WeightTable(checkpoint, options)
    make = Builder(table, row.keys, settings)
    try:
        model = nnx.eval_shape(lambda: build(make))
    except Exception:
        # A missing or misshapen tensor may make the model's own code fail. The problem with the
        # tensor is the better error.
        table.raise_problems()
        raise
    check_parts_cover(model, make.parts, path)
    modules: list[str] = []
    if path:
        # The modules directly below a layer that hold the block, such as model.layers.3.mlp. There
        # are two of them if the shared experts stand beside the routed ones. Tensors outside of
        # these modules are not reported as unexpected.
        names = (source.name for part in make.parts for source in part.sources.values())
        modules = sorted({".".join(name.split(".")[:4]) for name in names})
    table.check(modules)
    spelled = make.parts, checkpoint.key_mapping, row.renamed, path
    model.projection_names = name_projections(*spelled, swapped=row.swaps_experts)
    return UnreadModel(model, path, make.parts, table, settings)


def abstract_model(
    path: Folder,
    *,
    scheme: Scheme | str | None = None,
    dtype=jnp.bfloat16,
    draft: str | None = None,
) -> UnreadModel:
    """Find a model in the headers, without input scales being required, to inspect it.

    Args:
      path: as for `load_model`.
      scheme: as for `load_model`.
      dtype: as for `load_model`.
      draft: as for `load_model`. None by default.

    Raises:
      CheckpointError: as for `load_model`.
    """
    settings = _settings(scheme, dtype, None)
    options = _options(settings, input_scales="optional")
    with open_checkpoint(path) as checkpoint:
        return find_model(checkpoint, settings, options, draft=draft)


def find_unquantized(checkpoint: Checkpoint) -> UnreadModel:
    """Find an unquantized model in the headers, to be read in float32.

    Raises:
      CheckpointError: as for `load_model`. All headers are checked.
    """
    settings = _settings(None, jnp.float32, None)
    return find_model(checkpoint, settings, _options(settings, input_scales="ignored"))


def read_model_config(checkpoint: Checkpoint) -> Any:
    """Return the sizes of an open checkpoint's model, such as vocab_size and max_positions.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    return _read_config(checkpoint)[1]


def find_dtype(dtype) -> jnp.dtype:
    """Return `dtype`, a name or a type, as one of the dtypes that modules support.

    Raises:
      ValueError: modules do not support it. The message lists the supported dtypes.
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in FLOATS:
        raise ValueError(f"dtype: expected one of {', '.join(FLOATS)}; got {name!r}")
    return jnp.dtype(name)


def _say_where_scheme_is_idle(model, scheme):
    """Warn if the user asked for a scheme, but the model has no NVFP4 weights."""
    schemes = (getattr(module, "scheme", None) for _, module in nnx.iter_modules(model))
    if scheme not in (None, "checkpoint") and not any(isinstance(s, Scheme) for s in schemes):
        _LOG.warning(
            "scheme %s has no effect on this checkpoint, which has no NVFP4 weights; "
            "`jax-nvfp4-moe quantize` makes a checkpoint that has",
            scheme,
        )


def _settings(scheme, dtype, backend, mesh=None, dispatch="psum", axis_names=None):
    """Return the settings of the modules after checking the arguments of `load_model`."""
    expert_mesh = None if mesh is None else find_expert_mesh(mesh, axis_names).automatic()
    target = Target.current() if expert_mesh is None else expert_mesh.target
    _check_dispatch(dispatch, expert_mesh, target)
    choose_scheme(Scheme.W4A4, scheme, target)  # raises for an unknown name before files are read
    requested_scheme = None if scheme is None else str(scheme)
    return Settings(
        target,
        requested_scheme,
        backend,
        find_dtype(dtype),
        expert_mesh=expert_mesh,
        dispatch=dispatch,
    )


def _check_automatic(mesh, axis_names):
    """Check the arguments of `load_model` that give a mesh by its name."""
    if mesh != AUTO:
        raise ValueError(f"mesh: expected a jax.sharding.Mesh, {AUTO!r} or None, got {mesh!r}")
    if axis_names is not None:
        raise ValueError(
            f"axis_names: expected None with mesh={AUTO!r}, whose axes are called '{EXPERT}' and "
            f"'{TENSOR}'; got {dict(axis_names)}"
        )


def _find_on_automatic_mesh(checkpoint, settings, *, draft) -> UnreadModel:
    """Return what `find_model` does, on the mesh that the size of the model calls for."""

    @functools.cache  # the chosen model was found when it was measured
    def find(mesh):
        expert_mesh = None if mesh is None else find_expert_mesh(mesh)
        there = dataclasses.replace(settings, expert_mesh=expert_mesh)
        return _find_whole(checkpoint, there, None, draft)

    mesh = choose_mesh(
        lambda mesh: find(mesh)[0].model, jax.devices(), fixed=jax.process_count() > 1
    )
    unread, config = find(mesh)
    warn_of_other_frequencies(checkpoint, config)
    return unread


def _check_dispatch(dispatch, expert_mesh, target):
    """Check that the mesh and the devices support `dispatch`."""
    if dispatch not in DISPATCHES:
        raise ValueError(f"dispatch: expected one of {', '.join(DISPATCHES)}; got {dispatch!r}")
    if dispatch == "psum":
        return
    if expert_mesh is None or not expert_mesh.has(EXPERT):
        axes = "no mesh" if expert_mesh is None else f"axes {dict(expert_mesh.mesh.shape)}"
        raise ValueError(
            f"dispatch: expected a mesh with an axis '{EXPERT}' for {dispatch!r}, which shards "
            f"tokens along that axis; got {axes}. Pass mesh=, or leave dispatch at 'psum'"
        )
    check_platform(dispatch, target)


def _read_config(checkpoint: Checkpoint) -> tuple[Architecture, Any]:
    """Return the architecture of a checkpoint and the sizes of its model."""
    try:
        config = merge_text_config(checkpoint.config)
        row = find_architecture(config)
        sizes = row.read_config(config)
        refuse_unread_keys(config, sizes, row.read_config)
        return row, sizes
    except CheckpointError as error:
        raise CheckpointError(error.problems, str(checkpoint.folder)) from None


def _options(settings, input_scales=None):
    """Return how to read tensors for modules with these settings."""
    if input_scales is None:
        chosen, _ = choose_scheme(Scheme.W4A4, settings.scheme, settings.target)
        input_scales = "required" if chosen is Scheme.W4A4 else "ignored"
    return LoadOptions(dtype=settings.dtype, input_scales=input_scales)
