"""`save_lora` and `load_lora`: adapters in the files of PEFT.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``. The matrices of a linear
layer are ``base_model.model.NAME.lora_A.weight`` ``[r, k]`` and ``lora_B.weight`` ``[n, r]``, with
its name in transformers. transformers stacks the experts of a layer in two parameters, which PEFT
adapts by ``target_parameters``: ``lora_A`` is ``[e r, k]`` with the rows of one expert after
another, and ``lora_B`` is ``[n, r e]`` with adjacent columns for all experts. PEFT wraps the second
parameter around the first, so that the names of the first one's matrices have ``base_layer``.

Source: `save_and_load.py`, `tuners/lora/layer.py` and `utils/transformers_weight_conversion.py` of
PEFT 0.21.
"""

import collections
import itertools
import json
import logging
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, Problems, printable, quoted
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.folder import expand_home, locate, read_json
from jax_nvfp4_moe.checkpoint.formats.regular_expressions import PatternError, RegularExpression
from jax_nvfp4_moe.checkpoint.names import PARTS, PROJECTION_OF, PROJECTIONS
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, read_header
from jax_nvfp4_moe.checkpoint.writing.files import write_file
from jax_nvfp4_moe.numerics.arguments import check_kind
from jax_nvfp4_moe.ops.moe import check_dtype
from jax_nvfp4_moe.parallel.processes import is_first
from jax_nvfp4_moe.training.adaptable import EXPERTS, Adaptable, find_adaptable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _INNER = "base_model.model.", ".base_layer"
_KEY = re.compile(r"(.*)\.lora_([AB])(?:\.default)?\.weight")
_ONE_EXPERT = re.compile(rf"(.*)\.(\d{{1,6}})\.({'|'.join(PROJECTION_OF)})")
_WRAPPERS = re.compile(rf"(?:(?:{'|'.join(PARTS)})\.)+")
# Fields of a configuration that change what an adapter computes -> the values that are supported.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}

_FLOATS = ("BF16", "F16", "F32", "F64")
_PATTERNS = ("rank_pattern", "alpha_pattern")

_LOG = logging.getLogger("jax_nvfp4_moe")


class AdapterMatrices(NamedTuple):
    """The matrices of one adapter, as `Adaptable.put` takes them."""

    a: np.ndarray
    b: np.ndarray
    alpha: float


def save_lora(model: nnx.Module, folder: str | pathlib.Path) -> None:
    """Write the adapters of a model as files that PEFT reads.

    On a mesh, the files hold whole matrices. If a program runs in several processes, all of them
    must call `save_lora`, and process 0 writes.

    Args:
      model: a model with adapters that `add_lora` or `load_lora` has added.
      folder: where to write ``adapter_config.json`` and ``adapter_model.safetensors``. It is made
        if it is missing, and files of these names are replaced. A leading ``~`` is expanded.

    Raises:
      ValueError: the model has no adapters, or modules that `nnx.vmap` has stacked have some.
      OSError: a file cannot be written. The message names the file and its device.

    Example:
      >>> import importlib.resources, pathlib, tempfile
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> model = nvfp4.load_model(path)
      >>> nvfp4.add_lora(model, 8, rngs=nnx.Rngs(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     nvfp4.save_lora(model, folder)
      ...     print(sorted(path.name for path in pathlib.Path(folder).iterdir()))
      ['adapter_config.json', 'adapter_model.safetensors']

    Source: PEFT, https://huggingface.co/docs/peft, the page on its checkpoint format.
    """
    check_kind("model", model, nnx.Module)
    folder = expand_home(folder)
    known = find_adaptable(model)
    layers = [layer for layer in known if layer.pair is not None]
    if not layers:
        raise ValueError(
            "model: expected a model with adapters, which add_lora or load_lora adds; got none"
        )
    stacked = [one.name for one in layers if len(one.shape) > 2 + (one.group == EXPERTS)]
    if stacked:
        raise ValueError(
            f"model: expected layers one by one, as PEFT has them; {stacked[0]} is a stack of "
            "layers"
        )
    tensors: dict[str, np.ndarray] = {}
    for layer, name in zip(layers, _stored_names(layers), strict=True):
        for letter, matrix in zip("AB", _as_stored(layer, *layer.take()), strict=True):
            tensors[f"{_PREFIX}{name}.lora_{letter}.weight"] = np.ascontiguousarray(matrix)
    if is_first():
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / WEIGHTS, tensors, {"format": "pt"})
        sparse = any(layer.group == EXPERTS for layer in known)
        text = json.dumps(_configuration(layers, sparse), indent=2) + "\n"
        write_file(folder / CONFIG, [text.encode()])


def _stored_names(layers: Sequence[Adaptable]) -> list[str]:
    """Return the name of each layer in the names of its tensors."""
    adapted = {layer.name for layer in layers}
    return [
        _stored_name(layer.name, adapted) if layer.group == EXPERTS else layer.name
        for layer in layers
    ]


def _stored_name(name, adapted) -> str:
    """Return the name under which PEFT stores the adapter of a parameter of experts.

    Args:
      name: name of the parameter.
      adapted: the names of all adapted parameters.
    """
    experts, _, last = name.rpartition(".")
    inner = last != "down_proj" and f"{experts}.down_proj" in adapted
    return experts + (_INNER if inner else "")


def _as_stored(layer: Adaptable, a, b) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrices of an adapter as PEFT stores them."""
    if layer.group != EXPERTS:
        return a, b
    if layer.interleaved:
        b = np.stack(np.split(b, 2, axis=1), axis=2).reshape(b.shape)
    if layer.swapped:
        a, b = _swap(a, b)
    return a.reshape(-1, a.shape[-1]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)


def _swap(a, b):
    """Return the matrices ``[e, r, n]`` and ``[e, k, r]`` of transposed weights, or the reverse."""
    return b.swapaxes(1, 2), a.swapaxes(1, 2)


def _configuration(layers: Sequence[Adaptable], sparse: bool) -> dict[str, Any]:
    """Return the configuration of PEFT for the adapters of some layers.

    Args:
      layers: the layers.
      sparse: whether the model has routed experts.
    """
    modules, parameters, facts = [], [], {}
    for layer in layers:
        name, listed = layer.name, modules
        if layer.group == EXPERTS:
            listed = parameters
        elif sparse and name.rpartition(".")[2] in PROJECTIONS:
            # PEFT takes modules of these names for the routed experts, but not their parameters.
            name, listed = f"{name}.weight", parameters
        listed.append(name)
        facts[re.escape(name)] = _rank_and_alpha(layer)
    (rank, alpha), _ = collections.Counter(facts.values()).most_common(1)[0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "target_modules": modules or None,
        "target_parameters": parameters or None,
        "rank_pattern": {name: own for name, (own, _) in facts.items() if own != rank},
        "alpha_pattern": {name: own for name, (_, own) in facts.items() if own != alpha},
    }


def _rank_and_alpha(layer) -> tuple[int, float]:
    """Return the rank and the alpha of the adapter of a layer; a whole number is an int."""
    pair = layer.pair
    alpha = int(pair.alpha) if pair.alpha.is_integer() else pair.alpha
    return pair.a.shape[-2], alpha


def load_lora(
    model: nnx.Module,
    folder: str | pathlib.Path,
    *,
    dtype: DTypeLike = jnp.float32,
    merge_aware: bool = False,
) -> None:
    """Add the adapters of a folder that `save_lora` or PEFT wrote to a model, in place.

    Adapters of single experts, as PEFT writes them with transformers 4, are joined. Those of the
    gate and of the up projection of an expert then become one adapter of twice the rank.

    Args:
      model: a model without adapters, from the checkpoint on which the adapters were trained.
      folder: folder with ``adapter_config.json`` and ``adapter_model.safetensors``. A leading ``~``
        is expanded.
      dtype: dtype of A and B, float32 by default.
      merge_aware: as for `add_lora`; False by default. The files do not say how adapters were
        trained.

    Raises:
      ValueError: the model has adapters already, or `place_model` has moved experts that have some
        in the folder. The model is then unchanged.
      CheckpointError: a file is missing or wrong, the model has no layer of a name, a matrix has
        another shape, or the configuration asks for more than LoRA, such as DoRA. The message lists
        all problems, and the model is unchanged.

    Example:
      >>> import importlib.resources, tempfile
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> trained, model = nvfp4.load_model(path), nvfp4.load_model(path)
      >>> nvfp4.add_lora(trained, 8, targets="q_proj", rngs=nnx.Rngs(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     nvfp4.save_lora(trained, folder)
      ...     nvfp4.load_lora(model, folder)
      >>> model.layers[0].attention.qkv.q_k_v.adapter.q.a.shape
      (8, 256)

    Source: as for `save_lora`.
    """
    check_kind("model", model, nnx.Module)
    dtype = check_dtype(dtype)
    check_kind("merge_aware", merge_aware, bool)
    layers = find_adaptable(model)
    adapted = [layer.name for layer in layers if layer.pair is not None]
    if adapted:
        raise ValueError(
            f"model: expected a model without adapters; {adapted[0]} and {len(adapted) - 1} other "
            "layers have one. Load the model again"
        )
    found = read_adapters(layers, folder)
    for layer, _ in found:
        layer.check()
    for layer, (a, b, alpha) in found:
        matrices = np.asarray(a, dtype), np.asarray(b, dtype)
        layer.put(*matrices, alpha, merge_aware=merge_aware)


def read_adapters(
    layers: Sequence[Adaptable], folder: str | pathlib.Path
) -> list[tuple[Adaptable, AdapterMatrices]]:
    """Return the layers that have an adapter in a folder, and the matrices of each.

    Args:
      layers: all layers of a model that can have an adapter.
      folder: as for `load_lora`.

    Raises:
      CheckpointError: as for `load_lora`.
    """
    folder = expand_home(folder)
    config, problems = read_json(folder, CONFIG), Problems()
    problems += _find_unsupported(config)
    stored = _read_tensors(folder, problems)
    problems.finish(printable(folder))
    found = _find_matrices(_Names(layers, config), stored, problems)
    problems.finish(printable(folder))
    return found


def _find_unsupported(config) -> Iterable[str]:
    """Yield a sentence for each field of a configuration that asks for what is not supported."""
    for name, supported in _SUPPORTED.items():
        if name in config and config[name] not in supported:
            listed = ", ".join(map(repr, supported))
            yield f"{CONFIG}: {name}: expected one of {listed}; got {quoted(config[name])}"
    for name in ("r", "lora_alpha"):
        if not _is_positive(config.get(name)):
            yield f"{CONFIG}: {name}: expected a positive number, got {quoted(config.get(name))}"
    for name in _PATTERNS:
        found = config.get(name) or {}
        if not isinstance(found, dict) or not all(map(_is_positive, found.values())):
            yield f"{CONFIG}: {name}: expected positive numbers by name, got {quoted(found)}"


def _is_positive(value) -> bool:
    """Return whether a value of a configuration is a positive number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


def _read_tensors(folder, problems) -> dict[str, dict[str, np.ndarray]]:
    """Return the matrices "A" and "B" of each name in the file of a folder."""
    with problems.collected():
        path = locate(folder, WEIGHTS)
        infos = read_header(path, WEIGHTS, problems)
    if problems or infos is None:
        return {}
    pairs: dict[str, dict[str, np.ndarray]] = {}
    sound = {name: info for name, info in infos.items() if info is not None}
    with Tensors({WEIGHTS: path}, sound) as tensors:
        for key in tensors.names():
            match, info = _KEY.fullmatch(key), tensors.info(key)
            if match is None or len(info.shape) != 2 or info.dtype not in _FLOATS:
                problems.append(
                    f"{quoted(key)}: expected a matrix of floats whose name ends in lora_A.weight "
                    f"or lora_B.weight, got {info}"
                )
            else:
                pairs.setdefault(match[1], {})[match[2]] = np.array(tensors.read(key))
    for name, pair in pairs.items():
        if len(pair) < 2 or not pair["A"].shape[0] == pair["B"].shape[1] > 0:
            shapes = ", ".join(f"lora_{one} {matrix.shape}" for one, matrix in pair.items())
            problems.append(
                f"{quoted(name)}: expected lora_A [r, k] and lora_B [n, r], got {shapes}"
            )
    return pairs


class _Names:
    """The layers of a model by their names in a file, and the facts of its configuration."""

    def __init__(self, layers: Sequence[Adaptable], config: Mapping[str, Any]):
        """Store the layers and the configuration.

        Raises:
          CheckpointError: a pattern of the configuration is no regular expression.
        """
        self._config = config
        self._patterns = {name: _compile(config, name) for name in _PATTERNS}
        self._layers: dict[str, Adaptable] = {}
        for layer in layers:
            self._layers |= {_plain(layer.stored): layer, _plain(layer.name): layer}

    def find(self, name: str) -> Adaptable | None:
        """Return the layer of an adapter, without the prefix of the language model; or None."""
        experts = name.removesuffix(_INNER)
        matrices = [
            self._layers.get(f"{experts}.{last}")
            for last in ("gate_up_proj", "up_proj", "down_proj")
        ]
        matrices = [one for one in matrices if one is not None and one.group == EXPERTS]
        if not matrices:
            return self._layers.get(name)
        targeted = [one for one in matrices if self._targets(one.name)] or matrices
        return targeted[0] if name != experts else targeted[-1]

    def find_experts(self, name: str, projection: str) -> Adaptable | None:
        """Return the matrices of experts that hold a projection such as "gate_proj", or None."""
        last = "down_proj" if projection == "down_proj" else "gate_up_proj"
        found = self._layers.get(f"{name}.{last}")
        return self._layers.get(f"{name}.{projection}") if found is None else found

    def _targets(self, name) -> bool:
        """Return whether the configuration lists a parameter among its targets."""
        listed = self._config.get("target_parameters")
        listed = listed if isinstance(listed, list) else [listed]
        return any(f".{name}".endswith(f".{_plain(str(one))}") for one in listed)

    def scale(self, name: str, rank: int) -> float:
        """Return the factor by which the product of an adapter of a rank is multiplied."""
        alpha = self._look_up("alpha_pattern", name, self._config["lora_alpha"])
        declared = self._look_up("rank_pattern", name, self._config["r"])
        if declared != rank:
            _LOG.warning(
                "%s: r: %s for %s, but its matrices have rank %d, which is used",
                CONFIG,
                quoted(declared),
                quoted(name),
                rank,
            )
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _look_up(self, field, name, default):
        """Return the value of the first pattern of a field for a name, or the default."""
        spellings = name, f"{name}.weight", _plain(name)
        for pattern, value in self._patterns[field]:
            if any(map(pattern.match, spellings)):
                return value
        return default


def _compile(config, field) -> list[tuple[RegularExpression, float]]:
    """Return the patterns of a field, which stand for the last parts of a name, as in PEFT.

    Raises:
      CheckpointError: a pattern is no regular expression, or has a part that is not supported.
    """
    try:
        found = (config.get(field) or {}).items()
        return [(RegularExpression(rf"(.*\.)?({one})$"), value) for one, value in found]
    except PatternError as error:
        raise CheckpointError(f"{CONFIG}: {field}: a pattern {error}") from None


def _plain(name: str) -> str:
    """Return a name without the prefix of the language model."""
    return _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name


def _find_matrices(names: _Names, stored, problems) -> list[tuple[Adaptable, AdapterMatrices]]:
    """Return the layer and the matrices of each adapter; note those without a layer."""
    found: list[tuple[Adaptable, AdapterMatrices]] = []
    single: dict[tuple[str, str], dict[int, Any]] = {}
    for key, pair in stored.items():
        name = _plain(key)
        layer = names.find(name)
        if layer is not None:
            with problems.collected():
                found.append((layer, _of_layer(names, layer, key, pair)))
        elif one := _ONE_EXPERT.fullmatch(name):
            own = single.setdefault((one[1], PROJECTION_OF[one[3]]), {})
            own[int(one[2])] = (
                pair["A"],
                pair["B"],
                names.scale(key.removeprefix(_PREFIX), pair["A"].shape[0]),
            )
        else:
            problems.append(f"{quoted(key)}: this model has no layer of this name")
    for experts, group in itertools.groupby(sorted(single), key=lambda pair: pair[0]):
        with problems.collected():
            found += _join_experts(
                names, experts, {last: single[experts, last] for _, last in group}
            )
    return found


def _of_layer(names: _Names, layer: Adaptable, key, pair) -> AdapterMatrices:
    """Return the matrices of an adapter in the order of this package.

    Raises:
      CheckpointError: they have another shape.
    """
    a, b = pair["A"], pair["B"]
    *experts, n, k = layer.shape
    n, k = (k, n) if layer.swapped else (n, k)
    e = math.prod(experts)
    rank = a.shape[0] // e
    if a.shape != (e * rank, k) or b.shape != (n, e * rank) or not rank:
        raise CheckpointError(
            f"{quoted(key)}: expected lora_A [{'r' if e == 1 else f'{e} r'}, {k}] and lora_B [{n}, "
            f"{'r' if e == 1 else f'{e} r'}] for {layer.name}; got {a.shape} and {b.shape}"
        )
    if experts:
        a, b = a.reshape(e, rank, k), b.reshape(n, rank, e).transpose(2, 0, 1)
        a, b = _swap(a, b) if layer.swapped else (a, b)
        b = _gates_first(layer, b)
    return AdapterMatrices(a, b, names.scale(layer.name, rank) * rank)


def _gates_first(layer: Adaptable, b):
    """Return rows ``[e, n, r]`` of transformers with all gate rows before all up rows."""
    return np.concatenate([b[:, 0::2], b[:, 1::2]], axis=1) if layer.interleaved else b


def _join_experts(
    names: _Names, experts, projections
) -> Iterable[tuple[Adaptable, AdapterMatrices]]:
    """Yield the joined adapters of single experts.

    Args:
      names: the layers of the model.
      experts: name of the experts of one layer.
      projections: "gate_proj", "up_proj" or "down_proj" -> index of an expert -> A, B and scale.

    Raises:
      CheckpointError: the model has no such experts, an expert has no adapter or one of another
        shape.
    """
    joined: dict[str, tuple[Adaptable, dict[str, Any]]] = {}
    for last, own in projections.items():
        layer = names.find_experts(experts, last)
        if layer is None:
            raise CheckpointError(f"{quoted(experts)}: this model has no experts of this name")
        joined.setdefault(layer.part, (layer, {}))[1][last] = own
    for layer, own in joined.values():
        yield layer, _stack(layer, experts, own)


def _stack(layer: Adaptable, experts, projections) -> AdapterMatrices:
    """Return the matrices of all experts, with the ranks of gate and up one after the other."""
    e, n, k = layer.shape
    wanted = ("gate_proj", "up_proj") if layer.name.endswith("gate_up_proj") else (*projections,)
    width = n // len(wanted)
    shapes = {
        (a.shape, b.shape, scale) for own in projections.values() for a, b, scale in own.values()
    }
    whole = all(sorted(projections.get(one, ())) == list(range(e)) for one in wanted)
    rank = next(iter(shapes))[0][0]
    (_, _, scale), *others = shapes
    if not whole or others or next(iter(shapes))[:2] != ((rank, k), (width, rank)):
        raise CheckpointError(
            f"{quoted(experts)}: expected lora_A [r, {k}] and lora_B [{width}, r] with one r and "
            f"one alpha for {' and '.join(wanted)} of all {e} experts; got other shapes, or fewer "
            "experts"
        )
    parts = [[projections[one][index] for index in range(e)] for one in wanted]
    a = np.concatenate([np.stack([a for a, _, _ in part]) for part in parts], axis=1)
    b = np.zeros((e, n, len(wanted) * rank), parts[0][0][1].dtype)
    for index, part in enumerate(parts):
        rows, columns = (slice(index * size, (index + 1) * size) for size in (width, rank))
        b[:, rows, columns] = np.stack([b for _, b, _ in part])
    return AdapterMatrices(a, b, scale * a.shape[1])
