"""The checkpoint format of NVIDIA ModelOpt.

ModelOpt declares the quantization in ``hf_quant_config.json`` or in ``config.json``. NVFP4 weights
are ``w = e2m1 * (float32(weight_scale) * weight_scale_2)``. Activations use ``input_scale`` in the
same way: both global scales multiply. FP8 weights are ``w = e4m3 * weight_scale``.

NVFP4_AWQ is NVFP4 whose linears may have a ``pre_quant_scale`` for each input channel. Most of
these scales are folded into the norm before the linear, and the file then has no such tensor.

Source: https://github.com/NVIDIA/Model-Optimizer
"""

import bisect
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.formats import (
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
from jax_nvfp4_moe.checkpoint.refused_formats import why_refused
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
}
# What `declaration` writes; the rest is read alone.
_WRITTEN = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_SUPPORTED = ", ".join((*ALGORITHMS, MIXED))
_WILDCARD = re.compile(r"[*?\[]")
_VISION = frozenset({"vision_tower", "vision_model", "visual"})
# Before this version, ModelOpt's exclusion lists hold parts of names, which match anywhere in a
# name. From this version on, they hold whole names and wildcards.
_FIRST_WITH_WILDCARDS = (0, 39)


class _Exclusions:
    """The modules that a config excludes: by name with everything inside them, or by wildcard.

    Args:
      patterns: the entries of the config's list.
      parts_match: whether an entry matches anywhere in a module's name.
      source: the file and the key of the list, for messages.
    """

    def __init__(self, patterns: Iterable[str], parts_match: bool, source: str):
        self._source = source
        self._names = frozenset(p for p in patterns if not _WILDCARD.search(p))
        wild = [p for p in patterns if _WILDCARD.search(p)]
        # Exporters write hundreds of patterns "NAME*". A set of their beginnings finds a match in
        # one look-up per length; matching every pattern against every module would be slow.
        self._beginnings = frozenset(p[:-1] for p in wild if not _WILDCARD.search(p[:-1]))
        self._lengths = sorted({len(beginning) for beginning in self._beginnings})
        self._wildcards = [
            (re.compile(fnmatch.translate(p)), p) for p in wild if p[:-1] not in self._beginnings
        ]
        self._parts = [f".{name}." for name in self._names] if parts_match else []

    def find(self, module: str) -> str | None:
        """Return the entry that excludes `module`, as the file spells it, or None."""
        found = next(filter(None, map(self._match, equivalent_names(module))), None)
        return found and f"{self._source} {quoted(found)}"

    def _match(self, name):
        """Return the entry that matches the name, or the name of a module that contains it."""
        for whole in (name, *parents(name)):
            if whole in self._names:
                return whole
        for length in self._lengths:
            if name[:length] in self._beginnings:
                return f"{name[:length]}*"
        # Only whole components match. Otherwise an excluded router "mlp.gate" would exclude
        # "mlp.gate_proj" too.
        for part in self._parts:
            if part in f".{name}.":
                return part.strip(".")
        return next((pattern for regex, pattern in self._wildcards if regex.match(name)), None)


class ModelOptRules:
    """Applies one algorithm to all modules that are not excluded; implements `formats.Rules`."""

    def __init__(
        self, source: str, summary: str, exclusions: _Exclusions, kv_cache: KVCache | None
    ):
        self.source = source
        self.summary = summary
        self.kv_cache = kv_cache
        self._exclusions = exclusions

    def decide(self, module: str) -> Decision:
        """Return how `module` is quantized. Excluded modules and vision towers are not."""
        excluded = self._exclusions.find(module)
        if excluded:
            return Decision(None, excluded)
        if not _VISION.isdisjoint(module.split(".")):
            return Decision(None, "vision is never quantized")
        return self._decide(module)

    def _decide(self, module) -> Decision:
        return Decision(ALGORITHMS[self.summary], f"{self.source}: quant_algo {self.summary}")


class MixedRules(ModelOptRules):
    """Applies a table of modules and their algorithms; implements `formats.Rules`.

    Modules that the table does not name are not quantized.
    """

    def __init__(
        self,
        source: str,
        exclusions: _Exclusions,
        kv_cache: KVCache | None,
        layers: Mapping[str, Any],
    ):
        super().__init__(source, MIXED, exclusions, kv_cache)
        self._layers = {clean_name(key): entry for key, entry in layers.items()}
        self._sorted = sorted(self._layers)
        self._parsed: dict[str, Decision] = {}

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
                    [
                        f"{self.source}: quantized_layers: expected one algorithm for everything "
                        f"inside {quoted(module)}, got several"
                    ]
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
            raise CheckpointError([f"{source}: expected an object, got {quoted(entry)}"])
        algorithm = _algorithm(entry, source)
        if algorithm is None:
            return Decision(None, source)
        if algorithm not in ALGORITHMS:
            raise CheckpointError(
                [
                    f"{source}: quant_algo {quoted(algorithm)} is not supported"
                    f"{why_refused(algorithm)}; supported: {', '.join(ALGORITHMS)}"
                ]
            )
        checkpoint_scheme = ALGORITHMS[algorithm]
        if isinstance(checkpoint_scheme, Scheme):
            _check_group_size(entry, source)
        return Decision(checkpoint_scheme, f"{source} {algorithm}")


def parse(section: Mapping[str, Any], source: str) -> ModelOptRules | None:
    """Parse the quantization config that ModelOpt wrote.

    Args:
      section: ``quantization_config`` of ``config.json``, or ``quantization`` of
        ``hf_quant_config.json`` with ``producer`` added.
      source: the file and the key of the config, for messages.

    Returns:
      The rules. None if the algorithm is null, which means that nothing is quantized.

    Raises:
      CheckpointError: the algorithm is missing, unknown or not supported, or a field is not valid.
    """
    if "quant_algo" not in section:
        raise CheckpointError([f"{source}: quant_algo: missing; supported: {_SUPPORTED}"])
    algorithm = _algorithm(section, source)
    if algorithm is None:
        return None
    key = "ignore" if section.get("ignore") else "exclude_modules"
    excluded = (
        *names_in(section, "exclude_modules", source),
        *names_in(section, "ignore", source),
    )
    parts_match = _version(section) < _FIRST_WITH_WILDCARDS
    exclusions = _Exclusions(excluded, parts_match, f"{source}: {key}")
    kv_cache = _kv_cache(section, source)
    if algorithm == MIXED:
        layers = object_in(section, "quantized_layers", source)
        if not layers:
            raise CheckpointError([f"{source}: {MIXED} needs quantized_layers, which is empty"])
        return MixedRules(source, exclusions, kv_cache, layers)
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            [
                f"{source}: quant_algo {quoted(algorithm)} is not supported"
                f"{why_refused(algorithm)}; supported: {_SUPPORTED}"
            ]
        )
    if isinstance(ALGORITHMS[algorithm], Scheme):
        _check_group_sizes(section, source)
    return ModelOptRules(source, algorithm, exclusions, kv_cache)


def parse_file(contents: Mapping[str, Any]) -> ModelOptRules | None:
    """Parse the contents of ``hf_quant_config.json``; otherwise as `parse`."""
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


def _kv_cache(section, source) -> KVCache | None:
    """Read ``kv_cache_quant_algo`` of the file, or ``kv_cache_scheme`` of ``config.json``."""
    algorithm = section.get("kv_cache_quant_algo")
    if isinstance(algorithm, str):
        return KVCache(
            algorithm.upper(), f"{source}: kv_cache_quant_algo", multiply_by_reciprocal=True
        )
    scheme = object_in(section, "kv_cache_scheme", source)
    if not scheme:
        return None
    kind, bits = scheme.get("type"), scheme.get("num_bits")
    algorithm = "FP8" if (kind, bits) == ("float", 8) else f"{kind} of {bits} bits"
    return KVCache(algorithm, f"{source}: kv_cache_scheme", multiply_by_reciprocal=True)


def _check_group_sizes(section, source):
    """Check the group size of the config and of each of its groups."""
    _check_group_size(section, source)
    for name, group in object_in(section, "config_groups", source).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            _check_group_size(weights, f"{source}: config_groups: {name}")


def _check_group_size(section, source):
    """Check the group size if there is one. Some exporters leave it out."""
    if section.get("group_size") is not None:
        check_group_size(section["group_size"], source)


def _algorithm(section, source):
    """Return the algorithm in upper case, or None if it is null."""
    algorithm = section.get("quant_algo")
    if algorithm is None:
        return None
    if not isinstance(algorithm, str):
        raise CheckpointError(
            [
                f"{source}: quant_algo: expected a name, got {quoted(algorithm)}; "
                f"supported: {_SUPPORTED}"
            ]
        )
    return algorithm.upper()


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
