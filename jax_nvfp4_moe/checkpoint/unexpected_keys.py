"""Find tensors that a checkpoint has but its model does not ask for.

Such a tensor is either a known extra, which is left out, or a problem.
"""

import re
from collections.abc import Iterator, Sequence

from jax_nvfp4_moe.checkpoint.cache_scales import find_part
from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.key_mapping import KeyMapping
from jax_nvfp4_moe.checkpoint.plan import Planner

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Tensors that published checkpoints contain, but that the language model does not need to run.
_KNOWN_EXTRAS = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        (r"(^|\.)mtp\.", "multi-token prediction"),
        (
            r"(^|\.)(visual|vision_tower|vision_model|vision_embed_tokens|vision_embedder)\.",
            "vision tower",
        ),
        (
            r"(^|\.)(multi_modal_projector|embed_vision|audio_tower|embed_audio)\.",
            "vision or audio",
        ),
        (r"(^|\.)rotary_emb\.inv_freq$", "rotary frequencies, which are computed"),
    )
)


def find_unexpected_keys(
    planner: Planner, key_mapping: KeyMapping, only: Sequence[str], num_layers: int | None
) -> Iterator[str]:
    """Yield a sentence for each tensor that nobody asked for in a module that is loaded.

    Args:
      planner: knows the tensors that were asked for. It receives notes about tensors that are left
        out.
      key_mapping: how the file spells the names of the language model's tensors.
      only: the modules to search. An empty sequence searches the whole checkpoint.
      num_layers: the number of layers in the config. Tensors of later layers are left out.
    """
    scopes = [f"{module}." for module in only] or [""]
    loaded = {name.split(".")[0] for name in planner.taken}
    for name in (name for scope in scopes for name in planner.tensors.under(scope)):
        if name in planner.taken:
            continue
        info = planner.tensors.info(name)
        extra = known_extra(name, num_layers)
        beside = name.split(".")[0] not in loaded or not key_mapping.owns(info.name)
        if extra is None and beside:
            extra = "modules outside of the language model"
        if extra is not None:
            planner.note(f"tensors left out: {extra}")
            continue
        yield f"{quoted(info.name)} ({quoted(info.file)}): {info} is not part of the model"


def known_extra(name: str, num_layers: int | None) -> str | None:
    """Return what kind of known extra the tensor `name` is, or None.

    Args:
      name: the canonical name of the tensor.
      num_layers: the number of layers in the config, or None.
    """
    if find_part(name) is not None:
        return "KV-cache scales"
    layer = _LAYER.search(name)
    if layer and num_layers is not None and int(layer[1]) >= num_layers:
        return f"layers beyond the {num_layers} that the config declares"
    return next((what for pattern, what in _KNOWN_EXTRAS if pattern.search(name)), None)
