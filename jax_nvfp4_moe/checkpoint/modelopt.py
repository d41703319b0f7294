"""NVIDIA ModelOpt's checkpoint form: a file of its own or a section of ``config.json``.

``w = e2m1 * (float32(weight_scale) * weight_scale_2)`` and the same sense for ``input_scale``.
"""

import bisect
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.forms import (
    Form,
    TensorNames,
    check_group_size,
    names_in,
    object_in,
    parents,
    spellings,
)
from jax_nvfp4_moe.scheme import Scheme

QUANT_FILE = "hf_quant_config.json"
MIXED = "MIXED_PRECISION"
ALGORITHMS: Mapping[str, Scheme] = {"NVFP4": Scheme.W4A4, "W4A16_NVFP4": Scheme.W4A16}
_SUPPORTED = ", ".join((*ALGORITHMS, MIXED))
_WILDCARD = re.compile(r"[*?\[]")
_VISION = frozenset({"vision_tower", "vision_model", "visual"})
# Exporters before this version wrote parts of names; later ones write names and wildcards.
_FIRST_WITH_WILDCARDS = (0, 39)


class _Exclusions:
    """Modules that are not quantized: names, their insides, and wildcards."""

    def __init__(self, patterns: Iterable[str], parts_match: bool):
        self._names = frozenset(p for p in patterns if not _WILDCARD.search(p))
        wildcards = [fnmatch.translate(p) for p in patterns if _WILDCARD.search(p)]
        self._wildcards = re.compile("|".join(wildcards)) if wildcards else None
        self._parts = [f".{name}." for name in self._names] if parts_match else []

    def __contains__(self, module: str) -> bool:
        return any(self._matches(name) for name in spellings(module))

    def _matches(self, name):
        if name in self._names or not self._names.isdisjoint(parents(name)):
            return True
        # Whole components, so that an excluded router "mlp.gate" leaves "mlp.gate_proj" alone.
        if any(part in f".{name}." for part in self._parts):
            return True
        return self._wildcards is not None and self._wildcards.match(name) is not None


class ModelOptRules:
    """`forms.Rules` of one algorithm for all modules but the excluded."""

    def __init__(self, source: str, summary: str, exclusions: _Exclusions):
        self.source = source
        self.summary = summary
        self._exclusions = exclusions

    def declared(self, module: str) -> Scheme | None:
        """Return the scheme of `module`, None where it is excluded."""
        if module in self._exclusions or not _VISION.isdisjoint(module.split(".")):
            return None
        return self._scheme(module)

    def _scheme(self, module) -> Scheme | None:
        return ALGORITHMS[self.summary]


class MixedRules(ModelOptRules):
    """`forms.Rules` of a table module -> algorithm; modules that it does not name are dense."""

    def __init__(self, source: str, exclusions: _Exclusions, layers: Mapping[str, Any]):
        super().__init__(source, MIXED, exclusions)
        self._layers = layers
        self._sorted = sorted(layers)

    def _scheme(self, module):
        for name in spellings(module):
            for key in (name, *parents(name)):
                if key in self._layers:
                    return self._parse(key)
        container, _, _ = module.rpartition(".")
        inside = {self._parse(key) for key in self._inside(container)}
        if len(inside) > 1:
            raise CheckpointError(
                [f"{self.source}: quantized_layers: algorithms differ inside {quoted(container)}"]
            )
        return inside.pop() if inside else None

    def _inside(self, container):
        """Return the keys below the experts' module `container`, none for any other module."""
        if not container.endswith(".experts"):
            return
        for key in self._sorted[bisect.bisect_left(self._sorted, container + ".") :]:
            if not key.startswith(container + "."):
                return
            yield key

    def _parse(self, key):
        source = f"{self.source}: quantized_layers: {quoted(key)}"
        entry = self._layers[key]
        if not isinstance(entry, dict):
            raise CheckpointError([f"{source}: expected an object, got {quoted(entry)}"])
        algorithm = _algorithm(entry, source)
        if algorithm is None:
            return None
        if algorithm not in ALGORITHMS:
            raise CheckpointError(
                [
                    f"{source}: quant_algo {quoted(algorithm)} is not supported; "
                    f"supported: {', '.join(ALGORITHMS)}"
                ]
            )
        _check_group_size(entry, source)
        return ALGORITHMS[algorithm]


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
    excluded = (
        *names_in(section, "exclude_modules", source),
        *names_in(section, "ignore", source),
    )
    exclusions = _Exclusions(excluded, parts_match=_version(section) < _FIRST_WITH_WILDCARDS)
    if algorithm == MIXED:
        layers = object_in(section, "quantized_layers", source)
        if not layers:
            raise CheckpointError([f"{source}: {MIXED} needs quantized_layers, which is empty"])
        return MixedRules(source, exclusions, layers)
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            [f"{source}: unknown quant_algo {quoted(algorithm)}; supported: {_SUPPORTED}"]
        )
    _check_group_size(section, source)
    for name, group in object_in(section, "config_groups", source).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            _check_group_size(weights, f"{source}: config_groups: {name}")
    return ModelOptRules(source, algorithm, exclusions)


def parse_file(contents: Mapping[str, Any]) -> ModelOptRules | None:
    """Parse the contents of `QUANT_FILE`; as `parse`."""
    section = object_in(contents, "quantization", QUANT_FILE)
    return parse({"producer": contents.get("producer"), **section}, f"{QUANT_FILE}: quantization")


def declaration(
    algorithm: str, exclude: Iterable[str], version: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write what `parse` reads.

    Args:
      algorithm: a key of `ALGORITHMS`.
      exclude: modules that are not quantized.
      version: of the writer.

    Returns:
      The contents of `QUANT_FILE`, and ``quantization_config`` for ``config.json``.
    """
    exclude = sorted(exclude)
    producer = {"name": "jax_nvfp4_moe", "version": version}
    bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": bits, "targets": ["Linear"]}
    if ALGORITHMS[algorithm] is Scheme.W4A4:
        group = {"input_activations": bits, **group}
    file = {
        "producer": producer,
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": exclude,
        },
    }
    section = {
        "config_groups": {"group_0": group},
        "ignore": exclude,
        "quant_algo": algorithm,
        "producer": producer,
        "quant_method": "modelopt",
    }
    return file, section


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


MODELOPT = Form(
    name="ModelOpt",
    quant_method="modelopt",
    names=TensorNames(
        packed="weight",
        block_scale="weight_scale",
        weight_global="weight_scale_2",
        input_global="input_scale",
        divides=False,
    ),
    parse=parse,
)
