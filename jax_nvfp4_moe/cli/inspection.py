"""Describe a checkpoint: its layers, and the scheme and backend of each. Reads headers only."""

import collections
import contextlib
import dataclasses
import logging
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.folder import merge_text_config, read_num_layers
from jax_nvfp4_moe.checkpoint.opening import open_checkpoint
from jax_nvfp4_moe.checkpoint.weights.unexpected_keys import find_drafting_layers
from jax_nvfp4_moe.cli.escaping import escape_line
from jax_nvfp4_moe.cli.output import table
from jax_nvfp4_moe.models.loading import UnreadModel, abstract_model, list_architectures
from jax_nvfp4_moe.nn.experts.routed_experts import RoutedExperts
from jax_nvfp4_moe.nn.explanation import explain
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.linear.nvfp4_linear import NVFP4Linear
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.scheme import Target

TARGETS = (
    Target("cpu"),
    *(Target("cuda", capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))),
)
OTHERS = "embedding, routers, norms"


def inspect(path: str | pathlib.Path, *, scheme: str | None = None, dtype="bfloat16") -> str:
    """Describe a checkpoint as text: layers, formats, sizes, and the choices for each device.

    Args:
      path: folder or Hub name of the checkpoint. No weight is read.
      scheme: as for `load_model`. Defaults to None.
      dtype: as for `load_model`. Defaults to "bfloat16".

    Raises:
      CheckpointError: the checkpoint cannot be read; see `load_model`.
      ValueError: `scheme` does not fit the checkpoint.
    """
    return describe(path, abstract_model(path, scheme=scheme, dtype=dtype))


def describe(path: str | pathlib.Path, load: UnreadModel) -> str:
    """Describe a checkpoint whose headers have been read, as text; see `inspect`."""
    model, kinds = load.model, _kinds(load.model)
    parts = [*map(escape_line, _header(path)), "", *table(_rows(model)), ""]
    parts += [*table(_decided(load.decisions)), "", *_choices(kinds)]
    return "\n".join(parts)


@dataclasses.dataclass(frozen=True)
class ModuleBytes:
    """Size of all modules of one kind, as `load_model` loads them.

    Attributes:
      module: path in the model with a star for each layer number, such as "layers.*.mlp.experts".
      count: number of modules; None for weights outside of such modules, such as norms.
      weights: sizes, such as "256 > 128" for a linear layer with 256 inputs and 128 outputs.
      format: format of the weights, such as "NVFP4 w4a4", "FP8 fp8" or "bfloat16".
      nbytes: total size in bytes.
    """

    module: str
    count: int | None
    weights: str
    format: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class DraftingLayers:
    """The drafting layers that a file offers.

    Attributes:
      layers: number of decoder layers that draft.
      tensors: number of their tensors in the file.
      nbytes: total size of these tensors in bytes.
      formats: formats in which ``load_model(path, draft="mtp")`` loads their weights.
      problem: why they cannot be loaded; None if they can.
    """

    layers: int
    tensors: int
    nbytes: int
    formats: tuple[str, ...] = ()
    problem: str | None = None

    def __str__(self) -> str:
        """Return a line about them."""
        many = "s" if self.layers > 1 else ""
        size = f"{self.layers} layer{many} in {self.tensors} tensors, {mebibytes(self.nbytes)}"
        if self.problem is not None:
            return f"{size}; cannot be loaded: {self.problem}"
        return f'{size}: {", ".join(self.formats)}; loaded by load_model(path, draft="mtp")'


def find_drafting(path: str | pathlib.Path) -> DraftingLayers | None:
    """Return the drafting layers that a checkpoint offers, or None if it has none.

    Args:
      path: folder or Hub name of the checkpoint. No weight is read.
    """
    with open_checkpoint(path) as checkpoint:
        tensors = checkpoint.tensors
        layers, names = find_drafting_layers(tensors, read_num_layers(checkpoint.config))
        found = DraftingLayers(layers, len(names), sum(tensors.info(name).nbytes for name in names))
    if not names:
        return None
    try:
        with _quiet():
            drafter = abstract_model(path, draft="mtp").model.drafter
    except CheckpointError as error:
        return dataclasses.replace(found, problem=error.problems[0])
    assert drafter is not None
    formats = dict.fromkeys(one.format for one in measure_bytes(drafter) if one.count)
    return dataclasses.replace(found, formats=tuple(formats))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Write no warnings to the log, because an earlier load of the same files has done so."""
    logger = logging.getLogger("jax_nvfp4_moe")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def measure_bytes(model: nnx.Module) -> list[ModuleBytes]:
    """Return the size of a model by kind of module and format; the sizes add up to the model's.

    Args:
      model: model from `load_model`, or an abstract one without values.
    """
    found = []
    for (name, description), modules in _kinds(model).items():
        weights, form = description.split("; ")
        found.append(ModuleBytes(name, len(modules), weights, form, sum(map(_bytes, modules))))
    left = _bytes_by_dtype(nnx.state(model))
    for modules in _kinds(model).values():
        for module in modules:
            left.subtract(_bytes_by_dtype(_own_weights(module)))
    others = [ModuleBytes(OTHERS, None, "", dtype, size) for dtype, size in left.items() if size]
    return found + others


def bytes_report(path: str | pathlib.Path, load: UnreadModel) -> dict[str, Any]:
    """Return what a checkpoint contains, as values for JSON.

    Args:
      path: folder of the checkpoint.
      load: what the load found, from `models.loading.abstract_model`.

    Returns:
      A dictionary. "path", "architectures", "tensors" and "file_bytes" describe the files.
      "drafting" has the fields of `DraftingLayers`, or is None.
      "loaded_bytes" is the size of the model. "modules" lists the fields of each `ModuleBytes`,
      with `nbytes` under the name "bytes", and so does "drafting".
    """
    found = measure_bytes(load.model)
    modules, drafting = list(map(_report, found)), find_drafting(path)
    with open_checkpoint(path) as checkpoint:
        names = checkpoint.tensors.names()
        return {
            "path": str(path),
            "architectures": list_architectures(merge_text_config(checkpoint.config)),
            "tensors": len(names),
            "file_bytes": sum(checkpoint.tensors.info(name).nbytes for name in names),
            "drafting": None if drafting is None else _report(drafting),
            "loaded_bytes": sum(one.nbytes for one in found),
            "modules": modules,
        }


def _report(one) -> dict[str, Any]:
    """Return the fields of a dataclass for JSON, with `nbytes` under the name "bytes"."""
    fields = dataclasses.asdict(one)
    return fields | {"bytes": fields.pop("nbytes")}


def _header(path) -> Iterator[str]:
    """Yield lines about the whole checkpoint: architecture, size and quantization."""
    with open_checkpoint(path) as checkpoint:
        names = checkpoint.tensors.names()
        size = sum(checkpoint.tensors.info(name).nbytes for name in names)
        yield f"{path}"
        yield f"architecture  {', '.join(list_architectures(merge_text_config(checkpoint.config)))}"
        yield f"tensors       {len(names)}, {mebibytes(size)}"
        said = [f"{rules.summary} ({rules.source})" for rules in checkpoint.quant.rules]
        yield f"quantization  {'; '.join(said) or 'none'}"
        cache = checkpoint.quant.kv_cache
        if cache is not None:
            yield f"KV cache      {cache.algorithm} ({cache.source})"
    drafting = find_drafting(path)
    if drafting is not None:
        yield f"drafting      {drafting}"


def _kinds(model) -> dict[tuple[str, str], list[nnx.Module]]:
    """Return the modules that hold weights, grouped by path and description.

    Layer numbers in a path are replaced by stars, so that equal modules of all layers form one
    group.
    """
    kinds: dict[tuple[str, str], list[nnx.Module]] = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, (RoutedExperts, NVFP4Linear, DenseLinear, FP8Linear)):
            name = any_layer(".".join(map(str, path)))
            kinds.setdefault((name, _describe(module)), []).append(module)
    return kinds


def any_layer(name: str) -> str:
    """Return the name of a module, or a sentence, with a star for each layer number."""
    return re.sub(r"\.\d+(?=\.|\W|$)", ".*", name)


def _decided(decisions) -> Iterator[tuple[str, ...]]:
    """Yield a table of how the file quantizes each module, and which entry of the file says so.

    Equal modules of different layers share a row.
    """
    counts: dict[tuple[str, ...], int] = {}
    for module, (scheme, source, _) in decisions.items():
        row = any_layer(module), str(scheme or "not quantized"), any_layer(source)
        counts[row] = counts.get(row, 0) + 1
    yield "module in the file", "count", "scheme", "declared by"
    for (module, scheme, source), count in counts.items():
        yield module, str(count), scheme, source


def _describe(module) -> str:
    """Return the sizes and the format of a module's weights."""
    if isinstance(module, RoutedExperts):
        params = module.params.get_value()
        experts, h, i = params.num_experts, params.hidden, params.intermediate
        kind = _kind(module, params.down)
        return f"{experts} experts {h} > {i}, top {module.options.top_k}; {kind}"
    weight = module.weight.get_value()
    n, k = weight.shape
    return f"{k} > {n}; {_kind(module, weight)}"


def _kind(module, weight) -> str:
    """Return the format of a module's matrices."""
    if isinstance(weight, NVFP4Tensor):
        return f"NVFP4 {module.checkpoint_scheme}"
    if isinstance(weight, FP8Tensor):
        blocks = " in blocks" if weight.has_groups else ""
        return f"FP8 {module.checkpoint_scheme}{blocks}"
    return weight.dtype.name


def _own_weights(module):
    """Return a module's own weights; modules inside it have rows of their own."""
    own = module.params if isinstance(module, RoutedExperts) else module.weight
    return own.get_value()


def _bytes(module) -> int:
    """Return the size of a module's own weights in bytes."""
    return _bytes_by_dtype(_own_weights(module)).total()


def _bytes_by_dtype(tree) -> collections.Counter[str]:
    """Return the name of each dtype in `tree` -> the size of its leaves in bytes."""
    found = collections.Counter()
    for leaf in jax.tree.leaves(tree):
        found[leaf.dtype.name] += math.prod(leaf.shape) * leaf.dtype.itemsize
    return found


def _rows(model) -> Iterator[tuple[str, ...]]:
    """Yield a table of modules with their number, weights and size."""
    yield "module", "count", "weights; format", "total size"
    found = measure_bytes(model)
    for one in found:
        description = "; ".join(filter(None, (one.weights, one.format)))
        yield one.module, str(one.count or ""), description, mebibytes(one.nbytes)
    yield "total, as loaded", "", "", mebibytes(sum(one.nbytes for one in found))


def _choices(kinds) -> Iterator[str]:
    """Yield for each device the scheme and backend of each kind of layer, and the reasons.

    Layers with equal answers share one answer.
    """
    for target in TARGETS:
        answers: dict[str, list[str]] = {}
        for (name, _), modules in kinds.items():
            if getattr(modules[0], "scheme", None) is None:
                continue  # the module runs in plain XLA, so there is no backend to choose
            choice = explain(modules[0], target=target)
            lines = [f"    scheme  {choice.scheme}: {choice.why}", f"    backend {choice.backend}"]
            lines += [f"      not {name}: {why}" for name, why in choice.reasons.items()]
            answers.setdefault("\n".join(lines), []).append(name)
        if answers:
            yield f"{target}"
        for answer, names in answers.items():
            yield f"  {', '.join(dict.fromkeys(names))}"
            yield answer


def mebibytes(size: float) -> str:
    """Return a number of bytes as text, in KiB, MiB or GiB."""
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**20:.2f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"
