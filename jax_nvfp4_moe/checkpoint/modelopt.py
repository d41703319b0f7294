"""NVIDIA ModelOpt's checkpoint format: a file of its own or a section of ``config.json``.

NVFP4: ``w = e2m1 * (float32(weight_scale) * weight_scale_2)`` and the same sense for
``input_scale``. FP8: ``w = e4m3 * weight_scale``.
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
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

QUANT_FILE = "hf_quant_config.json"
MIXED = "MIXED_PRECISION"
ALGORITHMS: Mapping[str, CheckpointScheme] = {
    "NVFP4": Scheme.W4A4,
    "W4A16_NVFP4": Scheme.W4A16,
    "FP8": FP8ActivationScaling.STATIC,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8ActivationScaling.TOKEN,
}
_SUPPORTED = ", ".join((*ALGORITHMS, MIXED))
_WILDCARD = re.compile(r"[*?\[]")
_VISION = frozenset({"vision_tower", "vision_model", "visual"})
# Exporters before this version wrote parts of names; later ones write names and wildcards.
_FIRST_WITH_WILDCARDS = (0, 39)


class _Exclusions:
    """Modules that are not quantized: names, their insides, and wildcards."""

    def __init__(self, patterns: Iterable[str], parts_match: bool, source: str):
        self._source = source
        self._names = frozenset(p for p in patterns if not _WILDCARD.search(p))
        wild = [p for p in patterns if _WILDCARD.search(p)]
        # Exporters write hundreds of "NAME*": looked up by length, not matched one by one.
        self._beginnings = frozenset(p[:-1] for p in wild if not _WILDCARD.search(p[:-1]))
        self._lengths = sorted({len(beginning) for beginning in self._beginnings})
        self._wildcards = [
            (re.compile(fnmatch.translate(p)), p) for p in wild if p[:-1] not in self._beginnings
        ]
        self._parts = [f".{name}." for name in self._names] if parts_match else []

    def find(self, module: str) -> str | None:
        """Return what excludes `module` as it stands in the file, None if nothing does."""
        found = next(filter(None, map(self._match, equivalent_names(module))), None)
        return found and f"{self._source} {quoted(found)}"

    def _match(self, name):
        for whole in (name, *parents(name)):
            if whole in self._names:
                return whole
        for length in self._lengths:
            if name[:length] in self._beginnings:
                return f"{name[:length]}*"
        # Whole components, so that an excluded router "mlp.gate" leaves "mlp.gate_proj" alone.
        for part in self._parts:
            if part in f".{name}.":
                return part.strip(".")
        return next((pattern for regex, pattern in self._wildcards if regex.match(name)), None)


class ModelOptRules:
    """`formats.Rules` of one algorithm for all modules but the excluded."""

    def __init__(
        self, source: str, summary: str, exclusions: _Exclusions, kv_cache: KVCache | None
    ):
        self.source = source
        self.summary = summary
        self.kv_cache = kv_cache
        self._exclusions = exclusions

    def decide(self, module: str) -> Decision:
        """Return how `module` is quantized; not, where it is excluded."""
        excluded = self._exclusions.find(module)
        if excluded:
            return Decision(None, excluded)
        if not _VISION.isdisjoint(module.split(".")):
            return Decision(None, "vision is never quantized")
        return self._decide(module)

    def _decide(self, module) -> Decision:
        return Decision(ALGORITHMS[self.summary], f"{self.source}: quant_algo {self.summary}")


class MixedRules(ModelOptRules):
    """`formats.Rules` of a table module -> algorithm; modules that it does not name are dense."""

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
        names = equivalent_names(module)
        for name in names:
            for key in (name, *parents(name)):
                if key in self._layers:
                    return self._parse(key)
        fused = [self._parse(key) for name in names for key in self._shards(name)]
        for decisions in (fused, [self._parse(key) for key in self._inside(names)]):
            if len({decision.scheme for decision in decisions}) > 1:
                raise CheckpointError(
                    [f"{self.source}: quantized_layers: algorithms differ inside {quoted(module)}"]
                )
            if decisions:
                return decisions[0]
        return Decision(None, f"{self.source}: in no list")

    def _shards(self, name):
        """Return the keys that a file has for the parts of the fused projection `name`."""
        parent, dot, leaf = name.rpartition(".")
        keys = (parent + dot + shard for shard in shards(leaf))
        return [key for key in keys if key in self._layers]

    def _inside(self, names):
        """Return the keys below the experts' modules that contain `names`, none for others."""
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
                    f"{source}: quant_algo {quoted(algorithm)} is not supported; "
                    f"supported: {', '.join(ALGORITHMS)}"
                ]
            )
        checkpoint_scheme = ALGORITHMS[algorithm]
        if isinstance(checkpoint_scheme, Scheme):
            _check_group_size(entry, source)
        return Decision(checkpoint_scheme, f"{source} {algorithm}")


def parse(section: Mapping[str, Any], source: str) -> ModelOptRules | None:
    """Parse ``quantization`` of `QUANT_FILE` or ``quantization_config`` of ``config.json``.

    Args:
      section: with ``producer`` beside the algorithm, as ``config.json`` has it.
      source: where it was read.

    Returns:
      The rules, None where the algorithm is null: nothing is quantized.

    Raises:
      CheckpointError: the algorithm is missing, unknown or not supported, or a field makes no
        sense.
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
            [f"{source}: unknown quant_algo {quoted(algorithm)}; supported: {_SUPPORTED}"]
        )
    if isinstance(ALGORITHMS[algorithm], Scheme):
        _check_group_sizes(section, source)
    return ModelOptRules(source, algorithm, exclusions, kv_cache)


def parse_file(contents: Mapping[str, Any]) -> ModelOptRules | None:
    """Parse the contents of `QUANT_FILE`; as `parse`."""
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
    """Write what `parse` reads.

    Args:
      algorithm: a key of `ALGORITHMS`, or `MIXED`.
      exclude: modules that are not quantized.
      version: of the writer.
      layers: with `MIXED`, module or experts' container -> a key of `ALGORITHMS`.
      kv_cache: "FP8", or None for a cache in the model's dtype.

    Returns:
      The contents of `QUANT_FILE`, and ``quantization_config`` for ``config.json``.

    Raises:
      ValueError: an algorithm is not one of these, or `layers` does not go with it.
    """
    unknown = {algorithm, *(layers or {}).values()} - {*ALGORITHMS, MIXED}
    if unknown or kv_cache not in (None, "FP8"):
        raise ValueError(
            f"algorithm: expected {_SUPPORTED}, and kv_cache FP8 or None; "
            f"got {sorted(unknown) or kv_cache}"
        )
    if (algorithm == MIXED) != bool(layers):
        raise ValueError(f"layers: expected some with {MIXED} alone, got {layers}")
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
    entry: dict[str, Any] = {"quant_algo": algorithm}
    if isinstance(ALGORITHMS[algorithm], Scheme):
        entry["group_size"] = BLOCK
    return entry


def _bits(algorithm):
    """Return the entries of a config group: weights, and activations where they are rounded."""
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
    _check_group_size(section, source)
    for name, group in object_in(section, "config_groups", source).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            _check_group_size(weights, f"{source}: config_groups: {name}")


def _check_group_size(section, source):
    """Check the size if there is one: some exporters leave it out."""
    if section.get("group_size") is not None:
        check_group_size(section["group_size"], source)


def _algorithm(section, source):
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
    """Return (major, minor) of ModelOpt, (0, 39) where another producer or none is named."""
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
