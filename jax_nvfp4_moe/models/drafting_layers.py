"""Read drafting layers: the names that files have for them, and how a `Drafter` is built.

Files store drafting layers in one of two forms:

* `MTP`, below ``mtp.``, in Qwen3-Next and its relatives, and in Nemotron-3;
* `BEHIND`, as layers behind those that ``num_hidden_layers`` counts, in DeepSeek-V3 and GLM.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_nvfp4_moe.models.decoder import (
    Architecture,
    DecoderLayer,
    build_parts,
    divide_vocabulary,
)
from jax_nvfp4_moe.models.drafter import Drafter
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import DRAFTER, KeyTable

DRAFTS = (None, "mtp")
# What wrappers of a language model may put before ``mtp.``.
_WRAPPERS = ("", "model.", "language_model.")
# The parts of which one is always stored.
_PARTS = ("joint", "embedding_norm", "hidden_norm")
# Path of a part of a drafter -> its name in the file. {first} stands for the index of the first
# drafting layer, and {last} for that of the last layer of the first drafter. The layers of further
# drafters follow.
MTP: Mapping[str, str] = {
    "joint": "mtp.fc",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "layers": "mtp.layers.*",
    "norm": "mtp.norm",
    "embedding": "mtp.embed_tokens.weight",
    "head": "mtp.lm_head",
    "further.*": "mtp.layers.*",
    "all": "mtp",
}
BEHIND: dict[str, str] = {
    "joint": "model.layers.{first}.eh_proj",
    "embedding_norm": "model.layers.{first}.enorm",
    "hidden_norm": "model.layers.{first}.hnorm",
    "layers": "model.layers.{first}",
    "norm": "model.layers.{first}.shared_head.norm",
    "embedding": "model.layers.{first}.embed_tokens.weight",
    "head": "model.layers.{first}.shared_head.head",
    "further.*": "model.layers.*",
    "all": "model.layers.{first}",
}


@dataclasses.dataclass(frozen=True)
class DraftForm:
    """How the files of an architecture store drafting layers, and how they are built.

    Attributes:
      names: path of a part -> its name in the file, `MTP`, `BEHIND` or a variant of them.
      build_layers: takes the sizes of the model and a `Builder`, and returns the decoder layers.
      centered: whether the norms in the file store ``weight - 1``.
      count: takes the sizes of the model and returns the number of decoder layers of a drafter.
      drafter: takes the sizes, the `Builder` and the arguments of `Drafter`, and returns a drafter.
        None, the default, makes a `Drafter`.
      joined: the number of vectors that the linear ``joint`` reads: an embedding, and by default
        also the model's vector.
    """

    names: Mapping[str, str]
    build_layers: Callable[[Any, Builder], Sequence[Any]]
    centered: bool = False
    count: Callable[[Any], int] = lambda config: 1
    drafter: Callable[..., Drafter] | None = None
    joined: int = 2

    def indices(self, config: Any) -> tuple[int, int]:
        """Return the indices that the first and the last layer of the drafter have in the file."""
        first = config.num_layers if self.names["layers"].startswith("model.") else 0
        return first, first + self.count(config) - 1

    def keys(self, model: KeyTable, config: Any) -> KeyTable:
        """Return the key table of the drafter.

        Args:
          model: the key table of the model, whose layers have the same parts.
          config: the sizes of the model.
        """
        first, last = self.indices(config)
        names = {part: name.format(first=first, last=last) for part, name in self.names.items()}
        stem = names.pop("layers")
        table = {
            path: [name.replace("model.layers.*", stem) for name in _each(found)]
            for path, found in model.items()
            if path.startswith("layers.")
        }
        table |= {part: [name] for part, name in names.items()}
        return {
            path: tuple(
                wrapper + name
                for wrapper, name in itertools.product(_WRAPPERS, found)
                if not wrapper or name.startswith("mtp.") or name == "mtp"
            )
            for path, found in table.items()
        }


def _each(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def one_layer(
    names: Mapping[str, str],
    build_attention: Callable[..., Any],
    build_moe: Callable[..., Any],
    *,
    centered: bool = False,
    dense: bool = False,
    **sizes: Any,
) -> DraftForm:
    """Return the form of drafting layers that are one `DecoderLayer`.

    Args:
      names: `MTP` or `BEHIND`.
      build_attention: makes the attention of a layer, as for `decoder.build_decoder`.
      build_moe: makes the expert block of a layer.
      centered: whether the norms in the file store ``weight - 1``.
      dense: whether the layer has a gated MLP, as all layers of a dense model. Otherwise it has
        experts.
      **sizes: fields of the sizes that differ for the drafting layer -> a function of the sizes of
        the model that returns the value.
    """

    def build_layers(config, make):
        changed = {name: change(config) for name, change in sizes.items()}
        if not dense:
            changed["dense_layers"] = frozenset()
        own = dataclasses.replace(config, num_layers=1, **changed)
        return [
            DecoderLayer(*build_parts(own, 0, make, build_attention, build_moe, centered=centered))
        ]

    return DraftForm(names, build_layers, centered)


def check_draft(draft: Any) -> None:
    """Check the argument `draft` of `load_model`.

    Raises:
      ValueError: it is neither None nor "mtp".
    """
    if draft in DRAFTS:
        return
    hint = ""
    if draft == "lookup":
        hint = ". Prompt lookup needs no layers of the file: pass it to `generate`"
    raise ValueError(f"draft: expected None or 'mtp', got {draft!r}{hint}")


def build_drafter(row: Architecture, config: Any, make: Builder) -> Drafter | None:
    """Make the drafter of a model, at the path `DRAFTER`.

    Problems with the file, such as missing drafting layers, are noted in `make`. None is then
    returned.

    Args:
      row: the architecture, which has a form of drafting layers.
      config: the sizes of the model.
      make: the builder of the model.
    """
    form: DraftForm = row.drafting
    # All families whose drafting layers stack their experts store outputs before inputs.
    keys = form.keys(row.keys, config)
    inner = make.inside(DRAFTER, keys, square_inputs_first=False)
    if not any(inner.holds(part) for part in _PARTS):
        looked = ", ".join(f"{inner.key(part)}.weight" for part in _PARTS)
        make.problem(
            f"draft='mtp': the file has no drafting layers; looked for {looked}. Load it without "
            "draft, or get a copy of the checkpoint that has them"
        )
        return None
    h = config.hidden
    inner.claim("all")
    layers = form.build_layers(config, inner)
    _leave_further(inner, form.indices(config)[1] + 1)

    def norm(path):
        return inner.norm(path, h, config.eps, centered=form.centered)

    parts = (
        norm("embedding_norm"),
        norm("hidden_norm"),
        inner.linear("joint", h, form.joined * h),
        layers,
        norm("norm"),
    )
    own = {
        "embedding": _own_embedding(config, make, inner),
        "head": _own_head(config, make, inner),
    }
    if form.drafter is None:
        return Drafter(*parts, **own)
    return form.drafter(config, inner, *parts, **own)


def _leave_further(inner: Builder, index: int) -> None:
    """Leave out the layers from `index` on, those of further drafters, and say so in the log."""
    while inner.holds(f"further.{index}"):
        inner.ignore(
            f"further.{index}",
            "tensors of further drafting layers left out: the first one is applied repeatedly",
        )
        index += 1


def _own_embedding(config, make, inner):
    """Return the drafter's embedding, or None if the file has none or the same as the model's."""
    if not inner.has("embedding"):
        return None
    if inner.same("embedding", make.key("embedding")):
        inner.ignore("embedding", "the embedding of the drafting layers equals that of the model")
        return None
    vocabulary, rows, _ = divide_vocabulary(config, inner)
    return vocabulary.variable("embedding", (rows, config.hidden))


def _own_head(config, make, inner):
    """Return the drafter's head, or None if the file has none or the same as the model's."""
    if not inner.holds("head"):
        return None
    of_model = f"{make.key('head')}.weight" if make.holds("head") else make.key("embedding")
    if inner.same("head", of_model):
        inner.ignore("head", "the head of the drafting layers equals that of the model")
        return None
    vocabulary, rows, _ = divide_vocabulary(config, inner)
    return vocabulary.linear("head", rows, config.hidden)
