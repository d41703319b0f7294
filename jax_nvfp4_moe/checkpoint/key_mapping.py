"""Map the tensor names of a file to the names by which models ask for tensors.

Models ask for ``model.layers.L...``, ``model.embed_tokens``, ``model.norm`` and ``lm_head``. Files
may put another prefix in place of ``model.``:

* ``model.language_model.`` in multimodal models,
* ``language_model.model.`` in older multimodal models,
* ``backbone.`` in Nemotron-H,
* nothing in DeepSeek-V4.

The tensor names in the file show which prefix it uses.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from jax_nvfp4_moe.checkpoint.errors import quoted

CANONICAL = "model."
# The prefixes that a language model may have. A regular expression takes the first that matches,
# so that a longer prefix must come before its own beginning.
PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.backbone.",
    "language_model.",
    "backbone.",
    CANONICAL,
)
_HEAD = "lm_head."
_SHORT_HEAD = "head."  # of DeepSeek-V4
_HEADS = (_HEAD, *(f"{prefix}{_HEAD}" for prefix in PREFIXES), _SHORT_HEAD)
# Names that follow the prefix, and the name that all other models use: those of Nemotron-H, and
# that of DeepSeek-V4's embedding.
_ALIASES: Mapping[str, str] = {
    "embeddings.": "embed_tokens.",
    "embedding.": "embed_tokens.",
    "norm_f.": "norm.",
    "embed.": "embed_tokens.",
}
# Stacked experts that a file names otherwise: those of Granite, as published.
_STACKED: Mapping[str, str] = {
    ".block_sparse_moe.input_linear.": ".block_sparse_moe.experts.gate_up_proj.",
    ".block_sparse_moe.output_linear.": ".block_sparse_moe.experts.down_proj.",
}
# Only layers and the embedding identify the language model: a vision tower may have a norm too.
_TELLING = re.compile(
    f"({'|'.join(map(re.escape, PREFIXES))}|)(?:layers\\.\\d+|embed_tokens|embed(?:dings?)?)\\."
)


@dataclasses.dataclass(frozen=True)
class KeyMapping:
    """How one file spells the names of the language model's tensors.

    Attributes:
      prefix: the text that the file has in place of "model.".
      head: the text that the file has in place of "lm_head.".
    """

    prefix: str = CANONICAL
    head: str = _HEAD

    @property
    def head_module(self) -> str:
        """The name of the head in quantization configs, in which DeepSeek-V4's is "lm_head"."""
        return (_HEAD if self.head == _SHORT_HEAD else self.head).removesuffix(".")

    def owns(self, name: str) -> bool:
        """Return whether the tensor `name` of the file belongs to the language model."""
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
        for other, own in _STACKED.items():
            if other in rest:
                rest = rest.replace(other, own).removesuffix(".weight")
        return CANONICAL + rest

    def stored(self, module: str) -> str:
        """Return the name in the file of a module that models ask for, such as an expert block."""
        return self.prefix + module.removeprefix(CANONICAL)


def find_key_mapping(names: Iterable[str], problems: list[str]) -> KeyMapping:
    """Find how a file spells the names of its language model's tensors.

    Args:
      names: the names of all tensors in the file.
      problems: receives a sentence if the file is ambiguous: several prefixes have layers or an
        embedding, or there are several heads.
    """
    names = list(names)
    prefixes: dict[str, str] = {}  # prefix -> the first tensor that has it
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
                "language model; expected only one of these names"
            )
    return KeyMapping(next(iter(prefixes), CANONICAL), next(iter(heads), _HEAD))


def canonical_names(
    names: Iterable[str], key_mapping: KeyMapping, problems: list[str]
) -> dict[str, str]:
    """Return a mapping of a file's tensor names to the names by which models ask for them.

    Args:
      names: the names of all tensors in the file.
      key_mapping: how the file spells names.
      problems: receives a sentence for each pair of tensors that map to the same name.
    """
    renamed: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in names:
        new = key_mapping.canonical(name)
        if new in owner:
            problems.append(
                f"ambiguous: {quoted(owner[new])} and {quoted(name)} both mean {quoted(new)}"
            )
        owner[new] = name
        renamed[name] = new
    return renamed
