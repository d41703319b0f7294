"""Map a language model's tensors to one set of names, whatever prefix the file has for them.

Models ask for ``model.layers.L...``, ``model.embed_tokens``, ``model.norm`` and ``lm_head``.
Files put the same below ``model.language_model.`` (multimodal models), ``language_model.model.``
(older ones of them) or ``backbone.`` (Nemotron-H); which, their tensor names tell.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from jax_nvfp4_moe.checkpoint.errors import quoted

CANONICAL = "model."
# Where the language model may begin; a prefix stands behind those that it is the beginning of.
PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.backbone.",
    "language_model.",
    "backbone.",
    CANONICAL,
)
_HEAD = "lm_head."
_HEADS = (_HEAD, *(f"{prefix}{_HEAD}" for prefix in PREFIXES))
# Names right behind the prefix: that of Nemotron-H and what others call it.
_ALIASES: Mapping[str, str] = {
    "embeddings.": "embed_tokens.",
    "embedding.": "embed_tokens.",
    "norm_f.": "norm.",
}
# Only these tell where the language model is: a vision tower may have a norm of its own.
_TELLING = re.compile(
    f"({'|'.join(map(re.escape, PREFIXES))})(?:layers\\.\\d+|embed_tokens|embeddings?)\\."
)


@dataclasses.dataclass(frozen=True)
class KeyMapping:
    """How one file spells the names of the language model.

    Attributes:
      prefix: what stands in the file for "model.".
      head: what stands in the file for "lm_head.".
    """

    prefix: str = CANONICAL
    head: str = _HEAD

    def owns(self, name: str) -> bool:
        """Whether the tensor `name` of the file is one of the language model."""
        return name.startswith((self.prefix, self.head))

    def canonical(self, name: str) -> str:
        """Return the name by which models ask for the tensor `name` of the file."""
        if name.startswith(self.head):
            return _HEAD + name.removeprefix(self.head)
        if not name.startswith(self.prefix):
            return name
        rest = name.removeprefix(self.prefix)
        for alias, own in _ALIASES.items():
            if rest.startswith(alias):
                rest = own + rest.removeprefix(alias)
        return CANONICAL + rest


def find_key_mapping(names: Iterable[str], problems: list[str]) -> KeyMapping:
    """Find how a file names the tensors of its language model.

    Args:
      names: of all its tensors.
      problems: takes a sentence where several prefixes hold layers or an embedding, or several
        heads are there: which one is meant is ambiguous.
    """
    names = list(names)
    prefixes: dict[str, str] = {}  # and the first tensor of each
    heads: dict[str, str] = {}
    for name in names:
        found = _TELLING.match(name)
        if found:
            prefixes.setdefault(found[1], name)
        for head in _HEADS:
            if name.startswith(head):
                heads.setdefault(head, name)
    for found in (prefixes, heads):
        if len(found) > 1:
            problems.append(
                f"ambiguous: {' and '.join(map(quoted, found.values()))} may both belong to the "
                "language model; expected one of these names"
            )
    return KeyMapping(next(iter(prefixes), CANONICAL), next(iter(heads), _HEAD))


def canonical_names(
    names: Iterable[str], key_mapping: KeyMapping, problems: list[str]
) -> dict[str, str]:
    """Return for each tensor of a file the name by which models ask for it.

    Args:
      names: of all tensors.
      key_mapping: of the file.
      problems: takes a sentence where two tensors come to have one name.
    """
    renamed: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in names:
        new = key_mapping.canonical(name)
        if new in owner:
            problems.append(
                f"ambiguous: {quoted(owner[new])} and {quoted(name)} mean {quoted(new)}"
            )
        owner[new] = name
        renamed[name] = new
    return renamed
