"""The checkpoint format of NVIDIA ModelOpt.

ModelOpt declares the quantization in ``hf_quant_config.json`` or in ``config.json``. NVFP4 weights
are ``w = e2m1 * (float32(weight_scale) * weight_scale_2)``. Activations use ``input_scale`` in the
same way: both global scales multiply. FP8 weights are ``w = e4m3 * weight_scale``.

NVFP4_AWQ is NVFP4 whose linears may have a ``pre_quant_scale`` for each input channel. Most of
these scales are folded into the norm before the linear, and the file then has no such tensor.

Source: https://github.com/NVIDIA/Model-Optimizer
"""

import bisect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, Problems, quoted
from jax_nvfp4_moe.checkpoint.formats.config_keys import (
    ARGUMENT_KEYS,
    MODELOPT_FILE_KEYS,
    MODELOPT_GROUP_KEYS,
    MODELOPT_KEYS,
    MODELOPT_LAYER_KEYS,
    find_unknown_keys,
)
from jax_nvfp4_moe.checkpoint.formats.exclusions import Exclusions
from jax_nvfp4_moe.checkpoint.formats.kv_cache import read_kv_cache
from jax_nvfp4_moe.checkpoint.formats.refused_formats import why_refused
from jax_nvfp4_moe.checkpoint.formats.rules import (
    WEIGHTS_ONLY,
    CheckpointFormat,
    Decision,
    KVCache,
    TensorNames,
    check_group_size,
    clean_name,
    equivalent_names,
    names_in,
    object_in,
    parents,
    shards,
)
from jax_nvfp4_moe.checkpoint.formats.target_groups import Targets, names_of
from jax_nvfp4_moe.checkpoint.formats.transforms import find_transforms
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

QUANT_FILE = "hf_quant_config.json"
MIXED = "MIXED_PRECISION"
ALGORITHMS: Mapping[str, CheckpointScheme] = {
    "NVFP4": Scheme.W4A4,
    "W4A16_NVFP4": Scheme.W4A16,
    "NVFP4_AWQ": Scheme.W4A4,
    "FP8": FP8ActivationScaling.STATIC,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8ActivationScaling.TOKEN,
    "FP8_PB_WO": BlockFP8.SQUARE,
    "MXFP8": BlockFP8.MX,
    "MXFP4": Scheme.W4A16,  # cast to NVFP4
}
# An algorithm that quantizes activations -> the algorithm of the same weights that does not.
WEIGHTS_ONLY_NAMES: Mapping[str, str] = {"NVFP4": "W4A16_NVFP4"}
# What `declaration` writes; the rest is read alone.
_WRITTEN = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_SUPPORTED = ", ".join((*ALGORITHMS, MIXED))
_EXCLUSIONS = ("exclude_modules", "ignore", "modules_to_not_convert")
# Options of a config, of an entry of quantized_layers or of a group -> why they are refused.
_UNSUPPORTED = {
    "has_zero_point": "every kernel of this package reads numbers without zero points",
    "lora_rank": "it adds a low-rank product to linears, which no module here computes",
    "clamp_val": "it clamps activations, which no module here does",
    "use_meta_recipe": "it clamps activations, which no module here does",
    "output_activations": "no module here rounds the outputs of a linear",
}
_VISION = frozenset({"vision_tower", "vision_model", "visual"})
# Before this version, ModelOpt's exclusion lists hold parts of names, which match anywhere in a
# name. From this version on, they hold whole names and wildcards.
_FIRST_WITH_WILDCARDS = (0, 39)


class _Activations:
    """Tells by ``config_groups`` which modules have activations that are quantized.

    ModelOpt repeats the algorithm there. Files whose ``quant_algo`` is NVFP4 have groups without
    ``input_activations`` if they quantize weights alone.
    """

    def __init__(self, groups: Mapping[str, Mapping[str, Any]], source: str):
        found = [
            (name, target)
            for name, group in groups.items()
            for target in names_in(group, "targets", f"{source}: {quoted(name)}") or ("Linear",)
        ]
        self._names = [name for name, _ in found]
        self._targets = Targets([target for _, target in found], source)
        self._groups, self._source = groups, source

    def refine(self, module: str, decision: Decision) -> Decision:
        """Return the decision of an algorithm with what the module's group says of activations."""
        if decision.scheme not in WEIGHTS_ONLY:
            return decision
        if not self._names:
            return decision._replace(labelled=True)
        found = self._targets.find(module) or [
            entry for parent in parents(module) for entry in self._targets.by_name(names_of(parent))
        ]
        bits = 4 if isinstance(decision.scheme, Scheme) else 8
        names = (self._names[entry] for entry in found)
        name = next((name for name in names if self._bits(name) == bits), None)
        if name is None:
            return decision._replace(labelled=True)
        if self._groups[name].get("input_activations"):
            return decision
        source = f"{decision.source}; {self._source}: {quoted(name)}: no input_activations"
        return Decision(WEIGHTS_ONLY[decision.scheme], source)

    def _bits(self, name) -> Any:
        """Return the bits of a group's weights. Groups of another algorithm have other bits."""
        return (self._groups[name].get("weights") or {}).get("num_bits")

    @property
    def weights_only(self) -> bool:
        """Whether no group quantizes activations."""
        groups = self._groups.values()
        return bool(groups) and all(
            group.get("weights") and not group.get("input_activations") for group in groups
        )


class ModelOptRules:
    """Applies one algorithm to all modules that are not excluded; implements `rules.Rules`."""

    def __init__(
        self,
        source: str,
        summary: str,
        exclusions: Exclusions,
        kv_cache: KVCache | None,
        activations: _Activations,
    ):
        self.source = source
        self.summary = summary
        self.kv_cache = kv_cache
        self.weights_only = activations.weights_only
        self._exclusions = exclusions
        self._activations = activations

    @property
    def schemes(self) -> Sequence[CheckpointScheme]:
        """All schemes that the config declares for any module."""
        declared = ALGORITHMS[self.summary]
        return (WEIGHTS_ONLY.get(declared, declared) if self.weights_only else declared,)

    def choices(self, module: str) -> list[Decision]:
        """Return how `module` is quantized. Excluded modules and vision towers are not."""
        excluded = self._exclusions.find(module)
        if excluded:
            return [Decision(None, excluded)]
        if not _VISION.isdisjoint(module.split(".")):
            return [Decision(None, "vision is never quantized")]
        return [self._activations.refine(module, self._decide(module))]

    def _decide(self, module) -> Decision:
        return Decision(ALGORITHMS[self.summary], f"{self.source}: quant_algo {self.summary}")


class MixedRules(ModelOptRules):
    """Applies a table of modules and their algorithms; implements `rules.Rules`.

    Modules that the table does not name are not quantized.
    """

    def __init__(
        self,
        source: str,
        exclusions: Exclusions,
        kv_cache: KVCache | None,
        activations: _Activations,
        layers: Mapping[str, Any],
    ):
        super().__init__(source, MIXED, exclusions, kv_cache, activations)
        self._layers = {clean_name(key): entry for key, entry in layers.items()}
        self._sorted = sorted(self._layers)
        self._parsed: dict[str, Decision] = {}

    @property
    def schemes(self) -> Sequence[CheckpointScheme]:
        """All schemes that the table declares for any module."""
        entries = [entry for entry in self._layers.values() if isinstance(entry, dict)]
        named = dict.fromkeys(_upper(entry.get("quant_algo")) for entry in entries)
        return [ALGORITHMS[name] for name in named if name in ALGORITHMS]

    def _decide(self, module):
        """Return the decision of the table.

        The entry of the module, or of a module that contains it, comes first. A merged projection
        takes the entry of its parts, and stacked experts take the entries of the single experts.
        All those entries must agree.
        """
        names = equivalent_names(module)
        for name in names:
            for key in (name, *parents(name)):
                if key in self._layers:
                    return self._parse(key)
        fused = [self._parse(key) for name in names for key in self._shards(name)]
        for decisions in (fused, [self._parse(key) for key in self._inside(names)]):
            if len({decision.scheme for decision in decisions}) > 1:
                raise CheckpointError(
                    f"{self.source}: quantized_layers: expected one algorithm for everything "
                    f"inside {quoted(module)}, got several"
                )
            if decisions:
                return decisions[0]
        return Decision(None, f"{self.source}: not listed in quantized_layers")

    def _shards(self, name):
        """Return the entries that the table has for the parts of the merged projection `name`."""
        parent, dot, leaf = name.rpartition(".")
        keys = (parent + dot + shard for shard in shards(leaf))
        return [key for key in keys if key in self._layers]

    def _inside(self, names):
        """Yield the entries of single experts if `names` are names of stacked experts."""
        for name in names:
            container = name.rpartition(".")[0] + "."
            if not container.endswith(".experts."):
                continue
            for key in self._sorted[bisect.bisect_left(self._sorted, container) :]:
                if not key.startswith(container):
                    break
                yield key

    def _parse(self, key):
        if key not in self._parsed:
            self._parsed[key] = self._read(key)
        return self._parsed[key]

    def _read(self, key):
        """Return the decision of the entry `key`."""
        source = f"{self.source}: quantized_layers: {quoted(key)}"
        entry = self._layers[key]
        if not isinstance(entry, dict):
            raise CheckpointError(f"{source}: expected an object, got {quoted(entry)}")
        problems = find_unknown_keys(entry, MODELOPT_LAYER_KEYS, source)
        algorithm = _algorithm(entry, source)
        if algorithm is None:
            return Decision(None, source)
        if algorithm not in ALGORITHMS:
            raise CheckpointError(
                f"{source}: quant_algo {quoted(algorithm)} is not supported"
                f"{why_refused(algorithm)}; supported: {', '.join(ALGORITHMS)}"
            )
        problems += _find_options(entry, source)
        if problems:
            raise CheckpointError(problems)
        checkpoint_scheme = ALGORITHMS[algorithm]
        if isinstance(checkpoint_scheme, Scheme):
            _check_group_size(entry, source)
        return Decision(checkpoint_scheme, f"{source} {algorithm}")


def parse(section: Mapping[str, Any], source: str) -> ModelOptRules | None:
    """Parse the quantization config that ModelOpt wrote.

    Args:
      section: ``quantization_config`` of ``config.json``, or ``quantization`` of
        ``hf_quant_config.json`` with ``producer`` added. The former may also hold the contents of
        ``hf_quant_config.json``.
      source: the file and the key of the config, for messages.

    Returns:
      The rules. None if the algorithm is null, which means that nothing is quantized.

    Raises:
      CheckpointError: the algorithm is missing, unknown or not supported, or a field is not valid.
        The error lists all problems.
    """
    section = _flatten(section, source)
    if "quant_algo" not in section:
        raise CheckpointError(f"{source}: quant_algo: missing; supported: {_SUPPORTED}")
    algorithm = _algorithm(section, source)
    if algorithm is None:
        return None
    if algorithm not in (*ALGORITHMS, MIXED):
        raise CheckpointError(
            f"{source}: quant_algo {quoted(algorithm)} is not supported"
            f"{why_refused(algorithm)}; supported: {_SUPPORTED}"
        )
    problems = Problems(find_unknown_keys(section, MODELOPT_KEYS, source))
    problems += [*find_transforms(section, source), *_find_options(section, source)]
    rules = None
    with problems.collected():
        rules = _read_rules(section, algorithm, source)
    problems.finish()
    return rules


def _read_rules(section, algorithm, source) -> ModelOptRules:
    """Return the rules of a config with a supported algorithm."""
    fp4 = isinstance(ALGORITHMS.get(algorithm), Scheme)
    groups = _read_groups(section, source, fp4)
    if fp4:
        _check_group_size(section, source)
    key = next((key for key in _EXCLUSIONS if section.get(key)), _EXCLUSIONS[0])
    excluded = [name for key in _EXCLUSIONS for name in names_in(section, key, source)]
    parts_match = _version(section) < _FIRST_WITH_WILDCARDS
    exclusions = Exclusions(excluded, f"{source}: {key}", parts_match=parts_match)
    kv_cache = read_kv_cache(section, source, multiply_by_reciprocal=True)
    activations = _Activations(groups, f"{source}: config_groups")
    if algorithm != MIXED:
        return ModelOptRules(source, algorithm, exclusions, kv_cache, activations)
    layers = object_in(section, "quantized_layers", source)
    if not layers:
        raise CheckpointError(f"{source}: {MIXED} needs quantized_layers, which is empty")
    return MixedRules(source, exclusions, kv_cache, activations, layers)


def read_activations(section: Mapping[str, Any], source: str) -> _Activations:
    """Read what ``config_groups`` says of the activations of modules in NVFP4."""
    return _Activations(_read_groups(section, source, True), f"{source}: config_groups")


def _flatten(section, source) -> Mapping[str, Any]:
    """Return a config with the contents of ``quantization`` beside its other keys."""
    inner = object_in(section, "quantization", source)
    outer = {key: value for key, value in section.items() if key != "quantization"}
    problems = [
        f"{source}: {key} {quoted(outer[key])}, but quantization: {key} {quoted(value)}"
        for key, value in inner.items()
        if key in outer and outer[key] != value
    ]
    if problems:
        raise CheckpointError(problems)
    return {**outer, **inner}


def _find_options(section, source) -> list[str]:
    """Return a problem for each option that changes the function and is not supported."""
    return [
        f"{source}: {key} {quoted(section[key])} is not supported: {why}"
        for key, why in _UNSUPPORTED.items()
        if section.get(key)
    ]


def _read_groups(section, source, fp4) -> dict[str, Mapping[str, Any]]:
    """Return ``config_groups`` after checking the keys of each group.

    Args:
      section: the config.
      source: as for `parse`.
      fp4: whether all modules are NVFP4, so that groups must have its block size.
    """
    problems, found = Problems(), {}
    groups = object_in(section, "config_groups", source)
    for name in groups:
        place = f"{source}: config_groups: {quoted(name)}"
        with problems.collected():
            found[name] = group = object_in(groups, name, f"{source}: config_groups")
            problems += find_unknown_keys(group, MODELOPT_GROUP_KEYS, place)
            problems += _find_options(group, place)
            for key in ("weights", "input_activations"):
                arguments = object_in(group, key, place)
                problems += find_unknown_keys(arguments, ARGUMENT_KEYS, f"{place}: {key}")
                problems += _find_asymmetry(arguments, f"{place}: {key}")
            if fp4:
                _check_group_size(object_in(group, "weights", place), place)
    problems.finish()
    return found


def _find_asymmetry(arguments, source) -> list[str]:
    if arguments.get("symmetric", True) is False:
        return [f"{source}: symmetric false is not supported: {_UNSUPPORTED['has_zero_point']}"]
    return []


def parse_file(contents: Mapping[str, Any]) -> ModelOptRules | None:
    """Parse the contents of ``hf_quant_config.json``; otherwise as `parse`."""
    problems = find_unknown_keys(contents, MODELOPT_FILE_KEYS, QUANT_FILE)
    if problems:
        raise CheckpointError(problems)
    section = object_in(contents, "quantization", QUANT_FILE)
    return parse({"producer": contents.get("producer"), **section}, f"{QUANT_FILE}: quantization")


def declaration(
    algorithm: str,
    exclude: Iterable[str],
    version: str,
    *,
    layers: Mapping[str, str] | None = None,
    kv_cache: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the quantization configs of a checkpoint, in the form that `parse` reads.

    Args:
      algorithm: a key of `ALGORITHMS`, or "MIXED_PRECISION".
      exclude: the modules that are not quantized.
      version: the version of the writer.
      layers: for "MIXED_PRECISION" only, a module or the experts' module -> a key of `ALGORITHMS`.
      kv_cache: "FP8", or None for a KV cache in the model's dtype.

    Returns:
      The contents of ``hf_quant_config.json``, and ``quantization_config`` for ``config.json``.

    Raises:
      ValueError: an algorithm is unknown, or `layers` does not fit the algorithm.
    """
    unknown = {algorithm, *(layers or {}).values()} - {*_WRITTEN, MIXED}
    if unknown or kv_cache not in (None, "FP8"):
        raise ValueError(
            f"algorithm: expected {', '.join((*_WRITTEN, MIXED))}, and kv_cache FP8 or None; "
            f"got {sorted(unknown) or kv_cache}"
        )
    if (algorithm == MIXED) != bool(layers):
        raise ValueError(
            f"layers: expected entries with algorithm {MIXED}, and None with any other algorithm; "
            f"got algorithm {algorithm} and layers {layers}"
        )
    exclude = sorted(exclude)
    producer = {"name": "jax_nvfp4_moe", "version": version}
    described = {"quant_algo": algorithm, "kv_cache_quant_algo": kv_cache}
    section: dict[str, Any] = {"ignore": exclude, "quant_algo": algorithm}
    if layers:
        table = {module: _described(layers[module]) for module in layers}
        file = {**described, "quantized_layers": table}
        section["quantized_layers"] = table
    else:
        file = {**described, **_described(algorithm), "exclude_modules": exclude}
        section["config_groups"] = {"group_0": {**_bits(algorithm), "targets": ["Linear"]}}
    if kv_cache:
        section["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    section |= {"producer": producer, "quant_method": "modelopt"}
    return {"producer": producer, "quantization": file}, section


def _described(algorithm):
    """Return the entry of ``quantized_layers`` for a module with this algorithm."""
    entry: dict[str, Any] = {"quant_algo": algorithm}
    if isinstance(ALGORITHMS[algorithm], Scheme):
        entry["group_size"] = BLOCK
    return entry


def _bits(algorithm):
    """Return the entries of a config group: weights, and activations if they are rounded."""
    checkpoint_scheme = ALGORITHMS[algorithm]
    bits: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
    if isinstance(checkpoint_scheme, Scheme):
        bits |= {"num_bits": 4, "group_size": BLOCK}
    if checkpoint_scheme is Scheme.W4A16:
        return {"weights": bits}
    return {"input_activations": bits, "weights": bits}


def _check_group_size(section, source):
    """Check the group size if there is one. Some exporters leave it out."""
    for key in ("group_size", "awq_block_size"):
        if section.get(key) is not None:
            check_group_size(section[key], source)


def _algorithm(section, source):
    """Return the algorithm in upper case, or None if it is null."""
    algorithm = section.get("quant_algo")
    if algorithm is None:
        return None
    if not isinstance(algorithm, str):
        raise CheckpointError(
            f"{source}: quant_algo: expected a name, got {quoted(algorithm)}; "
            f"supported: {_SUPPORTED}"
        )
    return algorithm.upper()


def _upper(algorithm):
    return algorithm.upper() if isinstance(algorithm, str) else ""


def _version(section):
    """Return ModelOpt's version as (major, minor).

    A config of another producer, or without one, is read as one of the first version with
    wildcards.
    """
    producer = section.get("producer")
    producer = producer if isinstance(producer, dict) else {}
    found = re.match(r"(\d{1,9})\.(\d{1,9})", str(producer.get("version")))
    if producer.get("name") != "modelopt" or not found:
        return _FIRST_WITH_WILDCARDS
    return int(found[1]), int(found[2])


MODELOPT = CheckpointFormat(
    name="ModelOpt",
    quant_method="modelopt",
    names=TensorNames(
        packed="weight",
        block_scale="weight_scale",
        weight_global="weight_scale_2",
        input_global="input_scale",
        divides=False,
        fp8_by_factor=True,
    ),
    parse=parse,
)
