"""Find tensors that a checkpoint has but its model does not ask for.

Such a tensor is either a known extra, which is left out, or a problem.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.checkpoint.key_mapping import KeyMapping
from jax_nvfp4_moe.checkpoint.names import CANONICAL
from jax_nvfp4_moe.checkpoint.safetensors import Tensors
from jax_nvfp4_moe.checkpoint.weights.cache_scales import find_part
from jax_nvfp4_moe.checkpoint.weights.finder import Finder

_LAYER = re.compile(re.escape(CANONICAL) + r"layers\.(\d{1,9})\.")
_BELOW_MTP = re.compile(r"(?:^|\.)mtp\.(?:(?:layers\.)?(\d{1,9})\.)?")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head."
# Names in a config for the number of layers that predict further tokens. They follow the others.
_DRAFTING = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "num_mtp_modules",
    "mtp_num_layers",
    "mtp_num_hidden_layers",
)
_DRAFTS, _TOWER, _PROJECTOR = "multi-token prediction", "vision tower", "vision or audio"
# Inside of a layer of the language model, such a name would be a part of the layer.
_OF_OTHER_MODULES = (_DRAFTS, _TOWER, _PROJECTOR)
# Tensors that published checkpoints contain, but that the language model does not need to run.
_KNOWN_EXTRAS = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        (r"(^|\.)mtp\.", _DRAFTS),
        (
            r"(^|\.)(visual|vision_tower|vision_model|vision_embed_tokens|vision_embedder)\.",
            _TOWER,
        ),
        (r"(^|\.)(multi_modal_projector|embed_vision|audio_tower|embed_audio)\.", _PROJECTOR),
        (r"(^|\.)rotary_emb\.inv_freq$", "rotary frequencies, which are computed"),
    )
)


def find_unexpected_keys(
    finder: Finder,
    key_mapping: KeyMapping,
    only: Sequence[str],
    num_layers: int | None,
    drafting: int = 0,
) -> Iterator[str]:
    """Yield a sentence for each tensor that nobody asked for in a module that is loaded.

    Args:
      finder: knows the tensors that were asked for. It receives notes about tensors that are left
        out, and warnings about those that the config gives no reason to leave out.
      key_mapping: how the file spells the names of the language model's tensors.
      only: the modules to search. An empty sequence searches the whole checkpoint.
      num_layers: the number of layers in the config. Tensors of later layers are left out.
      drafting: the number of layers after those that predict further tokens.
    """
    scopes = [f"{module}." for module in only] or [""]
    names = [name for scope in scopes for name in finder.tensors.under(scope)]
    unasked = [name for name in names if name not in finder.taken]
    loaded = {name.partition(".")[0] for name in finder.taken} if unasked else set()
    for name in unasked:
        info = finder.tensors.info(name)
        inside = name.startswith(tuple(finder.claimed))
        extra = known_extra(name, None if inside else num_layers)
        if inside and extra in _OF_OTHER_MODULES:
            extra = None
        beside = not inside and _is_beside(name, info, loaded, key_mapping)
        if extra is None and beside and _may_be_head(finder, info):
            yield (
                f"{quoted(info.name)} ({quoted(info.file)}): {info} has the shape of an output "
                "head, but the name is not known; expected lm_head.weight"
            )
            continue
        if extra is None and beside:
            extra = "modules outside of the language model"
        if extra is None:
            yield f"{quoted(info.name)} ({quoted(info.file)}): {info} is not part of the model"
        elif num_layers is not None and _own_layer(name) >= num_layers + drafting:
            finder.warn(
                "layers left out",
                f"layers.{_own_layer(name)}",
                f"{quoted(info.name)} is left out: it belongs to the {extra}, and to none of the "
                f"{drafting} drafting layers ({_DRAFTING[0]})",
            )
        else:
            finder.note(f"tensors left out: {extra}")


def _is_beside(name, info, loaded, key_mapping) -> bool:
    """Return whether a tensor belongs to a module that is not loaded."""
    return name.split(".")[0] not in loaded or not key_mapping.owns(info.name)


def _may_be_head(finder, info) -> bool:
    """Return whether a tensor may be an output head, which has no other tensor in the file."""
    embedding = finder.find(_EMBEDDING)
    asked = _EMBEDDING in finder.taken and next(finder.tensors.under(_HEAD), None) is None
    return asked and embedding is not None and info.shape == embedding.shape


def _own_layer(name) -> int:
    """Return the index of the language model's layer that a tensor belongs to; -1 for none."""
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def known_extra(name: str, num_layers: int | None) -> str | None:
    """Return what kind of known extra the tensor `name` is, or None.

    Args:
      name: the canonical name of the tensor.
      num_layers: the number of layers in the config, or None.
    """
    if find_part(name) is not None:
        return "KV-cache scales"
    layer = _own_layer(name)
    for pattern, what in _KNOWN_EXTRAS:
        if pattern.search(name) and not (layer >= 0 and what in _OF_OTHER_MODULES):
            return what
    if num_layers is not None and layer >= num_layers:
        return f"layers beyond the {num_layers} that the config declares"
    return None


def find_drafting_layers(tensors: Tensors, num_layers: int | None) -> tuple[int, list[str]]:
    """Return how many drafting layers a file holds, and the names of all their tensors.

    They are what stands below ``mtp.``, and the layers behind those of the config of which one
    joins embeddings and vectors.

    Args:
      tensors: the tensors of the file.
      num_layers: the number of layers in the config, or None.
    """
    below = [name for name in tensors.names() if _BELOW_MTP.search(name)]
    layers = {found[1] for name in below if (found := _BELOW_MTP.search(name))}
    behind = [
        name
        for name in tensors.names()
        if num_layers is not None and _own_layer(name) >= num_layers
    ]
    joining = {_own_layer(name) for name in behind if ".eh_proj." in name}
    behind = [name for name in behind if _own_layer(name) in joining]
    numbered = layers - {None}
    return (len(numbered) or len(layers)) + len(joining), below + behind


def count_drafting_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers of a parsed ``config.json`` predict further tokens."""
    config = merge_text_config(config)
    counts = [config.get(name) for name in _DRAFTING]
    return max((count for count in counts if type(count) is int), default=0)
