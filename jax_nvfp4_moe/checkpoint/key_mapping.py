"""Map the tensor names of a file to the names by which models ask for tensors.

Models ask for ``model.layers.L...``, ``model.embed_tokens``, ``model.norm`` and ``lm_head``. Files
may put another prefix in place of ``model.``:

* ``model.language_model.`` in multimodal models,
* ``language_model.model.`` in older multimodal models,
* ``backbone.`` in Nemotron-H,
* nothing in DeepSeek-V4,
* any sequence of such parts. Tools that save a part of a wrapped model may repeat parts, as in
  ``model.language_model.language_model.``.

The tensor names in the file show which prefix it uses.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.names import (
    ALIASES,
    CANONICAL,
    PARTS,
    PREFIXES,
    PROJECTION_OF,
    PROJECTIONS,
    SPELLINGS,
    STACKED,
    WRAPPERS,
)

_HEAD = "lm_head."
_SHORT_HEAD = "head."  # of DeepSeek-V4
_PREFIX = rf"((?:(?:{'|'.join(PARTS)})\.)*)"
# Only layers and the embedding identify the language model: a vision tower may have a norm too.
_TELLING = re.compile(_PREFIX + r"(?:layers\.\d+|embed_tokens|embed(?:dings?)?)\.")
_TELLING_HEAD = re.compile(rf"({_PREFIX}lm_head\.|head\.)")
_EXPERTS = ".experts."
_ALIASES = tuple(ALIASES)
_PROJECTION = re.compile(rf"(\.experts\.\d+)\.({'|'.join(PROJECTION_OF)})(?=\.|$)")
_LAYER = re.compile(r"(.*?\.)layers\.\d+\.")
# In the names and patterns of a quantization config: a wrapper first, and a part that is repeated.
# A pattern has a backslash before the dot.
_WRAPPED = re.compile(rf"^(re:\^?)?(?:(?:{'|'.join(WRAPPERS)})\\?\.)+")
_REPEATED = re.compile(r"\b(language_model|model)(\\?\.)(?:\1\\?\.)+")
_COMPOSED = re.compile(
    rf"^(re:\^?)?((?:(?:{'|'.join(PARTS)})(\\?\.))+)(?=layers|embed|norm|lm_head)"
)


@dataclasses.dataclass(frozen=True)
class KeyMapping:
    """How one file spells the names of the language model's tensors.

    Attributes:
      prefix: the text that the file has in place of "model.".
      head: the text that the file has in place of "lm_head.".
      projections: the names of one expert's gate, up and down projections.
    """

    prefix: str = CANONICAL
    head: str = _HEAD
    projections: tuple[str, str, str] = PROJECTIONS

    @property
    def head_module(self) -> str:
        """The name of the head in quantization configs, in which DeepSeek-V4's is "lm_head"."""
        return (_HEAD if self.head == _SHORT_HEAD else self.head).removesuffix(".")

    def owns(self, name: str) -> bool:
        """Return whether the tensor `name` of the file belongs to the language model."""
        return name.startswith((self.prefix, self.head))

    def canonical(self, name: str) -> str:
        """Return the name by which models ask for the tensor `name` of the file."""
        if self.projections != PROJECTIONS:
            name = _respell(name, PROJECTION_OF)
        if name.startswith(self.head):
            return _HEAD + name.removeprefix(self.head)
        if not name.startswith(self.prefix):
            return name
        rest = name.removeprefix(self.prefix)
        if rest.startswith(_ALIASES):
            rest = _without_alias(rest)
        for other, own in STACKED.items():
            if other in rest:
                rest = rest.replace(other, own).removesuffix(".weight")
        return CANONICAL + rest

    def spell(self, name: str) -> str:
        """Return a name with the projections of experts as the file spells them."""
        if self.projections == PROJECTIONS:
            return name
        return _respell(name, dict(zip(PROJECTIONS, self.projections, strict=True)))

    def stored(self, module: str) -> str:
        """Return the name in the file of a module that models ask for, such as an expert block."""
        return self.prefix + module.removeprefix(CANONICAL)


def _without_alias(name) -> str:
    """Return a name that begins with one of `ALIASES`, as models ask for it."""
    for alias, own in ALIASES.items():
        if name.startswith(alias):
            name = own + name.removeprefix(alias)
    return name


def _respell(name, spelled: Mapping[str, str]) -> str:
    """Return a name with the projection of an expert, if it has one, under another name."""
    return _PROJECTION.sub(lambda found: f"{found[1]}.{spelled.get(found[2], found[2])}", name)


def find_key_mapping(names: Iterable[str], problems: list[str]) -> KeyMapping:
    """Find how a file spells the names of its language model's tensors.

    Args:
      names: the names of all tensors in the file.
      problems: receives a sentence if the file is ambiguous: several prefixes have layers or an
        embedding, or there are several heads. It also receives one if layers have an unknown
        prefix alone.
    """
    names = list(names)
    prefixes: dict[str, str] = {}  # prefix -> the first tensor that has it
    heads: dict[str, str] = {}
    spelled = PROJECTIONS
    for name in _without_alike(names):
        if found := _TELLING.match(name):
            prefixes.setdefault(found[1], name)
        if found := _TELLING_HEAD.match(name):
            heads.setdefault(found[1], name)
        if spelled is PROJECTIONS and (found := _PROJECTION.search(name)):
            spelled = next(one for one in SPELLINGS if found[2] in one)
    for found in (prefixes, heads):
        if len(found) > 1:
            problems.append(
                f"ambiguous: {' and '.join(map(quoted, found.values()))} may both belong to the "
                "language model; expected only one of these names"
            )
    if not prefixes:
        problems += _unknown_prefixes(names)
    return KeyMapping(next(iter(prefixes), CANONICAL), next(iter(heads), _HEAD), spelled)


def _without_alike(names: Iterable[str]) -> Iterable[str]:
    """Return `names` with only the first of those that differ in the number of an expert alone.

    A file has tens of thousands of names, and some hundred of them without the numbers.
    """
    first: dict[tuple[str, ...], str] = {}
    for name in names:
        head, _, rest = name.partition(_EXPERTS)
        number, _, leaf = rest.partition(".")
        first.setdefault((head, leaf) if number.isdecimal() else (name,), name)
    return first.values()


def _unknown_prefixes(names) -> list[str]:
    """Return a sentence about the prefixes that a file has in place of a known one, if it has any.

    Without it, each tensor of the model would be reported as missing.
    """
    found = (_LAYER.match(name) for name in names)
    prefixes = list(dict.fromkeys(match[1] for match in found if match))
    if not prefixes:
        return []
    listed = ", ".join(quoted(f"{prefix}layers.") for prefix in prefixes[:3])
    more = f" and {len(prefixes) - 3} more" if len(prefixes) > 3 else ""
    return [
        f"no tensor has the name of a language model's layer: expected {quoted('model.layers.')}, "
        f"or the parts {', '.join(PARTS)} before {quoted('layers.')}; the file has {listed}{more}"
    ]


def plain_prefix(name: str) -> str:
    """Return a name or pattern of a quantization config without wrappers and repeated parts.

    For example, ``model.language_model.language_model.layers.0`` becomes
    ``model.language_model.layers.0``.
    """
    name = _REPEATED.sub(r"\1\2", _WRAPPED.sub(lambda match: match[1] or "", name))

    def known(match):
        plain = match[2].replace("\\", "") in PREFIXES
        return match[0] if plain else f"{match[1] or ''}model{match[3]}"

    return _COMPOSED.sub(known, name)


def canonical_names(
    names: Iterable[str], key_mapping: KeyMapping, problems: list[str]
) -> dict[str, str]:
    """Return a mapping of a file's tensor names to the names by which models ask for them.

    Args:
      names: the names of all tensors in the file.
      key_mapping: how the file spells names.
      problems: receives a sentence for each pair of tensors that map to the same name.
    """
    names = list(names)
    if key_mapping == KeyMapping() and all(
        key_mapping.canonical(name) == name for name in _without_alike(names)
    ):
        return dict(zip(names, names, strict=True))
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
