"""Refuse what is done to weights or activations beside quantization: rotations and sparsity.

``transform_config`` lists rotations, as SpinQuant and QuIP use them. Those of weights are part of
the stored weights. Those of activations, of queries or of the KV cache happen at run time, and the
stored weights hold their inverses: without them, the model computes something else.

Source: https://github.com/vllm-project/compressed-tensors, `transform/transform_args.py`.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import Problems, quoted
from jax_nvfp4_moe.checkpoint.formats.rules import object_in

_STORED = ("weight_input", "weight_output")
_DENSE = "dense"


def find_transforms(section: Mapping[str, Any], source: str) -> list[str]:
    """Return a problem for each rotation at run time, and for weights in a sparse form.

    Args:
      section: a quantization config, which may have ``transform_config`` and ``sparsity_config``.
      source: the file and the key of the config, for messages.
    """
    problems = Problems()
    with problems.collected():
        transforms = object_in(section, "transform_config", source)
        groups = object_in(transforms, "config_groups", f"{source}: transform_config")
        others = [key for key in transforms if key != "config_groups" and transforms[key]]
        for key in others:
            problems.append(f"{source}: transform_config: {quoted(key)} is not supported")
        for name in groups:
            place = f"{source}: transform_config: {quoted(name)}"
            group = object_in(groups, name, f"{source}: transform_config: config_groups")
            problems += _find_rotations(group, place)
        problems += _find_sparsity(section, source)
    return problems


def _find_rotations(group, source) -> list[str]:
    """Return a problem for each entry of a group that does not rotate stored weights."""
    entries = group.get("apply") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return [f"{source}: apply: expected a list of objects, got {quoted(entries)}"]
    locations = dict.fromkeys(
        location
        for entry in entries
        if not isinstance(location := entry.get("location"), str) or location not in _STORED
    )
    return [
        f"{source}: location {quoted(location)} is not supported: it rotates at run time, which no "
        f"module here does; supported are {' and '.join(_STORED)}, which are part of the stored "
        "weights"
        for location in locations
    ]


def _find_sparsity(section, source) -> list[str]:
    """Return a problem if weights are stored in a sparse form."""
    sparsity = object_in(section, "sparsity_config", source)
    if not any(sparsity.values()) or sparsity.get("format") == _DENSE:
        return []
    return [
        f"{source}: sparsity_config: format {quoted(sparsity.get('format'))} is not supported; "
        f"supported: {quoted(_DENSE)}, in which zeros are stored like other weights"
    ]
