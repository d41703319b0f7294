"""The names in transformers of the linear layers that each module of a model holds.

The key table of a model says under which name a file stores each layer, and the builder notes it in
the `Source` of the layer. Adapters have these names in the files of PEFT, and the patterns of
`add_lora` are compared with them. transformers calls some layers otherwise than files do. The
record of the architecture then says how.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax_nvfp4_moe.checkpoint.key_mapping import KeyMapping
from jax_nvfp4_moe.checkpoint.names import CANONICAL
from jax_nvfp4_moe.checkpoint.values import LinearWeights
from jax_nvfp4_moe.nn.building.builder import Part
from jax_nvfp4_moe.nn.building.keys import DRAFTER

# Prefix of the language model in files -> in transformers, if they differ.
_PREFIXES = {
    "": CANONICAL,
    "backbone.": CANONICAL,
    "language_model.model.": "model.language_model.",
}
# Prefix of the language model in transformers -> the name of the head, if it is not at the top.
_HEADS = {"language_model.model.": "language_model.lm_head"}


class Projection(NamedTuple):
    """One linear layer of a file.

    Attributes:
      part: name of the layer in the module that holds it, such as "q".
      name: name of the layer in transformers, such as "model.layers.0.self_attn.q_proj".
      stored: name of the layer in the file, with "model." for the prefix of the language model.
      outputs: number of outputs, over all shards.
      inputs: number of inputs, over all shards.
    """

    part: str
    name: str
    stored: str
    outputs: int
    inputs: int


class ExpertNames(NamedTuple):
    """The routed experts of one layer.

    Attributes:
      name: name of the experts in transformers, such as "model.layers.0.mlp.experts".
      stored: name of the experts in the file, with "model." for the prefix of the language model.
      interleaved: whether gate and up rows alternate in transformers' matrices.
      swapped: whether PEFT takes the inputs of transformers' matrices for outputs.
    """

    name: str
    stored: str
    interleaved: bool = False
    swapped: bool = False


class ProjectionNames:
    """The layers of a file that the modules of a model hold; static, equal by value.

    Attributes:
      linears: path of a linear layer or of a `MergedLinear` -> its layers, in the order of rows.
      experts: path of a variable with routed experts -> their names.
    """

    def __init__(
        self,
        linears: Mapping[str, tuple[Projection, ...]] | None = None,
        experts: Mapping[str, ExpertNames] | None = None,
    ):
        """Store the two mappings; both are empty by default."""
        self.linears, self.experts = dict(linears or {}), dict(experts or {})
        # `jax.jit` hashes static attributes in each call.
        self._hash = hash((tuple(self.linears.items()), tuple(self.experts.items())))

    def __hash__(self) -> int:
        """Return the hash that was computed once."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Return whether `other` has the same names."""
        if self is other or not isinstance(other, ProjectionNames):
            return self is other
        same = self._hash == other._hash and self.linears == other.linears
        return same and self.experts == other.experts

    def __repr__(self) -> str:
        """Say how many names there are; all of them would fill a page."""
        return f"ProjectionNames({len(self.linears)} linears, {len(self.experts)} experts)"


def name_projections(
    parts: Sequence[Part],
    key_mapping: KeyMapping,
    renamed: Mapping[str, str],
    root: str = "",
    *,
    swapped: bool = False,
) -> ProjectionNames:
    """Return the layers of a file that the parts of a model hold, without those of drafters.

    Args:
      parts: the parts that the builder noted.
      key_mapping: how the file spells names.
      renamed: text in the name of a file -> the text in the name of transformers, in the order in
        which they are replaced.
      root: path of the module whose parts these are; empty for a whole model.
      swapped: whether PEFT takes the inputs of experts for outputs. False by default.
    """
    scope = f"{root}." if root else ""
    spell = functools.partial(_spell, key_mapping.prefix, renamed)
    linears, experts = {}, {}
    for part in parts:
        path = part.path.removeprefix(scope)
        if path.startswith(f"{DRAFTER}."):
            continue
        if part.experts is not None:
            stored = part.experts.name
            experts[path] = ExpertNames(spell(stored), stored, part.interleaved, swapped)
        elif all(isinstance(source.value, LinearWeights) for source in part.sources.values()):
            own = path.rpartition(".")[2]
            linears[path] = tuple(
                Projection(name or own, spell(found.name), found.name, *found.value.weight.shape)
                for name, found in part.sources.items()
            )
    return ProjectionNames(linears, experts)


def _spell(prefix: str, renamed: Mapping[str, str], name: str) -> str:
    """Return the name in transformers of a layer of a file whose language model has a prefix."""
    prefix = _PREFIXES.get(prefix, prefix)
    inside = name.startswith(CANONICAL)
    given = prefix + name.removeprefix(CANONICAL) if inside else prefix
    for old, new in renamed.items():
        given = given.replace(old, new)
    return given if inside else _HEADS.get(given, name)
